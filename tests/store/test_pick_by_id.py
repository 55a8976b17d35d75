"""Claims of rows by their ids: what this shorter pick takes, and what it leaves to the full pick."""

from __future__ import annotations

import psycopg
import pytest
import trio
from durable_actors._postgres.driver.connection import PgConn
from durable_actors._postgres.driver.statement import Params, Result, Statement
from durable_actors._store.claim import PickFrom
from durable_actors._store.commit import commit_outcomes
from tests.store.kit import SCHEMA, connect, insert, outcome, pick, rows
from tests.support.interleave import wait_backend_blocked

GATE = 4712


def told(*ids: int) -> PickFrom:
    return PickFrom((), (), (), by_id=ids)


async def test_it_claims_what_it_is_told_of_and_no_more(db: psycopg.Connection, durable_dsn: str):
    before, *mine = insert(db, 3, state='{"a": [1]}')
    async with connect(durable_dsn) as conn:
        picked = await pick(conn, begin=told(*reversed(mine)))
    assert [claim.id for claim in picked.claims] == mine
    assert (picked.seen, picked.positions) == ([], {})  # nothing is known of rows before these
    assert [claim.state for claim in picked.claims] == [b'{"a": [1]}'] * 2
    assert rows(db, "status, locked_by", f"id = {before}") == [("runnable", None)]
    assert rows(db, "status, locked_by, attempt", f"id <> {before}") == [("executing", "node", 0)] * 2


async def test_its_claim_is_a_claim_like_any_other(db: psycopg.Connection, durable_dsn: str):
    [number] = insert(db)
    async with connect(durable_dsn) as conn:
        [claim] = (await pick(conn, begin=told(number))).claims
        assert (await pick(conn, begin=told(number))).claims == []
        assert (await pick(conn)).claims == []
        done = await commit_outcomes(conn, SCHEMA, [outcome(claim)], accept_late=False)
        assert list(done.committed) == [number]
    assert rows(db, "status") == [("done",)]


@pytest.mark.parametrize(
    "columns",
    [
        {"partition_key": "k"},
        {"hold": 1, "partition_key": "k"},
        {"hold": 2},
        {"eligible_at": "=now() + interval '1 h'"},
        {"queue": "other"},
        {"fsm_version": 2},
        {"status": "awaiting_signal", "awaits": ["s"]},
        {"status": "done", "finished_at": "=now()"},
    ],
    ids=lambda columns: next(iter(columns)),
)
async def test_what_is_not_plain_is_left(
    db: psycopg.Connection, durable_dsn: str, columns: dict[str, object]
):
    [number] = insert(db, **columns)
    before = rows(db, "gen_durable.*")
    async with connect(durable_dsn) as conn:
        assert (await pick(conn, begin=told(number))).claims == []
    assert rows(db, "gen_durable.*") == before


async def test_it_waits_for_nobody(db: psycopg.Connection, durable_dsn: str):
    locked, free = insert(db, 2)
    with db.transaction():
        db.execute("select 1 from durable.gen_durable where id = %s for no key update", [locked])
        async with connect(durable_dsn) as conn:
            with trio.fail_after(10):
                assert [claim.id for claim in (await pick(conn, begin=told(locked, free))).claims] == [free]


class Gated:
    """A connection whose pick stops at a gate, its snapshot taken."""

    def __init__(self, conn: PgConn) -> None:
        self._conn = conn

    async def run(self, statement: Statement, params: Params) -> Result:
        head = f"with gate as materialized (select pg_advisory_xact_lock({GATE})), mine as"
        sql = statement.sql.replace("with mine as", head, 1)
        gated = sql.replace("gen_durable g\n     where", "gen_durable g, gate\n     where", 1)
        gated = gated.replace("for no key update skip", "for no key update of g skip", 1)
        assert gated != sql != statement.sql
        return await self._conn.run(Statement("gated", gated, typed=statement.typed), params)


@pytest.mark.parametrize("taken", [False, True], ids=["touched", "claimed by another"])
async def test_a_row_that_changes_between_snapshot_and_lock(
    db: psycopg.Connection, durable_dsn: str, *, taken: bool
):
    """Touched, it is claimed all the same; claimed by somebody else meanwhile, it is not claimed twice."""
    [number] = insert(db)
    db.execute("select pg_advisory_lock(%s)", [GATE])
    async with (
        connect(durable_dsn, lock_timeout="0") as conn,  # it waits for the gate as long as the test wants
        connect(durable_dsn) as other,
        trio.open_nursery() as nursery,
    ):
        found: list[int] = []

        async def pick_late() -> None:
            picked = await pick(Gated(conn), begin=told(number))  # type: ignore[arg-type]
            found.extend(claim.id for claim in picked.claims)

        nursery.start_soon(pick_late)
        await wait_backend_blocked(durable_dsn, conn.pid, by=db.info.backend_pid)
        if taken:
            assert len((await pick(other)).claims) == 1
        else:
            db.execute("update durable.gen_durable set inbox = true, rev = rev + 1")
        claims = rows(db, "claim_id")
        db.execute("select pg_advisory_unlock(%s)", [GATE])
    assert found == ([] if taken else [number])
    assert rows(db, "status") == [("executing",)]
    assert (rows(db, "claim_id") == claims) is taken
