"""A connection of the engine's driver, and a second one that watches what the server does for it."""

from __future__ import annotations

import attrs
import psycopg
import pytest
from durable_actors._postgres.driver.connection import PgConn
from durable_actors._postgres.driver.statement import Statement
from tests.kit import Session


class Watch(Session):
    async def sleeping(self, pid: int) -> None:
        """Wait until that session is inside pg_sleep."""
        await self.eventually(
            "select exists (select from pg_stat_activity where pid = %s and wait_event = 'PgSleep')", pid
        )

    async def gone(self, pid: int) -> None:
        await self.eventually("select not exists (select from pg_stat_activity where pid = %s)", pid)

    def terminate(self, pid: int) -> None:
        assert self.value("select pg_terminate_backend(%s, 10000)", pid)

    def ids(self) -> list[int]:
        return [row[0] for row in self.execute("select id from driver_rows order by id")]


@pytest.fixture
def watch(pg_dsn: str):
    with psycopg.connect(pg_dsn, autocommit=True) as conn:
        yield Watch(conn)


@pytest.fixture
async def conn(pg_dsn: str):
    conn = await PgConn.open(pg_dsn)
    yield conn
    conn.close()


@pytest.fixture
def rows(watch: Watch):
    """Empty table `driver_rows (id)`; a COMMIT of a negative id takes half a minute."""
    watch.conn.execute("drop table if exists driver_rows")
    watch.conn.execute("create table driver_rows (id int primary key)")
    watch.conn.execute(
        "create or replace function driver_slow() returns trigger language plpgsql as"
        " $$ begin perform pg_sleep(30); return null; end $$"
    )
    watch.conn.execute(
        "create constraint trigger slow after insert on driver_rows deferrable initially deferred"
        " for each row when (new.id < 0) execute function driver_slow()"
    )


INSERT = Statement("insert_row", "insert into driver_rows values ($1::int)")
ECHO = Statement("echo", "select $1::text", read_only=True)
SLEEP = Statement("sleep", "select pg_sleep($1::float8)", read_only=True)
SLOW_INSERT = Statement("slow_insert", "insert into driver_rows select 1 from pg_sleep($1::float8)")


@attrs.frozen
class Statements:
    insert: Statement = INSERT
    echo: Statement = ECHO
    sleep: Statement = SLEEP
    slow_insert: Statement = SLOW_INSERT


@pytest.fixture
def sql() -> Statements:
    return Statements()
