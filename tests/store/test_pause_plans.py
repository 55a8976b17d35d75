"""What pauses cost: a pick that is not concerned, nothing worth naming; a pick of a paused queue, hardly anything."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import attrs
import psycopg
import pytest
from durable_actors._store.claim import PickFrom, promote_siblings, read_queue
from durable_actors._store.runner import claim_next
from tests.store.kit import HEAD, SCHEMA, address, pick
from tests.store.test_plans import BATCH, measure, measure_pick, sent

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.timeout(180)  # the first one fills the table

BY_ID = PickFrom((), (), (), by_id=[1])


@contextmanager
def paused(db: psycopg.Connection, queue: str, machine: str = "") -> Iterator[None]:
    db.execute("insert into durable.pauses (queue, fsm) values (%s, %s)", [queue, machine])
    try:
        yield
    finally:
        db.execute("truncate durable.pauses")  # a deleted row would be a page more for the next test


@pytest.mark.parametrize("begin", [HEAD, BY_ID], ids=["pick", "by id"])
def test_the_look_at_the_pauses_costs_a_pick_two_pages_at_most(big: psycopg.Connection, begin: PickFrom):
    """Compared with the same statement without it."""
    call, params = sent(pick, queue="small", limit=BATCH, begin=begin)
    look = '"durable".pauses p where p.queue = $1::text and "durable".lasts(p.until)'
    assert call.sql.count(look) == 1
    without = attrs.evolve(call, sql=call.sql.replace(look, "(select null::text as fsm where false) p"))
    found = min((measure(big, (call, params)) for _ in range(3)), key=lambda plan: plan.buffers)
    before = min(measure(big, (without, params)).buffers for _ in range(3))
    assert found.buffers - before <= 2, found.text
    found.assert_no_seq_scan()
    found.assert_uses("pauses_pkey")


def test_a_paused_queue_with_a_backlog_costs_a_few_pages(big: psycopg.Connection):
    read = sent(read_queue, SCHEMA, "large")
    runner = sent(claim_next, SCHEMA, queue="large", steps=["m/s"], owner="test", lease=60.0)
    idle, asked = measure(big, sent(read_queue, SCHEMA, "nobody's")), measure(big, runner)
    with paused(big, "large"):
        found = measure(big, sent(pick, queue="large", limit=BATCH))
        assert found.nodes[0].rows == 0
        assert found.buffers <= 12, found.text
        assert measure(big, read).buffers <= idle.buffers + 4
        answer = measure(big, runner)
        assert answer.nodes[0].rows == 0
        assert answer.buffers <= asked.buffers
        by_id = measure(big, sent(pick, queue="large", begin=PickFrom((), (), (), by_id=[150_000])))
        assert by_id.nodes[0].rows == 0


def test_a_paused_machine_slows_nobody_else(big: psycopg.Connection):
    """Its rows leave the index of the pick, a window at a time, as those of an unknown machine do."""
    before = measure_pick(big, "large").buffers
    with paused(big, "large", "another"):
        beside = measure_pick(big, "large").buffers
    # Pages that were written before are read differently from one pick to the next: up to a sixth more.
    normal = max(before, measure_pick(big, "large").buffers)
    assert beside <= 1.2 * normal
    begin = attrs.evolve(HEAD, shelved=[address("m/1")])
    with paused(big, "large", "m"):
        found = measure(big, sent(pick, queue="large", limit=BATCH, begin=begin))
        assert found.nodes[0].rows == BATCH, "all of them shelved"
        assert found.buffers <= 2 * normal, found.text


def test_a_promotion_looks_at_the_pauses_only_for_rows_that_it_finds(big: psycopg.Connection):
    none = measure(big, sent(promote_siblings, SCHEMA, ["nobody's"]))
    assert none.buffers <= 12, none.text
