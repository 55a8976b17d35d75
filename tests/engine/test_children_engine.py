"""Children end to end: barriers, joins, what a parent is shown, and what a step may start by itself."""

from __future__ import annotations

from typing import Any

import attrs
import durable_actors as da
import pytest
import trio
from durable_actors._engine.claims import ActiveClaim
from durable_actors._engine.committing import spawn
from durable_actors._engine.committing.queue import PendingCommit
from durable_actors._engine.running import step_inputs as surroundings, step_run
from durable_actors._store.children import read_children
from durable_actors._store.rows import Transition
from durable_actors.telemetry import Picked, StepCommitted
from tests.engine.kit import QUIET, REAP, Db, Gate, active_claims, claim, running
from tests.kit import PATIENCE

pytestmark = pytest.mark.usefixtures("registry")

State = dict[str, Any]


def family() -> Any:
    """A job that doubles, or fails when it is given nothing; and a machine of two steps."""

    @da.job(name="test.double", max_attempts=1)
    async def double(args: State) -> int:
        return args["n"] * 2

    class Twice(da.Machine[State], name="test.Twice", queue="other"):
        @da.step
        async def start(self, ctx):
            return da.Next(self.second, {**ctx.state, "secret": "x" * 100})

        @da.step
        async def second(self, ctx):
            return da.Done({"n": ctx.state["n"], "parent": ctx.parent_id})

    return double, Twice


def told(ctx: da.Context[State]) -> list[Any]:
    return [[child.machine, child.status, child.result] for child in ctx.children]


async def test_a_mixed_family(durable_dsn):
    double, twice = family()

    class Parent(da.Machine[State]):
        @da.step
        async def start(self, ctx):
            children = [
                da.Child(twice, state={"n": 1}, priority=5),
                da.Child(double, args={"n": 2}, queue="third", priority=-3),
                da.Child(double, args={}),
                da.Child(twice, state={"n": 4}, unique_key="only", schedule_in=0.1),
                da.Child("test.double", args={"n": 5}),
            ]
            return da.ScheduleChildren(self.then, children, {"kept": 1})

        @da.step
        async def then(self, ctx):
            assert all("KeyError" in c.last_error for c in ctx.children if c.status == "failed")
            assert [child.id for child in ctx.children] == sorted(child.id for child in ctx.children)
            return da.Done([told(ctx), ctx.state, ctx.visit, ctx.attempt])

    queues = {"default": 5, "other": 5, "third": 5}
    async with running(durable_dsn, **QUIET, queues=queues) as run:
        row = await run.run(Parent)
    family_told, state, visit, attempt = row.result
    assert family_told == [
        ["test.Twice", "done", {"n": 1, "parent": row.id}],
        ["test.double", "done", 4],
        ["test.double", "failed", None],
        ["test.Twice", "done", {"n": 4, "parent": row.id}],
        ["test.double", "done", 10],
    ]
    assert (state, visit, attempt) == ({"kept": 1}, 2, 0)


async def test_nesting(durable_dsn):
    class Tree(da.Machine[State], name="test.Tree"):
        @da.step
        async def start(self, ctx):
            deep = ctx.state["deep"]
            if not deep:
                return da.Done(1)
            children = [da.Child("test.Tree", state={"deep": deep - 1}) for _ in range(3)]
            return da.ScheduleChildren(self.then, children)

        @da.step
        async def then(self, ctx):
            return da.Done(sum(child.result for child in ctx.children))

    async with running(durable_dsn, **QUIET) as run:
        assert (await run.run(Tree, state={"deep": 3})).result == 27


async def test_no_children_and_deduplicated_ones(durable_dsn):
    double, _ = family()

    class Parent(da.Machine[State]):
        @da.step
        async def start(self, ctx):
            return da.ScheduleChildren(self.second, [])

        @da.step
        async def second(self, ctx):
            assert ctx.children == ()
            child = da.Child(double, args={"n": 1}, unique_key="held")
            return da.ScheduleChildren(self.last, [child, child])

        @da.step
        async def last(self, ctx):
            return da.Done(told(ctx))

    async with running(durable_dsn, **QUIET) as run:
        await run.insert(double, args={"n": 0}, unique_key="held", schedule_in=3600)
        assert (await run.run(Parent)).result == []


@pytest.mark.parametrize(
    ("join", "open_when"), [(2, ["done", "done", "runs"]), ("any_failed", ["done", "failed", "runs"])]
)
async def test_early_joins_leave_the_rest_and_the_next_barrier_counts_anew(durable_dsn, join, open_when):
    gate = Gate()

    @da.job(name="test.held", max_attempts=1)
    async def held(args: State) -> str:
        if args["end"] == "runs":
            await gate.wait()
        if args["end"] == "failed":
            raise RuntimeError("no")
        return args["end"]

    second = Gate()

    class Parent(da.Machine[State]):
        @da.step
        async def start(self, ctx):
            children = [da.Child(held, args={"end": end}) for end in open_when]
            return da.ScheduleChildren(self.then, children, join=join)

        @da.step
        async def then(self, ctx):
            ends = [child.status in {"done", "failed"} for child in ctx.children]
            assert sum(ends) >= 1
            await second.wait()
            return da.ScheduleChildren(self.last, [da.Child(held, args={"end": "new"})], {"first": ends})

        @da.step
        async def last(self, ctx):
            return da.Done([ctx.state["first"], told(ctx)])

    async with running(durable_dsn) as run:
        number = await run.insert(Parent)
        await second.wait_entered()
        gate.open()  # the straggler ends while its parent runs
        second.open()
        first, last = await da.result(number, timeout=PATIENCE)
    assert first[2] is False
    assert last == [["test.held", "done", "new"]], "only this barrier's"


async def test_a_barrier_deadline_opens_it_without_polls(durable_dsn):
    gate = Gate()

    @da.job(name="test.slow")
    async def slow(args: State) -> None:
        await gate.wait()

    class Parent(da.Machine[State]):
        @da.step
        async def start(self, ctx):
            return da.ScheduleChildren(self.then, [slow], timeout=0.3)

        @da.step
        async def then(self, ctx):
            return da.Done([child.status for child in ctx.children])

    async with running(durable_dsn, **QUIET, reap_interval=600) as run:
        assert (await run.run(Parent)).result == ["executing"]
        gate.open()


async def test_a_retry_and_a_same_step_await_keep_the_children(durable_dsn):
    double, _ = family()

    class Parent(da.Machine[State]):
        @da.step
        async def start(self, ctx):
            return da.ScheduleChildren(self.then, [da.Child(double, args={"n": 1})])

        @da.step
        async def then(self, ctx):
            assert told(ctx) == [["test.double", "done", 2]], (ctx.attempt, ctx.awaited)
            if ctx.attempt == 0:
                return da.Retry()
            return da.Next(self.last) if ctx.awaited else da.Await("approved")

        @da.step
        async def last(self, ctx):
            return da.Done(told(ctx))

    async with running(durable_dsn) as run:
        number = await run.insert(Parent)
        await run.events.wait(StepCommitted, id=number, status="awaiting_signal")
        await da.signal(number, "approved")
        assert await da.result(number, timeout=PATIENCE) == []


async def test_bad_children_go_through_handle(durable_dsn, db: Db):
    double, _ = family()

    class Parent(da.Machine[State]):
        @da.step
        async def start(self, ctx):
            bad = {
                "option": lambda: da.Child(double, args={"n": 1}, queue=""),
                "machine": lambda: da.Child("test.unknown"),
                "key": lambda: da.Child(double, args={"n": 1}, unique_key="u", on_duplicate="raise"),
            }[ctx.state["bad"]]
            return da.ScheduleChildren(self.then, [da.Child(double, args={"n": 1}), bad()])

        @da.step
        async def then(self, ctx):
            return da.Done("not here")

        async def handle(self, error, ctx):
            return da.Done(type(error).__name__)

    async with running(durable_dsn) as run:
        await run.insert(double, args={"n": 0}, unique_key="u", schedule_in=3600)
        found = [(await run.run(Parent, state={"bad": bad})).result for bad in ("option", "machine", "key")]
    assert found == ["ConfigError", "UnknownMachine", "Duplicate"]
    assert db.execute("select count(*) from durable.gen_durable where parent_id is not null") == [(0,)]


async def test_more_children_than_a_page(durable_dsn):
    @da.job(name="test.leaf")
    async def leaf(args: State) -> int:
        return args["n"]

    class Parent(da.Machine[State]):
        @da.step
        async def start(self, ctx):
            return da.ScheduleChildren(self.then, [da.Child(leaf, args={"n": n}) for n in range(1200)])

        @da.step
        async def then(self, ctx):
            everyone = [child.result async for child in ctx.iter_children()]
            assert everyone == [child.result for child in ctx.children]
            return da.Done([len(ctx.children), everyone == list(range(1200)), dict(ctx.children_counts)])

    async with running(durable_dsn, queues={"default": da.Queue(50, prefetch=100)}) as run:
        assert (await run.run(Parent)).result == [1200, True, {"done": 1200}]


def parent_of(db: Db, count: int) -> int:
    """A parent whose barrier has opened: a hundredth of its children has failed."""
    number = db.insert(fsm="parent", step="then", visit=2, children_total=count, eligible_at="infinity")
    db.execute(
        "insert into durable.gen_durable (fsm, step, status, finished_at, parent_id, barrier, result, last_error)"
        " select 'kid', 's', (case when n %% 100 = 0 then 'failed' else 'done' end)::durable.durable_status, now(), %s,"
        " 2, case when n %% 100 > 0 then to_jsonb(n) end, case when n %% 100 = 0 then 'no' end"
        " from generate_series(1, %s) n order by n",
        number,
        count,
    )
    return number


@pytest.mark.parametrize("count", [10_000, 10_001])
async def test_children_are_complete_or_refused(durable_dsn, db: Db, count: int, monkeypatch):
    """Up to 10,000 all of them; beyond that a list that is short would give wrong sums."""
    pages: list[int] = []

    async def read(*args: Any, **options: Any) -> Any:
        found = await read_children(*args, **options)
        pages.append(len(found))
        return found

    monkeypatch.setattr(surroundings, "read_children", read)

    class Parent(da.Machine[State], name="parent"):
        @da.step(initial=True)
        async def start(self, ctx): ...

        @da.step
        async def then(self, ctx):
            counts = ctx.children_counts
            assert (counts["failed"], counts["executing"]) == (count // 100, 0)
            if count <= 10_000:
                return da.Done([sum(child.result or 0 for child in ctx.children), sum(counts.values())])
            with pytest.raises(
                da.TooManyChildren, match=r"iter_children\(\)`, or ctx.children_counts"
            ) as caught:
                sum(child.result or 0 for child in ctx.children)
            assert (caught.value.id, caught.value.count, caught.value.most) == (ctx.id, count, 10_000)
            everyone = [child.result or 0 async for child in ctx.iter_children()]
            return da.Done([sum(everyone), sum(counts.values())])

    async with running(durable_dsn):
        number = parent_of(db, count)
        db.execute("update durable.gen_durable set eligible_at = now() where id = %s", number)
        expected = sum(n for n in range(1, count + 1) if n % 100)
        assert await da.result(number, timeout=PATIENCE) == [expected, count]
    assert sum(pages) == (count if count == 10_000 else 0), "nothing is read in vain"


async def test_handle_gets_no_children(durable_dsn, db: Db):
    class Parent(da.Machine[State], name="parent"):
        @da.step(initial=True)
        async def start(self, ctx): ...

        @da.step
        async def then(self, ctx):
            return da.Done(len(ctx.children))

        async def handle(self, error, ctx):
            assert isinstance(error, da.TooManyChildren)
            return da.Done([list(ctx.children), dict(ctx.children_counts), ctx.more_signals])

    async with running(durable_dsn):
        number = parent_of(db, 10_001)
        db.execute("update durable.gen_durable set eligible_at = now() where id = %s", number)
        assert await da.result(number, timeout=PATIENCE) == [[], {}, False]


async def test_what_a_step_starts_is_found_by_its_next_run(durable_dsn, db: Db):
    double, twice = family()
    found: list[list[int | None]] = []

    class Starter(da.Machine[State]):
        @da.step
        async def start(self, ctx):
            found.append(
                [
                    await ctx.start_child(double, key="a", args={"n": 1}),
                    await ctx.start_child(double, key="b", args={"n": 1}),
                    await ctx.start_child(twice, key="a", state={"n": 1}),
                    await ctx.insert(double, args={"n": 2}),
                    await ctx.insert(double, args={"n": 2}),
                    await ctx.insert(double, args={"n": 3}, unique_key="u", on_duplicate="return"),
                    await ctx.insert(double, args={"n": 3}, unique_key="u", on_duplicate="skip"),
                ]
            )
            if ctx.attempt < 2:
                db.execute(REAP, ctx.id)
                db.execute("update durable.gen_durable set eligible_at = now() where id = %s", ctx.id)
                await trio.sleep_forever()
            with pytest.raises(da.Duplicate) as duplicate:
                await ctx.insert(double, args={"n": 3}, unique_key="u")
            assert duplicate.value.existing_id == ctx.state["held"]
            with pytest.raises(da.Duplicate):
                await ctx.start_child(double, key="c", args={"n": 3}, unique_key="u")
            with pytest.raises(da.ConfigError, match="start_child takes no on_duplicate"):
                await ctx.start_child(double, key="a", args={"n": 1}, on_duplicate="skip")  # type: ignore[call-arg]
            with pytest.raises(da.ConfigError, match="key"):
                await ctx.start_child(double, key=5, args={"n": 1})  # type: ignore[arg-type]
            return da.Next(self.second)

        @da.step
        async def second(self, ctx):
            found.append([await ctx.start_child(double, key="a", args={"n": 1})])
            return da.Done()

    async with running(durable_dsn, heartbeat_interval=0.05) as run:
        held = await run.insert(double, args={"n": 0}, unique_key="u", schedule_in=3600)
        row = await run.run(Starter, state={"held": held})
        assert row.status == "done", row.last_error
    assert found[0] == found[1] == found[2]
    assert len(set(found[0][:5])) == 5
    assert found[0][5:] == [held, None]
    assert found[3][0] not in found[0], "of another step"
    children = db.execute("select count(*) from durable.gen_durable where parent_id = %s", row.id)
    assert children == [(4,)]


async def test_the_same_identity_with_other_arguments_is_refused(durable_dsn, db: Db):
    """Neither started nor found: what was asked for is nowhere (R62). Where and when it runs may differ."""
    refused: list[str] = []
    double, twice = family()

    class Starter(da.Machine[State]):
        @da.step
        async def start(self, ctx):
            first = await ctx.start_child(
                double, key="a", args={"n": 1, "tags": {"x", "y", "z"}}, schedule_in=60
            )
            again = await ctx.start_child(
                double, key="a", args={"tags": {"z", "y", "x"}, "n": 1}, priority=3, queue="elsewhere"
            )
            for options in (
                {"args": {"n": 2}},
                {"args": {"n": 1, "tags": ["x", "y", "z"]}, "partition_key": "p"},
                {"args": {"n": 1, "tags": ["x", "y", "z"]}, "unique_key": "u"},
            ):
                with pytest.raises(
                    da.Conflict, match=rf"key='a'.* instance {first} with other arguments"
                ) as caught:
                    await ctx.start_child(double, key="a", **options)
                refused.append(str(caught.value))
            other = await ctx.start_child(twice, key="a", state={"n": 1}, step="second")
            usual = await ctx.start_child(twice, key="a", state={"n": 1})
            assert usual == await ctx.start_child(twice, key="a", state={"n": 1}, step="start")
            return da.Done([first == again, len({first, other, usual})])

    async with running(durable_dsn) as run:
        row = await run.run(Starter)
        assert row.result == [True, 3], row.last_error
    assert len(refused) == 3
    assert db.execute("select count(*) from durable.gen_durable where parent_id = %s", row.id) == [(3,)]


@attrs.frozen
class Parcel:
    weight: float
    labels: frozenset[str] = frozenset()


async def test_a_dict_and_an_object_that_say_the_same_start_one_child(durable_dsn):
    @da.job
    async def carry(args: Parcel):
        return args.weight

    class Starter(da.Machine[State]):
        @da.step
        async def start(self, ctx):
            first = await ctx.start_child(carry, key="a", args=Parcel(1.0, frozenset("xyz")))
            again = await ctx.start_child(carry, key="a", args={"weight": 1, "labels": ["z", "y", "x"]})
            with pytest.raises(da.Conflict):
                await ctx.start_child(carry, key="a", args={"weight": 2, "labels": ["z", "y", "x"]})
            return da.Done(first == again)

    async with running(durable_dsn) as run:
        row = await run.run(Starter)
        assert row.result is True, row.last_error


async def test_a_child_of_the_first_release_is_found(durable_dsn, db: Db):
    """It has no digest: nobody knows its arguments, and it was found by them then."""
    double, _ = family()

    class Starter(da.Machine[State]):
        @da.step
        async def start(self, ctx):
            first = await ctx.start_child(double, key="a", args={"n": 1}, schedule_in=60)
            db.execute("update durable.gen_durable set child_args = null where id = %s", first)
            return da.Done(first == await ctx.start_child(double, key="a", args={"n": 2}))

    async with running(durable_dsn) as run:
        assert (await run.run(Starter)).result is True


async def test_planning_children_lets_others_run(monkeypatch):
    """A hundred thousand take 0.4 s: heartbeats must not wait for that."""
    monkeypatch.setattr(step_run, "PLAN_AT_ONCE", 2)
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await trio.lowlevel.checkpoint()

    @da.job(name="child")
    async def child(args: dict) -> None: ...

    outcome = da.ScheduleChildren("end", [da.Child(child, args={"n": n}) for n in range(9)])
    active = ActiveClaim(claim(None))
    change = Transition(active.claim, "awaiting_children", "s", attempt=0)
    pending = PendingCommit(active, None, change, "ScheduleChildren")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(others)
        pending = await step_run._with_children(pending, outcome, "auto")
        nursery.cancel_scope.cancel()
    assert [plan.state for plan in pending.spawn.plans] == [b'{"n":%d}' % n for n in range(9)]
    assert turns >= 4


async def test_children_of_a_commit_that_was_cancelled_too_late_start_at_once(durable_dsn, db, monkeypatch):
    """The server has committed them, and their parent's task is cancelled before it hears of that. Nobody polls."""
    gate, real = Gate(), spawn.schedule_children

    async def committed(*args: Any, **options: Any) -> Any:
        await real(*args, **options)
        await gate.wait()

    @da.job(name="child", queue="second")
    async def child(args: State) -> str:
        return "done"

    class Parent(da.Machine[State]):
        @da.step
        async def start(self, ctx):
            return da.ScheduleChildren(self.end, [da.Child(child, args={}, priority=3)])

        @da.step
        async def end(self, ctx):
            return da.Done([each.result for each in ctx.children])

    monkeypatch.setattr(spawn, "schedule_children", committed)
    async with running(durable_dsn, **QUIET) as run:
        await run.events.wait(Picked, queue="second", claimed=0)
        number = await run.insert(Parent)
        await gate.wait_entered()
        [active] = active_claims(run)
        run.engine._node.claims.interrupt(active, "a test")
        assert (await run.ended(number)).result == ["done"]
