"""Children that come after other children, end to end: order, results, failures, retries, other ways to end."""

from __future__ import annotations

from typing import Any

import durable_actors as da
import psycopg
import pytest
import trio
from durable_actors._store.graph import read_graph
from durable_actors.testing import Bench
from tests.engine.kit import QUIET, Db, running
from tests.kit import PATIENCE, until

pytestmark = pytest.mark.usefixtures("registry")

State = dict[str, Any]


class World:
    """A job that does what the test says, a parent that spawns it by a list, and what has run, in order."""

    def __init__(self) -> None:
        self.ran: list[str] = []
        self.seen: dict[str, Any] = {}
        self.failing: set[str] = set()
        world = self

        @da.job(name="graph.task", max_attempts=1)
        async def task(args: State, ctx: da.Context[State]) -> Any:
            key = args["key"]
            world.ran.append(key)
            world.seen[key] = {name: (view.status, view.result) for name, view in ctx.dependencies.items()}
            if key in world.failing:
                raise da.Cancel("broken")
            return key.upper()

        class Parent(da.Machine[State], name="graph.parent"):
            @da.step
            async def start(self, ctx):
                children = [
                    da.Child(
                        task,
                        key=key,
                        after=list(after),
                        args={"key": key},
                        when=ctx.state.get("when", {}).get(key, "succeeded"),
                    )
                    for key, after in ctx.state["edges"].items()
                ]
                return da.ScheduleChildren(self.after, children)

            @da.step
            async def after(self, ctx):
                return da.Done({child.key: child.status for child in ctx.children})

        self.task, self.parent = task, Parent

    def state(self, edges: dict[str, str], **when: str) -> State:
        return {"edges": edges, "when": when}


DIAMOND = {"d": "bc", "a": "", "b": "a", "c": "a"}


async def test_a_graph_runs_in_order(durable_dsn: str) -> None:
    world = World()
    async with running(durable_dsn) as run:
        number = await run.engine.client.insert(world.parent, state=world.state(DIAMOND))
        result = await run.engine.client.result(number, timeout=PATIENCE)
    assert result == dict.fromkeys("dabc", "done")
    assert (world.ran[0], world.ran[-1], sorted(world.ran)) == ("a", "d", list("abcd"))
    assert world.seen["a"] == {}
    assert world.seen["d"] == {"b": ("done", "B"), "c": ("done", "C")}


async def test_what_comes_after_a_failure_is_cancelled_and_runs_nothing(durable_dsn: str, db: Db) -> None:
    world = World()
    world.failing = {"a"}
    edges = {"a": "", "b": "a", "c": "b", "x": "", "e": "ax"}
    async with running(durable_dsn) as run:
        number = await run.engine.client.insert(world.parent, state=world.state(edges, e="ended"))
        result = await run.engine.client.result(number, timeout=PATIENCE)
        assert result == {"a": "failed", "b": "cancelled", "c": "cancelled", "x": "done", "e": "done"}
        assert sorted(world.ran) == ["a", "e", "x"]
        assert world.seen["e"] == {"a": ("failed", None), "x": ("done", "X")}
    query = "select child_key, last_error from durable.gen_durable where status = 'cancelled' order by 1"
    assert db.execute(query) == [
        ("b", "upstream failed: a failed"),
        ("c", "upstream failed: b was cancelled"),
    ]


async def test_a_cancelled_machine_is_not_asked_to_compensate(durable: Bench) -> None:
    ran: list[str] = []

    @da.job(max_attempts=1)
    async def breaks() -> None:
        raise da.Cancel("broken")

    class Undoes(da.Machine[State]):
        @da.step
        async def start(self, ctx):
            ran.append("start")
            return da.Done()

        @da.step(on_cancel=True)
        async def undo(self, ctx):
            ran.append("undo")
            return da.Done()

    class Parent(da.Machine[State]):
        @da.step
        async def start(self, ctx):
            first = da.Child(breaks)
            return da.ScheduleChildren(self.after, [first, da.Child(Undoes, state={}, after=first)])

        @da.step
        async def after(self, ctx):
            return da.Done([child.status for child in ctx.children])

    number = await durable.insert(Parent, state={})
    await durable.drain()
    await durable.assert_done(number, result=["failed", "cancelled"])
    assert ran == []


async def test_a_machine_that_compensated_and_is_retried_compensates_again(durable: Bench) -> None:
    """It waits for nothing: nobody would offer it when what it comes after has ended, and the barrier stayed closed."""
    ran: list[str] = []

    @da.job
    async def first() -> None:
        ran.append("first")

    class Undoes(da.Machine[State]):
        @da.step
        async def start(self, ctx):
            return da.Done()

        @da.step(on_cancel=True)
        async def undo(self, ctx):
            ran.append("undo")
            return da.Done()

    class Parent(da.Machine[State]):
        @da.step
        async def start(self, ctx):
            before = da.Child(first, queue="later")
            return da.ScheduleChildren(
                self.after, [before, da.Child(Undoes, key="u", state={}, after=before)]
            )

        @da.step
        async def after(self, ctx):
            return da.Done([child.status for child in ctx.children])

    parent = await durable.insert(Parent, state={})
    await durable.drain("default")
    [undoes] = [each.id for each in await graph(durable, parent) if each.key == "u"]
    await durable.cancel(undoes)
    await durable.drain("default")
    await durable.retry(undoes)
    await durable.drain("default")
    assert ran == ["undo", "undo"]
    await durable.drain()
    await durable.assert_done(parent, result=["done", "cancelled"])
    assert (await durable.verify()).ok


async def test_execute_next_runs_a_graph(durable: Bench) -> None:
    world = World()
    number = await durable.insert(world.parent, state=world.state(DIAMOND))
    await durable.drain()
    await durable.assert_done(number, result=dict.fromkeys("dabc", "done"))
    assert (world.ran[0], world.ran[-1]) == ("a", "d")


async def test_mend_retry_and_go_on(durable: Bench) -> None:
    world = World()
    world.failing = {"b"}
    edges = {"a": "", "b": "a", "c": "b", "d": "c"}
    parent = await durable.insert(world.parent, state={**world.state(edges)})
    await durable.drain()
    await durable.assert_done(parent, result={"a": "done", "b": "failed", "c": "cancelled", "d": "cancelled"})
    world.failing.clear()
    ids = {each.key: each.id for each in await graph(durable, parent)}
    await durable.retry(ids["d"])
    await durable.retry(ids["c"])
    assert (await durable.drain()).steps == []
    await durable.retry(ids["b"])
    await durable.drain()
    assert world.ran == ["a", "b", "b", "c", "d"]
    assert [each.status for each in await graph(durable, parent)] == ["done"] * 4


async def graph(durable: Bench, parent: int) -> Any:
    return await durable._run(lambda conn: read_graph(conn, "durable", parent))


async def test_dependents_of_a_cancelled_instance_learn_of_it_at_once(durable_dsn: str, db: Db) -> None:
    """Nobody commits an outcome, nobody polls: the node that cancels tells."""
    world = World()

    @da.job(name="graph.later")
    async def later() -> None: ...

    class Parent(da.Machine[State], name="graph.waits"):
        @da.step
        async def start(self, ctx):
            first = da.Child(later, schedule_in=3600)
            return da.ScheduleChildren(
                self.after,
                [first, da.Child(world.task, key="b", after=first, when="ended", args={"key": "b"})],
            )

        @da.step
        async def after(self, ctx):
            return da.Done([child.status for child in ctx.children])

    async with running(durable_dsn, **QUIET, reap_interval=3600.0) as run:
        client = run.engine.client
        parent = await client.insert(Parent, state={})
        await until(lambda: db.row(parent, "status") == ("awaiting_children",))
        number = db.value("select id from durable.gen_durable where fsm = 'graph.later'")
        assert await client.cancel(number) == "cancelled"
        assert await client.result(parent, timeout=PATIENCE) == ["cancelled", "done"]
    assert world.seen == {"b": {"#0": ("cancelled", None)}}


@pytest.mark.parametrize("level", ["outcomes", "claims", "full"])
async def test_every_row_is_what_its_journal_says(durable_dsn: str, db: Db, level: Any) -> None:
    world = World()
    world.failing = {"a"}
    edges = {"a": "", "b": "a", "c": "b", "x": "", "e": "ax", "z": "e"}
    async with running(durable_dsn, journal=level) as run:
        client = run.engine.client
        parent = await client.insert(world.parent, state=world.state(edges, e="ended"))
        await client.result(parent, timeout=PATIENCE)
        ids = dict(db.execute("select child_key, id from durable.gen_durable where child_key is not null"))
    async with running(durable_dsn, journal=level, queues={}) as run:  # nobody runs what a hand offers
        client = run.engine.client
        await client.retry(ids["c"])  # waits for b, which was cancelled
        assert db.row(ids["c"], "hold, cancellation") == (5, None)
        report = await client.verify()
        assert (report.checked, report.problems) == (7, [])
        if level != "full":
            return
        db.execute(
            "update durable.gen_durable set links = null, child_key = null, hold = 4 where id = %s", ids["c"]
        )
        await client.rebuild(ids["c"])
        assert db.row(ids["c"], "links, child_key, hold") == (1, "c", 5)
        db.execute("delete from durable.gen_durable where id = %s", ids["c"])
        await client.rebuild(ids["c"])
        assert db.row(ids["c"], "links, child_key, hold") == (1, "c", 5)
        assert (await client.verify()).problems == []


async def test_recover_tells_what_nobody_would_tell(durable_dsn: str, db: Db) -> None:
    """A hand has deleted one upstream, and ended another in a session without triggers."""
    world = World()
    edges = {"a": "", "b": "", "c": "a", "d": "b"}
    async with running(durable_dsn, **QUIET, queues={}) as run:
        client = run.engine.client
        parent = await client.insert(world.parent, state=world.state(edges))
        db.execute("update durable.gen_durable set queue = 'q'")
        async with running(durable_dsn, queues={"q": 1}, name="other") as other:
            await until(lambda: db.row(parent, "status") == ("awaiting_children",))
        del other
        ids = dict(db.execute("select child_key, id from durable.gen_durable where child_key is not null"))
        db.execute("delete from durable.gen_durable where id = %s", ids["a"])
        db.execute("set session_replication_role = replica")
        db.execute(
            "update durable.gen_durable set status = 'done', finished_at = now() where id = %s", ids["b"]
        )
        db.execute("reset session_replication_role")
        db.execute(
            "update durable.gen_durable set meta = null where id = %s", ids["b"]
        )  # a hand, for who watches
        assert (await client.recover(dry_run=True)).told == (ids["a"], ids["b"])
        assert (await client.recover()).told == (ids["a"], ids["b"])
        assert [db.row(ids[key], "hold") for key in "cd"] == [(0,), (0,)]
        assert (await client.recover()).told == ()


async def test_a_dependent_that_a_caller_has_locked_delays_only_its_upstream(
    durable_dsn: str, db: Db
) -> None:
    """A transaction of the user's has sent a signal to it, and is not committed."""
    world, gate = World(), trio.Event()

    @da.job(name="graph.gated")
    async def gated() -> None:
        await gate.wait()

    class Parent(da.Machine[State], name="graph.locked"):
        @da.step
        async def start(self, ctx):
            first = da.Child(gated)
            return da.ScheduleChildren(
                self.after, [first, da.Child(world.task, key="b", after=first, args={"key": "b"})]
            )

        @da.step
        async def after(self, ctx):
            return da.Done([child.status for child in ctx.children])

    async with running(durable_dsn) as run:
        client = run.engine.client
        parent = await client.insert(Parent, state={})
        runs = "select 1 from durable.gen_durable where status = 'executing' and fsm = 'graph.gated'"
        await until(lambda: db.execute(runs) != [])
        number = db.value("select id from durable.gen_durable where child_key = 'b'")
        with psycopg.connect(durable_dsn) as caller:
            da.sync.signal(caller, number, "hello")
            gate.set()
            for _ in range(3):
                free = await client.insert(world.task, args={"key": "free"})
                assert await client.result(free, timeout=PATIENCE) == "FREE"
            assert db.row(number, "hold") == (5,)
            caller.commit()
        assert await client.result(parent, timeout=PATIENCE) == ["done", "done"]
