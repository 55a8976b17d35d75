"""The command `dashboard`: serve the dashboard in a process of its own. It needs only the database."""

from __future__ import annotations

import importlib
import logging
import os
import signal
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click
import trio

from durable_actors._postgres.target import open_target
from durable_actors.cli.demo_dashboard import serve_demo
from durable_actors.cli.options import (
    Whole,
    bare_errors,
    database_options,
    duration,
    import_modules,
    make_config,
)
from durable_actors.dashboard_options import Dashboard
from durable_actors.errors import ConfigError


def require_extra() -> Callable[..., Any]:
    """Import the dashboard; say how to install it if that is not possible."""
    try:
        opening = importlib.import_module("durable_actors.dashboard.opening")
    except ImportError as exc:
        raise ConfigError(
            f"the dashboard needs packages that are not installed ({exc.name}): pip install 'durable-actors[dashboard]'"
        ) from exc
    run: Callable[..., Any] = opening.run_dashboard
    return run


@click.command(short_help="Serve the dashboard.")
@click.option(
    "--host", default="127.0.0.1", metavar="ADDRESS", help="The address to listen on. Default: 127.0.0.1."
)
@click.option(
    "--port", type=Whole(0, 65535), default=8765, metavar="N", help="The port. Default: 8765; 0: a free one."
)
@click.option(
    "--token-file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="A file with the token of operators. Default: $DURABLE_DASHBOARD_TOKEN, if set.",
)
@click.option("--read-only", is_flag=True, help="Refuse all commands.")
@click.option("--require-reason", is_flag=True, help="Refuse commands without a reason.")
@click.option(
    "--sensitive", multiple=True, metavar="NAME", help="A field whose values are not shown. Can be repeated."
)
@click.option(
    "--root-path",
    default="",
    metavar="PATH",
    help="The prefix of all links, behind a proxy, whether it removes it from the path or not.",
)
@click.option(
    "--interval", type=duration, default=5.0, metavar="DURATION", help="Between two samples. Default: 5."
)
@click.option(
    "--module",
    "modules",
    multiple=True,
    metavar="MODULE",
    help="Import a module, to know its machines. Can be repeated.",
)
@click.option("--demo", is_flag=True, help="Show a shop that runs in this process, in a schema of its own.")
@database_options
@click.pass_context
def dashboard(
    ctx: click.Context,
    /,
    *,
    token_file: Path | None,
    modules: tuple[str, ...],
    demo: bool,
    dsn: str | None,
    schema: str,
    **options: Any,
) -> None:
    """Serve the dashboard until Ctrl-C. It needs only the database; workers may run elsewhere.

    It listens on this computer only. Any other address needs a token: --token-file or $DURABLE_DASHBOARD_TOKEN.
    """
    run = require_extra()
    token = token_file.read_text("utf-8").strip() if token_file else os.environ.get("DURABLE_DASHBOARD_TOKEN")
    settings = Dashboard(token=token or None, **options)
    config = make_config(dsn, schema)
    import_modules(modules, verbose=bool(ctx.obj))
    with bare_errors():
        if demo:
            trio.run(partial(serve_demo, config.dsn, settings, _until_signal, quiet=not ctx.obj))
            return
        trio.run(partial(_serve, run, config.dsn, config.schema, settings))


async def _serve(run: Callable[..., Any], dsn: str, schema: str, settings: Dashboard) -> None:
    async with open_target(dsn, level=logging.INFO) as target, trio.open_nursery() as nursery:
        nursery.start_soon(_until_signal, nursery.cancel_scope)
        serve = partial(run, target.dsn, settings, schema=schema)
        addresses: Sequence[tuple[str, int]] = await nursery.start(serve)
        for host, port in addresses:
            name = f"[{host}]" if ":" in host else host
            click.echo(f"dashboard: http://{name}:{port}{settings.root_path}/  (Ctrl-C ends it)")


async def _until_signal(scope: trio.CancelScope) -> None:
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as received:
        async for _ in received:
            scope.cancel()
            return
