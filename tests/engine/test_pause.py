"""Pauses, as engines, callers and steps see them. tests/store/test_pause_races.py has what the database guarantees."""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta, timezone, tzinfo
from typing import Any

import attrs
import durable_actors as da
import psycopg
import pytest
import trio
from durable_actors._engine.claiming.planner import EXPIRE, REFRESH_BEFORE_PICK, Pick, Sleep
from durable_actors._engine.maintenance import control
from durable_actors.telemetry import StepCommitted
from tests.engine.kit import (
    Db,
    Gate,
    active_claims,
    client_of,
    gated,
    running,
    simple,
)
from tests.engine.planner_rig import EMPTY, Rig, shape
from tests.engine.test_idle_polls import calls
from tests.kit import until
from tests.support.sql import wait_counted

pytestmark = pytest.mark.usefixtures("registry")
STOPPED = attrs.evolve(EMPTY, pauses={"": math.inf})


class NoZone(tzinfo):
    """Of no place: a datetime with it is no instant."""

    def utcoffset(self, _: datetime | None) -> timedelta | None:
        return None

    def __repr__(self) -> str:
        return "NoZone()"


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The node looks for requests and pauses in quick succession."""
    monkeypatch.setattr(control, "LOOK_EVERY", 0.03)
    monkeypatch.setattr(control, "LONG_STEP", 0.01)


def stepping(gate: Gate, **options: Any) -> Any:
    """A machine that enters its next step again and again; each waits at the gate once it is closed."""

    class M(da.Machine[Any], name="stepping", **options):
        @da.step
        async def start(self, ctx: da.Context[Any]) -> da.Outcome:
            await gate.wait()
            return da.Next(self.again, {"n": 1})

        @da.step
        async def again(self, ctx: da.Context[Any]) -> da.Outcome:
            return da.Next(self.again, {"n": ctx.state["n"] + 1}) if ctx.state["n"] < 5 else da.Done("end")

    return M


async def released(client: da.Client, number: int) -> da.Instance:
    """Wait until no node has it."""
    while (found := await client.inspect(number)).status == "executing":
        await trio.sleep(0.005)
    return found


# -- instances


async def test_a_running_step_finishes_and_nothing_follows_until_it_is_resumed(durable_dsn):
    gate = Gate()
    async with running(durable_dsn) as run:
        number = await run.insert(stepping(gate), state={})
        await gate.wait_entered()
        client = run.engine.client
        assert await client.pause(number, by="ada", reason="looks odd") == "requested"
        with pytest.raises(da.Conflict, match="paused already by ada"):
            await client.pause(number)
        gate.open()
        await run.events.wait(StepCommitted, id=number)
        found = await client.inspect(number)
        assert (found.status, found.step, found.hold, found.locked_by) == ("runnable", "again", 4, None)
        assert found.paused is not None
        assert (found.paused.by, found.paused.reason) == ("ada", "looks odd")
        told = await client.explain(number)
        assert (told.reason, told.since) == ("paused", found.paused.at)
        assert "by ada: looks odd" in told.summary
        assert told.next_actions[0].command == f"durable-actors resume {number}"
        assert len(run.events.started(number)) == 1, "it has not run ahead"
        assert await client.resume(number) == number
        assert await client.result(number, timeout=10) == "end"
        with pytest.raises(da.Conflict, match="done"):
            await client.resume(number)


async def test_a_step_that_is_to_be_paused_and_then_cancelled_is_no_contradiction(durable_dsn):
    """The history tells of the pause, the row of the cancel that took its place; both are right."""
    gate = Gate()
    async with running(durable_dsn) as run:
        number = await run.insert(stepping(gate, journal="full"), state={})
        await gate.wait_entered()
        client = run.engine.client
        assert await client.pause(number) == "requested"
        assert await client.cancel(number) == "requested"
        assert (await client.verify(number)).problems == []
        gate.open()
        await released(client, number)
        assert (await client.inspect(number)).status == "cancelled"
        assert (await client.verify(number)).problems == []


async def test_a_claim_that_waits_for_its_slot_is_released_when_its_instance_is_paused(durable_dsn, quick):
    gate = Gate()
    machine = gated(gate)
    async with running(durable_dsn, queues={"default": da.Queue(1, prefetch=5)}) as run:
        numbers = [await run.insert(machine, state={}) for _ in range(2)]
        await gate.wait_entered()
        await until(lambda: len(active_claims(run)) == 2)
        waiting = next(each.claim.id for each in active_claims(run) if each.between_steps)
        assert await run.engine.client.pause(waiting) == "requested"
        found = await released(run.engine.client, waiting)
        assert len(active_claims(run)) == 1
        assert (found.status, found.hold, found.attempt) == ("runnable", 4, 0)
        gate.open()
        [other] = [number for number in numbers if number != waiting]
        await run.engine.client.result(other, timeout=10)
        assert run.events.started(waiting) == []


async def test_parked_ones_are_woken_into_their_pause_and_can_be_cancelled(durable):
    class Waits(da.Machine[Any], name="waits"):
        @da.step
        async def start(self, ctx: da.Context[Any]) -> da.Outcome:
            return da.Await("go", then=self.gone, timeout=60)

        @da.step
        async def gone(self, ctx: da.Context[Any]) -> da.Outcome:
            return da.Done([each.name for each in ctx.awaited])

    signalled, expired, ended = [await durable.insert(Waits, state={}) for _ in range(3)]
    await durable.drain()
    for number in (signalled, expired, ended):
        assert await durable.pause(number, by="ada") == "paused"
    await durable.signal(signalled, "go")
    drained = await durable.drain()
    assert drained.steps == []
    assert "it was paused" in next(each.why for each in drained.waiting if each.instance.id == signalled)
    assert "it is paused when it would run" in drained.waiting[1].why
    await durable.advance("2m")
    assert (await durable.drain()).steps == [], "its deadline has passed: it is runnable, and paused"
    assert (await durable.inspect(expired)).hold == 4
    assert await durable.cancel(ended) == "cancelled"
    await durable.resume(signalled)
    await durable.resume(expired)
    assert (await durable.drain()).steps == ["gone", "gone"]
    assert [await durable.result(number) for number in (signalled, expired)] == [["go"], []]
    assert (await durable.verify()).problems == []


async def test_commands_leave_receipts_and_are_carried_out_once(durable):
    number = await durable.insert(simple(), state={}, unique_key="k")
    for _ in range(2):
        assert (
            await durable.pause("k", by="ada", reason="why", idempotency_key="1", meta={"n": 1}) == "paused"
        )
    assert await durable.resume(b"k") == number
    with pytest.raises(da.Conflict, match="not paused"):
        await durable.resume(number)
    with pytest.raises(da.NoTarget):
        await durable.pause(number + 99)
    await durable.cancel(number)
    with pytest.raises(da.Conflict, match="only one that has not ended can be paused"):
        await durable.pause(number)
    told = [(each.command, each.by, each.reason, each.result) for each in await durable.receipts(number)]
    assert told[1:] == [("resume", None, None, number), ("pause", "ada", "why", "paused")]


# -- queues


async def test_a_paused_queue_starts_nothing_and_keeps_its_pause_over_a_restart(durable_dsn, db: Db):
    machine = simple()
    async with running(durable_dsn) as run:
        client = run.engine.client
        pause = await client.pause_queue("default", by="ada", reason="deploy")
        assert (pause.queue, pause.machine, pause.until, pause.by) == ("default", None, None, "ada")
        await until(lambda: run.engine._node.queues["default"].paused)  # type: ignore[attr-defined]
        number = await run.insert(machine, state={"n": 7})
    async with running(durable_dsn) as run:
        client = run.engine.client
        await until(lambda: run.engine._node.queues["default"].paused)  # type: ignore[attr-defined]
        assert await client.execute_next("default") is None
        assert [each.reason for each in await client.pauses()] == ["deploy"], "no drain has touched it"
        told = await client.explain(number)
        assert (told.reason, told.blockers[0].kind) == ("queue_paused", "pause")
        assert "queue 'default' is paused by ada: deploy" in told.summary
        assert told.next_actions[0].command == "durable-actors queue resume default"
        assert run.events.started() == []
        await client.resume_queue("default")
        assert await client.result(number, timeout=10) == 7
        with pytest.raises(da.Conflict, match="queue 'default' is not paused"):
            await client.resume_queue("default")


async def test_what_waits_for_a_slot_is_released_and_no_step_runs_ahead(durable_dsn, quick):
    gate = Gate()
    machine = stepping(gate)
    async with running(durable_dsn, queues={"default": da.Queue(1, prefetch=5)}) as run:
        numbers = [await run.insert(machine, state={}) for _ in range(3)]
        await gate.wait_entered()
        await until(lambda: len(active_claims(run)) == 3)
        async with da.open_client(durable_dsn, name="another") as other:  # as from another process
            await other.pause_queue("default")
            await until(lambda: len(active_claims(run)) == 1)
            gate.open()
            found = [await released(other, number) for number in numbers]
            assert {(each.status, each.attempt) for each in found} == {("runnable", 0)}
            assert sorted(each.step for each in found) == ["again", "start", "start"]
            await other.resume_queue("default")
            for number in numbers:
                assert await other.result(number, timeout=10) == "end"


async def test_a_resume_elsewhere_is_noticed_by_the_long_poll(durable_dsn):
    """The next poll is a minute away."""
    slow = {"poll_interval": 60, "max_poll_interval": 60, "long_poll": 0.02}
    async with running(durable_dsn, **slow) as run, da.open_client(durable_dsn, name="another") as other:
        await other.pause_queue("default")
        number = await run.insert(simple(), state={"n": 1})
        await until(lambda: run.engine._node.queues["default"].paused)  # type: ignore[attr-defined]
        await other.resume_queue("default")
        assert await other.result(number, timeout=10) == 1


@pytest.mark.parametrize("how", ["resumed", "until"])
async def test_the_end_of_a_machines_pause_is_noticed(durable_dsn, db: Db, how: str):
    """Its rows are on the shelf, where the long poll sees none of them; the next poll is an hour away."""
    slow = {"poll_interval": 3600, "max_poll_interval": 3600, "long_poll": 0.02}
    machine = simple("paused")
    async with running(durable_dsn, **slow) as run, da.open_client(durable_dsn, name="another") as other:
        planner = run.engine._node.queues["default"]  # type: ignore[attr-defined]

        def knows() -> bool:
            return planner.paused_machines and planner.cursor.next_pick(trio.current_time()) is None

        for seconds in (1, 5, 25):  # on a busy machine a second is over before its row is shelved
            await other.pause_queue(
                "default", "paused", None if how == "resumed" else timedelta(seconds=seconds)
            )
            number = await run.insert(machine, state={"n": 1})
            await until(lambda row=number: db.row(row, "hold = 2 or status = 'done'") == (True,))
            shelved = db.row(number, "hold") == (2,)
            await until(lambda row=number: knows() or db.row(row, "status") == ("done",))
            if shelved:
                break
        else:
            pytest.fail("the row was never shelved")
        if how == "resumed":
            await other.resume_queue("default", "paused")
            told = await other.explain(number)
            assert (told.reason, "does not have" in told.summary) in {
                (reason, False) for reason in ("ready", "executing", "done")
            }
        assert await other.result(number, timeout=60) == 1


async def test_a_paused_backlog_costs_what_an_empty_queue_costs(durable_dsn):
    """Statistics at each poll, and no pick, whatever is inserted meanwhile, here or elsewhere."""
    with psycopg.connect(durable_dsn, autocommit=True) as connection:
        connection.execute("create extension if not exists pg_stat_statements")
        options = {"poll_interval": 0.02, "max_poll_interval": 0.02, "pool_size": 4}
        async with running(durable_dsn, **options) as run:
            await run.engine.client.pause_queue("default")
            await until(lambda: run.engine._node.queues["default"].paused)  # type: ignore[attr-defined]
            # A control look may tell of the pause while the feeder is about to pick: its next look comes after that.
            told, _ = calls(connection)
            await until(lambda: calls(connection)[0] >= told + 2)
            wait_counted(connection, connection.info.dbname)
            looks, picks = calls(connection)
            machine = simple()
            seen = looks
            while seen < looks + 10:
                await run.insert(machine, state={})
                await trio.sleep(0.01)
                seen, picked = calls(connection)
            assert picked == picks
            assert seen < looks + 30, "inserts do not wake the feeder"


async def test_one_machine_in_a_queue(durable):
    """Its rows are set aside; the others go on, also behind it in their partition key."""
    paused, other = simple("paused"), simple("other")
    numbers = [await durable.insert(paused, state={"n": 1}, partition_key="k") for _ in range(2)]
    rest = [await durable.insert(other, state={"n": 2}, partition_key="k") for _ in range(2)]
    pause = await durable.pause_queue("default", paused, timedelta(hours=1), by="ada")
    assert (pause.machine, pause.until is not None) == ("paused", True)
    drained = await durable.drain()
    assert {each.id for each in drained.ran} == set(rest)
    assert all("machine 'paused' in queue 'default' is paused until" in each.why for each in drained.waiting)
    told = await durable.explain(numbers[0])
    assert (told.reason, told.until) == ("queue_paused", pause.until)
    again = await durable.pause_queue("default", "paused", datetime(2999, 1, 1, tzinfo=UTC), reason="later")
    assert (again.at, again.by, again.reason) == (pause.at, None, "later")
    await durable.resume_queue("default", paused)
    assert {each.id for each in (await durable.drain()).ran} == set(numbers)
    assert (await durable.verify()).problems == []


async def test_a_pause_ends_by_itself(durable):
    number = await durable.insert(simple(), state={"n": 3})
    await durable.pause_queue("default", until=3600, by="ada")
    drained = await durable.drain()
    assert "queue 'default' is paused until" in str(drained)
    await durable.advance("59m")
    assert (await durable.drain()).steps == []
    await durable.advance("2m")
    assert await durable.pauses() == []
    with pytest.raises(da.Conflict):
        await durable.resume_queue("default")
    await durable.drain()
    assert await durable.result(number) == 3


async def test_siblings_in_another_queue_do_not_wait_for_a_paused_one(durable):
    """Rows of a paused queue give up their place, also those that were held already; the sweep finds the others."""
    slow, fast = simple("slow", queue="slow"), simple("fast", queue="fast")
    first = await durable.insert(slow, state={"n": 1}, partition_key="k")
    second = await durable.insert(fast, state={"n": 2}, partition_key="k")
    assert await durable.execute_next("fast") is None, "it is held behind the first"
    assert (await durable.inspect(second)).hold == 1
    await durable.pause_queue("slow")
    drained = await durable.drain()
    assert [each.id for each in drained.ran] == [second]
    await durable.resume_queue("slow")
    assert [each.id for each in (await durable.drain()).ran] == [first]


@pytest.mark.parametrize(
    "given",
    [
        {"queue": ""},
        {"queue": 7},
        {"queue": "q", "machine": ""},
        {"queue": "q", "machine": 7},
        {"queue": "q", "until": 0},
        {"queue": "q", "until": "soon"},
        {"queue": "q", "until": datetime(2030, 1, 1)},  # noqa: DTZ001 - that is the point
        {"queue": "q", "until": datetime(2030, 1, 1, tzinfo=NoZone())},
        {"queue": "q", "by": ""},
    ],
    ids=str,
)
async def test_wrong_arguments_write_nothing(db: Db, given: dict[str, Any]):
    async with client_of(db) as client:
        with pytest.raises(da.DurableError):
            await client.pause_queue(**given)
        assert await client.pauses() == []


@pytest.mark.parametrize(
    "offset", [timedelta(hours=23), -timedelta(hours=16), timedelta(microseconds=1)], ids=str
)
async def test_until_in_a_zone_whose_offset_postgres_does_not_read(durable, offset: timedelta):
    end = datetime(2100, 1, 1, tzinfo=UTC)
    assert (await durable.pause_queue("q", until=end.astimezone(timezone(offset)))).until == end


async def test_until_an_instant_that_has_passed(durable):
    """It would say that the queue is paused, and end a pause that lasts."""
    await durable.pause_queue("q", by="ada")
    for end in (datetime(2020, 1, 1, tzinfo=UTC), await durable.now()):
        with pytest.raises(da.Conflict, match="has passed"):
            await durable.pause_queue("q", until=end)
    [pause] = await durable.pauses()
    assert (pause.queue, pause.until, pause.by) == ("q", None, "ada")
    assert len(await durable.receipts()) == 1


@pytest.mark.parametrize("request_", ["{}", "[]", "null", '"pause"', '{"kind": "other"}'])
async def test_whatever_a_hand_has_held_as_paused_is_resumed(durable, request_: str):
    """Caller and statement agree on what is paused: otherwise the command would be tried for ever."""
    number = await durable.insert(simple(), state={"n": 1})
    with psycopg.connect(durable.dsn, autocommit=True) as db:
        db.execute("update durable.gen_durable set hold = 4, request = %s::jsonb", [request_])
    with trio.fail_after(10):
        assert await durable.resume(number) == number
    found = await durable.inspect(number)
    assert (found.hold, found.request) == (0, None)


# -- the planner


def test_the_planner_rests_while_its_queue_is_paused():
    rig = Rig()
    told: list[dict[str, float]] = []
    rig.planner.on_pauses = lambda pauses, _now: told.append(dict(pauses))
    rig.shapes = [STOPPED]
    assert rig.round() == [REFRESH_BEFORE_PICK, Sleep(1.0, has_room=True)]
    assert told == [{"": math.inf}]
    woken = rig.woken
    rig.planner.notify(7, 0)
    assert rig.woken == woken, "a hint wakes nobody"
    assert rig.round("message") == [Sleep(1.0, has_room=True)], "a slot is free: nothing to do"
    rig.now += 1.0
    assert rig.round("timer") == [REFRESH_BEFORE_PICK, Sleep(2.0, has_room=True)]
    rig.planner.expect_deadline()
    rig.shapes = [attrs.evolve(STOPPED, next_deadline=0.5)]
    assert rig.round("message") == [REFRESH_BEFORE_PICK, Sleep(0.5, has_room=True)]
    rig.now += 0.5
    rig.shapes = [STOPPED]
    assert rig.round("timer")[0] == EXPIRE
    rig.planner.pauses_changed()
    rig.shapes = [shape(0)]
    assert rig.round("message", wanted=0) == [REFRESH_BEFORE_PICK, Sleep(math.inf)], "whatever the demand"
    assert not rig.planner.paused
    assert rig.round("message")[0] == Pick(10)
    assert rig.froms[-1].extras == [7], "the hint was kept"


@pytest.mark.parametrize("how", ["time", "long poll", "control"])
def test_how_the_pause_of_a_machine_ends_for_the_planner(how: str):
    """It reads the statistics, whatever the demand: they tell which steps of the machine are on the shelf."""
    rig = Rig()
    rig.shapes = [attrs.evolve(EMPTY, pauses={"m": 0.25, "n": math.inf})]
    assert rig.round()[-1] == Sleep(0.25, has_room=True)
    assert rig.planner.paused_machines == {"m", "n"}
    woken = rig.woken
    rig.planner.see_paused_machines({"m", "n", "new"})
    rig.planner.learn_pauses({"m": 0.25, "n": math.inf}, rig.now)
    assert rig.woken == woken, "nothing has ended"
    if how == "time":
        rig.now += 0.25
    elif how == "long poll":
        rig.planner.see_paused_machines({"n"})
    else:
        rig.planner.learn_pauses({"n": math.inf}, rig.now)
    assert rig.woken == woken + (how != "time")
    rig.shapes = [attrs.evolve(EMPTY, shelved=("a",), pauses={"n": math.inf})]
    assert rig.round("timer" if how == "time" else "message", wanted=0)[0] == REFRESH_BEFORE_PICK
    assert rig.planner.paused_machines == {"n"}


@pytest.mark.parametrize("how", ["time", "long poll", "control"])
def test_how_a_pause_ends_for_the_planner(how: str):
    rig = Rig()
    rig.shapes = [attrs.evolve(EMPTY, pauses={"": 0.25, "m": 9.0})]
    assert rig.round()[-1] == Sleep(0.25, has_room=True)
    woken = rig.woken
    if how == "time":
        rig.now += 0.25
        rig.shapes = [shape(0)]
        assert rig.round("timer")[0] == REFRESH_BEFORE_PICK
    elif how == "long poll":
        rig.planner.seen_due(0)
        rig.shapes = [shape(0)]
        assert rig.woken == woken + 1
        assert rig.round("message")[0] == Pick(10)
    else:
        rig.planner.learn_pauses({"m": 5.0}, rig.now)
        assert rig.woken == woken + 1
    assert not rig.planner.paused
