"""Which histories retention shortens, by which records, and what is left of them."""

from __future__ import annotations

from typing import Any

import durable_actors as da
import msgspec
import psycopg
import pytest
from durable_actors._store.children import Spawn, schedule_children
from durable_actors._store.claim import release_claims
from durable_actors._store.insert import insert_instances
from durable_actors._store.recover import recount_barriers
from durable_actors._store.retention import (
    LongJournals,
    find_long_journals,
    snapshot_journal,
    truncate_journal,
)
from durable_actors._store.rows import Transition
from durable_actors._store.sql import statement
from durable_actors._store.verify import check_long
from tests.store.kit import ROLES, SCHEMA, claims, connect, insert, outcome, plan, rows
from tests.store.stepping import commit
from tests.support.sql import explain

MOVES = 4
LIVE = ("runnable", "executing", "awaiting_signal", "awaiting_children")


async def look(conn: Any, **options: Any) -> LongJournals:
    return await find_long_journals(conn, SCHEMA, **{"moves": MOVES, "limit": 100, **options})


async def snapshot(conn: Any, number: int, moves: int = MOVES) -> int | None:
    return await snapshot_journal(conn, SCHEMA, number, moves=moves)


async def truncate(conn: Any, number: int, most: int = 100, moves: int = MOVES) -> int | None:
    return await truncate_journal(conn, SCHEMA, number, moves=moves, most=most)


async def start(conn: Any, level: int = 4, **columns: Any) -> int:
    [number] = await insert_instances(conn, SCHEMA, [plan(journal=level, **columns)])
    assert number is not None
    return number


async def move(conn: Any, count: int = 1) -> None:
    """Two moves each: a claim, and its release."""
    for _ in range(count):
        for claim in await claims(conn):
            await release_claims(conn, SCHEMA, [claim], attempts=0)


def revs(db: psycopg.Connection, number: int) -> list[int]:
    query = "select rev from durable.journal where instance_id = %s order by rev"
    return [rev for (rev,) in db.execute(query, [number]).fetchall()]


def kinds(db: psycopg.Connection, number: int) -> list[str]:
    query = "select kind from durable.journal where instance_id = %s order by rev"
    return [kind for (kind,) in db.execute(query, [number]).fetchall()]


async def test_two_snapshots_and_what_lies_before_the_older_one_goes(
    db: psycopg.Connection, durable_dsn: str
):
    async with connect(durable_dsn) as conn:
        number, young = await start(conn), await start(conn)
        db.execute("update durable.gen_durable set queue = 'other' where id = %s", [young])
        await move(conn, 2)  # rev 5
        assert await look(conn) == LongJournals(2, young, (number,), (number,), ())
        assert await snapshot(conn, number) == 6
        assert await snapshot(conn, number) is None, "it has not moved since"
        assert await look(conn, ids=[number, young]) == LongJournals(2, young, (number,), (), ())
        assert await truncate(conn, number) == 0, "nothing lies before an older snapshot"
        await move(conn, 2)  # rev 10
        assert await snapshot(conn, number) == 11
        assert await look(conn, after=number - 1, limit=1) == LongJournals(
            1, number, (number,), (), (number,)
        )
        assert [await truncate(conn, number, most=2) for _ in range(4)] == [2, 2, 1, 0]
        assert kinds(db, number) == ["snapshot", *["claimed", "released"] * 2, "snapshot"]
        assert revs(db, number) == list(range(6, 12))
        assert await check_long(conn, SCHEMA, number) == []
        assert revs(db, young) == [1]


async def test_the_newest_records_go_first(db: psycopg.Connection, durable_dsn: str):
    """So that a snapshot follows what is missing, after every batch."""
    async with connect(durable_dsn) as conn:
        number = await start(conn)
        for _ in range(2):
            await move(conn, 2)
            await snapshot(conn, number)
        while await truncate(conn, number, most=1):
            assert await check_long(conn, SCHEMA, number) == []
            async with da.open_client(durable_dsn) as client:
                found = [each.rev async for each in client.iter_history(number)]
            assert found == revs(db, number)
            assert found[0] in {1, 6}


@pytest.mark.parametrize("level", ["auto", "outcomes", "claims", "full"])
async def test_what_is_kept_at_each_level(db: psycopg.Connection, durable_dsn: str, level: str):
    async with connect(durable_dsn) as conn:
        number = await start(conn, ["off", "auto", "outcomes", "claims", "full"].index(level), state=b"[1]")
        for _ in range(3):
            for _ in range(2):  # a claim and a failed attempt
                [claim] = await claims(conn)
                again = outcome(claim, "runnable", attempt=claim.attempt + 1, last_error="so", state=b"[1]")
                assert await commit(conn, again)
            await snapshot(conn, number)
            while await truncate(conn, number, most=1):
                pass
        [(rev, row)] = rows(db, "rev, to_jsonb(gen_durable)")
        found = db.execute("select kind, data from durable.journal order by rev").fetchall()
        assert await check_long(conn, SCHEMA, number) == []
        if level == "auto":  # failed attempts: nothing to fold
            assert (rev, [kind for kind, _ in found]) == (13, ["retry"] * 3)
            assert revs(db, number) == [9, 11, 13]
            return
        assert found[0][0] == found[-1][0] == "snapshot"
        assert found[-1][1]["retention"] is True
        assert ("state" in found[-1][1]["row"]) == (level == "full")
        assert rev == 16
        assert row["state"] == [1]


@pytest.mark.parametrize(
    "columns",
    [
        "status = 'done', finished_at = now()",
        "journal = 0",
        "hold = 4",
        """status = 'awaiting_signal', awaits = '{x}', request = '{"kind": "pause"}'""",
        "status = 'awaiting_signal', awaits = '{x}', manual = '{}'",
        "eligible_at = 'infinity'",
        "rev = 3",
    ],
)
async def test_who_gets_no_snapshot(db: psycopg.Connection, durable_dsn: str, columns: str):
    async with connect(durable_dsn) as conn:
        number = await start(conn)
        await move(conn, 2)
        db.execute(f"update durable.gen_durable set {columns}")
        before = rows(db, "gen_durable::text")
        assert await snapshot(conn, number) is None
        assert rows(db, "gen_durable::text") == before


async def test_a_running_step_does_not_notice(db: psycopg.Connection, durable_dsn: str):
    async with connect(durable_dsn) as conn:
        number = await start(conn)
        await move(conn, 2)
        [claim] = await claims(conn)
        for _ in range(2):
            assert await snapshot(conn, number, moves=0)
        assert await truncate(conn, number, moves=0) == 6
        assert await commit(conn, outcome(claim, result=b"7")) == {number}
        assert kinds(db, number) == ["snapshot", "snapshot", "done"]
        assert await check_long(conn, SCHEMA, number) == []


async def test_a_stale_note_deletes_nothing(db: psycopg.Connection, durable_dsn: str):
    """`checkpoints` names a snapshot that is none: the row was deleted, and its history imported from elsewhere."""
    async with connect(durable_dsn) as conn:
        number = await start(conn)
        await move(conn, 3)
        for told in ("3", "99", "null", '"x"', "-1", "1.5", "1e30", "{}"):
            db.execute("delete from durable.checkpoints")
            db.execute(
                "insert into durable.checkpoints values (%s, 5, 0, %s::jsonb)",
                [f"snapshot of run:{number}", told],
            )
            await look(conn)
            assert await truncate(conn, number) == 0
        assert revs(db, number) == list(range(1, 8))


async def test_the_note_goes_with_the_row(db: psycopg.Connection, durable_dsn: str):
    async with connect(durable_dsn) as conn:
        number = await start(conn)
        await move(conn, 2)
        await snapshot(conn, number)
    assert db.execute("select thread from durable.checkpoints").fetchall() == [(f"snapshot of run:{number}",)]
    db.execute("select durable.forget(array[%s::bigint])", [number])
    assert db.execute("select thread from durable.checkpoints").fetchall() == []


async def test_a_snapshot_has_what_the_records_before_it_told_beyond_the_row(
    db: psycopg.Connection, durable_dsn: str
):
    async with connect(durable_dsn) as conn, da.open_client(durable_dsn) as client:
        parent = await start(conn, 3)
        [claim] = await claims(conn)
        parked = Transition(claim, "awaiting_children", "s", attempt=0, advance=1)
        spawn = Spawn([plan(journal=3)] * 3, "then", None, wake_on_failure=False, timeout=None)
        assert await schedule_children(conn, SCHEMA, parked, spawn, accept_late=True) is not None
        child = parent + 1
        before = (await client.inspect(child)).parent_run
        for number, name, told in (
            (parent, "needed", 3),
            (child, "parent", {"id": parent, "machine": "m", "step": "s"}),
        ):
            for _ in range(2):
                assert await snapshot(conn, number, moves=0)
            await truncate(conn, number, moves=0)
            query = "select kind, data -> %s from durable.journal where instance_id = %s"
            assert db.execute(query, [name, number]).fetchall() == [("snapshot", told)] * 2
        # A hand has broken the count. How many children it needs is known, although the record of the spawn is gone.
        db.execute("update durable.gen_durable set children_pending = 1 where id = %s", [parent])
        assert (await recount_barriers(conn, SCHEMA, after=0))[0] == [parent]
        assert rows(db, "children_pending", f"id = {parent}") == [(3,)]
        assert await check_long(conn, SCHEMA, parent) == []
        after = (await client.inspect(child)).parent_run
        assert after == before
        assert after is not None
        assert after.step == "s"


async def test_states_before_the_snapshot(db: psycopg.Connection, durable_dsn: str):
    async with connect(durable_dsn) as conn, da.open_client(durable_dsn) as client:
        number = await start(conn, state=b'{"n": 1}')
        for _ in range(2):
            await move(conn, 2)
            await snapshot(conn, number)
        await truncate(conn, number, most=2)  # 4 and 5 are gone
        for rev in (1, 3, 6, 11):
            assert await client.state_at(number, rev) == {"n": 1}
        gone = (
            f"instance {number} has no record of revision 4: its history begins with revision 6, a snapshot"
        )
        with pytest.raises(da.Conflict, match=gone):
            await client.state_at(number, 4)
        await truncate(conn, number)
        with pytest.raises(
            da.Conflict, match="revision 1: its history begins with revision 6, a snapshot; retention"
        ):
            await client.diff(number, 1, 7)
        assert (await client.diff(number, 6, 7))["status"] == ("runnable", "executing")
        with pytest.raises(da.Conflict, match="its last record is revision 11"):
            await client.state_at(number, 12)


async def test_export_import_and_rebuild_of_what_is_left(db: psycopg.Connection, durable_dsn: str):
    async with connect(durable_dsn) as conn, da.open_client(durable_dsn) as client:
        number = await start(conn, state=b'{"n": 1}', unique_key=b"k", unique_scope=LIVE)
        for _ in range(2):
            await move(conn, 2)
            await snapshot(conn, number)
        await truncate(conn, number)
        before = rows(db, "to_jsonb(gen_durable) - '{rev,updated_at}'::text[]")
        lines = [line async for line in client.export_history("k")]
        assert msgspec.json.decode(lines[0])["kind"] == "snapshot"
        db.execute("delete from durable.gen_durable")
        db.execute("select durable.forget(array[%s::bigint])", [number])
        assert await client.import_history(lines) == number
        assert await client.rebuild(number) == number
        assert rows(db, "to_jsonb(gen_durable) - '{rev,updated_at}'::text[]") == before
        assert (await client.verify()).problems == []


@pytest.mark.parametrize("ids", [False, True])
def test_what_a_look_reads_depends_on_its_batch(big: psycopg.Connection, *, ids: bool):
    [[after]] = big.execute("select min(id) - 1 from durable.gen_durable where status = 'done'").fetchall()
    params = [after, 500, 10_000, [after + 1, after + 2] if ids else None]
    found = explain(
        big, statement("find_long_journals", SCHEMA).sql, params, settings=ROLES["client"].settings
    )
    found.assert_no_seq_scan("gen_durable", "journal", "checkpoints")
    found.assert_uses("gen_durable_pkey")
    assert found.buffers < (20 if ids else 100), found.text


async def test_a_snapshot_and_a_batch_read_few_pages(db: psycopg.Connection, durable_dsn: str):
    insert(db, journal=2, rev=50_000)
    db.execute(
        "insert into durable.journal (instance_id, rev, kind, step, visit, attempt, data) select 1, n,"
        " case when n % 10000 = 0 then 'snapshot' else 'held' end, 's', 1, 0, '{}' from generate_series(1, 50000) n"
    )
    db.execute("insert into durable.checkpoints values ('snapshot of run:1', 40000, 0, '30000')")
    db.execute("vacuum analyze durable.journal")
    for name, params, most in (
        ("snapshot_journal", [1, 10_000], 60),
        ("truncate_journal", ["durable", 1, 10_000, 500], 2000),
    ):
        found = explain(db, statement(name, SCHEMA).sql, params, settings=ROLES["client"].settings)
        found.assert_no_seq_scan()
        assert found.buffers < most, found.text
