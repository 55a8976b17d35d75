"""The commands `rebuild`, `accept` and `recover`: what one does about damage."""

from __future__ import annotations

from typing import Any

import attrs
import click

from durable_actors._store.commands import plan_command
from durable_actors._store.rebuild import Rebuilt
from durable_actors._store.recover import RecoveryReport
from durable_actors.cli.history import address_of, with_client
from durable_actors.cli.options import by_options, command_options, database_options, json_option
from durable_actors.cli.output import print_json


@click.command(short_help="Write a row as its journal says.")
@click.argument("target")
@click.option("--key", "as_key", is_flag=True, help="TARGET is a unique key even if it is a number.")
@click.option(
    "--at-last-record",
    is_flag=True,
    help="Go back to the last record, although the row is further: what ran since runs again.",
)
@command_options
@database_options
@json_option
def rebuild(
    *,
    target: str,
    as_key: bool,
    at_last_record: bool,
    by: str | None,
    reason: str | None,
    idempotency_key: str | None,
    dsn: str | None,
    schema: str,
    as_json: bool,
) -> None:
    """Write the row of an instance as its journal says it must be. The journal must be complete: level "full".

    For a row that was damaged or deleted by hand. A worker that runs it cannot commit any more. Leaves a receipt. If
    the row is further than its last record, the records of its last moves may be lost: then it is refused.
    """
    address = address_of(target, as_key=as_key)
    command = plan_command(by=by, reason=reason, idempotency_key=idempotency_key)
    done = with_client(
        dsn, schema, lambda client: client.rebuild_row(address, command, at_last_record=at_last_record)
    )
    if as_json:
        print_json({"id": done.id, "changed": done.changed, "restored": done.restored})
    else:
        click.echo(_rebuilt(done))


def _rebuilt(done: Rebuilt) -> str:
    if done.queue is None:
        return f"instance {done.id}: an earlier call with this idempotency key has done it"
    if done.restored:
        return f"instance {done.id} is back, as its journal says"
    if done.changed:
        return f"instance {done.id} is as its journal says; corrected: {', '.join(done.changed)}"
    return f"instance {done.id} is as its journal says; nothing differed"


@click.command(short_help="Begin a history anew with the row as it is.")
@click.argument("target")
@click.option("--key", "as_key", is_flag=True, help="TARGET is a unique key even if it is a number.")
@command_options
@database_options
@json_option
def accept(
    *,
    target: str,
    as_key: bool,
    by: str | None,
    reason: str | None,
    idempotency_key: str | None,
    dsn: str | None,
    schema: str,
    as_json: bool,
) -> None:
    """Accept the row of an instance as it is: the row is right, and its records are not.

    For an instance that went on after its row was changed by hand, or whose records are damaged. Its history begins
    anew with a snapshot of the row; verify does not report what is wrong before it. Leaves a receipt.
    """
    address = address_of(target, as_key=as_key)
    number = with_client(
        dsn,
        schema,
        lambda client: client.accept(address, by=by, reason=reason, idempotency_key=idempotency_key),
    )
    if as_json:
        print_json({"id": number})
    else:
        click.echo(f"instance {number} is accepted as it is")


@click.command(short_help="Correct what damage or a bug has left waiting.")
@click.option("--dry-run", is_flag=True, help="Say what would be corrected, and write nothing.")
@by_options
@database_options
@json_option
def recover(
    *, dry_run: bool, by: str | None, reason: str | None, dsn: str | None, schema: str, as_json: bool
) -> None:
    """Wake instances that wait for a signal they have, recount barriers, offer stuck keys, reap expired leases.

    Also tells instances of ends that they wait for and do not know. Changes nothing on a healthy database, however
    often it is called. Each instance that it wakes or recounts gets a receipt.
    """
    report: RecoveryReport = with_client(
        dsn, schema, lambda client: client.recover(by=by, reason=reason, dry_run=dry_run)
    )
    if as_json:
        print_json(report)
        return
    found: dict[str, Any] = attrs.asdict(report)
    would = "would be " if dry_run else ""
    lines = [f"{would}{name}: {', '.join(map(str, ids))}" for name, ids in found.items() if ids]
    click.echo("\n".join(lines) if lines else "nothing to correct")
