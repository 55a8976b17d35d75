"""`Bench.run_step`: one step with a real context, whose outcome is returned."""

from __future__ import annotations

import dataclasses
from typing import Any

import attrs
import durable_actors as da
import psycopg
import pytest
from durable_actors.testing import Bench
from tests.testing import shop
from tests.testing.shop import Checkout, DeclinedError, Order, mail


def count(durable: Bench) -> int:
    with psycopg.connect(durable.dsn) as conn:
        [(found,)] = conn.execute("select count(*) from durable.gen_durable").fetchall()
        return found


async def test_the_outcome_is_returned_and_nothing_committed(durable: Bench) -> None:
    outcome = await durable.run_step(Checkout.charge, Order(7), signals=["confirmed"])
    assert outcome == da.Next(Checkout.ship, Order(7, paid=True))
    assert list(shop.bank.charges.values()) == [7]
    assert await durable.run_step(Checkout.charge, Order(7)) == da.Stop("nobody confirmed the order")
    assert await durable.run_step(Checkout.ship, Order(7)) == da.Done({"shipped": 7, "paid": False})
    assert await durable.run_step(mail, {"to": "ada"}) == da.Done("mailed ada")
    assert count(durable) == 0
    assert not durable.ran


async def test_what_the_step_inserts_and_sends_is_there(durable: Bench) -> None:
    target = await durable.insert(Checkout, state=Order(1))

    class Sender(da.Machine, name="sender"):
        @da.step
        async def start(self, ctx: da.Context) -> da.Outcome:
            await ctx.signal(target, "confirmed", {"by": "step", "n": 1})
            child = await ctx.start_child(mail, key="a", args={"to": "child"})
            return da.Done([child, await da.insert(mail, args={"to": "helper"})])

    outcome = await durable.run_step(Sender.start)
    await durable.assert_sent(target, "confirmed", {"by": "step"})
    child = await durable.assert_inserted(mail, state={"to": "child"}, queue="mail")
    helper = await durable.assert_inserted(mail, state={"to": "helper"})
    assert outcome == da.Done([child.id, helper.id])
    assert await durable.run_step(Checkout.ask, Order(9)) == da.Await(
        "confirmed", then=Checkout.charge, timeout=3 * 86400
    )
    await durable.assert_inserted(mail, state={"to": "order-9"})


async def test_the_context_is_a_real_one(durable: Bench) -> None:
    seen: dict[str, Any] = {}

    class Looks(da.Machine[dict[str, Any]], name="looks", version=4):
        @da.step(initial=True)
        async def start(self, ctx: da.Context[dict[str, Any]]) -> da.Outcome:
            seen.update(
                machine=ctx.machine, version=ctx.version, step=ctx.step, attempt=ctx.attempt, state=ctx.state,
                awaited=[(each.name, each.payload) for each in ctx.awaited],
                signals=[(each.name, each.payload) for each in ctx.signals],
                inbox=[each.name async for each in ctx.iter_signals()],
                children=[child.result for child in ctx.children], counts=dict(ctx.children_counts),
                key=ctx.idempotency_key.endswith("/start"),
            )  # fmt: skip
            return da.Await(["a"], {"n": (1, 2)}, consume=[ctx.signals[0]])

    outcome = await durable.run_step(
        Looks.start,
        {"t": (1, 2)},
        signals=[("a", {"x": 1}), "a"],
        inbox=[da.Signal(0, "b", 5)],
        children=[da.ChildView(1, "shop:mail", "done", "ok"), da.ChildView(2, "shop:mail", "failed")],
        attempt=2,
    )
    assert seen == {
        "machine": "looks", "version": 4, "step": "start", "attempt": 2, "state": {"t": [1, 2]},
        "awaited": [("a", {"x": 1}), ("a", None)], "signals": [("a", {"x": 1}), ("a", None), ("b", 5)],
        "inbox": ["a", "a", "b"], "children": ["ok", None], "counts": {"done": 1, "failed": 1}, "key": True,
    }  # fmt: skip
    assert outcome.state == {"n": [1, 2]}  # as the next step would read it


async def test_errors_reach_the_test_or_handle(durable: Bench) -> None:
    shop.bank.down = True
    with pytest.raises(ConnectionError, match="the bank is down"):
        await durable.run_step(Checkout.charge, Order(1), signals=["confirmed"])
    retry = await durable.run_step(Checkout.charge, Order(1), signals=["confirmed"], handle=True)
    assert retry == da.Retry(delay=60)
    last = await durable.run_step(Checkout.charge, Order(1), signals=["confirmed"], attempt=3, handle=True)
    assert isinstance(last, da.Stop)
    assert isinstance(last.reason, ConnectionError)
    with pytest.raises(DeclinedError):
        await durable.run_step(mail, {"bad": True})
    assert isinstance(await durable.run_step(mail, {"bad": True}, handle=True), da.Retry)
    assert isinstance(await durable.run_step(mail, {"bad": True}, attempt=2, handle=True), da.Stop)
    assert isinstance(
        await durable.run_step(mail, {"to": "x"}, attempt=3), da.Stop
    )  # it does not run any more
    assert count(durable) == 0


async def test_what_an_engine_refuses_is_refused(durable: Bench) -> None:
    @dataclasses.dataclass
    class Typed:
        n: int

    class Wrong(da.Machine[Typed], name="wrong"):
        @da.step(initial=True)
        async def none(self, ctx: da.Context[Typed]) -> da.Outcome:
            return None  # type: ignore[return-value]

        @da.step
        async def text(self, ctx: da.Context[Typed]) -> da.Outcome:
            return da.Next("none", "no state")

        @da.step
        async def unknown(self, ctx: da.Context[Typed]) -> da.Outcome:
            return da.Next("nowhere")

        @da.step
        async def exits(self, ctx: da.Context[Typed]) -> da.Outcome:
            raise SystemExit(3)

    with pytest.raises(da.InvalidOutcome, match="was a `return` forgotten"):
        await durable.run_step(Wrong.none, Typed(1))
    with pytest.raises(da.StateError):
        await durable.run_step(Wrong.text, Typed(1))
    with pytest.raises(da.InvalidOutcome, match="unknown step 'nowhere'"):
        await durable.run_step(Wrong.unknown, Typed(1))
    with pytest.raises(da.StateError):
        await durable.run_step(Wrong.none, {"n": "text"})
    with pytest.raises(SystemExit):
        await durable.run_step(Wrong.exits, Typed(1))
    assert count(durable) == 0


async def test_steps_of_a_base_class_need_their_machine(durable: Bench) -> None:
    class Base(da.Machine[Order]):
        @da.step
        async def start(self, ctx: da.Context[Order]) -> da.Outcome:
            return da.Done(type(self).__name__)

    class One(Base, name="one"):
        @da.step
        async def other(self, ctx: da.Context[Order]) -> da.Outcome:
            return da.Done()

    assert await durable.run_step(Base.start, Order(1), machine=One) == da.Done("One")
    assert await durable.run_step("start", Order(1), machine=One) == da.Done("One")
    for wrong in ("start", Order, lambda: None, 3):
        with pytest.raises(da.ConfigError, match="is not a step"):
            await durable.run_step(wrong, Order(1))
    with pytest.raises(da.ConfigError, match="a signal is given as a name"):
        await durable.run_step(Checkout.charge, Order(1), signals=[3])


async def test_children_are_checked_as_they_are_scheduled(durable: Bench) -> None:
    class Parent(da.Machine, name="parent"):
        @da.step(initial=True)
        async def start(self, ctx: da.Context) -> da.Outcome:
            children = [da.Child(mail, args={"to": n}) for n in range(ctx.state["n"])]
            return da.ScheduleChildren(self.end, children, {"n": attrs.asdict(Order(1))})

        @da.step
        async def end(self, ctx: da.Context) -> da.Outcome:
            return da.Done()

        @da.step
        async def bad(self, ctx: da.Context) -> da.Outcome:
            return da.ScheduleChildren(self.end, [da.Child(mail, args=object())])

    outcome = await durable.run_step(Parent.start, {"n": 2})
    assert isinstance(outcome, da.ScheduleChildren)
    assert len(outcome.children) == 2
    assert outcome.state == {"n": {"order": 1, "paid": False}}
    with pytest.raises(da.StateError):
        await durable.run_step(Parent.bad)
    assert count(durable) == 0
