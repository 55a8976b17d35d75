"""The group `limits`: list, set, clear, release."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import click
import msgspec
import trio

from durable_actors._limits import Limit
from durable_actors._store.commands import Command, plan_command
from durable_actors._store.limits import (
    LimitCaps,
    LimitInfo,
    LimitKey,
    read_limits,
    release_limit,
    set_limit,
)
from durable_actors._wording import seconds
from durable_actors.cli.options import (
    Whole,
    command_options,
    database_options,
    duration,
    json_option,
    open_store,
)
from durable_actors.cli.output import make_console, one_line, print_json, table
from durable_actors.errors import NoTarget


@click.group(invoke_without_command=True)
@click.option(
    "--keys", type=Whole(0, 10_000), default=100, metavar="N", help="Keys of each limit. Default: 100."
)
@database_options
@json_option
@click.pass_context
def limits(ctx: click.Context, *, keys: int, dsn: str | None, schema: str, as_json: bool) -> None:
    """List limits: the level of each key, how many wait, the next token, who has the slots. Or change one.

    The options of this list come before a command; those of a command come after it.
    """
    if ctx.invoked_subcommand is not None:
        if dsn is not None:
            raise click.UsageError(f"give --dsn after {ctx.invoked_subcommand}")
        return

    async def run() -> list[LimitInfo]:
        async with open_store(dsn, schema) as conn:
            return await read_limits(conn, schema, caps=LimitCaps(keys=keys))

    found = trio.run(run)
    if as_json:
        print_json([msgspec.to_builtins(each) for each in found])
    elif not found:
        click.echo("no limits: give them to Config(limits={...})")
    else:
        console = make_console()
        for each in found:
            console.print(one_line(each.name, limit=200), style="bold", end="  ", markup=False)
            console.print(_about(each), markup=False)
            if each.keys:
                console.print(
                    table(("  key", "spent", "waiting", "next", "slots"), [_row(key) for key in each.keys])
                )
            if each.keys_total > len(each.keys):
                console.print(f"  and {each.keys_total - len(each.keys)} more keys: --keys N", markup=False)


def _about(each: LimitInfo) -> str:
    if not each.known:
        return "nobody has declared it: what uses it waits"
    parts: list[str] = []
    if each.interval is not None:
        parts.append(f"one token in {seconds(each.interval)}, burst {each.burst:g}")
    if each.slots is not None:
        parts.append(f"{each.slots} slots" + (", kept by the instance" if each.held == "instance" else ""))
    if each.on_full == "drop":
        parts.append("what finds it full is dropped")
    if each.override is not None:
        by = f" by {each.set_by}" if each.set_by else ""
        parts.append(f"set{by}{': ' + each.reason if each.reason else ''}")
        if each.declared is not None:
            parts.append(
                f"the code says {', '.join(f'{name}={_shown(value)}' for name, value in each.declared.items())}"
            )
    return one_line("; ".join(parts), limit=300)


def _shown(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:g}"


def _row(key: LimitKey) -> tuple[str, str, str, str, str]:
    left = None if key.next_at is None else (key.next_at - datetime.now(UTC)).total_seconds()
    when = "" if left is None else "now" if left <= 0 else f"in {seconds(left)}"
    if key.blocked_until is not None:
        when += " (told to wait)"
    return (
        "  " + one_line(key.key, limit=100),
        "" if key.spent is None else f"{key.spent:g}",
        str(key.waiting),
        when,
        ", ".join(map(str, key.holders))
        + (f" and {key.taken - len(key.holders)} more" if key.taken > len(key.holders) else ""),
    )


def _change(
    dsn: str | None, schema: str, name: str, given: dict[str, Any] | None, command: Command
) -> Limit | None:
    """Set a limit, or clear it (None). Returns the new definition; None: there was nothing to clear."""

    async def run() -> Limit | None:
        async with open_store(dsn, schema) as conn:
            found = await read_limits(conn, schema, caps=LimitCaps(keys=0), name=name)
            now = (found[0].override or found[0].declared or {}) if found else {}
            limit = None if given is None else _merged(now, given)
            done = await set_limit(conn, schema, name, limit, command)
            return (limit or Limit(1)) if done else None

    return trio.run(run)


def _merged(now: Mapping[str, Any], given: Mapping[str, Any]) -> Limit:
    """What counts now, with what is given instead. A new rate has a burst of its own."""
    said = {name: value for name, value in given.items() if value is not None}
    stays: dict[str, Any] = {
        name: int(value) if name in ("burst", "slots") else value for name, value in now.items()
    }
    if "rate" in said:
        stays = {name: value for name, value in stays.items() if name not in ("per", "burst")}
    return Limit(**{**stays, **said})


@limits.command("set", short_help="Let another rate or number of slots count.")
@click.argument("name")
@click.option("--rate", type=float, metavar="N", help="Steps that may begin in --per.")
@click.option("--per", type=duration, metavar="DURATION", help="Default, with --rate: 1s.")
@click.option(
    "--burst", type=Whole(1, 1_000_000), metavar="N", help="Steps that may begin at once. Default: the rate."
)
@click.option("--slots", type=Whole(1, 10_000), metavar="N", help="Steps that may run at a time.")
@click.option(
    "--on-full", type=click.Choice(["wait", "drop"]), help="What becomes of a step that finds it full."
)
@click.option("--held", type=click.Choice(["step", "instance"]), help="How long a slot is held.")
@command_options
@database_options
@json_option
def set_(
    *,
    name: str,
    rate: float | None,
    per: float | None,
    burst: int | None,
    slots: int | None,
    on_full: str | None,
    held: str | None,
    dsn: str | None,
    schema: str,
    as_json: bool,
    **said: Any,
) -> None:
    """Let this definition of a limit count until it is cleared, whatever the code says. It acts with the next pick.

    What is not given stays as it is; but a new rate has the burst that is given with it, else the rate.
    """
    given = {"rate": rate, "per": per, "burst": burst, "slots": slots, "on_full": on_full, "held": held}
    _change(dsn, schema, name, given, plan_command(**said))
    if as_json:
        print_json({"name": name, "result": "set"})
    else:
        click.echo(f"limit {one_line(name, limit=200)} is set")


@limits.command("clear", short_help="Let the code's definition count again.")
@click.argument("name")
@command_options
@database_options
@json_option
def clear(*, name: str, dsn: str | None, schema: str, as_json: bool, **said: Any) -> None:
    """End what set has said: the definition of the code counts again."""
    if _change(dsn, schema, name, None, plan_command(**said)) is None:
        raise NoTarget(f"limit {name!r} was not set by an operator")
    if as_json:
        print_json({"name": name, "result": "cleared"})
    else:
        click.echo(f"limit {one_line(name, limit=200)} is what the code says")


@limits.command("release", short_help="Let a key begin anew, or take the slot that an instance keeps.")
@click.argument("key", metavar="NAME[:KEY]")
@click.option("--id", "instance", type=int, metavar="ID", help="Take the slot that this instance keeps.")
@command_options
@database_options
@json_option
def release(
    *, key: str, instance: int | None, dsn: str | None, schema: str, as_json: bool, **said: Any
) -> None:
    """Let a key have all its tokens again, although a step was told to wait; or free a slot that an instance keeps.

    A step that runs has its slot until it ends: `cancel --force` ends it at once.
    """

    async def run() -> bool:
        async with open_store(dsn, schema) as conn:
            return await release_limit(conn, schema, key, plan_command(**said), instance=instance)

    if not trio.run(run):
        raise NoTarget(
            f"no token of limit {key!r} is spent"
            if instance is None
            else f"instance {instance} keeps no slot of limit {key!r}"
        )
    if as_json:
        print_json({"name": key, "result": "released"})
    else:
        click.echo(f"limit {one_line(key, limit=400)} is released")
