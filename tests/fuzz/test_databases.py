"""A database that is not there, not ours yet, or not of our kind: one clear error, and the remedy."""

from __future__ import annotations

import asyncio

import durable_actors as da
import psycopg
import pytest
import trio
from durable_actors import TrioConnection, aio, sync
from durable_actors._postgres.driver.connection import PgConn
from durable_actors._store.claim import probe_locks
from durable_actors._store.migrate import migrate
from durable_actors._store.observe import NEWEST
from hypothesis import given
from psycopg.conninfo import make_conninfo
from tests.fuzz.kit import add, any_text, define, fuzz

pytestmark = pytest.mark.usefixtures("registry")

REMEDY = r"[Rr]un `durable-actors migrate`"

BAD_DSNS = [
    "x", "=", "a=b", "host='", "postgresql://[", "postgresql://u:secret%zz@h/d", "password=secret host='x", "a\0b",
    "\ud800", "host=127.0.0.1 port=1 connect_timeout=abc", "host=" + "x" * 10_000,
]  # fmt: skip
NOBODY = [
    "host=/nonexistent", "host=127.0.0.1 port=1", "host=127.0.0.1 port=99999", "host=127.0.0.1 port=abc",
    "host=127.0.0.1 port=1 sslmode=bogus", "host=127.0.0.1 port=1 keepalives=x", "host=127.0.0.1 port=1,2,3",
    "host=127.0.0.1 port=1 target_session_attrs=odd", "service=nonexistent", "hostaddr=999.1.1.1",
    "postgresql://u:secret@127.0.0.1:1/d?application_name=%27;drop%20table%20x",
]  # fmt: skip


def test_before_the_first_migration_on_a_plain_connection(empty_dsn):
    job = define()
    with psycopg.connect(empty_dsn) as conn:
        for call in (lambda: sync.insert(conn, job, args={}), lambda: sync.signal(conn, 1, "n")):
            with pytest.raises(da.SchemaError, match=REMEDY) as caught:
                call()
            assert '"durable" does not exist' in str(caught.value)
            conn.rollback()
        with pytest.raises(da.SchemaError, match='schema "other"'):
            sync.insert_many(conn, job, [{"args": {}}], schema="other")


def test_before_the_first_migration_on_an_asyncio_connection(empty_dsn):
    job = define()

    async def main() -> None:
        async with await psycopg.AsyncConnection.connect(empty_dsn) as conn:
            with pytest.raises(da.SchemaError, match=REMEDY):
                await aio.insert(conn, job, args={})
            await conn.rollback()
            with pytest.raises(da.SchemaError, match=REMEDY):
                await aio.signal(conn, 1, "n")

    asyncio.run(main())


async def test_a_schema_that_was_dropped_under_a_client(durable_dsn, conn):
    job = define()
    async with da.open_client(durable_dsn), await TrioConnection.connect(durable_dsn) as own:
        conn.execute("drop schema durable cascade")
        with pytest.raises(da.SchemaError, match=REMEDY):
            await da.insert(job, args={}, conn=own)
        await own.rollback()


async def test_a_client_before_the_first_migration(empty_dsn):
    with pytest.raises(da.SchemaError, match=REMEDY):
        async with da.open_client(empty_dsn):
            pass


async def test_a_database_that_is_not_utf8_is_refused(empty_dsn):
    """A byte that is not text cannot be sent to us: a row with one would fail every pick of its queue."""
    name = "ascii_" + psycopg.conninfo.conninfo_to_dict(empty_dsn)["dbname"]
    with psycopg.connect(empty_dsn, autocommit=True) as conn:
        conn.execute(
            f"create database {name} encoding 'SQL_ASCII' template template0 lc_collate 'C' lc_ctype 'C'"
        )
        try:
            dsn = make_conninfo(empty_dsn, dbname=name)
            with pytest.raises(da.SchemaError, match="encoding is SQL_ASCII, durable_actors needs UTF8"):
                await migrate(dsn)
            with pytest.raises(da.SchemaError, match="UTF8"):
                async with da.open_client(dsn, start_timeout=0):
                    pass
        finally:
            conn.execute(f"drop database {name} with (force)")


@pytest.mark.parametrize("dsn", BAD_DSNS, ids=lambda each: ascii(each)[:40])
async def test_a_malformed_dsn(dsn):
    with pytest.raises(da.ConfigError, match="dsn is not a Postgres connection string") as caught:
        async with da.open_client(dsn, start_timeout=0):
            pass
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("dsn", NOBODY, ids=lambda each: each[:40])
async def test_a_dsn_that_leads_nowhere(dsn):
    with (
        trio.fail_after(30),
        pytest.raises(da.StoreUnavailable, match="cannot connect to Postgres") as caught,
    ):
        async with da.open_client(dsn, start_timeout=0):
            pass
    assert "secret" not in str(caught.value)


@fuzz(25)
@given(word=any_text)
def test_any_value_in_a_dsn(word):
    """Quoted by libpq's own rules it is one value; unquoted it is malformed, or leads nowhere."""
    for dsn in (f"host=127.0.0.1 port=1 application_name={word}", f"postgresql://127.0.0.1:1/{word}"):
        with pytest.raises((da.ConfigError, da.StoreUnavailable)):
            trio.run(PgConn.open, dsn)


# -- ids and keys that nobody can have

TARGETS = [2**63, -(2**63) - 1, 10**5000, 1.5, None, True, "\ud800", object(), [1]]


async def test_a_target_that_cannot_exist_harms_nobody_who_waits(durable_dsn, conn):
    """Results are read for all who wait, in one statement: one id too large would refuse everybody's."""
    define()
    number = add(conn, fsm="good", step="perform")
    async with da.open_client(durable_dsn), trio.open_nursery() as nursery:
        found: list[object] = []

        async def wait() -> None:
            found.append(await da.result(number, timeout=30))

        nursery.start_soon(wait)
        await trio.testing.wait_all_tasks_blocked(0.01)
        for target in TARGETS:
            for call in (da.result, da.inspect):
                with pytest.raises(da.ConfigError, match=r"target=|is named by its id or unique key"):
                    await call(target)  # type: ignore[operator]
            with pytest.raises(da.ConfigError, match="target"):
                await da.signal(target, "n")  # type: ignore[arg-type]
        for target in (0, -1, NEWEST, "nobody", b"\xff"):
            with pytest.raises(da.NoTarget):
                await da.inspect(target)
        conn.execute(
            "update durable.gen_durable set status = 'done', result = '1', finished_at = now() where id = %s",
            [number],
        )
    assert found == [1]


async def test_a_row_that_is_gone_counts_as_free(durable_dsn, conn):
    """The outcome of a child waits until its parent's row is free; a parent that was deleted never is."""
    number = add(conn, fsm="good", step="perform")
    own = await PgConn.open(durable_dsn)
    try:
        assert await probe_locks(own, "durable", [number, 999]) == {number, 999}
        with psycopg.connect(durable_dsn) as other:
            other.execute("select 1 from durable.gen_durable where id = %s for update", [number])
            assert await probe_locks(own, "durable", [number, 999]) == {999}
    finally:
        own.close()
