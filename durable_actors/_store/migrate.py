"""Bring a database's schema up to date: forward only, safe against other migrators, recorded.

Statements   ensure_migrations.sql, read_migrations.sql, record_migration.sql and the files in `migrations/`.
Lock         an advisory lock per schema, tried repeatedly. A migrator that waited inside `pg_advisory_lock` would have
             a snapshot, and `CREATE INDEX CONCURRENTLY` of the active migrator would wait for it.
Tables       locks of tables are waited for briefly and again (`LOCK_WAITS`): everybody waits behind who waits for one.
Releases     a database that is newer than this package can be used if its migrations say so (`works_with`).
Crash        a migration and its record are committed together. A migration that cannot run in a transaction is written
             so that running it again repairs what a crash left behind (e.g. it drops an invalid index first).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import attrs
import psycopg
import trio

from durable_actors._option_checks import check_schema_name
from durable_actors._postgres.driver import encode
from durable_actors._postgres.driver.connection import PgConn
from durable_actors._postgres.driver.statement import Statement
from durable_actors._postgres.starting import InRecovery
from durable_actors._postgres.target import open_target
from durable_actors._store.sql import Migration, in_schema, migrations, statement
from durable_actors._version import __version__
from durable_actors.errors import ConfigError, SchemaError, StoreUnavailable

logger: Final = logging.getLogger("durable_actors.migrate")

MIN_SERVER: Final = 140000
"""`server_version_num` of the oldest supported Postgres."""
_LOCK_RETRY_INTERVAL: Final = 0.05
"""Seconds between two attempts to get the lock."""
LOCK_WAITS: Final = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6)
"""Seconds for which a migration waits for the lock of a table, attempt by attempt.

Whoever needs the table meanwhile waits behind it, so it begins with short waits. The last one is longer than the long
poll of an idle node (0.9 s), which shares the lock for as long, and than Postgres' `deadlock_timeout` (1 s), after
which an autovacuum that is in the way is ended.
"""
_PAUSE_FACTOR: Final = 4
"""The pause after an attempt that failed, in waits: everybody else goes on for so long."""
_WORKS_WITH: Final = "works_with"
"""The column of `migrations`, and the name of the migration that adds it."""


@attrs.frozen
class SchemaVersion:
    """The schema version of a database."""

    schema: str
    """The schema's name."""
    current: int
    """The newest migration recorded in the database; 0 if there is none."""
    latest: int
    """The newest migration of this package."""
    works_with: int
    """The oldest schema version whose package works with the database; 0 if that is not recorded."""
    pending: tuple[Migration, ...]
    """The migrations that `migrate` would apply, in order."""

    @property
    def is_newer(self) -> bool:
        """Whether a newer release has migrated the database. This package works with it, and migrates nothing."""
        return self.current > self.latest


def plan(
    applied: Mapping[int, int], shipped: Sequence[Migration], *, schema: str, target: int | None = None
) -> SchemaVersion:
    """Decide what to apply. `applied` are the migrations of the database, each with its `works_with`. Pure.

    Raises `SchemaError` for a database that is too new for this package.
    """
    latest = shipped[-1].version if shipped else 0
    current = max(applied, default=0)
    oldest = max(applied.values(), default=0)
    unknown = [said for version, said in applied.items() if version > latest]
    if unknown and (0 in unknown or oldest > latest):
        needed = f" and needs a package of version {oldest} or newer" if oldest > latest else ""
        raise SchemaError(
            f'schema "{schema}" is at version {current}{needed}, this durable_actors ({__version__}) knows {latest}: '
            "a newer release has migrated it. Upgrade the package on this node."
        )
    if target is not None and not current <= target <= latest:
        raise ConfigError(
            f"version={target} cannot be reached: the database is at {current}, the newest is {latest}, and "
            "migrations go forward only",
            option="version",
            value=target,
        )
    wanted = latest if target is None else target
    pending = () if unknown else tuple(m for m in shipped if m.version not in applied and m.version <= wanted)
    return SchemaVersion(schema=schema, current=current, latest=latest, works_with=oldest, pending=pending)


async def migrate(
    dsn: str,
    *,
    schema: str = "durable",
    version: int | None = None,
    on_progress: Callable[[Migration], None] | None = None,
) -> SchemaVersion:
    """Create or update the schema; return its version. Any number of processes may call it at the same time.

    `dsn` is that of `Config`, so it may be "embedded". `version` is the migration to stop at; default: the newest.
    Cancelled: the current migration is rolled back, earlier ones are done.
    """
    check_schema_name(schema)
    async with open_target(dsn) as target:
        conn = await PgConn.open(target.dsn)
        try:
            return await migrate_on(conn, schema=schema, version=version, on_progress=on_progress)
        finally:
            conn.close()


async def migrate_on(
    conn: PgConn,
    *,
    schema: str,
    version: int | None = None,
    shipped: Sequence[Migration] | None = None,
    on_progress: Callable[[Migration], None] | None = None,
) -> SchemaVersion:
    """Run `migrate` on a connection that the caller closes right after: that releases the lock."""
    shipped = migrations() if shipped is None else shipped
    await _require_server(conn)
    found = plan(await _applied(conn, schema), shipped, schema=schema, target=version)
    if not found.pending:
        return found
    await _lock(conn, schema)
    await conn.run(_NO_TIMEOUTS, [])
    try:
        # One transaction: every schema of ours has the table by which `uninstall` recognises it.
        await conn.batch([(_ensure_schema(schema), ()), (statement("ensure_migrations", schema), ())])
        # Again, now that no other process migrates.
        found = plan(await _applied(conn, schema), shipped, schema=schema, target=version)
        for migration in found.pending:
            if on_progress is not None:
                on_progress(migration)
            await _apply(conn, schema, migration)
            logger.debug('schema "%s": applied %04d_%s', schema, migration.version, migration.name)
        if found.pending:  # one line: the first start of a new user applies all of them
            first, last = found.pending[0].version, found.pending[-1].version
            what = "was created" if first == 1 else f"was updated from version {first - 1}"
            logger.info('schema "%s" %s: it is at version %d', schema, what, last)
    except psycopg.errors.InsufficientPrivilege as exc:
        raise SchemaError(
            f'this role may not create schema "{schema}" or objects in it: {exc}. Let a role with that privilege '
            "run the output of `durable-actors migrate --sql`, and start with migrate=False."
        ) from exc
    return plan(await _applied(conn, schema), shipped, schema=schema)


async def schema_version(conn: PgConn, *, schema: str) -> SchemaVersion:
    """Read the schema version, without changing anything. Raises `SchemaError` if it is too new for this package."""
    await _require_server(conn)
    return plan(await _applied(conn, schema), migrations(), schema=schema)


async def require_schema(conn: PgConn, *, schema: str) -> None:
    """Raise `SchemaError` unless this package works with the schema. Logs a WARNING if the schema is newer."""
    found = await schema_version(conn, schema=schema)
    if found.is_newer:
        logger.warning("%s", newer_text(found))
    if found.pending:
        state = f"is at version {found.current}, and version {found.latest} is needed"
        command = "durable-actors migrate" + ("" if schema == "durable" else f" --schema {schema}")
        raise SchemaError(
            f'schema "{schema}" {state if found.current else "does not exist in this database"}: '
            f"run `{command}`, or start a worker that may migrate (without --no-migrate, migrate=False)"
        )


def newer_text(found: SchemaVersion) -> str:
    """Say that a newer release has migrated the database, and that this package works with it. Pure."""
    return (
        f'schema "{found.schema}" is at version {found.current}, this durable_actors ({__version__}) knows '
        f"{found.latest}: a newer release has migrated it. It works with packages from version {found.works_with} on; "
        "upgrade this one soon"
    )


def migration_sql(schema: str = "durable") -> str:
    """Everything that `migrate` does on an empty database, as SQL: for a role with more privileges, or for review."""
    return "\n\n".join(migration_parts(schema)) + "\n"


def migration_parts(schema: str = "durable") -> list[str]:
    """The same in parts, each to be sent separately: outside of a transaction a part is one statement."""
    check_schema_name(schema)
    parts = [_ensure_schema(schema).sql + ";", statement("ensure_migrations", schema).sql.strip() + ";"]
    recorded = False
    for migration in migrations():
        recorded = recorded or migration.name == _WORKS_WITH
        body = in_schema(migration.sql, schema).strip()
        columns, values = "version, name", f"{migration.version}, '{migration.name}'"
        if recorded:
            columns, values = f"{columns}, {_WORKS_WITH}", f"{values}, {migration.works_with}"
        record = in_schema(f"insert into durable.migrations ({columns})", schema)
        record += f" values ({values});"
        if migration.transactional:
            parts.append(f"begin;\n\n{body}\n\n{record}\n\ncommit;")
        else:
            parts += [single + ";" for each in single_statements(body) if (single := each.strip())]
            parts.append(record)
    return parts


def single_statements(sql: str) -> list[str]:
    """Split a migration into its statements. A semicolon within the body of a function ends none. Pure."""
    found: list[str] = []
    begin = 0
    for match in _STATEMENT_END.finditer(sql):
        if sql.count("$$", begin, match.start()) % 2 == 0:
            found.append(sql[begin : match.start()])
            begin = match.end()
    return [*found, sql[begin:]]


async def uninstall(dsn: str, *, schema: str = "durable") -> bool:
    """Drop every object of ours with its data; also the schema, unless it contains objects of the user.

    Returns whether the schema itself is gone. A schema that is not ours is left alone. Waits for a running migration.
    Cancelled: all of it was done, or nothing.
    """
    check_schema_name(schema)
    conn = await PgConn.open(dsn)
    try:
        await _lock(conn, schema)
        if not await _present(conn, schema):
            return False
        await conn.script(statement("uninstall", schema).sql + _drop_schema(schema))
        return (await conn.run(_GONE, [schema.encode()])).rows[0][0] == b"t"
    finally:
        conn.close()


async def _lock(conn: PgConn, schema: str) -> None:
    """Take the migration lock of this schema; it is held until the connection ends."""
    if (
        conn.pooled
    ):  # the lock would stay in a session of the pooler, and the next migrator would wait for ever
        raise ConfigError(
            "this dsn goes through a pooler, and a migration needs its own session. Migrate through a direct "
            "connection to Postgres; an engine uses session_dsn for it",
            option="session_dsn",
        )
    name = [f"durable_actors migrate {schema}".encode()]
    while (await conn.run(_TRY_LOCK, name)).rows[0][0] != b"t":  # noqa: ASYNC110 - see the docstring
        await trio.sleep(_LOCK_RETRY_INTERVAL)


async def _apply(conn: PgConn, schema: str, migration: Migration) -> None:
    sql = in_schema(migration.sql, schema)
    try:
        if migration.transactional:
            await _apply_locked(conn, schema, migration, sql, record=True)
            return
        for single in single_statements(sql):  # several statements in one message would be one transaction
            if _CONCURRENTLY.search(_COMMENT.sub("", single)):
                # Nobody waits behind it, however long it waits for old transactions.
                await conn.script(single)
            else:
                await _apply_locked(conn, schema, migration, single)
        await _record(conn, schema, migration)
    except psycopg.Error as exc:
        exc.add_note(f"in {_named(migration, schema)}")
        raise


async def _apply_locked(
    conn: PgConn, schema: str, migration: Migration, sql: str, *, record: bool = False
) -> None:
    """Run it in a transaction that does not wait long for a lock. Raises `StoreUnavailable` after the last attempt."""
    for left, wait in zip(range(len(LOCK_WAITS) - 1, -1, -1), LOCK_WAITS, strict=True):
        try:
            async with conn.transaction():
                await conn.script(f"set local lock_timeout = {round(wait * 1000)}")
                await conn.script(sql)
                if record:
                    await _record(conn, schema, migration)
        except (psycopg.errors.LockNotAvailable, psycopg.errors.DeadlockDetected) as exc:
            holder = await _lock_holder(conn, schema)
            logger.debug("%s: no lock within %g s: %s", _named(migration, schema), wait, holder)
            if not left:
                raise StoreUnavailable(f"{_named(migration, schema)} needs a table: {holder}") from exc
        else:
            return
        await trio.sleep(wait * _PAUSE_FACTOR)


async def _lock_holder(conn: PgConn, schema: str) -> str:
    """Who has used a table of this schema for longest: most likely the one that the migration waits for."""
    rows = (await conn.run(_LOCK_HOLDER, [schema.encode()])).rows
    if not rows:
        return "whoever used it is gone by now"
    pid, name, state, seconds = rows[0]
    what = ", ".join(part.decode() for part in (name, state) if part) or "of another role"
    for_long = "" if seconds is None else f", for {float(seconds):.0f} s"
    return f"process {(pid or b'?').decode()} ({what}) uses it{for_long}"


async def _record(conn: PgConn, schema: str, migration: Migration) -> None:
    params = [encode.number(migration.version), migration.name.encode(), encode.number(migration.works_with)]
    await conn.run(statement("record_migration", schema), params)


def _named(migration: Migration, schema: str) -> str:
    return f'migration {migration.version:04d}_{migration.name} of schema "{schema}"'


async def _applied(conn: PgConn, schema: str) -> dict[int, int]:
    """The recorded versions, each with its `works_with`; empty if the table does not exist."""
    if not await _present(conn, schema):
        return {}
    rows = (await conn.run(statement("read_migrations", schema, read_only=True))).rows
    return {int(version or 0): int(oldest or 0) for version, oldest in rows}


async def _present(conn: PgConn, schema: str) -> bool:
    return (await conn.run(_PRESENT, [schema.encode()])).rows[0][0] == b"t"


async def _require_server(conn: PgConn) -> None:
    row = (await conn.run(_SERVER)).rows[0]
    if int(row[0] or 0) < MIN_SERVER:
        raise SchemaError(
            f"durable_actors needs Postgres 14 or newer, this server is {(row[1] or b'?').decode()}"
        )
    if row[3] != b"UTF8":
        # A row with a byte that cannot be converted to UTF-8 could not be sent to us: every pick of its queue would
        # fail.
        raise SchemaError(
            f"this database's encoding is {(row[3] or b'?').decode()}, durable_actors needs UTF8: "
            "create database … encoding 'UTF8' template template0"
        )
    if row[2] == b"t":
        raise InRecovery("this server is a standby and cannot be migrated; the DSN must reach the primary")


def _ensure_schema(schema: str) -> Statement:
    return Statement("ensure_schema", f'create schema if not exists "{check_schema_name(schema)}"')


def _drop_schema(schema: str) -> str:
    """Drop the schema unless it contains objects of the user. A DO block: one transaction drops it with our objects."""
    drop = f'drop schema "{check_schema_name(schema)}"'
    return f"do $$ begin {drop}; exception when dependent_objects_still_exist then null; end $$"


_STATEMENT_END: Final = re.compile(r";[ ]*$", re.MULTILINE)
"""The end of a statement in a migration that runs outside of a transaction, unless it is in the body of a function."""
_COMMENT: Final = re.compile(r"--.*$", re.MULTILINE)
_CONCURRENTLY: Final = re.compile(r"\bconcurrently\b", re.IGNORECASE)
_TRY_LOCK: Final = Statement("try_migrate_lock", "select pg_try_advisory_lock(hashtextextended($1, 0))")
_NO_TIMEOUTS: Final = Statement(
    "no_timeouts",
    "select set_config(s.name, '0', false) from pg_settings s"
    " where s.name in ('statement_timeout', 'lock_timeout', 'transaction_timeout')",
)
"""A role or a database may limit its statements. To check a constraint or build an index takes long if the table is
big, and lets everybody go on; what does not is limited by `LOCK_WAITS`."""
_PRESENT: Final = Statement(
    "migrations_present",
    "select to_regclass(format('%I.migrations', $1::text)) is not null",
    read_only=True,
)
_LOCK_HOLDER: Final = Statement(
    "lock_holder",
    "select l.pid, a.application_name, a.state, extract(epoch from clock_timestamp() - a.xact_start)"
    "  from pg_catalog.pg_locks l join pg_catalog.pg_stat_activity a on a.pid = l.pid"
    "  join pg_catalog.pg_class c on c.oid = l.relation join pg_catalog.pg_namespace n on n.oid = c.relnamespace"
    " where l.granted and n.nspname = $1::text and l.pid <> pg_backend_pid()"
    " order by a.xact_start nulls last, l.pid limit 1",
    read_only=True,
)
_GONE: Final = Statement(
    "schema_gone",
    "select not exists (select from pg_catalog.pg_namespace where nspname = $1::text)",
    read_only=True,
)
_SERVER: Final = Statement(
    "server_version",
    "select current_setting('server_version_num'), current_setting('server_version'), pg_is_in_recovery(), "
    "current_setting('server_encoding')",
    read_only=True,
)
