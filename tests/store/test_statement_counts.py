"""One statement whatever the batch: counted by the server itself, which sees every round trip that somebody forgot."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import psycopg
import pytest
from durable_actors._engine.claiming import stats_refresh
from durable_actors._engine.claiming.feeder import Feeder
from durable_actors._engine.claims import ActiveClaim
from durable_actors._engine.maintenance.heartbeat import Heartbeat
from durable_actors._store.claim import release_claims
from durable_actors._store.commit import commit_outcomes
from durable_actors._store.insert import insert_instances
from durable_actors._store.lease import reap_claims, renew_leases
from durable_actors._store.signal import Delivery, send_signals
from tests.engine.kit import QUIET, make_node, running
from tests.kit import until
from tests.store.kit import EXPIRE, SCHEMA, claims, connect, insert, outcome, pick, plan
from tests.support.sql import count_statements

SIZES = [1, 300]


@contextmanager
def counted(dsn: str, expected: int) -> Iterator[None]:
    with count_statements(dsn) as count:
        yield
    assert count.total == expected, str(count)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("key", [None, "='k ' || n", "same"])
async def test_a_pick_is_one_statement(db: psycopg.Connection, durable_dsn: str, size: int, key: str | None):
    insert(db, size, partition_key=key)
    async with connect(durable_dsn) as conn:
        with counted(durable_dsn, 1):
            assert (await pick(conn)).window == size


@pytest.mark.parametrize("size", SIZES)
async def test_a_flush_of_plain_outcomes_is_one_statement(
    db: psycopg.Connection, durable_dsn: str, size: int
):
    """Done, failed, next, retry, run-ahead, all in one."""
    insert(db, size)
    kinds = [
        {"status": "done"},
        {"status": "failed", "last_error": "x"},
        {"status": "runnable", "advance": 1, "step": "b"},
        {"status": "runnable", "advance": 1, "keep_claim": True},
        {"status": "runnable", "attempt": 1, "delay": 9.0, "keeps_awaits": True},
    ]
    async with connect(durable_dsn, "commit") as conn:
        found = await claims(conn)
        outcomes = [outcome(claim, **kinds[number % 5]) for number, claim in enumerate(found)]
        with counted(durable_dsn, 1):
            flushed = await commit_outcomes(conn, SCHEMA, outcomes, accept_late=True)
        assert len(flushed.committed) == size


@pytest.mark.parametrize("size", SIZES)
async def test_a_flush_with_riders_is_a_constant_number_of_statements(
    db: psycopg.Connection, durable_dsn: str, size: int
):
    """Plain and rich outcomes, consumed signals, parks, ended children, keys: two writes and four riders."""
    [parent] = insert(
        db, status="awaiting_children", children_pending=999, children_total=999, await_step="b"
    )
    insert(db, size, partition_key="='k ' || n", parent_id=parent, barrier=1)
    parked = insert(db, size, awaits=["go"])
    async with connect(durable_dsn, "commit") as conn:
        await send_signals(conn, SCHEMA, [Delivery(number, None, "go", b"{}", None) for number in parked])
        handed = dict(db.execute("select target_id, id from durable.signals").fetchall())
        found = await claims(conn)
        assert len(found) == 2 * size
        outcomes = [
            outcome(claim, status="awaiting_signal", awaits=("stop",), consumed=(handed[claim.id],))
            if claim.id in handed
            else outcome(claim)
            for claim in found
        ]
        with counted(durable_dsn, 6):
            flushed = await commit_outcomes(conn, SCHEMA, outcomes, accept_late=True)
        assert len(flushed.committed) == 2 * size


@pytest.mark.parametrize("size", [*SIZES, 6000])
async def test_an_insert_is_one_statement(durable_dsn: str, size: int):
    async with connect(durable_dsn, "client") as conn:
        with counted(durable_dsn, 1):
            assert len(await insert_instances(conn, SCHEMA, [plan() for _ in range(size)])) == size


@pytest.mark.parametrize("size", SIZES)
async def test_signals_are_one_statement(db: psycopg.Connection, durable_dsn: str, size: int):
    targets = insert(db, size)
    async with connect(durable_dsn, "client") as conn:
        with counted(durable_dsn, 1):
            await send_signals(
                conn, SCHEMA, [Delivery(number, None, "go", b"{}", None) for number in targets]
            )


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("keyed", [False, True])
async def test_renew_release_and_reap_are_one_statement_each(
    db: psycopg.Connection, durable_dsn: str, size: int, *, keyed: bool
):
    """Plus one for the siblings of freed keys. The reaper's are in a transaction of their own."""
    insert(db, size, partition_key="='k ' || n" if keyed else None)
    async with connect(durable_dsn) as conn:
        found = await claims(conn)
        with counted(durable_dsn, 1):
            assert len(await renew_leases(conn, SCHEMA, found, lease_ttl=60)) == size
        with counted(durable_dsn, 1 + keyed):
            assert len((await release_claims(conn, SCHEMA, found, attempts=1)).ids) == size
        assert len(await claims(conn)) == size
        db.execute(EXPIRE)
        with count_statements(durable_dsn) as count:
            assert len((await reap_claims(conn, SCHEMA, limit=1000))[0]) == size
        assert count.total <= 3 + keyed, str(count)


async def test_a_beat_is_two_statements_for_a_thousand_claims(db: psycopg.Connection, durable_dsn: str):
    """One renews, one touches the node's row. Another thousand claims are one more."""
    insert(db, 1500)
    async with make_node(durable_dsn) as node:
        async with connect(durable_dsn) as conn:
            found = await claims(conn, owner=node.owner, limit=1500)
        beats = Heartbeat(node)
        await beats._beat()
        for several, expected in ((found[:1000], 2), (found[1000:], 3)):
            for claim in several:
                node.claims.add(ActiveClaim(claim))
            with counted(durable_dsn, expected):
                await beats._beat()


async def test_an_idle_poll_is_two_statements(durable_dsn: str, monkeypatch: pytest.MonkeyPatch):
    """The pick, and the statistics of the queue."""
    refresh_after_pick, refreshes = Feeder._refresh_after_pick, list[Feeder]()

    async def refreshed(self: Feeder) -> None:
        await refresh_after_pick(self)
        refreshes.append(self)

    monkeypatch.setattr(Feeder, "_refresh_after_pick", refreshed)
    # On a busy machine a refresh is slow, and the next one would be postponed.
    monkeypatch.setattr(stats_refresh, "refresh_pause", lambda seconds: 0.0)
    async with running(durable_dsn, queues={"default": 5}, **QUIET) as run:
        await until(lambda: refreshes)
        totals, picks = list[int](), list[int]()
        for _ in range(3):
            polls = len(refreshes)
            with count_statements(durable_dsn) as count:
                run.engine._node.notify("default")
                await until(lambda: len(refreshes) > polls)  # noqa: B023 - called here and now
            picks.append(count.calls("with extra as"))
            totals.append(count.total)
    assert sum(picks) in {2, 3}, picks  # the last one may be counted after its window, too
    # Other actors may add to a count. The server counts a statement after its answer: the last one of a poll may be
    # counted in the next, as in 1, 3, 2.
    assert 2 in totals, totals
    assert sum(totals) >= 6, totals


@pytest.mark.parametrize("level", [0, 1, 2, 4])
async def test_a_step_is_one_pick_and_one_commit(db: psycopg.Connection, durable_dsn: str, level: int):
    """Case 48: without a journal nothing is recorded; with one, its records are a rider of the same round trip."""
    definition = "00ff00ff00ff00ff" if level >= 2 else None
    async with connect(durable_dsn, "commit") as conn:
        await insert_instances(conn, SCHEMA, [plan(journal=level, fingerprint=definition) for _ in range(10)])
        with counted(durable_dsn, 1):
            found = await claims(conn)
        assert {claim.recorded.fingerprint for claim in found} == {definition}
        with counted(durable_dsn, 1 + (level >= 2)):
            await commit_outcomes(conn, SCHEMA, [outcome(claim) for claim in found], accept_late=True)
    [(records,)] = db.execute("select count(*) from durable.journal").fetchall()
    assert records == {0: 0, 1: 0, 2: 20, 4: 30}[level]
