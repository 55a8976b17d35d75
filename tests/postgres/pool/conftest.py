"""A pool that counts its connections by application name."""

from __future__ import annotations

import uuid

import attrs
import psycopg
import pytest
from psycopg.conninfo import make_conninfo
from tests.kit import Session, until


@attrs.frozen
class Server(Session):
    """What the server knows about the connections of one test."""

    dsn: str
    name: str

    def pids(self, state: str = "%") -> list[int]:
        query = "select pid from pg_stat_activity where application_name = %s and state like %s order by pid"
        return [pid for (pid,) in self.execute(query, self.name, state)]

    async def has(self, count: int, state: str = "%") -> None:
        """Wait until it has so many sessions (of a state) for this test. Another process: no event."""
        await until(lambda: len(self.pids(state)) == count)

    def terminate(self) -> None:
        for pid in self.pids():
            self.execute("select pg_terminate_backend(%s, 10000)", pid)


@pytest.fixture
def server(pg_dsn: str):
    name = f"pool_test_{uuid.uuid4().hex[:12]}"  # other workers use the same server: never end their sessions
    with psycopg.connect(pg_dsn, autocommit=True) as conn:
        yield Server(conn, make_conninfo(pg_dsn, application_name=name), name)
