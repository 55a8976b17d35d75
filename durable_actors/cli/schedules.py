"""The group `schedules`: list, put, pause, resume, run, backfill, delete."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Final

import attrs
import click
import trio
from rich.text import Text

from durable_actors._scheduling.schedule import Schedule
from durable_actors._store.commands import plan_command
from durable_actors._store.dialogues import run_dialogue
from durable_actors._store.foreign import Dialogue
from durable_actors._store.node import feature_warning
from durable_actors._store.releases import SCHEDULES
from durable_actors._store.schedule_commands import (
    RECORDS,
    ScheduleInfo,
    SlotRecord,
    backfilling,
    deleting,
    listing,
    pausing_schedule,
    putting,
    resuming_schedule,
    running_now,
)
from durable_actors._store.schedules import plan_schedule
from durable_actors._wording import counted
from durable_actors.cli.options import (
    Whole,
    command_options,
    database_options,
    duration,
    find_machine,
    json_option,
    open_store,
    read_json,
)
from durable_actors.cli.output import STYLES, make_console, one_line, print_json, table

_STATES: Final = {"active": "alive", "paused": "awaiting_signal", "disabled": "lost", "ended": "stopped"}


@click.group(invoke_without_command=True)
@click.option(
    "--records",
    type=Whole(0, 1000),
    default=RECORDS,
    metavar="N",
    help=f"Records of each. Default: {RECORDS}.",
)
@database_options
@json_option
@click.pass_context
def schedules(ctx: click.Context, *, records: int, dsn: str | None, schema: str, as_json: bool) -> None:
    """List schedules: when each fires next, and what became of its last slots. Or change one: see the commands.

    The options of this list come before a command; those of a command come after it.
    """
    if ctx.invoked_subcommand is not None:
        if dsn is not None:
            raise click.UsageError(f"give --dsn after {ctx.invoked_subcommand}")
        return

    async def run() -> tuple[list[ScheduleInfo], str | None]:
        async with open_store(dsn, schema) as conn:
            found = await run_dialogue(conn, listing(schema, None, records))
            return found, await feature_warning(conn, schema, SCHEDULES) if found else None

    found, warning = trio.run(run)
    if as_json:
        print_json([shown(each) for each in found])
    elif not found:
        click.echo("no schedules: give them to Config(schedules=[...]), or write @da.job(cron=...)")
    else:
        _print(found)
    if warning:
        click.echo(f"durable-actors: {warning}", err=True)


def _print(found: list[ScheduleInfo]) -> None:
    console = make_console()
    for each in found:
        console.print(one_line(each.name, limit=200), style="bold", end="  ", markup=False)
        console.print(
            Text(each.state, style=STYLES[_STATES[each.state]]), _about(each), markup=False, sep="  "
        )
        for slot in each.next[:1]:
            form = "%d %b %H:%M:%S" if any(other.second for other in each.next) else "%d %b %H:%M"
            later = ", ".join(other.strftime(form) for other in each.next[1:])
            console.print(
                f"  next  {slot:%a %Y-%m-%d %H:%M:%S %Z}{', then ' + later if later else ''}", markup=False
            )
        if each.records:
            console.print(table(("", "", ""), [("  last", *_words(record)) for record in each.records]))


def _about(each: ScheduleInfo) -> str:
    rule = each.definition
    when = f"{rule.cron} {rule.tz}" if rule.cron is not None else f"every {rule.every:g} s"
    parts = [f"{when} → {each.machine}"]
    for what, said in (("paused", each.paused), ("overridden", each.overridden)):
        if said is not None:
            by = f" by {said.by}" if said.by else ""
            parts.append(f"{what}{by}{': ' + said.reason if said.reason else ''}")
    if each.disabled_at is not None:
        parts.append("no live node has it in its code")
    if each.running is not None:
        parts.append(f"instance {each.running} has not ended")
    if each.buffered is not None:
        parts.append(f"the slot {each.buffered:%Y-%m-%d %H:%M:%S %Z} waits for it")
    if each.remaining is not None:
        parts.append(f"{counted(each.remaining, 'slot')} left")
    return one_line("; ".join(parts), limit=300)


def _words(record: SlotRecord) -> tuple[str, str]:
    slot = f"{record.slot:%Y-%m-%d %H:%M:%S %Z}"
    if record.outcome == "fired":
        how = "" if record.kind in {None, "slot"} else f" ({str(record.kind).replace('_', ' ')})"
        return slot, f"instance {record.instance_id}{how}"
    if record.outcome == "buffered":
        return slot, "waits until the running instance has ended"
    if record.slots == 1:
        return slot, f"skipped: {str(record.reason).replace('_', ' ')}"
    many = "more than 1000" if record.slots is None else str(record.slots)
    last = f"{record.last_slot:%Y-%m-%d %H:%M:%S %Z}"
    return (
        slot,
        f"skipped: {str(record.reason).replace('_', ' ')}, with those after it up to {last}, {many} in all",
    )


def shown(each: ScheduleInfo) -> dict[str, Any]:
    """A schedule for JSON."""
    return {**attrs.asdict(each, recurse=False), "state": each.state}


def _carry_out(dsn: str | None, schema: str, dialogue: Dialogue[Any]) -> Any:
    async def run() -> Any:
        async with open_store(dsn, schema) as conn:
            return await run_dialogue(conn, dialogue)

    return trio.run(run)


def _tell(name: str, text: str, result: object, *, as_json: bool) -> None:
    if as_json:
        print_json({"name": name, "result": result})
    else:
        click.echo(f"schedule {one_line(name, limit=200)} {text}")


@schedules.command("put", short_help="Create a schedule, or replace its definition.")
@click.argument("name")
@click.argument("machine")
@click.option(
    "--module",
    "modules",
    multiple=True,
    metavar="MODULE",
    help="The module that defines the machine. Can be repeated.",
)
@click.option("--cron", metavar="EXPRESSION", help="Minute, hour, day, month, day of the week: '0 3 * * *'.")
@click.option("--every", type=duration, metavar="DURATION", help="Instead: a period, as 90, 5m, 2h, 1d.")
@click.option("--tz", metavar="ZONE", help="The time zone of --cron, as Europe/Berlin. Default: UTC.")
@click.option("--state", "--args", metavar="JSON", help="State or arguments of each instance; - reads stdin.")
@click.option("--queue", metavar="NAME", help="The queue. Default: the machine's queue.")
@click.option(
    "--overlap",
    type=click.Choice(["skip", "allow", "buffer_one", "cancel_running"]),
    help="If the last instance has not ended. Default: skip.",
)
@click.option(
    "--missed", type=click.Choice(["last", "skip", "all"]), help="Slots while no engine ran. Default: last."
)
@click.option("--jitter", type=duration, metavar="DURATION", help="Fire up to so much after the slot.")
@command_options
@database_options
@json_option
@click.pass_context
def put(
    ctx: click.Context,
    /,
    *,
    name: str,
    machine: str,
    modules: tuple[str, ...],
    state: str | None,
    queue: str | None,
    dsn: str | None,
    schema: str,
    as_json: bool,
    **given: Any,
) -> None:
    """Create a schedule that starts MACHINE (a name, or module:Name), or replace the definition of one.

    It fires while any engine runs, and goes before what the code says. Its pause and its records stay.
    """
    said = {each: given.pop(each) for each in ("by", "reason", "idempotency_key")}
    spec = find_machine(machine, modules, verbose=bool(ctx.obj))
    options = {option: value for option, value in given.items() if value is not None}
    schedule = Schedule(
        name,
        spec.definition,
        **options,
        state=read_json(state, option="--state"),
        options={} if queue is None else {"queue": queue},
    )
    _carry_out(dsn, schema, putting(schema, plan_schedule(schedule), plan_command(**said)))
    _tell(name, "is stored", "stored", as_json=as_json)


@schedules.command("pause", short_help="Let a schedule not fire.")
@click.argument("name")
@command_options
@database_options
@json_option
def pause(*, name: str, dsn: str | None, schema: str, as_json: bool, **said: Any) -> None:
    """Let a schedule not fire until it is resumed, whatever is deployed meanwhile. It leaves a receipt: see audit."""
    _carry_out(dsn, schema, pausing_schedule(schema, name, plan_command(**said)))
    _tell(name, "is paused", "paused", as_json=as_json)


@schedules.command("resume", short_help="Let a paused schedule fire again.")
@click.argument("name")
@command_options
@database_options
@json_option
def resume(*, name: str, dsn: str | None, schema: str, as_json: bool, **said: Any) -> None:
    """End the pause of a schedule: it goes on with the next slot. Slots of the pause are recorded, and do not fire."""
    _carry_out(dsn, schema, resuming_schedule(schema, name, plan_command(**said)))
    _tell(name, "is resumed", "resumed", as_json=as_json)


@schedules.command("run", short_help="Start an instance now.")
@click.argument("name")
@click.option("--overlap", is_flag=True, help="Also if the last instance has not ended.")
@command_options
@database_options
@json_option
def run(*, name: str, overlap: bool, dsn: str | None, schema: str, as_json: bool, **said: Any) -> None:
    """Start an instance now, beside the slots, also if the schedule is paused. Prints its id."""
    command = plan_command(**said)
    started = _carry_out(dsn, schema, running_now(schema, name, command, "allow" if overlap else None))
    _tell(name, f"has started instance {started.ids[0]}", list(started.ids), as_json=as_json)


def instant(text: str) -> datetime:
    """Parse an instant in ISO format; one without a time zone is local time."""
    try:
        return datetime.fromisoformat(text.strip()).astimezone()
    except (ValueError, OverflowError, OSError):
        raise click.BadParameter(f"{text!r} is not an instant, such as 2026-05-01T18:00") from None


@schedules.command("backfill", short_help="Start an instance for every slot of a time that has passed.")
@click.argument("name")
@click.option(
    "--from", "start", type=instant, required=True, metavar="TIME", help="The first slot, or earlier."
)
@click.option(
    "--to",
    "end",
    type=instant,
    required=True,
    metavar="TIME",
    help="The last slot, or later; not the future.",
)
@command_options
@database_options
@json_option
def backfill(
    *, name: str, start: datetime, end: datetime, dsn: str | None, schema: str, as_json: bool, **said: Any
) -> None:
    """Start an instance for every slot between two times, whatever became of it; 1,000 at most. They may overlap.

    Times are in ISO format; without a time zone they are local times.
    """
    command = plan_command(**said)
    started = _carry_out(dsn, schema, backfilling(schema, name, command, start=start, end=end))
    many = counted(len(started.ids), "instance")
    _tell(
        name, f"has started {many}, {started.ids[0]} to {started.ids[-1]}", list(started.ids), as_json=as_json
    )


@schedules.command("delete", short_help="Delete a schedule and its records.")
@click.argument("name")
@command_options
@database_options
@json_option
def delete(*, name: str, dsn: str | None, schema: str, as_json: bool, **said: Any) -> None:
    """Delete a schedule and its records; its instances stay.

    One that a node has in its code comes back within about a minute, as the code says: to stop it, pause it.
    """
    _carry_out(dsn, schema, deleting(schema, name, plan_command(**said)))
    _tell(name, "is deleted", "deleted", as_json=as_json)
