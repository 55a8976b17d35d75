"""`QueuePause`: a queue, or one machine in a queue, from which nothing is picked. A row of the table `pauses`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import datetime

import attrs
import msgspec

from durable_actors._postgres.driver.connection import PgConn
from durable_actors._postgres.driver.decode import decode_instant
from durable_actors._store.sql import statement


@attrs.frozen(kw_only=True)
class QueuePause:
    """A queue, or one machine in it, from which nothing is picked."""

    queue: str
    """The queue from which nothing is picked."""
    machine: str | None = None
    """Only instances of this machine; None: the whole queue."""
    at: datetime
    """Since when."""
    until: datetime | None = None
    """When it ends by itself; None: somebody must resume it."""
    by: str | None = None
    """Who paused it, or changed the pause last."""
    reason: str | None = None
    """Why."""

    @property
    def what(self) -> str:
        """What is paused, for people."""
        whole = f"queue {self.queue!r}"
        return whole if self.machine is None else f"machine {self.machine!r} in {whole}"


def pause_target(queue: str, machine: str | None) -> str:
    """How receipts name it."""
    return queue if machine is None else f"{queue}/{machine}"


def pause_of(stored: object) -> QueuePause:
    """Read the result of a receipt of pause_queue.sql or resume_queue.sql. Pure."""
    found = msgspec.convert(stored, _Stored)
    listed = _Listed(found.machine or "", found.until, found.at, found.by, found.reason)
    return _pause(found.queue, listed)


class _Stored(msgspec.Struct):
    queue: str
    machine: str | None
    until: str | None
    at: str
    by: str | None
    reason: str | None


class _Listed(msgspec.Struct, array_like=True):
    fsm: str
    until: str | None
    at: str
    by: str | None
    reason: str | None


def read_pause_list(queue: str, raw: bytes | None) -> tuple[QueuePause, ...]:
    """Read the pauses of a queue as observe_instances.sql and read_queues.sql return them. Pure."""
    found = () if raw is None else msgspec.json.decode(raw, type=tuple[_Listed, ...])
    return tuple(_pause(queue, each) for each in found)


def _pause(queue: str, listed: _Listed) -> QueuePause:
    since = decode_instant(listed.at.encode())
    assert since is not None
    until = None if listed.until is None else decode_instant(listed.until.encode())
    return QueuePause(
        queue=queue, machine=listed.fsm or None, at=since, until=until, by=listed.by, reason=listed.reason
    )


async def read_pauses(conn: PgConn, schema: str) -> list[QueuePause]:
    """Read what is paused, by queue and machine."""
    rows = (await conn.run(statement("read_pauses", schema, read_only=True), [None])).rows
    found: list[QueuePause] = []
    for queue, fsm, until, at, by, reason, _left in rows:
        since = decode_instant(at)
        assert since is not None
        found.append(
            QueuePause(
                queue=(queue or b"").decode(),
                machine=(fsm or b"").decode() or None,
                at=since,
                until=decode_instant(until),
                by=None if by is None else by.decode(),
                reason=None if reason is None else reason.decode(),
            )
        )
    return found


def ends_at(pauses: Mapping[str, float], now: float) -> dict[str, float]:
    """When pauses end, on Trio's clock, from the seconds that they last. Pure."""
    return {name: math.inf if left == math.inf else now + left for name, left in pauses.items()}
