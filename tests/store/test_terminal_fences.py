"""After its end no statement moves an instance, but those of the commands `retry` and `rebuild` (R69-R72; I8)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import psycopg
import pytest
from durable_actors._engine.committing.transition import cancellation
from durable_actors._postgres.driver.connection import PgConn
from durable_actors._store.children import Spawn, child_uid, schedule_children, start_child
from durable_actors._store.claim import ClaimAtOnce, PickFrom, promote_siblings, read_queue, release_claims
from durable_actors._store.fair import Entry, FairPick, pick_fair
from durable_actors._store.insert import insert_instances
from durable_actors._store.lease import crash_claims, read_owners, reap_claims, renew_leases, sweep_keys
from durable_actors._store.moves import MOVES
from durable_actors._store.pausing import pause_instance, resume_instance
from durable_actors._store.recover import recount_barriers, wake_lost_waits
from durable_actors._store.retention import snapshot_journal
from durable_actors._store.rows import Claim, Raised, Transition
from durable_actors._store.signal import expire_awaits, send_signals, signal_call, signal_from_step
from durable_actors._store.wakeup import Intent, read_intents, record_wakeup
from tests.store.kit import HEAD, OWNER, SCHEMA, claims, connect, insert, known_steps, outcome, pick, plan
from tests.store.stepping import commit, deliver

ROW = "select to_jsonb(g) from durable.gen_durable g where id = %s"


class Late:
    """An instance that has ended, and what was under way then: its claim, its children, its parent, its wake-up."""

    def __init__(self, conn: PgConn, claim: Claim, intent: Intent) -> None:
        self.conn, self.claim, self.intent = conn, claim, intent


Try = Callable[[Late], Awaitable[Any]]


async def _commit(late: Late) -> Any:
    done: list[set[int]] = []
    for change in (
        outcome(late.claim, "runnable", step="t", advance=1),
        outcome(late.claim, "runnable", attempt=1),
        outcome(late.claim, "awaiting_signal", awaits=("go",)),
        outcome(late.claim, "done", result=b"2"),
        outcome(late.claim, "failed", last_error="late", raised=Raised("E", "trace")),
        cancellation(late.claim, "late"),
    ):
        done.append(await commit(late.conn, change))
    done.append(await commit(late.conn, outcome(late.claim, "done", deletes=True)))
    return set().union(*done)


async def _spawn(late: Late) -> Any:
    after = Transition(late.claim, "awaiting_children", late.claim.step, attempt=0, advance=1)
    spawn = Spawn([plan()], "then", None, wake_on_failure=False, timeout=None)
    return await schedule_children(late.conn, SCHEMA, after, spawn, accept_late=True)


async def _start_child(late: Late) -> Any:
    uid = child_uid(late.claim.id, "s", "m", "k", kind="child")
    return await start_child(late.conn, SCHEMA, late.claim, plan(), uid=uid, as_child=True)


async def _signal(late: Late) -> Any:
    [sent] = await send_signals(late.conn, SCHEMA, [deliver(late.claim.id)])
    assert sent.outcome == "no_target"
    return sent.woken


async def _reap(late: Late) -> Any:
    assert await read_owners(late.conn, SCHEMA) == []
    return (await reap_claims(late.conn, SCHEMA, limit=10, dead={"node": float("inf")}))[0]


async def _pick(late: Late) -> Any:
    shape = await read_queue(late.conn, SCHEMA, "default")
    assert (shape.priorities, shape.shelved, shape.next_deadline) == ((), (), None)
    by_id = await pick(late.conn, begin=PickFrom((), (), (), by_id=[late.claim.id]))
    take = FairPick([Entry(0, "a", 9)], plain=[late.claim.id])
    known = known_steps("m/1")
    fair, _ = await pick_fair(late.conn, OWNER, queue="default", limit=9, known=known, take=take, now=0.0)
    return [*(await pick(late.conn, begin=HEAD)).claims, *by_id.claims, *fair.claims]


async def _claim_at_once(late: Late) -> Any:
    ask = ClaimAtOnce(OWNER, ["default"], known_steps("m/1"), 0.0)
    _, claimed = await late.conn.batch(
        [signal_call(SCHEMA, [deliver(late.claim.id)]), ask.call([late.claim.id])]
    )
    return ask.read(claimed.rows)


async def _crash(late: Late) -> Any:
    return (await crash_claims(late.conn, SCHEMA, [late.claim], error="late"))[0]


async def _release(late: Late) -> Any:
    return (await release_claims(late.conn, SCHEMA, [late.claim], attempts=1)).ids


async def _sweep(late: Late) -> Any:
    return (await sweep_keys(late.conn, SCHEMA, after="", limit=10))[0]


async def _intents(late: Late) -> Any:
    return await read_intents(late.conn, SCHEMA, [late.claim.id])


TRIES: dict[str, Try] = {
    "commit_outcomes commit_parks commit_deletes": _commit,
    "park_parent": _spawn,
    "start_child": _start_child,
    "send_signals": _signal,
    "signal_from_step": lambda late: signal_from_step(
        late.conn, SCHEMA, late.claim, [deliver(late.claim.id)]
    ),
    "reap_claims": _reap,
    "pick_instances pick_instances_by_id pick_fair": _pick,
    "claim_at_once": _claim_at_once,
    "crash_claims": _crash,
    "release_claims": _release,
    "renew_leases": lambda late: renew_leases(late.conn, SCHEMA, [late.claim], lease_ttl=60.0),
    "expire_awaits": lambda late: expire_awaits(late.conn, SCHEMA, "default", limit=10),
    "promote_siblings": lambda late: promote_siblings(late.conn, SCHEMA, ["key"]),
    "free_holds": _sweep,
    "wake_lost_waits": lambda late: wake_lost_waits(late.conn, SCHEMA, after=0),
    "recount_barriers": lambda late: recount_barriers(late.conn, SCHEMA, after=0),
    "snapshot_journal": lambda late: snapshot_journal(late.conn, SCHEMA, late.claim.id, moves=0),
    "record_wakeup": lambda late: record_wakeup(late.conn, SCHEMA, late.intent),
    "read_intents": _intents,
    "pause_instance": lambda late: pause_instance(late.conn, SCHEMA, late.claim.id),
    "resume_instance": lambda late: resume_instance(late.conn, SCHEMA, late.claim.id),
}
ELSEWHERE = {
    "insert_plain": "begins a row",
    "insert_held": "begins a row",
    "insert_linked": "begins a row",
    "insert_instances": "begins a row",
    "hand_siblings": "passes it by: test_siblings.py",
    "join_parents": "the parent: test_children_of_an_ended_parent",
    "recheck_awaits": "rides on the commit that parks",
    "retry_instance": "the way back",
    "rerun_instance": "begins a row",
    "turn_schedule": "begins rows",
    "hasten_instance": "refused: test_run_now.py",
    "rebuild_instance": "writes what the records say",
    "restore_instance": "writes what the records say",
    "accept_instance": "writes a record of the row as it is, whatever that is",
    "cancel_instance": "refused: test_cancel.py",
    "cancel_children": "passes it by: test_cascades.py",
    "tell_dependents": "passes it by: test_graph.py",
    "tell_untold": "passes it by: test_graph.py",
    "resolve_boundary": "refused: test_boundaries.py",
    "delete_ended": "deletes what has ended: test_retention.py",
    "write_limits": "writes only what its transaction has written: test_limits.py",
    "claim_next": "a runner's pick: test_runner_functions.py",
    "heartbeat": "a runner's renewal: test_runner_functions.py",
    "complete": "a runner's outcome: test_runner_functions.py",
    "fail": "a runner's outcome: test_runner_functions.py",
}


def test_every_statement_that_moves_a_row_is_tried():
    writers = {name for move in MOVES for name in move.statements}
    tried = {name for names in TRIES for name in names.split()} - {"read_intents"}
    assert tried | set(ELSEWHERE) == writers


@pytest.mark.parametrize("status", ["done", "failed", "cancelled"])
@pytest.mark.parametrize("name", TRIES)
async def test_nothing_moves_an_instance_that_has_ended(
    db: psycopg.Connection, durable_dsn: str, status: str, name: str
):
    """With a claim, a key, a wait and a wake-up of before: each is refused, changes nothing and leaves no record."""
    async with connect(durable_dsn) as conn:
        [number] = await insert_instances(conn, SCHEMA, [plan(journal=4, partition_key="key")])
        assert number is not None
        [intent] = await read_intents(conn, SCHEMA, [number])
        [claim] = await claims(conn)
        end = cancellation(claim, "so") if status == "cancelled" else outcome(claim, status, last_error="so")
        assert await commit(conn, end) == {number}
        if status == "done":  # what a hand may have left
            db.execute(
                "update durable.gen_durable set awaits = '{go}', await_deadline = now() - interval '1 h', hold = 1,"
                " children_pending = 1"
            )
        before = db.execute(ROW, [number]).fetchall()
        records = db.execute("select count(*) from durable.journal").fetchall()
        found = await TRIES[name](Late(conn, claim, intent))
        assert not found or found == ([], None), found
    assert db.execute(ROW, [number]).fetchall() == before
    assert db.execute("select count(*) from durable.journal").fetchall() == records
    assert db.execute("select count(*) from durable.gen_durable").fetchall() == [(1,)]
    assert db.execute("select count(*) from durable.signals").fetchall() == [(0,)]


async def test_children_of_an_ended_parent(db: psycopg.Connection, durable_dsn: str):
    """They end for themselves: a barrier that is over counts nothing."""
    async with connect(durable_dsn) as conn:
        insert(db)
        [parent] = await claims(conn)
        after = Transition(parent, "awaiting_children", parent.step, attempt=0, advance=1)
        spawn = Spawn([plan()], "then", None, wake_on_failure=True, timeout=None)
        assert await schedule_children(conn, SCHEMA, after, spawn, accept_late=True) is not None
        db.execute(
            "update durable.gen_durable set status = 'failed', finished_at = now() where id = %s", [parent.id]
        )
        before = db.execute(ROW, [parent.id]).fetchall()
        [child] = await claims(conn)
        await commit(conn, outcome(child, "failed", last_error="no"))
    assert db.execute(ROW, [parent.id]).fetchall() == before
