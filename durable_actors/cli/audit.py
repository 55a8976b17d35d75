"""The command `audit`: the receipts of commands."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, cast

import attrs
import click
import trio

from durable_actors._postgres.driver.connection import PgConn
from durable_actors._store.bulk_receipts import key_of
from durable_actors._store.commands import INSTANCE, Receipt
from durable_actors._store.dialogues import inspecting, listing_receipts, run_dialogue
from durable_actors._store.foreign import Dialogue
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

PAGE: Final = 500
"""Receipts that one statement reads."""
MOST_PAGES: Final = 100
"""After so many it prints what it has: a bulk of a million instances is one line, and would be read whole."""

_UNLIKE: Final = {"run": "run_now"}
"""Verbs that receipts name otherwise: `schedules run`."""
_OTHERS: Final = frozenset({"put"})
"""Commands that no verb gives: `schedules.put`."""


@attrs.frozen
class Page:
    """A page of receipts, newest first."""

    receipts: list[Receipt]
    before: int | None
    """Where the next page begins; None if there is nothing older."""


def _command_name(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:  # noqa: ARG001 - click's
    """The name as receipts have it. Refuses one that no receipt has: a typo would find nothing, for ever."""
    group = None if ctx.parent is None else ctx.parent.command
    if value is None or not isinstance(group, click.Group):
        return value
    names = {_receipt_name(each) for each in _commands(ctx, group)} | _OTHERS
    name = _receipt_name(value)
    if name not in names:
        raise click.BadParameter(
            f"{value!r} is not a command that leaves receipts: {', '.join(sorted(names))}"
        )
    return name


def _receipt_name(verb: str) -> str:
    return _UNLIKE.get(verb, verb.replace("-", "_"))


def _commands(ctx: click.Context, group: click.Group) -> Iterator[str]:
    """The verbs that take a reason, in groups such as `schedules`, too."""
    for name in group.list_commands(ctx):
        verb = group.get_command(ctx, name)
        if isinstance(verb, click.Group):
            yield from _commands(ctx, verb)
        elif verb is not None and any(each.name == "reason" for each in verb.params):
            yield name


@click.command(short_help="Show which commands were given, by whom and why.")
@click.argument("target", required=False)
@click.option("--key", "as_key", is_flag=True, help="TARGET is a unique key even if it is a number.")
@click.option(
    "--command", metavar="NAME", callback=_command_name, help="Only this command, such as retry or run-now."
)
@click.option(
    "--limit", type=Whole(1, 10_000), default=20, help="The largest number of lines to list. Default: 20."
)
@click.option(
    "--before", type=Whole(1, NEWEST), default=NEWEST, metavar="ID", help="Only receipts with lower ids."
)
@database_options
@json_option
def audit(
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

    Each command leaves one receipt, in the transaction of its effect. Those of a command with filters, one for each
    instance, are one line (each has its own with --json, or with a TARGET). If there are older ones, it prints the
    --before option for the next page.
    """
    address = None if target is None else read_target(target, as_key=as_key)
    of = key_bytes(address) if isinstance(address, str) else address

    async def run() -> tuple[list[_Line], int | None]:
        async with open_store(dsn, schema) as conn:

            def page(below: int) -> Dialogue[list[Receipt]]:
                return listing_receipts(schema, of, command=command, before=below, limit=max(limit + 1, PAGE))

            lines, older = await _read(conn, page, before, limit, folds=not as_json)
            if not lines and of is not None:
                await run_dialogue(conn, inspecting(schema, of))  # raises if there is no such instance
            return lines, older

    lines, older = trio.run(run)
    if as_json:
        print_json(Page([each.newest for each in lines], older))
        return
    console = make_console()
    if lines:
        console.print(_table(lines))
    else:
        console.print("no receipts")
    if older is not None:
        click.echo(f"for older receipts: --before {older}", err=True)


@attrs.define
class _Line:
    """A receipt, or several of one bulk: each of its instances has one, and its own has the whole."""

    newest: Receipt
    count: int = 1

    def takes(self, older: Receipt) -> bool:
        """Whether that receipt is of the same bulk."""
        mine = self.newest
        if not mine.scope == older.scope == INSTANCE or "bulk" not in older.data:
            return False
        same = (mine.command, mine.idempotency_key) == (older.command, older.idempotency_key)
        return same and older.idempotency_key == key_of(older.data["bulk"])


async def _read(
    conn: PgConn, page: Callable[[int], Dialogue[list[Receipt]]], before: int, limit: int, *, folds: bool
) -> tuple[list[_Line], int | None]:
    """So many lines of receipts with ids below `before`, and where the next ones begin; None: there are none."""
    lines: list[_Line] = []
    for _ in range(MOST_PAGES):
        found = await run_dialogue(conn, page(before))
        for each in found:
            if folds and lines and lines[-1].takes(each):
                lines[-1].count += 1
            elif len(lines) == limit:
                return lines, before
            else:
                lines.append(_Line(each))
            before = each.id
        if len(found) < max(limit + 1, PAGE):
            return lines, None
    return lines, before


def _table(lines: list[_Line]) -> Any:
    headers = ("id", "at", "command", "target", "by", "reason", "idempotency key", "data", "result")
    rows = (
        (
            each.id,
            each.at.isoformat(timespec="seconds"),
            one_line(each.command),
            one_line(_target(each) if count == 1 else f"{count} instances of bulk {each.data['bulk']}"),
            one_line(each.by or "", limit=30),
            one_line(each.reason or "", limit=60),
            one_line(each.idempotency_key or "", limit=30),
            one_line(_data(each), limit=60) if _data(each) else "",
            one_line(_result(each), limit=60) if count == 1 else "",
        )
        for each, count in ((line.newest, line.count) for line in lines)
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
