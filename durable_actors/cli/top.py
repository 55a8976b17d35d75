"""The command `top`: queues, nodes and rates, live."""

from __future__ import annotations

import os
import sys
import termios
import tty
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Final

import attrs
import click
import trio
from rich.cells import cell_len
from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from durable_actors._postgres.driver.connection import PgConn
from durable_actors._store.observe import NodeView, read_nodes, read_queues
from durable_actors._store.rates import NEWEST_ROWS, Rates, Recent, read_rates, read_recent
from durable_actors._wording import seconds
from durable_actors.cli.options import Whole, database_options, duration, json_option, open_store
from durable_actors.cli.output import ago, coloured, make_console, one_line, plain, print_json, table
from durable_actors.cli.overview import QueueView, asks_line, make_views, pause_lines, queue_name
from durable_actors.machine import builtin_queues


@attrs.frozen(kw_only=True)
class Picture:
    """One snapshot of queues, nodes and rates."""

    queues: list[QueueView]
    nodes: list[NodeView]
    recent: dict[str, Recent]
    """What became of the newest instances, by queue."""
    inserts: float | None
    """Per second since the previous snapshot; None in the first one."""
    updates: float | None
    signals: float | None

    @property
    def is_sample(self) -> bool:
        """Whether there are more instances than were looked at."""
        return sum(each.looked for each in self.recent.values()) >= NEWEST_ROWS


async def look(conn: PgConn, schema: str, before: Rates | None) -> tuple[Picture, Rates]:
    """Read queues, nodes, the newest instances, and the rates since the previous snapshot."""
    nodes = await read_nodes(conn, schema)
    rates = await read_rates(conn, schema)
    picture = Picture(
        queues=make_views(await read_queues(conn, schema), nodes, None),
        nodes=[each for each in nodes if each.alive or each.claims],
        recent=await read_recent(conn, schema),
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


def head_line(picture: Picture, schema: str) -> str:
    """The totals, in one or two lines. Pure."""
    sample = "≥" if picture.is_sample else ""
    done = sum(each.done for each in picture.recent.values())
    failed = sum(each.failed for each in picture.recent.values())
    oldest = max((each.oldest_due for each in picture.queues if each.oldest_due is not None), default=None)
    paused = sum(bool(each.pauses) for each in picture.queues)
    shown = [
        f"done {sample}{done:.1f}/s",
        f"failed {sample}{failed}",
        f"oldest waiting {seconds(oldest) or 'none'}",
        *([f"{paused} queues paused"] if paused > 1 else ["1 queue paused"] if paused else []),
        *(
            f"{name} –/s" if value is None else f"{name} {value:.0f}/s"
            for name, value in (
                ("inserts", picture.inserts),
                ("row updates", picture.updates),
                ("signals", picture.signals),
            )
        ),
    ]
    return f"durable_actors · schema {one_line(schema)} · " + " · ".join(shown)


QUEUE_COLUMNS: Final = (
    "queue", "due", "oldest", "executing", "slots", "done/s", "failed", "paused", "scheduled", "asks", "nodes", "held",
    "shelved", "throttled",
)  # fmt: skip
"""The most important first: what does not fit into the terminal is left out from the end."""
NAME_WIDTH: Final = 20
"""A name may be cut to so many columns before a column is left out."""
BETWEEN: Final = 2
"""Spaces between columns."""
NODE_COLUMNS: Final = ("node", "state", "claims", "queues", "seen", "started", "pid", "version")


def queue_lines(picture: Picture, width: int) -> Table:
    """The queues, in as many columns as fit."""
    rows: list[dict[str, Text | str]] = []
    for each in picture.queues:
        recent = picture.recent.get(each.queue)
        rows.append(
            {
                "queue": queue_name(each),
                "due": str(each.due),
                "oldest": seconds(each.oldest_due),
                "executing": str(each.executing),
                "slots": str(each.slots),
                "done/s": f"{recent.done:.1f}" if recent else "",
                "failed": str(recent.failed) if recent else "",
                "paused": str(each.paused),
                "scheduled": str(each.scheduled),
                "asks": str(each.asks),
                "nodes": str(each.nodes),
                "held": str(each.held),
                "shelved": str(each.shelved),
                "throttled": str(each.throttled),
            }
        )
    return fitting(QUEUE_COLUMNS, rows, width, left=("queue",))


def node_lines(nodes: Sequence[NodeView], width: int) -> Table:
    """The nodes, in as many columns as fit."""
    rows: list[dict[str, Text | str]] = [
        {
            "node": one_line(each.incarnation),
            "state": coloured(each.state),
            "claims": str(each.claims),
            "queues": one_line(
                ", ".join(
                    f"{name}={slots}" for name, slots in each.queues.items() if name not in builtin_queues()
                )
            ),
            "seen": ago(each.seen_at),
            "started": ago(each.started_at),
            "pid": "" if each.pid is None else str(each.pid),
            "version": one_line(each.version or ""),
        }
        for each in nodes
    ]
    return fitting(NODE_COLUMNS, rows, width, left=("node", "state", "queues", "seen", "started", "version"))


def fitting(
    columns: Sequence[str], rows: Sequence[Mapping[str, Text | str]], width: int, *, left: Sequence[str]
) -> Table:
    """Return a table of the first columns that fit into the width; long names are cut, numbers are not. Pure."""
    first = columns[0]
    widths = {name: max([cell_len(name), *(_cells(row[name]) for row in rows)]) for name in columns}
    widths |= {name: min(widths[name], NAME_WIDTH) for name in left if name != first}
    shown, room = [first], width - min(widths[first], NAME_WIDTH)
    for name in columns[1:]:
        room -= widths[name] + BETWEEN
        if room < 0:
            break
        shown.append(name)
    widths[first] = max(width - sum(widths[name] + BETWEEN for name in shown[1:]), 1)
    cells = [[_cut(row[name], widths[name]) for name in shown] for row in rows]
    return table(shown, cells, right=[name for name in shown if name not in left])


def _cells(cell: Text | str) -> int:
    return cell_len(cell.plain if isinstance(cell, Text) else cell)


def _cut(cell: Text | str, most: int) -> Text:
    made = cell.copy() if isinstance(cell, Text) else Text(cell)
    made.truncate(most, overflow="ellipsis")
    return made


def draw(picture: Picture, schema: str, *, keys: bool, width: int) -> Group:
    """Format a snapshot for a terminal of this width."""
    head = Text(head_line(picture, schema), style="bold")
    if keys:
        head.append("   q quits", style="dim")
    queues = (
        queue_lines(picture, width) if picture.queues else Text("no queues: no work is waiting or running")
    )
    notes = [Text(line, style="yellow") for line in pause_lines(picture.queues)]
    if (asks := asks_line(picture.queues)) is not None:
        notes.append(Text(asks, style="magenta"))
    if picture.is_sample:
        notes.append(Text(f"done and failed: of the newest {NEWEST_ROWS:,} instances", style="dim"))
    nodes = node_lines(picture.nodes, width) if picture.nodes else Text("no node is alive")
    return Group(head, Text(), queues, *notes, Text(), nodes)


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

    Reads waiting and running rows; of ended ones only the newest 10,000 instances, for done/s (in the last 10 seconds)
    and failed. The other rates come from Postgres's statistics of the tables. In a narrow terminal it leaves columns
    out. If the output is not a terminal, it prints one update and ends (--count prints more); with --json, one object
    per line.
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
                    drawn = draw(picture, schema, keys=keys is not None, width=console.width)
                    screen.update(drawn, refresh=True)
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
            console.print(draw(picture, schema, keys=False, width=console.width))


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
