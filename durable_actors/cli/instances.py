"""The commands `list` and `show`."""

from __future__ import annotations

from typing import Any, Final, cast, get_args

import click
import trio
from rich.text import Text

from durable_actors._store.boundaries import Waiting
from durable_actors._store.commands import Receipt
from durable_actors._store.dialogues import listing_receipts, observing, run_dialogue
from durable_actors._store.explanation import Explanation
from durable_actors._store.observe import NEWEST, Filter, InstanceDetails, Listing, Observed, list_instances
from durable_actors._store.read import Instance
from durable_actors._store.why import explain_observed, runs
from durable_actors._wording import counted, seconds
from durable_actors.cli.decide import asked_of, status_of, title_of
from durable_actors.cli.options import (
    Whole,
    database_options,
    duration,
    json_option,
    key_bytes,
    open_store,
    read_target,
)
from durable_actors.cli.output import (
    ago,
    make_console,
    one_line,
    plain,
    print_json,
    shown_key,
    started_by,
    table,
)
from durable_actors.machine import Status

_ids = Whole(1, NEWEST)
_SHOWN_RECEIPTS: Final = 5


@click.command("list")
@click.option("--status", type=click.Choice(get_args(Status)), help="Only instances with this status.")
@click.option("--machine", metavar="NAME", help="Only instances of this machine.")
@click.option("--queue", metavar="NAME", help="Only instances in this queue.")
@click.option("--step", metavar="NAME", help="Only instances in this step.")
@click.option("--error", metavar="TEXT", help="Only instances with this text in their error.")
@click.option(
    "--older-than",
    type=duration,
    metavar="DURATION",
    help="Only instances that have not changed for this long.",
)
@click.option("--key", metavar="KEY", help="Only instances that have or had this unique key.")
@click.option("--parent", type=_ids, metavar="ID", help="Only children of this instance.")
@click.option(
    "--tag",
    "tags",
    multiple=True,
    metavar="TEXT",
    help="Only instances with this tag. Can be repeated: all must match.",
)
@click.option(
    "--waiting",
    type=click.Choice(get_args(Waiting)),
    help="Only instances that wait for this: a person's approval, somebody to let them proceed, a signal, children.",
)
@click.option("--paused", is_flag=True, default=None, help="Only instances that are paused themselves.")
@click.option(
    "--limit", type=Whole(1, 10_000), default=20, help="The largest number of instances to list. Default: 20."
)
@click.option("--before", type=_ids, default=NEWEST, metavar="ID", help="Only instances with lower ids.")
@click.option(
    "--depth",
    type=Whole(1, 100_000_000),
    default=100_000,
    help="The largest number of rows to read. Default: 100000.",
)
@database_options
@json_option
def list_(
    *,
    status: str | None,
    machine: str | None,
    queue: str | None,
    step: str | None,
    error: str | None,
    older_than: float | None,
    key: str | None,
    parent: int | None,
    tags: tuple[str, ...],
    waiting: str | None,
    paused: bool | None,
    limit: int,
    before: int,
    depth: int,
    dsn: str | None,
    schema: str,
    as_json: bool,
) -> None:
    """List instances, newest first.

    Reads rows from the newest id down, at most --depth of them, so the cost does not depend on the size of the table.
    If there are older rows, it prints the --before option for the next page. --key, --parent and --tag use an
    index, and so does --waiting for a person. --paused means the instances that were paused one by one or by a filter;
    queues shows which queues are paused.
    """
    filters = Filter(
        status=cast("Status | None", status),
        machine=machine,
        queue=queue,
        step=step,
        error=error,
        tag=tags,
        older_than=older_than,
        unique_key=None if key is None else key_bytes(key),
        parent=parent,
        waiting=cast("Waiting | None", waiting),
        paused=paused,
    )

    async def run() -> Listing:
        async with open_store(dsn, schema) as conn:
            return await list_instances(conn, schema, filters, limit=limit, before=before, depth=depth)

    found = trio.run(run)
    if as_json:
        print_json(found)
        return
    console = make_console()
    if found.instances:
        console.print(_table(found.instances))
    else:
        console.print("no instances")
    if found.before is not None:
        looked = "" if len(found.instances) == limit else f"{found.looked} rows read; "
        click.echo(f"{looked}for older instances: --before {found.before}", err=True)


def _table(instances: tuple[Instance, ...]) -> Any:
    tagged = any(each.tags for each in instances)
    named = any(each.key is not None for each in instances)
    headers = (
        "id",
        "machine",
        *["child"] * named,
        "step",
        "status",
        "queue",
        "runs",
        "key",
        *["tags"] * tagged,
        "updated",
        "asks" if any(map(title_of, instances)) else "error",
    )
    rows = (
        (
            each.id,
            f"{one_line(each.machine)}/{each.version}",
            *[one_line(each.key or "", limit=30)] * named,
            one_line(each.step),
            status_of(each),
            one_line(each.queue),
            runs(each),
            one_line(shown_key(each.unique_key) or "", limit=30),
            *[one_line(", ".join(each.tags), limit=40)] * tagged,
            ago(each.updated_at),
            one_line(title_of(each) or each.last_error or "", limit=60),
        )
        for each in instances
    )
    return table(headers, rows, right=("id", "runs"))


@click.command(short_help="Show one instance, and why it is waiting.")
@click.argument("target")
@click.option("--key", "as_key", is_flag=True, help="TARGET is a unique key even if it is a number.")
@database_options
@json_option
def show(*, target: str, as_key: bool, dsn: str | None, schema: str, as_json: bool) -> None:
    """Show everything about one instance, by id or unique key, and why it is waiting."""
    address = read_target(target, as_key=as_key)

    async def run() -> tuple[Observed, Explanation, list[Receipt]]:
        async with open_store(dsn, schema) as conn:
            found, number, nodes = await run_dialogue(
                conn, observing(schema, _address(address), full=True, parent=True)
            )
            newest = listing_receipts(schema, number, command=None, before=NEWEST, limit=_SHOWN_RECEIPTS)
            receipts = await run_dialogue(conn, newest)
            return found[number], explain_observed(found[number], nodes, found), receipts

    observed, explanation, receipts = trio.run(run)
    instance, around = observed.instance, observed.details
    if as_json:
        shown = {**plain(instance), **plain(around), "receipts": receipts}
        print_json({**shown, "why": explanation.summary, "explanation": explanation})
        return
    console = make_console()
    for name, value in [*_facts(instance, around), *_commands(around, receipts)]:
        console.print(Text(f"{name:<10} ", style="bold").append_text(value), soft_wrap=True)
    for line in (instance.traceback or "").splitlines():
        console.print(Text("  ").append(one_line(line, limit=500)), soft_wrap=True)
    console.print(
        Text(f"{'why':<10} ", style="bold").append(one_line(explanation.summary, limit=1000)), soft_wrap=True
    )


def _address(address: int | str) -> int | bytes:
    return address if isinstance(address, int) else key_bytes(address)


def _facts(instance: Instance, around: InstanceDetails) -> list[tuple[str, Text]]:
    """Return the lines of `show`, without empty ones."""
    counts = ", ".join(f"{count} {name}" for name, count in around.children.items())
    inbox = ", ".join(f"{count} × {one_line(name)}" for name, count in around.unread.items())
    facts: list[tuple[str, object]] = [
        ("instance", f"{instance.id} of {one_line(instance.machine)}/{instance.version}"),
        ("status", status_of(instance)),
        *asked_of(instance),
        (
            "step",
            f"{one_line(instance.step)}, visit {instance.visit}, {counted(runs(instance), 'run')}"
            + ("" if instance.max_attempts is None else f" of at most {instance.max_attempts}"),
        ),
        ("crashes", instance.crashes or None),
        (
            "drained",
            f"{counted(instance.interruptions, 'run')} ended by a drain" if instance.interruptions else None,
        ),
        ("queue", f"{one_line(instance.queue)}, priority {instance.priority}"),
        ("key", shown_key(instance.unique_key)),
        ("partition", instance.partition_key),
        ("tags", ", ".join(instance.tags) or None),
        ("meta", one_line(instance.meta, limit=2000) if instance.meta else None),
        ("parent", None if instance.parent_run is None else started_by(instance.parent_run)),
        ("child", instance.key),
        ("rerun of", instance.rerun_of),
        ("inserted", f"{instance.inserted_at.isoformat()} ({ago(instance.inserted_at)})"),
        ("updated", f"{instance.updated_at.isoformat()} ({ago(instance.updated_at)})"),
        ("finished", None if instance.finished_at is None else instance.finished_at.isoformat()),
        ("runs on", instance.locked_by),
        ("lease", None if around.lease_left is None else f"{seconds(around.lease_left)} left"),
        ("inbox", inbox or None),
        ("children", counts or None),
        ("state", one_line(instance.state, limit=2000)),
        (
            "definition",
            f"{around.definition} ran one of its last steps; it was started with {around.fingerprint}"
            if around.definition
            else None,
        ),
        ("result", None if instance.result is None else one_line(instance.result, limit=2000)),
        ("error", None if instance.last_error is None else one_line(instance.last_error, limit=2000)),
    ]
    shown = [
        (name, each if isinstance(each, Text) else str(each)) for name, each in facts if each is not None
    ]
    return [
        (name, each if isinstance(each, Text) else Text(one_line(each, limit=2000))) for name, each in shown
    ]


def _commands(around: InstanceDetails, receipts: list[Receipt]) -> list[tuple[str, Text]]:
    """Return the lines of `show` about commands: the newest receipts, and a request that is pending."""
    lines = [
        ("command", f"{each.command}{_said(each.by, ago(each.at), each.reason)}")
        for each in reversed(receipts)
    ]
    if (request := around.request) is not None:
        since = "" if around.requested_ago is None else f"{seconds(around.requested_ago)} ago"
        lines.append(("request", f"{request.kind} requested{_said(request.by, since, request.reason)}"))
    return [(name, Text(one_line(line, limit=2000))) for name, line in lines]


def _said(by: str | None, since: str, reason: str | None) -> str:
    return f"{f' by {by}' if by else ''}{f' {since}' if since else ''}{f': {reason}' if reason else ''}"
