"""Connections of the wrong kind: the error names the right object."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import durable_actors as da
import psycopg
import pytest
from durable_actors._store.connection_kinds import aio_connection, check_trio, sync_connection
from tests.warm import warm


def made(module: str, name: str, *bases: type) -> object:
    """An object as that library makes them."""
    return type(name, bases, {"__module__": module})()


SYNC, AIO = "pass it to durable_actors.sync", "pass it to durable_actors.aio"
WRONG = {
    "psycopg2": (made("psycopg2.extensions", "connection"), "psycopg.connect"),
    "asyncpg": (made("asyncpg.connection", "Connection"), "psycopg.AsyncConnection.connect"),
    "engine": (
        made("sqlalchemy.engine.base", "Engine"),
        "a session or connection of it to durable_actors.sync",
    ),
    "fairy": (made("sqlalchemy.pool.base", "_ConnectionFairy"), "driver_connection"),
    "pool": (made("psycopg_pool.pool", "ConnectionPool"), "with pool.connection() as conn"),
    "nothing": (None, "django.db.connection"),
    "dsn": ("host=localhost", "open a connection"),
    "context": (da.Context(state=None), "trio.from_thread.run(da.inspect"),
    "anything": (object(), "not <object"),
}
SESSION = made("sqlalchemy.orm.session", "Session")
OF_THE_OTHER_KIND = {
    "session": (SESSION, SYNC),
    "a subclass": (made("app", "Mine", type(SESSION)), SYNC),
    "scoped": (made("sqlalchemy.orm.scoping", "scoped_session"), SYNC),
    "connection": (made("sqlalchemy.engine.base", "Connection"), SYNC),
    "async session": (made("sqlalchemy.ext.asyncio.session", "AsyncSession"), AIO),
    "async connection": (made("sqlalchemy.ext.asyncio.engine", "AsyncConnection"), AIO),
    "django": (
        made("app", "Wrapper", type(made("django.db.backends.base.base", "BaseDatabaseWrapper"))),
        "pass django.db.connection to durable_actors.sync",
    ),
    "django proxy": (
        made("django.utils.connection", "ConnectionProxy"),
        "pass django.db.connection to durable_actors.sync",
    ),
}


def check_sync(conn: Any) -> None:
    sync_connection(conn)


def check_aio(conn: Any) -> None:
    asyncio.run(aio_connection(conn))


def refusal(check: Callable[[Any], None], conn: object) -> str:
    with pytest.raises(da.ConfigError) as raised:
        check(conn)
    assert raised.value.option == "conn"
    needed = {"check_sync": "sync", "check_aio": "aio", "check_trio": "TrioConnection"}[check.__name__]
    assert needed in str(raised.value)
    return str(raised.value)


@pytest.mark.parametrize("check", [check_sync, check_aio, check_trio])
@pytest.mark.parametrize("name", WRONG)
def test_the_right_object_is_named(name, check):
    conn, hint = WRONG[name]
    assert hint in refusal(check, conn)


@pytest.mark.parametrize("name", OF_THE_OTHER_KIND)
def test_the_right_module_is_named(name):
    conn, hint = OF_THE_OTHER_KIND[name]
    assert hint in refusal(check_trio, conn)
    assert hint in refusal(check_sync if hint is AIO else check_aio, conn)


def test_a_dsn_is_not_shown():
    with pytest.raises(da.ConfigError) as raised:
        check_sync("postgresql://ada:secret@db/shop")
    assert "secret" not in str(raised.value)


def test_the_connection_comes_first(nothing):
    for machine in (nothing, da.Machine):
        with pytest.raises(da.ConfigError, match="the connection comes first"):
            check_sync(machine)


def test_nothing_is_imported(tmp_path: Path):
    program = tmp_path / "program.py"
    program.write_text(
        "import sys, durable_actors.cli\n"
        "print({'sqlalchemy', 'django', 'psycopg2', 'asyncpg', 'pydantic'} & set(sys.modules))"
    )
    assert warm().run(program, cwd=tmp_path, env=os.environ, timeout=50) == (0, "set()\n", "")


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
