"""Verification against the database: reads rows with their journals in batches, and has `journal.verify` compare them.

A row and its records are read by one statement, so that a move that is committed meanwhile is in both or in neither. A
history that is longer than a batch takes is read in pages, in a transaction that keeps its first snapshot.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final

import attrs
import msgspec
import trio

from durable_actors._postgres.driver import encode
from durable_actors._postgres.driver.connection import PgConn
from durable_actors._store.sql import statement
from durable_actors.journal.verify import InstanceCheck, Problem

BATCH: Final = 200
"""Instances per statement: 0.5 MB of JSON at ten records each, read while the batch before is checked."""
RECORDS: Final = 100
"""Records per instance in a batch; a longer history is read in pages."""
RECORDS_BYTES: Final = 1_000_000
"""Stored bytes of the records of an instance in a batch; a history with more is read in pages. An array of JSON cannot
have more than 1 GB in Postgres."""
BATCH_BYTES: Final = 8_000_000
"""Stored bytes of a batch: it ends before the instance that has more. States may have 32 MB."""
SLICE: Final = 20
"""Instances that are checked before other tasks run: about 3 ms."""
FIRST_PAGE: Final = 10
PAGE: Final = 1000
"""Records per page of a long history: the pages grow from the first one as long as they are small."""
PAGE_BYTES: Final = 1_000_000
"""A page that has more is big."""
SNAPSHOT: Final = "BEGIN ISOLATION LEVEL REPEATABLE READ, READ ONLY"

_decode_row: Final = msgspec.json.Decoder(dict[str, Any]).decode


@attrs.frozen
class Which:
    """Which instances are to be checked."""

    ids: tuple[int, ...] | None = None
    """None: all."""
    machine: str | None = None
    share: float | None = None
    """A random share of them, between 0 and 1; None: all."""


@attrs.frozen
class Batch:
    """The result of checking one batch."""

    checked: int
    problems: list[Problem]
    last: int | None = None
    """Of `find_orphans`: the id after which the next batch begins; None: this was the last one."""


async def read_rows(conn: PgConn, schema: str, which: Which, *, after: int) -> list[Any]:
    """Read the next batch of rows with their records, undecoded."""
    ids = None if which.ids is None else encode.int_array(which.ids)
    params = [
        encode.number(after),
        encode.number(BATCH),
        encode.text(which.machine),
        encode.number(which.share),
        ids,
        *map(encode.number, (RECORDS, RECORDS_BYTES, BATCH_BYTES)),
    ]
    return (await conn.run(statement("read_journaled", schema, read_only=True), params)).rows


async def check_rows(rows: list[Any], check_long: Callable[[int], Awaitable[list[Problem]]]) -> Batch:
    """Check a batch that `read_rows` returned. Lets other tasks run meanwhile."""
    problems: list[Problem] = []
    for index, (number, row, count, records) in enumerate(rows):
        if index % SLICE == 0:
            await trio.lowlevel.checkpoint()
        if int(count) < RECORDS:
            check = InstanceCheck(int(number), _decode_row(row))
            if records is not None:
                check.feed_json(records)
            problems += check.finish()
        else:
            problems += await check_long(int(number))
    return Batch(len(rows), problems)


async def check_long(conn: PgConn, schema: str, number: int) -> list[Problem]:
    """Check an instance with a long history, page by page, in one snapshot."""
    only = encode.int_array([number])
    async with conn.transaction(begin=SNAPSHOT):
        call = statement("read_journaled", schema, read_only=True)
        params = [encode.number(number - 1), b"1", None, None, only, b"0", b"0", b"0"]
        rows = (await conn.run(call, params)).rows
        if not rows:
            return []  # it was deleted since
        check = InstanceCheck(number, _decode_row(rows[0][1] or b"{}"))
        await feed_pages(conn, schema, check)
    return check.finish()


async def feed_pages(conn: PgConn, schema: str, check: InstanceCheck) -> None:
    """Give a check all records of its instance. The caller's transaction has one snapshot for all pages."""
    after, limit = 0, min(FIRST_PAGE, PAGE)
    while True:
        params = [encode.number(check.instance_id), encode.number(after), encode.number(limit)]
        rows = (await conn.run(statement("read_records", schema, read_only=True), params)).rows
        raws = [raw for *_, raw in rows if raw is not None]
        check.feed_json(b"[" + b",".join(raws) + b"]")
        if len(raws) < limit:
            return
        after = int(rows[-1][2] or 0)
        limit = min(4 * limit, PAGE) if sum(map(len, raws)) < PAGE_BYTES else max(limit // 4, 1)


async def find_orphans(conn: PgConn, schema: str, which: Which, *, after: int) -> Batch:
    """Find records whose instance has no row."""
    ids = None if which.ids is None else encode.int_array(which.ids)
    params = [encode.number(after), encode.number(BATCH), ids]
    rows = (await conn.run(statement("read_orphaned_records", schema, read_only=True), params)).rows
    problems: list[Problem] = []
    lost = [int(number or 0) for number, has_row, _ in rows if has_row != b"t"]
    for number in lost:
        async with conn.transaction(begin=SNAPSHOT):
            check = InstanceCheck(number, None)
            await feed_pages(conn, schema, check)
        problems += check.finish()
    return Batch(len(lost), problems, int(rows[-1][0] or 0) if len(rows) == BATCH else None)
