"""Group commits: one statement for many outcomes, bad data isolated, unknown results read back, stops in an outage."""

from __future__ import annotations

from types import SimpleNamespace

import durable_actors as da
import psycopg
import pytest
import trio
import trio.testing
from durable_actors._engine.claims import ActiveClaim
from durable_actors._engine.committing import flusher, releases
from durable_actors._engine.committing.flusher import Flusher
from durable_actors._engine.committing.queue import MAX_BYTES, SPLIT_ABOVE, Commits, PendingCommit, Release
from durable_actors._engine.committing.verdicts import STALE
from durable_actors._engine.store_health import StoreHealth
from durable_actors._store.holds import OFFERED
from durable_actors._store.rows import Transition
from durable_actors.errors import CommitUnknown, StoreUnavailable
from durable_actors.otp import Address
from durable_actors.telemetry import OutcomeStale, StoreDown, StoreUp
from psycopg.errors import LockNotAvailable, UntranslatableCharacter
from tests.engine.kit import QUIET, Gate, claim, running
from tests.kit import until
from tests.support.faults import open_proxy
from tests.support.sql import count_statements

pytestmark = pytest.mark.usefixtures("registry")

COMMIT = "o.stays and not"
BLOCKED = "select exists (select from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock')"
TERMINATE = (
    "select pg_terminate_backend(pid) from pg_stat_activity"
    " where datname = current_database() and wait_event_type = 'Lock'"
)


def gated(gate: Gate, result=None, ahead=True, name="gated"):
    class M(da.Machine, name=name, run_ahead=ahead):
        @da.step
        async def start(self, ctx):
            await gate.wait()
            return result(self, ctx) if result else da.Done(ctx.id)

        @da.step
        async def end(self, ctx):
            return da.Done("end")

        async def handle(self, error, ctx):
            return da.Stop(f"handled {type(error).__name__}")

    return M


@pytest.mark.parametrize("kind", ["Done", "Next", "mixed"])
async def test_many_outcomes_are_one_statement(durable_dsn, kind):
    gate = Gate()

    def result(self, ctx):
        if kind == "Done" or (kind == "mixed" and ctx.state["i"] % 3 == 0):
            return da.Done(1)
        if kind == "Next" or ctx.state["i"] % 3 == 1:
            return da.Next(self.end, {"x": 1})
        return da.Retry(delay=600)

    M = gated(gate, result, ahead=False)
    async with running(durable_dsn, queues={"default": 40}, **QUIET) as run:
        await run.engine.client.insert_many(M, [{"state": {"i": i}} for i in range(40)])
        await gate.wait_entered(40)
        run.engine._node.draining.value = True  # no pick disturbs the count
        with count_statements(durable_dsn) as count:
            gate.open()
            await trio.testing.wait_all_tasks_blocked()
            await until(lambda: not run.engine._node.claims.all())
    assert count.calls(COMMIT) == 1, count
    # The reaper's statement may be counted, too: it begins otherwise.
    commits = [each for each in count.statements if each.query.startswith('update "durable".gen_durable')]
    assert sum(each.calls for each in commits) == 1, count


async def test_a_lone_outcome_does_not_linger(durable_dsn):
    """H50: no timer. A chain of 150 steps on one slot is 150 commits, one after the other."""

    class Chain(da.Machine):
        @da.step
        async def start(self, ctx):
            return da.Next(self.start) if ctx.visit < 150 else da.Done()

    async with running(durable_dsn, queues={"default": 1}) as run:
        assert (await run.run(Chain)).visit == 150


async def test_poison_fails_alone(durable_dsn):
    """H42: 49 of 50 commit in the same breath, the one with a NUL goes through its handle."""
    gate, runs = Gate(), []

    def result(self, ctx):
        runs.append(ctx.id)
        return da.Done("a\0b" if ctx.state.get("poison") else "fine")

    M = gated(gate, result)
    async with running(durable_dsn, queues={"default": 50}, **QUIET) as run:
        states = [{"state": {"poison": i == 17}} for i in range(50)]
        ids = await run.engine.client.insert_many(M, states)
        await gate.wait_entered(50)
        with count_statements(durable_dsn) as count:
            gate.open()
            rows = [await run.ended(number) for number in ids if number]
    assert [row.result for row in rows if row.status == "done"] == ["fine"] * 49
    [bad] = [row for row in rows if row.status == "failed"]
    assert bad.id == ids[17]
    assert "handled" in (bad.last_error or "")
    assert sorted(runs) == sorted(ids)  # nobody ran twice
    assert count.calls(COMMIT) <= 16, count  # bisected, not one by one


@pytest.mark.parametrize("kind", ["Done", "Next", "Retry"])
async def test_a_lost_answer_is_read_back(durable_dsn, ahead, kind):
    """H43: the commit happened, its answer got lost: the row tells. No step runs twice."""
    gate, runs = Gate(), []

    class M(da.Machine, run_ahead=ahead):
        @da.step
        async def start(self, ctx):
            runs.append((ctx.step, ctx.attempt))
            await gate.wait()
            if kind == "Done" or ctx.attempt:
                return da.Done("end")
            return da.Next(self.end, {"n": 1}) if kind == "Next" else da.Retry({"n": 1})

        @da.step
        async def end(self, ctx):
            runs.append((ctx.step, ctx.attempt))
            assert ctx.state == {"n": 1}
            return da.Done("end")

    async with open_proxy(durable_dsn) as proxy, running(proxy.dsn) as run:
        warm = Gate()
        warm.open()
        await run.run(gated(warm))  # the statement is prepared
        number = await run.insert(M)
        await gate.wait_entered()
        proxy.lose_reply(after=b"commit_outcomes")
        gate.open()
        await proxy.wait_lost()
        row = await run.ended(number)
    second = {"Done": [], "Next": [("end", 0)], "Retry": [("start", 1)]}[kind]
    assert runs == [("start", 0), *second]
    assert (row.status, row.result, row.crashes) == ("done", "end", 0)


async def test_a_commit_that_never_arrived_is_sent_again(durable_dsn):
    gate, runs = Gate(), []

    def result(self, ctx):
        runs.append(ctx.attempt)
        return da.Done("end")

    async with open_proxy(durable_dsn) as proxy, running(proxy.dsn) as run:
        warm = Gate()
        warm.open()
        # Of another name: a pick that is under way while a machine is defined again runs what it knows.
        await run.run(gated(warm, name="warm"))
        number = await run.insert(gated(gate, result))
        await gate.wait_entered()
        proxy.lose_request(before=b"commit_outcomes")
        gate.open()
        await proxy.wait_lost()
        row = await run.ended(number)
    assert (row.result, row.attempt, runs) == ("end", 0, [0])


async def test_a_killed_backend_costs_nobody_a_run(durable_dsn, db):
    gate, runs = Gate(), []

    def result(self, ctx):
        runs.append(ctx.attempt)
        return da.Done("end")

    async with running(durable_dsn) as run:
        number = await run.insert(gated(gate, result))
        await gate.wait_entered()
        with psycopg.connect(durable_dsn) as lock:
            lock.execute("select from durable.gen_durable where id = %s for update", [number])
            gate.open()
            await db.eventually(BLOCKED)
            db.execute(TERMINATE)
            await run.events.wait(StoreDown, actor="flusher")
        row = await run.ended(number)
        await run.events.wait(StoreUp, actor="flusher")
    assert (row.result, row.attempt, runs) == ("end", 0, [0])


@pytest.mark.parametrize(
    "error",
    [
        psycopg.errors.DeadlockDetected("x"),
        psycopg.errors.SerializationFailure("x"),
        psycopg.errors.LockNotAvailable("x"),
        psycopg.errors.DiskFull("x"),
        psycopg.errors.AdminShutdown("x"),
        StoreUnavailable("x"),
        CommitUnknown("x"),
    ],
)
async def test_transient_errors_are_retried(durable_dsn, monkeypatch, error):
    runs, real, failures = [], flusher.commit_outcomes, [error, error]

    async def flaky(*args, **kwargs):
        if failures:
            raise failures.pop()
        return await real(*args, **kwargs)

    class M(da.Machine):
        @da.step
        async def start(self, ctx):
            runs.append(ctx.attempt)
            return da.Done("end")

    monkeypatch.setattr(flusher, "commit_outcomes", flaky)
    async with running(durable_dsn) as run:
        row = await run.run(M)
    assert (row.result, row.attempt, runs, failures) == ("end", 0, [0], [])


async def test_a_flusher_that_dies_loses_nothing(durable_dsn, monkeypatch):
    """A bug in it: the supervisor restarts what depends on it, and every instance still ends."""
    runs, real, bugs = [], flusher.commit_outcomes, [AssertionError("a bug")]

    async def buggy(*args, **kwargs):
        if bugs:
            raise bugs.pop()
        return await real(*args, **kwargs)

    class M(da.Machine):
        @da.step
        async def start(self, ctx):
            runs.append(ctx.attempt)
            return da.Done("end")

    monkeypatch.setattr(flusher, "commit_outcomes", buggy)
    async with running(durable_dsn, lease_ttl=2, reap_interval=0.2) as run:
        row = await run.run(M)
    assert (row.result, bugs) == ("end", [])


async def test_a_release_that_fails_is_repeated(durable_dsn, db, monkeypatch):
    """A claim that is forgotten would block its instance for a whole lease."""
    real, failures = releases.release_claims, [psycopg.errors.DeadlockDetected("x"), StoreUnavailable("x")]

    async def flaky(*args, **kwargs):
        if failures:
            raise failures.pop()
        return await real(*args, **kwargs)

    gate = Gate()
    monkeypatch.setattr(releases, "release_claims", flaky)
    async with running(durable_dsn, drain_timeout=0) as run:
        number = await run.insert(gated(gate))
        await gate.wait_entered()
    assert failures == []
    assert db.row(number, "status::text, attempt, crashes, interruptions") == ("runnable", 0, 0, 1)


@pytest.mark.parametrize("detour", [LockNotAvailable("x"), UntranslatableCharacter("x"), AssertionError("x")])
async def test_an_unknown_fate_stays_unknown(durable_dsn, monkeypatch, detour):
    """Committed, the answer lost; then the row was locked, the batch bisected, or the flusher died."""
    real, probe, calls = flusher.commit_outcomes, flusher.probe_locks, []

    async def flaky(conn, schema, transitions, **options):
        calls.append(len(transitions))
        if len(calls) == 1:
            await real(conn, schema, transitions, **options)
            raise CommitUnknown("x")
        if len(calls) == 2:
            raise detour
        return await real(conn, schema, transitions, **options)

    async def locked_once(*args):
        monkeypatch.setattr(flusher, "probe_locks", probe)
        return set()

    gate, runs = Gate(), []

    @da.job
    async def twin(args):
        runs.append(args)
        await gate.wait()
        return "finished"

    monkeypatch.setattr(flusher, "commit_outcomes", flaky)
    monkeypatch.setattr(flusher, "probe_locks", locked_once)
    async with running(durable_dsn) as run:
        numbers = [await run.insert(twin, args={"n": n}) for n in range(2)]
        await gate.wait_entered(2)
        gate.open()
        rows = [await run.ended(number) for number in numbers]
        for number in numbers:
            assert await run.events.final(number) == "done"
        assert run.events.all(OutcomeStale) == []
    assert [(row.result, row.attempt) for row in rows] == [("finished", 0)] * 2
    assert len(runs) == 2


async def test_a_stop_without_postgres_ends_in_time(durable_dsn, monkeypatch, caplog):
    """What cannot be given back is left to its lease: no error, and not twice the time."""

    async def away(*args, **kwargs):
        raise StoreUnavailable("away")

    gate = Gate()

    @da.job
    async def slow(args):
        await gate.wait()

    monkeypatch.setattr(flusher, "FLUSH_TIME", 0.3)
    async with running(durable_dsn, drain_timeout=0) as run:
        await run.insert(slow, args={})
        await gate.wait_entered()
        monkeypatch.setattr(releases, "release_claims", away)
        began = trio.current_time()
    assert trio.current_time() - began < 9  # the supervisor's patience alone would be eleven
    assert "1 claim could not be given back" in caplog.text


async def test_an_error_of_the_block_survives_a_stop_without_postgres(durable_dsn, monkeypatch):
    async def away(*args, **kwargs):
        raise StoreUnavailable("away")

    monkeypatch.setattr(flusher, "FLUSH_TIME", 0.1)
    monkeypatch.setattr(releases, "release_claims", away)
    gate = Gate()

    @da.job
    async def slow(args):
        await gate.wait()

    with pytest.raises(ValueError, match="the block's own"):
        async with running(durable_dsn, drain_timeout=0) as run:
            await run.insert(slow, args={})
            await gate.wait_entered()
            raise ValueError("the block's own")


def pending(number: int = 1, *, size: int = 0, keep_claim: bool = False, claim_id: str = "") -> PendingCommit:
    """An outcome of an instance that no row knows of."""
    active = ActiveClaim(
        claim(None, number, trusted_until=0.0, **({"claim_id": claim_id} if claim_id else {}))
    )
    change = Transition(active.claim, "runnable", "s", 0, state=b"x" * size, keep_claim=keep_claim)
    return PendingCommit(active, None, change, "Next")


Settled = list[tuple[PendingCommit, object, float]]


def recording() -> tuple[Commits, Settled]:
    """A queue, and what was settled."""
    settled: Settled = []
    return Commits(Address("flusher", capacity=1), lambda *call: settled.append(call)), settled


def numbers_of(group: list[PendingCommit]) -> list[int]:
    return [each.transition.claim.id for each in group]


async def test_a_group_is_bounded_by_its_bytes():
    commits, _ = recording()
    for number in range(4):
        commits.enqueue(pending(number, size=MAX_BYTES // 2))
    commits.enqueue(pending(4, size=10))
    taken = [numbers_of(commits.take(0.0)) for _ in range(4)]
    assert taken == [[0, 1], [2, 3], [4], []]


async def test_of_a_large_queue_half_of_those_that_continue_wait_for_the_next_group():
    commits, _ = recording()
    count = 3 * SPLIT_ABOVE
    for number in range(count):
        commits.enqueue(pending(number, keep_claim=number % 3 > 0))
    assert numbers_of(commits.take(0.0)) == list(range(count - SPLIT_ABOVE))
    assert numbers_of(commits.take(0.0)) == list(range(count - SPLIT_ABOVE, count))


async def test_two_outcomes_of_one_instance_are_in_two_groups():
    commits, _ = recording()
    old, new, other = pending(1, claim_id="old"), pending(1, claim_id="new"), pending(2)
    for each in (old, new, other):
        commits.enqueue(each)
    assert commits.take(0.0) == [old, other]
    assert commits.take(0.0) == [new]


def test_an_outcome_is_settled_once():
    commits, settled = recording()
    first, second = pending(1), pending(2)
    commits.answer(first, STALE, 1.0)
    commits.answer(first, STALE, 2.0)
    commits.answer(first, None, 3.0)
    commits.answer(second, None, 4.0)
    commits.answer(second, None, 5.0)
    commits.answer(second, STALE, 6.0)
    assert settled == [(first, STALE, 1.0), (second, None, 4.0)]


async def test_an_outcome_whose_claim_is_lost_is_withdrawn_and_one_whose_lease_has_expired_is_not():
    commits, settled = recording()
    lost, expired = pending(1), pending(2)
    lost.active.lost = "another worker has claimed it"
    for each in (lost, expired):
        commits.enqueue(each)
    assert expired.active.claim.trusted_until < 1000.0
    assert commits.take(1000.0) == [expired]
    assert settled == [(lost, None, 1000.0)]
    expired.active.lost = "another worker has claimed it"
    assert commits.unanswered([expired], 1001.0) == []
    assert settled[1:] == [(expired, None, 1001.0)]


def test_what_is_set_aside_or_answered_is_not_committed_with_its_group():
    commits, _ = recording()
    aside, answered, open_ = pending(1), pending(2), pending(3)
    aside.aside = True
    commits.answer(answered, STALE, 0.0)
    assert commits.unanswered([aside, answered, open_], 0.0) == [open_]
    assert aside.open


async def test_a_row_may_stay_locked_for_hours(autojump_clock):
    address: Address[object] = Address("flusher", capacity=1)
    commits = Commits(address)
    actor = Flusher(SimpleNamespace(health=StoreHealth()), commits)  # type: ignore[arg-type]
    actor.address = address
    how = Release(1, hold=OFFERED, tries=5000)
    began = trio.current_time()
    await actor._queue_later(how, [claim(None)])
    assert trio.current_time() - began <= flusher.LOCK_PAUSE
    assert list(commits.releases) == [how]


async def test_the_first_outcome_of_a_group_wakes_the_flusher():
    """The others need not: it sleeps only when nothing is queued, and looks before it sleeps."""
    wake: Address[object] = Address("flusher", capacity=10)
    commits = Commits(wake)
    for number in (1, 2):
        commits.enqueue(pending(number))
    assert wake.statistics().depth == 1
    assert len(commits.take(0.0)) == 2
    commits.enqueue(pending(3))  # while those are committed
    assert wake.statistics().depth == 2
