"""Postgres is there and refuses a statement: no actor may die of that, and no step that runs with it."""

from __future__ import annotations

import durable_actors as da
import pytest
from durable_actors._engine.committing import spawn
from durable_actors._engine.maintenance.heartbeat import Heartbeat
from durable_actors.telemetry import StoreDown, StoreUp
from psycopg.errors import DeadlockDetected, InternalError_, QueryCanceled
from tests.engine.engine_kit import Gate, running
from tests.engine.kit import make_node, pick

REFUSE = """
create function durable.refuse() returns trigger language plpgsql as $$
begin
    if {} then raise exception 'not now'; end if;
    return new;
end $$;
create trigger refuse before update on durable.gen_durable for each row execute function durable.refuse();
"""
RENEWAL = "new.status = 'executing' and old.status = 'executing' and new.visit = old.visit"
CLAIM = "new.status = 'executing' and old.status = 'runnable'"
REAP = "new.status = 'runnable' and old.status = 'executing' and new.crashes > old.crashes"


@pytest.fixture(autouse=True)
def _isolated(registry):
    """What a test defines is forgotten."""


async def test_a_refused_renewal_cancels_nobody(durable_dsn, db):
    gate, runs = Gate(), []

    @da.job
    async def slow(args):
        runs.append(args)
        await gate.wait()
        return "finished"

    async with running(durable_dsn, lease_ttl=30, heartbeat_interval=0.05) as run:
        number = await run.insert(slow, args={})
        await gate.wait_entered()
        db.execute(REFUSE.format(RENEWAL))
        await run.events.wait(StoreDown, actor="heartbeat")
        db.execute("drop trigger refuse on durable.gen_durable")
        await run.events.wait(StoreUp, actor="heartbeat")
        gate.open()
        row = await run.ended(number)
        work = next(child for child in run.engine.snapshot().children if child.name == "work")
        assert [child.restarts for child in work.children] == [0] * len(work.children)
    assert (row.result, row.attempt, len(runs)) == ("finished", 0, 1)


async def test_a_refused_pick_is_tried_again(durable_dsn, db):
    @da.job
    async def quick(args):
        return "finished"

    async with running(durable_dsn) as run:
        db.execute(REFUSE.format(CLAIM))
        number = await run.insert(quick, args={})
        await run.events.wait(StoreDown, actor="feeder of 'default'")
        db.execute("drop trigger refuse on durable.gen_durable")
        assert (await run.ended(number)).result == "finished"
        work = next(child for child in run.engine.snapshot().children if child.name == "work")
        assert [child.restarts for child in work.children] == [0] * len(work.children)


async def test_a_refused_reap_is_tried_again(durable_dsn, db):
    @da.job(name="m")
    async def quick(args):
        return "finished"

    number = db.insert(
        status="executing", locked_by="gone", claim_id="8b3c6f0e-2d0a-5b57-9a43-6c1f0a7f4e21",
        lease_expires_at="2001-01-01", state="{}",
    )  # fmt: skip
    db.execute("update durable.gen_durable set step = 'perform' where id = %s", number)
    db.execute(REFUSE.format(REAP))
    async with running(durable_dsn) as run:
        await run.events.wait(StoreDown, actor="reaper")
        db.execute("drop trigger refuse on durable.gen_durable")
        assert (await run.ended(number)).result == "finished"


async def test_two_claims_of_one_instance_are_told_apart(durable_dsn, db):
    """A claim was taken back while it was trusted, and this very node has the next one: only the old one is lost."""
    number = db.insert(state="{}")
    async with make_node(durable_dsn) as node:
        [first] = await pick(node)
        old = node.claims.hold(first)
        db.execute(
            "update durable.gen_durable set status = 'runnable', claim_id = null, locked_by = null,"
            " lease_expires_at = null where id = %s",
            number,
        )
        [second] = await pick(node)
        new = node.claims.hold(second)
        trusted = first.trusted_until
        await Heartbeat(node)._beat()
        assert old.lost == "another worker has claimed it"
        assert first.trusted_until == trusted
        assert new.lost is None
        assert second.trusted_until > trusted


@pytest.mark.parametrize("error", [QueryCanceled("x"), DeadlockDetected("x"), InternalError_("x")])
async def test_a_refused_spawn_is_tried_again(durable_dsn, monkeypatch, error):
    """Nothing is wrong with the outcome: it must not go through `handle`, whose default ends the instance."""
    real, refusals = spawn.schedule_children, [error]

    async def refused(*args, **options):
        if refusals:
            raise refusals.pop()
        return await real(*args, **options)

    monkeypatch.setattr(spawn, "schedule_children", refused)

    @da.job
    async def leaf(args):
        return 1

    class Parent(da.Machine):
        @da.step
        async def start(self, ctx):
            return da.ScheduleChildren(self.end, [da.Child(leaf, args={})])

        @da.step
        async def end(self, ctx):
            return da.Done(len(ctx.children))

    async with running(durable_dsn) as run:
        row = await run.run(Parent)
    assert (row.result, row.attempt, refusals) == (1, 0, [])
