"""The command `serve`: run a worker process."""

from __future__ import annotations

import gc
import logging
import os
import sys
from collections.abc import Mapping
from functools import partial
from typing import Any, Final

import click
import trio

from durable_actors._option_fields import options_of
from durable_actors.cli.options import (
    bare_errors,
    config_options,
    import_modules,
)
from durable_actors.config import Config, Queue
from durable_actors.engine import Engine, serve as run_until_signal
from durable_actors.errors import ConfigError
from durable_actors.machine import current_registry

_CONCURRENCY: Final = Queue().concurrency
_ALL_QUEUES: Final = options_of(Config)["queues"].default_words


def read_queues(texts: tuple[str, ...]) -> Mapping[str, int | Queue] | None:
    """Parse `name`, `name=10` or `name=10+5` (with a prefetch of 5). Returns None, for all queues, if none is given."""
    if not texts:
        return None
    found: dict[str, int | Queue] = {}
    for text in texts:
        name, equals, numbers = text.partition("=")
        concurrency, plus, prefetch = numbers.partition("+")
        if not name or (equals and not _digits(concurrency)) or (plus and not _digits(prefetch)):
            raise click.BadParameter(
                f"{text!r} is not NAME, NAME=CONCURRENCY or NAME=CONCURRENCY+PREFETCH", param_hint="--queue"
            )
        if name in found:
            raise click.BadParameter(f"queue {name!r} is given twice", param_hint="--queue")
        slots = int(concurrency) if equals else _CONCURRENCY
        found[name] = Queue(slots, prefetch=int(prefetch)) if plus else slots
    return found


def _digits(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 10


LEVELS: Final = ("DEBUG", "INFO", "WARNING", "ERROR")


@click.command(short_help="Run a worker process.")
@click.argument("modules", nargs=-1, required=True, metavar="MODULE...")
@click.option(
    "--queue",
    "queues",
    multiple=True,
    metavar="NAME[=N[+PREFETCH]]",
    help=f"A queue to serve, with N steps at a time ({_CONCURRENCY}). Can be repeated. Default: {_ALL_QUEUES}.",
)
@config_options
@click.option(
    "--stop-on-eof",
    is_flag=True,
    help="Also drain when standard input ends, for example because the parent process has ended.",
)
@click.option(
    "--log-level",
    type=click.Choice(LEVELS, case_sensitive=False),
    help="The log level. Default: INFO, or the level that your modules configure.",
)
@click.pass_context
def serve(
    ctx: click.Context,
    /,
    *,
    modules: tuple[str, ...],
    queues: tuple[str, ...],
    stop_on_eof: bool,
    log_level: str | None,
    **options: Any,
) -> None:
    """Run a worker process: import MODULE..., then run the steps of their machines and jobs.

    On SIGTERM or SIGINT it drains: it claims no more rows, lets running steps finish within --drain seconds, releases
    the rest, and ends with exit code 0. A second signal cancels running steps.
    """
    wanted = read_queues(queues)
    import_modules(modules, verbose=bool(ctx.obj))
    config = Config(queues=wanted, **options)
    _require_machines(modules)
    _configure_logging(log_level, verbose=ctx.obj or 0)
    with bare_errors():
        _collect_garbage_less_often()
        trio.run(partial(_run, config, stop_on_eof=stop_on_eof))


def _configure_logging(level: str | None, *, verbose: int) -> None:
    """Log to standard error with time stamps, unless the user's modules have configured the root logger."""
    root = logging.getLogger()
    if not root.handlers:
        chosen = level or ("DEBUG" if verbose > 1 else "INFO")
        logging.basicConfig(
            level=chosen.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr
        )
    elif level is not None:
        root.setLevel(level.upper())


def _require_machines(modules: tuple[str, ...]) -> None:
    """Refuse to run without machines: such a worker would do nothing and look healthy."""
    if not len(current_registry()):
        raise ConfigError(
            f"no machine or job is defined in {', '.join(modules)}: give the module that defines them "
            "(classes of durable_actors.Machine, functions with @durable_actors.job), or one that imports it",
            option="module",
        )


def _collect_garbage_less_often() -> None:
    """Raise the thresholds of the garbage collector: the objects of a thousand steps in flight are not garbage.

    With Python's thresholds (700, 10, 10) the collector took 23 to 30 of the 76 to 106 µs per short job; with 10,000 as
    the first threshold, 12 µs. Steps in flight have about 40,000 objects: with 50,000, most of them are freed before
    the collector runs, and a job takes another tenth less.
    Only this command does so; an application that runs an engine decides itself: docs/explanation/performance.md.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


async def _run(config: Config, *, stop_on_eof: bool) -> None:
    """Serve until a signal arrives or standard input ends."""
    async with trio.open_nursery() as nursery:
        engine: Engine = await nursery.start(run_until_signal, config)
        if stop_on_eof:
            await _stop_on_eof(engine)


async def _stop_on_eof(engine: Engine) -> None:
    """Drain the engine when standard input ends; return when the engine has stopped for any reason."""

    async def watch() -> None:
        # In a thread, because standard input may be a file, a shared terminal, or closed. If the engine stops first,
        # the thread is abandoned, and the process ends.
        read = partial(os.read, sys.stdin.fileno(), 4096)
        while await trio.to_thread.run_sync(read, abandon_on_cancel=True):
            pass
        logging.getLogger("durable_actors").info("engine %s: standard input has ended, draining", engine.name)
        engine.request_stop()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(watch)
        await engine.wait_stopped()
        nursery.cancel_scope.cancel()
