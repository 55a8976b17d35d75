"""What retention deletes, what it keeps, and what goes with a row."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest
from durable_actors._store.retention import Ages, Swept, delete_ended, read_keeps, write_keeps
from durable_actors._store.signal import send_signals
from durable_actors._store.sql import statement
from durable_actors.machine import MachineSpec
from tests.store.kit import ROLES, SCHEMA, claims, connect, insert, outcome, rows
from tests.store.stepping import commit, deliver
from tests.support.sql import explain

LIVE = "{runnable,executing,awaiting_signal,awaiting_children}"
AGES = Ages(100, 200, 300, 50)


def ended(db: psycopg.Connection, status: str = "done", *, ago: float = 1000, **columns: Any) -> int:
    """A row that ended so many seconds ago."""
    at = f"=now() - interval '{ago} s'"
    [number] = insert(db, status=status, finished_at=at, inserted_at=at, **columns)
    return number


async def sweep(dsn: str, ages: Ages = AGES, *, after: int = 0, limit: int = 100, old: float = 100) -> Swept:
    async with connect(dsn, "client") as conn:
        return await delete_ended(conn, SCHEMA, ages, after=after, limit=limit, old=old)


def ids(db: psycopg.Connection) -> list[int]:
    return [number for (number,) in rows(db, "id")]


async def test_each_status_has_its_age(db: psycopg.Connection, durable_dsn: str):
    kept = [ended(db, status, ago=age - 5) for status, age in
            (("done", 100), ("cancelled", 200), ("failed", 300))]  # fmt: skip
    for status, age in (("done", 100), ("cancelled", 200), ("failed", 300)):
        ended(db, status, ago=age)
    assert await sweep(durable_dsn) == Swept(6, 6, 6, 1, 1, 1, 0)
    assert ids(db) == kept
    assert (await sweep(durable_dsn, Ages(None, None, None, 50))).deleted == 0
    assert (await sweep(durable_dsn, Ages(1, None, None, 50))).deleted == 1


@pytest.mark.parametrize(
    "columns",
    [
        {"status": "runnable"},
        {"status": "awaiting_signal", "awaits": ["x"]},
        {"status": "awaiting_children"},
        {
            "status": "executing",
            "locked_by": "n",
            "claim_id": "=gen_random_uuid()",
            "lease_expires_at": "=now()",
        },
    ],
    ids=lambda columns: columns["status"],
)
async def test_what_lives_stays(db: psycopg.Connection, durable_dsn: str, columns: dict[str, Any]):
    [number] = insert(db, inserted_at="=now() - interval '9 years'", **columns)
    swept = await sweep(durable_dsn, Ages(1, 1, 1, 1))
    assert (swept.looked, swept.last_old, swept.deleted) == (1, number, 0)


async def test_a_walk_in_batches(db: psycopg.Connection, durable_dsn: str):
    numbers = [ended(db) for _ in range(5)]
    young = [ended(db, ago=10) for _ in range(3)]
    assert await sweep(durable_dsn, limit=2) == Swept(2, numbers[1], numbers[1], 2, 0, 0, 0)
    assert await sweep(durable_dsn, after=numbers[1], limit=4) == Swept(4, young[0], numbers[4], 3, 0, 0, 0)
    assert await sweep(durable_dsn, after=numbers[4]) == Swept(3, young[2], None, 0, 0, 0, 0)
    assert await sweep(durable_dsn, after=young[2]) == Swept(0, None, None, 0, 0, 0, 0)


async def test_a_machine_says_how_long_its_own_are_kept(db: psycopg.Connection, durable_dsn: str):
    db.execute(
        "insert into durable.keeps values ('short', 1, 5), ('long', 1, 5000), ('ever', 1, null), ('long', 2, 5)"
    )
    found = {}
    for machine in ("short", "long", "ever", "m"):
        for status in ("done", "cancelled", "failed"):
            number = ended(db, status, ago=250)
            db.execute("update durable.gen_durable set fsm = %s where id = %s", [machine, number])
            found[number] = (machine, status)
    await sweep(durable_dsn)
    left = {found[number] for number in ids(db)}
    assert left == {
        ("short", "failed"),  # `keep` shortens nothing for failed ones: Retention(failed=) is 300 here
        ("m", "failed"),
        *((machine, status) for machine in ("long", "ever") for status in ("done", "cancelled", "failed")),
    }
    db.execute("update durable.gen_durable set finished_at = now() - interval '1 day'")
    await sweep(durable_dsn)
    assert {found[number][0] for number in ids(db)} == {"ever"}


@pytest.mark.parametrize("seconds", ["NaN", "Infinity", "1e300", "-5"])
async def test_a_hand_in_the_table_of_keeps_breaks_nothing(
    db: psycopg.Connection, durable_dsn: str, seconds: str
):
    db.execute("insert into durable.keeps values ('m', 1, %s)", [seconds])
    ended(db)
    ended(db, "failed")
    assert (await sweep(durable_dsn)).deleted == (2 if seconds == "-5" else 0)


@pytest.mark.parametrize("at", ["infinity", "-infinity"])
async def test_times_that_only_a_hand_writes(db: psycopg.Connection, durable_dsn: str, at: str):
    insert(db, status="done", finished_at=at, inserted_at=at)
    assert (await sweep(durable_dsn)).deleted == (1 if at == "-infinity" else 0)


async def test_an_occupied_key_stays(db: psycopg.Connection, durable_dsn: str):
    ended(db, unique_key=b"free", unique_scope=LIVE)
    held = ended(db, unique_key=b"k", unique_scope=LIVE[:-1] + ",done}")
    assert (await sweep(durable_dsn)).deleted == 1
    assert ids(db) == [held]


async def test_children_stay_while_their_parent_may_read_them(db: psycopg.Connection, durable_dsn: str):
    parents = {
        "waits": insert(db, status="awaiting_children", visit=2)[0],
        "reads": insert(db, visit=2)[0],
        "went on": insert(db, visit=3)[0],
        "failed": ended(db, "failed", ago=10, visit=2),
        "done": ended(db, "done", ago=10, visit=2),
    }
    names = {ended(db, parent_id=number, barrier=2): name for name, number in parents.items()}
    names[ended(db, parent_id=10**9, barrier=2)] = "gone"
    await sweep(durable_dsn)
    assert {names[number] for number in ids(db) if number in names} == {"waits", "reads", "failed"}


async def test_what_a_step_started_stays_while_that_may_run_again(db: psycopg.Connection, durable_dsn: str):
    [parent] = insert(db, visit=9)
    child = ended(db, parent_id=parent, child_uid="=gen_random_uuid()")
    young, _old = (ended(db, ago=ago, child_uid="=gen_random_uuid()") for ago in (119, 121))
    await sweep(durable_dsn, Ages(1, 1, 1, 120))
    assert ids(db) == [parent, child, young]


async def test_a_parent_and_its_children_go_together(db: psycopg.Connection, durable_dsn: str):
    parent = ended(db, "failed", visit=2)
    child = ended(db, "failed", parent_id=parent, barrier=2, visit=2)
    grandchild = ended(db, parent_id=child, barrier=2)
    await sweep(durable_dsn)
    assert ids(db) == [grandchild], "its parent was a child itself: it goes the next time"
    await sweep(durable_dsn)
    assert ids(db) == []


async def test_a_live_child_outlives_its_parent(db: psycopg.Connection, durable_dsn: str):
    parent = ended(db, visit=2)
    [child] = insert(db, parent_id=parent, barrier=2)
    async with connect(durable_dsn) as conn:
        [claim] = await claims(conn)
        await sweep(durable_dsn)
        assert await commit(conn, outcome(claim)) == {child}
    assert rows(db, "id, status") == [(child, "done")]


async def test_signals_history_and_checkpoints_go_with_the_row_and_receipts_stay(
    db: psycopg.Connection, durable_dsn: str
):
    gone, kept = insert(db, 2, journal=2)
    for number in (gone, kept):
        async with connect(durable_dsn, "client") as conn:
            await send_signals(
                conn, SCHEMA, [deliver(number), deliver(number, key="k"), deliver(number, key="l")]
            )
        db.execute("select durable.note(%s, 1, 'started', 's', 's', 1, 0, 0)", [number])
        for thread in (f"run:{number}", f"head of run:{number}"):
            db.execute("insert into durable.checkpoints values (%s, 1, 1, '{}')", [thread])
        db.execute(
            "insert into durable.receipts (command, scope, target) values ('retry', 'instance', %s)",
            [str(number)],
        )
    db.execute("update durable.signals set consumed_at = now() where dedup_key = 'k'")
    db.execute(
        "update durable.gen_durable set status = 'failed', finished_at = now() - interval '1 h' where id = %s",
        [gone],
    )
    assert await sweep(durable_dsn) == Swept(2, kept, None, 0, 0, 1, 1)
    of = "select count(*) from durable.{} where {}"
    assert db.execute(of.format("signals", f"target_id = {gone}")).fetchone() == (0,)
    assert db.execute(of.format("signals", f"target_id = {kept}")).fetchone() == (3,)
    assert db.execute("select instance_id from durable.journal").fetchall() == [(kept,)]
    assert db.execute("select thread from durable.checkpoints order by 1").fetchall() == [
        (f"head of run:{kept}",), (f"run:{kept}",),
    ]  # fmt: skip
    assert db.execute(of.format("receipts", "true")).fetchone() == (2,)


async def test_keep_0_deletes_what_nobody_may_look_for(db: psycopg.Connection, durable_dsn: str):
    columns: list[dict[str, Any]] = [
        {"journal": 2},
        {"parent_id": 10**9},
        {"child_uid": "=gen_random_uuid()"},
        {"unique_key": b"k", "unique_scope": LIVE[:-1] + ",done}"},
    ]
    numbers = [insert(db, **each)[0] for each in columns]
    async with connect(durable_dsn) as conn:
        found = await claims(conn)
        stale = outcome(found[0], deletes=True)
        stale.claim.visit += 1
        assert await commit(conn, stale) == set()
        assert len(ids(db)) == 4
        stale.claim.visit -= 1
        ends = [outcome(claim, deletes=True) for claim in found]
        assert await commit(conn, *ends) == set(numbers)
    assert ids(db) == numbers[1:]
    assert db.execute("select count(*) from durable.journal").fetchone() == (0,)


def spec(name: str, keep: Any) -> MachineSpec:
    class Fake:
        key = (name, 1)
        version = 1

    fake: Any = Fake()
    fake.name, fake.keep = name, keep
    return fake  # type: ignore[no-any-return]


async def test_what_machines_say_is_written_once_and_forgotten_when_they_say_it_no_more(
    db: psycopg.Connection, durable_dsn: str
):
    query = "select fsm, seconds, xmin::text from durable.keeps order by fsm"
    async with connect(durable_dsn, "client") as conn:
        await write_keeps(conn, SCHEMA, [spec("a", 5.0), spec("b", None), spec("c", "default")])
        first = db.execute(query).fetchall()
        assert [row[:2] for row in first] == [("a", 5.0), ("b", None)]
        await write_keeps(conn, SCHEMA, [spec("b", None), spec("a", 5.0)])
        assert db.execute(query).fetchall() == first, "nothing is written"
        await write_keeps(conn, SCHEMA, [spec("a", "default"), spec("d", 0.0)])
        assert [row[:2] for row in db.execute(query).fetchall()] == [("b", None), ("d", 0.0)]
        assert await read_keeps(conn, SCHEMA) == [0.0]


@pytest.mark.parametrize("deletes", [False, True])
def test_what_a_statement_reads_depends_on_its_batch(big: psycopg.Connection, *, deletes: bool):
    """By the primary key: the rows that it looks at, once more those that it deletes, and the parents of these."""
    age = -1e9 if deletes else 1e9
    finished = "select min(id) - 1 from durable.gen_durable where status = 'done'"
    [[after]] = big.execute(finished).fetchall()
    found = explain(
        big,
        statement("delete_ended", SCHEMA).sql,
        [after, 500, age, age, age, age, 0.0, True],
        settings=ROLES["client"].settings,
    )
    found.assert_no_seq_scan("gen_durable")
    found.assert_uses("gen_durable_pkey")
    assert any(node.kind == "ModifyTable" and node.rows >= 0 for node in found.nodes)
    # Postgres 14 and 15 touch 12.1 pages per deleted row, 18 fewer than 12; the table has 340,000 rows.
    assert found.buffers < (500 * 13 if deletes else 600), found.text
