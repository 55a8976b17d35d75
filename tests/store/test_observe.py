"""Looking from outside: what the statements read, and at what cost."""

from __future__ import annotations

from collections.abc import Iterator

import psycopg
import pytest
from durable_actors._postgres.driver.connection import PgConn
from durable_actors._store.observe import NEWEST, Filter, list_instances, observe_instance
from durable_actors._store.rates import read_rates, read_recent
from durable_actors._store.sql import statement
from durable_actors.testing.database import DatabaseServer
from tests.support.commands import retry_instance
from tests.support.sql import explain

ROWS = 30_000
FILL = """
insert into durable.gen_durable (fsm, step, status, finished_at, queue, unique_key, parent_id, state)
select 'm', 's', case when n % 100 = 0 then 'failed' else 'done' end::durable.durable_status, now(), 'q' || n % 7,
       convert_to('k' || n / 2, 'UTF8'), case when n % 1000 = 1 then 1 end, jsonb_build_object('n', n)
  from generate_series(1, 30000) n
"""


def fill(dsn: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute(FILL)
        conn.execute(
            "insert into durable.gen_durable (fsm, step, queue) select 'm', 's', 'live' from generate_series(1, 50)"
        )
        conn.execute("vacuum analyze durable.gen_durable")


@pytest.fixture
def full_dsn(durable_server: DatabaseServer, durable_template: str) -> Iterator[str]:
    """A copy of a full table: it takes 20 ms of CPU, and filling it 200."""
    template = durable_server.template(fill, kind="_observed", base=durable_template)
    with durable_server.database(template=template) as dsn:
        yield dsn


@pytest.fixture
def filled(full_dsn: str) -> Iterator[psycopg.Connection]:
    """A session that has read the catalog, as an engine's has: those pages are not what is measured."""
    with psycopg.connect(full_dsn, autocommit=True) as conn:
        conn.execute("begin; insert into durable.gen_durable (fsm, step) values ('m', 's'); rollback")
        yield conn


def plan_of(conn: psycopg.Connection, name: str, *arguments: object, generic: bool = True):
    return explain(conn, statement(name, "durable").sql, arguments, generic=generic)  # type: ignore[arg-type]


def test_a_listing_reads_its_window_and_no_more(filled: psycopg.Connection):
    plan = plan_of(filled, "list_instances", NEWEST, 500, 20, "failed", *[None] * 8)
    plan.assert_no_seq_scan()
    plan.assert_uses("gen_durable_pkey")
    assert plan.buffers < 60


def test_a_key_has_its_index(filled: psycopg.Connection):
    plan = plan_of(filled, "list_by_key", b"k7", NEWEST, 20, *[None] * 9)
    plan.assert_no_seq_scan()
    plan.assert_uses("gen_durable_key_history")
    assert plan.buffers < 12


def test_the_view_of_one_instance_reads_what_is_its_own(filled: psycopg.Connection):
    plan = plan_of(filled, "observe_instances", [1], False, 3)
    plan.assert_no_seq_scan("gen_durable")
    plan.assert_uses("gen_durable_pkey", "gen_durable_parent")
    assert plan.buffers < 80


def test_queues_leave_finished_rows_alone(filled: psycopg.Connection):
    plan = plan_of(filled, "read_queues")
    plan.assert_no_seq_scan("gen_durable")
    assert plan.buffers < 60


def test_nodes_and_retry_have_their_indexes(filled: psycopg.Connection):
    plan_of(filled, "read_nodes", "durable").assert_no_seq_scan("gen_durable")
    plan = plan_of(filled, "retry_instance", 100, None, None, "key", "{}")
    plan.assert_no_seq_scan()
    assert plan.buffers < 100


@pytest.mark.parametrize(
    ("key", "parent", "index"),
    [
        (None, None, "gen_durable_pkey"),
        (b"k", None, "gen_durable_key_history"),
        (None, 1, "gen_durable_parent"),
    ],
)
def test_a_bulk_reads_its_window(
    filled: psycopg.Connection, key: bytes | None, parent: int | None, index: str
):
    given = [["failed"], None, None, None, None, None, None, key, parent, None, None, None, None]
    plan = plan_of(filled, "match_instances", 0, 10**9, 500, 100, *given)
    plan.assert_no_seq_scan("gen_durable")
    plan.assert_uses(index)
    assert plan.buffers < 400


def test_the_commands_find_their_row(filled: psycopg.Connection):
    for name, *further in (("hasten_instance",), ("rerun_instance", "s", "{}", None, False, None, False)):
        plan = plan_of(filled, name, 100, None, None, "key", "{}", *further)
        plan.assert_no_seq_scan()
        assert plan.buffers < 120


async def test_a_rare_status_is_found_across_windows(filled: psycopg.Connection, full_dsn: str):
    conn = await PgConn.open(full_dsn)
    try:
        found = await list_instances(conn, "durable", Filter(status="failed"), limit=150)
        assert [each.id for each in found.instances] == [ROWS - 100 * n for n in range(150)]
        assert found.looked == 300  # failed rows only: they have an index
        rest = await list_instances(
            conn, "durable", Filter(status="failed"), limit=1000, before=found.before or 0
        )
        assert [each.id for each in rest.instances] == [ROWS - 100 * n for n in range(150, 300)]
        assert rest.before is None
    finally:
        conn.close()


async def test_depth_bounds_a_listing_that_finds_nothing(filled: psycopg.Connection, full_dsn: str):
    conn = await PgConn.open(full_dsn)
    try:
        found = await list_instances(conn, "durable", Filter(machine="no"), limit=5, depth=12_345)
        assert (found.instances, found.looked) == ((), 12_345)
        assert found.before is not None
        everything = await list_instances(conn, "durable", Filter(machine="no"), limit=5)
        assert (everything.before, everything.looked) == (None, ROWS + 50)
    finally:
        conn.close()


async def test_of_one_that_is_not_there(durable_dsn: str):
    conn = await PgConn.open(durable_dsn)
    try:
        assert await observe_instance(conn, "durable", 1) is None
        assert await retry_instance(conn, "durable", 1) is False
        assert (await list_instances(conn, "durable", Filter(), limit=5)).looked == 0
        assert (await read_rates(conn, "durable")).at > 0
        assert await read_recent(conn, "durable") == {}
    finally:
        conn.close()


def test_who_waits_for_a_person_has_an_index(filled: psycopg.Connection):
    """Beside thirty thousand others; `gen_durable_manual` holds them alone."""
    filled.execute(
        "insert into durable.gen_durable (fsm, step, status, awaits, manual)"
        " select 'm', 's', 'awaiting_signal', '{}', jsonb_build_object('kind', 'approval') from generate_series(1, 5)"
    )
    plan = plan_of(filled, "list_waiting", "approval", NEWEST, 20, *[None] * 9)
    plan.assert_no_seq_scan()
    plan.assert_uses("gen_durable_manual")
    assert plan.buffers < 12


def test_the_newest_instances_are_read_from_the_end(filled: psycopg.Connection):
    """Five hundred of thirty thousand."""
    plan = plan_of(filled, "read_recent", 500, 10.0)
    plan.assert_no_seq_scan()
    plan.assert_uses("gen_durable_pkey")
    assert plan.buffers < 60


def test_failures_are_grouped_from_their_index(filled: psycopg.Connection):
    """Three hundred of thirty thousand have failed; a window of a hundred reads a hundred."""
    plan = plan_of(filled, "group_failures", 100, 50)
    plan.assert_no_seq_scan("gen_durable")
    plan.assert_uses("gen_durable_failed")
    assert plan.buffers < 220


def test_a_page_of_receipts_reads_its_window(filled: psycopg.Connection):
    filled.execute(
        "insert into durable.receipts (command, scope, target)"
        " select 'retry', 'instance', n::text from generate_series(1, 5000) n"
    )
    filled.execute("analyze durable.receipts")
    plan = plan_of(filled, "search_receipts", NEWEST, 200, 50, "cancel", None, None, None)
    plan.assert_no_seq_scan()
    plan.assert_uses("receipts_pkey")
    assert plan.buffers < 30


def test_what_is_asked_is_read_by_id(filled: psycopg.Connection):
    plan = plan_of(filled, "read_asked", [1, 2, 3], 1000)
    plan.assert_no_seq_scan()
    assert plan.buffers < 20


def test_the_claims_of_a_node_have_their_index(filled: psycopg.Connection):
    plan = plan_of(filled, "list_claims", "nobody", 100)
    plan.assert_no_seq_scan()
    plan.assert_uses("gen_durable_executing")
    assert plan.buffers < 12


@pytest.mark.parametrize("generic", [True, False])
def test_counting_steps_reads_its_caps(filled: psycopg.Connection, generic: bool):
    """Three hundred rows have failed, fifty are ready: everything else is the window."""
    plan = plan_of(filled, "sample_steps", 100, 200, generic=generic)
    plan.assert_no_seq_scan("gen_durable")
    plan.assert_uses(
        "gen_durable_pick", "gen_durable_held", "gen_durable_shelf", "gen_durable_paused", "gen_durable_executing",
        "gen_durable_throttled",
        "gen_durable_deadline", "gen_durable_manual", "gen_durable_failed", "gen_durable_pkey",
    )  # fmt: skip
    assert plan.buffers < 250
