"""Reading instances: one by id or key, for `result` and `inspect`; many for lists."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, cast

import attrs

from durable_actors._postgres.driver import encode
from durable_actors._postgres.driver.connection import PgConn
from durable_actors._postgres.driver.decode import decode_instant, decode_text_array
from durable_actors._postgres.driver.statement import Row
from durable_actors._store.boundaries import Boundary, Waiting, read_manual
from durable_actors._store.commands import Request, read_cancellation, read_request
from durable_actors._store.insert import key_as_given
from durable_actors._store.sql import statement
from durable_actors.machine import ENDED, Cancellation, Decision, Status, decode_or_text


@attrs.frozen
class ParentRun:
    """Who started an instance."""

    id: int
    """The parent."""
    machine: str | None = None
    """Its machine; None in lists, and if its row is gone."""
    step: str | None = None
    """The step of the parent that started it, where that is recorded: in the child's journal or in the parent's."""
    key: str | None = None
    """Its key in `ctx.start_child`, where that is recorded; None for children of `ScheduleChildren`."""


@attrs.frozen(kw_only=True)
class Instance:
    """An instance as its row shows it."""

    id: int
    machine: str
    version: int
    step: str
    status: Status
    queue: str
    priority: int
    attempt: int
    crashes: int
    interruptions: int = 0
    """Runs that a drain ended; they do not count as attempts."""
    visit: int
    state: object
    """The stored JSON, not decoded to the machine's type; as text if Python cannot represent it."""
    result: object
    """The result of `Done(result)`; None before that."""
    last_error: str | None
    """Text of the last failure; None after a step that succeeded."""
    error_type: str | None = None
    """Class of the exception behind it, as `module.Class`; None if there was none."""
    traceback: str | None = None
    """Its traceback, shortened in the middle; None in lists."""
    partition_key: str | None
    unique_key: str | bytes | None
    """As text if it is UTF-8, else as bytes."""
    tags: tuple[str, ...] = ()
    """From `insert(tags=...)`."""
    meta: Mapping[str, Any] = attrs.field(factory=dict[str, Any])
    """From `insert(meta=...)`."""
    parent_id: int | None
    parent_run: ParentRun | None = None
    """Who started it, if it is a child; in lists only the id."""
    key: str | None = None
    """Its name among the children of its barrier: `Child(key=...)`, or the task of a `Workflow`."""
    waits: int = 0
    """How many of the instances that it comes after it waits for; `explain` names them."""
    rerun_of: int | None = None
    """The instance that `rerun` started it from."""
    max_attempts: int | None = None
    """From `insert(max_attempts=...)`; None: what the machine's code says."""
    locked_by: str | None
    """The node and incarnation that runs it now."""
    eligible_at: datetime
    lease_expires_at: datetime | None
    inserted_at: datetime
    updated_at: datetime
    finished_at: datetime | None
    boundary: Boundary | None = None
    """Where it waits for a person; None if it does not."""
    decision: Decision | None = None
    """What a person decided, until the step that this led to has an outcome."""
    cancellation: Cancellation | None = None
    """Why it was cancelled, if it compensates (`@step(on_cancel=True)`) or has done so; in lists without the reason."""
    hold: int
    """Why a runnable row waits: 0 it does not · 1 held behind a sibling of its key · 2 shelved: a node that read it
    does not know its machine, version or step (a node that does will run it), or its machine is paused · 4 paused ·
    5 it waits for instances that it comes after (`waits`)."""
    request: Request | None = None
    """The standing order of a command, "cancel" or "pause": by whom, when and why. One that has ended keeps it."""

    @property
    def paused(self) -> Request | None:
        """Who paused it, when and why; None if it is not paused. A step that runs then finishes first."""
        request = self.request
        return request if request is not None and request.pauses and self.finished_at is None else None

    @property
    def waiting(self) -> Waiting | None:
        """What it waits for, if it is parked: "approval" or "pause" (a person), "signal", "children"."""
        if self.boundary is not None:
            return self.boundary.kind
        return {"awaiting_signal": "signal", "awaiting_children": "children"}.get(self.status)  # type: ignore[return-value]


def read_instance(row: Row) -> Instance:
    """Read a row of read_instances.sql. Pure."""

    def text(index: int) -> str:
        return (row[index] or b"").decode()

    def number(index: int) -> int:
        return int(row[index] or 0)

    def json(index: int) -> object:
        value = row[index]
        return None if value is None else decode_or_text(value)

    eligible, inserted, updated = decode_instant(row[17]), decode_instant(row[19]), decode_instant(row[20])
    assert eligible is not None
    assert inserted is not None
    assert updated is not None
    boundary, decision = (None, None) if row[28] is None else _manual(row, row[28], eligible)
    return Instance(
        id=number(0),
        machine=text(1),
        version=number(2),
        step=text(3),
        status=cast("Status", text(4)),
        queue=text(5),
        priority=number(6),
        attempt=number(7),
        crashes=number(8),
        visit=number(9),
        state=json(10),
        result=json(11),
        last_error=None if row[12] is None else text(12),
        partition_key=None if row[13] is None else text(13),
        unique_key=None if row[14] is None else key_as_given(bytes.fromhex(text(14)[2:])),
        parent_id=None if row[15] is None else number(15),
        parent_run=None if row[15] is None else ParentRun(number(15)),
        locked_by=None if row[16] is None else text(16),
        eligible_at=eligible,
        lease_expires_at=decode_instant(row[18]),
        inserted_at=inserted,
        updated_at=updated,
        finished_at=decode_instant(row[21]),
        boundary=boundary,
        decision=decision,
        hold=number(22),
        interruptions=number(23),
        error_type=None if row[24] is None else text(24),
        traceback=None if row[25] is None else text(25),
        tags=() if row[26] is None else decode_text_array(row[26]),
        meta=cast("Mapping[str, Any]", {} if row[27] is None else json(27)),
        request=None if row[30] is None else read_request(row[30]),
        rerun_of=None if row[31] is None else number(31),
        cancellation=None if row[32] is None else read_cancellation(row[32]),
        key=None if row[33] is None else text(33),
        waits=number(34),
        max_attempts=None if row[35] is None else number(35),
    )


def _manual(row: Row, manual: bytes, since: datetime) -> tuple[Boundary | None, Decision | None]:
    return read_manual(
        manual,
        parked=row[4] == b"awaiting_signal",
        step=(row[3] or b"").decode(),
        since=since,
        deadline=decode_instant(row[29]),
    )


async def read_by_ids(
    conn: PgConn, schema: str, ids: Sequence[int], *, full: bool = True
) -> dict[int, Instance]:
    """Read instances by id; those that do not exist are missing. If not `full`: without state, result and errors."""
    params = [encode.int_array(ids), b"t" if full else b"f"]
    result = await conn.run(statement("read_instances", schema, read_only=True), params)
    return {instance.id: instance for instance in map(read_instance, result.rows)}


async def find_by_key(conn: PgConn, schema: str, key: bytes) -> int | None:
    """The instance that occupies a unique key, else the newest one that had it; None if none had it."""
    result = await conn.run(statement("find_by_key", schema, read_only=True), [encode.bytea(key)])
    return int(result.rows[0][0] or 0) if result.rows else None


@attrs.frozen
class Ending:
    """How an instance ended."""

    id: int
    status: Status
    result: bytes | None
    last_error: str | None


async def read_finals(conn: PgConn, schema: str, ids: Sequence[int]) -> tuple[dict[int, Ending], set[int]]:
    """The endings of those instances that have ended, and the ids that do not exist."""
    result = await conn.run(statement("read_finals", schema, read_only=True), [encode.int_array(ids)])
    return endings_of(result.rows, ids)


def endings_of(rows: Sequence[Row], ids: Sequence[int]) -> tuple[dict[int, Ending], set[int]]:
    """Read the rows of read_finals.sql. Pure."""
    endings: dict[int, Ending] = {}
    found: set[int] = set()
    for row in rows:
        number, status = int(row[0] or 0), (row[1] or b"").decode()
        found.add(number)
        if status in ENDED:
            error = None if row[3] is None else row[3].decode()
            endings[number] = Ending(number, status, row[2], error)
    return endings, set(ids) - found
