"""Arrays that say once what is the same for all rows of a batch: whatever is mixed, each row gets its own."""

from __future__ import annotations

import itertools
from typing import Any

import attrs
import psycopg
import pytest
from durable_actors._store.arrays import none_for_all, one_for_all
from durable_actors._store.commit import commit_outcomes
from tests.store.kit import SCHEMA, claims, connect, empty, insert, outcome, rows

DONE: dict[str, Any] = {"status": "done", "result": b"7"}
FAILED: dict[str, Any] = {"status": "failed", "last_error": ""}
AHEAD: dict[str, Any] = {
    "status": "runnable",
    "keep_claim": True,
    "advance": 1,
    "step": "b",
    "state": b'{"n": 1}',
}
AGAIN: dict[str, Any] = {"status": "runnable", "attempt": 2, "delay": 60.0, "last_error": "oh"}
MOVED: dict[str, Any] = {"status": "runnable", "advance": 1, "rekey": True, "partition_key": "new"}
FREED: dict[str, Any] = {"status": "runnable", "advance": 1, "rekey": True}
KINDS = [DONE, FAILED, AHEAD, AGAIN, MOVED, FREED]
COLUMNS = (
    "status::text, step, state, result, attempt, visit, rev, last_error, partition_key, locked_by,"
    " round(extract(epoch from eligible_at - updated_at) / 10), finished_at is null"
)


def test_what_is_sent():
    assert one_for_all([1, 1, 1]) == [1]
    assert one_for_all([1, 2, 1]) == [1, 2, 1]
    assert none_for_all([None, None]) == []
    assert none_for_all([None, ""]) == [None, ""]


@pytest.mark.parametrize(
    "kinds", [*itertools.combinations(range(len(KINDS)), 1), *itertools.permutations(range(6), 2)]
)
async def test_a_batch_writes_what_its_outcomes_write_one_by_one(
    db: psycopg.Connection, durable_dsn: str, kinds: tuple[int, ...]
):
    chosen = [KINDS[number] for number in kinds] * 2
    found: list[list[tuple[Any, ...]]] = []
    async with connect(durable_dsn, "commit") as conn:
        for size in (len(chosen), 1):
            empty(db)
            insert(db, len(chosen), partition_key="='k ' || n")
            outcomes = [
                outcome(claim, **kind) for claim, kind in zip(await claims(conn), chosen, strict=True)
            ]
            for first in range(0, len(outcomes), size):
                batch = outcomes[first : first + size]
                assert len((await commit_outcomes(conn, SCHEMA, batch, accept_late=False)).committed) == len(
                    batch
                )
            found.append(rows(db, COLUMNS))
    assert found[0] == found[1]


async def test_visits_that_differ_fence_their_own_rows(db: psycopg.Connection, durable_dsn: str):
    insert(db, 3)
    async with connect(durable_dsn, "commit") as conn:
        first, second, third = await claims(conn)
        stale = attrs.evolve(second, visit=2)
        batch = [outcome(first), outcome(stale), outcome(third)]
        assert set((await commit_outcomes(conn, SCHEMA, batch, accept_late=False)).committed) == {
            first.id,
            third.id,
        }
        assert (await commit_outcomes(conn, SCHEMA, [outcome(stale)], accept_late=False)).committed == {}
    assert rows(db, "status::text") == [("done",), ("executing",), ("done",)]
