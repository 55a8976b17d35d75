"""Stale workers: whoever lost a claim changes nothing any more, whatever it returns."""

from __future__ import annotations

import durable_actors as da
import psycopg
import pytest
import trio.testing
from durable_actors.telemetry import OutcomeStale, StepCommitted
from tests.engine.kit import REAP, Gate, running

pytestmark = pytest.mark.usefixtures("registry")

ROW = "select to_jsonb(g) from durable.gen_durable g where id = %s"
KINDS = ["Next", "Retry", "Done", "Stop", "Await", "ScheduleChildren", "error"]


def machine(kind: str, stale: Gate, owner: Gate, ahead: bool):
    """The first run is the one that loses its claim; the second owns it then."""

    class Kid(da.Machine, name="kid", queue="nobody"):
        @da.step
        async def start(self, ctx):
            return da.Done()

    class M(da.Machine, run_ahead=ahead):
        @da.step
        async def start(self, ctx):
            if ctx.attempt:
                await owner.wait()
                return da.Done("the owner's")
            await stale.wait()
            outcomes = {
                "Next": lambda: da.Next(self.other, {"stale": True}, partition_key="stale"),
                "Retry": lambda: da.Retry({"stale": True}, delay=600),
                "Done": lambda: da.Done("stale"),
                "Stop": lambda: da.Stop("stale"),
                "Await": lambda: da.Await("s", {"stale": True}, then=self.other, timeout=600),
                "ScheduleChildren": lambda: da.ScheduleChildren(self.other, [Kid, Kid], {"stale": True}),
                "error": lambda: 1 / 0,
            }
            return outcomes[kind]()

        @da.step
        async def other(self, ctx):
            raise AssertionError("nothing stale may get here")

    return M


@pytest.mark.parametrize("kind", KINDS)
async def test_a_late_outcome_of_a_lost_claim_changes_nothing(durable_dsn, db, ahead, kind):
    """The same engine claims again (H40): its name alone must not let the old task pass."""
    stale, owner = Gate(), Gate()
    M = machine(kind, stale, owner, ahead)
    async with running(durable_dsn) as run:
        number = await run.insert(M, state={"old": 1})
        await stale.wait_entered()
        db.execute(REAP, number)
        await owner.wait_entered()
        before = db.execute(ROW, number)
        stale.open()
        event = await run.events.wait(OutcomeStale, id=number)
        assert (event.attempt, event.step) == (0, "start")
        assert db.execute(ROW, number) == before
        assert db.execute("select count(*)::int from durable.gen_durable") == [(1,)]
        owner.open()
        row = await run.ended(number)
    assert (row.status, row.result, row.attempt, row.crashes) == ("done", "the owner's", 1, 1)
    assert row.state == {"old": 1}
    assert row.visit == 1


async def test_two_claims_of_one_instance_in_one_flush(durable_dsn, db):
    """H41: the stale entry and the owner's are never in one statement; exactly one is committed."""
    stale, owner, other = Gate(), Gate(), Gate()
    M = machine("Done", stale, owner, ahead=True)

    class Blocker(da.Machine):
        @da.step
        async def start(self, ctx):
            await other.wait()
            return da.Done()

    async with running(durable_dsn) as run:
        number, blocker = await run.insert(M), await run.insert(Blocker)
        await stale.wait_entered()
        db.execute(REAP, number)
        await owner.wait_entered()
        await other.wait_entered()
        with psycopg.connect(durable_dsn) as lock:
            lock.execute("select from durable.gen_durable where id = %s for update", [blocker])
            other.open()  # its commit waits for the lock, and the two others queue up behind it
            await db.eventually(
                "select exists (select from pg_stat_activity where datname = current_database()"
                " and wait_event_type = 'Lock')"
            )
            stale.open()
            owner.open()
            await trio.testing.wait_all_tasks_blocked(0.01)
        row = await run.ended(number)
        await run.events.wait(OutcomeStale, id=number)
        assert len(run.events.all(StepCommitted, id=number)) == 1
    assert row.result == "the owner's"


EXPIRE = "update durable.gen_durable set lease_expires_at = now() - interval '1 second' where id = %s"


@pytest.mark.parametrize("late", ["accept", "reject"])
async def test_a_commit_after_the_lease(durable_dsn, db, late):
    """While the claim is current it is accepted, unless the operator says otherwise. A lock keeps the reaper away."""
    gate = Gate()

    class M(da.Machine):
        @da.step
        async def start(self, ctx):
            if ctx.attempt:
                return da.Done("run again")
            await gate.wait()
            return da.Done("late")

    async with running(durable_dsn, late_commit=late, reap_interval=0.05) as run:
        number = await run.insert(M)
        await gate.wait_entered()
        with psycopg.connect(durable_dsn) as lock:
            lock.execute(EXPIRE, [number])
            gate.open()
            await db.eventually(
                "select exists (select from pg_stat_activity where datname = current_database()"
                " and wait_event_type = 'Lock')"
            )
        row = await run.ended(number)
        stale = run.events.all(OutcomeStale, id=number)
    if late == "accept":
        assert (row.result, row.attempt, stale) == ("late", 0, [])
    else:
        assert (row.result, row.attempt, len(stale)) == ("run again", 1, 1)


async def test_a_worker_that_was_overtaken_by_the_end(durable_dsn, db):
    """I8: a terminal row never changes."""
    gate = Gate()

    class M(da.Machine):
        @da.step
        async def start(self, ctx):
            await gate.wait()
            return da.Done("late")

    async with running(durable_dsn) as run:
        number = await run.insert(M)
        await gate.wait_entered()
        db.execute(
            "update durable.gen_durable set status = 'failed', last_error = 'by an operator', finished_at = now(),"
            " locked_by = null, lease_expires_at = null, claim_id = null where id = %s",
            number,
        )
        gate.open()
        await run.events.wait(OutcomeStale, id=number)
        row = await run.ended(number)
    assert (row.status, row.last_error, row.result) == ("failed", "by an operator", None)
