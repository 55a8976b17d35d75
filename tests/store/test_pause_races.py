"""Pauses against everything else that moves a row, in every order of their statements.

Whatever the order: once "paused" was said, or the step that ran has ended, the instance is not picked until it is
resumed; and no pick that begins after a queue was paused claims from it.
"""

from __future__ import annotations

from typing import Any

import attrs
import psycopg
import pytest
from durable_actors._store.children import Spawn, schedule_children
from durable_actors._store.claim import PickFrom, release_claims
from durable_actors._store.commands import plan_command
from durable_actors._store.dialogues import run_dialogue
from durable_actors._store.insert import insert_instances
from durable_actors._store.lease import crash_claims, reap_claims
from durable_actors._store.pausing import (
    pause_instance,
    pausing_queue,
    plan_queue,
    resume_instance,
    resuming_queue,
)
from durable_actors._store.rows import Claim, Transition
from durable_actors._store.runner import claim_next
from durable_actors._store.signal import expire_awaits
from tests.invariants.journal import journal_problems, read_journal
from tests.store.kit import (
    EXPIRE,
    HEAD,
    SCHEMA,
    address,
    claims,
    connect,
    empty,
    insert,
    outcome,
    pick,
    plan,
    rows,
)
from tests.store.stepping import Act, commit, commits, deliver, orders, play, sends
from tests.support.commands import cancel_instance


def pauses(number: int) -> Act:
    return lambda conn: pause_instance(conn, SCHEMA, number)


def resumes(number: int) -> Act:
    return lambda conn: resume_instance(conn, SCHEMA, number)


async def fresh(conn: Any, db: psycopg.Connection, **columns: Any) -> Claim:
    """One claimed instance, and nothing else."""
    empty(db, "receipts", "pauses")
    db.execute("set durable_actors.journal_door = 'open'")
    db.execute("delete from durable.journal")
    await insert_instances(conn, SCHEMA, [plan(journal=3, **columns)])
    [claim] = await claims(conn)
    return claim


async def nothing_runs(conn: Any, db: psycopg.Connection, number: int, order: str) -> None:
    """It is paused; its records fit; resumed, it runs."""
    assert rows(db, "status, hold", f"id = {number}") == [("runnable", 4)], order
    assert await claims(conn) == [], order
    assert journal_problems(*read_journal(db)) == [], order
    assert await resume_instance(conn, SCHEMA, number), order
    assert [claim.id for claim in await claims(conn)] == [number], order


OUTCOMES: dict[str, tuple[dict[str, Any], int]] = {
    "next": ({"status": "runnable", "step": "t", "advance": 1, "attempt": 0}, 2),
    "ahead": ({"status": "runnable", "step": "t", "advance": 1, "attempt": 0, "keep_claim": True}, 2),
    "retry": ({"status": "runnable", "attempt": 1}, 2),
    "done": ({"status": "done", "result": b"1"}, 2),
}


# Turns: o = the outcome, its riders, commit. p = pause, commit.
@pytest.mark.parametrize("kind", OUTCOMES)
async def test_pause_against_an_outcome(db: psycopg.Connection, durable_dsn: str, kind: str):
    """The outcome is committed, whatever the order; nothing follows it."""
    columns, turns = OUTCOMES[kind]
    async with connect(durable_dsn) as one, connect(durable_dsn) as two:
        for order in orders(o=turns + 1, p=2):
            claim = await fresh(one, db)
            done = await play(
                db, order, {"o": (one, commits(outcome(claim, **columns))), "p": (two, pauses(claim.id))}
            )
            assert done["o"] == {claim.id}, order
            if kind == "done":
                assert done["p"] in {None, "requested"}, order
                assert rows(db, "status, hold") == [("done", 0)], order
                continue
            [(status,)] = rows(db, "status")
            if status == "executing":  # it ran ahead before it was asked: its next step is the last
                assert (kind, done["p"]) == ("ahead", "requested"), order
                claim.enter("t", claim.visit + 1, b"{}", inbox=False)
                await commit(one, outcome(claim, **{**columns, "step": "u"}))
            await nothing_runs(one, db, claim.id, order)


# Turns: s = the signal, commit. e = the deadline, commit. p = pause, commit.
@pytest.mark.parametrize("how", ["signal", "deadline"])
async def test_pause_against_a_wakeup(db: psycopg.Connection, durable_dsn: str, how: str):
    async with connect(durable_dsn) as one, connect(durable_dsn) as two:
        for order in orders(w=2, p=2):
            claim = await fresh(one, db)
            await commit(one, outcome(claim, "awaiting_signal", awaits=("go",), timeout=0.0))
            wakes: Act = sends(deliver(claim.id))
            if how == "deadline":
                wakes = lambda conn: expire_awaits(conn, SCHEMA, "default", limit=10)  # noqa: E731
            done = await play(db, order, {"w": (one, wakes), "p": (two, pauses(claim.id))})
            assert done["p"] == "paused", order
            if rows(db, "status") == [("awaiting_signal",)]:  # its row was locked: the next look finds it
                await wakes(one)
            await nothing_runs(one, db, claim.id, order)


ENDS: dict[str, Act] = {
    "release": lambda conn: release_claims(conn, SCHEMA, MINE, attempts=1),
    "crash": lambda conn: crash_claims(conn, SCHEMA, MINE, error="x"),
    "reap": lambda conn: reap_claims(conn, SCHEMA, limit=10),
}
MINE: list[Claim] = []


# Turns: e = the end of the claim, its riders, commit. p = pause, commit.
@pytest.mark.parametrize("how", ENDS)
async def test_pause_against_the_end_of_its_claim(db: psycopg.Connection, durable_dsn: str, how: str):
    async with connect(durable_dsn) as one, connect(durable_dsn) as two:
        for order in orders(e=3, p=2):
            MINE[:] = [await fresh(one, db, partition_key="k")]
            if how == "reap":
                db.execute("update durable.gen_durable set journal = 0")  # the hand changes what is recorded
                db.execute("delete from durable.journal")
                db.execute(EXPIRE)
            await play(db, order, {"e": (one, ENDS[how]), "p": (two, pauses(MINE[0].id))})
            if rows(db, "status") == [("executing",)]:  # its row was locked: it is tried again
                await ENDS[how](one)
            await nothing_runs(one, db, MINE[0].id, order)


# Turns: j = the last child's end, join, commit. p = pause of its parent, commit.
async def test_pause_against_the_join_of_its_barrier(db: psycopg.Connection, durable_dsn: str):
    async with connect(durable_dsn) as one, connect(durable_dsn) as two:
        for order in orders(j=3, p=2):
            parent = await fresh(one, db)
            after = Transition(parent, "awaiting_children", parent.step, attempt=0, advance=1)
            children = Spawn([plan(journal=3)], "then", None, wake_on_failure=False, timeout=None)
            assert await schedule_children(one, SCHEMA, after, children, accept_late=True)
            [child] = await claims(one)
            done = await play(db, order, {"j": (one, commits(outcome(child))), "p": (two, pauses(parent.id))})
            assert (done["j"], done["p"]) == ({child.id}, "paused"), order
            await nothing_runs(one, db, parent.id, order)


# Turns: a, b = the command, commit.
async def test_pause_against_cancel_and_against_another_pause(db: psycopg.Connection, durable_dsn: str):
    async with connect(durable_dsn) as one, connect(durable_dsn) as two:
        for order in orders(a=2, b=2):
            for executing in (False, True):
                claim = await fresh(one, db)
                if not executing:
                    await release_claims(one, SCHEMA, [claim], attempts=0)
                cancels: Act = lambda conn: cancel_instance(conn, SCHEMA, claim.id)  # noqa: B023, E731
                done = await play(db, order, {"a": (one, pauses(claim.id)), "b": (two, cancels)})
                assert done["b"] == ("requested" if executing else "cancelled"), order
                if executing:
                    await release_claims(one, SCHEMA, [claim], attempts=0)
                assert rows(db, "status, hold, request ->> 'kind'") == [("cancelled", 0, "cancel")], order
                claim = await fresh(one, db)
                if not executing:
                    await release_claims(one, SCHEMA, [claim], attempts=0)
                done = await play(db, order, {"a": (one, pauses(claim.id)), "b": (two, pauses(claim.id))})
                said = "requested" if executing else "paused"
                assert sorted(map(str, done.values())) == sorted(["None", said]), order
                assert db.execute("select count(*) from durable.receipts").fetchone() == (1,), order


# Turns: k = pick, commit. p = pause, or resume; commit.
@pytest.mark.parametrize("begin", [HEAD, PickFrom((), (), (), by_id=[0])], ids=["window", "by id"])
async def test_pause_and_resume_against_a_pick(db: psycopg.Connection, durable_dsn: str, begin: PickFrom):
    async with connect(durable_dsn) as one, connect(durable_dsn) as two:
        for order in orders(k=2, p=2):
            empty(db, "receipts", "pauses")
            [number] = insert(db)
            where = begin if begin is HEAD else PickFrom((), (), (), by_id=[number])
            picks: Act = lambda conn: pick(conn, begin=where)  # noqa: B023, E731
            done = await play(db, order, {"k": (one, picks), "p": (two, pauses(number))})
            claimed = len(done["k"].claims)
            assert (claimed, done["p"]) in {(1, "requested"), (0, "paused")}, order
            if claimed:
                await release_claims(one, SCHEMA, done["k"].claims, attempts=0)
            assert rows(db, "status, hold") == [("runnable", 4)], order
            done = await play(db, order, {"k": (one, picks), "p": (two, resumes(number))})
            assert done["p"] is True, order
            assert len(done["k"].claims) + len(await claims(one)) == 1, (
                "claimed once, by the pick or the next"
            )


# -- queues


def stop(**options: Any) -> Act:
    plan_ = plan_queue("default", **options)
    return lambda conn: run_dialogue(conn, pausing_queue(SCHEMA, plan_, plan_command()))


def go(**options: Any) -> Act:
    plan_ = plan_queue("default", **options)
    return lambda conn: run_dialogue(conn, resuming_queue(SCHEMA, plan_, plan_command()))


PICKS: dict[str, Act] = {
    "window": pick,
    "by id": lambda conn: pick(conn, begin=PickFrom((), (), (), by_id=[number_of(conn)])),
    "runner": lambda conn: claim_next(conn, SCHEMA, queue="default", steps=["m/s"], owner="test", lease=60.0),
}
NUMBERS: list[int] = []


def number_of(_: Any) -> int:
    return NUMBERS[-1]


def has_claimed(result: Any) -> bool:
    return result is not None and bool(getattr(result, "claims", True))


# Turns: k = pick, commit. p = pause of the queue or the machine, commit.
@pytest.mark.parametrize("machine", [None, "m"])
@pytest.mark.parametrize("how", PICKS)
async def test_no_pick_that_begins_after_the_pause_claims(
    db: psycopg.Connection, durable_dsn: str, how: str, machine: str | None
):
    """A pick whose snapshot is older may: it began before the pause was committed."""
    async with connect(durable_dsn) as one, connect(durable_dsn) as two:
        for order in orders(k=2, p=2):
            empty(db, "receipts", "pauses")
            NUMBERS[:] = insert(db)
            done = await play(db, order, {"k": (one, PICKS[how]), "p": (two, stop(machine=machine))})
            began_before = order.index("k") < order.rindex("p")
            assert has_claimed(done["k"]) == began_before, order
            empty(db)
            NUMBERS[:] = insert(db)
            assert not has_claimed(await PICKS[how](one)), order
            await go(machine=machine)(two)
            shelf = attrs.evolve(
                HEAD, shelved=[address("m/1")]
            )  # where a paused machine's rows are set aside
            assert len((await pick(one, begin=shelf)).claims) == 1, order


async def test_a_pick_that_waits_for_nobody(db: psycopg.Connection, durable_dsn: str):
    """Neither side waits for the other, while the pause is not committed."""
    insert(db)
    async with connect(durable_dsn) as one, connect(durable_dsn) as two, one.transaction():
        await stop()(one)
        assert len(await claims(two)) == 1
