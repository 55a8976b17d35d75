"""The commands `queues` and `nodes`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import attrs
import click
import trio
from rich.table import Table
from rich.text import Text

from durable_actors._store.claim import read_queue
from durable_actors._store.fair import FairShare, read_fair_shares
from durable_actors._store.observe import NodeView, QueueWork, count_statuses, read_nodes, read_queues
from durable_actors._store.pauses import QueuePause
from durable_actors._store.releases import LiveNode, older_nodes
from durable_actors._wording import seconds
from durable_actors.cli.options import database_options, json_option, open_store
from durable_actors.cli.output import (
    ago,
    coloured,
    elapsed,
    make_console,
    one_line,
    plain,
    print_json,
    table,
)
from durable_actors.cli.pause import words
from durable_actors.machine import builtin_queues, parse_step_address

MAX_KEYS: Final = 10
"""The largest number of fair keys in the line of a queue; --json has all that were counted."""
MAX_UNKNOWN_LINES: Final = 20
"""The largest number of lines about unknown steps, per queue."""


@attrs.frozen(kw_only=True)
class QueueView:
    """One line of `queues`."""

    queue: str
    due: int
    scheduled: int
    held: int
    shelved: int
    throttled: int = 0
    """Instances that wait for a limit."""
    paused: int
    """Instances that are paused and would be runnable."""
    asks: int
    """Instances that wait for a person."""
    executing: int
    oldest_due: float | None
    awaiting: int | None
    """None if it was not counted."""
    done: int | None
    failed: int | None
    cancelled: int | None
    nodes: int
    """The number of live nodes that serve it."""
    slots: int
    """The total number of steps that they run at the same time."""
    unknown: tuple[str, ...] | None = None
    """Machines and steps of shelved rows that none of these nodes knows; None if it was not checked."""
    pauses: tuple[QueuePause, ...] = ()
    """The pause of the queue, and those of machines in it."""
    fair: tuple[FairShare, ...] | None = None
    """What its keys have, if live nodes serve it as a fair queue."""


def make_views(
    work: Sequence[QueueWork],
    nodes: Sequence[NodeView],
    counts: Mapping[str, Mapping[str, int]] | None,
    shelves: Mapping[str, Sequence[str]] | None = None,
    shares: Mapping[str, Sequence[FairShare]] | None = None,
) -> list[QueueView]:
    """Return one line per queue that has work, had work (if counted), or is served. Pure.

    `shelves` has the addresses of the shelved steps per queue, `shares` the keys of fair queues.
    """
    by_name = {each.queue: each for each in work}
    live = [each for each in nodes if each.alive]
    served = {name for each in live for name in each.queues} - builtin_queues()
    found: list[QueueView] = []
    for name in sorted(by_name.keys() | served | (counts or {}).keys()):
        each = by_name.get(name) or QueueWork(queue=name)
        statuses = None if counts is None else counts.get(name, {})
        awaiting = (
            None
            if statuses is None
            else statuses.get("awaiting_signal", 0) + statuses.get("awaiting_children", 0)
        )
        found.append(
            QueueView(
                queue=name,
                due=each.due,
                scheduled=each.scheduled,
                held=each.held,
                shelved=each.shelved,
                throttled=each.throttled,
                paused=each.paused,
                asks=each.asks,
                pauses=each.pauses,
                executing=each.executing,
                oldest_due=each.oldest_due,
                awaiting=awaiting,
                done=None if statuses is None else statuses.get("done", 0),
                failed=None if statuses is None else statuses.get("failed", 0),
                cancelled=None if statuses is None else statuses.get("cancelled", 0),
                nodes=sum(name in node.queues for node in live),
                slots=sum(node.queues.get(name, 0) for node in live),
                fair=tuple(shares[name]) if shares and name in shares else None,
                unknown=None
                if shelves is None
                else unknown_steps(shelves.get(name, ()), [node for node in live if name in node.queues]),
            )
        )
    return found


def unknown_steps(shelf: Sequence[str], nodes: Sequence[NodeView]) -> tuple[str, ...]:
    """Describe the shelved steps that none of these nodes can run. Pure."""
    found: list[str] = []
    for address in shelf:
        parsed = parse_step_address(address)
        if parsed is None:  # a row written by hand
            found.append(repr(address))
            continue
        name, version, step = parsed
        machine = f"{name}/{version}"
        if not any(node.knows(machine, step) for node in nodes):
            found.append(f"step {step!r} of {machine}")
    return tuple(found)


def queue_name(view: QueueView) -> Text:
    """Return the name of a queue, and whether it is paused."""
    found = Text(one_line(view.queue))
    if view.pauses:
        whole = any(each.machine is None for each in view.pauses)
        found.append(" PAUSED" if whole else " (partly paused)", style="bold yellow")
    return found


def pause_lines(views: Sequence[QueueView]) -> list[str]:
    """One line for each pause: what, since when, until when, by whom and why, and what it holds up."""
    found: list[str] = []
    for view in views:
        for each in view.pauses:
            holds = f"; {view.due} due" if each.machine is None and view.due else ""
            found.append(f"{one_line(each.what, limit=600)} is {words(each)} (for {elapsed(each.at)}{holds})")
    return found


def fair_lines(views: Sequence[QueueView]) -> list[str]:
    """For each fair queue what its keys have: those with most running steps first."""
    found: list[str] = []
    for view in views:
        if view.fair is None:
            continue
        keys = [
            f"{'(no key)' if each.key is None else one_line(each.key)} {each.share:.0%} ({each.running} running"
            + ("" if each.waiting is None else f", {each.waiting}{'+' * (each.waiting >= 1000)} waiting")
            + ")"
            for each in view.fair[:MAX_KEYS]
        ]
        more = len(view.fair) - MAX_KEYS
        keys += [f"{more} more"] if more > 0 else []
        found.append(f"queue {one_line(view.queue)} is fair: {' · '.join(keys) or 'no key has work'}")
    return found


def asks_line(views: Sequence[QueueView]) -> str | None:
    """How many instances wait for a person, and how to see them; None if none does."""
    total = sum(each.asks for each in views)
    if not total:
        return None
    wait = "instance waits" if total == 1 else "instances wait"
    return f"{total} {wait} for a person: `durable-actors list --waiting approval`, or `--waiting pause`"


def queue_table(views: Sequence[QueueView]) -> Table:
    """Return the table of queues; numbers that were not counted have no column."""
    counted = any(each.awaiting is not None for each in views)
    numbers = ["due", "oldest", "scheduled", "held", "shelved", "throttled", "paused", "asks", "executing"]
    numbers += ["awaiting", "done", "failed", "cancelled"] if counted else []
    numbers += ["nodes", "slots"]
    rows = [
        (
            queue_name(each),
            each.due,
            seconds(each.oldest_due),
            each.scheduled,
            each.held,
            each.shelved,
            each.throttled,
            each.paused,
            each.asks,
            each.executing,
            *((each.awaiting, each.done, each.failed, each.cancelled) if counted else ()),
            each.nodes,
            each.slots,
        )
        for each in views
    ]
    return table(("queue", *numbers), rows, right=numbers)


@click.command(short_help="Show waiting and running work per queue.")
@click.option(
    "--quick", is_flag=True, help="Omit awaiting and ended instances, which need a scan of the whole table."
)
@database_options
@json_option
def queues(*, quick: bool, dsn: str | None, schema: str, as_json: bool) -> None:
    """Show waiting and running work per queue, what is paused, who waits for a person (asks), and the live nodes.

    Of a queue that live nodes serve as a fair one, it shows what its keys have running and waiting.

    Counting awaiting and ended (done, failed, cancelled) instances READS THE WHOLE TABLE. With --quick they are
    omitted, and only waiting and running rows are read.
    """

    async def run() -> list[QueueView]:
        async with open_store(dsn, schema) as conn:
            counts = None if quick else await count_statuses(conn, schema)
            work = await read_queues(conn, schema)
            shelves = {
                each.queue: (await read_queue(conn, schema, each.queue)).shelved
                for each in work
                if each.shelved
            }
            nodes = await read_nodes(conn, schema)
            fair = sorted({name for node in nodes if node.alive for name in node.fair})
            shares = await read_fair_shares(conn, schema, fair) if fair else None
            return make_views(work, nodes, counts, shelves, shares)

    found = trio.run(run)
    if as_json:
        print_json(found)
    elif found:
        make_console().print(queue_table(found))
        for line in filter(None, (*pause_lines(found), *fair_lines(found), asks_line(found))):
            click.echo(line)
        for each in found:
            for text in (each.unknown or ())[:MAX_UNKNOWN_LINES]:
                click.echo(
                    f"queue {each.queue!r}: no live node that serves it knows {one_line(text, limit=200)}",
                    err=True,
                )
    else:
        click.echo("no queues: no work is waiting or running, and no node is alive")


def node_table(nodes: Sequence[NodeView]) -> Table:
    """Return the table of nodes."""
    rows = [
        (
            one_line(each.incarnation),
            coloured(each.state),
            each.claims,
            one_line(
                ", ".join(
                    f"{name}={slots}" for name, slots in each.queues.items() if name not in builtin_queues()
                )
            ),
            each.pid,
            one_line(each.version or ""),
            ago(each.started_at),
            ago(each.seen_at),
        )
        for each in nodes
    ]
    return table(
        ("node", "state", "claims", "queues", "pid", "version", "started", "seen"),
        rows,
        right=("claims", "pid"),
    )


@click.command(short_help="Show the nodes (running engines).")
@click.option(
    "--all", "everyone", is_flag=True, help="Also nodes that stopped or were lost in the last days."
)
@database_options
@json_option
def nodes(*, everyone: bool, dsn: str | None, schema: str, as_json: bool) -> None:
    """Show the nodes: whether each is alive (holds its session lock), its claims, its queues and its version.

    Without --all, it shows live nodes, and dead nodes that still hold claims. If a live node runs an older release, it
    says what that node ignores.
    """

    async def run() -> list[NodeView]:
        async with open_store(dsn, schema) as conn:
            return await read_nodes(conn, schema)

    found = [each for each in trio.run(run) if everyone or each.alive or each.claims]
    live = {each.incarnation: LiveNode(each.incarnation, each.version) for each in found if each.alive}
    if as_json:
        ignored = {name: node.ignored for name, node in live.items()}
        print_json(
            [
                {**plain(each), "state": each.state, "ignores": ignored.get(each.incarnation, [])}
                for each in found
            ]
        )
    elif found:
        make_console().print(node_table(found))
        for line in older_nodes(live.values()):
            click.echo(one_line(line, limit=500), err=True)
    else:
        click.echo(
            "no node is alive" if everyone else "no node is alive (--all shows stopped and lost nodes)"
        )
