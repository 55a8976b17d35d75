"""Pending commits when an observer or a log handler fails, in a drain, and beside other outcomes of a group."""

from __future__ import annotations

import contextvars

import durable_actors as da
import psycopg
import pytest
import trio
from durable_actors._engine.claims import ClaimState
from durable_actors._engine.committing import flusher
from durable_actors._engine.running.step_task import RECOVER_AGAIN
from durable_actors.telemetry import ClaimLost, OutcomeStale, StepStarted, StepStopped
from tests.engine.kit import (
    QUIET,
    Gate,
    active_claims,
    failing_log,
    gated,
    locked,
    refuse_bad,
    running,
    saying,
    state_of,
)
from tests.kit import until

pytestmark = pytest.mark.usefixtures("registry")


async def test_a_log_handler_that_fails_hurts_no_other_step(durable_dsn, db):
    gate, other = Gate(), Gate()

    @da.job
    async def bystander(args):
        await other.wait()

    async with running(durable_dsn, reap_interval=3600) as run:
        beside = await run.insert(bystander, args={})
        await other.wait_entered()
        number = await run.insert(gated(gate))
        await gate.wait_entered()
        db.execute(
            "update durable.gen_durable set status = 'runnable', locked_by = null, lease_expires_at = null,"
            " claim_id = null, eligible_at = now() + interval '1 h' where id = %s",
            number,
        )
        with failing_log():
            gate.open()
            await until(lambda: len(active_claims(run)) == 1)  # stale, which is logged
        other.open()
        assert (await run.ended(beside)).status == "done"
    assert len(run.events.all(StepStarted, id=beside)) == 1


class Odd:
    """As an array of numbers: whether two are equal has no answer."""

    def __eq__(self, other: object) -> bool:
        raise ValueError("ambiguous")

    __hash__ = None  # type: ignore[assignment]


VAR: contextvars.ContextVar[object] = contextvars.ContextVar("odd")


async def test_what_is_in_a_context_is_never_compared(durable_dsn):
    VAR.set(Odd())
    seen: list[object] = []

    @da.job
    async def job(args):
        seen.append(VAR.get())
        VAR.set(Odd())

    async with running(durable_dsn, queues={"default": da.Queue(1, prefetch=5)}) as run:
        for number in [await run.insert(job, args={}) for _ in range(3)]:
            assert (await run.ended(number)).status == "done"
    assert len({id(each) for each in seen}) == 1, "each has the engine's"


async def test_a_lost_claim_is_not_handled(durable_dsn, db, monkeypatch):
    """Refused, and lost while the refusal was under way: `handle` is for the owner."""
    real, handled = flusher.commit_outcomes, list[object]()

    async def lost_meanwhile(*args, **options):
        try:
            return await real(*args, **options)
        finally:
            for each in active_claims(run):
                run.engine._node.claims.lose(each, "another worker has claimed it")

    refuse_bad(db, "P0001")

    class M(da.Machine, name="m"):
        @da.step
        async def start(self, ctx):
            return da.Done("bad")

        async def handle(self, error, ctx):
            handled.append(error)
            return da.Stop(error)

    monkeypatch.setattr(flusher, "commit_outcomes", lost_meanwhile)
    async with running(durable_dsn, **QUIET) as run:
        number = await run.insert(M)
        await run.events.wait(ClaimLost, id=number)
        await until(lambda: not active_claims(run))
    assert not handled


async def test_nor_one_whose_key_is_lost(durable_dsn, db):
    owned: list[bool] = []
    refuse_bad(db, "P0001")
    gate = Gate()

    class M(da.Machine, name="m"):
        @da.step
        async def start(self, ctx):
            await gate.wait()
            return da.Done("bad")

        async def handle(self, error, ctx):
            [one] = active_claims(run)
            owned.append(keys.owns(one.claim))
            return da.Stop(error)

    async with running(durable_dsn) as run:
        keys = run.engine._parts.keys
        number = await run.insert(M, partition_key="k")
        await gate.wait_entered()
        with locked(durable_dsn, number):
            gate.open()
            await run.events.wait(StepStopped, id=number)
            await until(lambda: active_claims(run)[0].state is ClaimState.COMMITTING)
            db.execute(
                "select pg_terminate_backend(l.pid) from pg_locks l join pg_database d on d.oid = l.database"
                " where l.locktype = 'advisory' and d.datname = current_database()"  # others test on this server, too
            )
            await until(lambda: not keys.table.locked)
        assert (await run.ended(number)).status == "failed"
    assert owned == [True], "the row went back, and was claimed anew with its key"


async def test_a_stop_commits_beside_a_row_that_stays_locked(durable_dsn, db):
    gate = Gate()
    job = gated(gate)
    async with running(durable_dsn, drain_timeout=2) as run:
        numbers = [await run.insert(job, args={}) for _ in range(2)]
        await gate.wait_entered(2)
        with locked(durable_dsn, numbers[0]), locked(durable_dsn, numbers[1]) as other:
            gate.open()
            for number in numbers:
                await run.events.wait(StepStopped, id=number)
            run.engine.request_stop()
            await until(lambda: state_of(run, "flusher") == "stopping")
            await trio.sleep(0.3)  # a lock is waited for in the server, 100 ms at a time
            other.rollback()
            await until(lambda: db.row(numbers[1], "status, attempt") == ("done", 0))


async def test_a_stop_commits_beside_one_that_is_refused(durable_dsn, db):
    refuse_bad(db, "57014")
    gate = Gate()
    machine = saying(gate)
    async with running(durable_dsn, drain_timeout=2) as run:
        bad = await run.insert(machine, state={"say": "bad"})
        good = [await run.insert(machine, state={"say": "good"}) for _ in range(3)]
        await gate.wait_entered(4)
        with locked(durable_dsn, good[0]), locked(durable_dsn, good[1]), locked(durable_dsn, good[2]):
            gate.open()
            for number in (bad, *good):
                await run.events.wait(StepStopped, id=number)
            run.engine.request_stop()
            await until(lambda: state_of(run, "flusher") == "stopping")
            await trio.sleep(0.3)
    assert [db.row(number, "status, attempt") for number in good] == [("done", 0)] * 3
    assert db.row(bad, "status, attempt, interruptions") == ("runnable", 0, 1)


async def test_a_read_that_fails_after_the_commit_makes_nobody_stale(durable_dsn, monkeypatch):
    """One of the group was of unknown fate, its row is read, and the read fails: the others are committed."""
    real, read = flusher.commit_outcomes, flusher.read_claims
    commits = reads = 0
    apart, together = trio.Event(), trio.Event()

    async def commit(*args, **options):
        nonlocal commits
        commits += 1
        this = commits
        if this == 2:
            raise psycopg.errors.LockNotAvailable("so that it is set aside")
        if this == 3:
            await together.wait()  # meanwhile the two queue up for one group
        done = await real(*args, **options)
        if this == 1:
            raise da.CommitUnknown("the answer was lost")
        return done

    async def probe(conn, schema, numbers):
        return set(numbers) if apart.is_set() else set[int]()

    async def fails_once(*args, **options):
        nonlocal reads
        reads += 1
        if reads == 1:
            raise da.StoreUnavailable("away")
        return await read(*args, **options)

    gate = Gate()

    @da.job
    async def job(args):
        pass

    class Two(da.Machine, name="two"):
        @da.step(initial=True)
        async def start(self, ctx):
            await gate.wait()
            return da.Next(self.then)

        @da.step
        async def then(self, ctx):
            return da.Done()

    monkeypatch.setattr(flusher, "commit_outcomes", commit)
    monkeypatch.setattr(flusher, "probe_locks", probe)
    monkeypatch.setattr(flusher, "read_claims", fails_once)
    async with running(durable_dsn) as run:
        goes_on = await run.insert(Two)
        await gate.wait_entered()
        unknown = await run.insert(job, args={})
        await until(lambda: commits == 2)
        third = await run.insert(job, args={})
        await until(lambda: commits == 3)
        apart.set()
        gate.open()
        queue = run.engine._parts.commits
        await until(lambda: len(queue.entries) == 2)
        together.set()
        for number in (goes_on, unknown, third):
            row = await run.ended(number)
            assert (row.status, row.attempt) == ("done", 0)
    assert reads > 1
    assert not run.events.all(OutcomeStale)


async def test_a_refused_group_is_handled_a_few_at_a_time(durable_dsn, db, monkeypatch):
    """Four times as many outcomes wait for their commit as steps may run; of their `handle`s twice as many run."""
    refuse_bad(db, "P0001")
    real, blocked = flusher.commit_outcomes, trio.Event()
    handling, running_now, most = Gate(), 0, 0

    async def late(*args, **options):
        await blocked.wait()
        return await real(*args, **options)

    class M(da.Machine, name="m"):
        @da.step
        async def start(self, ctx):
            return da.Done("bad")

        async def handle(self, error, ctx):
            nonlocal running_now, most
            running_now += 1
            most = max(most, running_now)
            await handling.wait()
            await trio.sleep(0.05)
            running_now -= 1
            return da.Stop(error)

    monkeypatch.setattr(flusher, "commit_outcomes", late)
    async with running(durable_dsn, queues={"default": 2}) as run:
        numbers = [await run.insert(M) for _ in range(8)]
        parts = run.engine._parts
        dispatcher = parts.dispatchers["default"]
        await until(lambda: dispatcher.count(ClaimState.COMMITTING) == 8)
        assert not len(parts.pool)
        blocked.set()
        await until(lambda: len(parts.pool) == 8)  # a task for each
        await handling.wait_entered(4)
        await trio.sleep(5 * RECOVER_AGAIN)
        assert handling.entered == 4
        assert (dispatcher.count(ClaimState.RECOVERING), dispatcher.count(ClaimState.COMMITTING)) == (4, 4)
        handling.open()
        for number in numbers:
            row = await run.ended(number)
            assert (row.status, row.attempt) == ("failed", 0)
    assert most == 4


async def test_a_log_handler_that_fails_beside_a_cancelled_step_hurts_no_other_step(durable_dsn, db):
    """The task ends with the handler's error, and that is logged, too."""
    gate, other = Gate(), Gate()
    async with running(durable_dsn, **QUIET) as run:
        beside = await run.insert(gated(other, "bystander"))
        await other.wait_entered()
        number = await run.insert(gated(gate))
        await gate.wait_entered()
        [lost] = [each for each in active_claims(run) if each.claim.id == number]
        with failing_log():
            run.engine._node.claims.lose(lost, "another worker has claimed it")
            await until(lambda: len(active_claims(run)) == 1)
        other.open()
        assert (await run.ended(beside)).status == "done"
    assert len(run.events.all(StepStarted, id=beside)) == 1


@pytest.mark.parametrize("again", [False, True], ids=["once", "twice"])
async def test_a_log_handler_that_fails_at_a_refusal_costs_nobody_an_outcome(durable_dsn, db, caplog, again):
    """The refusal is logged in the flusher, which has others to serve. `handle` runs all the same."""
    refuse_bad(db, "P0001")
    gate, other = Gate(), Gate()

    class M(da.Machine, name="m"):
        @da.step
        async def start(self, ctx):
            await gate.wait()
            return da.Done("bad")

        async def handle(self, error, ctx):
            return da.Done("bad" if again else "handled")

    async with running(durable_dsn, **QUIET) as run:
        beside = await run.insert(gated(other, "bystander"))
        await other.wait_entered()
        number = await run.insert(M)
        await gate.wait_entered()
        with failing_log():
            gate.open()
            assert await run.events.final(number) == ("failed" if again else "done")
            await until(lambda: len(active_claims(run)) == 1)
        other.open()
        assert (await run.ended(beside)).status == "done"
        assert [run.events.all(StepStarted, id=each)[1:] for each in (number, beside)] == [[], []]
    assert db.row(number, "status, attempt") == ("failed" if again else "done", 0)
    assert "restarting" not in caplog.text
