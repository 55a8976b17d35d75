"""Fences: a write of a claim that is not current changes nothing, whatever the outcome; what was committed is told."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from typing import Any

import attrs
import psycopg
import pytest
from durable_actors._postgres.driver.connection import PgConn
from durable_actors._store.children import Spawn, schedule_children
from durable_actors._store.claim import Owner, read_claims, release_claims
from durable_actors._store.commit import commit_outcomes, was_committed
from durable_actors._store.lease import reap_claims, renew_leases
from durable_actors._store.rows import Claim, Committed, Transition
from durable_actors._store.signal import Delivery, send_signals
from tests.store.kit import EXPIRE, SCHEMA, claims, connect, insert, outcome, plan, rows

KINDS: dict[str, dict[str, Any]] = {
    "next": {"status": "runnable", "step": "b", "advance": 1, "attempt": 0, "state": b'{"n": 2}'},
    "next, ahead": {"status": "runnable", "step": "b", "advance": 1, "attempt": 0, "keep_claim": True},
    "next, other key": {"status": "runnable", "step": "b", "advance": 1, "rekey": True, "partition_key": "z"},
    "retry": {"status": "runnable", "attempt": 7, "delay": 30.0, "last_error": "no", "keeps_awaits": True},
    "await": {"status": "awaiting_signal", "awaits": ("go",), "timeout": 9.0},
    "await, then": {"status": "awaiting_signal", "awaits": ("go",), "await_step": "b", "advance": 1},
    "done": {"status": "done", "result": b'{"n": 2}'},
    "stop": {"status": "failed", "last_error": "no"},
    "children": {"status": "awaiting_children", "advance": 1},
}
TWO_CHILDREN = Spawn([plan(), plan(unique_key=b"child")], "b", None, False, None)


async def commit(conn: PgConn, transition: Transition, *, accept_late: bool = True) -> Committed | None:
    """Commit one outcome as the engine does."""
    if transition.status == "awaiting_children":
        return await schedule_children(conn, SCHEMA, transition, TWO_CHILDREN, accept_late=accept_late)
    flushed = await commit_outcomes(conn, SCHEMA, [transition], accept_late=accept_late)
    return flushed.committed.get(transition.claim.id)


def everything(db: psycopg.Connection) -> list[Any]:
    """Both tables, with the place of every row version: a write that changes no value would show, too.

    Without the siblings of the key: any flush may offer one to the pick, which decides anew. That is always safe.
    """
    queries = (
        "select *, ctid, xmin from durable.gen_durable where queue <> 'siblings' order by id",
        "select *, ctid, xmin from durable.signals order by id",
    )
    return [db.execute(query).fetchall() for query in queries]


async def claim_one(db: psycopg.Connection, conn: PgConn) -> Claim:
    """A claimed row that has everything an outcome could touch: a key and siblings, a parent, an inbox, an await."""
    [parent] = insert(
        db,
        status="awaiting_children",
        children_pending=1,
        children_total=1,
        visit=2,
        await_step="b",
        queue="parents",
    )
    [number] = insert(
        db,
        partition_key="k",
        parent_id=parent,
        barrier=2,
        awaits=["go", "stop"],
        eligible_at="=now() - interval '1 h'",
    )
    insert(db, 2, partition_key="k", queue="siblings")
    deliveries = [Delivery(number, None, name, b"{}", dedup) for name, dedup in (("go", "d"), ("stop", None))]
    await send_signals(conn, SCHEMA, deliveries)
    [claim] = await claims(conn)
    assert claim.id == number
    assert await claims(conn, queue="siblings") == []
    return claim


def transition_of(db: psycopg.Connection, claim: Claim, kind: str) -> Transition:
    handed = tuple(
        number for (number,) in db.execute("select id from durable.signals order by id").fetchall()
    )
    consumed = {} if kind == "retry" else {"consumed": handed}
    return outcome(claim, **(KINDS[kind] | consumed))


async def lose_by_reap(db: psycopg.Connection, conn: PgConn, claim: Claim) -> Claim:
    db.execute(EXPIRE)
    await reap_claims(conn, SCHEMA, limit=10)
    return claim


async def lose_by_release(db: psycopg.Connection, conn: PgConn, claim: Claim) -> Claim:
    await release_claims(conn, SCHEMA, [claim], attempts=0)
    return claim


async def lose_to_the_same_worker(db: psycopg.Connection, conn: PgConn, claim: Claim) -> Claim:
    """HAZARDS H40: the worker is the same, the claim is not."""
    await release_claims(conn, SCHEMA, [claim], attempts=0)
    [again] = await claims(conn)
    assert (again.id, again.visit) == (claim.id, claim.visit)
    assert again.claim_id != claim.claim_id
    return claim


async def lose_to_another_worker(db: psycopg.Connection, conn: PgConn, claim: Claim) -> Claim:
    await release_claims(conn, SCHEMA, [claim], attempts=0)
    assert await claims(conn, owner=Owner(SCHEMA, "other", b"", 60.0))
    return claim


async def fall_behind(db: psycopg.Connection, conn: PgConn, claim: Claim) -> Claim:
    """The claim is current, the visit is not: it went ahead."""
    db.execute("update durable.gen_durable set visit = visit + 1 where id = %s", [claim.id])
    return claim


Loss = Callable[[psycopg.Connection, PgConn, Claim], Awaitable[Claim]]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "lose", [lose_by_reap, lose_by_release, lose_to_the_same_worker, lose_to_another_worker, fall_behind]
)
async def test_a_stale_outcome_changes_nothing(
    db: psycopg.Connection, durable_dsn: str, kind: str, lose: Loss
):
    """No row, no signal, no child, no parent's counter, no sibling on offer; and the row tells that it was not."""
    async with connect(durable_dsn) as conn:
        claim = await claim_one(db, conn)
        transition = transition_of(db, claim, kind)
        await lose(db, conn, claim)
        before = everything(db)
        assert await commit(conn, transition) is None
        assert everything(db) == before
        if lose is not fall_behind:
            now = (await read_claims(conn, SCHEMA, [claim.id]))[claim.id]
            assert was_committed(transition, now) is None


@pytest.mark.parametrize("kind", KINDS)
async def test_a_repeated_outcome_changes_nothing_and_is_told_as_committed(
    db: psycopg.Connection, durable_dsn: str, kind: str
):
    """The answer to the first was lost: the same is sent again, then the row is read."""
    async with connect(durable_dsn) as conn:
        claim = await claim_one(db, conn)
        transition = transition_of(db, claim, kind)
        now = (await read_claims(conn, SCHEMA, [claim.id]))[claim.id]
        assert was_committed(transition, now) is None, "it is executing, at the same visit: not yet"
        first = await commit(conn, transition)
        assert first is not None
        assert first.visit == claim.visit + transition.advance
        before = everything(db)
        assert await commit(conn, transition) is None
        assert everything(db) == before
        now = (await read_claims(conn, SCHEMA, [claim.id]))[claim.id]
        told = was_committed(transition, now)
        assert told is not None
        assert (told.visit, told.status) == (first.visit, first.status)


async def test_an_outcome_overtaken_by_the_next_claim_is_not_told_as_committed(
    db: psycopg.Connection, durable_dsn: str
):
    """It was, but the row is another's now: there is nothing to go on with, and nothing to repair."""
    insert(db)
    async with connect(durable_dsn) as conn:
        [claim] = await claims(conn)
        transition = outcome(claim, status="runnable", attempt=1)
        assert await commit(conn, transition)
        await claims(conn)
        now = (await read_claims(conn, SCHEMA, [claim.id]))[claim.id]
        assert was_committed(transition, now) is None
        assert was_committed(transition, None) is None, "nor is a deleted one"


async def test_a_terminal_row_never_changes(db: psycopg.Connection, durable_dsn: str):
    insert(db)
    async with connect(durable_dsn) as conn:
        [claim] = await claims(conn)
        assert await commit(conn, outcome(claim))
        before = everything(db)
        for columns in KINDS.values():
            assert await commit(conn, outcome(claim, **columns)) is None
        assert not await renew_leases(conn, SCHEMA, [claim], lease_ttl=60)
        assert not (await release_claims(conn, SCHEMA, [claim], attempts=1)).ids
        assert await reap_claims(conn, SCHEMA, limit=10, dead={"node": math.inf}) == ([], [])
        assert await claims(conn) == []
        assert everything(db) == before


async def test_claim_ids_never_repeat(db: psycopg.Connection, durable_dsn: str):
    """Random, not counted: a counter in the row or a sequence may fall back when the server crashes."""
    insert(db, 100)
    seen: set[str] = set()
    async with connect(durable_dsn) as conn:
        for _ in range(10):
            found = await claims(conn)
            seen |= {claim.claim_id for claim in found}
            await release_claims(conn, SCHEMA, found, attempts=0)
    assert len(seen) == 1000


async def test_two_outcomes_of_one_instance_in_one_flush(db: psycopg.Connection, durable_dsn: str):
    """HAZARDS H41: a stale claim's and the current one's. The flusher sends them apart; the store is safe by itself."""
    insert(db, 2)
    async with connect(durable_dsn) as conn:
        old, other = await claims(conn)
        await release_claims(conn, SCHEMA, [old], attempts=0)
        [new] = await claims(conn)
        for order in ([old, new, other], [other, new, old]):
            flushed = await commit_outcomes(
                conn,
                SCHEMA,
                [outcome(claim, status="runnable", keep_claim=True, step=claim.claim_id) for claim in order],
                accept_late=True,
            )
            assert sorted(flushed.committed) == [new.id, other.id]
        assert rows(db, "step, rev") == [(new.claim_id, 5 + 1), (other.claim_id, 4)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("accept", [True, False])
async def test_a_late_commit_is_a_matter_of_configuration(
    db: psycopg.Connection, durable_dsn: str, kind: str, *, accept: bool
):
    async with connect(durable_dsn) as conn:
        claim = await claim_one(db, conn)
        transition = transition_of(db, claim, kind)
        db.execute(EXPIRE)
        before = everything(db)
        committed = await commit(conn, transition, accept_late=accept)
        assert (committed is not None) == accept
        if not accept:
            assert everything(db) == before


async def test_heartbeat_and_release_go_by_the_claim_alone(db: psycopg.Connection, durable_dsn: str):
    """A step that ran ahead has another visit than when it was claimed; its lease is the same."""
    insert(db, 2)
    async with connect(durable_dsn) as conn:
        first, second = await claims(conn)
        ahead = outcome(first, status="runnable", advance=1, keep_claim=True)
        assert await commit(conn, ahead) == Committed(2, "executing", b"{}", inbox=False)
        db.execute(EXPIRE)
        assert len(await renew_leases(conn, SCHEMA, [second, first], lease_ttl=60)) == 2
        assert rows(db, "lease_expires_at > now()") == [(True,), (True,)]
        impostor = attrs.evolve(second, claim_id=first.claim_id)
        assert not await renew_leases(conn, SCHEMA, [impostor], lease_ttl=60)
        assert not (await release_claims(conn, SCHEMA, [impostor], attempts=1)).ids
        assert (await release_claims(conn, SCHEMA, [first], attempts=1)).ids == {first.id}


async def test_a_heartbeat_of_a_lost_claim_does_not_extend_the_next_one_of_the_same_worker(
    db: psycopg.Connection, durable_dsn: str
):
    """Case 33: owner and instance are the same, the claim is not."""
    insert(db)
    async with connect(durable_dsn) as conn:
        [old] = await claims(conn)
        db.execute(EXPIRE)
        assert [each.id for each in (await reap_claims(conn, SCHEMA, limit=10))[0]] == [old.id]
        [new] = await claims(conn)
        before = everything(db)
        assert not await renew_leases(conn, SCHEMA, [old], lease_ttl=600)
        assert everything(db) == before
        assert len(await renew_leases(conn, SCHEMA, [old, new], lease_ttl=600)) == 1
        assert rows(db, "claim_id::text, lease_expires_at > now() + interval '9 min'") == [
            (new.claim_id, True)
        ]


async def test_the_current_claim_is_read_without_a_lock(db: psycopg.Connection, durable_dsn: str):
    one, two, three = insert(db, 3)
    async with connect(durable_dsn) as conn:
        first, second, _ = await claims(conn)
        await release_claims(conn, SCHEMA, [second], attempts=0)
        db.execute("delete from durable.gen_durable where id = %s", [three])
        with psycopg.connect(durable_dsn) as other:
            other.execute("select 1 from durable.gen_durable for update")
            found = await read_claims(conn, SCHEMA, [one, two, three])
        assert {number: (state.claim_id, state.visit, state.status) for number, state in found.items()} == {
            one: (first.claim_id, 1, "executing"),
            two: (None, 1, "runnable"),
        }


async def test_running_ahead_keeps_claim_and_lease_and_moves_no_index_entry(
    db: psycopg.Connection, durable_dsn: str
):
    insert(db)
    async with connect(durable_dsn) as conn:
        [claim] = await claims(conn)
        columns = (
            "claim_id, locked_by, lease_expires_at, eligible_at, status, visit, (ctid::text::point)[0]::int"
        )
        [before] = rows(db, columns)
        assert await commit(conn, outcome(claim, status="runnable", advance=1, keep_claim=True))
        [after] = rows(db, columns)
        assert after == (*before[:5], 2, before[6]), "on the same page, so the update is HOT"


async def test_a_due_sibling_stops_running_ahead(db: psycopg.Connection, durable_dsn: str):
    [first] = insert(db, partition_key="k")
    [future] = insert(db, partition_key="k", eligible_at="=now() + interval '1 h'")
    async with connect(durable_dsn) as conn:
        [claim] = await claims(conn)
        stays = await commit(conn, outcome(claim, status="runnable", advance=1, keep_claim=True))
        assert stays is not None
        assert stays.status == "executing"
        db.execute("update durable.gen_durable set eligible_at = now() where id = %s", [future])
        claim.visit = 2
        gone = await commit(conn, outcome(claim, status="runnable", advance=1, keep_claim=True))
        assert gone is not None
        assert gone.status == "runnable"
        assert [each.id for each in await claims(conn)] == [future], "the elder by its date"
        assert rows(db, "hold", f"id = {first}") == [(1,)]


async def test_a_key_switch_to_a_busy_key_commits_with_the_others(db: psycopg.Connection, durable_dsn: str):
    """HAZARDS H10: of 100 outcomes one moves to a key that is executing. It waits there; nobody's commit is refused."""
    insert(db, partition_key="busy")
    insert(db, 99)
    async with connect(durable_dsn) as conn:
        busy, mover, *others = await claims(conn)
        flushed = await commit_outcomes(
            conn,
            SCHEMA,
            [
                outcome(mover, status="runnable", advance=1, rekey=True, partition_key="busy"),
                *(outcome(claim) for claim in others),
            ],
            accept_late=True,
        )
        assert len(flushed.committed) == 99
        assert await claims(conn) == []
        assert rows(db, "hold", f"id = {mover.id}") == [(1,)]
        assert (await commit_outcomes(conn, SCHEMA, [outcome(busy)], accept_late=True)).offered[
            0
        ].id == mover.id
        assert [claim.id for claim in await claims(conn)] == [mover.id]


async def test_state_and_result_are_stored_as_json_not_as_text(db: psycopg.Connection, durable_dsn: str):
    """HAZARDS H17: encoded twice they would be strings, in which no query finds anything."""
    insert(db, 2)
    async with connect(durable_dsn) as conn:
        first, second = await claims(conn)
        assert await commit(conn, outcome(first, status="runnable", state=b'{"n": 1}'))
        assert await commit(conn, outcome(second, result=b'{"n": 1}'))
    assert rows(db, "jsonb_typeof(state), state->>'n', jsonb_typeof(result)") == [
        ("object", "1", None),
        ("object", None, "object"),
    ]
