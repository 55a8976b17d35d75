"""What the commands on instances share: TARGETs or filters, confirmation, progress, what is printed."""

from __future__ import annotations

import sys
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Final, Literal, TypeVar, cast, get_args

import attrs
import click
import trio

from durable_actors._bulk import BATCH, Bulk
from durable_actors._client import Client
from durable_actors._postgres.driver.connection import PgConn
from durable_actors._store.boundaries import Waiting
from durable_actors._store.bulk import BULK
from durable_actors._store.commands import Receipt, plan_command
from durable_actors._store.dialogues import CarriedOut, inspecting, resolving, run_dialogue
from durable_actors._store.foreign import Dialogue
from durable_actors._store.node import feature_warning
from durable_actors._store.observe import NEWEST, Filter
from durable_actors._store.releases import COMMANDS, PAUSES, Feature
from durable_actors._wording import counted
from durable_actors.cli.history import with_client
from durable_actors.cli.options import Whole, duration, key_bytes, open_store, read_target
from durable_actors.cli.output import one_line, print_json
from durable_actors.errors import Conflict, Duplicate, NoTarget
from durable_actors.machine import Status

_F = TypeVar("_F", bound=Callable[..., Any])

ASK_ABOVE: Final = 100
"""So many instances are changed without a question."""
TELL_EVERY: Final = 1.0
"""Seconds between two lines of progress."""

BulkVerb = Literal["cancel", "retry", "run_now", "pause", "resume"]


@attrs.frozen(kw_only=True)
class Given:
    """The options that these commands share, as they were typed."""

    targets: tuple[str, ...]
    as_key: bool
    where: Filter | None
    """None: no filter was given."""
    dry_run: bool
    background: bool
    yes: bool
    said: dict[str, Any]
    """`by`, `reason`, `idempotency_key`."""
    dsn: str | None
    schema: str
    as_json: bool


def many_options(name: BulkVerb) -> Callable[[_F], _F]:
    """Add TARGETs, filters, and what goes with them."""
    allowed = sorted(BULK[name].kind.allowed)
    options = [
        click.argument("targets", nargs=-1, metavar="[TARGET]..."),
        click.option(
            "--key", "as_key", is_flag=True, help="TARGETs are unique keys even if they are numbers."
        ),
        click.option("--status", type=click.Choice(allowed), help="All instances with this status."),
        click.option("--machine", metavar="NAME", help="All instances of this machine."),
        click.option("--queue", metavar="NAME", help="All instances in this queue."),
        click.option("--step", metavar="NAME", help="All instances in this step."),
        click.option("--error", metavar="TEXT", help="All instances with this text in their error."),
        click.option(
            "--tag",
            "tags",
            multiple=True,
            metavar="TEXT",
            help="All instances with this tag. Can be repeated.",
        ),
        click.option("--parent", type=Whole(1, NEWEST), metavar="ID", help="All children of this instance."),
        click.option(
            "--older-than",
            type=duration,
            metavar="DURATION",
            help="All instances that have not changed for this long.",
        ),
        click.option(
            "--waiting",
            type=click.Choice(get_args(Waiting)),
            help="All instances that wait for this: see list.",
        ),
        click.option(
            "--paused", is_flag=True, default=None, help="All instances that are paused themselves."
        ),
        click.option("--everything", is_flag=True, help="All instances that the command applies to."),
        click.option("--dry-run", is_flag=True, help="Say what would be changed, and change nothing."),
        click.option("--background", is_flag=True, help="With filters: let a worker do it, and do not wait."),
        click.option(
            "--yes", is_flag=True, help=f"Do not ask before more than {ASK_ABOVE} instances are changed."
        ),
    ]

    def add(function: _F) -> _F:
        for option in reversed(options):
            function = option(function)
        return function

    return add


def read_given(options: dict[str, Any]) -> Given:
    """Take the shared options out of a command's, and check that there are either TARGETs or filters."""
    narrowing = {
        name: options.pop(name)
        for name in (
            "status",
            "machine",
            "queue",
            "step",
            "error",
            "parent",
            "older_than",
            "waiting",
            "paused",
        )
    }
    tags, everything = options.pop("tags"), options.pop("everything")
    filtered = bool(tags) or everything or any(each is not None for each in narrowing.values())
    said = {name: options.pop(name) for name in ("by", "reason", "idempotency_key")}
    status = cast("Status | None", narrowing.pop("status"))
    where = Filter(status=status, tag=tags or None, everything=everything, **narrowing) if filtered else None
    given = Given(where=where, said=said, **options)
    if bool(given.targets) == filtered:
        raise click.UsageError("give either TARGETs (ids or unique keys) or filters such as --status failed")
    if given.background and not filtered:
        raise click.UsageError("--background goes with filters, not with TARGETs")
    return given


# -- TARGETs


@attrs.frozen
class Answer:
    """The result for one target."""

    id: int | None
    """None if no instance has the unique key."""
    result: Any
    """What the command answered; None if it was refused, or only looked at."""
    reason: str | None = None
    """Why it was refused."""


def on_targets(
    name: BulkVerb,
    given: Given,
    start: Callable[[int], Dialogue[CarriedOut]],
    *,
    then: Callable[[], Dialogue[object]] | None = None,
    feature: Feature | None = None,
) -> list[Answer]:
    """Carry a command out on each TARGET, or look whether it could be.

    `then`: what follows if one was. `feature`: warn of nodes that ignore it.
    """

    async def run() -> list[Answer]:
        async with open_store(given.dsn, given.schema) as conn:
            addresses = dict.fromkeys(read_target(each, as_key=given.as_key) for each in given.targets)
            if given.dry_run:
                return [await _look(conn, given.schema, name, each) for each in addresses]
            found = [await _carry_out(conn, given.schema, each, start) for each in addresses]
            if then is not None and any(each.reason is None for each in found):
                await run_dialogue(conn, then())
            if feature is not None and any(each.result is not None for each in found):
                await _warn(conn, given.schema, feature)
            elif any(each.result == "requested" for each in found):
                await _warn(conn, given.schema, COMMANDS)
            return found

    return trio.run(run)


def report(found: Iterable[Answer], given: Given, *, refused: str, said: Callable[[Answer], str]) -> None:
    """Print the answers; exit with 1 if one was refused."""
    answers = list(found)
    for each in answers:
        if each.reason is not None:
            click.echo(f"durable-actors: {refused}: {each.reason}", err=True)
        elif not given.as_json:
            click.echo(f"{each.id} {said(each)}")
    if any(each.reason is not None for each in answers):
        sys.exit(1)


def _address(address: int | str) -> int | bytes:
    return address if isinstance(address, int) else key_bytes(address)


async def _carry_out(
    conn: PgConn, schema: str, address: int | str, start: Callable[[int], Dialogue[CarriedOut]]
) -> Answer:
    number = address if isinstance(address, int) else None
    try:
        number = await run_dialogue(conn, resolving(schema, _address(address)))
        done = await run_dialogue(conn, start(number))
    except (NoTarget, Conflict) as exc:
        return Answer(number, None, str(exc))
    except Duplicate as exc:
        return Answer(number, None, f"instance {number}: its {exc}")
    return Answer(done.id, done.result)


async def _look(conn: PgConn, schema: str, name: BulkVerb, address: int | str) -> Answer:
    try:
        found = await run_dialogue(conn, inspecting(schema, _address(address)))
    except NoTarget as exc:
        return Answer(None, None, str(exc))
    kind = BULK[name].kind
    why_not = None if found.status in kind.allowed else f"is {found.status}"
    if why_not is None and kind.refuses is not None:
        why_not = kind.refuses(found)
    return Answer(found.id, None, None if why_not is None else f"instance {found.id} {why_not}")


async def _warn(conn: PgConn, schema: str, feature: Feature) -> None:
    warning = await feature_warning(conn, schema, feature)
    if warning is not None:
        click.echo(f"durable-actors: {warning}", err=True)


# -- filters


@attrs.frozen(kw_only=True)
class Told:
    """A bulk, as JSON."""

    id: int | None
    command: str
    state: str
    count: int
    done: int
    skipped: int
    failed: int
    failures: list[tuple[int, str]]
    answers: dict[str, int]
    instance_id: int | None
    repeated: bool


def on_filter(name: BulkVerb, given: Given, **options: Any) -> None:
    """Count what the filter matches, ask if that is much, carry the command out and print what came of it."""
    bulk = _carry_out_many(name, given, options)
    if given.as_json:
        print_json(Told(**{each.name: getattr(bulk, each.name) for each in attrs.fields(Told)}))
    else:
        click.echo(_sentence(name, bulk))
    for number, reason in bulk.failures:
        click.echo(f"durable-actors: instance {number}: {reason}", err=True)
    if name == "pause" and bulk.done:
        trio.run(_warn_alone, given, PAUSES)
    elif bulk.answers.get("requested"):
        trio.run(_warn_alone, given, COMMANDS)
    if bulk.failed:
        sys.exit(1)


def _carry_out_many(name: BulkVerb, given: Given, options: dict[str, Any]) -> Bulk:
    progress = _Progress()

    async def run(client: Client) -> Bulk:
        call = cast("Callable[..., Awaitable[Bulk]]", getattr(client, name))
        # What an earlier call with the same key has done matches no more, and others may match now.
        if given.dry_run or await client.earlier_bulk(name, plan_command(**given.said)) is None:
            counted_first = await call(where=given.where, dry_run=True)
            if given.dry_run or not counted_first.count:
                return counted_first
            _confirm(name, counted_first.count, yes=given.yes)
        progress.begun = not given.background
        how = {"background": True} if given.background else {"progress": progress}
        return await call(where=given.where, **given.said, **options, **how)

    try:
        return with_client(given.dsn, given.schema, run)
    except KeyboardInterrupt:
        if not progress.begun:
            raise
        click.echo(f"durable-actors: {_interrupted(given, progress.bulk)}", err=True)
        sys.exit(1)


async def _warn_alone(given: Given, feature: Feature) -> None:
    async with open_store(given.dsn, given.schema) as conn:
        await _warn(conn, given.schema, feature)


def _confirm(name: str, count: int, *, yes: bool) -> None:
    if yes or count <= ASK_ABOVE:
        return
    if not sys.stdin.isatty():
        raise click.UsageError(f"{name.replace('_', '-')} would change {count} instances: say --yes")
    click.confirm(f"{name.replace('_', '-')} {count} instances?", abort=True, err=True)


class _Progress:
    """Prints how far a bulk has come, once a second."""

    def __init__(self) -> None:
        self._next = time.monotonic() + TELL_EVERY
        self.begun = False
        self.bulk: Bulk | None = None
        """It counts while it runs; None until its first batch has ended."""

    def __call__(self, bulk: Bulk) -> None:
        self.bulk = bulk
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + TELL_EVERY
            click.echo(f"durable-actors: {bulk.done + bulk.skipped + bulk.failed} of {bulk.count}", err=True)


def _interrupted(given: Given, bulk: Bulk | None) -> str:
    """What Ctrl-C leaves, and how to go on."""
    key = given.said["idempotency_key"]
    so_far = (
        f"fewer than {BATCH} instances are done"
        if bulk is None
        else f"at least {bulk.done} of {counted(bulk.count, 'instance')} are done"
    )
    go_on = "the same command does the rest" if key is None else f"with --idempotency-key {key} it goes on"
    return f"interrupted: {so_far}, and stay so; given again, {go_on}"


def _sentence(name: str, bulk: Bulk) -> str:
    verb = name.replace("_", "-")
    if not bulk.count:
        return "no instance matches the filters"
    many = counted(bulk.count, "instance")
    if bulk.state == "dry run":
        return f"{verb} would change {many}"
    before = "" if bulk.earlier is None else f"{_given_before(bulk.earlier)}: "
    number = bulk.instance_id
    if number is not None and bulk.state == "running":
        of = f"{many}: {before}it" if before else many
        return (
            f"{verb} of {of} runs in the background, as instance {number}: "
            f"`durable-actors show {number}`, `durable-actors cancel {number}`"
        )
    parts = [f"{times} {answer}" for answer, times in sorted(bulk.answers.items())] or [f"{bulk.done} done"]
    parts += [f"{bulk.skipped} skipped, because they had changed"] * bool(bulk.skipped)
    parts += [f"{bulk.failed} failed"] * bool(bulk.failed)
    parts += ["then it was aborted"] * (bulk.state == "aborted") + ["then it gave up"] * (
        bulk.state == "failed"
    )
    now = "; nothing was done now" if bulk.repeated else "; the rest was done now" if before else ""
    return f"{verb} of {many}: {before}{', '.join(parts)}{now}"


def _given_before(receipt: Receipt) -> str:
    by = "" if receipt.by is None else f", by {one_line(receipt.by, limit=50)}"
    return f"given before ({receipt.at:%Y-%m-%d %H:%M %Z}{by})"
