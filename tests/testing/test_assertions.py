"""The assertions: what they accept, and that a failing one can be understood."""

from __future__ import annotations

import attrs
import durable_actors as da
import pytest
from durable_actors.testing import ANY, Bench
from durable_actors.testing.matching import matches, same
from tests.testing.shop import Checkout, DeclinedError, Order, mail


@attrs.frozen
class Thing:
    a: int
    b: int = 2


@pytest.mark.parametrize(
    ("expected", "actual", "partly", "wholly"),
    [
        (ANY, None, True, True),
        ({"a": 1}, {"a": 1, "b": 2}, True, False),
        ({"a": {"x": 1}}, {"a": {"x": 1, "y": 2}}, True, False),
        ({"a": 1}, {"b": 1}, False, False),
        ({"a": ANY}, {"a": 5}, True, True),
        ([{"a": 1}], [{"a": 1, "b": 2}], True, False),
        ([1], [1, 2], False, False),
        ((1, 2), [1, 2], True, True),
        (Thing(1), {"a": 1, "b": 2}, True, True),
        (Thing(1), {"a": 1, "b": 3}, False, False),
        ("x", "x", True, True),
        (1, "1", False, False),
        (None, {}, False, False),
    ],
)
def test_matching(expected: object, actual: object, partly: bool, wholly: bool) -> None:
    assert matches(expected, actual) is partly
    assert same(expected, actual) is wholly


async def test_inserted(durable: Bench) -> None:
    first = await durable.insert(Checkout, state=Order(1), unique_key="o:1", priority=3)
    second = await durable.insert(Checkout, state=Order(2), queue="other", tags=["vip"])
    assert (await durable.assert_inserted(Checkout)).id == second
    assert (await durable.assert_inserted(Checkout, state=Order(1), unique_key="o:1", priority=3)).id == first
    assert (
        await durable.assert_inserted("shop:Checkout", state={"order": 2}, queue="other", tags=["vip"])
    ).id == second
    with pytest.raises(
        AssertionError, match=r"no instance of shop:mail was inserted; there are instances of shop:Check"
    ):
        await durable.assert_inserted(mail)
    with pytest.raises(AssertionError) as info:
        await durable.assert_inserted(Checkout, state={"order": 3}, queue="other")
    assert str(info.value).splitlines() == [
        "no instance of shop:Checkout has state={'order': 3}, queue='other'; there are",
        f"  {second}: runnable, queue 'other', state {{'paid': False, 'order': 2}}",
        f"  {first}: runnable, queue 'default', state {{'paid': False, 'order': 1}}",
    ]


async def test_done(durable: Bench) -> None:
    number = await durable.insert(mail, args={"to": "ada"}, unique_key="k")
    with pytest.raises(AssertionError) as info:
        await durable.assert_done(number)
    assert str(info.value).splitlines()[:2] == [
        f"instance {number} is not done, but runnable",
        f"shop:mail {number}: it is due and waits for a free slot: 1 live node serves queue 'mail'",
    ]
    await durable.drain()
    assert (await durable.assert_done("k", "mailed ada")).id == number
    await durable.assert_done(number)
    with pytest.raises(AssertionError, match=r"the result of instance \d+ is 'mailed ada', not 'x'"):
        await durable.assert_done(number, "x")


async def test_failed(durable: Bench) -> None:
    number = await durable.insert(mail, args={"bad": True})
    with pytest.raises(AssertionError, match="has not failed: it is runnable"):
        await durable.assert_failed(number)
    for _ in range(3):
        await durable.drain()
        await durable.advance("1h")
    await durable.assert_failed(number)
    await durable.assert_failed(number, "no such address")
    await durable.assert_failed(number, DeclinedError)
    await durable.assert_failed(number, Exception)
    with pytest.raises(AssertionError, match="does not contain 'timeout'"):
        await durable.assert_failed(number, "timeout")
    with pytest.raises(AssertionError, match="not of ValueError") as info:
        await durable.assert_failed(number, ValueError)
    text = str(info.value)
    assert "error    " in text
    assert "step 'perform', attempt 2 → Stop" in text
    assert 'raise DeclinedError("no such address")' in text  # the traceback
    with pytest.raises(AssertionError, match="is not done, but failed"):
        await durable.assert_done(number)


async def test_waiting(durable: Bench) -> None:
    number = await durable.insert(Checkout, state=Order(1))
    await durable.assert_waiting(number)
    await durable.drain()
    await durable.assert_waiting(number, signal="confirmed", step="charge")
    with pytest.raises(AssertionError, match="does not await a signal named 'paid'"):
        await durable.assert_waiting(number, signal="paid")
    with pytest.raises(AssertionError, match="runs step 'charge' next, not 'ship'"):
        await durable.assert_waiting(number, step="ship")
    await durable.signal(number, "confirmed")
    with pytest.raises(AssertionError, match="does not await a signal named 'confirmed'"):
        await durable.assert_waiting(number, signal="confirmed")
    await durable.drain()
    with pytest.raises(AssertionError, match="does not wait: it is done"):
        await durable.assert_waiting(number)


@pytest.mark.usefixtures("registry")
async def test_waiting_for_a_person(durable: Bench) -> None:
    class Refund(da.Machine, name="refund"):
        @da.step
        async def start(self, ctx: da.Context) -> da.Outcome:
            return da.Approval(self.pay)

        @da.step
        async def pay(self, ctx: da.Context) -> da.Outcome:
            return da.Await("paid")

    number = await durable.insert(Refund)
    await durable.drain()
    await durable.assert_waiting(number, waiting="approval", step="pay")
    with pytest.raises(AssertionError, match="does not wait for 'signal'"):
        await durable.assert_waiting(number, waiting="signal")
    with pytest.raises(da.ConfigError, match="waiting='person' must be"):
        await durable.assert_waiting(number, waiting="person")  # type: ignore[arg-type]
    await durable.approve(number, by="ada")
    await durable.drain()
    await durable.assert_waiting(number, waiting="signal", signal="paid")


async def test_sent(durable: Bench) -> None:
    number = await durable.insert(Checkout, state=Order(1))
    await durable.drain()
    await durable.signal(number, "confirmed", {"by": "ada", "at": 3})
    await durable.drain()
    await durable.assert_done(number)  # its inbox is gone
    await durable.assert_sent(number, "confirmed")
    await durable.assert_sent(number, "confirmed", {"by": "ada"})
    with pytest.raises(
        AssertionError, match=r"no signal 'confirmed' with .* was sent .*; sent was 'confirmed' with"
    ):
        await durable.assert_sent(number, "confirmed", {"by": "eve"})
    with pytest.raises(AssertionError, match="no signal 'paid' was sent"):
        await durable.assert_sent(number, "paid")


async def test_a_missing_target_is_told(durable: Bench) -> None:
    for check in (durable.assert_done, durable.assert_failed, durable.assert_waiting):
        with pytest.raises(da.NoTarget):
            await check(99)


async def test_an_instance_that_its_commit_has_deleted(durable: Bench) -> None:
    @da.job(name="brief", keep=0)
    async def brief() -> int:
        return 1

    number = await durable.insert(brief)
    await durable.drain()
    for call in (durable.assert_done(number, 1), durable.result(number)):
        with pytest.raises(
            da.NoTarget, match=f"instance {number} was done, and its row is deleted: by keep=0"
        ):
            await call
    with pytest.raises(da.NoTarget, match="there is no instance"):
        await durable.assert_done(number + 1)
