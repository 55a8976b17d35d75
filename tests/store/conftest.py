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
def big(durable_server: DatabaseServer, filled_dsn: str) -> Iterator[psycopg.Connection]:
    """A connection to the big table, for one test at a time: another's row locks would change what is measured.

    Waited for in another database: a statement that waits has a snapshot, which keeps dead rows of its database alive.
    What the tests before have measured was rolled back, and is swept up: it was 6,000 of 10,000 pages once.
    """
    with psycopg.connect(durable_server.dsn, autocommit=True) as turn:
        turn.execute("select pg_advisory_lock(hashtextextended(%s, 0))", [filled_dsn])
        with psycopg.connect(filled_dsn, autocommit=True) as db:
            db.execute("vacuum (index_cleanup on) durable.gen_durable")
            yield db


@pytest.fixture
def db(durable_dsn: str) -> Iterator[psycopg.Connection]:
    with psycopg.connect(durable_dsn, autocommit=True) as conn:
        yield conn
