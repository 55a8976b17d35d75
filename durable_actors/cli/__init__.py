"""The command line: `durable-actors`. Every verb has `--help`; what prints data has `--json`."""

from __future__ import annotations

import logging
import sys

import click

from durable_actors._version import __version__
from durable_actors.cli.demo import demo
from durable_actors.cli.pg import pg
from durable_actors.cli.schema import migrate, uninstall
from durable_actors.errors import DurableError

__all__ = ["main"]


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="durable-actors")
@click.option("-v", "--verbose", count=True, help="Show what happens; twice for every detail.")
def cli(verbose: int) -> None:
    """Durable state machines and jobs on Trio and Postgres.

    Without a DSN (--dsn, DURABLE_DSN, PGHOST or PGSERVICE) an embedded Postgres is used.
    """
    level = {0: logging.WARNING, 1: logging.INFO}.get(verbose, logging.DEBUG)
    logging.basicConfig(level=level, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)


cli.add_command(demo)
cli.add_command(migrate)
cli.add_command(uninstall)
cli.add_command(pg)


def main() -> None:
    """Entry point: an error of ours is one line on stderr and exit code 1, never a traceback."""
    try:
        cli()
    except DurableError as exc:
        click.echo(f"durable-actors: {exc}", err=True)
        sys.exit(1)
