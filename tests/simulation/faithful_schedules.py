"""The part of the walks of test_faithful.py that turns schedules. Instants are long past or far away: clocks differ."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from random import Random
from typing import Any

import attrs
from durable_actors._postgres.driver import encode
from durable_actors._scheduling.decide import Fire, Skip, Turn
from durable_actors._scheduling.schedule import Definition
from durable_actors._store import schedules
from durable_actors._store.schedules import ScheduledPlan, StoredSchedule
from durable_actors._store.sql import statement
from tests.simulation.statements_schedules import LogRow, ScheduleRow
from tests.store.kit import plan

PAST, FUTURE = datetime(2020, 1, 1, tzinfo=UTC), datetime(2099, 1, 1, tzinfo=UTC)
NAMES = ("hourly", "nightly")


class ScheduleWalks:
    """What nodes do with schedules."""

    random: Random
    both: Any
    same: Any
    server: Any
    real: Any
    model: Any
    db: Any
    said: list[str]
    slots = 0

    def _turn(self, **more: Any) -> Turn:
        """Where a schedule stands: it is due, or not for long."""
        at = self.random.choice((PAST, FUTURE, None))
        last = self.random.choice((None, PAST))
        return Turn(at, at, last, self.random.choice((None, 3)), **more)

    def _next(self) -> datetime:
        self.slots += 1
        return PAST + timedelta(hours=self.slots)

    def _rev(self, name: str) -> int:
        row: ScheduleRow | None = self.server.tables.small.get(("schedules", name))
        return 0 if row is None else row.rev - (self.random.random() < 0.1)  # somebody else was first

    async def put(self) -> None:
        """A node's code defines a schedule, or an operator does."""
        draw, name = self.random, self.random.choice(NAMES)
        overlap = draw.choice(("skip", "allow"))
        definition = Definition(every=3600.0, overlap=overlap, queue_paused=draw.choice(("skip", "insert")))
        row = plan(machine="m", step="s", journal=draw.randint(0, 4), limits=draw.choice((None, "free")))
        skips = (Skip(self._next(), self._next(), 2, "changed"),) if draw.random() < 0.3 else ()
        sql, params = schedules.put_call(
            "durable", ScheduledPlan(name, definition, row), self._turn(skips=skips), rev=self._rev(name),
            origin=draw.choice(("code", "api")), revisions=("r1",),
        )  # fmt: skip
        await self.same(_run, sql, params)

    async def turn(self) -> None:
        """Slots fire, are skipped, or wait."""
        draw, name = self.random, self.random.choice(NAMES)
        row: ScheduleRow | None = self.server.tables.small.get(("schedules", name))
        if row is None:
            await self.put()
            return
        kinds = ("slot", "slot", "caught_up", "run_now")
        fires = tuple(Fire(self._next(), draw.choice(kinds)) for _ in range(draw.choice((0, 1, 1, 2))))
        skips = tuple(
            Skip(self._next(), self._next(), draw.choice((2, None)), draw.choice(("missed", "buffered")))
            for _ in range(draw.choice((0, 0, 1)))
        )
        buffered = draw.choice((None, None, PAST))
        stored = StoredSchedule(
            **{field: getattr(row, field) for field in StoredSchedule.__struct_fields__ if field != "revisions"},
            revisions=[*row.revisions],
        )  # fmt: skip
        turn = attrs.evolve(self._turn(fires=fires, skips=skips), buffered=buffered)
        sql, params = schedules.turn_call(
            "durable", stored, turn, paused=draw.choice((None, None, {"by": "me"}))
        )
        params = [params[0], str(self._rev(name)).encode(), *params[2:]]
        await self.same(_run, sql, params)

    async def adopt(self) -> None:
        name = self.random.choice(NAMES)
        await self.same(_adopt, name, self._rev(name))

    async def enable(self) -> None:
        enable = self.random.random() < 0.5
        ours, theirs = await self.both(schedules.enable_schedules, "durable", NAMES, enable=enable)
        assert sorted(ours) == sorted(theirs), self.said[-5:]

    async def due(self) -> None:
        """What is due, and what a node says of others."""
        declared = self.random.choice(((), NAMES[:1], NAMES))
        ours, theirs = await self.both(schedules.read_due, "durable", declared)
        for side in (ours, theirs):
            assert not side.broken
        told = [
            (
                [(each.row.name, each.row.rev, each.row.definition, each.running) for each in side.found],
                side.wait is None,
                side.wait is not None and side.wait <= 0,
                side.others,
                side.disabled,
            )
            for side in (ours, theirs)
        ]
        assert told[0] == told[1], self.said[-5:]

    def compare_schedules(self) -> None:
        """All columns but the times of writing; and the records."""
        small = self.server.tables.small
        names = [field.name for field in attrs.fields(ScheduleRow)]
        written = {"created_at", "changed_at", "disabled_at", "overridden"}
        plain = [name for name in names if name not in {*written, "state", "meta", "fingerprint", "tags"}]
        found = self.db.execute(
            f"select {', '.join(plain)}, disabled_at is null, overridden is null from durable.schedules order by name"
        ).fetchall()
        rows = [
            row
            for _, row in sorted((key, row) for (table, key), row in small.items() if table == "schedules")
        ]
        ours = [
            (
                *(_listed(getattr(row, name)) for name in plain),
                row.disabled_at is None,
                row.overridden is None,
            )
            for row in rows
        ]
        assert ours == found, self.said[-5:]
        fields = [field.name for field in attrs.fields(LogRow) if field.name != "at"]
        records = self.db.execute(f"select {', '.join(fields)} from durable.schedule_log").fetchall()
        log = [row for (table, _), row in small.items() if table == "schedule_log"]
        told = [tuple(getattr(row, name) for name in fields) for row in log]
        assert sorted(told, key=str) == sorted(records, key=str), self.said[-5:]


def _listed(value: Any) -> Any:
    return [*value] if isinstance(value, tuple) else value


async def _run(conn: Any, sql: Any, params: Any) -> Any:
    return [[*row] for row in (await conn.run(sql, params)).rows]


async def _adopt(conn: Any, name: str, rev: int) -> Any:
    params = [encode.text(name), encode.number(rev), encode.text_array(["r1", "r2"])]
    return await _run(conn, statement("adopt_schedule", "durable"), params)
