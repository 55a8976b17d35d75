"""The command line `durable-actors`. Every command has `--help`; commands that print data have `--json`."""

from __future__ import annotations

import logging
import sys
from typing import IO, Any

import click
import psycopg

from durable_actors._version import __version__
from durable_actors.cli.audit import audit
from durable_actors.cli.control import cancel, rerun, retry, run_now
from durable_actors.cli.decide import approve, proceed, reject
from durable_actors.cli.demo import demo
from durable_actors.cli.explain import why
from durable_actors.cli.history import history, verify
from durable_actors.cli.instances import list_, show
from durable_actors.cli.overview import nodes, queues
from durable_actors.cli.pause import pause, queue, resume
from durable_actors.cli.pg import pg
from durable_actors.cli.repair import accept, rebuild, recover
from durable_actors.cli.schema import migrate, uninstall
from durable_actors.cli.send import insert, signal
from durable_actors.cli.serve import serve
from durable_actors.cli.top import top
from durable_actors.cli.tree import tree
from durable_actors.errors import DurableError

__all__ = ["cli", "main"]


class Failure(click.ClickException):
    """An expected error: one line on stderr and exit code 1, no traceback."""

    def show(self, file: IO[Any] | None = None) -> None:
        """Print the error."""
        click.echo(f"durable-actors: {' '.join(self.message.split())}", file=file or sys.stderr)


class Verbs(click.Group):
    """The group of all commands. Expected errors are printed as one line."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        """Return the commands in the order in which they were added."""
        return list(self.commands)

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command."""
        try:
            return super().invoke(ctx)
        except DurableError as exc:
            raise Failure(str(exc)) from exc
        except psycopg.Error as exc:
            raise Failure(f"Postgres returned an error: {exc}") from exc


@click.group(cls=Verbs, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="durable-actors")
@click.option("-v", "--verbose", count=True, help="Log at level INFO; -vv logs at level DEBUG.")
@click.pass_context
def cli(ctx: click.Context, /, verbose: int) -> None:
    """Durable state machines and jobs on Trio and Postgres.

    Without a DSN (--dsn, DURABLE_DSN, PGHOST or PGSERVICE) an embedded Postgres is used.
    """
    ctx.obj = verbose
    if ctx.invoked_subcommand == "serve":
        return  # it configures logging after importing the user's modules
    level = {0: logging.WARNING, 1: logging.INFO}.get(verbose, logging.DEBUG)
    logging.basicConfig(level=level, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)


for _verb in (
    serve, insert, signal, list_, show, why, history, tree, retry, rerun, run_now, cancel, pause, resume, queue,
    proceed, approve, reject, audit, verify, rebuild, accept, recover, queues, nodes, top, migrate, uninstall, pg, demo,
):  # fmt: skip
    cli.add_command(_verb)


def main() -> None:
    """Entry point of `durable-actors`."""
    cli(prog_name="durable-actors")
