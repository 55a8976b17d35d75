"""Retention: deletes ended instances on a walk along the ids; what machines say about how long theirs are kept.

Instances that live on keep the records of their last moves: a snapshot of the row now and then, and what lies before an
older snapshot is deleted.
"""

from __future__ import annotations

from collections.abc import Iterable

import attrs

from durable_actors._postgres.driver import encode
from durable_actors._postgres.driver.connection import PgConn
from durable_actors._postgres.driver.decode import decode_text_array
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
    looked, last, last_old, *counts, _ = row
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


# -- long journals


@attrs.frozen
class LongJournals:
    """Live instances that have moved often, among the rows that a statement looked at."""

    looked: int
    last: int | None
    """The last of the rows."""
    ids: tuple[int, ...]
    grown: tuple[int, ...]
    """Of these, those that are due for a snapshot."""
    hides: tuple[int, ...]
    """Of these, those that have records which may go."""


async def find_long_journals(
    conn: PgConn, schema: str, *, moves: int, after: int = 0, limit: int = 0, ids: Iterable[int] | None = None
) -> LongJournals:
    """Look at the `limit` rows after the id `after`, or at these, for live instances with more than `moves` moves."""
    params = [
        encode.number(after),
        encode.number(limit),
        encode.number(moves),
        None if ids is None else encode.int_array(list(ids)),
    ]
    [row] = (await conn.run(statement("find_long_journals", schema, read_only=True), params)).rows
    looked, last, *found = row
    return LongJournals(int(looked or 0), _whole(last), *map(_ids, found))


async def sample_long_journals(
    conn: PgConn, schema: str, *, moves: int, pages: int, most: int
) -> tuple[int, ...]:
    """Look at so many random pages of the journal for instances with more than `moves` moves; they may have ended."""
    params = [encode.number(pages), encode.number(moves), encode.number(most)]
    rows = (await conn.run(statement("sample_long_journals", schema, read_only=True), params)).rows
    return tuple(sorted(int(row[0] or 0) for row in rows))


def _ids(raw: bytes | None) -> tuple[int, ...]:
    return () if raw is None else tuple(map(int, decode_text_array(raw)))


async def snapshot_journal(conn: PgConn, schema: str, number: int, *, moves: int) -> int | None:
    """Record the row of an instance as it is, if it has moved so often since the last time. Returns the record's rev.

    Retention may delete what lies before the snapshot before this one. None: it was not due, or the row was moving.
    """
    rows = (
        await conn.run(statement("snapshot_journal", schema), [encode.number(number), encode.number(moves)])
    ).rows
    return _whole(rows[0][0]) if rows else None


async def truncate_journal(conn: PgConn, schema: str, number: int, *, moves: int, most: int) -> int | None:
    """Delete up to `most` records that lie far enough back. Returns how many; None: another janitor is at it."""
    params = [schema.encode(), *map(encode.number, (number, moves, most))]
    [row] = (await conn.run(statement("truncate_journal", schema), params)).rows
    return _whole(row[0])
