"""Nothing on the claim lane waits for a lock: picks, reaps and looks share its one connection."""

from __future__ import annotations

import durable_actors as da
import pytest
import trio
from tests.engine.kit import Db, expire, make_node, pick, reap, running
from tests.support.interleave import open_sessions

PARENT = {"status": "awaiting_children", "visit": 2, "await_step": "then", "children_total": 2}


def parent(db: Db, **columns: object) -> int:
    return db.insert(**PARENT | {"children_pending": 2} | columns)


async def test_a_quarantined_child_waits_for_its_locked_parent_and_nobody_else_does(db: Db):
    locked, free = parent(db), parent(db)
    children = [db.insert(parent_id=each, barrier=2) for each in (locked, free, free)]
    other = db.insert(crashes=0)
    async with make_node(db.dsn, name="silent") as silent, make_node(db.dsn, max_crashes=1) as node:
        await pick(silent)
        waiting = db.insert(queue="other")
        expire(db, *children)
        with open_sessions(db.dsn, 1) as (holder,):
            holder.run("begin")
            holder.run("select 1 from durable.gen_durable where id = %s for update", [locked])
            async with reap(node):
                await db.eventually("select status = 'runnable' from durable.gen_durable where id = %s", free)
                with trio.fail_after(10):
                    assert [claim.id for claim in await pick(node, queue="other")] == [waiting]
                expire(db, other)
                await db.eventually("select status = 'failed' from durable.gen_durable where id = %s", other)
                assert db.row(children[0], "status") == ("executing",)
                holder.run("rollback")
                await db.eventually(
                    "select status = 'failed' from durable.gen_durable where id = %s", children[0]
                )
        assert db.row(locked, "status, children_pending") == ("awaiting_children", 1), "counted once"
        assert db.row(free, "status, step, children_pending") == ("runnable", "then", 0)
        assert [db.row(child, "status, crashes") for child in children] == [("failed", 1)] * 3


async def test_a_straggler_does_not_wait_for_a_parent_that_has_gone_on(db: Db):
    """Its parent waits at another barrier, and is locked: this child is not counted there."""
    gone_on = parent(db, visit=3)
    straggler = db.insert(parent_id=gone_on, barrier=2)
    async with make_node(db.dsn, name="silent") as silent, make_node(db.dsn, max_crashes=1) as node:
        await pick(silent)
        expire(db, straggler)
        with open_sessions(db.dsn, 1) as (holder,):
            holder.run("begin")
            holder.run("select 1 from durable.gen_durable where id = %s for update", [gone_on])
            async with reap(node):
                await db.eventually(
                    "select status = 'failed' from durable.gen_durable where id = %s", straggler
                )
            holder.run("rollback")
        assert db.row(gone_on, "status, children_pending") == ("awaiting_children", 2)


async def test_without_a_limit_of_crashes_a_childs_claim_comes_back_beside_its_locked_parent(db: Db):
    waits = parent(db)
    child = db.insert(parent_id=waits, barrier=2, crashes=9)
    async with make_node(db.dsn, name="silent") as silent, make_node(db.dsn) as node:
        await pick(silent)
        expire(db, child)
        with open_sessions(db.dsn, 1) as (holder,):
            holder.run("begin")
            holder.run("select 1 from durable.gen_durable where id = %s for update", [waits])
            async with reap(node):
                await db.eventually(
                    "select status = 'runnable' from durable.gen_durable where id = %s", child
                )
            holder.run("rollback")


@pytest.mark.usefixtures("registry")
async def test_a_pick_that_meets_a_lock_holds_up_no_other_queue(durable_dsn, db):
    """A trigger of the user's waits for a lock as a row of one queue is claimed; the lane is that of all queues."""
    db.execute(
        """create table public.till (id int primary key);
        insert into public.till values (1);
        create function public.book() returns trigger language plpgsql as $$
        begin
            if new.queue = 'bad' and new.status = 'executing' and old.status = 'runnable' then
                perform 1 from public.till for update;
            end if;
            return new;
        end $$;
        create trigger book before update on durable.gen_durable for each row execute function public.book()"""
    )

    @da.job(name="quick")
    async def quick(args):
        return "finished"

    with open_sessions(durable_dsn, 1) as (holder,):
        holder.run("begin")
        holder.run("select 1 from public.till for update")
        async with running(durable_dsn, queues={"bad": 2, "good": 2}) as run:
            bad = await run.insert(quick, args={}, queue="bad")
            await db.eventually("select exists (select from pg_stat_activity where wait_event_type = 'Lock')")
            with trio.fail_after(20):
                for _ in range(5):
                    assert (await run.run(quick, args={}, queue="good")).result == "finished"
            assert db.row(bad, "status") == ("runnable",)
            holder.run("rollback")
            assert (await run.ended(bad)).result == "finished"
