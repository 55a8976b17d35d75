"""The command `serve`: run a worker process."""

from __future__ import annotations

import gc
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, cast

import attrs
import click
import trio
from click.core import ParameterSource

from durable_actors._option_fields import options_of
from durable_actors.cli.health import (
    Health,
    HealthServer,
    has_prometheus,
    prometheus_observer,
    prometheus_page,
)
from durable_actors.cli.options import Whole, bare_errors, config_options, import_modules
from durable_actors.cli.processes import METRICS_DIR, WORKER, supervise, tell_ready, worker_arguments
from durable_actors.config import Config, Queue
from durable_actors.engine import Engine, serve as run_until_signal
from durable_actors.errors import ConfigError
from durable_actors.logs import configure
from durable_actors.machine import current_registry
from durable_actors.telemetry import Event

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


def address(text: str) -> tuple[str, int]:
    """Parse `8080`, `0.0.0.0:8080` or `[::]:8080`. For `type=` of options."""
    host, _, port = str(text).rpartition(":")
    if not _digits(port) or int(port) > 65535 or (host == "" and str(text).startswith(":")):
        raise click.BadParameter(f"{text!r} is not PORT or HOST:PORT")
    return host.strip("[]") or "127.0.0.1", int(port)


LEVELS: Final = ("DEBUG", "INFO", "WARNING", "ERROR")


@click.command(short_help="Run a worker process.")
@click.argument("modules", nargs=-1, metavar="MODULE...")
@click.option(
    "--queue",
    "queues",
    multiple=True,
    metavar="NAME[=N[+PREFETCH]]",
    help=f"A queue to serve, with N steps at a time ({_CONCURRENCY}). Can be repeated. Default: {_ALL_QUEUES}.",
)
@click.option(
    "--config",
    "settings",
    metavar="MODULE:NAME",
    help="A Config of your code, with limits, schedules, retention and whatever has no option here. Options of the "
    "command line go before it. Default: none.",
)
@config_options
@click.option(
    "--dashboard/--no-dashboard",
    default=True,
    help="Serve the dashboard, if the Config of --config has one; of several processes the first serves it. "
    "Default: --dashboard.",
)
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
@click.option(
    "--log-format",
    type=click.Choice(("text", "json"), case_sensitive=False),
    help="One JSON object per line, or text. Default: text, or the format that your modules configure.",
)
@click.option(
    "--observer",
    "observers",
    multiple=True,
    metavar="MODULE:FUNCTION",
    help="A function that is called with every event, as durable_actors.otel:observe. Can be repeated.",
)
@click.option(
    "--processes",
    type=Whole(1, 1000),
    default=1,
    metavar="N",
    help="Start so many worker processes, and start those that end again. Default: 1.",
)
@click.option(
    "--health",
    type=address,
    metavar="[HOST:]PORT",
    help="Serve /healthz, /readyz and, with the extra prometheus, /metrics there; HOST is 127.0.0.1 if it is not "
    "given. Default: no endpoint.",
)
@click.pass_context
def serve(
    ctx: click.Context,
    /,
    *,
    modules: tuple[str, ...],
    queues: tuple[str, ...],
    settings: str | None,
    dashboard: bool,
    stop_on_eof: bool,
    log_level: str | None,
    log_format: str | None,
    observers: tuple[str, ...],
    processes: int,
    health: tuple[str, int] | None,
    **options: Any,
) -> None:
    """Run a worker process: import MODULE..., then run the steps of their machines and jobs.

    On SIGTERM or SIGINT it drains: it claims no more rows, lets running steps finish within --drain seconds, releases
    the rest, and ends with exit code 0. A second signal cancels running steps.
    """
    if not modules and settings is None:
        raise click.UsageError("Missing argument 'MODULE...'.")
    wanted = read_queues(queues)
    verbose = bool(ctx.obj)
    if processes > 1:
        # wrong options are one error, not one of each process
        config = _config(ctx, settings, wanted, options, verbose=verbose)
        _configure_logging(log_level, log_format, verbose=ctx.obj or 0)
        arguments = worker_arguments(ctx, without=("processes", "health", "stop_on_eof"))
        run = partial(supervise, processes, arguments, drain=config.drain_timeout, verbose=ctx.obj or 0)
        with bare_errors():
            ctx.exit(trio.run(partial(run, health=health, stop_on_eof=stop_on_eof)))
    import_modules(modules, verbose=verbose)
    found = [_load_observer(each, verbose=verbose) for each in observers]
    config = _config(ctx, settings, wanted, options, verbose=verbose)
    import_modules(config.modules, verbose=verbose)
    state = Health()
    found = [*config.observers, *(each for each in found if each not in config.observers)]
    own = [each for each in _own_observers(health, state) if each not in found]  # it may be given, too
    config = attrs.evolve(config, observers=[*found, *own])
    if not dashboard or os.environ.get(WORKER, "1/").partition("/")[0] != "1":
        config = attrs.evolve(config, dashboard=None)
    _require_machines([*modules, *config.modules] or [settings or ""])
    _configure_logging(log_level, log_format, verbose=ctx.obj or 0)
    with bare_errors():
        _collect_garbage_less_often()
        trio.run(partial(_run, config, stop_on_eof=stop_on_eof, health=health, state=state))


def _configure_logging(level: str | None, form: str | None, *, verbose: int) -> None:
    """Log to standard error with time stamps, unless the user's modules have configured the root logger."""
    root = logging.getLogger()
    if root.handlers and form is None:
        if level is not None:
            root.setLevel(level.upper())
        return
    worker = os.environ.get(WORKER, "")
    configure(
        json=form == "json",
        level=level or ("DEBUG" if verbose > 1 else "INFO"),
        name=f"worker {worker}" if worker else None,
    )


def _load(text: str, *, option: str, metavar: str, verbose: bool) -> Any:
    """Import an object by its name, as `shop.metrics:observe`; None if its module has none of that name."""
    module, colon, name = text.partition(":")
    if not module or not colon or not name:
        raise click.BadParameter(f"{text!r} is not {metavar}", param_hint=option)
    import_modules([module], verbose=verbose)
    found: Any = sys.modules[module]
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


def _load_observer(text: str, *, verbose: bool) -> Callable[[Event], object]:
    found = _load(text, option="--observer", metavar="MODULE:FUNCTION", verbose=verbose)
    if not callable(found):
        module, _, name = text.partition(":")
        raise ConfigError(f"module {module!r} has no function {name!r}", option="observer", value=text)
    return cast("Callable[[Event], object]", found)


def _config(
    ctx: click.Context,
    settings: str | None,
    queues: Mapping[str, int | Queue] | None,
    options: Mapping[str, Any],
    *,
    verbose: bool,
) -> Config:
    """The settings of the command line, or those of `--config` as the command line changes them."""
    if settings is None:
        return Config(queues=queues, **options)
    found = _load(settings, option="--config", metavar="MODULE:NAME", verbose=verbose)
    if not isinstance(found, Config):
        module, _, name = settings.partition(":")
        raise ConfigError(
            f"module {module!r} has no durable_actors.Config named {name!r}", option="config", value=settings
        )
    return changed(found, queues, {name: options[name] for name in options if _was_given(ctx, name)})


def _was_given(ctx: click.Context, name: str) -> bool:
    return ctx.get_parameter_source(name) in {ParameterSource.COMMANDLINE, ParameterSource.ENVIRONMENT}


def changed(config: Config, queues: Mapping[str, int | Queue] | None, options: Mapping[str, Any]) -> Config:
    """A `Config` with these options instead of its own. Its queues keep what the command line does not say. Pure."""
    changes: dict[str, Any] = dict(options)
    if "lease_ttl" in options and config.heartbeat_interval == config.lease_ttl / 3:
        changes["heartbeat_interval"] = None  # derived anew
    derived = Config(dsn=config.dsn, poll_interval=config.poll_interval).max_poll_interval
    if "poll_interval" in options and config.max_poll_interval == derived:
        changes.setdefault("max_poll_interval", None)
    if queues is not None:
        own = config.queues or {}
        changes["queues"] = {name: _queue(own.get(name), each) for name, each in queues.items()}
    return attrs.evolve(config, **changes)


def _queue(own: Queue | None, given: int | Queue) -> int | Queue:
    if own is None:
        return given
    if isinstance(given, Queue):
        return attrs.evolve(own, concurrency=given.concurrency, prefetch=given.prefetch)
    return attrs.evolve(own, concurrency=given)


def _own_observers(health: tuple[str, int] | None, state: Health) -> list[Callable[[Event], object]]:
    """What the health endpoint and the supervisor of several processes want to know."""
    found: list[Callable[[Event], object]] = []
    supervised = METRICS_DIR in os.environ and WORKER in os.environ
    if (health is not None or supervised) and has_prometheus():
        found.append(prometheus_observer())
    if health is not None:
        found.append(state)
    if (tell := tell_ready(os.environ)) is not None:
        found.append(tell)
    return found


def _require_machines(modules: Sequence[str]) -> None:
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


async def _run(config: Config, *, stop_on_eof: bool, health: tuple[str, int] | None, state: Health) -> None:
    """Serve until a signal arrives or standard input ends. The health endpoint answers before and until then."""
    async with trio.open_nursery() as nursery:
        if health is not None:
            page = prometheus_page if has_prometheus() else None
            await nursery.start(HealthServer(*health, ready=state.ready, metrics=page).run)
        async with trio.open_nursery() as inner:
            engine: Engine = await inner.start(run_until_signal, config)
            if stop_on_eof:
                await _stop_on_eof(engine)
        nursery.cancel_scope.cancel()


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
