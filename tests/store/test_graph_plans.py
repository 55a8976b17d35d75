"""What graphs cost: statements per flush, pages per tell at any size of the tables, and nothing where there is none."""

from __future__ import annotations

from typing import TYPE_CHECKING

import psycopg
import pytest
from durable_actors._postgres.driver import encode
from durable_actors._store.children import Spawn, schedule_children
from durable_actors._store.commit import commit_outcomes
from durable_actors._store.graph import read_dependencies, telling
from durable_actors._store.links import Graph
from durable_actors._store.rows import Transition
from durable_actors._store.sql import statement
from tests.store.graph_kit import ending, family
from tests.store.kit import SCHEMA, claims, connect, insert, plan
from tests.store.test_plans import measure, sent
from tests.support.sql import count_statements

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.timeout(180)  # the first one fills the table

FAN = 20


@pytest.fixture
def wide(big: psycopg.Connection) -> Iterator[tuple[psycopg.Connection, list[int]]]:
    """In the big table: an ended instance with dependents, among 20,000 rows of `graph` of other instances."""
    ids = insert(big, FAN + 1, queue="graph", links=3, hold=5)
    first, *rest = ids
    big.execute(
        "update durable.gen_durable set status = 'done', finished_at = now(), hold = 0, links = 2 where id = %s",
        [first],
    )
    big.execute("insert into durable.graph (id, feeds, owed) values (%s, %s, %s)", [first, rest, rest])
    big.execute(
        "insert into durable.graph (id, needs, waits) select unnest(%s::bigint[]), %s, 1", [rest, [first]]
    )
    big.execute(
        "insert into durable.graph (id, needs, owed, waits)"
        " select -n, array[-n - 1], array[-n + 1], 1 from generate_series(1, 20000) n"
    )
    big.execute("analyze durable.graph")
    yield big, ids
    big.execute("delete from durable.gen_durable where queue = 'graph'")
    big.execute("truncate durable.graph, durable.untold")


def test_a_tell_is_driven_by_primary_keys(wide: tuple[psycopg.Connection, list[int]]):
    db, ids = wide
    found = measure(db, telling(SCHEMA, ids[:1])["tell_dependents"])
    found.assert_no_seq_scan()
    found.assert_uses("graph_pkey")
    found.assert_uses("gen_durable_pkey")
    assert found.nodes[0].rows == FAN
    assert found.buffers <= FAN * 60, found.text
    locked = measure(db, (statement("lock_owed", SCHEMA), [encode.int_array(ids[:1])]))
    locked.assert_no_seq_scan()
    assert locked.buffers <= 12, locked.text


def test_a_read_of_dependencies_is_driven_by_primary_keys(wide: tuple[psycopg.Connection, list[int]]):
    db, ids = wide
    found = measure(db, sent(read_dependencies, SCHEMA, ids[1:]))
    found.assert_no_seq_scan()
    assert found.nodes[0].rows == FAN + 1, "what they have in common is read once"
    assert found.buffers <= FAN * 8, found.text


async def test_a_flush_in_a_graph_is_a_constant_number_of_statements(
    db: psycopg.Connection, durable_dsn: str
):
    """A word that they are told, commit, lock, tell, join; as many for nine ends as for one."""
    edges = {chr(97 + index): "" for index in range(10)} | {"z": "abcdefghij"}
    async with connect(durable_dsn) as conn:
        for count in (1, 9):
            all_of = await family(db, conn, edges)
            found = [claim for key, claim in (await all_of.claim()).items() if key in "abcdefghij"[:count]]
            with count_statements(durable_dsn) as counted:
                await commit_outcomes(
                    conn, SCHEMA, [ending(each, "done") for each in found], accept_late=True
                )
            assert counted.total == 5, str(counted)
            assert counted.calls("untold") == 0, "what is told in its own transaction is not noted"
            assert counted.calls("with ended as materialized") == 2, "one tell, one join"
            db.execute("truncate durable.gen_durable cascade")


async def test_children_without_a_graph_cost_what_they_did(db: psycopg.Connection, durable_dsn: str):
    async with connect(durable_dsn) as conn:
        insert(db)
        [claim] = await claims(conn)
        after = Transition(claim, "awaiting_children", claim.step, attempt=0, advance=1)
        with count_statements(durable_dsn) as counted:
            await schedule_children(
                conn, SCHEMA, after, Spawn([plan()] * 3, "then", None, False, None), accept_late=True
            )
        assert counted.total == 5, str(counted)
        assert counted.calls("graph") == 0
        found = await claims(conn)
        assert {each.recorded.links for each in found} == {0}
        with count_statements(durable_dsn) as counted:
            await commit_outcomes(conn, SCHEMA, [ending(each, "done") for each in found], accept_late=True)
        assert (counted.total, counted.calls("graph")) == (2, 0), str(counted)


async def test_a_graph_of_many_is_spawned_in_few_statements(db: psycopg.Connection, durable_dsn: str):
    """A small version of 10,000 children with 50,000 edges."""
    count = 1200
    needs = [tuple(range(max(0, index - 5), index)) for index in range(count)]
    graph = Graph([f"k{index}" for index in range(count)], needs, [False] * count)
    async with connect(durable_dsn) as conn:
        insert(db)
        [claim] = await claims(conn)
        after = Transition(claim, "awaiting_children", claim.step, attempt=0, advance=1)
        with count_statements(durable_dsn) as counted:
            await schedule_children(
                conn,
                SCHEMA,
                after,
                Spawn([plan()] * count, "then", None, False, None, graph=graph),
                accept_late=True,
            )
        assert counted.total == 6, str(counted)
    [(rows, edges)] = db.execute("select count(*), sum(cardinality(needs)) from durable.graph").fetchall()
    assert (rows, edges) == (count, sum(map(len, needs)))
