"""Parks against signals, deadlines and ends, in every order of their statements (H1, H14, H56; I6, I7, I8)."""

from __future__ import annotations

import psycopg
import pytest
from durable_actors._store.signal import expire_awaits, send_signals
from tests.store.kit import SCHEMA, claims, connect, insert, outcome, rows
from tests.store.stepping import commit, commits, deliver, orders, play, sends


def unread(db: psycopg.Connection) -> list[tuple[int, str]]:
    return db.execute(
        "select target_id, name from durable.signals where consumed_at is null order by id"
    ).fetchall()


# Turns: p = park, recheck, commit. s = signal (lock, insert and wake are one statement), commit.
async def test_no_order_of_park_and_signal_loses_the_wake_up(db: psycopg.Connection, durable_dsn: str):
    async with connect(durable_dsn) as one, connect(durable_dsn) as two:
        for order in orders(p=3, s=2):
            db.execute("truncate durable.gen_durable cascade")
            [number] = insert(db)
            [claim] = await claims(one)
            park = outcome(
                claim, "awaiting_signal", awaits=("go",), await_step="then", timeout=60.0, advance=1
            )
            await play(
                db,
                order,
                {
                    "p": (one, commits(park)),
                    "s": (two, sends(deliver(number))),
                },
            )
            columns = "status, step, await_step, await_deadline, awaits, visit, claim_id is not null"
            assert rows(db, columns) == [("runnable", "then", None, None, ["go"], 2, True)], order
            assert unread(db) == [(number, "go")]


async def test_a_signal_of_another_name_wakes_in_no_order(db: psycopg.Connection, durable_dsn: str):
    async with connect(durable_dsn) as one, connect(durable_dsn) as two:
        for order in orders(p=3, s=2):
            db.execute("truncate durable.gen_durable cascade")
            [number] = insert(db)
            [claim] = await claims(one)
            park = outcome(claim, "awaiting_signal", awaits=("go",))
            await play(
                db,
                order,
                {
                    "p": (one, commits(park)),
                    "s": (two, sends(deliver(number, "other"))),
                },
            )
            assert rows(db, "status, step, inbox") == [("awaiting_signal", "s", True)], order


# Turns: p = park, consume, recheck, commit.
async def test_a_pack_waits_for_a_new_signal_only(db: psycopg.Connection, durable_dsn: str):
    """What the step has seen and keeps does not wake it; what came meanwhile does, also with a smaller id."""
    async with connect(durable_dsn) as one, connect(durable_dsn) as two:
        for order in orders(p=4, s=2):
            db.execute("truncate durable.gen_durable cascade")
            [number] = insert(db)
            await send_signals(one, SCHEMA, [deliver(number), deliver(number), deliver(number, "other")])
            first, second, other = [
                row[0] for row in db.execute("select id from durable.signals order by id")
            ]
            # Ids commit out of order: a maximum of the seen ids would take this one for seen.
            db.execute("update durable.signals set id = default where id = %s", [first])
            seen = db.execute("select max(id) from durable.signals").fetchone()[0]  # type: ignore[index]
            [claim] = await claims(one)
            park = outcome(claim, "awaiting_signal", awaits=("go",), kept=(seen, second), consumed=(other,))
            await play(
                db,
                order,
                {
                    "p": (one, commits(park)),
                    "s": (two, sends(deliver(number))),
                },
            )
            assert rows(db, "status") == [("runnable",)], order
            assert unread(db) == [(number, "go")] * 3


async def test_re_awaiting_what_was_seen_parks(db: psycopg.Connection, durable_dsn: str):
    """H14: else a step that awaits again would run at full speed. A set of ids, not their maximum."""
    [number] = insert(db)
    async with connect(durable_dsn) as one:
        await send_signals(one, SCHEMA, [deliver(number), deliver(number), deliver(number)])
        low, middle, high = [row[0] for row in db.execute("select id from durable.signals order by id")]
        [claim] = await claims(one)
        await commit(one, outcome(claim, "awaiting_signal", awaits=("go",), kept=(low, middle, high)))
        assert rows(db, "status") == [("awaiting_signal",)]
        await send_signals(one, SCHEMA, [deliver(number, key="new")])
        [claim] = await claims(one)
        # All but one in the middle were seen: that one wakes.
        new = db.execute("select max(id) from durable.signals").fetchone()[0]  # type: ignore[index]
        await commit(one, outcome(claim, "awaiting_signal", awaits=("go",), kept=(low, high, new)))
        assert rows(db, "status") == [("runnable",)]


# Turns: d = end, commit. s = signal, commit.
async def test_a_signal_to_an_ending_instance_is_told_the_truth(db: psycopg.Connection, durable_dsn: str):
    """H56: "sent" only when the instance took it before its end; and nothing is left behind either way."""
    async with connect(durable_dsn) as one, connect(durable_dsn) as two:
        for order in orders(d=2, s=2):
            db.execute("truncate durable.gen_durable cascade")
            [number] = insert(db)
            [claim] = await claims(one)
            done = await play(
                db,
                order,
                {
                    "d": (one, commits(outcome(claim, "done"))),
                    "s": (two, sends(deliver(number))),
                },
            )
            [sent] = done["s"]
            assert (sent.outcome, sent.target) == (
                ("no_target", None) if order[0] == "d" else ("sent", number)
            )
            assert rows(db, "status") == [("done",)]
            assert db.execute("select count(*) from durable.signals").fetchone() == (0,)


# Turns: e = expire, commit. s = signal, commit.
async def test_a_deadline_and_a_signal_wake_once(db: psycopg.Connection, durable_dsn: str):
    async with connect(durable_dsn) as one, connect(durable_dsn) as two:
        for order in orders(e=2, s=2):
            db.execute("truncate durable.gen_durable cascade")
            [number] = insert(
                db,
                status="awaiting_signal",
                awaits="={go}::text[]".replace("{go}", "'{go}'"),
                await_step="then",
            )
            db.execute("update durable.gen_durable set await_deadline = now() - interval '1 s'")
            done = await play(
                db,
                order,
                {
                    "e": (one, lambda conn: expire_awaits(conn, SCHEMA, "default", limit=10)),
                    "s": (two, sends(deliver(number))),
                },
            )
            [sent] = done["s"]
            assert len(done["e"]) + sent.woken == 1, "one of them woke it"
            assert rows(db, "status, step, await_step, await_deadline") == [("runnable", "then", None, None)]
            assert unread(db) == [(number, "go")], "and the step that runs sees the signal"


@pytest.mark.parametrize("days", [25, 60, 400])
async def test_long_deadlines(db: psycopg.Connection, durable_dsn: str, days: int):
    """H61: 32-bit milliseconds end after 24.8 days."""
    insert(db)
    async with connect(durable_dsn) as one:
        [claim] = await claims(one)
        await commit(one, outcome(claim, "awaiting_signal", awaits=("go",), timeout=days * 86_400.0))
        assert len(await expire_awaits(one, SCHEMA, "default", limit=10)) == 0
    left = "await_deadline - now() between make_interval(days => {0} - 1) and make_interval(days => {0})"
    assert rows(db, left.format(days)) == [(True,)]


async def test_a_session_does_not_depend_on_the_default_isolation(db: psycopg.Connection, durable_dsn: str):
    """With one snapshot per transaction the recheck would see nothing that the park did not."""
    db.execute(f"alter database {db.info.dbname} set default_transaction_isolation = 'repeatable read'")
    [number] = insert(db)
    async with connect(durable_dsn) as one, connect(durable_dsn) as two:
        [claim] = await claims(one)
        park = outcome(claim, "awaiting_signal", awaits=("go",))
        await play(
            db,
            "sppspp",
            {
                "p": (one, commits(park)),
                "s": (two, sends(deliver(number))),
            },
        )
    assert rows(db, "status") == [("runnable",)]
