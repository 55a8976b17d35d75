"""The flusher at its edges: fates that stay unknown across detours, large groups, a stop without Postgres."""

from __future__ import annotations

from types import SimpleNamespace

import durable_actors as da
import pytest
import trio
import trio.testing
from durable_actors._engine.claims import ActiveClaim
from durable_actors._engine.committing import flusher
from durable_actors._engine.committing.flusher import Flusher
from durable_actors._engine.committing.queue import MAX_BYTES, Commits, Entry, Release
from durable_actors._engine.store_health import StoreHealth
from durable_actors._store.claim import OFFERED
from durable_actors._store.rows import Transition
from durable_actors.errors import CommitUnknown, StoreUnavailable
from durable_actors.otp import Address
from durable_actors.telemetry import OutcomeStale
from psycopg.errors import LockNotAvailable, UntranslatableCharacter
from tests.engine.engine_kit import Gate, running
from tests.engine.kit import claim

pytestmark = pytest.mark.usefixtures("registry")


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
        monkeypatch.setattr(flusher, "release_claims", away)
        began = trio.current_time()
    assert trio.current_time() - began < 9  # the supervisor's patience alone would be eleven
    assert "1 claim could not be given back" in caplog.text


async def test_an_error_of_the_block_survives_a_stop_without_postgres(durable_dsn, monkeypatch):
    async def away(*args, **kwargs):
        raise StoreUnavailable("away")

    monkeypatch.setattr(flusher, "FLUSH_TIME", 0.1)
    monkeypatch.setattr(flusher, "release_claims", away)
    gate = Gate()

    @da.job
    async def slow(args):
        await gate.wait()

    with pytest.raises(ValueError, match="the block's own"):
        async with running(durable_dsn, drain_timeout=0) as run:
            await run.insert(slow, args={})
            await gate.wait_entered()
            raise ValueError("the block's own")


def queued(commits: Commits, number: int, size: int) -> None:
    transition = Transition(claim(None, number), "runnable", "s", 0, state=b"x" * size)
    entry = Entry(transition, ActiveClaim(transition.claim), object())  # type: ignore[arg-type]
    commits.entries.append(entry)


def test_a_group_is_bounded_by_its_bytes():
    commits = Commits(Address("flusher", capacity=1))
    for number in range(4):
        queued(commits, number, MAX_BYTES // 2)
    queued(commits, 4, 10)
    taken = [[entry.transition.claim.id for entry in commits.take()] for _ in range(4)]
    assert taken == [[0, 1], [2, 3], [4], []]


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


async def test_the_first_outcome_of_a_group_wakes_the_flusher(nursery):
    """The others need not: it sleeps only when nothing is queued, and looks before it sleeps."""
    wake: Address[object] = Address("flusher", capacity=10)
    queue = Commits(wake)

    async def step(number: int) -> None:
        held = ActiveClaim(claim(None, number))
        change = Transition(held.claim, "done", "s", attempt=0)
        await queue.commit(change, held)

    for number in (1, 2):
        nursery.start_soon(step, number)
    await trio.testing.wait_all_tasks_blocked()
    assert wake.statistics().depth == 1
    assert len(queue.take()) == 2
    nursery.start_soon(step, 3)  # while those are committed
    await trio.testing.wait_all_tasks_blocked()
    assert wake.statistics().depth == 2
    nursery.cancel_scope.cancel()
