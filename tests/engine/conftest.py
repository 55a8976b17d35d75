from __future__ import annotations

import os
from collections.abc import Iterator

import durable_actors as da
import psycopg
import pytest
from durable_actors._engine.claims import MOVES, ActiveClaim, ClaimState
from durable_actors._engine.running.dispatcher import Dispatcher
from tests.engine.kit import Db
from tests.invariants.journal import JournalWatch, recording


@pytest.fixture(autouse=True)
def _moves_in_the_table(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fails a test in which a claim makes a move that `claims.MOVES` does not have."""
    real, wrong = Dispatcher._move, list[str]()

    def move(self: Dispatcher, active: ActiveClaim, state: ClaimState) -> None:
        if state not in MOVES[active.state]:
            wrong.append(f"{active.state.name} → {state.name}")
        real(self, active, state)

    monkeypatch.setattr(Dispatcher, "_move", move)
    yield
    assert not wrong


JOURNAL = int(os.environ.get("DURABLE_TEST_JOURNAL", "-1"))
"""The level at which everything is recorded; -1: as the instances say."""


@pytest.fixture(autouse=JOURNAL >= 0)
def _journal_fits(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails a test whose journal does not fold into its rows."""
    if "durable_dsn" not in request.fixturenames:
        yield
        return
    watch = JournalWatch(request.getfixturevalue("durable_dsn"))
    with recording(JOURNAL):
        yield
    assert "\n".join(watch.problems()) == ""


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
