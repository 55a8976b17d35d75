"""Typed rows: the values that psycopg's loaders make, whatever an application has told psycopg to make of them."""

from __future__ import annotations

from collections.abc import Iterator

import attrs
import psycopg
import pytest
from durable_actors._postgres.driver.connection import PgConn
from durable_actors._postgres.driver.statement import Statement
from psycopg.adapt import Loader, Transformer
from psycopg.pq import Format

VALUES = {
    "(-32768)::int2": -32768,
    "2147483647::int4": 2147483647,
    "(-9223372036854775808)::int8": -9223372036854775808,
    "true": True,
    "false": False,
    "'ü\U0001f600'::text": "ü\U0001f600",
    "''::text": "",
    "'x'::\"char\"": "x",
    "'c8fc2fbe-680a-4f19-a9c0-717b3bcabb27'::uuid": "c8fc2fbe-680a-4f19-a9c0-717b3bcabb27",
    "'2026-11-16 10:00:00.25+00'::timestamptz": "2026-11-16 10:00:00.25+00",
    "'infinity'::timestamptz": "infinity",
    "'{\"a\": 1}'::jsonb": '{"a": 1}',
    "array['a', 'b c']": '{a,"b c"}',
    "1.50::numeric": "1.50",
    "null::int8": None,
    "null::text": None,
    "null::jsonb": None,
}


async def select(conn: PgConn, *, typed: bool, rows: int = 1) -> list[object]:
    text = f"select {', '.join(VALUES)} from generate_series(1, {rows})"
    statement = Statement("typed" if typed else "raw", text, read_only=True, typed=typed)
    first = (await conn.run(statement, [])).rows
    again = (await conn.run(statement, [])).rows  # prepared now
    assert first == again
    return list(first)


@pytest.mark.parametrize("rows", [0, 1, 500])
async def test_every_type_becomes_a_value(conn: PgConn, rows: int):
    assert await select(conn, typed=True, rows=rows) == [tuple(VALUES.values())] * rows


async def test_other_statements_have_bytes(conn: PgConn):
    [row] = await select(conn, typed=False)
    assert isinstance(row, list)
    assert row[0] == b"-32768"


async def test_an_enum_is_its_text(conn: PgConn):
    await conn.script("create type mood as enum ('sad', 'ok')")
    result = await conn.run(Statement("enum", "select 'ok'::mood", typed=True), [])
    assert result.rows == [("ok",)]


async def test_each_statement_of_a_batch_has_its_own_kind(conn: PgConn):
    raw = Statement("raw", "select 1")
    results = await conn.batch([(raw, []), (attrs.evolve(raw, name="typed", typed=True), []), (raw, [])])
    assert [result.rows for result in results] == [[[b"1"]], [(1,)], [[b"1"]]]


@pytest.fixture
def odd() -> Iterator[None]:
    """An application that wants everything in its own way, in all of psycopg."""

    class Odd(Loader):
        def load(self, data: object) -> str:
            return "odd"

    adapters = psycopg.adapters
    kinds = ("int2", "int4", "int8", "bool", "text", "uuid", "jsonb", "timestamptz", "numeric")
    before = {kind: adapters.get_loader(adapters.types[kind].oid, Format.TEXT) for kind in kinds}
    for kind in kinds:
        adapters.register_loader(kind, Odd)
    yield
    for kind, loader in before.items():
        assert loader is not None
        adapters.register_loader(kind, loader)


@pytest.mark.usefixtures("odd")
async def test_what_an_application_registers_for_itself_changes_nothing(conn: PgConn):
    assert await select(conn, typed=True) == [tuple(VALUES.values())]


def test_psycopg_has_what_is_used():
    """Undocumented: `Transformer.set_pgresult` and `load_rows`. If they go, `typed_rows` is all that changes."""
    assert callable(Transformer.set_pgresult)
    assert callable(Transformer.load_rows)
