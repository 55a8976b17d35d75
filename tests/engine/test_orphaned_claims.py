"""A pick whose reply is lost after its commit: its rows are released at once, not when their lease expires."""

from __future__ import annotations

import sys
from typing import Any, cast

import durable_actors as da
import pytest
import trio
from durable_actors._engine.claiming import feeder
from durable_actors._engine.committing import releases
from durable_actors._postgres.driver.connection import PgConn
from durable_actors._postgres.driver.statement import Params, Result, Statement
from durable_actors._store.lease import release_orphans
from durable_actors.engine import open_engine
from durable_actors.errors import CommitUnknown
from tests.engine.kit import Db, make_node, pick
from tests.support.faults import open_proxy


@pytest.mark.parametrize("key", [None, "k"])
async def test_the_rows_of_a_lost_answer_run_soon_and_once(db: Db, registry: object, key: str | None):
    runs: list[int] = []

    class Once(da.Machine[dict[str, Any]], queue="once", name="test.Once"):
        @da.step(initial=True)
        async def start(self, ctx: da.Context[dict[str, Any]]) -> da.Outcome:
            runs.append(ctx.id)
            return da.Done(ctx.attempt)

    async with open_proxy(db.dsn) as proxy:
        options: dict[str, Any] = {"dsn": proxy.dsn, "queues": {"once": 5}, "poll_interval": 60}
        async with open_engine(**options, machines=[Once]) as engine:
            number = db.insert(queue="once", fsm="test.Once", step="start", partition_key=key)
            proxy.lose_reply(after=b"pick_instances")
            engine._node.notify("once")
            await proxy.wait_lost()
            with trio.fail_after(10):  # the lease is a minute
                assert await da.result(number) == 0
    assert runs == [number]


async def test_only_unknown_claims_of_this_owner_and_queue_go_back(db: Db):
    for queue in ("default", "default", "other"):
        db.insert(queue=queue)
    async with make_node(db.dsn) as node, make_node(db.dsn) as neighbour:
        [known] = await pick(node, limit=1)
        [stray] = await pick(node, limit=1)
        await pick(node, queue="other")
        theirs = db.insert()
        await pick(neighbour)
        async with node.pool.acquire("claim") as conn:
            arguments: dict[str, Any] = {"owner": node.owner.name, "queue": "default"}
            count, offered = await release_orphans(conn, "durable", **arguments, known=[known.claim_id])
            assert (count, [row.id for row in offered]) == (1, [stray.id])
            assert await release_orphans(conn, "durable", **arguments, known=[known.claim_id]) == (0, [])
        assert db.row(stray.id) == ("runnable", 0, 0, 0, None, None)
        assert db.row(theirs, "status") == ("executing",)
        assert db.execute("select count(*) from durable.gen_durable where status = 'executing'") == [(3,)]


async def test_siblings_that_are_held_behind_a_stray_are_on_offer_with_it(db: Db):
    """In another queue, too: the pick that claimed the stray has told nobody of them."""
    stray, held = db.insert(partition_key="k"), db.insert(partition_key="k", queue="other")
    async with make_node(db.dsn) as node:
        assert [claim.id for claim in await pick(node)] == [stray]
        assert not await pick(node, queue="other")
        assert db.row(held, "hold") == (1,)
        async with node.pool.acquire("claim") as conn:
            _, offered = await release_orphans(
                conn, "durable", owner=node.owner.name, queue="default", known=[]
            )
        assert [(row.id, row.queue) for row in offered] == [(stray, "default"), (held, "other")]
        assert db.row(held, "hold") == (0,)


async def test_a_release_that_is_carried_out_late_takes_nothing_that_was_claimed_since(db: Db):
    """The client lost the connection; the server carries the statement out when the node has picked again."""
    sent: list[tuple[Statement, Params]] = []

    class Cut:
        """Reads, but only notes what would be written."""

        def __init__(self, conn: PgConn) -> None:
            self.conn = conn

        async def run(self, statement: Statement, params: Params) -> Result:
            assert statement.read_only
            return await self.conn.run(statement, params)

        async def batch(self, calls: list[tuple[Statement, Params]]) -> list[Result]:
            sent.extend(calls)
            raise CommitUnknown("lost")

    db.insert()
    async with make_node(db.dsn) as node:
        [stray] = await pick(node, limit=1)
        async with node.pool.acquire("claim") as conn:
            arguments: dict[str, Any] = {"owner": node.owner.name, "queue": "default", "known": []}
            with pytest.raises(CommitUnknown):
                await release_orphans(cast("PgConn", Cut(conn)), "durable", **arguments)
            assert (await release_orphans(conn, "durable", **arguments))[0] == 1
        db.insert()
        again = await pick(node, limit=2)
        assert stray.id in {claim.id for claim in again}
        async with node.pool.acquire("claim") as conn:
            await conn.batch(sent)
        assert db.execute("select count(*) from durable.gen_durable where status = 'executing'") == [(2,)]


@pytest.mark.parametrize("how", ["cancelled", "crashed"])
async def test_what_is_on_its_way_back_is_no_stray(
    db: Db, registry: object, monkeypatch: pytest.MonkeyPatch, how: str
):
    """Its run counts as an attempt, and may as a crash; taken for a stray, it would go back as if it had not run."""
    attempts: list[int] = []
    begun, go, sent, looked = trio.Event(), trio.Event(), trio.Event(), trio.Event()

    class Slow(da.Machine[dict[str, Any]], queue="slow", name="test.Slow"):
        @da.step(initial=True)
        async def start(self, ctx: da.Context[dict[str, Any]]) -> da.Outcome:
            attempts.append(ctx.attempt)
            if len(attempts) == 1:
                begun.set()
                await go.wait()
                sys.exit(2)
            return da.Done()

    function = "release_claims" if how == "cancelled" else "crash_claims"
    release, strays = getattr(releases, function), feeder.release_orphans

    async def late(*args: Any, **options: Any) -> Any:
        sent.set()
        await looked.wait()
        return await release(*args, **options)

    async def look(*args: Any, **options: Any) -> Any:
        try:
            return await strays(*args, **options)
        finally:
            looked.set()

    monkeypatch.setattr(releases, function, late)
    monkeypatch.setattr(feeder, "release_orphans", look)
    options: dict[str, Any] = {"dsn": db.dsn, "queues": {"slow": 5}, "machines": [Slow]}
    async with open_engine(**options) as engine:
        number = db.insert(queue="slow", fsm="test.Slow", step="start")
        node = engine._node
        with trio.fail_after(30):
            await begun.wait()
            if how == "cancelled":
                [active] = node.claims.live()
                node.claims.interrupt(active, "the test says so")
            else:
                go.set()
            await sent.wait()
            assert engine._parts is not None
            engine._parts.planners["slow"].failed(unknown_fate=True)  # as after a pick whose reply was lost
            node.notify("slow")
            await da.result(number)
    assert attempts == [0, 1]
    assert db.row(number, "crashes") == (int(how == "crashed"),)
