"""Long histories of instances that live on: snapshots, what lies before them goes, and what readers see of it."""

from __future__ import annotations

from typing import Any

import pytest
import trio
from durable_actors._postgres.driver.connection import PgConn
from durable_actors._store.retention import find_long_journals, snapshot_journal, truncate_journal
from tests.engine.kit import Db, running
from tests.engine.recorded import define, finish, plans
from tests.store.kit import SCHEMA, connect

MOVES = 6


@pytest.fixture
def walk(registry: Any) -> Any:
    return define()


async def truncate(conn: PgConn, moves: int = MOVES) -> int:
    """A round of a janitor, record by record, so that others see every state in between."""
    found = await find_long_journals(conn, SCHEMA, moves=moves, after=0, limit=10_000)
    for number in found.grown:
        await snapshot_journal(conn, SCHEMA, number, moves=moves)
    count = 0
    for number in {*found.grown, *found.hides}:
        while await truncate_journal(conn, SCHEMA, number, moves=moves, most=1):
            count += 1
    return count


@pytest.mark.parametrize("level", ["outcomes", "claims", "full"])
async def test_histories_that_are_truncated_while_they_grow(db: Db, walk: Any, level: Any):
    """At any time `verify` finds nothing, and every history can be read; in the end each can be rebuilt."""
    gone = 0
    async with running(db.dsn, journal=level) as run, connect(db.dsn, "client") as conn:
        client = run.engine.client
        some = [{"state": each} for each in plans(5, 30, "nnnkkrreeatccc")]
        ids = [number for number in await client.insert_many(walk, some) if number is not None]
        with trio.fail_after(60):
            async with trio.open_nursery() as nursery:

                async def janitor() -> None:
                    nonlocal gone
                    while True:
                        gone += await truncate(conn)

                async def reader() -> None:
                    while True:
                        assert (await client.verify()).problems == []
                        for number in ids:
                            [first, *_] = [each async for each in client.iter_history(number)]
                            assert first.kind == "started" or first.data["retention"]

                nursery.start_soon(janitor)
                nursery.start_soon(reader)
                await finish(run, ids)
                nursery.cancel_scope.cancel()
        assert gone, "nothing was truncated meanwhile"
        assert (await client.verify()).problems == []
        if level == "full":
            for number in ids:
                before = await client.inspect(number)
                db.execute("delete from durable.gen_durable where id = %s", number)
                assert await client.rebuild(number) == number
                after = await client.inspect(number)
                assert (after.status, after.state, after.result) == (
                    before.status,
                    before.state,
                    before.result,
                )
