"""The command `cancel`."""

from __future__ import annotations

import sys

import attrs
import click
import trio

from durable_actors._postgres.driver.connection import PgConn
from durable_actors._store.commands import Command, plan_command
from durable_actors._store.dialogues import cancelling, resolving, run_dialogue
from durable_actors._store.node import feature_warning
from durable_actors._store.releases import COMMANDS
from durable_actors.cli.options import (
    command_options,
    database_options,
    json_option,
    key_bytes,
    open_store,
    read_target,
)
from durable_actors.cli.output import print_json
from durable_actors.errors import Conflict, NoTarget


@attrs.frozen
class Cancelled:
    """The result of `cancel` for one target."""

    id: int | None
    """None if no instance has the unique key."""
    result: str | None
    """"cancelled", "requested", or None if it was refused."""
    reason: str | None = None
    """Why it was refused."""


@click.command(short_help="Cancel instances that have not ended.")
@click.argument("targets", nargs=-1, required=True, metavar="TARGET...")
@click.option("--key", "as_key", is_flag=True, help="TARGETs are unique keys even if they are numbers.")
@click.option(
    "--force", is_flag=True, help="Do not wait for a step that runs: it can commit nothing any more."
)
@command_options
@database_options
@json_option
def cancel(
    *,
    targets: tuple[str, ...],
    as_key: bool,
    force: bool,
    by: str | None,
    reason: str | None,
    idempotency_key: str | None,
    dsn: str | None,
    schema: str,
    as_json: bool,
) -> None:
    """Cancel instances that have not ended, by id or unique key.

    What does not run has ended when this returns. A step that runs is cancelled by its node, within two seconds, and
    the instance ends as cancelled unless the step is done first. For each instance that has ended already, the reason
    is printed and the exit code is 1; the others are cancelled. Each leaves a receipt: see audit.
    """
    command = plan_command(by=by, reason=reason, idempotency_key=idempotency_key)

    async def run() -> tuple[list[Cancelled], str | None]:
        async with open_store(dsn, schema) as conn:
            addresses = dict.fromkeys(read_target(each, as_key=as_key) for each in targets)
            found = [await _cancel(conn, schema, each, command, force=force) for each in addresses]
            asked = any(each.result == "requested" for each in found)
            return found, await feature_warning(conn, schema, COMMANDS) if asked else None

    found, warning = trio.run(run)
    if as_json:
        print_json(found)
    for each in found:
        if each.reason is not None:
            click.echo(f"durable-actors: not cancelled: {each.reason}", err=True)
        elif not as_json:
            waits = "" if each.result == "cancelled" else ": a step runs, and its node cancels it"
            click.echo(f"{each.id} {each.result}{waits}")
    if warning is not None:
        click.echo(f"durable-actors: {warning}", err=True)
    if not all(each.reason is None for each in found):
        sys.exit(1)


async def _cancel(
    conn: PgConn, schema: str, address: int | str, command: Command, *, force: bool
) -> Cancelled:
    number = address if isinstance(address, int) else None
    try:
        target = address if isinstance(address, int) else key_bytes(address)
        number = await run_dialogue(conn, resolving(schema, target))
        done = await run_dialogue(conn, cancelling(schema, number, command, force=force))
    except (NoTarget, Conflict) as exc:
        return Cancelled(number, None, str(exc))
    return Cancelled(done.id, str(done.result))
