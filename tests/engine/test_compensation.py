"""`@step(on_cancel=True)`, `cancel(children="cancel")` and `rest="cancel"`, as callers and steps see them."""

from __future__ import annotations

from typing import Any

import durable_actors as da
import psycopg
import pytest
import trio
from durable_actors._engine.maintenance import cascades, control
from durable_actors.telemetry import RequestReceived, StepStarted
from tests.engine.kit import PATIENCE, Db, Gate, Run, client_of, gated, parked, running
from tests.kit import until

pytestmark = pytest.mark.usefixtures("registry")


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The node looks for requests in quick succession."""
    monkeypatch.setattr(control, "LOOK_EVERY", 0.03)
    monkeypatch.setattr(control, "LONG_STEP", 0.01)


async def ends_cancelled(run: Run, number: int, reason: str | None) -> da.Instance:
    with pytest.raises(da.InstanceCancelled) as caught:
        await run.engine.client.result(number, timeout=PATIENCE)
    assert caught.value.reason == (reason or "no reason was given")
    return await run.engine.client.inspect(number)


def booking(gate: Gate, seen: list[Any], *, ends: str = "Done", run_ahead: bool = True) -> Any:
    """Waits at the gate, or for a signal; compensates in two steps."""

    class Booking(da.Machine[dict], name="booking", run_ahead=run_ahead):
        @da.step(initial=True)
        async def begin(self, ctx):
            assert ctx.cancellation is None
            if ctx.state.get("waits"):
                return da.Await("paid", then=self.ship)
            await gate.wait()
            return da.Next(self.ship)

        @da.step
        async def ship(self, ctx):
            return da.Done("shipped")

        @da.step(on_cancel=True)
        async def refund(self, ctx):
            seen.append((ctx.step, ctx.visit, ctx.attempt, ctx.cancellation))
            if ctx.attempt == 0:
                return da.Retry()
            return da.Next(self.tell)

        @da.step
        async def tell(self, ctx):
            seen.append((ctx.step, ctx.visit, ctx.attempt, ctx.cancellation))
            match ends:
                case "Stop":
                    return da.Stop("the bank is closed")
                case "raises":
                    raise ValueError("no bank")
                case "Await":
                    return da.Await("closed", then=self.ship)
            return da.Done("refunded")

    return Booking


@pytest.mark.parametrize(
    ("ends", "error"),
    [
        ("Done", "wrong order"),
        ("Stop", "the bank is closed"),
        ("raises", "ValueError: no bank"),
        ("Await", "wrong order"),
    ],
)
@pytest.mark.parametrize("run_ahead", [True, False])
async def test_a_parked_instance_compensates(durable_dsn, ends: str, error: str, run_ahead: bool):
    seen: list[Any] = []
    async with running(durable_dsn, journal="full") as run:
        client = run.engine.client
        number = await run.insert(
            booking(Gate(), seen, ends=ends, run_ahead=run_ahead), state={"waits": True}
        )
        await parked(run, number)
        assert await da.cancel(number, by="ada", reason="wrong order", idempotency_key="k") == "requested"
        assert await da.cancel(number, idempotency_key="k") == "requested"
        if ends == "Await":
            await until(lambda: len(seen) == 3)
            await parked(run, number)
            told = await client.explain(number)
            assert "it compensates: cancelled by ada: wrong order" in told.summary
            with pytest.raises(da.Conflict, match="compensates in step"):
                await da.cancel(number)
            await da.signal(number, "closed")
        found = await ends_cancelled(run, number, error)
        assert [each[:3] for each in seen] == [("refund", 3, 0), ("refund", 3, 1), ("tell", 4, 0)]
        told_steps = {(each[3].by, each[3].reason) for each in seen}
        assert told_steps == {("ada", "wrong order")}
        assert (found.result, found.last_error) == (None, error)
        assert found.cancellation is not None
        assert (await client.verify(number)).problems == []
        kinds = [record.kind for record in await client.history(number)]
        assert "compensating" in kinds
        assert kinds[-1] == "cancelled"


async def test_a_step_that_runs_is_cancelled_first(durable_dsn, quick):
    gate, seen = Gate(), list[Any]()
    async with running(durable_dsn) as run:
        number = await run.insert(booking(gate, seen), state={})
        await gate.wait_entered()
        assert await da.cancel(number, reason="because") == "requested"
        await ends_cancelled(run, number, "because")
        assert [each[:3] for each in seen] == [("refund", 2, 0), ("refund", 2, 1), ("tell", 3, 0)]


async def test_an_outcome_that_comes_too_late_is_overruled(durable_dsn, monkeypatch):
    """No look comes in time: the fence of the commit decides, also of a step that would run ahead."""
    monkeypatch.setattr(control, "LONG_STEP", 600.0)
    gate, seen = Gate(), list[Any]()
    async with running(durable_dsn) as run:
        number = await run.insert(booking(gate, seen), state={})
        await gate.wait_entered()
        assert await da.cancel(number) == "requested"
        gate.open()
        await ends_cancelled(run, number, None)
        assert [each[0] for each in seen] == ["refund", "refund", "tell"]


async def test_force_enters_it_and_a_second_one_ends_it(durable_dsn, quick):
    gate, seen = Gate(), list[Any]()
    async with running(durable_dsn) as run:
        number = await run.insert(booking(gate, seen, ends="Await"), state={})
        await gate.wait_entered()
        assert await da.cancel(number, force=True, reason="now") == "requested"
        await until(lambda: len(seen) == 3)
        await parked(run, number)
        assert await da.cancel(number, force=True) == "cancelled"
        await ends_cancelled(run, number, "now")
        assert await da.retry(number) == number
        await until(lambda: len(seen) == 4)
        assert seen[3][3].reason == "now", "a retry compensates again"
        gate.open()


async def test_its_parent_counts_it_when_it_has_compensated(durable_dsn, quick):
    gate, seen = Gate(), list[Any]()
    child = booking(gate, seen, ends="Await")

    class Parent(da.Machine[dict]):
        @da.step(initial=True)
        async def begin(self, ctx):
            return da.ScheduleChildren(self.end, [da.Child(child, state={})])

        @da.step
        async def end(self, ctx):
            return da.Done(dict(ctx.children_counts))

    async with running(durable_dsn) as run:
        parent = await run.insert(Parent, state={})
        await gate.wait_entered()
        [mine] = await run.engine.client.list_instances(da.Filter(parent=parent))
        assert await da.cancel(mine.id) == "requested"
        await until(lambda: len(seen) == 3)
        await parked(run, mine.id)
        assert (await run.engine.client.inspect(parent)).status == "awaiting_children"
        await da.signal(mine.id, "closed")
        assert await run.engine.client.result(parent, timeout=PATIENCE) == {"cancelled": 1}


# -- children


def tree(gate: Gate, *, join: Any = "all", rest: Any = "leave") -> Any:
    leaf = gated(gate)

    class Branch(da.Machine[dict], name="branch"):
        @da.step(initial=True)
        async def begin(self, ctx):
            return da.ScheduleChildren(self.end, [leaf, leaf])

        @da.step
        async def end(self, ctx):
            return da.Done()

    @da.job(name="quick leaf")
    async def quick_leaf(args: dict) -> None:
        await gate.wait()

    class Root(da.Machine[dict], name="root"):
        @da.step(initial=True)
        async def begin(self, ctx):
            if join == "all":
                return da.ScheduleChildren(self.end, [Branch, Branch], rest=rest)
            short = da.Child(simple_done(), state={})
            return da.ScheduleChildren(self.end, [short, Branch, Branch], join=join, rest=rest)

        @da.step
        async def end(self, ctx):
            return da.Done(dict(ctx.children_counts))

    return Root


def simple_done() -> Any:
    class Short(da.Machine[dict], name="short"):
        @da.step
        async def start(self, ctx):
            return da.Done()

    return Short


async def whole_tree_cancelled(db: Db, count: int) -> None:
    query = "select count(*) from durable.gen_durable where status = 'cancelled'"
    await until(lambda: db.execute(query) == [(count,)])
    await until(lambda: db.execute("select count(*) from durable.cascades") == [(0,)])


@pytest.mark.parametrize("way", ["engine", "client", "sync"])
async def test_a_tree_is_cancelled(durable_dsn, db: Db, quick, way: str):
    """By the engine of this process, by a client elsewhere, and by nobody but the engines: the long poll tells them."""
    gate = Gate()
    async with running(durable_dsn) as run, client_of(db, name="caller") as client:
        number = await run.insert(tree(gate), state={})
        await gate.wait_entered(4)
        if way == "engine":
            assert await run.engine.client.cancel(number, children="cancel", reason="why") == "cancelled"
        elif way == "client":
            assert await client.cancel(number, children="cancel", reason="why") == "cancelled"
        else:

            def call() -> None:
                with psycopg.connect(durable_dsn) as conn:
                    assert da.sync.cancel(conn, number, children="cancel", reason="why") == "cancelled"

            await trio.to_thread.run_sync(call)
        await whole_tree_cancelled(db, 1 + 2 + 4)
        reasons = db.execute("select distinct last_error from durable.gen_durable")
        assert reasons == [("why",)]
        with pytest.raises(da.ConfigError, match="children"):
            await client.cancel(number, children="all")  # type: ignore[arg-type]


async def test_a_running_root_and_its_children(durable_dsn, db: Db, quick):
    """Its children are cancelled when its step has been. What the step starts meanwhile is among them."""
    gate, leaf_gate = Gate(), Gate()
    leaf = gated(leaf_gate)

    class Starts(da.Machine[dict]):
        @da.step
        async def start(self, ctx):
            await ctx.start_child(leaf, key="a")
            await gate.wait()
            return da.Done()

    async with running(durable_dsn) as run:
        number = await run.insert(Starts, state={})
        await leaf_gate.wait_entered()
        assert await da.cancel(number, children="cancel") == "requested"
        await run.events.wait(RequestReceived, id=number)
        await whole_tree_cancelled(db, 2)


async def test_the_rest_of_a_barrier_is_cancelled(durable_dsn, db: Db, quick):
    gate = Gate()
    async with running(durable_dsn) as run:
        number = await run.insert(tree(gate, join=1, rest="cancel"), state={})
        counts = await run.engine.client.result(number, timeout=PATIENCE)
        assert counts["done"] == 1
        await whole_tree_cancelled(db, 2 + 4)
        assert len(run.events.all(StepStarted, id=number)) == 2


async def test_a_node_finishes_what_another_one_left(durable_dsn, db: Db, monkeypatch):
    """Without a hint: neither the long poll nor the statement that wrote it tells this node."""
    gate = Gate()
    monkeypatch.setattr(cascades.Cascades, "__init__", _impatient(cascades.Cascades.__init__))
    async with client_of(db, name="caller") as client:
        number = await client.insert(gated(gate), schedule_in=600)
        db.execute("update durable.gen_durable set status = 'cancelled', finished_at = now()")
        [child] = [await client.insert(gated(gate), schedule_in=600)]
        db.execute("update durable.gen_durable set parent_id = %s where id = %s", number, child)
        db.execute("select durable.cascade(%s, null, null)", number)
        async with running(durable_dsn, long_poll=0, queues={"other": 1}) as run:
            await ends_cancelled(run, child, f"its parent, instance {number}, was cancelled")


def _impatient(real: Any) -> Any:
    def init(self: Any, node: Any) -> None:
        real(self, node)
        node.random = lambda: 0.0

    return init
