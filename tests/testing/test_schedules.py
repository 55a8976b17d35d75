"""Schedules on a bench: `advance` passes from slot to slot."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

import durable_actors as da
import pytest
from durable_actors.testing import Bench

BERLIN = ZoneInfo("Europe/Berlin")


@pytest.fixture
def ran() -> list[datetime | None]:
    return []


@pytest.fixture
def nightly(ran: list[datetime | None]) -> Any:
    @da.job(name="nightly", cron="0 3 * * *", tz="Europe/Berlin")
    async def nightly(ctx: da.Context[Any]) -> None:
        ran.append(ctx.scheduled_for)

    return nightly


async def test_slots_fire_as_time_passes(durable: Bench, nightly: Any, ran: list[datetime]) -> None:
    await durable.advance("2d")
    assert await durable.schedules.list() == []  # nothing is declared by itself
    [info] = await durable.declare_schedules()
    for _ in range(5):
        await durable.advance("1d")
        await durable.drain()
    assert tuple(ran) == info.next
    assert [(each.hour, each.tzinfo) for each in ran] == [(3, BERLIN)] * 5
    [info] = await durable.schedules.list()
    assert [each.kind for each in info.records] == ["slot"] * 5
    gap = max(each.at - each.slot for each in info.records)
    assert gap < timedelta(milliseconds=1), "each fired at its time"


async def test_nothing_runs_until_drain(durable: Bench, nightly: Any, ran: list[datetime]) -> None:
    """So the second slot finds that the first one has not ended."""
    await durable.declare_schedules()
    await durable.advance("2d")
    assert ran == []
    [info] = await durable.schedules.list()
    assert [(each.outcome, each.reason) for each in info.records] == [("skipped", "overlap"), ("fired", None)]
    assert info.running is not None
    assert "1 step ran" in str(await durable.drain())


async def test_pause_resume_and_backfill(durable: Bench, nightly: Any, ran: list[datetime]) -> None:
    await durable.declare_schedules()
    await durable.schedules.pause("nightly", by="ada")
    began = await durable.now()
    await durable.advance("10d")
    info = await durable.schedules.resume("nightly", by="ada")
    await durable.drain()
    assert ran == []
    assert [(each.slots, each.reason) for each in info.records] == [(10, "paused")]
    ids = await durable.schedules.backfill("nightly", began, await durable.now(), by="ada")
    await durable.drain()
    assert len(ids) == len(ran) == 10
    assert ran == sorted(ran)
    found = await durable.receipts(command="backfill")
    assert [(each.scope, each.target, each.result) for each in found] == [("schedule", "nightly", list(ids))]
    [number] = await durable.schedules.backfill("nightly", began, await durable.now(), overlap="skip")
    [info] = await durable.schedules.list(records=10)
    told = [(each.outcome, each.reason, each.instance_id) for each in info.records]
    assert told == [("skipped", "overlap", None)] * 9 + [("fired", None, number)]


async def test_a_few_slots_and_no_more(durable: Bench, nightly: Any, ran: list[datetime]) -> None:
    await durable.schedules.put("thrice", nightly, every=60, remaining=3, overlap="allow")
    await durable.advance("1h")
    await durable.drain()
    assert len(ran) == 3
    info = await durable.schedules.get("thrice")
    assert (info.state, info.remaining, info.next, info.fire_at) == ("ended", 0, (), None)


async def test_too_many_slots(durable: Bench, nightly: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("durable_actors.testing.schedules.MOST_TURNS", 20)
    await durable.schedules.put("often", nightly, every=1)
    with pytest.raises(da.ConfigError, match="more than 20 slots"):
        await durable.advance("1h")


async def test_one_step_alone(durable: Bench, nightly: Any, ran: list[Any]) -> None:
    await durable.run_step(nightly)
    assert ran == [None]
    slot = datetime(2026, 6, 1, 3, tzinfo=BERLIN)
    await nightly(da.Context(state={}, scheduled=da.ScheduledRun(schedule="nightly", slot=slot)))
    assert ran == [None, slot]


async def test_a_slot_cancels_the_running_instance(durable: Bench, nightly: Any) -> None:
    """On a bench nothing runs by itself: what was started is cancelled at once."""
    await durable.schedules.put("often", nightly, every=3600, overlap="cancel_running")
    await durable.advance("2h")
    second, first = await durable.list_instances(da.Filter(machine="nightly"))
    assert (first.status, second.status) == ("cancelled", "runnable")
