"""Locks that others hold on our tables: only the instance that needs what is locked waits, its neighbours go on."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import durable_actors as da
import psycopg
import pytest
import trio
from durable_actors._engine.claims import ActiveClaim
from durable_actors._engine.committing import flusher
from durable_actors._engine.committing.flusher import Flusher
from durable_actors._engine.committing.queue import Commits, PendingCommit
from durable_actors._store.rows import Committed, Transition
from durable_actors.otp import ActorChild, Address, Supervisor, open_tree
from durable_actors.telemetry import StepCommitted
from tests.engine.kit import Gate, make_node, pick, running
from tests.kit import until
from tests.support.interleave import open_sessions

pytestmark = pytest.mark.usefixtures("registry")

TRIGGER = """
create table public.till (id int primary key);
insert into public.till values (1);
create function public.book() returns trigger language plpgsql as $$
begin
    if new.result = '"bad"' and old.result is null then
        perform 1 from public.till for update {};
    end if;
    return new;
end $$;
create trigger book before update on durable.gen_durable for each row execute function public.book();
"""


@pytest.fixture(autouse=True)
def _soon(monkeypatch):
    """What was set aside is tried again soon after the test has given the lock back."""
    monkeypatch.setattr(flusher, "LONGEST_ASIDE", 0.3)


def define(gate: Gate):
    """A machine that awaits a signal and consumes it, and a job that touches its own row alone."""

    class Paid(da.Machine, name="paid"):
        @da.step
        async def start(self, ctx):
            return da.Await("go", then=self.pay)

        @da.step
        async def pay(self, ctx):
            await gate.wait()
            return da.Next(self.end) if ctx.state.get("next") else da.Done("paid")

        @da.step
        async def end(self, ctx):
            return da.Done("paid")

    @da.job(name="plain")
    async def plain(args):
        await gate.wait()
        return args["say"]

    return Paid, plain


async def parked(run, machine, count: int, **state) -> list[int]:
    ids = [await run.insert(machine, state=state) for _ in range(count)]
    for number in ids:
        await run.events.wait(StepCommitted, id=number, status="awaiting_signal")
        await run.engine.client.signal(number, "go", {})
    return ids


@pytest.mark.parametrize("how", ["next", "done"])
@pytest.mark.parametrize("lock", ["row", "share", "exclusive"])
async def test_a_lock_on_signals_holds_up_only_who_consumes_them(durable_dsn, lock, how):
    gate = Gate()
    paid, plain = define(gate)
    async with running(durable_dsn, queues={"default": 50}) as run:
        bad = await parked(run, paid, 3, next=how == "next")
        good = [await run.insert(plain, args={"say": "good"}) for _ in range(20)]
        await gate.wait_entered(23)
        with open_sessions(durable_dsn, 1) as (other,):
            other.run("begin")
            if lock == "row":
                other.run("select 1 from durable.signals for update")
            else:
                other.run(f"lock table durable.signals in {'access ' if lock != 'share' else ''}{lock} mode")
            gate.open()
            assert {(await run.ended(number)).result for number in good} == {"good"}
            for _ in range(5):  # and those that come later
                assert (await run.run(plain, args={"say": "later"})).result == "later"
            for number in bad:
                assert (await run.engine.client.inspect(number)).status == "executing"
            other.run("rollback")
        rows = [await run.ended(number) for number in bad]
    assert {(row.status, row.result, row.attempt) for row in rows} == {("done", "paid", 0)}


async def test_those_who_consume_signals_come_again_and_again(durable_dsn, monkeypatch):
    """As long as `signals` is locked, each of them would cost its neighbours a search for the culprit: learned once."""
    sizes: list[int] = []
    real = flusher.commit_outcomes

    async def count(conn, schema, transitions, **options):
        try:
            return await real(conn, schema, transitions, **options)
        except psycopg.errors.LockNotAvailable:
            sizes.append(len(transitions))
            raise

    gate = Gate()
    paid, plain = define(gate)
    async with running(durable_dsn, queues={"default": 60}) as run:
        bad = await parked(run, paid, 20)
        await gate.wait_entered(20)
        monkeypatch.setattr(flusher, "commit_outcomes", count)
        with open_sessions(durable_dsn, 1) as (other,):
            other.run("begin")
            other.run("lock table durable.signals in share mode")
            gate.open()
            good = [await run.insert(plain, args={"say": "good"}) for _ in range(40)]
            assert {(await run.ended(number)).result for number in good} == {"good"}
            assert len([size for size in sizes if size > 1]) <= 3, "one search, not one for each"
            other.run("rollback")
        assert {(await run.ended(number)).result for number in bad} == {"paid"}


@pytest.mark.parametrize("nowait", ["nowait", ""], ids=["nowait", "waits"])
async def test_a_trigger_that_meets_a_lock_holds_up_only_its_row(durable_dsn, db, nowait, caplog):
    db.execute(TRIGGER.format(nowait))
    gate = Gate()
    _, plain = define(gate)
    async with running(durable_dsn, queues={"default": 50}) as run:
        bad = await run.insert(plain, args={"say": "bad"})
        good = [await run.insert(plain, args={"say": "good"}) for _ in range(20)]
        await gate.wait_entered(21)
        with open_sessions(durable_dsn, 1) as (other,):
            other.run("begin")
            other.run("select 1 from public.till for update")
            gate.open()
            assert {(await run.ended(number)).result for number in good} == {"good"}
            for _ in range(5):
                assert (await run.run(plain, args={"say": "later"})).result == "later"
            assert db.row(bad, "status, attempt") == ("executing", 0)
            other.run("rollback")
        row = await run.ended(bad)
    assert (row.status, row.result, row.attempt) == ("done", "bad", 0)
    assert sum(f"instance {bad}: Postgres refuses" in each.getMessage() for each in caplog.records) == 1


@pytest.mark.slow
@pytest.mark.parametrize("what", ["signals", "trigger"])
async def test_a_stop_commits_beside_what_meets_a_lock(durable_dsn, db, what):
    """Nobody is left to wait beside the flusher: what is held up is tried last, and goes back with the drain's end."""
    db.execute(TRIGGER.format(""))
    gate = Gate()
    paid, plain = define(gate)
    with open_sessions(durable_dsn, 1) as (other,):
        async with running(durable_dsn, queues={"default": 50}, drain_timeout=2) as run:
            if what == "signals":
                [bad] = await parked(run, paid, 1)
            else:
                bad = await run.insert(plain, args={"say": "bad"})
            good = [await run.insert(plain, args={"say": "good"}) for _ in range(20)]
            await gate.wait_entered(21)
            other.run("begin")
            other.run("lock table durable.signals in share mode")
            other.run("select 1 from public.till for update")
            run.engine.request_stop()
            gate.open()
        assert {db.row(number, "status")[0] for number in good} == {"done"}
        assert db.row(bad, "status") == ("runnable",)


async def test_a_release_that_meets_a_lock_holds_up_neither_releases_nor_outcomes(durable_dsn, db):
    """A trigger of the user's waits for a lock as one claim goes back: one statement gives all of them back."""
    db.execute(
        TRIGGER.format("").replace("new.result = '\"bad\"' and old.result is null", "new.partition_key = 'bad'"
                                   " and old.status = 'executing' and new.status = 'runnable'")
    )  # fmt: skip
    numbers = [db.insert(partition_key="bad" if i == 3 else None) for i in range(8)]
    async with make_node(durable_dsn) as node:
        wake: Address[object] = Address("flusher", capacity=1)
        verdicts: list[object] = []
        commits = Commits(wake, lambda pending, verdict, now: verdicts.append(verdict))
        claims = await pick(node)
        with open_sessions(durable_dsn, 1) as (other,):
            other.run("begin")
            other.run("select 1 from public.till for update")
            async with open_tree(Supervisor("test", [ActorChild(wake, lambda: Flusher(node, commits))])):
                for claim in claims[:7]:
                    commits.release(claim, attempts=1)
                await db.eventually(
                    "select count(*) = 6 from durable.gen_durable where status = 'runnable' and id = any(%s)",
                    numbers[:7],
                )
                done = Transition(claims[7], "done", "s", attempt=0)
                commits.enqueue(PendingCommit(ActiveClaim(claims[7]), None, done, "Done"))
                [verdict] = await until(lambda: verdicts, timeout=10)
                assert isinstance(verdict, Committed)
                assert db.row(numbers[3], "status, attempt") == ("executing", 0)
                other.run("rollback")
                await db.eventually(
                    "select status = 'runnable' from durable.gen_durable where id = %s", numbers[3]
                )
        assert [db.row(number, "attempt")[0] for number in numbers] == [1] * 7 + [0]


async def test_a_locked_parent_holds_up_only_the_ends_of_its_children(durable_dsn, db):
    gate = Gate()
    _, plain = define(gate)

    class Parent(da.Machine, name="parent"):
        @da.step
        async def start(self, ctx):
            return da.ScheduleChildren(self.end, [da.Child(plain, args={"say": n}) for n in range(4)])

        @da.step
        async def end(self, ctx):
            return da.Done(sorted(child.result for child in ctx.children))

    async with running(durable_dsn, queues={"default": 50}) as run:
        locked, free = await run.insert(Parent), await run.insert(Parent)
        good = [await run.insert(plain, args={"say": "good"}) for _ in range(20)]
        await gate.wait_entered(28)
        with open_sessions(durable_dsn, 1) as (other,):
            other.run("begin")
            other.run("select 1 from durable.gen_durable where id = %s for update", [locked])
            gate.open()
            assert {(await run.ended(number)).result for number in good} == {"good"}
            assert (await run.ended(free)).result == [0, 1, 2, 3]
            assert db.row(locked, "status, children_pending") == ("awaiting_children", 4)
            other.run("rollback")
        assert (await run.ended(locked)).result == [0, 1, 2, 3]


async def test_parents_that_wait_for_signals_leave_the_connections_to_others(durable_dsn):
    """Eight of them consume a signal and schedule children while `signals` is locked; two connections are for that."""
    gate = Gate()

    @da.job(name="leaf")
    async def leaf(args):
        return 1

    class Parent(da.Machine, name="parent"):
        @da.step
        async def start(self, ctx):
            return da.Await("go", then=self.spawn) if ctx.state.get("waits") else da.Next(self.spawn)

        @da.step
        async def spawn(self, ctx):
            await gate.wait()
            return da.ScheduleChildren(self.end, [da.Child(leaf, args={})])

        @da.step
        async def end(self, ctx):
            return da.Done(len(ctx.children))

    async with running(durable_dsn, queues={"default": 50}) as run:
        bad = await parked(run, Parent, 8, waits=True)
        await gate.wait_entered(8)
        with open_sessions(durable_dsn, 1) as (other,):
            other.run("begin")
            other.run("lock table durable.signals in share mode")
            gate.open()
            for _ in range(3):
                assert (await run.run(Parent)).result == 1
            for number in bad:
                assert (await run.engine.client.inspect(number)).status == "executing"
            other.run("rollback")
        assert {(await run.ended(number)).result for number in bad} == {1}


async def test_reads_wait_while_a_table_is_locked(durable_dsn: str):
    """DDL, or a migration, has it for a moment: a read waits like a write, and no error tells of a lock."""
    async with da.open_client(durable_dsn) as client:
        with psycopg.connect(durable_dsn, autocommit=True) as db:
            [(number,)] = db.execute(
                "insert into durable.gen_durable (fsm, step, unique_key) values ('m', 's', 'k') returning id"
            ).fetchall()
        calls: dict[str, Callable[[], Awaitable[object]]] = {
            "inspect": lambda: client.inspect("k"),
            "explain": lambda: client.explain(number),
            "tree": lambda: client.tree(number),
            "list": client.list_instances,
            "history": lambda: client.history(number),
            "verify": client.verify,
            "receipts": lambda: client.receipts(),
            "pauses": client.pauses,
            "dry run": lambda: client.cancel(where=da.Filter(everything=True), dry_run=True),
        }
        done: list[str] = []

        async def read(name: str) -> None:
            await calls[name]()
            done.append(name)

        with psycopg.connect(durable_dsn) as other:
            other.execute(
                "lock table durable.gen_durable, durable.journal, durable.receipts, durable.pauses"
                " in access exclusive mode"
            )
            async with trio.open_nursery() as nursery:
                for name in calls:
                    nursery.start_soon(read, name)
                await trio.sleep(0.35)  # three times as long as a statement waits for a lock
                assert done == []
                other.rollback()
                with trio.fail_after(10):
                    await until(lambda: len(done) == len(calls))
