from __future__ import annotations

import psycopg
import pytest
from durable_actors.machine import isolated_registry
from tests.engine.kit import Db


@pytest.fixture
def db(durable_dsn: str):
    with psycopg.connect(durable_dsn, autocommit=True) as conn:
        yield Db(conn, durable_dsn)


@pytest.fixture
def registry():
    """What the test defines is forgotten afterwards, and nothing else is known."""
    with isolated_registry() as found:
        yield found


@pytest.fixture(params=[True, False], ids=["ahead", "apart"])
def ahead(request: pytest.FixtureRequest) -> bool:
    """Run-ahead must not show: what it could touch is tested with it and without."""
    return request.param
