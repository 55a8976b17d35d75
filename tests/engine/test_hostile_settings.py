"""Settings of a role or a database change the meaning of nothing that we send or read."""

from __future__ import annotations

import asyncio

import durable_actors as da
import psycopg
import pytest
from psycopg import IsolationLevel, sql
from tests.engine.kit import running

HOSTILE = {
    "array_nulls": "off",
    "standard_conforming_strings": "off",
    "backslash_quote": "off",
    "bytea_output": "escape",
    "DateStyle": "German, DMY",
    "IntervalStyle": "sql_standard",
    "TimeZone": "Asia/Kathmandu",
    "extra_float_digits": "-15",
    "client_encoding": "LATIN1",
    "default_transaction_isolation": "serializable",
    "default_transaction_read_only": "on",
    "default_transaction_deferrable": "on",
    "transform_null_equals": "on",
    "search_path": "evil, pg_catalog",
    "row_security": "off",
    "exit_on_error": "on",
    "quote_all_identifiers": "on",
    "client_min_messages": "error",
    "plan_cache_mode": "force_custom_plan",
    "enable_indexscan": "off",
    "enable_hashjoin": "off",
    "join_collapse_limit": "1",
    "from_collapse_limit": "1",
    "jit": "on",
    "synchronous_commit": "off",
    "xmloption": "document",
    "check_function_bodies": "off",
    "plpgsql.extra_errors": "all",
    "lc_monetary": "C",
}
EVIL = """
create schema evil;
create function evil.now() returns timestamptz language sql stable as $$ select 'infinity'::timestamptz $$;
create function evil.random() returns float8 language sql as $$ select 2::float8 $$
"""
OF_CALLERS = {"default_transaction_read_only", "default_transaction_isolation", "search_path"}
"""What a caller's transaction is, and which functions its statements mean, is the caller's business."""


@pytest.fixture
def machines(registry):
    class Waits(da.Machine):
        @da.step
        async def start(self, ctx: da.Context):
            return da.Await("go", then=self.end, timeout=3600)

        @da.step
        async def end(self, ctx: da.Context):
            return da.Done([[signal.payload, signal.dedup_key] for signal in ctx.awaited])

    @da.job(max_attempts=2)
    async def fails_once(args: dict, ctx: da.Context):
        if not ctx.attempt and args.get("fails"):
            return da.Retry(delay=0.01)
        return args

    return Waits, fails_once


def rows(prefix: str):
    """Arrays with nulls in every column that may have them, and texts that look like nulls."""
    return [
        {"args": {"n": "NULL"}, "partition_key": "NULL", "unique_key": f"{prefix}NULL"},
        {"args": {"n": None}},
        {"args": {"n": 'a"\\ü'}, "partition_key": f'{prefix}"\\,{{}}ü', "schedule_in": 0.001},
        {"args": {"n": 4}, "unique_key": prefix.encode() + b"\0\xff"},
    ]


def plain_rows(prefix: str):
    return [{key: value for key, value in row.items() if key != "unique_key"} for row in rows(prefix)]


async def use(dsn: str, machines, *, callers: bool) -> None:
    waits, job = machines
    async with running(dsn, journal="full") as run:
        client = run.engine.client
        for made, prefix in ((rows, "own"), (plain_rows, "plain")):
            await check(run, await client.insert_many(job, made(prefix)), made(prefix))
        number = await run.insert(waits, unique_key="NULL")
        await client.signal_many(
            [
                {"target": "NULL", "name": "other", "payload": "NULL"},
                {"target": number, "name": "go", "payload": {"ü": None}, "dedup_key": "NULL"},
            ]
        )
        assert (await run.ended(number)).result == [[{"ü": None}, "NULL"]]
        assert (await run.run(job, args={"fails": True})).result == {"fails": True}
        if callers:
            await on_callers_connections(run, dsn, machines)
        assert (await client.verify()).problems == [], "what a session has written is compared in another one"


async def check(run, numbers, expected) -> None:
    for number, row in zip(numbers, expected, strict=True):
        found = await run.ended(number)
        assert found.result == row["args"], found
        assert found.partition_key == row.get("partition_key")
        assert found.unique_key == row.get("unique_key")


async def on_callers_connections(run, dsn: str, machines) -> None:
    waits, job = machines
    with psycopg.connect(dsn, autocommit=True) as conn:
        conn.isolation_level, conn.read_only = IsolationLevel.READ_COMMITTED, False
        for made, prefix in ((rows, "sync"), (plain_rows, "plain")):
            await check(run, da.sync.insert_many(conn, job, made(prefix)), made(prefix))
        number = da.sync.insert(conn, waits, unique_key="sync")
        da.sync.signal(conn, "sync", "go", "NULL")
        assert (await run.ended(number)).result == [["NULL", None]]
        assert da.sync.result(conn, number, timeout=30) == [["NULL", None]]
        assert da.sync.inspect(conn, number) == await run.engine.client.inspect(number)
        before = conn.execute("select name, setting from pg_settings order by name").fetchall()
        da.sync.insert_many(conn, job, rows("last"))
        assert conn.execute("select name, setting from pg_settings order by name").fetchall() == before

    async def main():
        async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as conn:
            await conn.set_isolation_level(IsolationLevel.READ_COMMITTED)
            await conn.set_read_only(False)
            return await da.aio.insert_many(conn, job, rows("aio"))

    await check(run, asyncio.run(main()), rows("aio"))


def configure(dsn: str, names) -> None:
    with psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute(EVIL)
        for name in names:
            path = sql.SQL("evil, pg_catalog") if name == "search_path" else sql.Literal(HOSTILE[name])
            setting = sql.SQL(".").join(map(sql.Identifier, name.split(".")))
            conn.execute(
                sql.SQL("alter database {} set {} = {}").format(
                    sql.Identifier(conn.info.dbname), setting, path
                )
            )


@pytest.mark.parametrize("name", HOSTILE)
async def test_one_setting(durable_dsn, machines, name):
    configure(durable_dsn, [name])
    await use(durable_dsn, machines, callers=name not in OF_CALLERS)


async def test_all_at_once(durable_dsn, machines):
    configure(durable_dsn, HOSTILE)
    await use(durable_dsn, machines, callers=False)


async def test_all_at_once_for_callers(durable_dsn, machines):
    configure(durable_dsn, HOSTILE.keys() - OF_CALLERS)
    await use(durable_dsn, machines, callers=True)
