"""`round`: committed outcomes of a visit, and nothing else, move it."""

from __future__ import annotations

from typing import Any

import attrs
import psycopg
import pytest
from durable_actors._store.children import Spawn, schedule_children
from durable_actors._store.claim import PickFrom, release_claims
from durable_actors._store.lease import reap_claims
from durable_actors._store.rows import Transition
from durable_actors._store.signal import expire_awaits, send_signals
from tests.store.kit import EXPIRE, SCHEMA, claims, connect, insert, outcome, pick, rows
from tests.store.stepping import commit, deliver
from tests.support.commands import retry_instance

WAYS = ["commit_outcomes", "commit_parks"]


async def claimed(conn: Any, way: str) -> Any:
    """Its outcomes take the short way, or the long one as those of an instance with an inbox."""
    [claim] = await claims(conn)
    return claim if way == "commit_outcomes" else attrs.evolve(claim, inbox=True)


def round_of(db: psycopg.Connection, number: int) -> int:
    return rows(db, "round", f"id = {number}")[0][0]


@pytest.mark.parametrize("way", WAYS)
async def test_outcomes_that_stay_in_the_visit_count_and_entering_a_step_begins_anew(
    db: psycopg.Connection, durable_dsn: str, way: str
):
    [number] = insert(db)
    async with connect(durable_dsn) as conn:
        for count in range(3):
            claim = await claimed(conn, way)
            assert claim.round == count
            await commit(conn, outcome(claim, "runnable", attempt=count))
        await commit(conn, outcome(await claimed(conn, way), "failed"))
        assert await retry_instance(conn, SCHEMA, number)
        assert round_of(db, number) == 4, "it failed by an outcome; the operator's retry moves nothing"
        await commit(conn, outcome(await claimed(conn, way), "runnable", attempt=0, advance=1))
        assert round_of(db, number) == 0


async def test_a_park_counts_and_its_wake_does_not(db: psycopg.Connection, durable_dsn: str):
    [number] = insert(db)
    async with connect(durable_dsn) as conn:
        for count, wakes_by in enumerate(("signal", "deadline", "recheck")):
            [claim] = await claims(conn)
            assert claim.round == count
            if wakes_by == "recheck":
                await send_signals(conn, SCHEMA, [deliver(number)])
            await commit(conn, outcome(claim, "awaiting_signal", awaits=("go",), timeout=60.0))
            if wakes_by == "signal":
                await send_signals(conn, SCHEMA, [deliver(number)])
                db.execute("delete from durable.signals")
            elif wakes_by == "deadline":
                db.execute("update durable.gen_durable set await_deadline = now()")
                assert len(await expire_awaits(conn, SCHEMA, "default", limit=9)) == 1
        [claim] = await claims(conn)
        assert claim.round == 3
        after = Transition(claim, "awaiting_children", claim.step, attempt=0, advance=1)
        spawn = Spawn([], "then", None, wake_on_failure=False, timeout=None)
        assert await schedule_children(conn, SCHEMA, after, spawn, accept_late=True) is not None
    assert round_of(db, number) == 0


async def test_a_reap_and_a_release_leave_it(db: psycopg.Connection, durable_dsn: str):
    [number] = insert(db, round=5)
    async with connect(durable_dsn) as conn:
        [claim] = await claims(conn)
        await release_claims(conn, SCHEMA, [claim], attempts=1)
        told = PickFrom((), (), (), by_id=[number])
        [claim] = (await pick(conn, begin=told)).claims
        assert claim.round == 5
        db.execute(EXPIRE)
        await reap_claims(conn, SCHEMA, limit=9, max_crashes=1)
        assert rows(db, "status, round") == [("failed", 5)]
        assert await retry_instance(conn, SCHEMA, number)
    assert round_of(db, number) == 5, "quarantined: nobody knows how far the last run came"


@pytest.mark.parametrize("way", WAYS)
async def test_it_stops_at_its_end(db: psycopg.Connection, durable_dsn: str, way: str):
    [number] = insert(db, round=2**31 - 1)
    async with connect(durable_dsn) as conn:
        await commit(conn, outcome(await claimed(conn, way), "runnable"))
    assert round_of(db, number) == 2**31 - 1
