"""`PostgresJournal`: the journal storage on the tables `journal` and `checkpoints`.

Instances that run record their own moves, in the transaction of each move, and nothing here is called then. `append`
is for histories that come from elsewhere: an import, or a test of another store.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from typing import Final

import msgspec
import psycopg

from durable_actors._postgres.driver import encode
from durable_actors._postgres.driver.connection import PgConn
from durable_actors._postgres.driver.statement import Row
from durable_actors._postgres.pool.lock_retry import retry_while_locked
from durable_actors._postgres.pool.pool import ConnectionPool
from durable_actors._store.sql import statement
from durable_actors.errors import InvalidJournalEntry, RevConflict
from durable_actors.journal import Checkpoint, Record, Thread, check_sequence, decode_record, encode_record

NO_CHECKPOINT: Final = -1
"""The format of a checkpoint that is not one: what somebody else has stored under the thread's name."""


class PostgresJournal:
    """A `JournalStorage` on one schema of one database. `Client.journal` is one.

    The head of a thread is kept in `checkpoints` by `append`. Of an instance whose row is there and records every move,
    it is the row's `rev`: a record that was deleted from the end is found to be missing.
    """

    def __init__(self, pool: ConnectionPool, lane: str, schema: str) -> None:
        self._pool = pool
        self._lane = lane
        self._schema = schema

    async def append(self, thread: Thread, records: Sequence[Record], *, expected_rev: int) -> int:
        """See `JournalStorage.append`. The row of the instance, if there is one, is not changed.

        Raises `InvalidJournalEntry` for records that the table cannot hold: claim ids are UUIDs.
        """
        body = b"[" + b",".join([encode_record(record) for record in records]) + b"]"
        params = [
            encode.number(thread.instance_id),
            encode.number(expected_rev),
            body,
            _head_of(thread).encode(),
        ]
        call = statement("append_records", self._schema)
        try:
            rows = (
                await retry_while_locked(self._pool, self._lane, lambda conn: conn.run(call, params))
            ).rows
        except psycopg.errors.UniqueViolation:
            rows = []  # another append with the same head came first
        except psycopg.DataError as exc:
            reason = f"a record does not fit the table: {str(exc).splitlines()[0]}"
            raise InvalidJournalEntry(thread.instance_id, expected_rev + 1, reason) from exc
        if not rows:
            raise RevConflict(thread.name, expected_rev, await self.head(thread))
        return int(rows[0][0] or 0)

    async def read(self, thread: Thread, *, after: int = 0, limit: int = 1000) -> list[Record]:
        """See `JournalStorage.read`."""
        async with self._pool.acquire(self._lane) as conn:
            page = await read_page(conn, self._schema, thread.instance_id, after=after, limit=limit)
        return list(check_sequence(page.decoded(), thread.instance_id, after=after))

    async def head(self, thread: Thread) -> int:
        """See `JournalStorage.head`."""
        params = [encode.number(thread.instance_id), _head_of(thread).encode()]
        async with self._pool.acquire(self._lane) as conn:
            rows = (await conn.run(statement("read_head", self._schema, read_only=True), params)).rows
        return int(rows[0][0] or 0)

    async def put_checkpoint(self, thread: Thread, checkpoint: Checkpoint) -> None:
        """See `JournalStorage.put_checkpoint`."""
        params = [
            thread.name.encode(),
            encode.number(checkpoint.rev),
            encode.number(checkpoint.format),
            base64.b64encode(checkpoint.body),
        ]
        call = statement("put_checkpoint", self._schema)
        await retry_while_locked(self._pool, self._lane, lambda conn: conn.run(call, params))

    async def get_checkpoint(self, thread: Thread) -> Checkpoint | None:
        """See `JournalStorage.get_checkpoint`."""
        async with self._pool.acquire(self._lane) as conn:
            call = statement("get_checkpoint", self._schema, read_only=True)
            rows = (await conn.run(call, [thread.name.encode()])).rows
        if not rows:
            return None
        rev, form, body = rows[0]
        try:
            return Checkpoint(int(rev or 0), int(form or 0), base64.b64decode(body or b"!", validate=True))
        except binascii.Error:
            return Checkpoint(int(rev or 0), NO_CHECKPOINT, b"")

    async def drop_checkpoint(self, thread: Thread) -> None:
        """See `JournalStorage.drop_checkpoint`."""
        call = statement("drop_checkpoint", self._schema)
        params = [thread.name.encode()]
        await retry_while_locked(self._pool, self._lane, lambda conn: conn.run(call, params))


def _head_of(thread: Thread) -> str:
    """The name under which `checkpoints` has the head of a thread."""
    return f"head of {thread.name}"


class HistoryPage(msgspec.Struct, frozen=True):
    """Records of one instance, and where its row stands, read in one snapshot."""

    instance_id: int
    row_rev: int | None
    """None: there is no row."""
    row_level: int | None
    """The number that the row's column `journal` has."""
    records: list[tuple[int, bytes]]
    """The revision and the JSON of each."""

    def decoded(self) -> list[Record]:
        """Decode and check the records, one by one. Raises `InvalidJournalEntry`."""
        return [decode_record(raw, instance_id=self.instance_id, rev=rev) for rev, raw in self.records]


async def read_page(conn: PgConn, schema: str, number: int, *, after: int, limit: int) -> HistoryPage:
    """Read up to `limit` records with greater revisions than `after`."""
    params = [encode.number(number), encode.number(after), encode.number(limit)]
    rows = (await conn.run(statement("read_records", schema, read_only=True), params)).rows
    return page_of(number, rows)


def page_of(number: int, rows: Sequence[Row]) -> HistoryPage:
    """Read the rows of read_records.sql. Pure."""
    row_rev, row_level, *_ = rows[0]
    return HistoryPage(
        number,
        None if row_rev is None else int(row_rev),
        None if row_level is None else int(row_level),
        [(int(rev), raw) for _, _, rev, raw in rows if rev is not None and raw is not None],
    )
