"""The commands `insert` and `signal`."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import click
import trio

from durable_actors._journal_level import LEVELS
from durable_actors.cli.options import (
    bare_errors,
    database_options,
    duration,
    find_machine,
    json_option,
    make_config,
    read_json,
    read_target,
)
from durable_actors.cli.output import print_json
from durable_actors.client import open_client
from durable_actors.errors import Duplicate
from durable_actors.machine import InsertOptions


@click.command(short_help="Start an instance of a machine or job.")
@click.argument("machine")
@click.option(
    "--module",
    "modules",
    multiple=True,
    metavar="MODULE",
    help="The module that defines it. Can be repeated.",
)
@click.option(
    "--state", "--args", metavar="JSON", help="The initial state, or the arguments of a job; - reads stdin."
)
@click.option("--step", metavar="NAME", help="The first step. Default: the initial step.")
@click.option("--queue", metavar="NAME", help="The queue. Default: the machine's queue.")
@click.option("--priority", type=int, default=0, help="Lower values run first. Default: 0.")
@click.option("--unique-key", metavar="KEY", help="At most one live instance has this key.")
@click.option("--partition-key", metavar="KEY", help="Steps with the same key run one at a time, in order.")
@click.option(
    "--in", "delay", type=duration, metavar="DURATION", help="Run after this delay: 90, 5m, 2h, 1d."
)
@click.option("--at", metavar="INSTANT", help="Run at this instant: 2030-01-31T08:00+01:00.")
@click.option("--tag", "tags", multiple=True, metavar="TEXT", help="A text to filter by. Can be repeated.")
@click.option("--meta", metavar="JSON", help="A JSON object for people and tools.")
@click.option(
    "--max-attempts", type=int, metavar="N", help="How often it runs at most. Default: what its code says."
)
@click.option(
    "--journal",
    type=click.Choice(LEVELS),
    help="What is recorded of it. Default: what the machine says, else auto.",
)
@click.option(
    "--on-duplicate",
    type=click.Choice(["raise", "return", "skip"]),
    default="raise",
    help="If the unique key is occupied: fail (default), print the existing id, or print nothing.",
)
@database_options
@json_option
@click.pass_context
def insert(
    ctx: click.Context,
    /,
    *,
    machine: str,
    modules: tuple[str, ...],
    state: str | None,
    on_duplicate: str,
    dsn: str | None,
    schema: str,
    as_json: bool,
    **given: Any,
) -> None:
    """Insert an instance of MACHINE (the registered name of a machine or job), and print its id.

    The command imports the module that defines it, to know the initial step and the type of the state: give --module,
    or the place of the class or function, `module:Name`, which is also its name by default.
    """
    config = make_config(dsn, schema)
    spec = find_machine(machine, modules, verbose=bool(ctx.obj))
    options = _options(given)
    if state is not None:
        options["state"] = read_json(state, option="--state")

    async def main() -> tuple[int | None, bool]:
        async with open_client(config.dsn, schema=config.schema, start_timeout=0) as client:
            try:
                return await client.insert(spec.definition, **options), True
            except Duplicate as exc:
                if on_duplicate == "raise":
                    raise
                return exc.existing_id if on_duplicate == "return" else None, False

    number, new = trio.run(main)
    if as_json:
        print_json({"id": number, "new": new})
    elif number is not None:
        click.echo(number)


def _options(given: dict[str, Any]) -> InsertOptions:
    options: InsertOptions = {"priority": given["priority"]}
    for name in ("step", "queue", "unique_key", "partition_key", "journal", "max_attempts"):
        if given[name] is not None:
            options[name] = given[name]
    if given["tags"]:
        options["tags"] = given["tags"]
    if given["meta"] is not None:
        options["meta"] = read_json(given["meta"], option="--meta")
    if given["delay"] is not None and given["at"] is not None:
        raise click.UsageError("--in and --at cannot be combined")
    if given["delay"] is not None:
        options["schedule_in"] = given["delay"]
    if given["at"] is not None:
        try:
            instant = datetime.fromisoformat(given["at"])
            options["schedule_at"] = instant.astimezone()  # without an offset: the time zone of this computer
        except (ValueError, OverflowError):
            raise click.BadParameter(
                f"{given['at']!r} is not an ISO instant like 2030-01-31T08:00+01:00", param_hint="--at"
            ) from None
    return options


@click.command(short_help="Send a signal to an instance.")
@click.argument("target")
@click.argument("name")
@click.argument("payload", required=False)
@click.option("--dedup-key", metavar="KEY", help="Sending again with the same key has no effect.")
@click.option("--key", "as_key", is_flag=True, help="TARGET is a unique key even if it is a number.")
@database_options
@json_option
def signal(
    *,
    target: str,
    name: str,
    payload: str | None,
    dedup_key: str | None,
    as_key: bool,
    dsn: str | None,
    schema: str,
    as_json: bool,
) -> None:
    """Send signal NAME with PAYLOAD (JSON; - reads stdin) to TARGET, an instance's id or unique key.

    Prints `sent`, or `duplicate` if the dedup key was used before. Fails if the instance has ended or does not exist.
    """
    config = make_config(dsn, schema)
    address = read_target(target, as_key=as_key)
    value = read_json(payload, option="PAYLOAD")

    async def main() -> str:
        async with open_client(config.dsn, schema=config.schema, start_timeout=0) as client:
            [outcome] = await client.signal_many(
                [{"target": address, "name": name, "payload": value, "dedup_key": dedup_key}]
            )
            if outcome == "no_target":
                raise await client.undelivered(name, address)
            return outcome

    with bare_errors():
        outcome = trio.run(main)
    if as_json:
        print_json({"target": address, "outcome": outcome})
    else:
        click.echo(outcome)
