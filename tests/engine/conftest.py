from __future__ import annotations

import psycopg
import pytest
from tests.engine.kit import Db


@pytest.fixture
def db(durable_dsn: str):
    with psycopg.connect(durable_dsn, autocommit=True) as conn:
        yield Db(conn, durable_dsn)
