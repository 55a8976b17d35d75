"""Postgres refuses a statement: neighbours in the group go on, the reason shows, and no actor dies."""

from __future__ import annotations

import durable_actors as da
import psycopg
import pytest
from durable_actors._engine.claims import ActiveClaim
from durable_actors._engine.committing import flusher, spawn
from durable_actors._engine.committing.verdicts import blames_data
from durable_actors._engine.maintenance.heartbeat import Heartbeat
from durable_actors._engine.running import context_port as port
from durable_actors.telemetry import StepCommitted, StoreDown, StoreUp
from psycopg.errors import DeadlockDetected, InternalError_, QueryCanceled
from tests.engine.kit import Gate, make_node, pick, refuse_bad, running, saying

pytestmark = pytest.mark.usefixtures("registry")


@pytest.mark.parametrize("code", ["P0001", "P0004", "AB123", "23514", "22000"])
async def test_a_rule_of_the_users_is_for_handle(durable_dsn, db, code):
    refuse_bad(db, code)
    gate = Gate()
    machine = saying(gate)
    async with running(durable_dsn, queues={"default": 20}) as run:
        bad = await run.insert(machine, state={"say": "bad"})
        good = [await run.insert(machine, state={"say": "good"}) for _ in range(9)]
        await gate.wait_entered(10)
        gate.open()  # one group of ten
        rows = [await run.ended(number) for number in good]
        row = await run.ended(bad)
    assert {each.result for each in rows} == {"good"}
    assert row.status == "failed"
    assert "not on a Monday" in row.last_error


@pytest.mark.parametrize("code", ["57014", "XX000", "42501", "40001"])
async def test_what_may_pass_is_tried_again_and_holds_nobody_up(durable_dsn, db, caplog, code, monkeypatch):
    monkeypatch.setattr(flusher, "LONGEST_ASIDE", 0.1)
    refuse_bad(db, code)
    gate = Gate()
    machine = saying(gate)
    async with running(durable_dsn, queues={"default": 20}) as run:
        bad = await run.insert(machine, state={"say": "bad"})
        good = [await run.insert(machine, state={"say": "good"}) for _ in range(9)]
        await gate.wait_entered(10)
        gate.open()
        rows = [await run.ended(number) for number in good]
        later = await run.run(machine, state={"say": "good"})
        assert db.row(bad, "status") == ("executing",)
        assert [event.id for event in run.events.all(StepCommitted) if event.id == bad] == []
        db.execute("delete from rule")
        row = await run.ended(bad)
    assert {each.result for each in (*rows, later)} == {"good"}
    assert (row.status, row.result, row.attempt) == ("done", "bad", 0)
    told = [
        each.getMessage()
        for each in caplog.records
        if f"instance {bad}: Postgres refuses" in each.getMessage()
    ]
    assert len(told) == 1
    assert "not on a Monday" in told[0]


async def test_a_group_that_takes_too_long_is_committed_in_parts(durable_dsn, db, monkeypatch):
    """A server that gives a statement only so much time: trying the same again would never end."""
    real, sizes = flusher.commit_outcomes, []

    async def slow(conn, schema, transitions, **options):
        sizes.append(len(transitions))
        if len(transitions) > 3:
            raise psycopg.errors.QueryCanceled("canceling statement due to statement timeout")
        return await real(conn, schema, transitions, **options)

    monkeypatch.setattr(flusher, "commit_outcomes", slow)
    gate = Gate()
    machine = saying(gate)
    async with running(durable_dsn, queues={"default": 20}) as run:
        ids = [await run.insert(machine, state={"say": "good"}) for _ in range(16)]
        await gate.wait_entered(16)
        gate.open()
        assert {(await run.ended(number)).result for number in ids} == {"good"}
    assert max(sizes) > 3


async def test_a_stop_does_not_wait_for_what_is_refused(durable_dsn, db, monkeypatch):
    monkeypatch.setattr(flusher, "FLUSH_TIME", 0.3)
    refuse_bad(db, "XX000")
    gate = Gate()
    machine = saying(gate)
    async with running(durable_dsn, drain_timeout=0.2) as run:
        bad = await run.insert(machine, state={"say": "bad"})
        await gate.wait_entered()
        gate.open()
        await run.run(machine, state={"say": "good"})
    assert db.row(bad, "status, attempt, interruptions") == ("runnable", 0, 1)  # released; it runs again


async def test_a_call_of_a_step_that_may_pass_is_tried_again(durable_dsn, db, caplog):
    """As an outcome would be: an error would end the instance by the default `handle`."""
    refusals = [psycopg.errors.QueryCanceled("too slow"), psycopg.errors.InternalError_("oh")]

    class M(da.Machine, name="m"):
        @da.step
        async def start(self, ctx):
            await ctx.insert(self.__class__, step="other")
            return da.Done()

        @da.step
        async def other(self, ctx):
            return da.Done()

    real = port.start_child

    async def flaky(*args, **options):
        if refusals:
            raise refusals.pop()
        return await real(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(port, "start_child", flaky)
        async with running(durable_dsn) as run:
            row = await run.run(M)
    assert (row.status, row.attempt, refusals) == ("done", 0, [])
    assert sum("refuses a call of its step" in each.getMessage() for each in caplog.records) == 1


@pytest.mark.parametrize(
    ("code", "data"),
    [("22P02", True), ("23505", True), ("54000", True), ("P0001", True), ("P0002", True), ("ZZ999", True)]
    + [(code, False) for code in ("57014", "40001", "XX000", "42P01", "53100", "25006", "55P03", "58030")],
)
def test_whom_a_refusal_blames(code, data):
    error = psycopg.Error("x")
    error.sqlstate = code
    assert blames_data(error) is data


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
        old = ActiveClaim(first)
        node.claims.add(old)
        db.execute(
            "update durable.gen_durable set status = 'runnable', claim_id = null, locked_by = null,"
            " lease_expires_at = null where id = %s",
            number,
        )
        [second] = await pick(node)
        new = ActiveClaim(second)
        node.claims.add(new)
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
