"""A row that is locked while its claim is given back: tried again, not left to its lease."""

from __future__ import annotations

from durable_actors._engine.committing.flusher import Flusher
from durable_actors._engine.committing.queue import Commits
from durable_actors._store.holds import HELD
from durable_actors.otp import ActorChild, Address, Supervisor, open_tree
from tests.engine.kit import Db, make_node, pick
from tests.support.interleave import open_sessions


async def test_a_locked_row_is_released_when_its_lock_is_gone(db: Db):
    """Another node's pick locks the running row of a key for a moment, to hold siblings behind it."""
    first, second = db.insert(partition_key="k"), db.insert()
    async with make_node(db.dsn) as node:
        wake: Address[object] = Address("flusher", capacity=1)
        commits = Commits(wake)
        async with open_tree(Supervisor("test", [ActorChild(wake, lambda: Flusher(node, commits))])):
            claims = await pick(node)
            with open_sessions(db.dsn, 1) as (other,):
                other.run("begin")
                other.run("select 1 from durable.gen_durable where id = %s for no key update", [first])
                for claim in claims:
                    commits.release(claim, attempts=0, hold=HELD)
                await db.eventually(
                    "select status = 'runnable' from durable.gen_durable where id = %s", second
                )
                assert db.row(first, "status") == ("executing",)
                other.run("rollback")
            await db.eventually("select status = 'runnable' from durable.gen_durable where id = %s", first)
        assert db.row(first, "hold, attempt, claim_id") == (1, 0, None)


async def test_a_claim_that_was_lost_is_not_tried_again(db: Db):
    number = db.insert()
    async with make_node(db.dsn) as node, make_node(db.dsn, name="other") as other:
        wake: Address[object] = Address("flusher", capacity=1)
        commits = Commits(wake)
        [old] = await pick(node)
        db.execute(
            "update durable.gen_durable set status = 'runnable', claim_id = null, locked_by = null,"
            " lease_expires_at = null where id = %s",
            number,
        )
        [new] = await pick(other)
        async with open_tree(Supervisor("test", [ActorChild(wake, lambda: Flusher(node, commits))])):
            commits.release(old, attempts=1)
        assert not commits.releases
        assert db.row(number, "status, claim_id::text, attempt") == ("executing", new.claim_id, 0)


async def test_a_drain_does_not_wait_for_a_row_that_stays_locked(db: Db):
    number = db.insert()
    async with make_node(db.dsn) as node:
        wake: Address[object] = Address("flusher", capacity=1)
        commits = Commits(wake)
        [claim] = await pick(node)
        with open_sessions(db.dsn, 1) as (other,):
            other.run("begin")
            other.run("select 1 from durable.gen_durable where id = %s for no key update", [number])
            async with open_tree(Supervisor("test", [ActorChild(wake, lambda: Flusher(node, commits))])):
                commits.release(claim, attempts=1)
        assert db.row(number, "status") == ("executing",), "its lease ends it"
