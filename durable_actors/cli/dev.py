"""The command `dev`: a worker that starts again when a file changes, and the dashboard beside it.

The worker is a process of its own (`serve --stop-on-eof`), so a change of code needs no reload inside an interpreter,
and a worker that hangs or dies takes nothing with it. It drains when it is told to end, or when its standard input
ends: so it does not outlive this command, however that ends.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

import click
import trio
from click.core import ParameterSource

from durable_actors.cli.options import bare_errors, database_options

INTERVAL: Final = 0.3
"""Seconds between two looks at the files."""
SETTLE: Final = 0.1
"""Seconds for which nothing may change: editors and version control write several files, one after the other."""
DRAIN: Final = 3.0
"""Seconds that running steps have when a file changes."""
SKIPPED: Final = frozenset({"__pycache__", "node_modules", "venv", "site-packages"})
"""Directories that are not watched; nor are those whose names begin with a dot."""

Seen = Mapping[str, tuple[int, int]]
"""File → when it was changed (nanoseconds), and its size."""


def look(directories: Iterable[Path]) -> Seen:
    """The Python files below these directories. What vanishes meanwhile is left out."""
    found: dict[str, tuple[int, int]] = {}
    for directory in directories:
        for base, names, files in os.walk(directory):
            names[:] = [name for name in names if name not in SKIPPED and not name.startswith(".")]
            for file in files:
                if file.endswith(".py"):
                    path = os.path.join(base, file)  # noqa: PTH118 - thousands of them, three times a second
                    try:
                        stat = os.stat(path)  # noqa: PTH116
                    except OSError:
                        continue
                    found[path] = (stat.st_mtime_ns, stat.st_size)
    return found


def changes(before: Seen, after: Seen) -> list[str]:
    """The files that were changed, added or removed. Pure."""
    return sorted(path for path in before.keys() | after.keys() if before.get(path) != after.get(path))


async def wait_for_change(directories: Sequence[Path], before: Seen) -> list[str]:
    """Return the changed files, as soon as nothing changes any more."""
    changed: list[str] = []
    seen = before
    while True:
        await trio.sleep(SETTLE if changed else INTERVAL)
        now = look(directories)
        if changed and now == seen:
            return changed
        seen = now
        changed = changes(before, now)


@click.command(short_help="Run a worker that starts again when a file changes.")
@click.argument("modules", nargs=-1, metavar="MODULE...")
@click.option("--queue", "queues", multiple=True, metavar="NAME[=N]", help="A queue to serve, as of serve.")
@click.option("--config", "settings", metavar="MODULE:NAME", help="A Config of your code, as of serve.")
@click.option(
    "--watch",
    multiple=True,
    metavar="DIRECTORY",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="A directory whose Python files are watched. Can be repeated. Default: the current directory.",
)
@click.option(
    "--dashboard/--no-dashboard",
    default=True,
    help="Also run the dashboard, if this installation has one. Default: --dashboard.",
)
@database_options
@click.pass_context
def dev(
    ctx: click.Context,
    /,
    *,
    modules: tuple[str, ...],
    queues: tuple[str, ...],
    settings: str | None,
    watch: tuple[Path, ...],
    dashboard: bool,
    dsn: str | None,
    schema: str,
) -> None:
    """Run a worker process for MODULE..., and start it again when a Python file changes.

    A worker that cannot start (an error in the code) is started again after the next change. Ctrl-C ends everything.
    """
    if not modules and settings is None:
        raise click.UsageError("Missing argument 'MODULE...'.")
    where = [] if dsn is None else ["--dsn", dsn]
    if ctx.get_parameter_source("schema") is ParameterSource.COMMANDLINE:  # the environment is theirs, too
        where += ["--schema", schema]
    worker = [*modules, "--stop-on-eof", "--drain", f"{DRAIN:g}", *where]
    for queue in queues:
        worker += ["--queue", queue]
    if settings is not None:
        worker += ["--config", settings, "--no-dashboard"]
    commands = [["serve", *worker]]
    if dashboard and ctx.parent is not None and has_verb(ctx.parent, "dashboard"):
        commands.append(["dashboard", *where])
    with bare_errors():
        trio.run(_dev, commands, list(watch) or [Path()])


def has_verb(ctx: click.Context, name: str) -> bool:
    """Whether this installation has such a command."""
    return isinstance(ctx.command, click.Group) and ctx.command.get_command(ctx, name) is not None


def say(text: str) -> None:
    """Print a line for people, beside the log of the worker."""
    click.echo(f"dev: {text}", err=True)


async def _dev(commands: list[list[str]], directories: list[Path]) -> None:
    """Until a signal: the worker, again after every change; what follows it in `commands` once."""
    worker, *others = commands
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_end_on_signal, nursery.cancel_scope)
        for other in others:
            nursery.start_soon(_run, other)
        while True:
            before = look(directories)
            changed: list[str] = []
            async with trio.open_nursery() as turn:
                turn.start_soon(_run, worker)
                changed += await wait_for_change(directories, before)
                turn.cancel_scope.cancel()
            more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
            say(f"{changed[0]}{more} changed, starting again")


async def _end_on_signal(scope: trio.CancelScope) -> None:
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async for _ in signals:
            scope.cancel()


async def _run(arguments: list[str]) -> None:
    """Run one of our commands in a process of its own, until it ends or is cancelled."""
    command = [sys.executable, "-m", "durable_actors.cli", *arguments]
    process = await trio.lowlevel.open_process(command, stdin=subprocess.PIPE)
    try:
        code = await process.wait()
        again = "; it starts again when a file changes" if arguments[0] == "serve" else ""
        say(f"{arguments[0]} has ended with exit code {code}{again}")
    finally:
        with trio.CancelScope(shield=True):
            await _stop(process, drains=arguments[0] == "serve")


async def _stop(process: trio.Process, *, drains: bool) -> None:
    """End it. A worker drains when its standard input ends; a signal after that of a terminal cancels its steps."""
    assert process.stdin is not None
    await process.stdin.aclose()
    if drains:
        with trio.move_on_after(DRAIN + 2):
            await process.wait()
    for end in (process.terminate, process.kill):
        if process.poll() is None:
            end()
            with trio.move_on_after(2):
                await process.wait()
