"""What a notifier is told: reads the attempts of instances, and records that one was told."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import attrs

from durable_actors._postgres.driver import encode
from durable_actors._postgres.driver.connection import PgConn
from durable_actors._postgres.driver.decode import decode_instant
from durable_actors._postgres.driver.statement import Row
from durable_actors._store.sql import statement
from durable_actors.config import Wakeup
from durable_actors.journal.facts import runnable_key
from durable_actors.machine import CLAIMS

_TO_RUN: Final = frozenset({b"runnable", b"executing"})
"""A row that is claimed already is told, too. One that waits or has ended by now has no attempt to tell of."""


@attrs.frozen
class Intent:
    """An attempt that is to run, or runs."""

    id: int
    queue: str
    step: str
    visit: int
    round: int
    attempt: int
    visible_at: bytes
    """As Postgres writes it."""
    recorded: bool
    """Whether a wake-up of it is recorded."""

    def wakeup(self) -> Wakeup:
        """What the notifier is told."""
        due = decode_instant(self.visible_at)
        assert due is not None
        return Wakeup(
            instance_id=self.id,
            queue=self.queue,
            runnable_key=runnable_key(self.id, self.visit, self.step, self.round, self.attempt),
            visible_at=due,
        )


async def read_intents(conn: PgConn, schema: str, ids: Sequence[int]) -> list[Intent]:
    """Read the attempts of those instances that have one now, in the order of `ids`."""
    rows = (await conn.run(statement("read_intents", schema, read_only=True), [encode.int_array(ids)])).rows
    found = {each.id: each for each in map(_intent, rows) if each is not None}
    return [found[number] for number in ids if number in found]


def _intent(row: Row) -> Intent | None:
    number, status, queue, step, visit, before, attempt, at, level = row
    if status not in _TO_RUN:
        return None
    return Intent(
        int(number or 0),
        (queue or b"").decode(),
        (step or b"").decode(),
        int(visit or 0),
        int(before or 0),
        int(attempt or 0),
        at or b"",
        int(level or 0) >= CLAIMS,
    )


async def record_wakeup(conn: PgConn, schema: str, intent: Intent) -> bool:
    """Record that a notifier was told of an attempt. False: the instance has ended, or records less."""
    params = [
        encode.number(intent.id),
        intent.step.encode(),
        encode.number(intent.visit),
        encode.number(intent.attempt),
        encode.number(intent.round),
        intent.visible_at,
    ]
    return bool((await conn.run(statement("record_wakeup", schema), params)).rows)
