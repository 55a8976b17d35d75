"""The commands `history` and `verify`: what happened, and whether the table can be trusted."""

from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Final, TypeVar

import click
import msgspec
import trio
from rich.text import Text

from durable_actors._client import Client
from durable_actors._postgres.target import open_target
from durable_actors._store.history import DamagedPage
from durable_actors._timeline import Line, timeline
from durable_actors._wording import counted
from durable_actors.cli.options import (
    Whole,
    bare_errors,
    database_options,
    json_option,
    key_bytes,
    make_config,
    read_target,
)
from durable_actors.cli.output import make_console, print_json, table
from durable_actors.client import open_client
from durable_actors.errors import NoTarget
from durable_actors.journal import Problem, ProblemReason, Record, VerifyReport

T = TypeVar("T")

PAGE: Final = 1000
MOST: Final = 2**63 - 1


def with_client(dsn: str | None, schema: str, call: Callable[[Client], Awaitable[T]]) -> T:
    """Run a call with a client of this database."""
    config = make_config(dsn, schema)

    async def run() -> T:
        # A command that reads does not warn about the embedded server.
        async with (
            open_target(config.dsn, level=logging.INFO) as target,
            open_client(
                target.dsn, schema=config.schema, name="durable-actors", pool_size=2, start_timeout=1
            ) as client,
        ):
            return await call(client)

    with bare_errors():
        return trio.run(run)


def address_of(target: str, *, as_key: bool) -> int | bytes:
    """Parse the target of a command."""
    address = read_target(target, as_key=as_key)
    return key_bytes(address) if isinstance(address, str) else address


@click.command(short_help="Show what happened to an instance.")
@click.argument("target")
@click.option("--key", "as_key", is_flag=True, help="TARGET is a unique key even if it is a number.")
@click.option(
    "--after", type=Whole(0, MOST), default=0, metavar="REV", help="Only records after this revision."
)
@click.option(
    "--limit", type=Whole(1, 10_000), default=PAGE, help=f"The largest number of records. Default: {PAGE}."
)
@click.option("--traceback", is_flag=True, help="Print the traceback of every failed attempt.")
@database_options
@json_option
def history(
    *,
    target: str,
    as_key: bool,
    after: int,
    limit: int,
    traceback: bool,
    dsn: str | None,
    schema: str,
    as_json: bool,
) -> None:
    """Show the history of an instance, by id or unique key: every recorded move, with relative times and waits as gaps.

    How much is recorded depends on the level of its journal: see --journal of serve. If there are more records, it
    prints the --after option for the next page. A record that is damaged or missing is named in its place, and the
    command exits with 1, unless the row was accepted since: then it is named, and no failure.
    """
    address = address_of(target, as_key=as_key)
    number, page = with_client(
        dsn, schema, lambda client: client.damaged_history(address, after=after, limit=limit)
    )
    records = page.records
    wrong = len(page.damaged) + len(page.accepted)
    more = records[-1].rev if len(records) + wrong >= limit and records else None
    if as_json:
        body = {"records": [msgspec.to_builtins(each) for each in records], "after": more}
        damage = {"damaged": page.damaged, "accepted": page.accepted}
        print_json(body | {name: told for name, told in damage.items() if told})
    else:
        _print_history(page, after=after, traceback=traceback)
        if more is not None:
            click.echo(f"for later records: --after {more}", err=True)
    page.check(number)


def _print_history(page: DamagedPage, *, after: int, traceback: bool) -> None:
    console = make_console()
    if page.records:
        lines = timeline(page.records, {**page.damaged, **page.accepted}, after=after)
        console.print(table(("", "", ""), map(_row, lines)))
    else:
        console.print(_nothing(page.level) if not after else f"no records after revision {after}")
    if traceback:
        for record in page.records:
            _print_traceback(record)


def _nothing(level: str) -> str:
    match level:
        case "off":
            return "no records: its journal is off"
        case "auto":
            return "no records: its journal records only failed attempts"
        case _:
            return "no records"


def _row(line: Line) -> tuple[Text, Text, Text]:
    return (
        Text(line.offset, style="dim"),
        Text(line.kind, style=line.style),
        Text(line.text, style=line.style),
    )


def _print_traceback(record: Record) -> None:
    if record.error is not None and record.error.traceback is not None:
        run = "" if record.attempt is None else f", run {record.attempt + 1}"
        click.echo(f"\nrevision {record.rev}, step {record.step}{run}:\n{record.error.traceback.rstrip()}")


@click.command(short_help="Compare instances with their journals.")
@click.argument("target", required=False)
@click.option("--key", "as_key", is_flag=True, help="TARGET is a unique key even if it is a number.")
@click.option("--machine", metavar="NAME", help="Only instances of this machine.")
@click.option(
    "--sample",
    type=click.FloatRange(0, 1, min_open=True),
    metavar="SHARE",
    help="Only a random share of the instances: 0.01 is every hundredth.",
)
@database_options
@json_option
def verify(
    *,
    target: str | None,
    as_key: bool,
    machine: str | None,
    sample: float | None,
    dsn: str | None,
    schema: str,
    as_json: bool,
) -> None:
    """Replay journals and compare them with the rows: one instance, all of a machine, or all. Changes nothing.

    Prints each problem, and exits with 1 if there is one, or if no instance of the machine is recorded. A notice is
    listed and is no failure: a step ran with another definition of its machine than the instance was started with. What
    a level does not record is not compared: at the default level neither state nor result is.
    """
    address = None if target is None else address_of(target, as_key=as_key)
    report = with_client(dsn, schema, lambda client: client.verify(address, machine=machine, sample=sample))
    if machine is not None and not report.checked and sample is None:
        raise NoTarget(f"no instance of machine {machine!r} has a journal")
    if as_json:
        print_json(msgspec.to_builtins(report))
    else:
        _print_report(report)
    if not report.ok:
        sys.exit(1)


_AMBIGUOUS: Final = (
    "if the journal is right: durable-actors rebuild ID (level full), else durable-actors accept ID"
)
_HINTS: Final[Mapping[ProblemReason, str]] = {
    "anomaly": "anomaly: something outside the engine changed the row or a record before that revision; "
    "if the row is right now: durable-actors accept ID",
    "gap": "gap, invalid_record: if the row is right: durable-actors accept ID",
    "invalid_record": "gap, invalid_record: if the row is right: durable-actors accept ID",
    "divergence": f"divergence: {_AMBIGUOUS}",
    "rev_mismatch": f"rev_mismatch: {_AMBIGUOUS}",
    "index_mismatch": f"index_mismatch: {_AMBIGUOUS}",
    "missing_row": "missing_row: durable-actors rebuild ID (level full)",
}
"""What one can do about a problem."""


def _problem_rows(problems: list[Problem]) -> Iterator[tuple[object, ...]]:
    """One line per problem; of the anomalies of an instance only the first, from which the others follow."""
    more = Counter(each.instance_id for each in problems if each.reason == "anomaly")
    told: set[int] = set()
    for each in problems:
        detail = each.detail
        if each.reason == "anomaly":
            if each.instance_id in told:
                continue
            told.add(each.instance_id)
            others = more[each.instance_id] - 1
            detail += f"; and {counted(others, 'anomaly', 'anomalies')} after it" if others else ""
        yield each.instance_id, each.rev, each.reason, detail


def _print_report(report: VerifyReport) -> None:
    console = make_console()
    if report.problems:
        rows = [*_problem_rows(report.problems)]
        console.print(table(("instance", "rev", "problem", "detail"), rows, right=("instance", "rev")))
        reasons = {each.reason for each in report.problems}
        for hint in dict.fromkeys(_HINTS[each] for each in _HINTS if each in reasons):
            console.print(hint)
    checked = counted(report.checked, "instance")
    notices = sum(each.is_notice for each in report.problems)
    also = f", {counted(notices, 'notice')}" if notices else ""
    console.print(f"{checked} checked, {counted(len(report.problems) - notices, 'problem')}{also}")
