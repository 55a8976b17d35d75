"""The command `doctor`: whether the database is fit, and whether anything is in the way of the work."""

from __future__ import annotations

import sys
import time
from collections import Counter
from functools import partial

import click
import psycopg
import trio
from rich.text import Text

from durable_actors._postgres.driver.connection import PgConn
from durable_actors._postgres.target import open_target
from durable_actors._store.claim import read_queue
from durable_actors._store.examine import (
    examine_holders,
    examine_indexes,
    examine_server,
    examine_tables,
    expected_indexes,
)
from durable_actors._store.migrate import schema_version
from durable_actors._store.observe import NodeView, read_nodes, read_queues
from durable_actors._version import __version__
from durable_actors._wording import counted
from durable_actors.cli.doctor_checks import (
    OLD,
    Finding,
    check_bloat,
    check_clock,
    check_holders,
    check_indexes,
    check_server,
    check_versions,
    check_work,
)
from durable_actors.cli.options import database_options, json_option, make_config
from durable_actors.cli.output import make_console, one_line, print_json
from durable_actors.cli.overview import make_views
from durable_actors.errors import ConfigError, DurableError

MARKS = {"ok": ("ok", "green"), "warning": ("WARNING", "yellow"), "problem": ("PROBLEM", "bold red")}


@click.command(short_help="Check database and workers, with a remedy for each finding.")
@database_options
@json_option
def doctor(*, dsn: str | None, schema: str, as_json: bool) -> None:
    """Check the database, its clock, versions, indexes, dead rows, what holds vacuum back, settings and workers.

    Each finding has a remedy. Reads waiting rows, but no finished ones, and changes nothing. The exit code is 1 if
    there is a problem; warnings do not change it.
    """
    found = trio.run(partial(_examine, dsn, schema))
    if as_json:
        print_json(found)
    else:
        console = make_console()
        for each in found:
            mark, style = MARKS[each.level]
            line = Text(f"{mark:8}", style=style).append(f"{each.check:12}", style="default")
            console.print(line.append(one_line(each.found, limit=1000), style="default"), soft_wrap=True)
            if each.remedy is not None:
                console.print(
                    Text(f"{'':20}→ {one_line(each.remedy, limit=1000)}", style="dim"), soft_wrap=True
                )
        counts = Counter(each.level for each in found)
        click.echo(f"{counted(counts['problem'], 'problem')}, {counted(counts['warning'], 'warning')}")
    if any(each.level == "problem" for each in found):
        sys.exit(1)


async def _examine(dsn: str | None, schema: str) -> list[Finding]:
    """Run all checks. An unreachable database is a finding, not an error."""
    config = make_config(dsn, schema)
    try:
        async with open_target(config.dsn) as target:
            conn = await PgConn.open(target.dsn)
            try:
                return await _examine_database(conn, config.schema)
            finally:
                conn.close()
    except ConfigError:
        raise
    except (DurableError, psycopg.Error, OSError) as error:
        remedy = "check that the server runs, and the DSN: $DURABLE_DSN or --dsn"
        return [Finding("database", "problem", f"cannot be used: {one_line(str(error), limit=500)}", remedy)]


async def _examine_database(conn: PgConn, schema: str) -> list[Finding]:
    before = time.time()
    server = await examine_server(conn, schema)
    found = [
        Finding("database", "ok", "it answers"),
        check_clock(server.clock, before, time.time()),
        *check_server(server),
    ]
    version = await schema_version(conn, schema=schema)
    nodes: list[NodeView] = [] if version.pending else await read_nodes(conn, schema)
    found += check_versions(version, __version__, nodes)
    if version.current:
        expected = expected_indexes(version.current)
        found += check_indexes(expected, await examine_indexes(conn, schema), schema)
        found += check_bloat(await examine_tables(conn, schema), schema)
    holders = await examine_holders(conn, schema, older_than=OLD)
    found += check_holders(holders, sees_others=server.sees_others)
    if not version.pending:
        work = await read_queues(conn, schema)
        shelves = {
            each.queue: (await read_queue(conn, schema, each.queue)).shelved for each in work if each.shelved
        }
        found += check_work(make_views(work, nodes, None, shelves), nodes)
    return found
