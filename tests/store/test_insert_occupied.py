"""A unique key is occupied by a row that the statement's snapshot does not see: it is looked at again.

`ON CONFLICT` waits for a concurrent insert of the same key; what it waited for is committed after the snapshot.
"""

from __future__ import annotations

import uuid
from typing import Any

import attrs
import psycopg
import pytest
import trio
from durable_actors import _history, aio, sync
from durable_actors._postgres.driver.connection import PgConn
from durable_actors._postgres.driver.statement import Result, Row
from durable_actors._store.children import start_child
from durable_actors._store.insert import MAX_OCCUPANT_READS, insert_instances
from durable_actors._store.signal import plan_signal, start_with_signal
from durable_actors.client import open_client
from durable_actors.errors import Duplicate
from durable_actors.machine import InsertPlan, isolated_registry, job
from tests.store.kit import SCHEMA, claims, connect, insert, plan, rows
from tests.support.interleave import open_sessions, wait_backend_blocked

LIVE = ("runnable", "executing", "awaiting_signal", "awaiting_children")
OCCUPY = (
    "insert into durable.gen_durable (fsm, step, queue, state, unique_key, unique_scope) "
    "values ('m', 's', 'other', '{}', 'k', '{runnable,executing,awaiting_signal,awaiting_children}') returning id"
)
FREE = "update durable.gen_durable set status = 'done', finished_at = now() where unique_guard = 'k'"


def unique(how: str) -> InsertPlan:
    return plan(unique_key=b"k", unique_scope=LIVE, on_duplicate=how)


@attrs.define
class Between:
    """A connection; between its first statement and the next, somebody else does something."""

    conn: PgConn
    db: psycopg.Connection
    does: str
    runs: int = 0

    async def run(self, *call: Any) -> Result:
        if self.runs == 1:
            self.db.execute(self.does)
        self.runs += 1
        return await self.conn.run(*call)


async def blocked(dsn: str, conn: PgConn, call: Any) -> tuple[int, Any]:
    """Run `call` while a foreign transaction holds the key, and commit that when it waits.

    Returns the occupant, and what came of the call.
    """
    found: list[Any] = []
    await conn.script("set lock_timeout = 0")  # the lane would give up after 100 ms and try again

    async def run() -> None:
        try:
            found.append(await call())
        except Duplicate as exc:
            found.append(exc)

    with open_sessions(dsn, 1) as (holder,):
        holder.run("begin")
        [(occupant,)] = holder.run(OCCUPY)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(run)
            await wait_backend_blocked(dsn, conn.pid, by=holder.pid)
            holder.run("commit")
    return occupant, found[0]


@pytest.mark.parametrize("how", ["return", "raise", "skip"])
async def test_an_occupant_committed_meanwhile_is_seen(db: psycopg.Connection, durable_dsn: str, how: str):
    async with connect(durable_dsn, "client") as conn:
        plans = [plan(), unique(how), unique("skip")]
        occupant, found = await blocked(durable_dsn, conn, lambda: insert_instances(conn, SCHEMA, plans))
    if how == "raise":
        assert isinstance(found, Duplicate)
        assert found.existing_id == occupant
    else:
        assert found[1:] == [occupant if how == "return" else None, None]
    assert len(rows(db, "id")) == 2, "the plain row once, the key once"


@pytest.mark.parametrize("how", ["return", "raise"])
async def test_an_occupant_that_is_gone_again_leaves_the_key(
    db: psycopg.Connection, durable_dsn: str, how: str
):
    async with connect(durable_dsn, "client") as conn:
        between = Between(conn, db, FREE)
        plans = [unique(how), plan(), unique("return")]
        occupant, found = await blocked(
            durable_dsn,
            conn,
            lambda: insert_instances(between, SCHEMA, plans),  # type: ignore[arg-type]
        )
    first, second, third = found
    assert between.runs == 2
    assert first == third, "inserted by the second look, and known to the next of that key"
    assert len({occupant, first, second}) == 3
    assert len(rows(db, "id")) == 3


async def test_a_step_finds_who_took_its_key(db: psycopg.Connection, durable_dsn: str):
    insert(db)
    async with connect(durable_dsn) as worker, connect(durable_dsn, "client") as conn:
        [claim] = await claims(worker)
        for does, finds in (("select 1", True), (FREE, False)):
            db.execute(FREE)
            between = Between(conn, db, does)
            occupant, found = await blocked(
                durable_dsn,
                conn,
                lambda between=between: start_child(
                    between, SCHEMA, claim, unique("return"), uid=uuid.uuid4(), as_child=False
                ),
            )
            if finds:
                assert (found.id, found.new, found.occupant) == (None, False, occupant)
            else:
                assert found.new
                assert found.id != occupant


@attrs.define
class Script:
    """A connection whose answers are given."""

    answers: list[list[Row]]

    async def run(self, *_: object) -> Result:
        return Result(self.answers.pop(0), "")

    async def batch(self, _: object) -> list[Result]:
        return [Result([row], "") for row in self.answers.pop(0)]


async def test_who_sees_nobody_gives_up_with_duplicate():
    """Row security or a trigger of the user's may hide who has the key for good."""
    blind: list[list[Row]] = [[[None, None]] for _ in range(MAX_OCCUPANT_READS)]
    for how in ("return", "raise"):
        with pytest.raises(Duplicate, match="'k' is occupied by an instance not visible") as caught:
            await insert_instances(Script(list(blind)), SCHEMA, [unique(how)])  # type: ignore[arg-type]
        assert caught.value.existing_id is None


async def test_a_step_looks_until_it_sees_somebody(db: psycopg.Connection, durable_dsn: str):
    insert(db)
    async with connect(durable_dsn) as conn:
        [claim] = await claims(conn)
    blind: list[Row] = [[None, b"f", None, b"f"]]
    seen: list[Row] = [[None, b"f", b"7", b"f"]]
    own: list[Row] = [[b"8", b"f", b"8", b"f"]]
    for answers, found in (
        ([blind] * 4 + [seen], (None, 7)),
        ([seen, own], (8, 8)),
        ([blind] * MAX_OCCUPANT_READS, (None, None)),
    ):
        script = Script(list(answers))
        started = await start_child(
            script,  # type: ignore[arg-type]
            SCHEMA,
            claim,
            unique("return"),
            uid=uuid.uuid4(),
            as_child=True,
        )
        assert started is not None
        assert (started.id, started.occupant) == found
        assert script.answers == []


async def test_start_with_signal_goes_on_while_occupants_change():
    """Each occupant ends between insert and signal; one that stays has ended and keeps its key."""
    gone: Row = [None, b"no_target", None, b"f"]
    delivery = plan_signal("k", "n", None, None)
    changing: list[list[Row]] = [[[None, b"%d" % number], gone] for number in range(1, 9)]
    done: list[Row] = [[None, b"9"], [b"9", b"sent", b"q", b"f"]]
    sent, new = await start_with_signal(Script([*changing, done]), SCHEMA, unique("raise"), delivery)  # type: ignore[arg-type]
    assert (sent.target, new) == (9, False)
    script = Script([[[None, b"3"], gone], [[None, b"3"], gone], done])
    sent, new = await start_with_signal(script, SCHEMA, unique("raise"), delivery)  # type: ignore[arg-type]
    assert (sent.target, new) == (None, False)
    assert script.answers == [done]


@pytest.fixture
def task():
    with isolated_registry():

        @job(name="m")
        async def task(args: dict) -> None: ...

        yield task


async def test_each_look_of_a_client_is_one_call(
    db: psycopg.Connection, durable_dsn: str, task: Any, monkeypatch: pytest.MonkeyPatch
):
    """A call that a lock refuses is repeated: two statements in one would insert the plain row twice."""
    runs: list[int] = []
    original = _history.retry_while_locked

    async def counted(pool: Any, lane: str, call: Any, **options: Any) -> Any:
        async def on(conn: PgConn) -> Any:
            between = Between(conn, db, "select 1")
            found = await call(between)
            runs.append(between.runs)
            return found

        if not runs:  # as if the snapshot had not seen it
            db.execute(OCCUPY)
            real = await original(pool, lane, on, **options)
            return Result([[row[0], None] for row in real.rows], real.tag)
        return await original(pool, lane, on, **options)

    monkeypatch.setattr(_history, "retry_while_locked", counted)
    async with open_client(durable_dsn) as client:
        ids = await client.insert_many(
            task, [{"args": {}}, {"args": {}, "unique_key": "k", "on_duplicate": "return"}]
        )
    assert runs == [1, 1]
    assert [(number,) for number in sorted(n for n in ids if n is not None)] == rows(db, "id")


def caller(dsn: str, task: Any, *, isolation: str, asynchronous: bool) -> Any:
    """Insert on a connection of the caller's, in a thread."""
    options: dict[str, Any] = {"args": {}, "unique_key": "k", "on_duplicate": "return"}
    if asynchronous:
        import asyncio  # noqa: PLC0415

        async def main() -> Any:
            async with await psycopg.AsyncConnection.connect(dsn, application_name="caller") as conn:
                await conn.execute(f"set transaction isolation level {isolation}")
                await conn.execute("select 1")
                return await aio.insert(conn, task, **options)

        return asyncio.run(main())
    with psycopg.connect(dsn, application_name="caller") as conn:
        conn.execute(f"set transaction isolation level {isolation}")
        conn.execute("select 1")
        return sync.insert(conn, task, **options)


async def caller_blocked(dsn: str, by: int) -> None:
    with psycopg.connect(dsn, autocommit=True) as look:
        while True:
            row = look.execute(
                "select pid from pg_stat_activity "
                "where application_name = 'caller' and %s = any (pg_blocking_pids(pid))",
                [by],
            ).fetchone()
            if row is not None:
                return
            await trio.sleep(0.003)


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "aio"])
@pytest.mark.parametrize("isolation", ["read committed", "repeatable read"])
async def test_in_the_callers_transaction(durable_dsn: str, task: Any, isolation: str, *, asynchronous: bool):
    """Read committed looks again. A snapshot that stays cannot: Postgres refuses, and the caller begins anew."""
    found: list[Any] = []

    async def call() -> None:
        def run() -> Any:
            try:
                return caller(durable_dsn, task, isolation=isolation, asynchronous=asynchronous)
            except psycopg.errors.SerializationFailure as exc:
                return exc

        found.append(await trio.to_thread.run_sync(run))

    with open_sessions(durable_dsn, 1) as (holder,):
        holder.run("begin")
        [(occupant,)] = holder.run(OCCUPY)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(call)
            with trio.fail_after(30):
                await caller_blocked(durable_dsn, holder.pid)
            holder.run("commit")
    if isolation == "read committed":
        assert found == [occupant]
    else:
        assert isinstance(found[0], psycopg.errors.SerializationFailure)
