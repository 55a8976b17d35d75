"""The notifier is told of every new attempt when that is committed, and hurts nobody (R22, R27-R29)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import durable_actors as da
import psycopg
import pytest
import trio
from durable_actors._engine import wakeups
from durable_actors._engine.maintenance import notifier
from durable_actors.telemetry import NotifierFailed, StepCommitted, StepStarted, WakeupsDropped
from tests.engine import recorded
from tests.engine.kit import QUIET, Db, Gate, gated, parked, running
from tests.kit import PATIENCE, until
from tests.support.sql import count_statements

pytestmark = pytest.mark.usefixtures("registry")


class Told:
    """A notifier that keeps what it is told."""

    def __init__(self) -> None:
        self.wakeups: list[da.Wakeup] = []
        self.gate: Gate | None = None
        """If set, it returns when that is open."""

    async def __call__(self, wakeup: da.Wakeup) -> None:
        self.wakeups.append(wakeup)
        if self.gate is not None:
            await self.gate.wait()

    def keys(self, number: int) -> list[str]:
        """The attempts of an instance, without its id."""
        return [w.runnable_key.partition("/")[2] for w in self.wakeups if w.instance_id == number]

    async def of(self, number: int, *keys: str) -> None:
        """Wait until these attempts were told, in this order, and nothing else."""
        await until(lambda: len(self.keys(number)) >= len(keys))
        assert self.keys(number) == list(keys)


def kinds(db: Db, number: int) -> list[str]:
    found = db.execute("select kind from durable.journal where instance_id = %s order by rev", number)
    return [kind for (kind,) in found]


def two_steps(gate: Gate | None = None, name: str = "two", **options: Any) -> Any:
    """Its second step waits, so that there is time to tell of both."""

    class M(da.Machine, name=name, **options):
        @da.step
        async def start(self, ctx):
            return da.Next(self.end)

        @da.step
        async def end(self, ctx):
            if gate is not None:
                await gate.wait()
            return da.Done("finished")

    return M


# -- what is told, and when


async def test_what_is_told_is_committed(durable_dsn, db, nothing):
    """Case 36: the notifier reads the row, in a session of its own."""
    seen = []

    async def notify(wakeup: da.Wakeup) -> None:
        seen.append((wakeup, db.row(wakeup.instance_id, "status, queue, eligible_at")))

    async with running(durable_dsn, queues={}, notifier=notify) as run:
        number = await run.insert(nothing, queue="far")
        await until(lambda: seen)
    [(wakeup, (status, queue, eligible))] = seen
    assert (status, queue) == ("runnable", "far")
    assert wakeup == da.Wakeup(
        instance_id=number, queue="far", runnable_key=f"{number}/1/perform#0.0", visible_at=eligible
    )


@pytest.mark.parametrize("commits", [True, False])
async def test_an_insert_in_your_transaction_is_told_when_it_is_committed(durable_dsn, nothing, commits):
    told = Told()
    async with da.open_client(durable_dsn, notifier=told) as client:
        conn = await da.TrioConnection.connect(durable_dsn)
        async with conn:
            number = await client.insert(nothing, conn=conn)
            again = await client.insert(nothing)
            await told.of(again, "1/perform#0.0")
            assert told.keys(number) == []
            await (conn.commit() if commits else conn.rollback())
            last = await client.insert(nothing)
            await told.of(last, "1/perform#0.0")
    assert told.keys(number) == (["1/perform#0.0"] if commits else [])


async def test_many_inserts_and_duplicates(durable_dsn, nothing):
    told = Told()
    async with da.open_client(durable_dsn, notifier=told) as client:
        first = await client.insert(nothing, unique_key="k")
        await told.of(first, "1/perform#0.0")
        later = datetime.now(UTC) + timedelta(days=3)
        rows = [
            {},
            {"schedule_at": later},
            {"unique_key": "k", "on_duplicate": "return"},
            {"unique_key": "k"},
        ]
        one, two, same, none = await client.insert_many(nothing, rows)
        with pytest.raises(da.Duplicate):
            await client.insert_many(nothing, [{"queue": "q"}, {"unique_key": "k", "on_duplicate": "raise"}])
        await until(lambda: len(told.wakeups) >= 4)
    assert (same, none) == (first, None)
    assert [each.instance_id for each in told.wakeups][:3] == [first, one, two], (
        "what exists is not told again"
    )
    assert told.wakeups[2].visible_at == later, "it is told at once, not when it is due"
    assert told.wakeups[3].queue == "q", "also if another row of the call is a duplicate"
    assert len(told.wakeups) == 4


async def test_a_retry_is_told_before_it_is_due(durable_dsn):
    told = Told()

    class M(da.Machine, name="m"):
        @da.step
        async def start(self, ctx):
            raise ValueError("no")

        async def handle(self, error, ctx):
            return da.Retry(delay=3600)

    async with running(durable_dsn, notifier=told) as run:
        number = await run.insert(M)
        await until(lambda: "1/start#1.1" in told.keys(number))
    # What is told is the attempt that the row has when it is read: the first one may be over by then.
    assert set(told.keys(number)) <= {"1/start#0.0", "1/start#1.1"}
    assert told.wakeups[-1].visible_at > datetime.now(UTC) + timedelta(minutes=50)


async def test_running_ahead_is_not_told(durable_dsn, ahead):
    """A step that runs ahead on the same claim is nobody else's."""
    told, first, last = Told(), Gate(), Gate()

    class M(da.Machine, name="m", run_ahead=ahead):
        @da.step
        async def start(self, ctx):
            await first.wait()
            return da.Next(self.end)

        @da.step
        async def end(self, ctx):
            await last.wait()
            return da.Done()

    async with running(durable_dsn, notifier=told) as run:
        number = await run.insert(M)
        await told.of(number, "1/start#0.0")
        first.open()
        await last.wait_entered()
        if not ahead:
            await told.of(number, "1/start#0.0", "2/end#0.0")
        other = await run.insert(gated(last, "other"))
        await told.of(other, "1/start#0.0")
        last.open()
        await run.ended(number)
    assert told.keys(number) == ["1/start#0.0", *([] if ahead else ["2/end#0.0"])]


async def test_signals_deadlines_children_and_joins(durable_dsn, db):
    told, gate = Told(), Gate()

    class Waits(da.Machine, name="waits"):
        @da.step
        async def start(self, ctx):
            return da.Await("go", then=self.end, timeout=0.05 if ctx.state.get("soon") else None)

        @da.step
        async def end(self, ctx):
            await gate.wait()
            return da.Done()

    class Family(da.Machine, name="family"):
        @da.step
        async def start(self, ctx):
            return da.ScheduleChildren(self.joined, [da.Child(Kid), da.Child(Kid)])

        @da.step
        async def joined(self, ctx):
            await gate.wait()
            return da.Done()

    class Kid(da.Machine, name="kid", queue="kids"):
        @da.step
        async def start(self, ctx):
            return da.Done()

    async with running(durable_dsn, notifier=told, queues={"default": 10}) as run:
        waits, late = await run.insert(Waits), await run.insert(Waits, state={"soon": True})
        family = await run.insert(Family)
        await parked(run, waits)
        await run.engine.client.signal(waits, "go")
        await until(lambda: "2/end#0.0" in told.keys(waits))
        await until(lambda: "2/end#0.0" in told.keys(late))
        await run.events.wait(StepCommitted, id=family, status="awaiting_children")
        kids = [
            number
            for (number,) in db.execute("select id from durable.gen_durable where parent_id = %s", family)
        ]
        assert len(kids) == 2
        for kid in kids:
            await told.of(kid, "1/start#0.0")
        async with running(durable_dsn, name="other", node="other", queues={"kids": 2}, notifier=told):
            await until(lambda: "2/joined#0.0" in told.keys(family))
            gate.open()
            for number in (waits, late, family):
                await run.ended(number)


async def test_what_a_step_starts_and_signals(durable_dsn, db):
    told, gate = Told(), Gate()

    class Waits(da.Machine, name="waits", queue="far"):
        @da.step
        async def start(self, ctx):
            return da.Done()

    class M(da.Machine, name="m"):
        @da.step
        async def start(self, ctx):
            target = ctx.state["target"]
            await ctx.signal(target, "go")
            made = [await ctx.insert(Waits), await ctx.insert(Waits, schedule_in=3600)]
            made.append(await ctx.start_child(Waits, key="k"))
            await gate.wait()
            return da.Done(made)

    async with running(durable_dsn, notifier=told, queues={"default": 2}) as run:
        target = db.insert(
            fsm="waits", step="start", status="awaiting_signal", awaits=["go"], queue="far", visit=4
        )
        number = await run.insert(M, state={"target": target})
        await gate.wait_entered()
        await told.of(target, "4/start#0.0")
        gate.open()
        made = (await run.ended(number)).result
        for each in made:
            await told.of(each, "1/start#0.0")


async def test_what_is_given_back_or_taken_back(durable_dsn, db):
    """Rows that a drain gives back are told before the engine has stopped; so are reaped ones."""
    told, gate = Told(), Gate()
    M = gated(gate)
    async with running(durable_dsn, notifier=told, drain_timeout=0) as run:
        number = await run.insert(M)
        await gate.wait_entered()
        await told.of(number, "1/start#0.0")
    assert told.keys(number) == ["1/start#0.0"] * 2, "the same attempt: it was interrupted"
    dead = db.insert(
        fsm="gated", step="start", status="executing", claim_id="00000000-0000-0000-0000-000000000001",
        locked_by="dead:1", lease_expires_at=datetime(2020, 1, 1, tzinfo=UTC), queue="far",
    )  # fmt: skip
    async with running(durable_dsn, notifier=told, reap_interval=0.05, queues={"default": 1}):
        await told.of(dead, "1/start#0.1")
        gate.open()


async def test_commands(durable_dsn, db, nothing):
    told = Told()
    async with da.open_client(durable_dsn, notifier=told) as client:
        failed = db.insert(
            fsm="nothing", step="perform", status="failed", finished_at=datetime.now(UTC), attempt=3, round=4
        )
        await client.retry(failed)
        await told.of(failed, "1/perform#4.0")
        number = await client.signal_with_start(nothing, key="k", name="go")
        await told.of(number, "1/perform#0.0")


async def test_one_call_at_a_time_without_an_engine(durable_dsn):
    """`execute_next` of a client tells what its step has made."""
    told = Told()
    async with da.open_client(durable_dsn, notifier=told) as client:
        number = await client.insert(two_steps())
        await told.of(number, "1/start#0.0")
        assert (await client.execute_next()).step == "end"
        await told.of(number, "1/start#0.0", "2/end#0.0")


# -- the record


@pytest.mark.parametrize("level", ["off", "outcomes", "claims", "full"])
async def test_a_wakeup_is_recorded_where_every_move_is(durable_dsn, db, level):
    told, gate = Told(), Gate()
    async with running(durable_dsn, notifier=told) as run:
        number = await run.insert(gated(gate), journal=level)
        await told.of(number, "1/start#0.0")
        if level in {"claims", "full"}:
            await until(lambda: "wakeup" in kinds(db, number))
            [record] = [r for r in await run.engine.client.history(number) if r.kind == "wakeup"]
            assert (record.step, record.visit, record.attempt) == ("start", 1, 0)
            assert datetime.fromisoformat(record.data["visible_at"]) == told.wakeups[0].visible_at
        gate.open()
        await run.ended(number)
        report = await run.engine.client.verify()
    assert (report.checked, report.problems) == (0 if level == "off" else 1, [])
    assert kinds(db, number).count("wakeup") == (level in {"claims", "full"})


async def test_a_notifier_that_is_slower_than_the_attempt_or_the_instance(durable_dsn, db):
    """R28, R72: a record of an attempt that is over is in order; of an instance that has ended there is none."""
    told, gate = Told(), Gate()
    told.gate = Gate()
    async with running(durable_dsn, notifier=told, journal="full") as run:
        slow, quick = two_steps(gate, "slow"), two_steps(None, "quick")
        number, ended = await run.insert(slow), await run.insert(quick)
        await gate.wait_entered()
        await told.gate.wait_entered(2)
        assert (await run.ended(ended)).status == "done"
        told.gate.open()
        await until(lambda: "wakeup" in kinds(db, number))
        gate.open()
        await run.ended(number)
        await until(lambda: run.engine.client.notifications().told == len(told.wakeups))
        assert (await run.engine.client.verify()).problems == []
        history = {number: await run.engine.client.history(number) for number in (number, ended)}
    assert "wakeup" not in [record.kind for record in history[ended]]
    records = [(record.kind, record.visit) for record in history[number]]
    if told.keys(number)[0] == "1/start#0.0":
        assert records.index(("wakeup", 1)) > records.index(("next", 1))


async def test_everything_with_a_notifier_and_a_full_journal(durable_dsn, db):
    """A random workload: what is told is an attempt that the journal knows, and the journal is in order."""
    told = Told()
    walk = recorded.define()
    async with running(durable_dsn, notifier=told, journal="full", queues={"default": 5}) as run:
        ids = await recorded.work(run, walk, recorded.plans(17, 12))
        client = run.engine.client
        await until(lambda: client.notifications().waiting == 0)
        await until(lambda: client.notifications().told == len(told.wakeups))
        report = await client.verify()
        assert report.problems == []
        assert report.checked >= len(ids)
        query = (
            "select id, to_jsonb(g) - 'updated_at' - 'inbox' from durable.gen_durable g where id = any (%s)"
        )
        before = dict(db.execute(query, ids))
        for number in ids:
            await client.rebuild(number)
        assert dict(db.execute(query, ids)) == before
    assert db.value("select count(*) from durable.journal where kind = 'wakeup'") > 0
    assert client.notifications().failed == 0


# -- a notifier that hurts


async def _raises(wakeup: da.Wakeup) -> None:
    raise ValueError(f"no line to {wakeup.queue}")


async def _exits(wakeup: da.Wakeup) -> None:
    raise SystemExit(3)


async def _in_a_group(wakeup: da.Wakeup) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_exits, wakeup)


async def _hangs(wakeup: da.Wakeup) -> None:
    await trio.sleep_forever()


async def _of_asyncio(wakeup: da.Wakeup) -> None:
    await asyncio.sleep(1)


async def _generates(wakeup: da.Wakeup):
    yield wakeup


async def _leaks(wakeup: da.Wakeup) -> None:
    trio.CancelScope().__enter__()
    raise ValueError("and leaves a scope open")


BAD: dict[str, tuple[Callable[..., Any], type[BaseException]]] = {
    "raises": (_raises, ValueError),
    "exits": (_exits, SystemExit),
    "exits in a group": (_in_a_group, BaseExceptionGroup),
    "hangs": (_hangs, trio.TooSlowError),
    "is of asyncio": (_of_asyncio, RuntimeError),
    "generates": (_generates, TypeError),
    "leaks": (_leaks, BaseException),
    "is no async function": (lambda wakeup: None, TypeError),
    "returns anything": (lambda wakeup: object(), TypeError),
    "takes nothing": (lambda: None, TypeError),
    "is a class": (dict, TypeError),
}


@pytest.mark.parametrize("how", BAD)
async def test_a_bad_notifier_hurts_nobody(durable_dsn, db, how, monkeypatch, caplog):
    """Case 36: inserts and next steps are as without it; it is counted; nothing of it is recorded."""
    call, error = BAD[how]
    monkeypatch.setattr(notifier, "TIMEOUT", 0.05)
    gate = Gate()
    async with running(durable_dsn, notifier=call, journal="full", **QUIET) as run:
        numbers = [await run.insert(two_steps(gate, run_ahead=False)) for _ in range(3)]
        first = await run.events.wait(NotifierFailed)
        await run.events.wait(NotifierFailed, count=3)
        await gate.wait_entered(3)
        gate.open()
        for number in numbers:
            assert (await run.ended(number)).result == "finished"
            assert "wakeup" not in kinds(db, number)
        assert (await run.engine.client.verify()).problems == []
        statistics = run.engine.client.notifications()
        [node] = [each for each in run.engine.snapshot().walk() if each.name == "notifier"]
        assert (node.state, node.restarts) == ("running", 0)
    assert isinstance(first.error, error)
    assert (first.queue, first.count) == ("default", 1)
    assert statistics.failed >= 3
    assert statistics.told == statistics.dropped == 0
    warnings = [
        each
        for each in caplog.records
        if each.name == "durable_actors.notifier" and each.levelno >= logging.INFO
    ]
    assert [each.levelname for each in warnings] == ["WARNING"], "once"


async def test_a_keyboard_interrupt_is_the_programs(durable_dsn, nothing):
    async def notify(wakeup: da.Wakeup) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        async with da.open_client(durable_dsn, notifier=notify) as client:
            await client.insert(nothing)
            await trio.sleep_forever()


async def test_too_many_are_dropped_and_nobody_waits(durable_dsn, nothing, monkeypatch):
    monkeypatch.setattr(wakeups, "MAX_WAITING", 3)
    monkeypatch.setattr(notifier, "CALLS", 1)
    told = Told()
    told.gate = Gate()
    async with running(durable_dsn, notifier=told, queues={}) as run:
        first = await run.insert(nothing)
        await told.gate.wait_entered()
        await run.engine.client.insert_many(nothing, [{}] * 20)
        dropped = await run.events.wait(WakeupsDropped)
        assert dropped.dropped == dropped.count >= 20 - 3
        told.gate.open()
        await until(lambda: run.engine.client.notifications().waiting == 0)
        last = await run.insert(nothing)
        await told.of(last, "1/perform#0.0")
        statistics = run.engine.client.notifications()
    assert told.wakeups[0].instance_id == first
    assert statistics.told + statistics.dropped == 22


@pytest.mark.parametrize("where", ["engine", "client"])
async def test_a_stop_does_not_wait_for_a_notifier_that_hangs(durable_dsn, nothing, where, monkeypatch):
    """What is still to be told then is dropped, and counted."""
    monkeypatch.setattr(notifier, "STOP_TIME", 0.1)
    monkeypatch.setattr(notifier, "TIMEOUT", PATIENCE)
    entered = Gate()

    async def hang(wakeup: da.Wakeup) -> None:
        await entered.wait()

    with trio.fail_after(PATIENCE / 2):
        if where == "engine":
            async with running(durable_dsn, notifier=hang, queues={}) as run:
                client = run.engine.client
                await client.insert_many(nothing, [{}] * 50)
                await entered.wait_entered(notifier.CALLS)
        else:
            async with da.open_client(durable_dsn, notifier=hang) as client:
                await client.insert_many(nothing, [{}] * 50)
                await entered.wait_entered(notifier.CALLS)
    statistics = client.notifications()
    assert (statistics.told, statistics.failed, statistics.waiting) == (0, 0, 0)
    assert statistics.dropped == 50


async def test_a_stop_finishes_what_is_told_at_once(durable_dsn, nothing):
    told = Told()
    async with da.open_client(durable_dsn, notifier=told) as client:
        await client.insert_many(nothing, [{}] * 300)
    assert len(told.wakeups) == client.notifications().told == 300


async def test_an_error_of_the_block_is_raised_as_it_is(durable_dsn):
    with pytest.raises(ZeroDivisionError):
        async with da.open_client(durable_dsn, notifier=Told()):
            raise ZeroDivisionError
    with trio.CancelScope() as scope:
        async with da.open_client(durable_dsn, notifier=Told()):
            scope.cancel()
            await trio.sleep_forever()
    assert scope.cancelled_caught


async def test_postgres_is_away_while_something_is_to_be_told(durable_dsn, db, nothing, monkeypatch):
    """It is told when Postgres is back."""
    told, real, failures = Told(), notifier.read_intents, 3

    async def read(*args: Any) -> Any:
        nonlocal failures
        if failures:
            failures -= 1
            raise da.StoreUnavailable("away")
        return await real(*args)

    monkeypatch.setattr(notifier, "read_intents", read)
    async with running(durable_dsn, notifier=told, queues={}) as run:
        number = await run.insert(nothing)
        await told.of(number, "1/perform#0.0")
    assert failures == 0


async def test_a_row_that_somebody_has_locked(durable_dsn, db, nothing):
    """The record waits for the lock, and nothing else waits for the record."""
    told, gate = Told(), Gate()
    told.gate = gate
    async with running(durable_dsn, notifier=told, queues={}) as run:
        number = await run.insert(nothing, journal="claims")
        await gate.wait_entered()
        with psycopg.connect(durable_dsn) as other:
            other.execute("select from durable.gen_durable where id = %s for update", [number])
            gate.open()
            free = await run.insert(nothing, journal="claims")
            await until(lambda: kinds(db, free) == ["started", "wakeup"])
            assert kinds(db, number) == ["started"]
        await until(lambda: kinds(db, number) == ["started", "wakeup"])


# -- without one


@pytest.mark.parametrize("told", [None, Told()], ids=["without", "with"])
async def test_without_a_notifier_work_is_found_by_polling_and_nothing_is_sent(durable_dsn, told):
    """Case 37, R24: and an engine without one sends no statement and has no actor for it."""
    M = two_steps(run_ahead=False)
    options = {"long_poll": 0, "poll_interval": 0.02, "max_poll_interval": 0.02}
    async with running(durable_dsn, notifier=told, **options) as run:
        with count_statements(durable_dsn) as count:
            async with da.open_client(durable_dsn, name="elsewhere") as client:
                number = await client.insert(M)
                assert await client.result(number, timeout=PATIENCE) == "finished"
                assert client.notifications() == wakeups.NotifierStatistics()
        names = [node.name for node in run.engine.snapshot().walk()]
        await run.events.wait(StepStarted, id=number)
    assert ("notifier" in names) == ("notifications" in names) == (told is not None)
    assert (count.calls("g.attempt, g.eligible_at, g.journal") == 0) == (told is None)
    assert count.calls("durable.note(g.id") == 0


async def test_a_bad_option_is_named_before_anything_is_written(empty_dsn):
    for call in (da.open_client, da.open_engine):
        with pytest.raises(da.ConfigError, match="notifier='print'") as caught:
            async with call(dsn=empty_dsn, notifier="print"):
                pass
        assert (caught.value.option, caught.value.value) == ("notifier", "print")
