from __future__ import annotations

import durable_actors as da
import psycopg
import pytest
from tests.engine.kit import Db


@pytest.fixture
def db(durable_dsn: str):
    with psycopg.connect(durable_dsn, autocommit=True) as conn:
        yield Db(conn, durable_dsn)


@pytest.fixture
def nothing(registry):
    """A job that returns its arguments."""

    @da.job
    async def nothing(args: dict):
        return args

    return nothing


@pytest.fixture(params=[True, False], ids=["ahead", "apart"])
def ahead(request: pytest.FixtureRequest) -> bool:
    """Run-ahead must not show: what it could touch is tested with it and without."""
    return request.param
