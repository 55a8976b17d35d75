"""Retention: deletes ended instances on a walk along the ids; what machines say about how long theirs are kept."""

from __future__ import annotations

from collections.abc import Iterable

import attrs

from durable_actors._postgres.driver import encode
from durable_actors._postgres.driver.connection import PgConn
from durable_actors._store.sql import statement
from durable_actors.machine import MachineSpec


@attrs.frozen
class Ages:
    """Seconds for which ended instances are kept, unless their machine says otherwise; None: for ever."""

    done: float | None
    cancelled: float | None
    failed: float | None
    inserted: float
    """The least for what a step inserted: when the step runs again, it must find it."""


@attrs.frozen
class Swept:
    """What one statement found and deleted."""

    looked: int
    """How many rows it read."""
    last: int | None
    """The last of them."""
    last_old: int | None
    """The last of them that is old enough by its insert; None: none is."""
    done: int
    cancelled: int
    failed: int
    records: int
    """Records of the journal that went with them."""

    @property
    def deleted(self) -> int:
        """How many instances it deleted."""
        return self.done + self.cancelled + self.failed


async def delete_ended(
    conn: PgConn, schema: str, ages: Ages, *, after: int, limit: int, old: float, only_look: bool = False
) -> Swept:
    """Look at the `limit` rows after the id `after`, and delete those whose time has come, with what belongs to them.

    One statement, one transaction; it waits for no row. A row is old if it was inserted `old` seconds ago.
    """
    params = [
        encode.number(after),
        encode.number(limit),
        encode.number(ages.done),
        encode.number(ages.cancelled),
        encode.number(ages.failed),
        encode.number(ages.inserted),
        encode.number(old),
        b"f" if only_look else b"t",
    ]
    [row] = (await conn.run(statement("delete_ended", schema), params)).rows
    looked, last, last_old, *counts = row
    done, cancelled, failed, records = (int(each or 0) for each in counts)
    return Swept(int(looked or 0), _whole(last), _whole(last_old), done, cancelled, failed, records)


def _whole(value: bytes | None) -> int | None:
    return None if value is None else int(value)


async def read_keeps(conn: PgConn, schema: str) -> list[float]:
    """Read the lengths of time for which machines keep their ended instances, shortest first."""
    rows = (await conn.run(statement("read_keeps", schema, read_only=True), [])).rows
    return [float(row[0] or 0) for row in rows]


async def write_keeps(conn: PgConn, schema: str, specs: Iterable[MachineSpec]) -> None:
    """Record what these machines say, for every node that deletes. Writes nothing if it is recorded already."""
    known = sorted(specs, key=lambda spec: spec.key)
    keeps = [spec.keep for spec in known]
    params = [
        encode.text_array([spec.name for spec in known]),
        encode.int_array([spec.version for spec in known]),
        encode.bool_array([keep != "default" for keep in keeps]),
        encode.float_array([None if isinstance(keep, str) else keep for keep in keeps]),
    ]
    await conn.run(statement("write_keeps", schema), params)
