from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import psycopg
import pytest
import trio
import trio.testing
from durable_actors._postgres.trio.connection import TrioConnection
from tests.postgres.trio.kit import Probe


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
        await probe.idle(pid)

    return run
