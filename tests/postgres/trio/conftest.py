from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import attrs
import psycopg
import pytest
import trio
import trio.testing
from durable_actors._postgres.trio.connection import TrioConnection
from durable_actors._postgres.trio.wait import TrioWaiter


@attrs.frozen
class Probe:
    """A second connection that watches what the server does for the first."""

    conn: psycopg.Connection[tuple[Any, ...]]

    def value(self, query: str, *params: object) -> Any:
        row = self.conn.execute(query, params).fetchone()
        assert row is not None
        return row[0]

    async def eventually(self, query: str, *params: object) -> None:
        """Wait until the server says so. There is no event to wait for: it is another process."""
        with trio.fail_after(10):
            while not self.value(query, *params):
                await trio.sleep(0.005)

    async def busy(self, conn: TrioWaiter[Any]) -> None:
        """Wait until the server is in the middle of something for `conn`."""
        await self.eventually(
            "select count(*) from pg_stat_activity where pid = %s and wait_event = 'PgSleep'",
            conn.info.backend_pid,
        )

    async def nothing_left(self, pid: int) -> None:
        """Wait until the server runs nothing for that session: idle, or gone."""
        await self.eventually(
            "select not exists (select from pg_stat_activity where pid = %s and state <> 'idle')", pid
        )


@pytest.fixture
def probe(pg_dsn: str):
    with psycopg.connect(pg_dsn, autocommit=True) as conn:
        yield Probe(conn)


@pytest.fixture
async def conn(pg_dsn: str) -> AsyncIterator[TrioConnection[Any]]:
    conn: TrioConnection[Any] = await TrioConnection.connect(pg_dsn, autocommit=True)
    yield conn
    await conn.close()


@pytest.fixture
def scratch(probe: Probe):
    """Empty tables `scratch (id)` and `deferred (id)`: a negative id takes for ever (INSERT, COMMIT)."""
    probe.conn.execute("drop table if exists scratch cascade")
    probe.conn.execute("create table scratch (id int)")
    probe.conn.execute(
        "create or replace function slow_insert() returns trigger language plpgsql as $$ begin"
        " if new.id < 0 then perform pg_sleep(30); end if; return new; end $$"
    )
    probe.conn.execute(
        "create trigger slow before insert on scratch for each row execute function slow_insert()"
    )
    probe.conn.execute("drop table if exists deferred cascade")
    probe.conn.execute("create table deferred (id int)")
    probe.conn.execute(
        "create constraint trigger slow after insert on deferred deferrable initially deferred"
        " for each row execute function slow_insert()"
    )
    return "scratch"


Operation = Callable[[TrioConnection[Any]], Awaitable[object]]


@pytest.fixture
def cancelled(probe: Probe):
    """Run an operation, cancel it once the server is busy with it, and see that it ends by that in time."""

    async def run(conn: TrioConnection[Any], operation: Operation, *, within: float = 1.5) -> None:
        async def operate(task_status: trio.TaskStatus[trio.CancelScope]) -> None:
            with trio.CancelScope() as scope:
                task_status.started(scope)
                await operation(conn)
            assert scope.cancelled_caught

        pid = conn.info.backend_pid
        async with trio.open_nursery() as nursery:
            scope = await nursery.start(operate)
            await probe.busy(conn)
            await trio.testing.wait_all_tasks_blocked(0.02)
            scope.cancel()
            nursery.cancel_scope.deadline = trio.current_time() + within
        assert not nursery.cancel_scope.cancelled_caught, "took too long"
        await probe.nothing_left(pid)

    return run
