"""`insert_many` holds all but the first new row of a key: behind one that a pick cannot tell from them."""

from __future__ import annotations

import psycopg
import pytest
from durable_actors._postgres.driver.connection import PgConn
from durable_actors._store.commit import commit_outcomes
from durable_actors._store.holds import HELD
from durable_actors._store.insert import insert_call, insert_instances
from durable_actors._store.rows import Claim
from tests.store.kit import SCHEMA, claims, connect, insert, outcome, plan, rows


async def test_rows_of_one_insert_are_held_behind_the_first_of_their_key(
    db: psycopg.Connection, durable_dsn: str
):
    plans = [plan(partition_key=key) for key in ("a", None, "a", "b", "a", None)]
    async with connect(durable_dsn, "client") as conn:
        await insert_instances(conn, SCHEMA, plans)
    assert rows(db, "partition_key, hold") == [
        ("a", 0), (None, 0), ("a", HELD), ("b", 0), ("a", HELD), (None, 0)
    ]  # fmt: skip


APART: dict[str, dict[str, object]] = {
    "its queue": {"queue": "q"},
    "its machine": {"machine": "n"},
    "its version": {"version": 2},
    "its step": {"step": "t"},
    "its priority": {"priority": 1},
    "it is not due": {"delay": 60.0},
    "its key": {"partition_key": "l"},
}


@pytest.mark.parametrize("why", APART)
@pytest.mark.parametrize("first", [True, False])
async def test_nothing_is_held_behind_a_row_that_a_node_may_pass_by(
    db: psycopg.Connection, durable_dsn: str, why: str, *, first: bool
):
    two = [plan(**({"partition_key": "k"} | APART[why])), plan(partition_key="k")]
    async with connect(durable_dsn, "client") as conn:
        await insert_instances(conn, SCHEMA, two if first else two[::-1])
    assert rows(db, "hold") == [(0,), (0,)]


def test_rows_without_a_key_are_inserted_as_before():
    for plans in (
        [plan()] * 3,
        [plan(partition_key="k")],
        [plan(partition_key="k"), plan(partition_key="l")],
    ):
        assert insert_call(plans, SCHEMA)[0].name == "insert_plain"
    assert insert_call([plan(partition_key="k")] * 2, SCHEMA)[0].name == "insert_held"
    # One of them may not be inserted: its unique key is occupied.
    unique = plan(partition_key="k", unique_key=b"u", unique_scope=("runnable",))
    assert insert_call([unique, plan(partition_key="k")], SCHEMA)[0].name == "insert_instances"


async def end(conn: PgConn, claim: Claim) -> list[int]:
    """Commit its end; return what is on offer because of it."""
    done = await commit_outcomes(conn, SCHEMA, [outcome(claim)], accept_late=True)
    return [each.id for each in done.offered]


async def test_held_rows_run_in_order_although_the_key_was_busy(db: psycopg.Connection, durable_dsn: str):
    """An older row of the key executes, and ends before any pick has seen the first of the new ones."""
    async with connect(durable_dsn) as conn:
        insert(db, partition_key="k")
        [claim] = await claims(conn)
        two, three, four = await insert_instances(conn, SCHEMA, [plan(partition_key="k")] * 3)
        assert await end(conn, claim) == [three], (
            "the first of the held ones; the first of all is on offer already"
        )
        [second] = await claims(conn)
        assert second.id == two
        assert rows(db, "id, hold", "status = 'runnable'") == [(three, HELD), (four, HELD)]
        assert await end(conn, second) == [three]


async def test_held_rows_run_in_order_although_the_key_becomes_free_during_the_insert(
    db: psycopg.Connection, durable_dsn: str
):
    """The outcome that frees the key sees none of them, and promotes none."""
    async with connect(durable_dsn) as conn, connect(durable_dsn, "client") as other:
        insert(db, partition_key="k")
        [claim] = await claims(conn)
        async with other.transaction():
            two, three = await insert_instances(other, SCHEMA, [plan(partition_key="k")] * 2)
            assert await end(conn, claim) == []
        [second] = await claims(conn)
        assert second.id == two
        assert await end(conn, second) == [three]
