"""Connections of the wrong kind: the error names the right object."""

from __future__ import annotations

import asyncio
import sys
from functools import partial

import durable_actors as da
import psycopg
import pytest
from durable_actors._store.connection_kinds import check_aio, check_sync, check_trio


def made(module: str, name: str, *bases: type) -> object:
    """An object as that library makes them."""
    return type(name, bases, {"__module__": module})()


SQLALCHEMY = "session.connection().connection.driver_connection"
WRONG = {
    "psycopg2": (made("psycopg2.extensions", "connection"), "psycopg.connect"),
    "asyncpg": (made("asyncpg.connection", "Connection"), "psycopg.AsyncConnection.connect"),
    "session": (made("sqlalchemy.orm.session", "Session"), SQLALCHEMY),
    "a subclass": (made("app", "Mine", type(made("sqlalchemy.orm.session", "Session"))), SQLALCHEMY),
    "scoped": (made("sqlalchemy.orm.scoping", "scoped_session"), SQLALCHEMY),
    "connection": (made("sqlalchemy.engine.base", "Connection"), "connection.connection.driver_connection"),
    "async session": (made("sqlalchemy.ext.asyncio.session", "AsyncSession"), "get_raw_connection()"),
    "async connection": (made("sqlalchemy.ext.asyncio.engine", "AsyncConnection"), "get_raw_connection()"),
    "fairy": (made("sqlalchemy.pool.base", "_ConnectionFairy"), "driver_connection"),
    "django": (made("django.db.backends.postgresql.base", "DatabaseWrapper"), "connection.connection"),
    "django proxy": (made("django.utils.connection", "ConnectionProxy"), "connection.connection"),
    "pool": (made("psycopg_pool.pool", "ConnectionPool"), "with pool.connection() as conn"),
    "nothing": (None, "ensure_connection()"),
    "dsn": ("host=localhost", "open a connection"),
    "context": (da.Context(state=None), "trio.from_thread.run(da.inspect"),
    "anything": (object(), "not <object"),
}


@pytest.mark.parametrize("check", [check_sync, check_aio, check_trio])
@pytest.mark.parametrize("name", WRONG)
def test_the_right_object_is_named(name, check):
    conn, hint = WRONG[name]
    with pytest.raises(da.ConfigError) as raised:
        check(conn)
    assert raised.value.option == "conn"
    assert hint in str(raised.value)
    assert {"check_sync": "sync", "check_aio": "aio", "check_trio": "TrioConnection"}[check.__name__] in str(
        raised.value
    )


def test_a_dsn_is_not_shown():
    with pytest.raises(da.ConfigError) as raised:
        check_sync("postgresql://ada:secret@db/shop")
    assert "secret" not in str(raised.value)


def test_the_connection_comes_first(nothing):
    for machine in (nothing, da.Machine):
        with pytest.raises(da.ConfigError, match="the connection comes first"):
            check_sync(machine)


def test_nothing_is_imported():
    assert not {"sqlalchemy", "django", "psycopg2", "asyncpg"} & set(sys.modules)


def test_plain_and_asynchronous_are_told_apart(durable_dsn, nothing):
    calls = {
        "insert": lambda module: partial(module.insert, machine=nothing, args={}),
        "insert_many": lambda module: partial(module.insert_many, machine=nothing, rows=[]),
        "signal": lambda module: partial(module.signal, target=1, name="x"),
    }
    with psycopg.connect(durable_dsn) as conn:
        for name, make in calls.items():
            with pytest.raises(da.ConfigError, match=r"use durable_actors\.sync with it"):
                asyncio.run(make(da.aio)(conn))
            assert name

    async def other_way() -> None:
        async with await psycopg.AsyncConnection.connect(durable_dsn) as conn:
            for make in calls.values():
                with pytest.raises(da.ConfigError, match=r"use durable_actors\.aio with it"):
                    make(da.sync)(conn)

    asyncio.run(other_way())


async def test_conn_on_trio(durable_dsn, nothing):
    async with da.open_client(durable_dsn) as client:
        with psycopg.connect(durable_dsn) as conn:
            with pytest.raises(da.ConfigError, match=r"use durable_actors\.sync with it"):
                await client.insert(nothing, args={}, conn=conn)
            with pytest.raises(da.ConfigError, match=r"use durable_actors\.sync with it"):
                await client.signal(1, "x", conn=conn)
