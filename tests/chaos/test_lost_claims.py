"""A pick's commit does not wait for the disk: what becomes of a claim that a crash of the server has forgotten.

The server's WAL writer is stopped, so that nothing but a commit that waits brings WAL to the disk; then all is killed.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import psycopg
import pytest
from durable_actors._store.claim import read_claims, release_claims
from durable_actors._store.commit import commit_outcomes, was_committed
from durable_actors._store.lease import renew_leases
from durable_actors._store.migrate import migrate
from durable_actors._store.rows import Claim
from tests.chaos.cluster import Cluster, open_cluster
from tests.store.kit import SCHEMA, claims, connect, insert, outcome, rows

pytestmark = pytest.mark.slow


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with open_cluster({"wal_writer_delay": "10s", "autovacuum": "off"}) as found:
        yield found


async def claim_one(cluster: Cluster, **columns: object) -> Claim:
    """Insert a row, which is on the disk then, and claim it with the WAL writer stopped."""
    with psycopg.connect(cluster.dsn(), autocommit=True) as db:
        [(writer,)] = db.execute(
            "select pid from pg_stat_activity where backend_type = 'walwriter'"
        ).fetchall()
        insert(db, **columns)
    os.kill(writer, signal.SIGSTOP)
    async with connect(cluster.dsn()) as conn:
        [claim] = await claims(conn)
    return claim


def crash(cluster: Cluster) -> None:
    cluster.kill()
    cluster.start()


async def test_the_outcome_of_a_forgotten_claim_is_refused(cluster: Cluster):
    await migrate(cluster.dsn())
    lost = await claim_one(cluster)
    crash(cluster)
    with psycopg.connect(cluster.dsn(), autocommit=True) as db:
        assert rows(db, "status::text, claim_id, attempt, crashes") == [
            ("runnable", None, 0, 0)
        ]  # it is forgotten
        async with connect(cluster.dsn(), "commit") as conn:
            for late in (True, False):
                flushed = await commit_outcomes(conn, SCHEMA, [outcome(lost)], accept_late=late)
                assert flushed.committed == {}
            assert await renew_leases(conn, SCHEMA, [lost], lease_ttl=60.0) == set()
            assert not (await release_claims(conn, SCHEMA, [lost], attempts=1)).ids
            state = (await read_claims(conn, SCHEMA, [lost.id]))[lost.id]
            assert was_committed(outcome(lost), state) is None
            # Whoever claims it next has the row for itself.
            [again] = await claims(conn)
            assert (again.id, again.visit, again.attempt) == (lost.id, lost.visit, 0)
            assert again.claim_id != lost.claim_id
            assert (await commit_outcomes(conn, SCHEMA, [outcome(lost)], accept_late=True)).committed == {}
            assert (
                len((await commit_outcomes(conn, SCHEMA, [outcome(again)], accept_late=False)).committed) == 1
            )
        assert rows(db, "status::text, rev") == [("done", 3)], "the lost claim counts no move"


async def test_an_outcome_that_was_acknowledged_is_not_forgotten(cluster: Cluster):
    """Its commit waits for the disk, and the claim's lies before it."""
    await migrate(cluster.dsn())
    claim = await claim_one(cluster)
    async with connect(cluster.dsn(), "commit") as conn:
        flushed = await commit_outcomes(conn, SCHEMA, [outcome(claim)], accept_late=False)
    assert len(flushed.committed) == 1
    crash(cluster)
    with psycopg.connect(cluster.dsn()) as db:
        assert rows(db, "status::text, claim_id::text") == [("done", claim.claim_id)]


async def test_the_claim_of_a_keyed_row_is_not_forgotten(cluster: Cluster):
    """Or a sibling could run beside a worker that the server's crash did not stop."""
    await migrate(cluster.dsn())
    claim = await claim_one(cluster, partition_key="k")
    crash(cluster)
    with psycopg.connect(cluster.dsn(), autocommit=True) as db:
        assert rows(db, "status::text, claim_id::text") == [("executing", claim.claim_id)]
        insert(db, partition_key="k")
        async with connect(cluster.dsn()) as conn:
            assert await claims(conn) == []
