"""Commands and their receipts for callers: on Trio, on callers' connections, in transactions and savepoints."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import durable_actors as da
import psycopg
import pytest
import trio
from tests.engine.kit import Db, running
from tests.kit import until

SAID: dict[str, Any] = {
    "by": "ada",
    "reason": "the bank is back",
    "idempotency_key": "k",
    "meta": {"ticket": 7, "headers": {"Authorization": "Bearer x"}},
}


def failed(db: Db, **columns: object) -> int:
    return db.insert(status="failed", finished_at="now", **columns)


def status(db: Db, number: int) -> str:
    return db.row(number, "status")[0]


@pytest.fixture
def flaky(registry):
    """A job that fails until `healed` is set."""

    @da.job(max_attempts=1)
    async def flaky(args: dict):
        if not flaky.healed:
            raise ValueError("no luck")
        return args

    flaky.healed = False
    return flaky


# -- on Trio


async def test_who_when_and_why(durable_dsn, db: Db):
    number = failed(db, unique_key=b"order:1")
    async with da.open_client(durable_dsn):
        assert await da.retry("order:1", **SAID) == number
        [receipt] = await da.receipts("order:1")
        assert await da.receipts() == await da.receipts(number, command="retry") == [receipt]
        assert await da.receipts(command="cancel") == []
        assert (receipt.command, receipt.scope, receipt.target) == ("retry", "instance", str(number))
        assert (receipt.by, receipt.reason, receipt.idempotency_key) == ("ada", "the bank is back", "k")
        assert receipt.data == {"ticket": 7, "headers": {"Authorization": "[redacted]"}}
        assert receipt.result == number
        assert receipt.at == (await da.inspect(number)).updated_at
    assert "Bearer" not in db.value("select string_agg(r::text, '') from durable.receipts r")


async def test_the_same_key_again_returns_the_same_however_far_it_has_gone_on(durable_dsn, flaky):
    async with running(durable_dsn) as run:
        number = await run.insert(flaky, args={"a": 1})
        assert (await run.ended(number)).status == "failed"
        flaky.healed = True
        assert await da.retry(number, idempotency_key="k") == number
        assert (await run.ended(number)).status == "done"
        assert await da.retry(number, idempotency_key="k") == number
        with pytest.raises(da.Conflict, match="done"):
            await da.retry(number, idempotency_key="other")
        with pytest.raises(da.Conflict, match="done"):
            await da.retry(number)
        assert len(await da.receipts(number)) == 1


async def test_many_calls_with_one_key_at_once(durable_dsn, db: Db):
    number = failed(db)
    found: list[int] = []

    async def call(client: da.Client) -> None:
        found.append(await client.retry(number, idempotency_key="k"))

    async with da.open_client(durable_dsn) as client, trio.open_nursery() as nursery:
        for _ in range(20):
            nursery.start_soon(call, client)
    assert found == [number] * 20
    assert db.value("select count(*) from durable.receipts") == 1


async def test_many_calls_without_a_key_at_once(durable_dsn, db: Db):
    number = failed(db)
    found: list[object] = []

    async def call(client: da.Client) -> None:
        try:
            found.append(await client.retry(number))
        except da.Conflict:
            found.append("conflict")

    async with da.open_client(durable_dsn) as client, trio.open_nursery() as nursery:
        for _ in range(20):
            nursery.start_soon(call, client)
    assert sorted(map(str, found)) == [str(number), *["conflict"] * 19]
    assert db.value("select count(*) from durable.receipts") == 1


@pytest.mark.parametrize("end", ["rollback", "commit"])
async def test_a_call_that_meets_a_lock_waits_for_it(durable_dsn, db: Db, end: str):
    """Somebody else's transaction has retried it with the same key."""
    number = failed(db)
    waits = "select count(*) from pg_stat_activity where wait_event_type = 'Lock' and datname = current_database()"
    async with da.open_client(durable_dsn) as client:
        with psycopg.connect(durable_dsn) as other:
            da.sync.retry(other, number, idempotency_key="k", by="other")
            async with trio.open_nursery() as nursery:
                nursery.start_soon(lambda: client.retry(number, idempotency_key="k", by="me"))
                await until(lambda: db.value(waits))
                getattr(other, end)()
        [receipt] = await client.receipts(number)
        assert receipt.by == ("me" if end == "rollback" else "other")


async def test_pages_and_bad_arguments(durable_dsn, db: Db):
    numbers = [failed(db) for _ in range(5)]
    async with da.open_client(durable_dsn) as client:
        for number in numbers:
            await client.retry(number)
        page = await client.receipts(limit=2)
        rest = await client.receipts(after=page[-1].id)
        assert [int(each.target) for each in page + rest] == numbers[::-1]
        with pytest.raises(da.NoTarget):
            await client.receipts("nobody's")
        assert await client.receipts(10**6) == []
        for options in ({"limit": 0}, {"limit": 10_001}, {"after": -1}, {"command": 7}):
            with pytest.raises(da.ConfigError) as raised:
                await client.receipts(**options)  # type: ignore[arg-type]
            assert raised.value.option == next(iter(options))
        for options in ({"by": 7}, {"reason": ""}, {"idempotency_key": "x" * 501}, {"meta": [1]}):
            with pytest.raises(da.ConfigError) as raised:
                await client.retry(numbers[0], **options)  # type: ignore[arg-type]
            assert raised.value.option == next(iter(options))
        with (
            pytest.raises(da.ConfigError, match=r"use durable_actors\.sync with it"),
            psycopg.connect(durable_dsn) as conn,
        ):
            await client.retry(numbers[0], conn=conn)  # type: ignore[arg-type]


async def test_on_a_trio_connection_it_starts_when_the_caller_commits(durable_dsn, flaky):
    async with running(durable_dsn, poll_interval=60, max_poll_interval=60, long_poll=0) as run:
        number = await run.insert(flaky, args={})
        await run.ended(number)
        flaky.healed = True
        async with await da.TrioConnection.connect(durable_dsn) as conn:
            assert await da.retry(number, conn=conn, **SAID) == number
            assert (await da.inspect(number)).status == "failed"
            assert await da.receipts(number) == []
            await conn.commit()
        assert (await run.ended(number)).status == "done"


# -- in transactions and savepoints, on every kind of connection

Step = Callable[[Any, Any], Any]


def on_sync(dsn: str, number: int, *, autocommit: bool) -> list[str]:
    """A savepoint that is rolled back, one that is kept, the same key once more; what this caller sees after each."""
    seen: list[str] = []
    with psycopg.connect(dsn, autocommit=autocommit) as conn:
        with conn.transaction():
            with conn.transaction() as inner:
                assert da.sync.retry(conn, number, **SAID) == number
                seen.append(da.sync.inspect(conn, number).status)
                raise psycopg.Rollback(inner)
            seen.append(da.sync.inspect(conn, number).status)
            with conn.transaction():
                da.sync.retry(conn, number, **SAID)
            assert da.sync.retry(conn, number, **SAID) == number
            try:
                da.sync.retry(conn, number, idempotency_key="other")
            except da.Conflict:
                seen.append("conflict")
        seen.append(da.sync.inspect(conn, number).status)
    return seen


async def on_async(conn: Any, number: int, retry: Any, inspect: Any) -> list[str]:
    seen: list[str] = []
    async with conn:
        async with conn.transaction():
            async with conn.transaction() as inner:
                assert await retry(number, **SAID) == number
                seen.append((await inspect(conn, number)).status)
                raise psycopg.Rollback(inner)
            seen.append((await inspect(conn, number)).status)
            async with conn.transaction():
                await retry(number, **SAID)
            assert await retry(number, **SAID) == number
            try:
                await retry(number, idempotency_key="other")
            except da.Conflict:
                seen.append("conflict")
        seen.append((await inspect(conn, number)).status)
    return seen


async def on_aio(dsn: str, number: int, *, autocommit: bool) -> list[str]:
    conn = await psycopg.AsyncConnection.connect(dsn, autocommit=autocommit)
    return await on_async(
        conn, number, lambda *args, **options: da.aio.retry(conn, *args, **options), da.aio.inspect
    )


async def on_trio(dsn: str, number: int, *, autocommit: bool) -> list[str]:
    async with da.open_client(dsn) as client:
        conn = await da.TrioConnection.connect(dsn, autocommit=autocommit)

        async def inspect(conn: Any, number: int) -> Any:
            cursor = await conn.execute(
                "select status::text from durable.gen_durable where id = %s", [number]
            )
            return type("Seen", (), {"status": (await cursor.fetchone())[0]})

        return await on_async(
            conn, number, lambda *args, **options: client.retry(*args, conn=conn, **options), inspect
        )


@pytest.mark.parametrize("autocommit", [False, True], ids=["", "autocommit"])
@pytest.mark.parametrize("kind", ["sync", "aio", "trio"])
def test_in_a_savepoint_that_is_rolled_back_and_in_one_that_is_kept(
    durable_dsn, db: Db, kind: str, *, autocommit: bool
):
    number = failed(db)
    if kind == "sync":
        seen = on_sync(durable_dsn, number, autocommit=autocommit)
    elif kind == "aio":
        seen = asyncio.run(on_aio(durable_dsn, number, autocommit=autocommit))
    else:
        seen = trio.run(lambda: on_trio(durable_dsn, number, autocommit=autocommit))
    assert seen == ["runnable", "failed", "conflict", "runnable"]
    assert db.execute("select command, target, by, data->>'ticket' from durable.receipts") == [
        ("retry", str(number), "ada", "7")
    ]


@pytest.mark.parametrize("kind", ["sync", "aio"])
def test_a_transaction_that_is_rolled_back_leaves_nothing(durable_dsn, db: Db, kind: str):
    number = failed(db)

    async def aio() -> None:
        async with await psycopg.AsyncConnection.connect(durable_dsn) as conn:
            await da.aio.retry(conn, number, **SAID)
            await conn.rollback()

    if kind == "aio":
        asyncio.run(aio())
    else:
        with psycopg.connect(durable_dsn) as conn:
            da.sync.retry(conn, number, **SAID)
            conn.rollback()
    assert status(db, number) == "failed"
    assert db.value("select count(*) from durable.receipts") == 0


def test_in_a_transaction_that_keeps_its_first_snapshot(durable_dsn, db: Db):
    """It does not see the other call's receipt: Postgres refuses the write, and nothing loops."""
    number = failed(db)
    with psycopg.connect(durable_dsn) as conn:
        conn.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        assert da.sync.inspect(conn, number).status == "failed"
        with psycopg.connect(durable_dsn) as other:
            da.sync.retry(other, number, **SAID)
        db.execute(
            "update durable.gen_durable set status = 'failed', finished_at = now() where id = %s", number
        )
        with pytest.raises(psycopg.errors.SerializationFailure):
            da.sync.retry(conn, number, **SAID)
    assert db.value("select count(*) from durable.receipts") == 1
