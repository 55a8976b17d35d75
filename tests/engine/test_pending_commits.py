"""Pending commits: a step has ended, its task is gone, and something happens before its outcome is committed."""

from __future__ import annotations

import durable_actors as da
import pytest
import trio
from durable_actors._engine.claiming import feeder
from durable_actors._engine.claims import ClaimState
from durable_actors._engine.committing import flusher
from durable_actors._engine.committing.completion import Completion
from durable_actors._engine.maintenance import heartbeat
from durable_actors._engine.running.step_task import StepTasks
from durable_actors.telemetry import (
    ClaimLost,
    OutcomeLate,
    OutcomeStale,
    StepCommitted,
    StepStarted,
    StepStopped,
)
from tests.engine.kit import (
    QUICK,
    QUIET,
    Gate,
    Run,
    active_claims,
    gated,
    locked,
    nobody_reaps,
    refuse_bad,
    running,
    saying,
    state_of,
)
from tests.kit import until

pytestmark = pytest.mark.usefixtures("registry")


async def leave_one(run: Run, gate: Gate) -> int:
    """Insert one and let it come to the end of its step."""
    number = await run.insert(gated(gate))
    await gate.wait_entered()
    return number


async def test_its_task_is_gone_and_its_claim_is_kept(durable_dsn, db):
    gate = Gate()
    async with running(durable_dsn, lease_ttl=0.9, heartbeat_interval=0.1) as run:
        number = await leave_one(run, gate)
        parts = run.engine._parts
        dispatcher = parts.dispatchers["default"]
        with locked(durable_dsn, number):
            gate.open()
            await run.events.wait(StepStopped, id=number)
            [one] = active_claims(run)
            await until(lambda: one.state is ClaimState.COMMITTING)
            assert one.task is None
            assert not len(parts.pool)
            assert (dispatcher.running, dispatcher.count(ClaimState.COMMITTING)) == (0, 1)
            assert not run.events.all(StepCommitted)
        row = await run.ended(number)
        assert (row.status, row.result, row.attempt) == ("done", "finished", 0)
        await until(lambda: not active_claims(run))
        assert (dispatcher.running, dispatcher.count(ClaimState.COMMITTING)) == (0, 0)
        assert one.state is ClaimState.GONE


async def test_one_whose_lease_is_over_is_for_the_fence(durable_dsn, monkeypatch):
    """It cannot be committed for longer than its lease, nor renewed; but nobody else has claimed it."""

    async def away(*args, **options):
        raise da.StoreUnavailable("away")

    nobody_reaps(monkeypatch)
    gate = Gate()
    async with running(durable_dsn, lease_ttl=0.6, reap_interval=3600, **QUICK | {"node": "n"}) as run:
        number = await leave_one(run, gate)
        with locked(durable_dsn, number):
            gate.open()
            await run.events.wait(StepStopped, id=number)
            monkeypatch.setattr(heartbeat, "renew_leases", away)
            [one] = active_claims(run)
            await until(lambda: trio.current_time() > one.claim.trusted_until + 0.1)
        row = await run.ended(number)
    assert (row.status, row.attempt) == ("done", 0)
    assert len(run.events.all(StepStarted, id=number)) == 1, "it has run once"
    assert not run.events.all(ClaimLost)
    assert run.events.all(OutcomeLate, id=number)


async def test_one_whose_claim_is_lost_is_withdrawn(durable_dsn, db):
    gate = Gate()
    async with running(durable_dsn, heartbeat_interval=0.05, reap_interval=3600) as run:
        number = await leave_one(run, gate)
        with locked(durable_dsn, number) as other:
            gate.open()
            await run.events.wait(StepStopped, id=number)
            other.execute(
                "update durable.gen_durable set status = 'runnable', locked_by = null, lease_expires_at = null,"
                " claim_id = null, attempt = 1 where id = %s",
                [number],
            )
            other.commit()  # taken back, as by a reaper
            assert (await run.ended(number)).attempt == 1
        await until(lambda: not active_claims(run))
    told = [*run.events.all(OutcomeStale, id=number), *run.events.all(ClaimLost, id=number)]
    assert len(told) == 1, "withdrawn by the heartbeat, or refused by the fence: whoever was first"
    assert [event.attempt for event in run.events.all(StepCommitted, id=number)] == [1]


async def test_the_flusher_withdraws_what_the_heartbeat_says_is_lost(durable_dsn, db):
    """The row stays locked, so that the fence cannot tell."""
    gate = Gate()
    async with running(durable_dsn, **QUIET) as run:
        number = await leave_one(run, gate)
        with locked(durable_dsn, number):
            gate.open()
            await run.events.wait(StepStopped, id=number)
            [one] = active_claims(run)
            run.engine._node.claims.lose(one, "another worker has claimed it")
            lost = await run.events.wait(ClaimLost, id=number)
            await until(lambda: not active_claims(run))
            assert lost.reason == "another worker has claimed it"
            assert one.state is ClaimState.GONE
            assert run.engine._parts.dispatchers["default"].count(ClaimState.COMMITTING) == 0
    assert db.row(number, "status") == ("executing",), "nothing of it was written, and it was not given back"


async def test_a_flusher_that_dies_leaves_them_to_the_next(durable_dsn, monkeypatch):
    real, crash = flusher.commit_outcomes, True

    async def crashes(*args, **options):
        nonlocal crash
        if crash:
            crash = False
            raise RuntimeError("a bug")
        return await real(*args, **options)

    monkeypatch.setattr(flusher, "commit_outcomes", crashes)
    gate = Gate()
    job = gated(gate)
    gate.open()
    async with running(durable_dsn) as run:
        numbers = [await run.insert(job, args={}) for _ in range(3)]
        rows = [await run.ended(number) for number in numbers]
    assert [(row.status, row.attempt) for row in rows] == [("done", 0)] * 3
    assert not crash


async def test_an_end_that_fails_lets_its_claim_go(durable_dsn, db, monkeypatch, caplog):
    """A bug of ours, or of a log handler: nothing is renewed for nobody, and the flusher goes on."""
    committed = Completion._committed
    crash = True

    def crashes(self, pending, verdict, now):
        nonlocal crash
        if crash:
            crash = False
            raise RuntimeError("a bug")
        committed(self, pending, verdict, now)

    monkeypatch.setattr(Completion, "_committed", crashes)
    gate = Gate()
    job = gated(gate)
    gate.open()
    async with running(durable_dsn) as run:
        first = await run.insert(job, args={})
        await until(lambda: not crash)
        assert (await run.run(job, args={})).status == "done"
        await until(lambda: not active_claims(run))
        dispatcher = run.engine._parts.dispatchers["default"]
        await until(lambda: (dispatcher.running, dispatcher.count(ClaimState.COMMITTING)) == (0, 0))
    assert db.row(first, "status") == ("done",), "it was committed; only the follow-up failed"
    assert caplog.text.count("the follow-up of its outcome failed") == 1
    assert "restarting" not in caplog.text


async def test_a_refusal_that_comes_in_a_drain_gives_the_row_back(durable_dsn, db):
    """No task is started any more that could run `handle`: it runs elsewhere, from the step on."""
    refuse_bad(db, "P0001")
    gate = Gate()
    machine = saying(gate)
    async with running(durable_dsn, drain_timeout=5) as run:
        number = await run.insert(machine, state={"say": "bad"})
        await gate.wait_entered()
        with locked(durable_dsn, number):
            gate.open()
            await run.events.wait(StepStopped, id=number)
            run.engine.request_stop()
            await until(lambda: not run.engine._parts.pool.statistics().accepting)
    assert db.row(number, "status, attempt, crashes, interruptions") == ("runnable", 0, 0, 1)


async def test_a_stop_commits_what_is_left(durable_dsn, db):
    """Also when steps have no time at all: theirs is over, the outcome's is not."""
    gate = Gate()
    async with running(durable_dsn, drain_timeout=0) as run:
        number = await leave_one(run, gate)
        with locked(durable_dsn, number):
            gate.open()
            await run.events.wait(StepStopped, id=number)
            run.engine.request_stop()
            await until(lambda: state_of(run, "flusher") == "stopping")
            await trio.sleep(0.5)  # a lock is waited for in the server, 100 ms at a time
    assert db.row(number, "status, attempt") == ("done", 0)


async def test_a_task_is_gone_when_its_outcome_is_refused(durable_dsn, db, monkeypatch, caplog):
    """It leaves the outcome last: the task that runs `handle` has the claim alone."""
    refuse_bad(db, "P0001")
    reset = StepTasks._reset_context

    async def slowly(self):
        await trio.sleep(0.3)  # as if the step had left a context behind, on a machine that is slow
        await reset(self)

    monkeypatch.setattr(StepTasks, "_is_reset", lambda self: False)
    monkeypatch.setattr(StepTasks, "_reset_context", slowly)
    gate = Gate()
    gate.open()
    async with running(durable_dsn) as run:
        row = await run.run(saying(gate), state={"say": "bad"})
    assert row.status == "failed"
    assert "not on a Monday" in row.last_error
    assert "restarting" not in caplog.text


async def test_claimed_rows_begin_while_the_feeder_is_in_a_pick(durable_dsn, monkeypatch):
    """It may take long, and what is claimed already must not wait for it."""
    real, picks, pick = feeder.pick_instances, 0, Gate()

    async def slow(*args, **options):
        nonlocal picks
        picks += 1
        if picks > 1:
            await pick.wait()
        return await real(*args, **options)

    monkeypatch.setattr(feeder, "pick_instances", slow)

    @da.job
    async def noop(args):
        pass

    async with da.open_client(durable_dsn) as client:
        numbers = [await client.insert(noop, args={}) for _ in range(9)]
    async with running(durable_dsn, queues={"default": da.Queue(1, prefetch=8)}, **QUIET) as run:
        for number in numbers:  # one slot, and at most four in hand
            await run.events.final(number)
        pick.open()
    assert picks > 1


async def test_steps_that_wait_all_begin(durable_dsn):
    gate = Gate()
    job = gated(gate)
    async with running(durable_dsn, queues={"default": da.Queue(40, prefetch=20)}) as run:
        numbers = [await run.insert(job, args={}) for _ in range(60)]
        await gate.wait_entered(40)
        gate.open()
        for number in numbers:
            assert (await run.ended(number)).status == "done"
    assert gate.entered == 60
