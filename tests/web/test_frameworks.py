"""Sessions and connections of web frameworks, accepted as they are: in their transactions and savepoints."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import durable_actors as da
import psycopg
import pytest
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, scoped_session, sessionmaker
from sqlalchemy.pool import NullPool
from tests.warm import warm

pytestmark = pytest.mark.usefixtures("registry")
URL = "postgresql+psycopg://"


def count(dsn: str) -> int:
    with psycopg.connect(dsn) as conn:
        row = conn.execute("select count(*) from durable.gen_durable").fetchone()
        assert row is not None
        return int(row[0])


@pytest.fixture
def mail() -> Any:
    @da.job(name="mail")
    async def mail(args: dict) -> None: ...

    return mail


@pytest.fixture
def engine(durable_dsn: str) -> Iterator[Engine]:
    engine = create_engine(URL, creator=lambda: psycopg.connect(durable_dsn), poolclass=NullPool)
    yield engine
    engine.dispose()


def test_django(durable_dsn: str, tmp_path: Path):
    program = Path(__file__).with_name("django_program.py")
    code, out, err = warm().run(
        program, cwd=tmp_path, env={**os.environ, "DURABLE_DSN": durable_dsn}, timeout=50
    )
    assert (code, out, err) == (0, "refused\ninstances 5\n", "")


def test_a_session_of_sqlalchemy(engine: Engine, durable_dsn: str, mail: Any):
    with Session(engine) as session:
        number = da.sync.insert(session, mail)
        assert count(durable_dsn) == 0
        session.commit()
        assert count(durable_dsn) == 1
        with session.begin_nested() as savepoint:
            da.sync.insert_many(session, mail, [{}, {}])
            savepoint.rollback()
        da.sync.cancel(session, number, by="me")
        session.commit()
        assert da.sync.inspect(session, number).status == "cancelled"
        da.sync.insert(session, mail)  # and nobody commits
    assert count(durable_dsn) == 1


def test_a_scoped_session(engine: Engine, durable_dsn: str, mail: Any):
    session = scoped_session(sessionmaker(engine))
    da.sync.insert(session, mail)
    session.commit()
    da.sync.insert(session, mail)
    session.remove()
    assert count(durable_dsn) == 1


def test_a_connection_of_sqlalchemy(engine: Engine, durable_dsn: str, mail: Any):
    """Its commit() would commit nothing if the insert did not begin its transaction."""
    with engine.connect() as connection:
        number = da.sync.insert(connection, mail)
        connection.commit()
        assert count(durable_dsn) == 1
        with pytest.raises(da.NoTarget):
            da.sync.signal(connection, 10**9, "x")
        da.sync.signal(connection, number, "x")
        connection.execute(text("select 1"))
        connection.rollback()
    with engine.begin() as connection:
        da.sync.insert(connection, mail)
    assert count(durable_dsn) == 2


def test_asynchronous_ones(durable_dsn: str, mail: Any):
    async def main() -> None:
        async def connect() -> psycopg.AsyncConnection[Any]:
            return await psycopg.AsyncConnection.connect(durable_dsn)

        engine = create_async_engine(URL, async_creator=connect, poolclass=NullPool)
        async with AsyncSession(engine) as session, session.begin():
            number = await da.aio.insert(session, mail)
            async with session.begin_nested() as savepoint:
                await da.aio.insert(session, mail)
                await savepoint.rollback()
            await da.aio.signal(session, number, "x", {"a": 1})
            await session.execute(text("select 1"))
        assert count(durable_dsn) == 1
        async with engine.connect() as connection:
            await da.aio.insert(connection, mail)
            await connection.commit()
            await da.aio.insert(connection, mail)
        assert count(durable_dsn) == 2
        scoped = async_scoped_session(async_sessionmaker(engine), scopefunc=asyncio.current_task)
        assert (await da.aio.inspect(scoped, number)).status == "runnable"
        await da.aio.insert(scoped, mail)
        await scoped.commit()
        await scoped.remove()
        assert count(durable_dsn) == 3
        with pytest.raises(da.ConfigError, match=r"pass it to durable_actors\.aio"):
            da.sync.insert(session, mail)  # type: ignore[call-overload]
        await engine.dispose()

    asyncio.run(main())


def test_a_session_on_another_driver(mail: Any):
    class Other:
        """As psycopg2's."""

    Other.__module__ = "psycopg2.extensions"
    engine = create_engine(URL, creator=Other)
    with Session(engine) as session:
        session.connection = lambda: _Connection(Other())  # type: ignore[method-assign,assignment,return-value]
        with pytest.raises(da.ConfigError, match="another driver"):
            da.sync.insert(session, mail)


class _Connection:
    """As SQLAlchemy's, without a database."""

    __module__ = "sqlalchemy.engine.base"

    def __init__(self, driver: object) -> None:
        self.connection = self
        self.driver_connection = driver

    def in_transaction(self) -> bool:
        return True


_Connection.__name__ = "Connection"
