"""What a stale or repeated outcome must not do, and what each kind of outcome writes (H2, H3, H45, H49)."""

from __future__ import annotations

from typing import Any

import attrs
import psycopg
import pytest
from durable_actors._engine.committing.transition import cancellation
from durable_actors._store.children import Spawn, schedule_children
from durable_actors._store.claim import read_claims
from durable_actors._store.commit import commit_outcomes, was_committed
from durable_actors._store.lease import reap_claims
from durable_actors._store.rows import Claim, Transition
from durable_actors._store.signal import read_inboxes, send_signals
from tests.store.kit import EXPIRE, SCHEMA, claims, connect, insert, outcome, plan, rows
from tests.store.stepping import commit, deliver
from tests.support.commands import retry_instance

PARENT = {"status": "awaiting_children", "await_step": "then", "children_pending": 1, "children_total": 1}


def everything(db: psycopg.Connection) -> tuple[list[tuple], list[tuple]]:
    """All that a stale outcome might touch."""
    signals = db.execute("select * from durable.signals order by id").fetchall()
    return rows(db, "gen_durable.*"), signals


def kinds(claim: Claim, signal: int) -> dict[str, Transition]:
    return {
        "next": outcome(claim, "runnable", step="t", advance=1, consumed=(signal,)),
        "retry": outcome(claim, "runnable", attempt=1, keeps_awaits=True, state=b'{"x": 1}'),
        "await": outcome(claim, "awaiting_signal", awaits=("other",), consumed=(signal,), timeout=5.0),
        "await kept": outcome(claim, "awaiting_signal", awaits=("go",), kept=(signal,)),
        "done": outcome(claim, "done", result=b"1"),
        "failed": outcome(claim, "failed", last_error="no"),
        "cancelled": cancellation(claim, "not wanted"),
        "children": outcome(claim, "awaiting_children", advance=1, consumed=(signal,)),
    }


KINDS = ("next", "retry", "await", "await kept", "done", "failed", "cancelled", "children")


async def send(conn: Any, transition: Transition) -> bool:
    if transition.status == "awaiting_children":
        spawn = Spawn([plan(), plan()], "then", None, wake_on_failure=False, timeout=None)
        return await schedule_children(conn, SCHEMA, transition, spawn, accept_late=True) is not None
    return bool(await commit(conn, transition))


async def prepare(db: psycopg.Connection, conn: Any) -> tuple[Claim, int]:
    """A child with a signal in its inbox, claimed; its parent waits for it."""
    db.execute("truncate durable.gen_durable cascade")
    [parent] = insert(db, **PARENT)
    [number] = insert(db, parent_id=parent, barrier=1)
    await send_signals(conn, SCHEMA, [deliver(number)])
    [claim] = await claims(conn)
    [signal] = (await read_inboxes(conn, SCHEMA, [number]))[number]
    return claim, signal.id


@pytest.mark.parametrize("how", ["reaped", "claimed again", "next visit"])
async def test_a_stale_outcome_changes_nothing(db: psycopg.Connection, durable_dsn: str, how: str):
    async with connect(durable_dsn) as conn:
        for kind in KINDS:
            claim, signal = await prepare(db, conn)
            if how == "next visit":
                db.execute("update durable.gen_durable set visit = visit + 1 where id = %s", [claim.id])
            else:
                db.execute(EXPIRE)
                await reap_claims(conn, SCHEMA, limit=10)
            if how == "claimed again":
                await claims(conn)
            before = everything(db)
            assert not await send(conn, kinds(claim, signal)[kind]), kind
            assert everything(db) == before, kind


async def test_a_repeated_outcome_changes_nothing_and_is_recognised(db: psycopg.Connection, durable_dsn: str):
    """After a commit of unknown fate: consumed once, counted once, and a signal that came since is left alone."""
    async with connect(durable_dsn) as conn:
        for kind in KINDS:
            claim, signal = await prepare(db, conn)
            transition = kinds(claim, signal)[kind]
            assert await send(conn, transition), kind
            await send_signals(conn, SCHEMA, [deliver(claim.id, "since")])
            before = everything(db)
            assert not await send(conn, transition), kind
            assert everything(db) == before, kind
            now = (await read_claims(conn, SCHEMA, [claim.id]))[claim.id]
            found = was_committed(transition, now)
            assert found is not None, kind
            assert found.status == transition.status, kind


async def test_a_repeated_end_does_not_count_a_second_child(db: psycopg.Connection, durable_dsn: str):
    async with connect(durable_dsn) as conn:
        [parent] = insert(db, **{**PARENT, "children_pending": 2, "children_total": 2})
        insert(db, 2, parent_id=parent, barrier=1)
        first, second = await claims(conn)
        for _ in range(3):
            await commit(conn, outcome(first, "done"))
        assert rows(db, "status, children_pending", f"id = {parent}") == [("awaiting_children", 1)]
        # Stale and fresh in one flush: only what this transaction wrote counts.
        assert await commit(conn, outcome(first, "failed"), outcome(second, "done")) == {second.id}
        assert rows(db, "status, children_pending", f"id = {parent}") == [("runnable", 0)]


async def test_late_outcomes_are_refused_when_configured(db: psycopg.Connection, durable_dsn: str):
    async with connect(durable_dsn) as conn:
        for kind in KINDS:
            claim, signal = await prepare(db, conn)
            db.execute(EXPIRE)
            transition = kinds(claim, signal)[kind]
            before = everything(db)
            if kind == "children":
                spawn = Spawn([plan()], "then", None, wake_on_failure=False, timeout=None)
                assert await schedule_children(conn, SCHEMA, transition, spawn, accept_late=False) is None
            else:
                flushed = await commit_outcomes(conn, SCHEMA, [transition], accept_late=False)
                assert flushed.committed == {}, kind
            assert everything(db) == before, kind


async def test_an_end_drops_the_inbox_also_when_the_claim_knew_of_none(
    db: psycopg.Connection, durable_dsn: str
):
    numbers = insert(db, 2)
    async with connect(durable_dsn) as conn:
        a, b = await claims(conn)
        assert not a.inbox
        await send_signals(conn, SCHEMA, [deliver(n, key=k) for n in numbers for k in ("1", None)])
        await commit(conn, outcome(a, "done"), outcome(b, "failed"))
    assert db.execute("select target_id from durable.signals").fetchall() == [(b.id,)] * 2, (
        "a failed one may be retried"
    )


@pytest.mark.parametrize("inbox", [False, True])
async def test_a_failed_instance_keeps_inbox_awaits_and_dedup_keys(
    db: psycopg.Connection, durable_dsn: str, inbox: bool
):
    [number] = insert(db)
    async with connect(durable_dsn) as conn:
        [claim] = await claims(conn)
        await commit(conn, outcome(claim, "awaiting_signal", awaits=("go",)))
        await send_signals(conn, SCHEMA, [deliver(number, key="d"), deliver(number, "other")])
        [claim] = await claims(conn)
        await commit(conn, outcome(attrs.evolve(claim, inbox=inbox), "failed", keeps_awaits=True))
        assert rows(db, "status, awaits") == [("failed", ["go"])]
        [sent] = await send_signals(conn, SCHEMA, [deliver(number, key="d")])
        assert sent.outcome == "no_target"
        assert await retry_instance(conn, SCHEMA, number)
        [sent] = await send_signals(conn, SCHEMA, [deliver(number, key="d")])
        assert sent.outcome == "duplicate"
        [claim] = await claims(conn)
        assert (claim.awaits, claim.inbox) == (("go",), True)
        found = (await read_inboxes(conn, SCHEMA, [number]))[number]
        assert [signal.name for signal in found] == ["go", "other"]


async def test_a_quarantined_instance_keeps_its_inbox(db: psycopg.Connection, durable_dsn: str):
    [number] = insert(db)
    async with connect(durable_dsn) as conn:
        await claims(conn)
        await send_signals(conn, SCHEMA, [deliver(number)])
        db.execute(EXPIRE)
        await reap_claims(conn, SCHEMA, limit=10, max_crashes=1)
    assert rows(db, "status") == [("failed",)]
    assert db.execute("select count(*) from durable.signals").fetchone() == (1,)


async def test_running_ahead_learns_of_a_signal(db: psycopg.Connection, durable_dsn: str):
    """Else a step that runs ahead would be shown an empty inbox, and one that does not would not."""
    [number] = insert(db)
    async with connect(durable_dsn) as conn:
        [claim] = await claims(conn)
        ahead = outcome(claim, "runnable", step="t", advance=1, keep_claim=True)
        flushed = await commit_outcomes(conn, SCHEMA, [ahead], accept_late=True)
        assert (flushed.committed[number].status, flushed.committed[number].inbox) == ("executing", False)
        await send_signals(conn, SCHEMA, [deliver(number)])
        claim.visit += 1
        flushed = await commit_outcomes(conn, SCHEMA, [ahead], accept_late=True)
        assert (flushed.committed[number].status, flushed.committed[number].inbox) == ("executing", True)


async def test_consumes_only_its_own_signals(db: psycopg.Connection, durable_dsn: str):
    """`consume=` with ids of another instance's inbox, or of none."""
    a, b = insert(db, 2)
    async with connect(durable_dsn) as conn:
        await send_signals(conn, SCHEMA, [deliver(a), deliver(b), deliver(b, key="k")])
        claim, _ = await claims(conn)
        foreign = [signal.id for signal in (await read_inboxes(conn, SCHEMA, [b]))[b]]
        await commit(conn, outcome(claim, "runnable", advance=1, consumed=(*foreign, 10**12)))
        assert len((await read_inboxes(conn, SCHEMA, [b]))[b]) == 2


async def test_awaits_are_kept_by_a_retry_and_by_crashes_only(db: psycopg.Connection, durable_dsn: str):
    [number] = insert(db)
    async with connect(durable_dsn) as conn:
        [claim] = await claims(conn)
        await commit(conn, outcome(claim, "awaiting_signal", awaits=("go",), await_step="t", advance=1))
        await send_signals(conn, SCHEMA, [deliver(number)])
        [claim] = await claims(conn)
        assert (claim.awaits, claim.step, claim.inbox) == (("go",), "t", True)
        await commit(conn, outcome(claim, "runnable", attempt=1, keeps_awaits=True))
        [claim] = await claims(conn)
        assert claim.awaits == ("go",)
        db.execute(EXPIRE)
        await reap_claims(conn, SCHEMA, limit=10)
        [claim] = await claims(conn)
        assert claim.awaits == ("go",)
        await commit(conn, outcome(claim, "runnable", step="u", advance=1))
        [claim] = await claims(conn)
        assert claim.awaits is None
