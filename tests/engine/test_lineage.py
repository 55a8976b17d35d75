"""Parents and children: one child per identity whatever happens to the step, and who started whom (R57 to R62)."""

from __future__ import annotations

from typing import Any

import attrs
import durable_actors as da
import pytest
import trio
from durable_actors._engine.running import context_port
from durable_actors.journal import expand_all, fold, replay
from durable_actors.telemetry import StepCommitted
from tests.engine.kit import END, REAP, Db, Gate, running
from tests.kit import PATIENCE, until

pytestmark = pytest.mark.usefixtures("registry")


EXPIRE = """
update durable.gen_durable set lease_expires_at = now() - interval '1 s' where id = %s and locked_by is not null
"""


@attrs.frozen
class State:
    n: int = 0


def leaf(name: str = "leaf", **options: Any) -> Any:
    @da.job(name=name, **options)
    async def leaf(args: dict[str, Any]) -> Any:
        return args

    return leaf


def starts(records: list[da.Record]) -> list[dict[str, Any]]:
    """What the journal of the parent says of its children."""
    return [each.data["child"] for each in records if each.kind == "child_started"]


async def test_a_crash_before_the_outcome_finds_the_same_child(durable_dsn, db: Db):
    """Case 41, R58 to R61: one child, one record of it; another key or another step is another child."""
    job, found = leaf(), list[list[int]]()

    class Parent(da.Machine[State], name="parent", journal="full"):
        @da.step
        async def start(self, ctx: da.Context[State]) -> da.Outcome:
            options: Any = {"args": {}, "meta": {"why": "a test"}}
            found.append([await ctx.start_child(job, key=key, **options) for key in ("a", "a", "b")])
            if not ctx.attempt:
                raise SystemExit("a crash: no outcome, and the step runs again")
            return da.Next(self.second)

        @da.step
        async def second(self, ctx: da.Context[State]) -> da.Outcome:
            found.append([await ctx.start_child(job, key="a", args={})])
            return da.Done()

    async with running(durable_dsn) as run:
        row = await run.run(Parent, state=State())
        assert row.status == "done", row.last_error
        records = await da.history(row.id)
        report = await da.verify(row.id)
    first, again, [other] = found
    assert first == again
    assert first[0] == first[1]
    assert len({*first, other}) == 3
    assert [(each["id"], each["key"]) for each in starts(records)] == [
        (first[0], "a"),
        (first[2], "b"),
        (other, "a"),
    ]
    assert db.execute("select count(*) from durable.gen_durable where parent_id = %s", row.id) == [(3,)]
    assert report.problems == []
    lineage = replay(records).children
    assert {number: (child.step, child.child_key) for number, child in lineage.items()} == {
        first[0]: ("start", "a"),
        first[2]: ("start", "b"),
        other: ("second", "a"),
    }
    assert lineage[first[0]].metadata == {"why": "a test"}
    assert lineage[first[0]].origin["runnable_key"] == f"{row.id}/1/start#0.0", (
        "of the attempt that started it"
    )


@pytest.mark.parametrize("how", ["stale", "ended", "other arguments"])
async def test_a_start_that_must_not_be_writes_nothing(durable_dsn, db: Db, how: str):
    """Case 42, R62: no child, no record, no revision."""
    job, raised = leaf(), list[Exception]()
    counts = "select (select count(*) from durable.gen_durable), (select count(*) from durable.journal)"
    before: list[Any] = []

    class Parent(da.Machine[State], name="parent", journal="full"):
        @da.step
        async def start(self, ctx: da.Context[State]) -> da.Outcome:
            await ctx.start_child(job, key="a", args={"n": 1}, schedule_in=3600, journal="full")
            if how != "other arguments":
                db.execute(END if how == "ended" else REAP, ctx.id)
                db.execute("update durable.gen_durable set eligible_at = 'infinity' where id = %s", ctx.id)
            before.extend([db.execute(counts), db.row(ctx.id, "rev")])
            key, args = ("a", {"n": 2}) if how == "other arguments" else ("b", {"n": 1})
            try:
                await ctx.start_child(job, key=key, args=args, journal="full")
            except da.DurableError as error:
                raised.append(error)
            before.extend([db.execute(counts), db.row(ctx.id, "rev")])
            return da.Done()

    async with running(durable_dsn) as run:
        await run.insert(Parent, state=State())
        await until(lambda: len(before) == 4)
    [error] = raised
    assert isinstance(error, da.Conflict if how == "other arguments" else da.LeaseLost)
    assert before[:2] == before[2:]


async def test_an_instance_shows_who_started_it(durable_dsn, db: Db):
    """R60: machine, step and key of the start, from the child's own record, or else from the parent's."""
    quiet, told = leaf(), leaf("told", journal="outcomes")

    class Parent(da.Machine[State], name="parent"):
        @da.step
        async def start(self, ctx: da.Context[State]) -> da.Outcome:
            await ctx.start_child(quiet, key="k", args={}, journal="off")
            await ctx.start_child(told, key="k", args={}, journal="outcomes")
            return da.Next(self.spawn)

        @da.step
        async def spawn(self, ctx: da.Context[State]) -> da.Outcome:
            children = [da.Child(quiet, args={}), da.Child(told, args={}, journal="outcomes")]
            return da.ScheduleChildren(self.end, children)

        @da.step
        async def end(self, ctx: da.Context[State]) -> da.Outcome:
            return da.Done()

    async with running(durable_dsn) as run:
        parent = await run.run(Parent, state=State(), journal="outcomes")
        assert parent.parent_run is None
        ids = [
            number
            for (number,) in db.execute(
                "select id from durable.gen_durable where id <> %s order by id", parent.id
            )
        ]
        shown = [(await da.inspect(number)).parent_run for number in ids]
        start, spawn = (parent.id, "parent", "start", "k"), (parent.id, "parent", "spawn", None)
        assert [attrs.astuple(each) for each in shown if each] == [start, start, spawn, spawn]
        listed = await da.list_instances(da.Filter(parent=parent.id))
        assert {each.parent_run for each in listed} == {da.ParentRun(parent.id)}
        context = [fold(expand_all(await da.history(number))).run for number in ids[1::2]]
        assert [each and each.parent for each in context] == [
            {"run": parent.id, "barrier": None, "machine": "parent", "step": "start", "key": "k"},
            {"run": parent.id, "barrier": 3, "machine": "parent", "step": "spawn", "key": None},
        ]
        assert (await da.verify()).problems == []
        db.execute("select durable.forget_journal(array[%s]::bigint[])", parent.id)
        db.execute("delete from durable.gen_durable where id = %s", parent.id)
        assert [(await da.inspect(number)).parent_run for number in ids[:2]] == [
            da.ParentRun(parent.id),
            da.ParentRun(*start),
        ], "what the child's own record says stays"


async def test_a_start_of_unknown_fate_is_repeated_once(durable_dsn, db: Db, monkeypatch):
    """R61: the server has started it, and the answer was lost."""
    job, real, lost = leaf(), context_port.start_child, list[int]()

    async def flaky(*args: Any, **options: Any) -> Any:
        found = await real(*args, **options)
        if not lost:
            lost.append(found.id)
            raise da.CommitUnknown("the connection is gone")
        return found

    class Parent(da.Machine[State], name="parent", journal="full"):
        @da.step
        async def start(self, ctx: da.Context[State]) -> da.Outcome:
            return da.Done(await ctx.start_child(job, key="a", args={}))

    monkeypatch.setattr(context_port, "start_child", flaky)
    async with running(durable_dsn) as run:
        row = await run.run(Parent, state=State())
        assert [row.result] == lost
        assert [each["id"] for each in starts(await da.history(row.id))] == lost


async def test_keys_of_runs_are_unique_and_keys_of_visits_stable(durable_dsn, db: Db):
    """Case 45: through next, retry, release, reap and a loop A → B → A."""
    seen: list[tuple[str, int, int, str]] = []
    gate = Gate()

    class Loop(da.Machine[State], name="loop", journal="claims"):
        @da.step(initial=True)
        async def a(self, ctx: da.Context[State]) -> da.Outcome:
            seen.append((ctx.step, ctx.visit, ctx.attempt, ctx.idempotency_key))
            match len(seen):
                case 1:
                    return da.Retry(State(1))
                case 2:  # a reaper takes it away; a heartbeat may renew it in between
                    while db.row(ctx.id, "claim_id::text") == (ctx.claim_id,):
                        db.execute(EXPIRE, ctx.id)
                        await da.recover()
                    await trio.sleep_forever()
                case 3:
                    await gate.wait()
            return da.Next(self.b)

        @da.step
        async def b(self, ctx: da.Context[State]) -> da.Outcome:
            seen.append((ctx.step, ctx.visit, ctx.attempt, ctx.idempotency_key))
            return da.Next(self.a) if ctx.visit < 4 else da.Done()

    async with running(durable_dsn, heartbeat_interval=0.05, drain_timeout=0.05) as run:
        number = await run.insert(Loop, state=State())
        await gate.wait_entered()
    # The engine has stopped while the step ran: it was released.
    async with running(durable_dsn) as run:
        gate.open()
        assert (await run.ended(number)).status == "done"
        records = await da.history(number)
    kinds = {each.kind for each in records}
    assert {"retry", "reaped", "released", "next", "done"} <= kinds
    keys = [attempt.key for attempt in replay(records).attempts.values()]
    assert len(set(keys)) == len(keys)
    by_visit: dict[int, set[str]] = {}
    for step, visit, _, key in seen:
        assert key == f"{number}/{visit}/{step}"
        by_visit.setdefault(visit, set()).add(key)
    assert [len(each) for each in by_visit.values()] == [1] * len(by_visit), "one key for all runs of a visit"
    assert len(set.union(*by_visit.values())) == len(by_visit) == 4
    assert [(step, visit) for step, visit, *_ in seen[-4:]] == [("a", 1), ("b", 2), ("a", 3), ("b", 4)]


async def test_without_a_journal_nothing_is_recorded(durable_dsn, db: Db):
    """Case 48: every outcome, children and signals; the table stays empty."""
    job = leaf(journal="off")

    class Parent(da.Machine[State], name="parent"):
        @da.step
        async def start(self, ctx: da.Context[State]) -> da.Outcome:
            await ctx.start_child(job, key="a", args={})
            return da.Retry() if not ctx.attempt else da.Await("go", then=self.spawn)

        @da.step
        async def spawn(self, ctx: da.Context[State]) -> da.Outcome:
            return da.ScheduleChildren(self.end, [da.Child(job, args={})])

        @da.step
        async def end(self, ctx: da.Context[State]) -> da.Outcome:
            return da.Stop("at the end")

    async with running(durable_dsn, journal="off") as run:
        number = await run.insert(Parent, state=State())
        await run.events.wait(StepCommitted, id=number, status="awaiting_signal")
        await da.signal(number, "go")
        with trio.fail_after(PATIENCE):
            assert (await run.ended(number)).status == "failed"
    assert db.execute("select count(*) from durable.journal") == [(0,)]
    assert db.execute("select count(*) from durable.gen_durable where fingerprint is not null") == [(0,)]
