"""The commands `pause` and `resume`, and the group `queue`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Final

import attrs
import click
import trio

from durable_actors._postgres.driver.connection import PgConn
from durable_actors._store.commands import Command, plan_command
from durable_actors._store.dialogues import CarriedOut, carrying_out, resolving, run_dialogue
from durable_actors._store.foreign import Dialogue
from durable_actors._store.node import feature_warning
from durable_actors._store.pauses import QueuePause
from durable_actors._store.pausing import RESUME, pausing, pausing_queue, plan_queue, resuming_queue
from durable_actors._store.releases import PAUSES
from durable_actors.cli.options import (
    command_options,
    database_options,
    duration,
    json_option,
    key_bytes,
    open_store,
    read_target,
)
from durable_actors.cli.output import one_line, print_json
from durable_actors.errors import Conflict, NoTarget


@attrs.frozen
class Answer:
    """The result of `pause` or `resume` for one target."""

    id: int | None
    """None if no instance has the unique key."""
    result: str | None
    """"paused", "requested" or "resumed"; None if it was refused."""
    reason: str | None = None
    """Why it was refused."""


def _resuming(schema: str, number: int, command: Command) -> Dialogue[CarriedOut]:
    done = yield from carrying_out(RESUME, schema, number, command)
    return attrs.evolve(done, result="resumed")


Asking = Callable[[str, int, Command], Dialogue[CarriedOut]]
_WAITS: Final = {"requested": ": a step runs; it is paused when the step has ended"}


async def _on_instances(
    dsn: str | None, schema: str, addresses: Sequence[int | str], command: Command, asking: Asking
) -> tuple[list[Answer], str | None]:
    async with open_store(dsn, schema) as conn:
        found = [await _on_instance(conn, schema, each, command, asking) for each in addresses]
        paused = any(each.result in {"paused", "requested"} for each in found)
        return found, await feature_warning(conn, schema, PAUSES) if paused else None


async def _on_instance(
    conn: PgConn, schema: str, address: int | str, command: Command, asking: Asking
) -> Answer:
    number = address if isinstance(address, int) else None
    try:
        target = address if isinstance(address, int) else key_bytes(address)
        number = await run_dialogue(conn, resolving(schema, target))
        done = await run_dialogue(conn, asking(schema, number, command))
    except (NoTarget, Conflict) as exc:
        return Answer(number, None, str(exc))
    return Answer(done.id, str(done.result))


def _report(found: Sequence[Answer], warning: str | None, *, refused: str, as_json: bool) -> None:
    if as_json:
        print_json(found)
    for each in found:
        if each.reason is not None:
            click.echo(f"durable-actors: {refused}: {each.reason}", err=True)
        elif not as_json:
            click.echo(f"{each.id} {each.result}{_WAITS.get(each.result or '', '')}")
    if warning is not None:
        click.echo(f"durable-actors: {warning}", err=True)
    if not all(each.reason is None for each in found):
        sys.exit(1)


@click.command(short_help="Let nothing run instances until they are resumed.")
@click.argument("targets", nargs=-1, required=True, metavar="TARGET...")
@click.option("--key", "as_key", is_flag=True, help="TARGETs are unique keys even if they are numbers.")
@command_options
@database_options
@json_option
def pause(
    *,
    targets: tuple[str, ...],
    as_key: bool,
    by: str | None,
    reason: str | None,
    idempotency_key: str | None,
    dsn: str | None,
    schema: str,
    as_json: bool,
) -> None:
    """Pause instances that have not ended, by id or unique key.

    A step that runs finishes first. Signals are stored and deadlines pass meanwhile; what would run then waits for
    resume. Others of the same partition key go first. For each instance that cannot be paused, the reason is printed
    and the exit code is 1; the others are paused. Each leaves a receipt: see audit.
    """
    command = plan_command(by=by, reason=reason, idempotency_key=idempotency_key)
    addresses = [*dict.fromkeys(read_target(each, as_key=as_key) for each in targets)]
    found, warning = trio.run(_on_instances, dsn, schema, addresses, command, pausing)
    _report(found, warning, refused="not paused", as_json=as_json)


@click.command(short_help="Let paused instances run again.")
@click.argument("targets", nargs=-1, required=True, metavar="TARGET...")
@click.option("--key", "as_key", is_flag=True, help="TARGETs are unique keys even if they are numbers.")
@command_options
@database_options
@json_option
def resume(
    *,
    targets: tuple[str, ...],
    as_key: bool,
    by: str | None,
    reason: str | None,
    idempotency_key: str | None,
    dsn: str | None,
    schema: str,
    as_json: bool,
) -> None:
    """End the pause of instances, by id or unique key.

    For each instance that is not paused, the reason is printed and the exit code is 1; the others are resumed. Each
    leaves a receipt: see audit.
    """
    command = plan_command(by=by, reason=reason, idempotency_key=idempotency_key)
    addresses = [*dict.fromkeys(read_target(each, as_key=as_key) for each in targets)]
    found, _ = trio.run(_on_instances, dsn, schema, addresses, command, _resuming)
    _report(found, None, refused="not resumed", as_json=as_json)


# -- queues


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
    paused already gets the new --until and --reason. It leaves a receipt: see audit.
    """
    command = plan_command(by=by, reason=reason, idempotency_key=idempotency_key)
    plan = plan_queue(name, machine, until)

    async def run() -> tuple[QueuePause, str | None]:
        async with open_store(dsn, schema) as conn:
            done = await run_dialogue(conn, pausing_queue(schema, plan, command))
            return done.pause, await feature_warning(conn, schema, PAUSES)

    found, warning = trio.run(run)
    if as_json:
        print_json(found)
    else:
        click.echo(f"{one_line(found.what, limit=600)} is {words(found)}")
    if warning is not None:
        click.echo(f"durable-actors: {warning}", err=True)


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
