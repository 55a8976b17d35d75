"""The commands `list`, `show` and `retry`."""

from __future__ import annotations

import sys
from typing import Any, Final, cast, get_args

import attrs
import click
import trio
from rich.text import Text

from durable_actors._postgres.driver.connection import PgConn
from durable_actors._store.boundaries import Waiting
from durable_actors._store.commands import Command, Receipt, plan_command
from durable_actors._store.dialogues import (
    RETRY,
    carrying_out,
    inspecting,
    listing_receipts,
    observing,
    resolving,
    run_dialogue,
)
from durable_actors._store.observe import (
    NEWEST,
    Filter,
    InstanceDetails,
    Listing,
    Observed,
    list_instances,
)
from durable_actors._store.read import Instance
from durable_actors._store.why import Explanation, explain_observed, runs
from durable_actors._wording import counted, seconds
from durable_actors.cli.decide import asked_of, status_of, title_of
from durable_actors.cli.options import (
    Whole,
    command_options,
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
from durable_actors.errors import Conflict, Duplicate, NoTarget
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
    index, and so does --waiting for a person.
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
    headers = (
        "id",
        "machine",
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


async def _find(conn: PgConn, schema: str, address: int | str) -> Instance:
    return await run_dialogue(conn, inspecting(schema, _address(address)))


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
        ("step", f"{one_line(instance.step)}, visit {instance.visit}, {counted(runs(instance), 'run')}"),
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


@attrs.frozen
class Retried:
    """The result of `retry` for one target."""

    id: int | None
    """None if no instance has the unique key."""
    retried: bool
    reason: str | None = None
    """Why it was not retried."""


@click.command(short_help="Run failed or cancelled instances again.")
@click.argument("targets", nargs=-1, metavar="[TARGET]...")
@click.option("--key", "as_key", is_flag=True, help="TARGETs are unique keys even if they are numbers.")
@click.option(
    "--status",
    type=click.Choice(["failed", "cancelled"]),
    help="All failed or all cancelled instances; can be combined with other filters.",
)
@click.option("--machine", metavar="NAME", help="All failed instances of this machine.")
@click.option("--queue", metavar="NAME", help="All failed instances in this queue.")
@click.option("--step", metavar="NAME", help="All instances that failed in this step.")
@click.option("--error", metavar="TEXT", help="All failed instances with this text in their error.")
@click.option("--tag", metavar="TAG", help="All failed instances with this tag.")
@click.option("--parent", type=_ids, metavar="ID", help="All failed children of this instance.")
@click.option("--dry-run", is_flag=True, help="Print which instances would run again, and change nothing.")
@command_options
@database_options
@json_option
def retry(
    *,
    targets: tuple[str, ...],
    as_key: bool,
    status: str | None,
    machine: str | None,
    queue: str | None,
    step: str | None,
    error: str | None,
    tag: str | None,
    parent: int | None,
    dry_run: bool,
    by: str | None,
    reason: str | None,
    idempotency_key: str | None,
    dsn: str | None,
    schema: str,
    as_json: bool,
) -> None:
    """Run failed or cancelled instances again, from the step in which they ended, with attempts starting at 0.

    TARGETs are ids or unique keys. Without a TARGET, all failed instances that match the filters run again. State and
    step are unchanged. For each instance that cannot be retried, the reason is printed and the exit code is 1; the
    others run again. Each leaves a receipt: see audit.
    """
    command = plan_command(by=by, reason=reason, idempotency_key=idempotency_key)
    narrowing = (status, machine, queue, step, error, tag, parent)
    filtered = any(each is not None for each in narrowing)
    if bool(targets) == filtered:
        raise click.UsageError("give either TARGETs (ids or unique keys) or filters such as --status failed")
    where = Filter(
        status=cast("Status", status or "failed"),
        machine=machine,
        queue=queue,
        step=step,
        error=error,
        tag=tag,
        parent=parent,
    )

    async def run() -> list[Retried]:
        async with open_store(dsn, schema) as conn:
            addresses: list[int | str] = [read_target(each, as_key=as_key) for each in targets]
            if filtered:
                addresses = [*await _ids_of(conn, schema, where)]
            if dry_run:
                return [await _look(conn, schema, each) for each in dict.fromkeys(addresses)]
            return [await _retry(conn, schema, each, command) for each in dict.fromkeys(addresses)]

    found = trio.run(run)
    if as_json:
        print_json(found)
    elif not found:
        click.echo(f"no {where.status} instance matches the filters")
    _report(found, as_json=as_json, dry_run=dry_run)
    if not all(each.reason is None for each in found):
        sys.exit(1)


def _report(found: list[Retried], *, as_json: bool, dry_run: bool) -> None:
    for each in found:
        if each.reason is not None:
            click.echo(f"durable-actors: not retried: {each.reason}", err=True)
        elif not as_json:
            click.echo(f"{each.id} would run again" if dry_run else f"{each.id} runs again")


async def _ids_of(conn: PgConn, schema: str, where: Filter) -> list[int]:
    """Return the ids of all instances that match the filter now, oldest first."""
    found: list[int] = []
    before: int | None = NEWEST
    while before is not None:
        page = await list_instances(conn, schema, where, limit=10_000, before=before, depth=None, full=False)
        found += [each.id for each in page.instances]
        before = page.before
    return found[::-1]


async def _retry(conn: PgConn, schema: str, address: int | str, command: Command) -> Retried:
    target = _address(address)
    number = address if isinstance(address, int) else None
    try:
        number = await run_dialogue(conn, resolving(schema, target))
        await run_dialogue(conn, carrying_out(RETRY, schema, number, command))
    except (NoTarget, Conflict) as exc:
        return Retried(number, retried=False, reason=str(exc))
    except Duplicate as exc:
        return Retried(number, retried=False, reason=f"instance {number}: its {exc}")
    return Retried(number, retried=True)


async def _look(conn: PgConn, schema: str, address: int | str) -> Retried:
    try:
        found = await _find(conn, schema, address)
    except NoTarget as exc:
        return Retried(None, retried=False, reason=str(exc))
    return Retried(
        found.id,
        retried=False,
        reason=None if found.status in RETRY.allowed else f"instance {found.id} is {found.status}",
    )
