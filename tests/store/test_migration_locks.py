"""A migration of a table in use: it waits for locks briefly and again, so that nobody waits long behind it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
import trio
from durable_actors import errors
from durable_actors._postgres.driver.connection import PgConn
from durable_actors._store import migrate as migrating
from durable_actors._store.sql import Migration, migrations
from tests.kit import PATIENCE

ROOT = Path(__file__).parents[2]
BEFORE = 9
"""The schema of release 0.1: every migration since then is applied here."""
INSERT = "insert into durable.gen_durable (fsm, step) values ('m', 'start')"
WAITS = "select count(*) from pg_locks where not granted and pid = %s"


@pytest.fixture
async def old_dsn(empty_dsn: str) -> str:
    await migrating.migrate(empty_dsn, version=BEFORE)
    return empty_dsn


@pytest.fixture
def other(old_dsn: str) -> Iterator[psycopg.Connection]:
    """Somebody else who works there, and does not wait for a lock as long as a migration might."""
    with psycopg.connect(old_dsn, autocommit=True) as conn:
        conn.execute("set lock_timeout = '5s'")
        yield conn


@pytest.fixture
def reader(old_dsn: str) -> Iterator[psycopg.Connection]:
    """Whoever begins a transaction and forgets it."""
    with psycopg.connect(old_dsn, application_name="backup") as conn:
        yield conn
        conn.rollback()


async def see_it_wait(conn: PgConn, other: psycopg.Connection) -> None:
    with trio.fail_after(PATIENCE):
        while other.execute(WAITS, [conn.pid]).fetchone() == (0,):
            await trio.sleep(0.002)


async def test_a_long_transaction_holds_up_the_migration_and_nobody_else(
    old_dsn: str, other: psycopg.Connection, reader: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(migrating, "LOCK_WAITS", (0.05,) * 1000)
    reader.execute("select count(*) from durable.gen_durable")
    applied: list[int] = []
    conn = await PgConn.open(old_dsn)

    async def migrate(task_status: trio.TaskStatus[None]) -> None:
        def begins(migration: Migration) -> None:
            applied.append(migration.version)
            task_status.started()

        await migrating.migrate_on(conn, schema="durable", shipped=shipped[: BEFORE + 1], on_progress=begins)

    shipped = migrations()
    async with trio.open_nursery() as nursery:
        await nursery.start(migrate)
        for _ in range(3):  # behind three attempts
            await see_it_wait(conn, other)
            await trio.to_thread.run_sync(other.execute, INSERT)
        assert applied == [BEFORE + 1]
        reader.rollback()
    assert other.execute("select max(version) from durable.migrations").fetchone() == (BEFORE + 1,)
    conn.close()


async def test_a_migration_gives_up_and_names_who_is_in_its_way(
    old_dsn: str, other: psycopg.Connection, reader: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(migrating, "LOCK_WAITS", (0.01, 0.02))
    reader.execute("select count(*) from durable.gen_durable")
    conn = await PgConn.open(old_dsn)
    named = rf'0010_one_clock of schema "durable" needs a table: process {reader.info.backend_pid} \(backup, idle in'
    with pytest.raises(errors.StoreUnavailable, match=named):
        await migrating.migrate_on(conn, schema="durable")
    assert conn.pristine
    assert other.execute("select max(version) from durable.migrations").fetchone() == (BEFORE,)
    assert other.execute("select to_regprocedure('durable.keeps_place(smallint)')").fetchone() == (None,)
    reader.rollback()
    found = await migrating.migrate_on(conn, schema="durable")
    assert found.pending == ()
    conn.close()


async def test_a_migration_between_two_tables_gives_way(
    old_dsn: str, other: psycopg.Connection, reader: psycopg.Connection
):
    """It has locked the instances and waits for the signals; who uses those needs the instances."""
    reader.execute("set lock_timeout = '5s'")
    reader.execute("select count(*) from durable.signals")
    conn = await PgConn.open(old_dsn)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lambda: migrating.migrate_on(conn, schema="durable"))
        await see_it_wait(conn, other)
        assert reader.execute("select count(*) from durable.gen_durable").fetchone() == (0,)
        reader.rollback()
    assert other.execute("select max(version) from durable.migrations").fetchone() == (
        migrations()[-1].version,
    )
    conn.close()


async def test_an_index_is_built_beside_a_long_transaction(
    old_dsn: str, other: psycopg.Connection, reader: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
):
    """It waits for the transaction for as long as it takes, and nobody waits behind it."""
    monkeypatch.setattr(migrating, "LOCK_WAITS", (0.01,))
    await migrating.migrate(old_dsn, version=13)
    conn = await PgConn.open(old_dsn)
    reader.execute(INSERT)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lambda: migrating.migrate_on(conn, schema="durable", version=14))
        await see_it_wait(conn, other)
        other.execute("set lock_timeout = '100ms'")
        other.execute(INSERT)
        reader.rollback()
    assert other.execute("select max(version) from durable.migrations").fetchone() == (14,)
    conn.close()


async def test_timeouts_of_the_database_do_not_end_a_migration(
    old_dsn: str, other: psycopg.Connection, reader: psycopg.Connection
):
    """The index waits for the long transaction, for longer than a statement or a lock may take there."""
    name = other.info.dbname
    for setting in ("statement_timeout", "lock_timeout"):
        other.execute(f'alter database "{name}" set {setting} = 20')
    reader.execute("set transaction isolation level repeatable read")
    reader.execute("select 1")
    conn = await PgConn.open(old_dsn)
    index = "select count(*) from pg_index where indexrelid = to_regclass('durable.gen_durable_requests')"
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lambda: migrating.migrate_on(conn, schema="durable"))
        with trio.fail_after(PATIENCE):
            while other.execute(index).fetchone() == (0,):
                await trio.sleep(0.002)
        await see_it_wait(conn, other)
        await trio.sleep(0.1)  # several times as long as its timeouts
        await see_it_wait(conn, other)
        reader.rollback()
    assert other.execute("select max(version) from durable.migrations").fetchone() == (
        migrations()[-1].version,
    )
    conn.close()


async def test_a_statement_of_a_migration_without_a_transaction_waits_briefly_too(
    old_dsn: str, other: psycopg.Connection, reader: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(migrating, "LOCK_WAITS", (0.01, 0.02))
    shipped = [
        *migrations()[:BEFORE],
        fake("-- concurrently, but\nalter table durable.signals add column x int;\n"),
    ]
    reader.execute("select count(*) from durable.signals")
    conn = await PgConn.open(old_dsn)
    with pytest.raises(errors.StoreUnavailable, match="0010_fake"):
        await migrating.migrate_on(conn, schema="durable", shipped=shipped)
    reader.rollback()
    await migrating.migrate_on(conn, schema="durable", shipped=shipped)
    other.execute("select x from durable.signals")
    conn.close()


def fake(sql: str) -> Migration:
    return Migration(version=BEFORE + 1, name="fake", sql=sql, transactional=False)


EXCLUSIVE, SHARED = "AccessExclusiveLock", "ShareUpdateExclusiveLock"
LOCKS: dict[str, dict[str, str]] = {
    "one_clock": {"gen_durable": EXCLUSIVE, "signals": EXCLUSIVE},
    "cancelled": {},
    "commands": {"gen_durable": EXCLUSIVE},
    "validate": {"gen_durable": SHARED},
    "works_with": {"migrations": EXCLUSIVE},
    "journal": {"gen_durable": EXCLUSIVE},
    "predicates": {},
    "runners": {},
    "cancel": {},
    "retention": {"gen_durable": EXCLUSIVE, "signals": EXCLUSIVE},
    "cascades": {"gen_durable": EXCLUSIVE},
    "pauses": {},
    "reruns": {"gen_durable": EXCLUSIVE},
    "comfort": {"gen_durable": EXCLUSIVE},
    "graphs": {"gen_durable": EXCLUSIVE},
    "schedules": {},
    "control": {},
    "speed": {},
}
"""The strongest lock that each migration since 0.1 takes of the tables that were there before it, until it commits.

Add a line for a new one, and to the table in docs/explanation/races.md. Under an exclusive lock it must not read rows.
"""
HELD = """
select distinct c.relname, l.mode from pg_locks l join pg_class c on c.oid = l.relation
 where l.pid = pg_backend_pid() and l.granted and c.relkind = 'r' and c.relnamespace = 'durable'::regnamespace
   and l.mode not in ('AccessShareLock', 'RowShareLock', 'RowExclusiveLock')
"""


async def test_the_locks_of_each_migration(old_dsn: str):
    """Those without a transaction are left out: what they build, they build concurrently."""
    found: dict[str, dict[str, str]] = {}
    with psycopg.connect(old_dsn) as conn:
        for migration in migrations()[BEFORE:]:
            there = {
                name
                for (name,) in conn.execute("select tablename from pg_tables where schemaname = 'durable'")
            }
            conn.commit()
            if migration.transactional:
                conn.execute(migration.sql)  # type: ignore[call-overload]
                held = conn.execute(HELD).fetchall()
                found[migration.name] = {
                    table: max((mode for name, mode in held if name == table), key=_strength)
                    for table in {name for name, _ in held} & there
                }
                conn.commit()
            else:
                conn.autocommit = True
                for single in migrating.single_statements(migration.sql):
                    if single.strip():
                        conn.execute(single)  # type: ignore[call-overload]
                conn.autocommit = False
    assert found == LOCKS
    page = (ROOT / "docs" / "explanation" / "races.md").read_text("utf-8")
    assert not [m.name for m in migrations()[BEFORE:] if f"`{m.version:04d}_{m.name}`" not in page]


def _strength(mode: str) -> bool:
    return mode == EXCLUSIVE
