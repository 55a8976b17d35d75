"""The command `top`: queues, nodes and rates, live."""

from __future__ import annotations

import os
import sys
import termios
import tty
from collections.abc import Generator
from contextlib import contextmanager
from functools import partial

import attrs
import click
import trio
from rich.console import Group
from rich.live import Live
from rich.text import Text

from durable_actors._postgres.driver.connection import PgConn
from durable_actors._store.observe import NodeView, Rates, read_nodes, read_queues, read_rates
from durable_actors.cli.options import Whole, database_options, duration, json_option, open_store
from durable_actors.cli.output import make_console, plain, print_json
from durable_actors.cli.overview import QueueView, make_views, node_table, pause_lines, queue_table


@attrs.frozen(kw_only=True)
class Picture:
    """One snapshot of queues, nodes and rates."""

    queues: list[QueueView]
    nodes: list[NodeView]
    inserts: float | None
    """Per second since the previous snapshot; None in the first one."""
    updates: float | None
    signals: float | None


async def look(conn: PgConn, schema: str, before: Rates | None) -> tuple[Picture, Rates]:
    """Read queues, nodes, and the rates since the previous snapshot. Does not read finished rows."""
    nodes = await read_nodes(conn, schema)
    rates = await read_rates(conn, schema)
    picture = Picture(
        queues=make_views(await read_queues(conn, schema), nodes, None),
        nodes=[each for each in nodes if each.alive or each.claims],
        inserts=rate(before, rates, "inserts"),
        updates=rate(before, rates, "updates"),
        signals=rate(before, rates, "signals"),
    )
    return picture, rates


def rate(before: Rates | None, after: Rates, counter: str) -> float | None:
    """Return the growth of a counter per second; None if it is unknown. Pure."""
    if before is None or after.at <= before.at:
        return None
    grown: int = getattr(after, counter) - getattr(before, counter)
    return max(grown, 0) / (after.at - before.at)


def draw(picture: Picture, schema: str, *, keys: bool) -> Group:
    """Format a snapshot for the terminal."""
    shown = [
        f"{name} –/s" if value is None else f"{name} {value:.0f}/s"
        for name, value in (
            ("inserts", picture.inserts),
            ("row updates", picture.updates),
            ("signals", picture.signals),
        )
    ]
    head = Text(f"durable_actors · schema {schema} · " + " · ".join(shown), style="bold")
    if keys:
        head.append("   q quits", style="dim")
    queues = (
        queue_table(picture.queues) if picture.queues else Text("no queues: no work is waiting or running")
    )
    paused = [Text(line, style="yellow") for line in pause_lines(picture.queues)]
    nodes = node_table(picture.nodes) if picture.nodes else Text("no node is alive")
    return Group(head, Text(), queues, *paused, Text(), nodes)


@click.command()
@click.option(
    "--interval",
    type=duration,
    metavar="DURATION",
    default=1.0,
    help="The pause between updates. Default: 1.",
)
@click.option(
    "--count", type=Whole(1), metavar="N", help="End after N updates. Default: never; 1 without a terminal."
)
@database_options
@json_option
def top(*, interval: float, count: int | None, dsn: str | None, schema: str, as_json: bool) -> None:
    """Show queues, nodes and rates, live. Press q or Ctrl-C to quit.

    Reads waiting and running rows, but no finished ones; the rates come from Postgres's statistics of the tables. If
    the output is not a terminal, it prints one update and ends (--count prints more); with --json, one object per line.
    """
    if interval < 0.1:
        raise click.BadParameter("must be at least 0.1 seconds", param_hint="--interval")
    try:
        trio.run(partial(_watch, dsn, schema, interval=interval, count=count, as_json=as_json))
    except* KeyboardInterrupt:
        pass  # Ctrl-C quits


async def _watch(dsn: str | None, schema: str, *, interval: float, count: int | None, as_json: bool) -> None:
    async with open_store(dsn, schema) as conn:
        console = make_console()
        live = console.is_terminal and not as_json
        if count is None and not live:
            count = 1
        if not live:
            await _print(conn, schema, interval=interval, count=count or 1, as_json=as_json)
            return
        with _single_keys() as keys, Live(console=console, screen=True, auto_refresh=False) as screen:
            async with trio.open_nursery() as nursery:
                if keys is not None:
                    nursery.start_soon(_wait_for_q, keys, nursery.cancel_scope)
                before: Rates | None = None
                looks = 0
                while True:
                    picture, before = await look(conn, schema, before)
                    screen.update(draw(picture, schema, keys=keys is not None), refresh=True)
                    looks += 1
                    if looks == count:
                        break
                    await trio.sleep(interval)
                nursery.cancel_scope.cancel()


async def _print(conn: PgConn, schema: str, *, interval: float, count: int, as_json: bool) -> None:
    before: Rates | None = None
    console = make_console()
    for nth in range(count):
        if nth:
            await trio.sleep(interval)
        picture, before = await look(conn, schema, before)
        if as_json:
            nodes = [{**plain(each), "state": each.state} for each in picture.nodes]
            print_json({**plain(picture), "nodes": nodes})
        else:
            console.print(draw(picture, schema, keys=False))


@contextmanager
def _single_keys() -> Generator[int | None, None, None]:
    """Read single keys from the terminal without echo, and restore it afterwards. Yields None without a terminal."""
    if not sys.stdin.isatty():
        yield None
        return
    number = sys.stdin.fileno()
    was = termios.tcgetattr(number)
    tty.setcbreak(number)
    try:
        yield number
    finally:
        termios.tcsetattr(number, termios.TCSADRAIN, was)


async def _wait_for_q(number: int, scope: trio.CancelScope) -> None:
    while True:
        await trio.lowlevel.wait_readable(number)
        keys = os.read(number, 64)
        if not keys or b"q" in keys.lower():
            scope.cancel()
            return
