"""The command line `durable-actors`. Every command has `--help`; commands that print data have `--json`."""

from __future__ import annotations

import logging
import sys
from importlib import import_module
from typing import IO, Any, Final

import click

from durable_actors._version import __version__
from durable_actors.errors import DurableError

__all__ = ["cli", "main"]

VERBS: Final = {
    "serve": ("serve", "serve", "Run a worker process."),
    "insert": ("send", "insert", "Start an instance of a machine or job."),
    "signal": ("send", "signal", "Send a signal to an instance."),
    "list": ("instances", "list_", "List instances, newest first."),
    "show": ("instances", "show", "Show one instance, and why it is waiting."),
    "why": ("explain", "why", "Explain why an instance waits, runs or has ended."),
    "history": ("history", "history", "Show what happened to an instance."),
    "tree": ("tree", "tree", "Show the family of an instance: who started whom."),
    "graph": ("graph", "graph", "Draw the tasks of an instance, or the steps of a machine."),
    "retry": ("control", "retry", "Run failed or cancelled instances again."),
    "rerun": ("control", "rerun", "Start a new instance from an old one."),
    "run-now": ("control", "run_now", "Let delayed instances run now."),
    "cancel": ("control", "cancel", "Cancel instances that have not ended."),
    "pause": ("pause", "pause", "Let nothing run instances until they are resumed."),
    "resume": ("pause", "resume", "Let paused instances run again."),
    "queue": ("pause", "queue", "Pause and resume queues."),
    "schedules": (
        "schedules",
        "schedules",
        "List schedules: when each fires next, and what became of its last slots.",
    ),
    "limits": (
        "limits",
        "limits",
        "List limits: the level of each key, how many wait, the next token, who has the slots.",
    ),
    "proceed": ("decide", "proceed", "Let instances proceed that wait at a Pause."),
    "approve": ("decide", "approve", "Approve what instances ask."),
    "reject": ("decide", "reject", "Reject what instances ask."),
    "audit": ("audit", "audit", "Show which commands were given, by whom and why."),
    "verify": ("history", "verify", "Compare instances with their journals."),
    "rebuild": ("repair", "rebuild", "Write a row as its journal says."),
    "accept": ("repair", "accept", "Begin a history anew with the row as it is."),
    "recover": ("repair", "recover", "Correct what damage or a bug has left waiting."),
    "queues": ("overview", "queues", "Show waiting and running work per queue."),
    "nodes": ("overview", "nodes", "Show the nodes (running engines)."),
    "top": ("top", "top", "Show queues, nodes and rates, live."),
    "doctor": ("doctor", "doctor", "Check database and workers, with a remedy for each finding."),
    "versions": ("versions", "versions", "Show which versions and steps live instances need."),
    "check": ("versions", "check", "Check whether this code can run the live instances: a deploy gate."),
    "dashboard": ("dashboard", "dashboard", "Serve the dashboard."),
    "migrate": ("schema", "migrate", "Create or update the schema."),
    "uninstall": ("schema", "uninstall", "Drop the tables and all data in them."),
    "pg": ("pg", "pg", "Manage the embedded Postgres."),
    "init": ("init", "init", "Write a small project that runs and has tests."),
    "dev": ("dev", "dev", "Run a worker that starts again when a file changes."),
    "demo": ("demo", "demo", "Kill a worker and watch its orders recover."),
}
"""The commands, in the order of `--help`: module, name there, and what `--help` says.

A command is imported when it is used: all of them, with what they import, take half a second.
"""


class Failure(click.ClickException):
    """An expected error: one line on stderr and exit code 1, no traceback."""

    def show(self, file: IO[Any] | None = None) -> None:
        """Print the error."""
        click.echo(f"durable-actors: {' '.join(self.message.split())}", file=file or sys.stderr)


class Verbs(click.Group):
    """The group of all commands. Expected errors are printed as one line."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        """Return the commands in the order of `--help`."""
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002 - click's
        """Import a command."""
        if cmd_name not in VERBS:
            return None
        module, name, _ = VERBS[cmd_name]
        command: click.Command = getattr(import_module(f"{__name__}.{module}"), name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002 - click's
        """Write the list of commands, without importing them."""
        limit = formatter.width - 6 - max(map(len, VERBS))
        with formatter.section("Commands"):
            stubs = [click.Command(name, help=text) for name, (_, _, text) in VERBS.items()]
            formatter.write_dl([(stub.name or "", stub.get_short_help_str(limit)) for stub in stubs])

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command."""
        try:
            return super().invoke(ctx)
        except DurableError as exc:
            raise Failure(str(exc)) from exc
        except Exception as exc:
            if _is_of_postgres(exc):
                raise Failure(f"Postgres returned an error: {exc}") from exc
            raise


def _is_of_postgres(error: Exception) -> bool:
    from psycopg import Error  # noqa: PLC0415 - `--help` does not need it

    return isinstance(error, Error)


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


def main() -> None:
    """Entry point of `durable-actors`."""
    cli(prog_name="durable-actors")
