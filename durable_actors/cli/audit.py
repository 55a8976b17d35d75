"""The command `audit`: the receipts of commands."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import attrs
import click
import trio

from durable_actors._store.commands import Receipt
from durable_actors._store.dialogues import inspecting, listing_receipts, run_dialogue
from durable_actors._store.observe import NEWEST
from durable_actors.cli.options import (
    Whole,
    database_options,
    json_option,
    key_bytes,
    open_store,
    read_target,
)
from durable_actors.cli.output import make_console, one_line, print_json, table


@attrs.frozen
class Page:
    """A page of receipts, newest first."""

    receipts: list[Receipt]
    before: int | None
    """Where the next page begins; None if there is nothing older."""


@click.command(short_help="Show which commands were given, by whom and why.")
@click.argument("target", required=False)
@click.option("--key", "as_key", is_flag=True, help="TARGET is a unique key even if it is a number.")
@click.option("--command", metavar="NAME", help="Only this command, such as retry.")
@click.option(
    "--limit", type=Whole(1, 10_000), default=20, help="The largest number of receipts to list. Default: 20."
)
@click.option(
    "--before", type=Whole(1, NEWEST), default=NEWEST, metavar="ID", help="Only receipts with lower ids."
)
@database_options
@json_option
@click.pass_context
def audit(
    ctx: click.Context,
    /,
    *,
    target: str | None,
    as_key: bool,
    command: str | None,
    limit: int,
    before: int,
    dsn: str | None,
    schema: str,
    as_json: bool,
) -> None:
    """Show the commands that were carried out, newest first: on one instance, by id or unique key, or on all.

    Each command leaves one receipt, in the transaction of its effect. If there are older ones, it prints the --before
    option for the next page.
    """
    _check_command(ctx, command)
    address = None if target is None else read_target(target, as_key=as_key)
    of = key_bytes(address) if isinstance(address, str) else address

    async def run() -> list[Receipt]:
        async with open_store(dsn, schema) as conn:
            page = listing_receipts(schema, of, command=command, before=before, limit=limit)
            found = await run_dialogue(conn, page)
            if not found and of is not None:
                await run_dialogue(conn, inspecting(schema, of))  # raises if there is no such instance
            return found

    found = trio.run(run)
    older = found[-1].id if len(found) == limit else None
    if as_json:
        print_json(Page(found, older))
        return
    console = make_console()
    if found:
        console.print(_table(found))
    else:
        console.print("no receipts")
    if older is not None:
        click.echo(f"for older receipts: --before {older}", err=True)


def _check_command(ctx: click.Context, command: str | None) -> None:
    """Refuse the name of a verb that leaves no receipt: a typo would find nothing, for ever."""
    group = None if ctx.parent is None else ctx.parent.command
    if command is None or not isinstance(group, click.Group):
        return
    names = {
        name for name, verb in group.commands.items() if any(each.name == "reason" for each in verb.params)
    }
    if command.replace("_", "-") not in names:
        raise click.BadParameter(
            f"{command!r} is not a command that leaves receipts: {', '.join(sorted(names))}",
            param_hint="--command",
        )


def _table(receipts: list[Receipt]) -> Any:
    headers = ("id", "at", "command", "target", "by", "reason", "idempotency key", "data", "result")
    rows = (
        (
            each.id,
            each.at.isoformat(timespec="seconds"),
            one_line(each.command),
            one_line(_target(each)),
            one_line(each.by or "", limit=30),
            one_line(each.reason or "", limit=60),
            one_line(each.idempotency_key or "", limit=30),
            one_line(_data(each), limit=60) if _data(each) else "",
            one_line(_result(each), limit=60),
        )
        for each in receipts
    )
    return table(headers, rows, right=("id",))


def _target(receipt: Receipt) -> str:
    """What it was given to: an instance, or all that matched a filter."""
    if receipt.scope != "bulk":
        return receipt.target if receipt.scope == "instance" else f"{receipt.scope} {receipt.target}"
    where: Mapping[str, Any] = receipt.data.get("where") or {}
    return "all " + (", ".join(f"{name}={value}" for name, value in sorted(where.items())) or "that matched")


def _data(receipt: Receipt) -> object:
    """What the caller added."""
    return (receipt.data.get("meta") or {}) if receipt.scope == "bulk" else receipt.data


def _result(receipt: Receipt) -> object:
    """What the caller was told; of a bulk: what came of it."""
    told = receipt.result
    if receipt.scope != "bulk" or not isinstance(told, dict):
        return told
    counts = cast("dict[str, Any]", told)
    if "done" not in counts:
        return f"{counts.get('count', '?')} matched; no end is recorded"
    parts = [f"{counts['done']} of {counts.get('count', '?')} done"]
    parts += [f"{counts[name]} {name}" for name in ("skipped", "failed") if counts.get(name)]
    return ", ".join([*parts, *(["aborted"] if counts.get("aborted") else [])])
