"""The command `cancel`."""

from __future__ import annotations

import sys
from typing import Final

import attrs
import click
import trio

from durable_actors._postgres.driver.connection import PgConn
from durable_actors._store.cascade import cascading
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

COURTESY: Final = 100
"""Statements by which the command cancels children; the nodes do the rest."""


@attrs.frozen
class Cancelled:
    """The result of `cancel` for one target."""

    id: int | None
    """None if no instance has the unique key."""
    result: str | None
    """"cancelled", "requested", or None if it was refused."""
    reason: str | None = None
    """Why it was refused."""
    compensates: bool = False
    """Whether it has entered the step that compensates (`on_cancel`)."""


@click.command(short_help="Cancel instances that have not ended.")
@click.argument("targets", nargs=-1, required=True, metavar="TARGET...")
@click.option("--key", "as_key", is_flag=True, help="TARGETs are unique keys even if they are numbers.")
@click.option(
    "--force", is_flag=True, help="Do not wait for a step that runs: it can commit nothing any more."
)
@click.option(
    "--children",
    type=click.Choice(["leave", "cancel"]),
    default="leave",
    show_default=True,
    help="What happens to the children, and to theirs.",
)
@command_options
@database_options
@json_option
def cancel(
    *,
    targets: tuple[str, ...],
    as_key: bool,
    force: bool,
    children: str,
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

    An instance of a machine that compensates (on_cancel) enters that step instead; a second cancel of it needs
    --force. With --children cancel, its children are cancelled as well, in batches, by this command and by the nodes.
    """
    command = plan_command(by=by, reason=reason, idempotency_key=idempotency_key)

    async def run() -> tuple[list[Cancelled], str | None]:
        async with open_store(dsn, schema) as conn:
            addresses = dict.fromkeys(read_target(each, as_key=as_key) for each in targets)
            how = {"force": force, "children": children == "cancel"}
            found = [await _cancel(conn, schema, each, command, **how) for each in addresses]
            if any(each.result is not None for each in found) and children == "cancel":
                await run_dialogue(conn, cascading(schema, rounds=COURTESY))
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
            if each.compensates:
                waits = ": it compensates, and then it ends"
            click.echo(f"{each.id} {each.result}{waits}")
    if warning is not None:
        click.echo(f"durable-actors: {warning}", err=True)
    if not all(each.reason is None for each in found):
        sys.exit(1)


async def _cancel(
    conn: PgConn, schema: str, address: int | str, command: Command, *, force: bool, children: bool
) -> Cancelled:
    number = address if isinstance(address, int) else None
    try:
        target = address if isinstance(address, int) else key_bytes(address)
        number = await run_dialogue(conn, resolving(schema, target))
        start = cancelling(schema, number, command, force=force, children=children)
        done = await run_dialogue(conn, start)
    except (NoTarget, Conflict) as exc:
        return Cancelled(number, None, str(exc))
    compensates = any(each.id == done.id for each in done.offered)
    return Cancelled(done.id, str(done.result), compensates=compensates)
