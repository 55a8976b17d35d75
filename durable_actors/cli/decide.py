"""The commands `proceed`, `approve` and `reject`; how `list` and `show` tell what a person is asked."""

from __future__ import annotations

import sys
from typing import Any

import attrs
import click
import trio
from rich.text import Text

from durable_actors._postgres.driver.connection import PgConn
from durable_actors._store.boundaries import DecisionPlan, Verb, plan_decision, told
from durable_actors._store.dialogues import deciding, resolving, run_dialogue
from durable_actors._store.read import Instance
from durable_actors.cli.options import (
    command_options,
    database_options,
    json_option,
    key_bytes,
    open_store,
    read_json,
    read_target,
)
from durable_actors.cli.output import ago, coloured, one_line, print_json
from durable_actors.errors import Conflict, NoTarget


@attrs.frozen
class Decided:
    """The result of `proceed`, `approve` or `reject` for one target."""

    id: int | None
    """None if no instance has the unique key."""
    decided: bool
    reason: str | None = None
    """Why it was refused."""


_DONE = {"proceed": "proceeds", "approve": "approved", "reject": "rejected"}
_NOT = {**_DONE, "proceed": "let proceed"}


def _verb(name: Verb, short: str, text: str) -> click.Command:
    @click.command(name, short_help=short, help=text)
    @click.argument("targets", nargs=-1, required=True, metavar="TARGET...")
    @click.option("--key", "as_key", is_flag=True, help="TARGETs are unique keys even if they are numbers.")
    @click.option("--comment", metavar="TEXT", help="What you have to say, for the step and the receipt.")
    @click.option("--data", metavar="JSON", help="A JSON value for the step; - reads it from standard input.")
    @command_options
    @database_options
    @json_option
    def verb(
        *,
        targets: tuple[str, ...],
        as_key: bool,
        comment: str | None,
        data: str | None,
        by: str | None,
        reason: str | None,
        idempotency_key: str | None,
        dsn: str | None,
        schema: str,
        as_json: bool,
    ) -> None:
        given = read_json(data, option="--data")
        plan = plan_decision(
            name, comment=comment, data=given, by=by, reason=reason, idempotency_key=idempotency_key
        )

        async def run() -> list[Decided]:
            async with open_store(dsn, schema) as conn:
                addresses = dict.fromkeys(read_target(each, as_key=as_key) for each in targets)
                return [await _decide(conn, schema, each, plan) for each in addresses]

        found = trio.run(run)
        if as_json:
            print_json(found)
        for each in found:
            if each.reason is not None:
                click.echo(f"durable-actors: not {_NOT[name]}: {each.reason}", err=True)
            elif not as_json:
                click.echo(f"{each.id} {_DONE[name]}")
        if not all(each.decided for each in found):
            sys.exit(1)

    return verb


async def _decide(conn: PgConn, schema: str, address: int | str, plan: DecisionPlan) -> Decided:
    number = address if isinstance(address, int) else None
    try:
        target = address if isinstance(address, int) else key_bytes(address)
        number = await run_dialogue(conn, resolving(schema, target))
        await run_dialogue(conn, deciding(schema, number, plan))
    except (NoTarget, Conflict) as exc:
        return Decided(number, decided=False, reason=str(exc))
    return Decided(number, decided=True)


_REFUSED = """For each instance that does not wait for that, the reason is printed and the exit code is 1; for the
others the decision counts. Each leaves a receipt: see audit. list --waiting shows who waits."""

proceed = _verb(
    "proceed",
    "Let instances proceed that wait at a Pause.",
    f"Let instances proceed that wait at a Pause, by id or unique key.\n\n{_REFUSED}",
)
approve = _verb(
    "approve",
    "Approve what instances ask.",
    f"Approve what instances ask with Approval, by id or unique key. The first decision counts.\n\n{_REFUSED}",
)
reject = _verb(
    "reject",
    "Reject what instances ask.",
    "Reject what instances ask with Approval, by id or unique key. The first decision counts. An instance whose "
    f"approval names no step for a rejection fails.\n\n{_REFUSED}",
)


# -- for `list` and `show`


def status_of(instance: Instance) -> Text:
    """The status; of an instance that waits for a person or for others, that; and whether it is paused."""
    found = coloured(instance.status)
    if instance.waits:
        found = Text(f"waits for {instance.waits} before it", style="yellow")
    if instance.boundary is not None:
        found = Text(f"waits for a person ({instance.boundary.kind})", style="magenta")
    return found if instance.paused is None else found.append(", paused", style="yellow")


def title_of(instance: Instance) -> str | None:
    """What a person is asked."""
    return None if instance.boundary is None else instance.boundary.title


def asked_of(instance: Instance) -> list[tuple[str, Any]]:
    """The lines of `show` about a boundary or a decision."""
    asked, decision = instance.boundary, instance.decision
    if asked is None:
        return [("decision", None if decision is None else told(decision))]
    until = "" if asked.deadline is None else f", until {asked.deadline.isoformat()}"
    return [
        ("asks", asked.title),
        ("since", f"{asked.since.isoformat()} ({ago(asked.since)}){until}"),
        ("data", None if asked.data is None else one_line(asked.data, limit=2000)),
    ]
