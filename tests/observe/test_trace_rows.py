"""The trace context of a row, as both picks return it: beside journal and links, whatever a hand wrote."""

from __future__ import annotations

import itertools
import json

import psycopg
import pytest
import trio
from durable_actors._store.claim import PickFrom, pick_instances
from tests.engine.kit import Db, make_node

TRACE = "00-" + "a" * 32 + "-" + "b" * 16 + "-01 1700000000 k=v"
METAS = [
    (None, None),
    ({"mine": 1}, None),
    ({"durable:trace": TRACE}, TRACE),
    ({"durable:trace": TRACE, "mine": 1}, TRACE),
    ({"durable:trace": None}, None),
    ({"durable:trace": 5}, "5"),
    ({"durable:trace": {"a": [1]}}, '{"a": [1]}'),
    ({"durable:trace": "4@2 x\x1f1@1"}, "4@2 x\x1f1@1"),
    ({"durable:trace": "x" * 5000}, "x" * 1000),
    (["durable:trace"], None),
]
"""What is stored, and which trace that is."""
LEVELS = [(0, None), (1, None), (2, 2), (0, 2), (4, None)]
"""Journal level and part in a graph."""


@pytest.mark.parametrize("by_id", [True, False], ids=["by id", "from the queue"])
async def test_a_claim_has_its_trace(durable_dsn: str, by_id: bool):
    expected = {}
    with psycopg.connect(durable_dsn, autocommit=True) as conn:
        db = Db(conn, durable_dsn)
        for (meta, trace), (journal, links) in itertools.product(METAS, LEVELS):
            document = None if meta is None else json.dumps(meta)
            expected[db.insert(meta=document, journal=journal, links=links)] = (trace, journal, links or 0)
    async with make_node(durable_dsn) as node, node.pool.acquire(node.lane("claim")) as conn:
        begin = PickFrom([0], ["-infinity"], [0], by_id=[*expected] if by_id else ())
        known, now = node.catalog.array, trio.current_time()
        picked = await pick_instances(
            conn, node.owner, queue="default", limit=100, known=known, begin=begin, now=now
        )
    found = {each.id: (each.recorded.trace, each.journal, each.recorded.links) for each in picked.claims}
    assert found == expected
    for each in picked.claims:
        assert (each.recorded.lease_until is not None) == (each.journal >= 3)
        assert each.due_at is not None
