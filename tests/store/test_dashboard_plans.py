"""What the dashboard reads, on the big table: the cost depends on caps and pages, never on the table."""

from __future__ import annotations

import psycopg
import pytest
from durable_actors._postgres.driver import encode
from durable_actors._postgres.pool.lock_retry import CLIENT_SETTINGS
from durable_actors._store.bulk import FIRST, Frozen, match_call
from durable_actors._store.observe import NEWEST, Filter, _walk
from durable_actors._store.samples import CAP
from durable_actors._store.sql import statement
from tests.store.kit import SCHEMA
from tests.store.test_plans import measure
from tests.support.sql import Plan

pytestmark = pytest.mark.timeout(180)  # the first one fills the table

PAGE = 50


def sampled(db: psycopg.Connection, cap: int) -> Plan:
    return measure(db, (statement("sample_queues", SCHEMA), [encode.number(cap)]), CLIENT_SETTINGS)


def test_a_sample_costs_its_caps(big: psycopg.Connection):
    """Ten queues with up to 50,000 rows each: what is read is bounded by the caps."""
    plans = {cap: sampled(big, cap) for cap in (1000, CAP)}
    for found in plans.values():
        found.assert_no_seq_scan("gen_durable")
        found.assert_uses("gen_durable_pick")
        assert "gen_durable_pkey" not in found.indexes
    assert plans[1000].buffers < plans[CAP].buffers / 2
    [[rows]] = big.execute("select count(*) from durable.gen_durable").fetchall()
    assert plans[1000].buffers < rows / 10


def test_counts_of_statuses_read_statistics_and_failed_rows(big: psycopg.Connection):
    found = measure(
        big, (statement("estimate_statuses", SCHEMA), [SCHEMA.encode(), b"10001"]), CLIENT_SETTINGS
    )
    found.assert_no_seq_scan("gen_durable")
    found.assert_uses("gen_durable_failed")
    assert found.buffers < 500  # catalogs


@pytest.mark.parametrize(
    ("status", "index"), [("failed", "gen_durable_failed"), ("executing", "gen_durable_executing")]
)
def test_lists_by_status_read_rows_of_that_status(big: psycopg.Connection, status: str, index: str):
    where = Filter(status=status, machine="nobody's")
    params = [encode.number(NEWEST), b"10000", encode.number(PAGE), *where.params()]
    found = measure(big, (_walk(where, SCHEMA), params), CLIENT_SETTINGS)
    found.assert_no_seq_scan("gen_durable")
    found.assert_uses(index)
    assert "gen_durable_pkey" not in found.indexes


def test_a_bulk_on_failed_rows_reads_failed_rows(big: psycopg.Connection):
    frozen = Frozen(statuses=("failed",), most=NEWEST)
    found = measure(big, match_call(SCHEMA, frozen, after=FIRST, limit=100), CLIENT_SETTINGS)
    found.assert_no_seq_scan("gen_durable")
    found.assert_uses("gen_durable_failed")
    assert "gen_durable_pkey" not in found.indexes
