"""The commands `migrate` and `uninstall`."""

from __future__ import annotations

import json
import sys
from functools import partial

import click
import trio

from durable_actors._postgres.driver.connection import PgConn
from durable_actors._postgres.starting import when_ready
from durable_actors._postgres.target import open_target
from durable_actors._store import migrate as migrating
from durable_actors._store.sql import Migration
from durable_actors.cli.options import config_option, database_options, make_config
from durable_actors.config import Config


@click.command(short_help="Create or update the schema.")
@database_options
@click.option("--check", is_flag=True, help="Change nothing; exit with code 1 if migrations are pending.")
@click.option(
    "--sql", "as_sql", is_flag=True, help="Print the SQL for an empty database, and change nothing."
)
@click.option("--to", "version", type=int, metavar="N", help="Stop at migration N instead of the newest.")
@config_option("start_timeout")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def migrate(
    *,
    dsn: str | None,
    schema: str,
    check: bool,
    as_sql: bool,
    version: int | None,
    start_timeout: float,
    as_json: bool,
) -> None:
    """Create or update the schema. Any number of processes may do this at the same time."""
    if check and as_sql:
        raise click.UsageError("--check and --sql cannot be combined")
    config = make_config(dsn, schema)
    if as_sql:
        click.echo(migrating.migration_sql(config.schema), nl=False)
        return

    def report(migration: Migration) -> None:
        if not as_json:
            click.echo(f"applying {migration.version:04d}_{migration.name} ...")

    async def run() -> migrating.SchemaVersion:
        async with open_target(config.dsn) as target:
            change = partial(
                migrating.migrate, target.dsn, schema=config.schema, version=version, on_progress=report
            )
            attempt = partial(_look, target.dsn, config) if check else change
            return await when_ready(attempt, [target.dsn], start_timeout=start_timeout)

    found = trio.run(run)
    pending = [f"{m.version:04d}_{m.name}" for m in found.pending]
    if as_json:
        facts = {
            "schema": found.schema,
            "version": found.current,
            "latest": found.latest,
            "works_with": found.works_with,
            "pending": pending,
        }
        click.echo(json.dumps(facts))
    elif found.is_newer:
        click.echo(migrating.newer_text(found))
    elif pending and check:
        click.echo(f"schema {found.schema} is at version {found.current}; pending: {', '.join(pending)}")
    else:
        click.echo(f"schema {found.schema} is at version {found.current}, the newest is {found.latest}")
    if check and pending:
        sys.exit(1)


async def _look(dsn: str, config: Config) -> migrating.SchemaVersion:
    conn = await PgConn.open(dsn)
    try:
        return await migrating.schema_version(conn, schema=config.schema)
    finally:
        conn.close()


@click.command(short_help="Drop the tables and all data in them.")
@database_options
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
def uninstall(*, dsn: str | None, schema: str, yes: bool) -> None:
    """Drop the tables with all instances and signals. This cannot be undone."""
    config = make_config(dsn, schema)
    if not yes:
        click.confirm(f"Drop schema {config.schema} with all instances and signals?", abort=True)

    async def run() -> bool:
        async with open_target(config.dsn) as target:
            return await migrating.uninstall(target.dsn, schema=config.schema)

    if trio.run(run):
        click.echo(f"schema {config.schema} was dropped")
    else:
        click.echo(f"schema {config.schema} has no tables of durable_actors; nothing to drop")
