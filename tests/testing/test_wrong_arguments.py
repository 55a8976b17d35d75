"""A bench refuses what would silently run nothing, or something that cannot be."""

from __future__ import annotations

from typing import Any

import durable_actors as da
import pytest
import trio
from durable_actors.testing import Bench
from tests.testing.shop import Checkout, Order, mail
from trio.testing import MockClock

pytest_plugins = ["pytester"]


@pytest.mark.parametrize("attempt", [-1, "x", 1.5, True])
async def test_attempts_are_numbers(durable: Bench, attempt: Any) -> None:
    with pytest.raises(da.ConfigError, match="attempt="):
        await durable.run_step(mail, {"to": "x"}, attempt=attempt)


@pytest.mark.parametrize("children", [[1], "abc", [None]])
async def test_children_are_views(durable: Bench, children: Any) -> None:
    with pytest.raises(da.ConfigError, match="children must be instances of ChildView"):
        await durable.run_step(mail, {"to": "x"}, children=children)


async def test_a_drain_of_nobody_is_refused(durable: Bench) -> None:
    number = await durable.insert(mail, args={"to": "x"}, unique_key="mail:1")
    other = await durable.insert(mail, args={"to": "y"})
    with pytest.raises(da.NoTarget, match="there is no instance 99"):
        await durable.drain(only=99)
    for only in ("nosuchqueue", b"mail:2"):
        with pytest.raises(da.NoTarget, match="neither a queue nor a unique key"):
            await durable.drain(only=only)
    assert [ran.id for ran in (await durable.drain(only="mail:1")).ran] == [number]
    await durable.drain(only=number)
    assert [ran.id for ran in (await durable.drain(only=mail.__durable__.queue)).ran] == [other]


async def test_a_step_that_is_waited_for_is_named_by_itself(durable: Bench) -> None:
    number = await durable.insert(Checkout, state=Order(1))
    await durable.drain()
    await durable.assert_waiting(number, step=Checkout.charge)
    with pytest.raises(AssertionError, match="runs step 'charge' next, not 'ask'"):
        await durable.assert_waiting(number, step=Checkout.ask)


async def test_a_result_that_does_not_come_says_why(durable: Bench) -> None:
    number = await durable.insert(Checkout, state=Order(1), unique_key="k")
    await durable.drain()
    for target, named in ((number, f"instance {number}"), ("k", "the instance with unique key 'k'")):
        with pytest.raises(
            trio.TooSlowError, match=rf"{named} has not ended within 0.05 s: it awaits a signal"
        ):
            await durable.result(target, timeout=0.05)


async def test_a_signal_to_nobody_says_why(durable: Bench) -> None:
    number = await durable.insert(mail, args={"to": "x"})
    await durable.drain()
    with pytest.raises(da.NoTarget, match=f"signal 'x': instance {number} has ended: done"):
        await durable.signal(number, "x")
    with pytest.raises(da.NoTarget, match="signal 'x': there is no instance 99"):
        await durable.signal(99, "x")


def test_two_prepares_in_one_run_are_refused(pytester: pytest.Pytester) -> None:
    """The template is made once, by whoever comes first: the other one would be ignored without a word."""
    pytester.makepyfile(
        test_one="async def test_one(durable): ...",
        test_two="""
            import pytest

            @pytest.fixture(scope="session")
            def durable_prepare():
                return print

            async def test_two(durable): ...
        """,
    )
    result = pytester.runpytest_inprocess("--collect-only", "-p", "durable_actors.testing.plugin")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(
        ["*durable_prepare fills one template*test_two*Override it in the conftest.py*"]
    )
    assert pytester.runpytest_inprocess("--collect-only", "test_two.py").ret == 0


def test_a_clock_that_jumps_is_refused(durable: Bench) -> None:
    async def insert() -> None:
        await durable.insert(mail, args={"to": "x"})

    async def drain() -> None:
        await durable.drain()

    for call in (insert, drain):
        with pytest.raises(da.ConfigError, match="autojump_clock"):
            trio.run(call, clock=MockClock(autojump_threshold=0))
