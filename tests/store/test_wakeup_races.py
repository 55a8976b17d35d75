"""A notifier's record against whatever moves the row meanwhile, in every order of their statements (R28, R72; I8)."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest
from durable_actors._store.insert import insert_instances
from durable_actors._store.lease import reap_claims
from durable_actors._store.wakeup import Intent, read_intents, record_wakeup
from tests.invariants.journal import journal_problems, read_journal
from tests.store.kit import EXPIRE, SCHEMA, claims, connect, empty, outcome, plan, rows
from tests.store.stepping import Act, commits, orders, play


def records(intent: Intent) -> Act:
    return lambda conn: record_wakeup(conn, SCHEMA, intent)


def kinds(db: psycopg.Connection) -> list[str]:
    return [each["kind"] for each in read_journal(db)[1]]


# Turns: w = record, commit. c = the outcome, its record, commit.
@pytest.mark.parametrize("end", [True, False], ids=["ends", "goes on"])
async def test_a_wakeup_and_an_outcome(db: psycopg.Connection, durable_dsn: str, end: bool):
    """The run may end while the record waits for the row: then there is none. An attempt that is over has one."""
    async with connect(durable_dsn) as one, connect(durable_dsn) as two:
        seen = set()
        for order in orders(w=2, c=3):
            db.execute("set durable_actors.journal_door = 'open'")
            empty(db, "journal")
            db.execute("reset durable_actors.journal_door")
            [number] = await insert_instances(one, SCHEMA, [plan(journal=4)])
            assert number is not None
            [intent] = await read_intents(one, SCHEMA, [number])
            [claim] = await claims(one)
            change = outcome(claim, "done") if end else outcome(claim, "runnable", step="t", advance=1)
            done = await play(db, order, {"w": (one, records(intent)), "c": (two, commits(change))})
            assert done["c"] == {number}, "no wake-up is in the way of an outcome"
            last = "done" if end else "next"
            before = ["started", "claimed", "wakeup", last]
            after = ["started", "claimed", last] if end else ["started", "claimed", last, "wakeup"]
            assert kinds(db) in (before, after), order
            assert done["w"] == ("wakeup" in kinds(db)), order
            assert journal_problems(*read_journal(db)) == [], order
            seen.add(tuple(kinds(db)))
        assert len(seen) == 2, "both happened"


async def test_a_wakeup_and_a_reap(db: psycopg.Connection, durable_dsn: str):
    """A reap passes over rows that are locked: it comes again."""
    async with connect(durable_dsn) as one, connect(durable_dsn) as two:
        for order in orders(w=2, r=2):
            empty(db)
            [number] = await insert_instances(one, SCHEMA, [plan(journal=3)])
            assert number is not None
            [intent] = await read_intents(one, SCHEMA, [number])
            await claims(one)
            db.execute(EXPIRE)

            async def reap(conn: Any) -> Any:
                return await reap_claims(conn, SCHEMA, limit=10, dead={"node": 0.0})

            done = await play(db, order, {"w": (one, records(intent)), "r": (two, reap)})
            assert done["w"], order
            if not done["r"][0]:
                assert [each.id for each in (await reap(two))[0]] == [number], order
            assert rows(db, "status, rev, attempt", f"id = {number}") == [("runnable", 4, 1)], order
