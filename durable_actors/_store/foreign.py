"""Our statements on the caller's connections: psycopg's, synchronous or not.

psycopg's raw cursors take `$1` placeholders and strings, which Postgres casts as the statement says. Arrays with nulls
are sent in binary format: as text, a caller's `array_nulls = off` would turn each null into the text 'NULL'. Results
are read in binary format: the text of an instant, a bytea or a float depends on the caller's settings, and psycopg's
way of reading it on loaders that the caller may have registered.
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from datetime import UTC, datetime, timedelta
from functools import cache
from struct import pack, unpack
from typing import Any, Final, TypeVar

import psycopg
from psycopg import pq
from psycopg.adapt import Dumper
from psycopg.pq import TransactionStatus

from durable_actors._postgres.driver import encode
from durable_actors._postgres.driver.decode import decode_nullable_array
from durable_actors._postgres.driver.statement import Params, Row, Statement
from durable_actors.errors import DurableError, SchemaError

T = TypeVar("T")

Dialogue = Generator[tuple[Statement, Params], list[Row], T]
"""A generator that yields statements and gets the rows of each sent back. Every kind of connection can run it.

A unique violation is thrown into it. A statement that writes runs in a savepoint, so that an error leaves the caller's
transaction usable. A dialogue reads before it writes, so that the caller's transaction, if there is one, has begun."""

_MISSING: Final = (
    psycopg.errors.UndefinedTable,
    psycopg.errors.InvalidSchemaName,
    psycopg.errors.UndefinedFunction,
    psycopg.errors.UndefinedObject,
    psycopg.errors.UndefinedColumn,
)

_ISOLATION: Final = b"select current_setting('transaction_isolation')"


@contextmanager
def explained(schema: str) -> Generator[None, None, None]:
    """Turn errors about missing tables into `SchemaError`: on this connection nothing has checked the schema."""
    try:
        yield
    except _MISSING as exc:
        raise SchemaError(
            f'schema "{schema}" does not exist in this database, or is older than this durable_actors: '
            f"{str(exc).splitlines()[0]}. Run `durable-actors migrate`."
        ) from exc


def execute(conn: psycopg.Connection[Any], call: Statement, params: Params, *, schema: str) -> list[Row]:
    """Run a statement in the caller's transaction; returns rows in the format of our driver."""
    with psycopg.RawCursor(conn) as cursor:
        with explained(schema):
            cursor.adapters.register_dumper(_TextArray, _TextArrayDumper)
            cursor.execute(_sql(call.sql), _values(call, params, conn.info.encoding), binary=True)
            if cursor.pgresult is None:  # in a pipeline the result has not arrived yet
                cursor.fetchone()
        return _rows(cursor.pgresult, conn.info.encoding)


async def execute_async(
    conn: psycopg.AsyncConnection[Any], call: Statement, params: Params, *, schema: str
) -> list[Row]:
    """As `execute`, on an asynchronous connection of asyncio or Trio."""
    async with psycopg.AsyncRawCursor(conn) as cursor:
        with explained(schema):
            cursor.adapters.register_dumper(_TextArray, _TextArrayDumper)
            await cursor.execute(_sql(call.sql), _values(call, params, conn.info.encoding), binary=True)
            if cursor.pgresult is None:
                await cursor.fetchone()
        return _rows(cursor.pgresult, conn.info.encoding)


def run_dialogue(conn: psycopg.Connection[Any], dialogue: Dialogue[T], *, schema: str) -> T:
    """Run a dialogue on the caller's connection."""
    try:
        call, params = next(dialogue)
        while True:
            try:
                if call.read_only:
                    rows = execute(conn, call, params, schema=schema)
                else:
                    with conn.transaction():
                        rows = execute(conn, call, params, schema=schema)
            except psycopg.errors.UniqueViolation as exc:
                call, params = dialogue.throw(exc)
            else:
                call, params = dialogue.send(rows)
    except StopIteration as end:
        value: T = end.value
        return value


async def run_dialogue_async(conn: psycopg.AsyncConnection[Any], dialogue: Dialogue[T], *, schema: str) -> T:
    """As `run_dialogue`, on an asynchronous connection."""
    try:
        call, params = next(dialogue)
        while True:
            try:
                if call.read_only:
                    rows = await execute_async(conn, call, params, schema=schema)
                else:
                    async with conn.transaction():
                        rows = await execute_async(conn, call, params, schema=schema)
            except psycopg.errors.UniqueViolation as exc:
                call, params = dialogue.throw(exc)
            else:
                call, params = dialogue.send(rows)
    except StopIteration as end:
        value: T = end.value
        return value


def committed(conn: psycopg.Connection[Any] | psycopg.AsyncConnection[Any]) -> bool:
    """Whether what was done on the connection is committed: no transaction is open."""
    return conn.info.transaction_status == TransactionStatus.IDLE


# -- reading repeatedly


@contextmanager
def polling(conn: psycopg.Connection[Any]) -> Generator[Callable[[], None]]:
    """For reads that are repeated until something changes. Yields a function to call after each read.

    The function ends the transaction that the read has begun, if it has begun one. Raises `DurableError` inside a
    transaction of the caller that keeps its first snapshot: there nothing would ever change.
    """
    outside = conn.info.transaction_status == TransactionStatus.IDLE
    if not outside:
        with psycopg.RawCursor(conn) as cursor:
            cursor.execute(_ISOLATION, binary=True)
            if cursor.pgresult is None:
                cursor.fetchone()
            _check_isolation(_rows(cursor.pgresult, conn.info.encoding))

    def looked() -> None:
        if outside and not conn.autocommit:
            conn.rollback()

    yield looked


@asynccontextmanager
async def polling_async(conn: psycopg.AsyncConnection[Any]) -> AsyncGenerator[Callable[[], Any]]:
    """As `polling`, on an asynchronous connection; await what the function returns."""
    outside = conn.info.transaction_status == TransactionStatus.IDLE
    if not outside:
        async with psycopg.AsyncRawCursor(conn) as cursor:
            await cursor.execute(_ISOLATION, binary=True)
            if cursor.pgresult is None:
                await cursor.fetchone()
            _check_isolation(_rows(cursor.pgresult, conn.info.encoding))

    async def looked() -> None:
        if outside and not conn.autocommit:
            await conn.rollback()

    yield looked


def _check_isolation(rows: list[Row]) -> None:
    level = (rows[0][0] or b"").decode()
    if level != "read committed":
        raise DurableError(
            f"result() would wait for ever in this transaction: it is {level!r} and does not see what others commit. "
            "Commit first, or call it on another connection"
        )


# -- parameters and rows


class _TextArray:
    """A text array in binary format; the statement casts it."""

    __slots__ = ("raw",)

    def __init__(self, texts: Sequence[str | None], encoding: str) -> None:
        parts = [
            pack("!iiiii", 1, 1, _TEXT, len(texts), 1)
        ]  # dimensions, has nulls, type, length, first index
        for text in texts:
            raw = None if text is None else text.encode(encoding)
            parts.append(_NULL if raw is None else pack("!i", len(raw)) + raw)
        self.raw = b"".join(parts)


class _TextArrayDumper(Dumper):
    format = pq.Format.BINARY
    oid = 1009

    def dump(self, obj: _TextArray) -> bytes:
        return obj.raw


def _values(call: Statement, params: Params, encoding: str) -> list[str | _TextArray | None]:
    """Parameters as psycopg accepts them."""
    values: list[str | _TextArray | None] = [None if param is None else param.decode() for param in params]
    for index in _arrays(call.sql):
        literal = values[index]
        if isinstance(literal, str) and "NULL" in literal:
            values[index] = _TextArray(decode_nullable_array(literal), encoding)
    return values


@cache
def _sql(sql: str) -> bytes:
    """The statement without comments: they are not ASCII, and the connection may have any encoding."""
    return _COMMENT.sub("", sql).encode()


@cache
def _arrays(sql: str) -> tuple[int, ...]:
    """Which of a statement's parameters are arrays."""
    return tuple(sorted({int(number) - 1 for number in _ARRAY.findall(sql)}))


def _rows(result: pq.abc.PGresult | None, encoding: str) -> list[Row]:
    """Binary columns in the format of our driver: text, as with our own session settings."""
    if result is None:
        return []
    readers = [_READERS.get(result.ftype(column)) for column in range(result.nfields)]

    def value(row: int, column: int) -> bytes | None:
        raw = result.get_value(row, column)
        if raw is None:
            return None
        reader = readers[column]
        return raw.decode(encoding).encode() if reader is None else reader(raw, encoding)

    return [[value(row, column) for column in range(result.nfields)] for row in range(result.ntuples)]


def _integer(raw: bytes, _encoding: str) -> bytes:
    return str(int.from_bytes(raw, "big", signed=True)).encode()


def _boolean(raw: bytes, _encoding: str) -> bytes:
    return b"t" if raw == b"\1" else b"f"


def _bytea(raw: bytes, _encoding: str) -> bytes:
    return b"\\x" + raw.hex().encode()


def _float(raw: bytes, _encoding: str) -> bytes:
    return repr(unpack("!d", raw)[0]).encode()


def _jsonb(raw: bytes, encoding: str) -> bytes:
    return raw[1:].decode(encoding).encode()  # the first byte is the version of the format


def _instant(raw: bytes, _encoding: str) -> bytes:
    microseconds = int.from_bytes(raw, "big", signed=True)
    try:
        return (_EPOCH + timedelta(microseconds=microseconds)).isoformat().encode()
    except OverflowError:  # infinity, or a year that a datetime cannot hold
        return b"-infinity" if microseconds < 0 else b"infinity"


def _text_array(raw: bytes, encoding: str) -> bytes:
    return encode.text_array([None if each is None else each.decode(encoding) for each in _elements(raw)])


def _int_array(raw: bytes, _encoding: str) -> bytes:
    """Without nulls."""
    return encode.int_array([int.from_bytes(each or b"", "big", signed=True) for each in _elements(raw)])


def _elements(raw: bytes) -> Iterator[bytes | None]:
    """The elements of an array in binary format."""
    dimensions, _, _ = unpack("!iii", raw[:12])
    at = 12 + 8 * dimensions
    while at < len(raw):
        [size] = unpack("!i", raw[at : at + 4])
        at += 4
        yield None if size < 0 else raw[at : at + size]
        at += max(size, 0)


_ARRAY: Final = re.compile(r"\$(\d+)::\w+\[\]")
_COMMENT: Final = re.compile(r"^\s*--.*\n", re.MULTILINE)
_TEXT: Final = 25
_NULL: Final = pack("!i", -1)
_EPOCH: Final = datetime(2000, 1, 1, tzinfo=UTC)

_READERS: Final[dict[int, Callable[[bytes, str], bytes]]] = {
    16: _boolean,
    17: _bytea,
    20: _integer,
    21: _integer,
    23: _integer,
    701: _float,
    1009: _text_array,
    1016: _int_array,
    1184: _instant,
    3802: _jsonb,
}
"""By type oid; every other type (text, enums) is text in the connection's encoding."""
