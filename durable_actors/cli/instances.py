"""`durable-actors list`, `show` and `retry`: instances, one or many."""

from __future__ import annotations

import sys
from typing import Any, cast, get_args

import attrs
import click
import psycopg
import trio
from rich.text import Text

from durable_actors._postgres.connection import PgConn
from durable_actors._store.observe import (
    NEWEST,
    Filters,
    Listing,
    NodeView,
    Surroundings,
    list_instances,
    observe_instance,
    read_nodes,
    retry_instance,
)
from durable_actors._store.read import Instance, find_by_key, read_by_ids
from durable_actors._store.rows import Status
from durable_actors._wording import counted
from durable_actors.cli.options import (
    Whole,
    database_options,
    json_option,
    key_bytes,
    open_store,
    read_target,
)
from durable_actors.cli.output import (
    ago,
    coloured,
    make_console,
    one_line,
    plain,
    print_json,
    seconds,
    shown_key,
    table,
)
from durable_actors.cli.why import runs, why
from durable_actors.errors import DurableError, NoTarget

_ids = Whole(1, NEWEST)


@click.command("list")
@click.option("--status", type=click.Choice(get_args(Status)), help="Only these.")
@click.option("--machine", metavar="NAME", help="Only of this machine.")
@click.option("--queue", metavar="NAME", help="Only of this queue.")
@click.option("--key", metavar="KEY", help="Only those that have or had this unique key.")
@click.option(
    "--tag", "tags", multiple=True, metavar="TEXT", help="Only those with this tag. Repeat it: with all."
)
@click.option("--limit", type=Whole(1, 10_000), default=20, help="At most so many. Default: 20.")
@click.option("--before", type=_ids, default=NEWEST, metavar="ID", help="Only older ones: with lower ids.")
@click.option(
    "--depth",
    type=Whole(1, 100_000_000),
    default=100_000,
    help="Rows to look at before giving up. Default: 100000.",
)
@database_options
@json_option
def list_(
    *,
    status: str | None,
    machine: str | None,
    queue: str | None,
    key: str | None,
    tags: tuple[str, ...],
    limit: int,
    before: int,
    depth: int,
    dsn: str | None,
    schema: str,
    as_json: bool,
) -> None:
    """List instances, newest first.

    Walks from the newest id down and looks at up to --depth rows, so the cost is bounded whatever the table's size;
    when older rows are left it prints the --before to go on with. --key and --tag have
    indexes of their own.
    """
    filters = Filters(
        status=cast("Status | None", status),
        machine=machine,
        queue=queue,
        key=None if key is None else key_bytes(key),
        tags=tags,
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
        looked = "" if len(found.instances) == limit else f"{found.looked} rows looked at; "
        click.echo(f"{looked}older ones: --before {found.before}", err=True)


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
        "error",
    )
    rows = (
        (
            each.id,
            f"{one_line(each.machine)}/{each.version}",
            one_line(each.step),
            coloured(each.status),
            one_line(each.queue),
            runs(each),
            one_line(shown_key(each.unique_key) or "", limit=30),
            *[one_line(", ".join(each.tags), limit=40)] * tagged,
            ago(each.updated_at),
            one_line(each.last_error or "", limit=60),
        )
        for each in instances
    )
    return table(headers, rows, right=("id", "runs"))


@click.command(short_help="Show one instance, and why it waits.")
@click.argument("target")
@click.option("--key", "as_key", is_flag=True, help="TARGET is a unique key even if it is a number.")
@database_options
@json_option
def show(*, target: str, as_key: bool, dsn: str | None, schema: str, as_json: bool) -> None:
    """Show everything about one instance, by id or unique key, and why it waits."""
    address = read_target(target, as_key=as_key)

    async def run() -> tuple[Instance, Surroundings, list[NodeView]]:
        async with open_store(dsn, schema) as conn:
            instance = await _find(conn, schema, address)
            around = await observe_instance(conn, schema, instance.id)
            if around is None:
                raise NoTarget(f"instance {instance.id} was deleted just now")
            return instance, around, await read_nodes(conn, schema)

    instance, around, nodes = trio.run(run)
    reason = why(instance, around, nodes)
    if as_json:
        print_json({**plain(instance), **plain(around), "why": reason})
        return
    console = make_console()
    for name, value in _facts(instance, around):
        console.print(Text(f"{name:<10} ", style="bold").append_text(value), soft_wrap=True)
    console.print(Text(f"{'why':<10} ", style="bold").append(one_line(reason, limit=1000)), soft_wrap=True)


async def _find(conn: PgConn, schema: str, address: int | str) -> Instance:
    number = address if isinstance(address, int) else None
    if number is None:
        number = await find_by_key(conn, schema, key_bytes(str(address)))
        if number is None:
            raise NoTarget(f"no instance has or had the unique key {address!r}")
    found = (await read_by_ids(conn, schema, [number])).get(number)
    if found is None:
        raise NoTarget(f"there is no instance {number}")
    return found


def _facts(instance: Instance, around: Surroundings) -> list[tuple[str, Text]]:
    """What `show` prints, without what is empty."""
    counts = ", ".join(f"{count} {name}" for name, count in around.children.items())
    inbox = ", ".join(f"{count} × {one_line(name)}" for name, count in around.unread.items())
    facts: list[tuple[str, object]] = [
        ("instance", f"{instance.id} of {one_line(instance.machine)}/{instance.version}"),
        ("status", coloured(instance.status)),
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
        ("parent", instance.parent_id),
        ("inserted", f"{instance.inserted_at.isoformat()} ({ago(instance.inserted_at)})"),
        ("updated", f"{instance.updated_at.isoformat()} ({ago(instance.updated_at)})"),
        ("finished", None if instance.finished_at is None else instance.finished_at.isoformat()),
        ("runs on", instance.locked_by),
        ("lease", None if around.lease_left is None else f"{seconds(around.lease_left)} left"),
        ("inbox", inbox or None),
        ("children", counts or None),
        ("state", one_line(instance.state, limit=2000)),
        ("result", None if instance.result is None else one_line(instance.result, limit=2000)),
        ("error", None if instance.last_error is None else one_line(instance.last_error, limit=2000)),
    ]
    shown = [
        (name, each if isinstance(each, Text) else str(each)) for name, each in facts if each is not None
    ]
    return [
        (name, each if isinstance(each, Text) else Text(one_line(each, limit=2000))) for name, each in shown
    ]


@attrs.frozen
class Retried:
    """What became of one id of `retry`."""

    id: int
    retried: bool
    reason: str | None = None
    """Why not."""


@click.command(short_help="Let failed instances run again.")
@click.argument("ids", nargs=-1, required=True, type=_ids, metavar="ID...")
@database_options
@json_option
def retry(*, ids: tuple[int, ...], dsn: str | None, schema: str, as_json: bool) -> None:
    """Let failed instances run again in the step where they failed, with attempts from 0.

    State, step and idempotency key are as they were. Others are refused, each with its reason, and the exit code is 1;
    the failed ones among them run all the same.
    """

    async def run() -> list[Retried]:
        async with open_store(dsn, schema) as conn:
            return [await _retry(conn, schema, number) for number in dict.fromkeys(ids)]

    found = trio.run(run)
    if as_json:
        print_json(found)
    for each in found:
        if each.retried and not as_json:
            click.echo(f"{each.id} runs again")
        elif not each.retried:
            click.echo(f"durable-actors: instance {each.id} was not retried: {each.reason}", err=True)
    if not all(each.retried for each in found):
        sys.exit(1)


async def _retry(conn: PgConn, schema: str, number: int) -> Retried:
    try:
        if await retry_instance(conn, schema, number):
            return Retried(number, retried=True)
    except psycopg.errors.UniqueViolation:
        taken = (await read_by_ids(conn, schema, [number])).get(number)
        key = None if taken is None else taken.unique_key
        if key is None:
            raise DurableError(f"instance {number} was deleted just now") from None
        holder = await find_by_key(conn, schema, key if isinstance(key, bytes) else key_bytes(key))
        return Retried(
            number,
            retried=False,
            reason=f"its unique key {shown_key(key)!r} is occupied by instance {holder}",
        )
    found = (await read_by_ids(conn, schema, [number])).get(number)
    reason = "there is no such instance" if found is None else f"it is {found.status}, not failed"
    return Retried(number, retried=False, reason=reason)
