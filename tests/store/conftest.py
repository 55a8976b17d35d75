from __future__ import annotations

from collections.abc import Iterator

import psycopg
import pytest
from durable_actors.testing.database import DatabaseServer
from tests.store.filled import fill


@pytest.fixture(scope="session")
def filled_dsn(durable_server: DatabaseServer) -> str:
    """The big table: one for all workers, filled by whichever comes first."""
    return durable_server.dsn_of(durable_server.template(fill, kind="_filled"))


@pytest.fixture
def big(filled_dsn: str) -> Iterator[psycopg.Connection]:
    """A connection to the big table, for one test at a time: another's row locks would change what is measured."""
    with psycopg.connect(filled_dsn, autocommit=True) as db:
        db.execute("select pg_advisory_lock(hashtextextended('one test at a time', 0))")
        yield db


@pytest.fixture
def db(durable_dsn: str) -> Iterator[psycopg.Connection]:
    with psycopg.connect(durable_dsn, autocommit=True) as conn:
        yield conn
