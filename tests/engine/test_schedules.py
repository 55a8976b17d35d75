"""Schedules in whole engines: they fire, once over all nodes; what the code of several versions says of them."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import attrs
import durable_actors as da
import psycopg
import pytest
import trio
from durable_actors._engine.maintenance import schedules as actor
from durable_actors.telemetry import ScheduleFired, ScheduleSkipped
from tests.engine.kit import QUIET, Db, Recorder
from tests.kit import PATIENCE, until

DUE = "update durable.schedules set next_slot = {0}, fire_at = {0}, rev = rev + 1"
RECENT = "date_trunc('hour', now())"


def config(dsn: str, **options: Any) -> da.Config:
    return da.Config(dsn=dsn, **(QUIET | {"drain_timeout": 1, "queues": {"default": 5}} | options))


@pytest.fixture
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes look all the time for what other nodes say."""
    monkeypatch.setitem(QUIET, "reap_interval", 0.02)
    monkeypatch.setattr(actor, "DECLARE_EVERY", 0.02)


@pytest.fixture
def ran(registry: Any) -> list[tuple[int, datetime | None]]:
    return []


@pytest.fixture
def report(ran: list[Any]) -> Any:
    @da.job(name="report")
    async def report(args: dict[str, Any], ctx: da.Context[Any]) -> None:
        ran.append((ctx.id, ctx.scheduled_for))

    return report


async def test_a_job_with_a_period(durable_dsn: str, registry: Any) -> None:
    """Nothing polls: the hint of the schedule starts the job."""
    found: list[da.ScheduledRun | None] = []
    again = trio.Event()

    @da.job(name="tick", every=1, args={"n": 7})
    async def tick(args: dict[str, int], ctx: da.Context[Any]) -> int:
        found.append(ctx.scheduled)
        if len(found) == 3:
            again.set()
        return args["n"]

    events = Recorder()
    with trio.fail_after(PATIENCE):
        async with da.open_engine(config(durable_dsn, observers=[events])):
            await again.wait()
            [info] = await da.schedules.list()
            [newest, *_] = await da.list_instances(da.Filter(tag="schedule:tick"))
            assert await da.result(newest.id) == 7
    slots = [each.slot for each in found if each is not None]
    assert len(slots) == len(set(slots)) == len(found)
    assert all(each.microsecond == 0 for each in slots)
    assert {(each.schedule, each.kind) for each in found if each} == {("tick", "slot")}
    assert (info.name, info.machine, info.origin, info.state) == ("tick", "tick", "code", "active")
    assert info.records[0].outcome == "fired"
    fired = events.all(ScheduleFired)
    assert [each.slot for each in fired][:3] == slots[:3]
    assert all(0 <= each.lag < 10 for each in fired)


@pytest.mark.slow
async def test_two_engines_fire_each_slot_once(durable_dsn: str, report: Any, ran: list[Any], db: Db) -> None:
    schedule = da.Schedule("tick", report, every=1, overlap="allow", args={})
    with trio.fail_after(PATIENCE):
        async with (
            da.open_engine(config(durable_dsn, name="one", schedules=[schedule])),
            da.open_engine(config(durable_dsn, name="two", schedules=[schedule])),
        ):
            await until(lambda: len(ran) >= 4)
    fired = db.execute("select slot, instance_id from durable.schedule_log where outcome = 'fired'")
    assert len({slot for slot, _ in fired}) == len(fired)
    assert len({number for number, _ in ran}) == len(ran) == len({slot for _, slot in ran})


async def test_a_node_without_schedules_costs_one_statement(
    durable_dsn: str, registry: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[float] = []
    real = actor.read_due

    async def read_due(*args: Any) -> Any:
        looks.append(trio.current_time())
        return await real(*args)

    for name in ("read_declared", "run_dialogue", "enable_schedules"):
        monkeypatch.setattr(actor, name, None)
    monkeypatch.setattr(actor, "read_due", read_due)
    async with da.open_engine(config(durable_dsn)):
        await until(lambda: looks)
        await trio.sleep(0.3)
    assert len(looks) == 1


async def test_a_schedule_at_rest_costs_nothing(
    durable_dsn: str, report: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[float] = []
    real = actor.read_due

    async def read_due(*args: Any) -> Any:
        looks.append(trio.current_time())
        return await real(*args)

    monkeypatch.setattr(actor, "read_due", read_due)
    later = da.Schedule("later", report, cron="0 0 1 1 *")
    async with da.open_engine(config(durable_dsn, schedules=[later])) as engine:
        await until(lambda: looks)
        await trio.sleep(0.3)
        assert len(looks) == 1
        await engine.client.schedules.put("other", report, every=1)  # a call of this process is told
        await until(lambda: len(looks) > 1)


async def test_a_client_fires_nothing(durable_dsn: str, report: Any, db: Db) -> None:
    schedule = da.Schedule("tick", report, every=1)
    async with da.open_engine(config(durable_dsn, queues={}, schedules=[schedule])):
        await trio.sleep(0.1)
    assert db.execute("select 1 from durable.schedules") == []


async def test_missed_slots_are_made_up_for_at_the_start(
    durable_dsn: str, report: Any, ran: list[Any], db: Db
) -> None:
    """A deploy that takes an hour at noon: noon fires when it is over, and the time for which it ran is noon."""
    nightly = da.Schedule("nightly", report, every=3600)
    async with da.open_engine(config(durable_dsn, schedules=[nightly])):
        await db.eventually("select exists (select 1 from durable.schedules)")
    slot = db.value(f"select {RECENT}")
    db.execute(DUE.format(f"{RECENT} - interval '2 h'"))
    async with da.open_engine(config(durable_dsn, schedules=[nightly])):
        await until(lambda: ran)
        [info] = await da.schedules.list()
    assert [each for _, each in ran] == [slot]
    assert [(each.outcome, each.reason, each.slots) for each in info.records] == [
        ("fired", None, 1),
        ("skipped", "missed", 2),
    ]


async def test_instances_have_the_limits_of_their_job_or_of_the_schedule(
    durable_dsn: str, registry: Any, db: Db
) -> None:
    @da.job(name="draw", every=3600, slot="gpu", overlap="allow", journal="full")
    async def draw() -> None: ...

    options = {"rate_limit": ("stripe", "acme"), "weight": 3, "fair_key": "acme", "max_attempts": 2}
    schedules = [da.Schedule("acme", draw, every=3600, options=options)]
    limits = {"gpu": da.Limit(slots=1), "stripe": da.Limit(1)}
    with trio.fail_after(PATIENCE):
        async with da.open_engine(config(durable_dsn, schedules=schedules, limits=limits)) as engine:
            await db.eventually("select count(*) = 2 from durable.schedules")
            numbers = [await da.schedules.run_now(name) for name in ("draw", "acme")]
            found = [
                db.value(
                    "select array[rate_limit, fair_key, max_attempts::text] from durable.schedules"
                    " where name = %s",
                    name,
                )
                for name in ("draw", "acme")
            ]
            assert found == [["!gpu", None, None], ["stripe:acme\x1e3", "acme", "2"]]
            first = "select data -> 'row' from durable.journal where instance_id = %s and rev = 1"
            rows = [db.value(first, number) for number in numbers]
            assert [row.get("rate_limit") for row in rows] == ["!gpu", "stripe:acme\x1e3"]
            assert (rows[1]["fair_key"], rows[1]["max_attempts"]) == ("acme", 2)
            for number in numbers:
                await engine.client.result(number)
            assert (await engine.client.verify()).problems == []


# -- versions of the code


def revisions(db: Db) -> list[str]:
    return db.value("select revisions from durable.schedules")


def every(db: Db) -> float | None:
    found = db.execute("select spec -> 'every' from durable.schedules")
    return found[0][0] if found else None


async def test_a_rolling_deploy(durable_dsn: str, report: Any, db: Db, quick_looks: None) -> None:
    """New code counts; an old node that restarts does not bring the old definition back; a rollback does."""
    old = config(durable_dsn, name="old", schedules=[da.Schedule("s", report, every=7200)])
    restarted = config(durable_dsn, name="restarted", schedules=old.schedules)
    new = config(durable_dsn, name="new", schedules=[da.Schedule("s", report, every=3600)])
    with trio.fail_after(PATIENCE):
        async with da.open_engine(old):
            await until(lambda: every(db) == 7200)
            async with da.open_engine(new):
                await until(lambda: every(db) == 3600)
                rev = db.value("select rev from durable.schedules")
                async with da.open_engine(restarted):
                    await trio.sleep(0.3)  # many looks of all three
                    assert every(db) == 3600
                    assert db.value("select rev from durable.schedules") == rev
                    assert len(revisions(db)) == 2
            await until(lambda: every(db) == 7200)  # no node with the new code is left
            assert len(revisions(db)) == 2


async def test_a_schedule_that_left_the_code(
    durable_dsn: str, report: Any, db: Db, quick_looks: None, caplog: pytest.LogCaptureFixture
) -> None:
    """It is disabled when no live node has it; it comes back with the code, and then its slots were missed."""
    schedule = da.Schedule("s", report, every=3600)
    with trio.fail_after(PATIENCE):
        async with da.open_engine(config(durable_dsn, name="other")) as other:
            async with da.open_engine(config(durable_dsn, name="has it", schedules=[schedule])):
                await until(lambda: every(db) == 3600)
                await trio.sleep(0.3)
                [info] = await other.client.schedules.list()
                assert info.state == "active"
            await db.eventually(
                "select exists (select 1 from durable.schedules where disabled_at is not null)"
            )
            [info] = await other.client.schedules.list()
            assert info.state == "disabled"
            assert "no live node has it in its code" in caplog.text
            db.execute(DUE.format(RECENT))
            await trio.sleep(0.1)
            assert db.execute("select 1 from durable.gen_durable") == []
            async with da.open_engine(config(durable_dsn, name="has it", schedules=[schedule])):
                await db.eventually(
                    "select exists (select 1 from durable.schedule_log where outcome = 'fired')"
                )
                [info] = await other.client.schedules.list()
                assert info.state == "active"


async def test_a_schedule_that_left_the_code_and_is_put_by_an_operator(
    durable_dsn: str, report: Any, db: Db, quick_looks: None
) -> None:
    """It is the operator's now, and no node needs to have it in its code."""
    schedule = da.Schedule("s", report, every=3600)
    disabled = "select exists (select 1 from durable.schedules where disabled_at is not null)"
    with trio.fail_after(PATIENCE):
        async with da.open_engine(config(durable_dsn, name="other")) as other:
            async with da.open_engine(config(durable_dsn, name="has it", schedules=[schedule])):
                await until(lambda: every(db) == 3600)
            await db.eventually(disabled)
            info = await other.client.schedules.put("s", report, every=7200)
            assert (info.origin, info.state, info.overridden) == ("api", "active", None)
            await trio.sleep(0.3)  # many looks
            assert not db.value(disabled)
            async with da.open_engine(config(durable_dsn, name="has it", schedules=[schedule])):
                await db.eventually("select exists (select 1 from durable.schedules where origin = 'code')")
                [info] = await other.client.schedules.list()
                assert (info.definition.every, info.overridden is not None) == (7200, True)


async def test_an_operator_wins_over_the_code(
    durable_dsn: str, report: Any, db: Db, quick_looks: None
) -> None:
    first = config(durable_dsn, schedules=[da.Schedule("s", report, every=7200)])
    second = config(durable_dsn, schedules=[da.Schedule("s", report, every=3600)])
    with trio.fail_after(PATIENCE):
        async with da.open_engine(first):
            await until(lambda: every(db) == 7200)
            await da.schedules.pause("s", by="ada", reason="too much")
            info = await da.schedules.put("s", report, every=10_000, by="ada", reason="less often")
            assert (info.overridden and info.overridden.by, info.definition.every) == ("ada", 10_000)
        async with da.open_engine(second):
            await until(lambda: len(revisions(db)) == 2)
            [info] = await da.schedules.list()
            assert (info.definition.every, info.state) == (10_000, "paused")
            assert info.overridden is not None
            assert info.overridden.reason == "less often"
            await da.schedules.delete("s")
            await until(lambda: every(db) == 3600)
            [info] = await da.schedules.list()
            assert (info.overridden, info.state) == (None, "active")


async def test_the_code_gets_a_schedule_that_was_put_before(
    durable_dsn: str, report: Any, db: Db, quick_looks: None
) -> None:
    with trio.fail_after(PATIENCE):
        async with da.open_engine(config(durable_dsn)):
            info = await da.schedules.put("s", report, every=7200)
            assert (info.origin, info.overridden) == ("api", None)
        async with da.open_engine(config(durable_dsn, schedules=[da.Schedule("s", report, every=3600)])):
            await db.eventually("select exists (select 1 from durable.schedules where origin = 'code')")
            [info] = await da.schedules.list()
            assert info.definition.every == 7200
            assert info.overridden is not None


# -- overlap


@pytest.mark.parametrize("overlap", ["buffer_one", "cancel_running"])
async def test_the_next_slot_waits_for_the_running_instance(
    durable_dsn: str, registry: Any, db: Db, overlap: Any
) -> None:
    gate, began = trio.Event(), list[int]()

    @da.job(name="slow")
    async def slow(ctx: da.Context[Any]) -> None:
        began.append(ctx.id)
        if len(began) == 1:
            await gate.wait()

    schedule = da.Schedule("s", slow, every=3600, overlap=overlap)
    with trio.fail_after(PATIENCE):
        async with da.open_engine(config(durable_dsn, schedules=[schedule])) as engine:
            await db.eventually("select exists (select 1 from durable.schedules)")
            db.execute(DUE.format(f"{RECENT} - interval '1 h'"))
            engine._node.schedules_changed()
            await until(lambda: len(began) == 1)
            db.execute(DUE.format(RECENT))
            engine._node.schedules_changed()
            await db.eventually(
                "select exists (select 1 from durable.schedule_log where outcome = 'buffered')"
            )
            if overlap == "buffer_one":
                assert len(began) == 1
                gate.set()
            await until(lambda: len(began) == 2)
            status = db.value("select status from durable.gen_durable where id = %s", began[0])
            assert status == ("done" if overlap == "buffer_one" else "cancelled")
            [info] = await da.schedules.list()
            assert [each.outcome for each in info.records][:2] == ["fired", "buffered"]
            if overlap == "cancel_running":
                [receipt] = await da.receipts(began[0])
                assert receipt.by == "schedule s"


async def test_an_instance_that_somebody_has_locked_delays_its_own_schedule_only(
    durable_dsn: str, report: Any, ran: list[Any], db: Db
) -> None:
    waits = {"options": {"queue": "nobody"}, "overlap": "cancel_running"}
    schedules = [da.Schedule("a", report, every=3600, **waits), da.Schedule("b", report, every=3600)]
    with trio.fail_after(PATIENCE):
        async with da.open_engine(config(durable_dsn, schedules=schedules)) as engine:
            await db.eventually("select count(*) = 2 from durable.schedules")
            running = await da.schedules.run_now("a")
            with psycopg.connect(durable_dsn) as holder:
                holder.execute("select 1 from durable.gen_durable where id = %s for update", [running])
                db.execute(DUE.format(RECENT))
                engine._node.schedules_changed()
                await until(lambda: len(ran) == 1)
                assert db.execute("select name from durable.schedule_log where kind = 'caught_up'") == [
                    ("b",)
                ]
            await db.eventually("select count(*) = 2 from durable.schedule_log where kind = 'caught_up'")
    assert db.row(running, "status") == ("cancelled",)


async def test_a_skipped_slot_is_told(durable_dsn: str, registry: Any, db: Db) -> None:
    gate = trio.Event()

    @da.job(name="slow")
    async def slow() -> None:
        await gate.wait()

    events = Recorder()
    schedule = da.Schedule("s", slow, every=3600)
    with trio.fail_after(PATIENCE):
        async with da.open_engine(config(durable_dsn, schedules=[schedule], observers=[events])) as engine:
            await db.eventually("select exists (select 1 from durable.schedules)")
            for _ in range(2):
                db.execute(DUE.format(RECENT))
                engine._node.schedules_changed()
                await events.wait(ScheduleFired)
            skipped = await events.wait(ScheduleSkipped)
            assert (skipped.schedule, skipped.reason, skipped.slots) == ("s", "overlap", 1)
            with pytest.raises(da.Conflict, match="has not ended"):
                await da.schedules.run_now("s")
            other = await da.schedules.run_now("s", overlap="allow", by="ada")
            assert (await da.inspect(other)).status in {"runnable", "executing"}
            gate.set()


# -- what only a hand writes, and errors


async def test_a_row_that_nobody_can_read(
    durable_dsn: str, report: Any, ran: list[Any], db: Db, caplog: pytest.LogCaptureFixture
) -> None:
    """It is in nobody's way, and logged once."""
    with trio.fail_after(PATIENCE):
        async with da.open_engine(config(durable_dsn)) as engine:
            for name in ("bad", "worse", "good"):
                await da.schedules.put(name, report, every=3600)
            db.execute("""update durable.schedules set spec = '{"every": "often"}' where name = 'bad'""")
            db.execute("update durable.schedules set journal = 99 where name = 'worse'")
            for name, spec in (
                ("zone", {"cron": "0 3 * * *", "tz": "Mars/Olympus"}),
                ("cron", {"cron": "0 3 * *"}),
                ("period", {"every": 0.0}),
            ):
                await da.schedules.put(name, report, every=3600)
                db.execute("update durable.schedules set spec = %s where name = %s", json.dumps(spec), name)
            db.execute(DUE.format(RECENT))
            engine._node.schedules_changed()
            await until(lambda: ran)
            listed = await da.schedules.list()
            assert {each.name for each in listed if each.next} == {"good", "worse"}
            assert {each.name for each in listed if not each.next} == {"cron", "period", "zone"}
            with pytest.raises(da.ConfigError, match="not a time zone"):
                await da.schedules.run_now("zone")
            await da.schedules.put("cron", report, every=3600)
            await da.schedules.delete("period")
    assert "a schedule cannot be read" in caplog.text
    db.execute(
        "update durable.gen_durable set journal = 0 where journal = 99"
    )  # as the schedule said, written by hand


@pytest.mark.parametrize(
    ("schedules", "text"),
    [
        ([da.Schedule("s", "nosuch", every=60)], "nosuch"),
        ([da.Schedule("s", "typed", every=60, args={"n": "x"})], "schedule 's'"),
        ([da.Schedule("typed", "typed", every=60, args={"n": 1})], "twice"),
    ],
)
async def test_a_schedule_that_cannot_be(durable_dsn: str, registry: Any, schedules: Any, text: str) -> None:
    @attrs.frozen
    class Args:
        n: int

    @da.job(name="typed", every=60, args={"n": 1})
    async def typed(args: Args) -> None: ...

    with pytest.raises(da.ConfigError, match=text):
        async with da.open_engine(config(durable_dsn, schedules=schedules)):
            raise AssertionError


def test_a_job_that_cannot_be_scheduled(registry: Any) -> None:
    for options in ({"cron": "x"}, {"tz": "UTC"}, {"every": 0.5}, {"cron": "* * * * *", "every": 5}):
        with pytest.raises(da.DefinitionError):

            @da.job(**options)  # type: ignore[call-overload]
            async def job() -> None: ...


async def test_calls_that_are_wrong(durable_dsn: str, report: Any) -> None:
    now = datetime.now(UTC)
    async with da.open_engine(config(durable_dsn)):
        calls = da.schedules
        await calls.put(da.Schedule("s", report, cron="0 3 * * *", tz="Europe/Berlin"))
        for call, error in (
            (calls.get("x"), da.NoTarget),
            (calls.pause("x"), da.NoTarget),
            (calls.resume("x"), da.NoTarget),
            (calls.run_now("x"), da.NoTarget),
            (calls.delete("x"), da.NoTarget),
            (calls.backfill("x", now, now), da.NoTarget),
            (calls.resume("s"), da.Conflict),
            (calls.backfill("s", now, now + timedelta(hours=1)), da.Conflict),
            (calls.backfill("s", now - timedelta(seconds=1), now), da.Conflict),
            (calls.backfill("s", now, now - timedelta(hours=1)), da.ConfigError),
            (calls.backfill("s", now.replace(tzinfo=None), now), da.ConfigError),
            (calls.backfill("s", now - timedelta(days=5000), now), da.ConfigError),
            (calls.put("s", report), da.ConfigError),
            (calls.put("s", report, evry=5), da.ConfigError),
            (calls.put(da.Schedule("s", report, every=5), report), da.ConfigError),
            (calls.put("s", "nosuch", every=5), da.UnknownMachine),
            (calls.put("s", report, every=5, by=""), da.ConfigError),
            (calls.list(records=-1), da.ConfigError),
        ):
            with pytest.raises(error):
                await call
        assert (await calls.get("s")).definition.cron == "0 3 * * *"


async def test_rows_of_the_journal_level_of_the_engine(durable_dsn: str, registry: Any, db: Db) -> None:
    """The instance of a machine has a history from its start on, and a rerun and a rebuilt row keep its slot."""
    found: list[Any] = []

    class Report(da.Machine, name="Report"):
        @da.step(initial=True)
        async def begin(self, ctx: da.Context[Any]) -> da.Outcome:
            found.append(ctx.scheduled_for)
            return da.Next(self.end)

        @da.step
        async def end(self, ctx: da.Context[Any]) -> da.Outcome:
            found.append(ctx.scheduled_for)
            return da.Done()

    with trio.fail_after(PATIENCE):
        async with da.open_engine(config(durable_dsn, journal="full")):
            await da.schedules.put("s", Report, cron="0 3 * * *", state={})
            start = datetime(2026, 6, 1, tzinfo=UTC)
            [number] = await da.schedules.backfill("s", start, start + timedelta(days=1))
            await da.result(number)
            assert (await da.history(number))[0].kind == "started"
            assert (await da.verify(number)).problems == []
            other = await da.rerun(number)
            await da.result(other)
            for damage in (
                "update durable.gen_durable set inbox = false, queue = 'x'",
                "delete from durable.gen_durable",
            ):
                db.execute(f"{damage} where id = %s", number)
                await da.rebuild(number)
                assert db.row(number, "inbox, queue") == (True, "default")
    slot = datetime(2026, 6, 1, 3, tzinfo=UTC)
    assert found == [slot] * 4
    stored = "select distinct meta -> 'durable:schedule' from durable.gen_durable"
    told = {"name": "s", "tz": "UTC", "kind": "backfill", "slot": "2026-06-01T03:00:00.000000Z"}
    assert db.execute(stored) == [(told,)]
