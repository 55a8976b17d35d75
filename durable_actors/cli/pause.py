"""The commands `pause` and `resume`, and the group `queue`."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Final

import attrs
import click
import trio

from durable_actors._postgres.driver.connection import PgConn
from durable_actors._store.commands import Command, plan_command
from durable_actors._store.dialogues import CarriedOut, carrying_out, run_dialogue
from durable_actors._store.foreign import Dialogue
from durable_actors._store.node import feature_warning
from durable_actors._store.observe import Filter, list_instances, read_nodes
from durable_actors._store.pauses import QueuePause
from durable_actors._store.pausing import RESUME, pausing, pausing_queue, plan_queue, resuming_queue
from durable_actors._store.releases import PAUSES
from durable_actors.cli.many import many_options, on_filter, on_targets, read_given, report
from durable_actors.cli.options import (
    command_options,
    database_options,
    duration,
    json_option,
    open_store,
)
from durable_actors.cli.output import one_line, print_json


def _resuming(schema: str, number: int, command: Command) -> Dialogue[CarriedOut]:
    done = yield from carrying_out(RESUME, schema, number, command)
    return attrs.evolve(done, result="resumed")


_WAITS: Final = {"requested": ": a step runs; it is paused when the step has ended"}


@click.command(short_help="Let nothing run instances until they are resumed.")
@many_options("pause")
@command_options
@database_options
@json_option
def pause(**options: Any) -> None:
    """Pause instances that have not ended: TARGETs (ids or unique keys), or all that match the filters.

    A step that runs finishes first. Signals are stored and deadlines pass meanwhile; what would run then waits for
    resume. Others of the same partition key go first. For each TARGET that cannot be paused, the reason is printed
    and the exit code is 1; the others are paused. Each leaves a receipt: see audit.
    """
    given = read_given(options)
    if given.where is not None:
        on_filter("pause", given)
        return
    command = plan_command(**given.said)
    found = on_targets("pause", given, lambda number: pausing(given.schema, number, command), feature=PAUSES)
    if given.as_json:
        print_json(found)
    report(
        found,
        given,
        refused="not paused",
        said=lambda each: (
            "would be paused" if given.dry_run else f"{each.result}{_WAITS.get(each.result, '')}"
        ),
    )


@click.command(short_help="Let paused instances run again.")
@many_options("resume")
@command_options
@database_options
@json_option
def resume(**options: Any) -> None:
    """End the pause of instances: TARGETs (ids or unique keys), or all that match the filters.

    For each TARGET that is not paused, the reason is printed and the exit code is 1; the others are resumed. Each
    leaves a receipt: see audit.
    """
    given = read_given(options)
    if given.where is not None:
        on_filter("resume", given)
        return
    command = plan_command(**given.said)
    found = on_targets("resume", given, lambda number: _resuming(given.schema, number, command))
    if given.as_json:
        print_json(found)
    report(
        found,
        given,
        refused="not resumed",
        said=lambda each: "would be resumed" if given.dry_run else str(each.result),
    )


def until_option(text: str) -> datetime | float:
    """Parse a duration from now, or an instant in ISO format; one without a time zone is local time."""
    try:
        return duration(text)
    except click.BadParameter:
        pass
    try:
        found = datetime.fromisoformat(text.strip())
        return found.astimezone()
    except (ValueError, OverflowError, OSError):
        raise click.BadParameter(
            f"{text!r} is neither a duration, such as 90s, 5m or 2h, nor an instant, such as 2026-05-01T18:00"
        ) from None


def words(pause: QueuePause) -> str:
    """Return what is paused, until when, by whom and why, for people."""
    until = "" if pause.until is None else f" until {pause.until.isoformat(timespec='seconds')}"
    by = "" if pause.by is None else f" by {one_line(pause.by, limit=50)}"
    why = "" if pause.reason is None else f": {one_line(pause.reason, limit=200)}"
    return f"paused{until}{by}{why}"


@click.group()
def queue() -> None:
    """Pause and resume queues."""


_machine_option = click.option(
    "--machine", metavar="NAME", help="Only instances of this machine, in all versions."
)


@queue.command("pause", short_help="Let nothing pick from a queue, on any node.")
@click.argument("name")
@_machine_option
@click.option(
    "--until",
    type=until_option,
    metavar="TIME",
    help="When it ends by itself: a duration from now, or an instant in ISO format. Default: never.",
)
@command_options
@database_options
@json_option
def pause_queue(
    *,
    name: str,
    machine: str | None,
    until: datetime | float | None,
    by: str | None,
    reason: str | None,
    idempotency_key: str | None,
    dsn: str | None,
    schema: str,
    as_json: bool,
) -> None:
    """Pause a queue: no pick that begins after this has returned takes a row of it, on any node.

    Steps that run finish. Deploys and restarts do not end a pause, and inserts and signals go on. A queue that is
    paused already gets the new --until and --reason. A name that neither a live node nor a row has is paused, too, and
    a note says so. It leaves a receipt: see audit.
    """
    command = plan_command(by=by, reason=reason, idempotency_key=idempotency_key)
    plan = plan_queue(name, machine, until)

    async def run() -> tuple[QueuePause, list[str | None]]:
        async with open_store(dsn, schema) as conn:
            done = await run_dialogue(conn, pausing_queue(schema, plan, command))
            told = [await feature_warning(conn, schema, PAUSES), await _unknown(conn, schema, name, machine)]
            return done.pause, told

    found, warnings = trio.run(run)
    if as_json:
        print_json(found)
    else:
        click.echo(f"{one_line(found.what, limit=600)} is {words(found)}")
    for warning in filter(None, warnings):
        click.echo(f"durable-actors: {warning}", err=True)


async def _unknown(conn: PgConn, schema: str, name: str, machine: str | None) -> str | None:
    """A note if neither a live node nor a row has this queue, or this machine in it: the name may be misspelled."""
    serving = [each for each in await read_nodes(conn, schema) if each.alive and name in each.queues]
    known = {each.rpartition("/")[0] for node in serving for each in node.machines}
    if serving if machine is None else machine in known:
        return None
    rows = await list_instances(conn, schema, Filter(queue=name, machine=machine), limit=1, full=False)
    if rows.instances:
        return None
    none = "has no rows" if rows.before is None else f"has none of the newest {rows.looked} rows"
    queue_name = f"queue {one_line(name, limit=300)!r}"
    if machine is None:
        return f"note: no live node serves {queue_name}, and it {none}: is the name right?"
    what = f"machine {one_line(machine, limit=300)!r}"
    return (
        f"note: no live node that serves {queue_name} knows {what}, and it {none} there: are the names right?"
    )


@queue.command("resume", short_help="End the pause of a queue.")
@click.argument("name")
@_machine_option
@command_options
@database_options
@json_option
def resume_queue(
    *,
    name: str,
    machine: str | None,
    by: str | None,
    reason: str | None,
    idempotency_key: str | None,
    dsn: str | None,
    schema: str,
    as_json: bool,
) -> None:
    """End the pause of a queue, or of one machine in it. Nodes notice within about a second.

    The two are separate: a machine that was paused in the queue stays paused when the queue is resumed. The exit code
    is 1 if it is not paused. It leaves a receipt: see audit.
    """
    command = plan_command(by=by, reason=reason, idempotency_key=idempotency_key)
    plan = plan_queue(name, machine)

    async def run() -> QueuePause:
        async with open_store(dsn, schema) as conn:
            return (await run_dialogue(conn, resuming_queue(schema, plan, command))).pause

    found = trio.run(run)
    if as_json:
        print_json(found)
    else:
        click.echo(f"{one_line(found.what, limit=600)} is resumed; it was {words(found)}")
