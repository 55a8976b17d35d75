"""A pool that counts its connections by application name."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import attrs
import psycopg
import pytest
import trio
from psycopg.conninfo import make_conninfo


@attrs.frozen
class Server:
    """What the server knows about the connections of one test."""

    conn: psycopg.Connection[tuple[Any, ...]]
    dsn: str
    name: str

    def pids(self, state: str = "%") -> list[int]:
        query = "select pid from pg_stat_activity where application_name = %s and state like %s order by pid"
        return [row[0] for row in self.conn.execute(query, [self.name, state])]

    async def has(self, count: int, state: str = "%") -> None:
        """Wait until it has so many sessions (of a state) for this test. Another process: no event."""
        with trio.fail_after(15):
            while len(self.pids(state)) != count:
                await trio.sleep(0.003)

    def terminate(self) -> None:
        for pid in self.pids():
            self.conn.execute("select pg_terminate_backend(%s, 10000)", [pid])


@pytest.fixture
def server(pg_dsn: str):
    name = f"pool_test_{uuid.uuid4().hex[:12]}"  # other workers use the same server: never end their sessions
    with psycopg.connect(pg_dsn, autocommit=True) as conn:
        yield Server(conn, make_conninfo(pg_dsn, application_name=name), name)


@pytest.fixture
def open_files():
    return lambda: sum(1 for _ in Path("/dev/fd").iterdir())
