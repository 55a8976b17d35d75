"""Steps that end without an outcome by what they raise: a crash of that step alone, counted and backed off."""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
from typing import Any

import attrs
import durable_actors as da
import pytest
import trio
from durable_actors._engine.running import step_run
from durable_actors._engine.running.user_code import fate_of, only_cancelled
from durable_actors.telemetry import ClaimLost, ClaimsReaped, StepCrashed
from tests.engine.kit import END, QUIET, Gate, active_claims, failing_log, gated, refuse_bad, running
from tests.kit import PATIENCE, until

pytestmark = [
    pytest.mark.usefixtures("registry"),
    pytest.mark.filterwarnings("ignore:Async generator:ResourceWarning"),
]


@attrs.frozen
class Strict:
    n: int = 0

    def __attrs_post_init__(self) -> None:
        if self.n == 13:
            sys.exit("not 13")


async def explode() -> None:
    sys.exit(2)


def machine(where: str) -> Any:
    async def in_step(self, ctx):
        if where == "handle":
            raise ValueError
        if where == "group":
            async with trio.open_nursery() as nursery:
                nursery.start_soon(explode)
        if where == "timed":
            await trio.sleep(0)
        return argparse.ArgumentParser().parse_args(["--unknown"])

    def in_thread(self, ctx):
        sys.exit(2)

    async def handle(self, error, ctx):
        await explode()

    class M(da.Machine[Strict], name=f"crashes in {where}"):
        start = da.step(timeout=60 if where == "timed" else None)(in_thread if where == "thread" else in_step)
        locals()["handle"] = handle

    return M


@pytest.mark.parametrize("where", ["step", "group", "thread", "handle", "timed", "state"])
async def test_system_exit_is_a_crash_of_its_step(durable_dsn, db, where, caplog, capsys):
    """Told with its traceback; counted; backed off from the second on; the node and its workers live on."""
    async with running(durable_dsn, queues={"default": 2}) as run:
        found = machine(where)
        if where == "state":  # insert would refuse it
            number = db.insert(fsm="crashes in state", step="start", state='{"n": 13}')
        else:
            number = await run.insert(found, state={"n": 0})
        await run.events.wait(StepCrashed, id=number, count=2)
        await db.eventually("select crashes = 2 from durable.gen_durable where id = %s", number)
        row = db.row(
            number,
            "status::text, attempt, crashes, eligible_at > updated_at, claim_id, last_error like 'crash 2: %%'",
        )
        assert run.engine.snapshot().render().count("restart") == 0
        event = run.events.all(StepCrashed, id=number)[0]
    assert row == ("runnable", 2, 2, True, None, True)
    assert "SystemExit" in repr(event.error)
    told = [record for record in caplog.records if record.levelno == logging.ERROR and record.exc_info]
    assert len(told) >= 2
    assert f"instance {number}: crashes in {where} v1, step start crashed" in told[0].getMessage()


async def test_a_state_that_raises_system_exit_for_a_refused_outcome_is_a_crash(durable_dsn, db):
    """`handle` needs the state again, in another task: it is decoded there, and does not stop the node."""
    refuse_bad(db, "P0001")
    decoded = list[int]()

    @attrs.frozen
    class Once:
        n: int = 0

        def __attrs_post_init__(self) -> None:
            decoded.append(self.n)
            if len(decoded) == 3:  # after the insert and the step
                sys.exit("not again")

    class M(da.Machine[Once], name="m"):
        @da.step
        async def start(self, ctx: da.Context[Once]) -> da.Outcome:
            return da.Done("bad")

        async def handle(self, error: Exception, ctx: da.Context[Once]) -> da.Outcome:
            return da.Done("handled")

    async with running(durable_dsn) as run:
        number = await run.insert(M, state={"n": 1})
        await run.events.wait(StepCrashed, id=number)
        row = await run.ended(number)
        assert "restart" not in run.engine.snapshot().render()
    assert (row.result, row.crashes) == ("handled", 1)


async def test_it_is_quarantined_and_others_keep_their_attempts(durable_dsn, capsys):
    """With innocent jobs in the same worker, each of which may run once."""

    @da.job(name="exits")
    async def exits(args: dict[str, Any]) -> None:
        argparse.ArgumentParser().parse_args(["--unknown"])

    @da.job(name="innocent", max_attempts=1)
    async def innocent(args: dict[str, Any]) -> None:
        await trio.sleep(0)

    async with running(durable_dsn, queues={"default": 1}, max_crashes=2) as run:
        plans = [(exits if n in {2, 7} else innocent) for n in range(10)]
        ids = [await run.insert(each, args={}) for each in plans]
        rows = [await run.ended(number) for number in ids]
    assert [row.status for row in rows] == ["failed" if each is exits else "done" for each in plans]
    for row in (rows[2], rows[7]):
        assert (row.attempt, row.crashes, row.error_type) == (1, 2, "SystemExit")
        assert "parse_args" in (row.traceback or "")
        assert "quarantined: step perform ended 2 times without an outcome" in (row.last_error or "")
        assert "SystemExit: 2" in (row.last_error or "")


async def open_scope() -> Any:
    with trio.CancelScope(shield=True):
        yield 1


async def test_a_leaked_shield_does_not_hold_up_a_drain(durable_dsn):
    """The next step in that worker can be cancelled: the drain ends it in time."""
    gate, tasks = Gate(), list[object]()

    @da.job(name="leaks")
    async def leaks(args: dict[str, Any]) -> Any:
        tasks.append(trio.lowlevel.current_task())
        async for each in open_scope():
            return each
        return None

    @da.job(name="waits")
    async def waits(args: dict[str, Any]) -> None:
        tasks.append(trio.lowlevel.current_task())
        await gate.wait()

    with trio.fail_after(PATIENCE):
        async with running(
            durable_dsn, queues={"default": da.Queue(1, prefetch=2)}, drain_timeout=0.05
        ) as run:
            await run.engine.client.insert_many(leaks, [{"args": {}}])
            await run.insert(waits, args={})
            await gate.wait_entered()
    assert tasks[0] is not tasks[1]


async def test_the_author_is_told_once(durable_dsn, caplog):
    @da.job(name="leaks", version=3)
    async def leaks(args: dict[str, Any]) -> Any:
        async for each in open_scope():
            return each
        return None

    async with running(durable_dsn, queues={"default": 1}) as run:
        for _ in range(3):
            assert (await run.run(leaks, args={})).result == 1
    told = [record.getMessage() for record in caplog.records if "open in its task" in record.getMessage()]
    assert [record.levelname for record in caplog.records if "open in its task" in record.getMessage()].count(
        "WARNING"
    ) == 1
    assert "leaks v3, step perform has left a cancel scope open" in told[0]
    assert "contextlib.aclosing" in told[0]


async def test_a_log_handler_that_fails_costs_no_step_its_outcome(durable_dsn, caplog):
    """Neither the record of an error nor that of a scope which the step left open."""
    caplog.set_level(logging.DEBUG, logger="durable_actors.engine")

    class M(da.Machine[Any], name="m"):
        @da.step
        async def start(self, ctx: da.Context[Any]) -> da.Outcome:
            if ctx.state["raises"]:
                raise ValueError
            async for each in open_scope():
                return da.Done(each)
            return da.Stop("not reached")

        async def handle(self, error: Exception, ctx: da.Context[Any]) -> da.Outcome:
            return da.Done("handled")

    async with running(durable_dsn, lease_ttl=60) as run:
        with failing_log():
            assert (await run.run(M, state={"raises": False})).result == 1
        with failing_log(logging.DEBUG):
            assert (await run.run(M, state={"raises": True})).result == "handled"


async def test_a_lock_that_a_step_keeps_is_broken_for_those_who_wait(durable_dsn):
    """As at the end of any task of Trio's: nobody waits for ever for a worker that has gone on to other work."""
    lock = trio.Lock()

    @da.job(name="keeps", max_attempts=1)
    async def keeps(args: dict[str, Any]) -> None:
        await lock.acquire()

    async with running(durable_dsn, **QUIET) as run:
        await run.run(keeps, args={})
        row = await run.run(keeps, args={})
    assert row.status == "failed"
    assert "BrokenResourceError" in (row.last_error or "")


async def test_a_crash_during_a_drain_goes_back(durable_dsn, db):
    gate = Gate()

    @da.job(name="exits")
    async def exits(args: dict[str, Any]) -> None:
        try:
            await gate.wait()
        except trio.Cancelled:
            sys.exit(1)

    async with running(durable_dsn, drain_timeout=0) as run:
        number = await run.insert(exits, args={})
        await gate.wait_entered()
        await run.engine.stop()
        await until(lambda: db.row(number, "locked_by") == (None,))
    assert db.row(number, "status::text, crashes, claim_id") == ("runnable", 1, None)


@pytest.mark.parametrize(
    "beside", [SystemExit(2), asyncio.CancelledError(), ValueError("clean-up")], ids=repr
)
async def test_what_a_cancelled_step_raises_beside_stops_nothing_else(durable_dsn, db, beside, caplog):
    """Its claim is lost, and a task of its nursery fails while it is cancelled. The log names the instance."""
    gate, other = Gate(), Gate()

    async def cleans_up() -> None:
        try:
            await trio.sleep_forever()
        finally:
            raise beside

    @da.job(name="hostile")
    async def hostile(args: dict[str, Any]) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(cleans_up)
            await gate.wait()

    async with running(durable_dsn, lease_ttl=60, heartbeat_interval=0.03) as run:
        innocent = await run.insert(gated(other))
        number = await run.insert(hostile, args={})
        await other.wait_entered()
        await gate.wait_entered()
        db.execute(END, number)
        await run.events.wait(ClaimLost, id=number)
        await until(lambda: len(active_claims(run)) == 1)
        other.open()
        row = await run.ended(innocent)
        assert "restart" not in run.engine.snapshot().render()
    assert (row.status, row.attempt) == ("done", 0)
    [told] = [each for each in caplog.records if each.levelno == logging.ERROR]
    assert f"instance {number}:" in told.getMessage()
    assert type(beside).__name__ in caplog.text
    assert db.row(number, "status::text, last_error") == ("failed", "ended")


async def test_an_interrupt_beside_a_cancelled_step_stops_the_node(durable_dsn, db):
    gate = Gate()

    async def cleans_up() -> None:
        try:
            await trio.sleep_forever()
        finally:
            raise KeyboardInterrupt

    @da.job(name="hostile")
    async def hostile(args: dict[str, Any]) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(cleans_up)
            await gate.wait()

    with pytest.raises(KeyboardInterrupt):
        async with running(durable_dsn, lease_ttl=60, heartbeat_interval=0.03) as run:
            number = await run.insert(hostile, args={})
            await gate.wait_entered()
            db.execute(END, number)
            with trio.fail_after(PATIENCE):
                await run.engine.wait_stopped()


async def test_a_group_of_cancelled_alone_is_no_error():
    with trio.CancelScope() as scope:
        scope.cancel()
        try:
            await trio.sleep_forever()
        except trio.Cancelled as exc:
            group = BaseExceptionGroup("g", [BaseExceptionGroup("h", [exc]), exc])
            assert only_cancelled(group)
            assert not only_cancelled(BaseExceptionGroup("g", [group, SystemExit()]))
            raise


def test_groups_may_be_nested_deeper_than_the_stack():
    """Else it would be a bug of ours, which ends the worker, and the row stays claimed until its lease is over."""

    def nested(error: BaseException) -> BaseException:
        for _ in range(3 * sys.getrecursionlimit()):
            error = BaseExceptionGroup("g", [error])
        return error

    assert fate_of(nested(SystemExit(2)), cancelled=True) == "crash"
    assert fate_of(nested(KeyboardInterrupt()), cancelled=False) == "ends"


async def test_an_exception_whose_notes_raise_fails_its_instance_at_once(durable_dsn):
    class Hostile(Exception):
        @property
        def __notes__(self) -> list[str]:
            raise RuntimeError

    class M(da.Machine, name="hostile notes"):
        @da.step
        async def start(self, ctx: da.Context[Any]) -> da.Outcome:
            raise Hostile

    async with running(durable_dsn) as run:
        row = await run.run(M)
    assert (row.status, row.crashes) == ("failed", 0)
    assert "Hostile: (its text cannot be shown)" in (row.last_error or "")


async def test_a_bug_of_ours_is_a_crash(durable_dsn, monkeypatch):
    """Given back at once it would spin; the lease ends the claim, and the reaper counts the crash."""
    real_run, bugs = step_run.StepRun.run, [AssertionError("a bug")]

    async def buggy(self):
        if bugs:
            raise bugs.pop()
        return await real_run(self)

    monkeypatch.setattr(step_run.StepRun, "run", buggy)

    @da.job
    async def quick(args):
        return "finished"

    async with running(durable_dsn, lease_ttl=1, reap_interval=0.2) as run:
        number = await run.insert(quick, args={})
        await run.events.wait(ClaimsReaped)
        row = await run.ended(number)
    assert (row.result, row.attempt, row.crashes) == ("finished", 1, 1)
