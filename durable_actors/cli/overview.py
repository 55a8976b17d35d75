"""`durable-actors queues` and `durable-actors nodes`: what waits, and who works."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import attrs
import click
import trio
from rich.table import Table

from durable_actors._store.claim import read_queue
from durable_actors._store.observe import NodeView, QueueWork, count_statuses, read_nodes, read_queues
from durable_actors.cli.options import database_options, json_option, open_store
from durable_actors.cli.output import (
    ago,
    coloured,
    make_console,
    one_line,
    plain,
    print_json,
    seconds,
    table,
)
from durable_actors.machine import parse_step_address

MOST_UNKNOWN: Final = 20
"""Lines about steps that nobody knows, per queue."""


@attrs.frozen(kw_only=True)
class QueueView:
    """A queue's line."""

    queue: str
    due: int
    scheduled: int
    held: int
    shelved: int
    executing: int
    oldest_due: float | None
    awaiting: int | None
    """None when it was not counted."""
    done: int | None
    failed: int | None
    nodes: int
    """Live nodes that serve it."""
    slots: int
    """Steps that they run at a time, together."""
    unknown: tuple[str, ...] | None = None
    """Machines and steps of shelved rows that none of these nodes knows; None when it was not looked at."""


def make_views(
    work: Sequence[QueueWork],
    nodes: Sequence[NodeView],
    counts: Mapping[str, Mapping[str, int]] | None,
    shelves: Mapping[str, Sequence[str]] | None = None,
) -> list[QueueView]:
    """One line per queue that has work, had some (if counted), or is served. Pure.

    `shelves`: the step addresses on each queue's shelf.
    """
    by_name = {each.queue: each for each in work}
    live = [each for each in nodes if each.alive]
    served = {name for each in live for name in each.queues}
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
                executing=each.executing,
                oldest_due=each.oldest_due,
                awaiting=awaiting,
                done=None if statuses is None else statuses.get("done", 0),
                failed=None if statuses is None else statuses.get("failed", 0),
                nodes=sum(name in node.queues for node in live),
                slots=sum(node.queues.get(name, 0) for node in live),
                unknown=None
                if shelves is None
                else unknown_steps(shelves.get(name, ()), [node for node in live if name in node.queues]),
            )
        )
    return found


def unknown_steps(shelf: Sequence[str], nodes: Sequence[NodeView]) -> tuple[str, ...]:
    """What of a shelf none of these nodes can run, for people. Pure."""
    found: list[str] = []
    for address in shelf:
        parsed = parse_step_address(address)
        if parsed is None:  # a hand wrote it
            found.append(repr(address))
            continue
        name, version, step = parsed
        machine = f"{name}/{version}"
        if not any(node.knows(machine, step) for node in nodes):
            found.append(f"step {step!r} of {machine}")
    return tuple(found)


def queue_table(views: Sequence[QueueView]) -> Table:
    """Queues for people; what was not counted has no column."""
    counted = any(each.awaiting is not None for each in views)
    numbers = ["due", "oldest", "scheduled", "held", "shelved", "executing"]
    numbers += ["awaiting", "done", "failed"] if counted else []
    numbers += ["nodes", "slots"]
    rows = [
        (
            one_line(each.queue),
            each.due,
            seconds(each.oldest_due),
            each.scheduled,
            each.held,
            each.shelved,
            each.executing,
            *((each.awaiting, each.done, each.failed) if counted else ()),
            each.nodes,
            each.slots,
        )
        for each in views
    ]
    return table(("queue", *numbers), rows, right=numbers)


@click.command(short_help="Show what waits and runs per queue.")
@click.option(
    "--quick", is_flag=True, help="Leave out awaiting, done and failed, whose count reads the whole table."
)
@database_options
@json_option
def queues(*, quick: bool, dsn: str | None, schema: str, as_json: bool) -> None:
    """Show what waits and runs per queue, and how many live nodes serve it.

    Counting awaiting, done and failed instances READS THE WHOLE TABLE; --quick leaves them out and reads only what
    waits or runs.
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
            return make_views(work, await read_nodes(conn, schema), counts, shelves)

    found = trio.run(run)
    if as_json:
        print_json(found)
    elif found:
        make_console().print(queue_table(found))
        for each in found:
            for text in (each.unknown or ())[:MOST_UNKNOWN]:
                click.echo(
                    f"queue {each.queue!r}: no live node that serves it knows {one_line(text, limit=200)}",
                    err=True,
                )
    else:
        click.echo("no queues: nothing waits or runs, and no node is alive")


def node_table(nodes: Sequence[NodeView]) -> Table:
    """Nodes for people."""
    rows = [
        (
            one_line(each.incarnation),
            coloured(each.state),
            each.claims,
            one_line(", ".join(f"{name}={slots}" for name, slots in each.queues.items())),
            each.pid,
            ago(each.started_at),
            ago(each.seen_at),
        )
        for each in nodes
    ]
    return table(
        ("node", "state", "claims", "queues", "pid", "started", "seen"), rows, right=("claims", "pid")
    )


@click.command(short_help="Show who works here.")
@click.option(
    "--all", "everyone", is_flag=True, help="Those that stopped or were lost in the last days, too."
)
@database_options
@json_option
def nodes(*, everyone: bool, dsn: str | None, schema: str, as_json: bool) -> None:
    """Show who works here: alive by its session lock, the claims it holds, its queues.

    Without --all: nodes that live, and those that are gone and still hold claims.
    """

    async def run() -> list[NodeView]:
        async with open_store(dsn, schema) as conn:
            return await read_nodes(conn, schema)

    found = [each for each in trio.run(run) if everyone or each.alive or each.claims]
    if as_json:
        print_json([{**plain(each), "state": each.state} for each in found])
    elif found:
        make_console().print(node_table(found))
    else:
        click.echo("no node is alive" if everyone else "no node is alive (--all shows those that were)")
