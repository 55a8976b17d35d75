"""Bring a database's schema up to date: forward only, safe against other migrators, recorded.

Statements   ensure_migrations.sql, read_migrations.sql, record_migration.sql and the files in `migrations/`.
Lock         an advisory lock per schema, tried repeatedly. A migrator that waited inside `pg_advisory_lock` would hold
a
             snapshot, and `CREATE INDEX CONCURRENTLY` of the active migrator would wait for it.
Crash        a migration and its record are committed together. A migration that cannot run in a transaction is written
             so that running it again repairs what a crash left behind (e.g. it drops an invalid index first).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from typing import Final

import attrs
import psycopg
import trio

from durable_actors._option_checks import check_schema_name
from durable_actors._postgres.driver.connection import PgConn
from durable_actors._postgres.driver.statement import Statement
from durable_actors._postgres.starting import InRecovery
from durable_actors._store.sql import Migration, in_schema, migrations, statement
from durable_actors.errors import ConfigError, SchemaError

logger: Final = logging.getLogger("durable_actors.migrate")

MIN_SERVER: Final = 140000
"""`server_version_num` of the oldest supported Postgres."""
_LOCK_RETRY_INTERVAL: Final = 0.05
"""Seconds between two attempts to get the lock."""


@attrs.frozen
class SchemaVersion:
    """The schema version of a database."""

    schema: str
    """The schema's name."""
    current: int
    """The newest migration recorded in the database; 0 if there is none."""
    latest: int
    """The newest migration of this package."""
    pending: tuple[Migration, ...]
    """The migrations that `migrate` would apply, in order."""


def plan(
    applied: Sequence[int], shipped: Sequence[Migration], *, schema: str, target: int | None = None
) -> SchemaVersion:
    """Decide what to apply. Raises `SchemaError` for a database that is newer than this package. Pure."""
    latest = shipped[-1].version if shipped else 0
    current = max(applied, default=0)
    if current > latest:
        raise SchemaError(
            f'schema "{schema}" is at version {current}, this durable_actors knows {latest}: '
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
    pending = tuple(m for m in shipped if m.version not in applied and m.version <= wanted)
    return SchemaVersion(schema=schema, current=current, latest=latest, pending=pending)


async def migrate(
    dsn: str,
    *,
    schema: str = "durable",
    version: int | None = None,
    on_progress: Callable[[Migration], None] | None = None,
) -> SchemaVersion:
    """Create or update the schema; return its version. Any number of processes may call it at the same time.

    `version` is the migration to stop at; default: the newest. Cancelled: the current migration is rolled back, earlier
    ones are done.
    """
    check_schema_name(schema)
    conn = await PgConn.open(dsn)
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
    try:
        # One transaction: every schema of ours has the table by which `uninstall` recognises it.
        await conn.batch([(_ensure_schema(schema), ()), (statement("ensure_migrations", schema), ())])
        # Again, now that no other process migrates.
        found = plan(await _applied(conn, schema), shipped, schema=schema, target=version)
        for migration in found.pending:
            if on_progress is not None:
                on_progress(migration)
            await _apply(conn, schema, migration)
            logger.info('schema "%s": applied %04d_%s', schema, migration.version, migration.name)
    except psycopg.errors.InsufficientPrivilege as exc:
        raise SchemaError(
            f'this role may not create schema "{schema}" or objects in it: {exc}. Let a role with that privilege '
            "run the output of `durable-actors migrate --sql`, and start with migrate=False."
        ) from exc
    return plan(await _applied(conn, schema), shipped, schema=schema)


async def schema_version(conn: PgConn, *, schema: str) -> SchemaVersion:
    """Read the schema version, without changing anything. Raises `SchemaError` if it is newer than this package."""
    await _require_server(conn)
    return plan(await _applied(conn, schema), migrations(), schema=schema)


async def require_schema(conn: PgConn, *, schema: str) -> None:
    """Raise `SchemaError` unless the schema has exactly the version that this package needs."""
    found = await schema_version(conn, schema=schema)
    if found.pending:
        state = f"is at version {found.current}, and version {found.latest} is needed"
        command = "durable-actors migrate" + ("" if schema == "durable" else f" --schema {schema}")
        raise SchemaError(
            f'schema "{schema}" {state if found.current else "does not exist in this database"}: '
            f"run `{command}`, or start a worker that may migrate (without --no-migrate, migrate=False)"
        )


def migration_sql(schema: str = "durable") -> str:
    """Everything that `migrate` does on an empty database, as SQL: for a role with more privileges, or for review."""
    return "\n\n".join(migration_parts(schema)) + "\n"


def migration_parts(schema: str = "durable") -> list[str]:
    """The same in parts, each to be sent separately: outside of a transaction a part is one statement."""
    check_schema_name(schema)
    parts = [_ensure_schema(schema).sql + ";", statement("ensure_migrations", schema).sql.strip() + ";"]
    for migration in migrations():
        body = in_schema(migration.sql, schema).strip()
        record = in_schema("insert into durable.migrations (version, name)", schema)
        record += f" values ({migration.version}, '{migration.name}');"
        if migration.transactional:
            parts.append(f"begin;\n\n{body}\n\n{record}\n\ncommit;")
        else:
            parts += [single + ";" for each in _STATEMENT_END.split(body) if (single := each.strip())]
            parts.append(record)
    return parts


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
    record = statement("record_migration", schema)
    params = [str(migration.version).encode(), migration.name.encode()]
    try:
        if migration.transactional:
            async with conn.transaction():
                await conn.script(sql)
                await conn.run(record, params)
        else:
            for single in _STATEMENT_END.split(
                sql
            ):  # several statements in one message would be one transaction
                await conn.script(single)
            await conn.run(record, params)
    except psycopg.Error as exc:
        exc.add_note(f'in migration {migration.version:04d}_{migration.name} of schema "{schema}"')
        raise


async def _applied(conn: PgConn, schema: str) -> list[int]:
    """The recorded versions; empty if the table does not exist."""
    if not await _present(conn, schema):
        return []
    rows = (await conn.run(statement("read_migrations", schema, read_only=True))).rows
    return [int(row[0] or 0) for row in rows]


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
"""The end of a statement in a migration that runs outside of a transaction; such files contain no function bodies."""
_TRY_LOCK: Final = Statement("try_migrate_lock", "select pg_try_advisory_lock(hashtextextended($1, 0))")
_PRESENT: Final = Statement(
    "migrations_present",
    "select to_regclass(format('%I.migrations', $1::text)) is not null",
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
