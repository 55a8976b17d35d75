"""How the server looks up the rows of a key: by index scans, which mark the entries of ended rows as dead."""

from __future__ import annotations

import re
from typing import Any

import psycopg
import pytest
from durable_actors._engine.lanes import client_lanes, lanes
from durable_actors._store.sql import statement
from tests.store.kit import PLANS, address, insert

WATCH = {
    "auto_explain.log_min_duration": "0",
    "auto_explain.log_nested_statements": "on",
    "auto_explain.log_level": "notice",
    "client_min_messages": "notice",
}
JUDGE = """
select * from durable.judge_siblings('durable', %s, '{}', %s::text[], %s::smallint[], %s::timestamptz[], %s::bigint[])
"""


@pytest.mark.parametrize("bitmaps", [True, False])
def test_a_pick_judges_keys_by_index_scans(db: psycopg.Connection[Any], *, bitmaps: bool):
    """A hundred keys with a hundred rows each. With bitmaps it would be otherwise: then this test shows nothing.

    But before Postgres 18 the index is taken either way.
    """
    insert(db, 10_000, partition_key="='key ' || n %% 100")
    db.execute("vacuum analyze durable.gen_durable")
    db.execute("load 'auto_explain'")
    for name, value in {**PLANS, **WATCH, **({"enable_bitmapscan": "on"} if bitmaps else {})}.items():
        db.execute("select set_config(%s, %s, false)", [name, value])
    row = "partition_key, priority, eligible_at, id"
    some = f"select {row} from durable.gen_durable order by partition_key, id desc limit 1"
    first = db.execute(some).fetchall()  # type: ignore[call-overload]
    said: list[str] = []
    db.add_notice_handler(lambda notice: said.append(notice.message_primary or ""))
    db.execute(JUDGE, [[address("m/1")], *map(list, zip(*first, strict=True))])
    plans = [text for text in said if "gen_durable_key" in text]
    assert plans
    otherwise = bitmaps and db.info.server_version >= 180000
    assert otherwise == any("Bitmap" in text for text in plans)
    assert otherwise == any("Index Scan using gen_durable_key on" not in text for text in plans)


def test_a_commit_excludes_by_hashes(db: psycopg.Connection[Any]):
    """What a group of a thousand compares one by one grows with its square."""
    for name, value in PLANS.items():
        db.execute("select set_config(%s, %s, false)", [name, value])
    text = statement("hand_siblings", "durable").sql
    db.execute("set plan_cache_mode = force_generic_plan")
    db.execute(f"prepare handing as {text}".encode())
    nulls = ", ".join(["null"] * max(map(int, re.findall(r"\$(\d+)", text))))
    plan = "\n".join(row[0] for row in db.execute(f"explain (verbose) execute handing({nulls})".encode()))
    assert len(re.findall(r"hashed SubPlan", plan)) >= 4  # known steps, the group's rows, taken keys
    assert "<> ALL ((InitPlan" not in plan
    assert "<> ALL ($2)" not in plan


def test_the_lanes_that_claim_have_no_bitmap_scans():
    roles = lanes(6, session_dsn=None, keepalive=60.0)
    own = client_lanes(4, session_dsn=None, keepalive=60.0)
    for lane in (roles["claim"], roles["commit"], own["claim"], own["commit"]):
        assert lane.settings["enable_bitmapscan"] == "off"
    for lane in (roles["client"], own["client"], lanes(3, session_dsn=None, keepalive=60.0)["claim"]):
        assert "enable_bitmapscan" not in lane.settings, "a listing by tags needs one"
