"""ActiveClaims: kept alive by the heartbeat, given up when the claim is gone, trusted no longer than they last."""

from __future__ import annotations

import durable_actors as da
import psycopg
import pytest
import trio.testing
from durable_actors.telemetry import ClaimLost, OutcomeStale, StepCommitted
from tests.engine.kit import Gate, running
from tests.kit import until
from tests.support.faults import open_proxy

pytestmark = pytest.mark.usefixtures("registry")

BEATS = {"lease_ttl": 60, "heartbeat_interval": 0.03}
STEAL = "update durable.gen_durable set claim_id = gen_random_uuid(), locked_by = 'another' where id = %s"


def machine(gate: Gate, runs: list):
    class M(da.Machine):
        @da.step
        async def start(self, ctx):
            runs.append(ctx.attempt)
            try:
                await gate.wait()
            except trio.Cancelled:
                runs.append("cancelled")
                raise
            return da.Done("finished")

    return M


async def beats(db, count: int) -> None:
    """Until the heartbeat has gone round so many times."""
    for _ in range(count):
        [(seen,)] = db.execute("select seen_at from durable.nodes")
        await db.eventually("select seen_at > %s from durable.nodes", seen, timeout=30)


@pytest.mark.slow
async def test_a_step_outlives_its_lease(durable_dsn, db):
    runs: list = []

    class M(da.Machine):
        @da.step
        async def start(self, ctx):
            runs.append(ctx.attempt)
            [(first,)] = db.execute("select lease_expires_at from durable.gen_durable")
            await db.eventually("select now() > %s + interval '1 second'", first, timeout=30)
            return da.Done("finished")

    async with running(durable_dsn, lease_ttl=2, heartbeat_interval=0.2, reap_interval=0.1) as run:
        row = await run.run(M)
    assert (row.result, row.attempt, row.crashes, runs) == ("finished", 0, 0, [0])


async def test_every_claim_is_renewed_buffered_ones_too(durable_dsn, db):
    gate, runs = Gate(), []
    async with running(durable_dsn, queues={"default": da.Queue(1, prefetch=2)}, **BEATS) as run:
        ids = [await run.insert(machine(gate, runs)) for _ in range(3)]
        await gate.wait_entered()
        claimed = "select count(*) = 3 from durable.gen_durable where status = 'executing'"
        await db.eventually(claimed)
        leases = dict(db.execute("select id, lease_expires_at from durable.gen_durable"))
        for number, lease in leases.items():
            query = "select lease_expires_at > %s from durable.gen_durable where id = %s"
            await db.eventually(query, lease, number, timeout=30)
        assert gate.entered == 1  # the others have only waited
        gate.open()
        rows = [await run.ended(number) for number in ids]
    assert {(row.result, row.attempt) for row in rows} == {("finished", 0)}


async def test_a_claim_that_another_has_cancels_the_step(durable_dsn, db):
    gate, runs = Gate(), []
    async with running(durable_dsn, **BEATS) as run:
        number = await run.insert(machine(gate, runs))
        await gate.wait_entered()
        db.execute(STEAL, number)
        before = db.row(number, "*")
        lost = await run.events.wait(ClaimLost, id=number)
        assert "another worker" in lost.reason
        await beats(db, 2)
        assert db.row(number, "*") == before  # not committed, not released
        assert not run.events.all(StepCommitted, id=number)
    assert runs == [0, "cancelled"]


async def test_a_claim_that_nobody_has_cancels_the_step(durable_dsn, db):
    gate, runs = Gate(), []
    async with running(durable_dsn, **BEATS) as run:
        number = await run.insert(machine(gate, runs))
        await gate.wait_entered()
        db.execute("delete from durable.gen_durable where id = %s", number)
        lost = await run.events.wait(ClaimLost, id=number)
        assert "taken back" in lost.reason
    assert runs == [0, "cancelled"]


async def test_a_step_that_does_not_listen_commits_nothing(durable_dsn, db):
    """Shielded, it returns an outcome after it was cancelled: dropped."""
    gate = Gate()

    class M(da.Machine):
        @da.step
        async def start(self, ctx):
            with trio.CancelScope(shield=True):
                await gate.wait()
            return da.Done("deaf")

    async with running(durable_dsn, **BEATS) as run:
        number = await run.insert(M)
        await gate.wait_entered()
        db.execute(STEAL, number)
        await trio.testing.wait_all_tasks_blocked()
        held = next(iter(run.engine._node.claims.all()))
        await until(lambda: held.lost is not None)
        gate.open()
        await run.events.wait(ClaimLost, id=number)
        assert not run.events.all(OutcomeStale, id=number)  # it was not even sent
    assert db.row(number, "status::text, result, locked_by") == ("executing", None, "another")


async def test_an_unknown_round_is_no_loss(durable_dsn, db):
    """A row that somebody has locked cannot be renewed for the moment: the step goes on."""
    gate, runs = Gate(), []
    async with running(durable_dsn, **BEATS) as run:
        number = await run.insert(machine(gate, runs))
        await gate.wait_entered()
        with psycopg.connect(durable_dsn) as lock:
            lock.execute("select from durable.gen_durable where id = %s for update", [number])
            lease = db.row(number, "lease_expires_at")
            await beats(db, 4)
            assert db.row(number, "lease_expires_at") == lease
        gate.open()
        row = await run.ended(number)
    assert (row.result, row.attempt, runs) == ("finished", 0, [0])


async def test_trust_ends_with_the_lease(durable_dsn, db):
    """Nobody can be reached: the step is cancelled when its lease is over, before anybody else may run it."""
    gate, runs = Gate(), []
    async with open_proxy(durable_dsn) as proxy, running(proxy.dsn, lease_ttl=1.5, reap_interval=60) as run:
        number = await run.insert(machine(gate, runs))
        await gate.wait_entered()
        [(over_at,)] = db.execute("select lease_expires_at from durable.gen_durable where id = %s", number)
        proxy.blackhole()
        lost = await run.events.wait(ClaimLost, id=number)
        assert "renewed in time" in lost.reason
        gate.open()
        proxy.heal()
        row = await run.ended(number)  # given back, and run again
    assert over_at
    assert (row.result, row.attempt) == ("finished", 1)
    assert runs == [0, "cancelled", 1]


async def test_the_slot_is_free_again_after_a_loss(durable_dsn, db):
    gate, runs = Gate(), []
    M = machine(gate, runs)
    async with running(durable_dsn, queues={"default": 1}, **BEATS) as run:
        number = await run.insert(M)
        await gate.wait_entered()
        db.execute(STEAL, number)
        await run.events.wait(ClaimLost, id=number)
        gate.open()
        assert (await run.run(M)).result == "finished"
