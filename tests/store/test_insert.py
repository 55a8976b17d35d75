"""Batch inserts: ids in input order, the first of equal keys wins, and no two batches wait for each other."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta

import attrs
import psycopg
import pytest
import trio
from durable_actors._store.commit import commit_outcomes
from durable_actors._store.insert import insert_call, insert_instances
from durable_actors.errors import Duplicate
from durable_actors.machine import InsertPlan
from tests.store.kit import SCHEMA, claims, connect, empty, insert, outcome, plan, rows
from tests.support.interleave import wait_backend_blocked

LIVE = ("runnable", "executing", "awaiting_signal", "awaiting_children")


def unique(key: str | bytes, **columns: object) -> InsertPlan:
    key = key if isinstance(key, bytes) else key.encode()
    return plan(**({"unique_key": key, "unique_scope": LIVE} | columns))


@pytest.mark.parametrize("role", ["client", "claim"])
async def test_ids_come_in_input_order_whatever_the_keys(db: psycopg.Connection, durable_dsn: str, role: str):
    """Rows are written in key order, ids are drawn in input order; on every lane's plans."""
    plans = [unique(f"{number * 7 % 100:03}", state=b'{"n": %d}' % number) for number in range(100)]
    async with connect(durable_dsn, role) as conn:
        ids = await insert_instances(conn, SCHEMA, plans)
    assert ids == sorted(number for number in ids if number is not None)
    assert [state["n"] for (state,) in rows(db, "state")] == list(range(100))


@pytest.mark.parametrize("role", ["client", "claim"])
async def test_six_thousand_rows_are_one_statement(db: psycopg.Connection, durable_dsn: str, role: str):
    """HAZARDS H32: arrays, not 70,000 parameters. Linear on every lane, also without hash joins."""
    async with connect(durable_dsn, role) as conn:
        ids = await insert_instances(conn, SCHEMA, [plan(partition_key=f"k {n}") for n in range(6000)])
    assert len(set(ids)) == 6000
    assert db.execute("select count(*) from durable.gen_durable").fetchone() == (6000,)


@pytest.mark.parametrize("alike", [False, True], ids=["each another", "all alike"])
@pytest.mark.parametrize("count", [1, 2, 9])
async def test_rows_without_unique_keys_are_those_of_the_other_statement(
    db: psycopg.Connection, durable_dsn: str, count: int, *, alike: bool
):
    """They go the short way, on which an array says once what is the same for all, and nothing that nobody says."""
    at = datetime.now(UTC) + timedelta(days=1)
    plain = [
        plan(
            machine=f"m {n}", version=n + 1, step=f"s {n}", queue=f"q {n}", state=b'{"n": %d}' % n, priority=n,
            partition_key=f"k {n}" if n % 2 else None, eligible_at=at if n % 3 else None,
            delay=0.0 if n % 3 else n * 60.0,
        )
        for n in ([3] * count if alike else range(count))
    ]  # fmt: skip
    columns = (
        "fsm, fsm_version, step, queue, state, priority, partition_key, parent_id, barrier, unique_scope::text,"
        " date_trunc('minute', eligible_at - inserted_at), status::text, hold"
    )
    keyed = [attrs.evolve(each, unique_key=b"%d" % n) for n, each in enumerate(plain)]
    async with connect(durable_dsn, "client") as conn:
        for parent in (None, 7):
            expected: list[tuple[object, ...]] = []
            for plans in (plain, keyed):
                empty(db)
                call = insert_call(plans, SCHEMA, parent_id=parent, barrier=parent)
                assert call[0].name == ("insert_plain" if plans is plain else "insert_instances")
                ids = [int(row[0] or 0) for row in (await conn.run(*call)).rows]
                assert ids == sorted(ids)
                found = rows(db, columns)
                if plans is plain:
                    expected = found
                assert found == expected
                assert [row[4]["n"] for row in found] == [json.loads(each.state)["n"] for each in plans]


async def test_every_column_arrives(db: psycopg.Connection, durable_dsn: str):
    at = datetime.now(UTC) + timedelta(days=60)
    row = plan(
        machine="a/b",
        version=3,
        step="go",
        queue='q "1"',
        state=json.dumps({"text": 'ü "\\ {}, \n'}).encode(),
        priority=-5,
        partition_key="k,{}",
        unique_key=b"\x00\xff",
        unique_scope=(*LIVE, "done"),
        eligible_at=at,
    )
    async with connect(durable_dsn, "client") as conn:
        await insert_instances(conn, SCHEMA, [row])
    columns = (
        "fsm, fsm_version, step, queue, state, priority, partition_key, unique_key, unique_scope::text, eligible_at,"
        " jsonb_typeof(state), status, visit, attempt, hold"
    )
    scope = "{runnable,executing,awaiting_signal,awaiting_children,done}"
    assert rows(db, columns) == [
        (
            "a/b",
            3,
            "go",
            'q "1"',
            {"text": 'ü "\\ {}, \n'},
            -5,
            "k,{}",
            b"\x00\xff",
            scope,
            at,
            "object",
            "runnable",
            1,
            0,
            0,
        )
    ]


async def test_a_delay_of_months_is_no_overflow(db: psycopg.Connection, durable_dsn: str):
    """HAZARDS H61: seconds as a double, not milliseconds as an int."""
    async with connect(durable_dsn, "client") as conn:
        await insert_instances(conn, SCHEMA, [plan(delay=60 * 86400.0)])
        insert(db, queue="now")
        [claim] = await claims(conn, queue="now")
        late = outcome(
            claim, status="awaiting_signal", awaits=("x",), timeout=90 * 86400.0, delay=90 * 86400.0
        )
        await commit_outcomes(conn, SCHEMA, [late], accept_late=True)
    assert rows(
        db, "(eligible_at > now() + interval '59 days'), (await_deadline > now() + interval '89 days')"
    ) == [
        (True, None),
        (True, True),
    ]


async def test_the_first_of_equal_keys_wins(db: psycopg.Connection, durable_dsn: str):
    plans = [
        unique("b", state=b'{"n": 1}'),
        unique("a", state=b'{"n": 2}'),
        unique("b", state=b'{"n": 3}'),
        plan(),
        unique("a", state=b'{"n": 4}', on_duplicate="return"),
    ]
    async with connect(durable_dsn, "client") as conn:
        first, second, third, fourth, fifth = await insert_instances(conn, SCHEMA, plans)
    assert third is None
    assert fifth == second, "the existing id, although the statement's snapshot does not see it"
    assert [row for (row,) in rows(db, "state->'n'", "unique_key is not null")] == [1, 2]
    assert [row for (row,) in rows(db, "id")] == [first, second, fourth]


async def test_an_occupied_key(db: psycopg.Connection, durable_dsn: str):
    async with connect(durable_dsn, "client") as conn:
        [first] = await insert_instances(conn, SCHEMA, [unique("k")])
        assert await insert_instances(conn, SCHEMA, [unique("k")]) == [None]
        assert await insert_instances(conn, SCHEMA, [unique("k", on_duplicate="return")]) == [first]
        with pytest.raises(Duplicate) as caught:
            await insert_instances(conn, SCHEMA, [plan(), unique("k", on_duplicate="raise")])
        assert (caught.value.existing_id, caught.value.key) == (first, "k")
        assert len(rows(db, "id")) == 2, "the others of the batch are inserted"


async def test_leaving_the_scope_frees_the_key(db: psycopg.Connection, durable_dsn: str):
    async with connect(durable_dsn, "client") as conn:
        await insert_instances(conn, SCHEMA, [unique("ends"), unique("stays", unique_scope=(*LIVE, "done"))])
        found = await claims(conn)
        assert await insert_instances(conn, SCHEMA, [unique("ends"), unique("stays")]) == [None, None], (
            "executing"
        )
        await commit_outcomes(conn, SCHEMA, [outcome(claim) for claim in found], accept_late=True)
        ends, stays = await insert_instances(conn, SCHEMA, [unique("ends"), unique("stays")])
        assert ends is not None
        assert stays is None


@pytest.mark.parametrize(
    "scope", [("runnable",), ("done",), ("runnable", "executing", "awaiting_signal", "done")]
)
async def test_a_scope_that_a_row_could_enter_again_is_refused(durable_dsn: str, scope: tuple[str, ...]):
    """A row that leaves and enters it would make a pick or a reap fail for a whole batch."""
    async with connect(durable_dsn, "client") as conn:
        with pytest.raises(psycopg.errors.CheckViolation):
            await insert_instances(conn, SCHEMA, [unique("k", unique_scope=scope)])


async def test_batches_with_the_same_new_keys_in_reversed_order_do_not_deadlock(
    db: psycopg.Connection, durable_dsn: str
):
    """HAZARDS H28: each would wait for a key that the other has just written. Written in key order, one waits."""
    rounds, size = 40, 40

    async def insert_all(step: int, won: list[int]) -> None:
        async with connect(durable_dsn, "client") as conn:
            for number in range(rounds):
                plans = [unique(f"{number} {key}") for key in range(size)][::step]
                ids = await insert_instances(conn, SCHEMA, plans)
                won[0] += sum(each is not None for each in ids)

    up, down = [0], [0]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(insert_all, 1, up)
        nursery.start_soon(insert_all, -1, down)
    assert up[0] + down[0] == rounds * size
    assert db.execute(
        "select deadlocks from pg_stat_database where datname = current_database()"
    ).fetchone() == (0,)


async def test_a_batch_waits_for_the_key_of_an_open_transaction_and_decides_then(
    db: psycopg.Connection, durable_dsn: str
):
    """The interleaving that would deadlock: A has the first key and wants the second, B comes from the other end."""
    async with connect(durable_dsn, "client") as a, connect(durable_dsn, "client") as b:
        ids: list[int | None] = []
        # The lane gives up after 100 ms and tries again; here it shall wait.
        await b.script("set lock_timeout = 0")

        async def insert_backwards() -> None:
            ids.extend(await insert_instances(b, SCHEMA, [unique("2"), unique("1")]))

        async with trio.open_nursery() as nursery, a.transaction():
            [first] = await insert_instances(a, SCHEMA, [unique("1")])
            nursery.start_soon(insert_backwards)
            await wait_backend_blocked(durable_dsn, b.pid, by=a.pid)
            [second] = await insert_instances(a, SCHEMA, [unique("2")])
        assert ids == [None, None]
        assert [number for (number,) in rows(db, "id")] == [first, second]
