"""Checked by mypy and pyright, never run: what TrioConnection's rows are."""

from __future__ import annotations

from typing import assert_type

import attrs
from durable_actors._postgres.trio.connection import TrioConnection
from durable_actors._postgres.trio.transaction import TrioTransaction
from psycopg import AsyncCursor, AsyncServerCursor
from psycopg.rows import DictRow, TupleRow, class_row, dict_row


@attrs.frozen
class Seat:
    id: int


async def rows() -> None:
    plain = await TrioConnection.connect("")
    assert_type(plain, TrioConnection[TupleRow])
    seats = await TrioConnection.connect("", row_factory=class_row(Seat), autocommit=True)
    assert_type(seats, TrioConnection[Seat])
    async with await TrioConnection.connect("", row_factory=dict_row) as conn:
        assert_type(conn, TrioConnection[DictRow])
        cursor = await conn.execute("select 1")
        assert_type(cursor, AsyncCursor[DictRow])
        assert_type(await cursor.fetchone(), DictRow | None)
        assert_type(conn.cursor("page"), AsyncServerCursor[DictRow])
        assert_type(conn.cursor(row_factory=class_row(Seat)), AsyncCursor[Seat])
        async with conn.transaction() as block:
            assert_type(block, TrioTransaction)


class Mine(TrioConnection[TupleRow]):
    """A subclass keeps its type."""


async def subclass() -> None:
    assert_type(await Mine.connect(""), Mine)
