"""The commands `cancel`, `retry`, `run-now` and `rerun`."""

from __future__ import annotations

import difflib
from functools import partial
from typing import Any, Final

import attrs
import click
import trio

from durable_actors._store.cascade import cascading
from durable_actors._store.commands import plan_command
from durable_actors._store.dialogues import (
    RETRY,
    RUN_NOW,
    cancelling,
    carrying_out,
    inspecting,
    run_dialogue,
)
from durable_actors._store.observe import read_nodes
from durable_actors.cli.history import address_of, with_client
from durable_actors.cli.many import Answer, many_options, on_filter, on_targets, read_given, report
from durable_actors.cli.options import (
    Whole,
    command_options,
    database_options,
    json_option,
    open_store,
    read_json,
)
from durable_actors.cli.output import print_json
from durable_actors.errors import NoTarget
from durable_actors.machine import KEEP

COURTESY: Final = 100
"""Statements by which `cancel` cancels children; the nodes do the rest."""

_REQUESTED: Final = (
    ": its node cancels the step (one in a thread runs to its end), or it compensates; then it ends"
)


@click.command(short_help="Cancel instances that have not ended.")
@many_options("cancel")
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
def cancel(*, force: bool, children: str, **options: Any) -> None:
    """Cancel instances that have not ended: TARGETs (ids or unique keys), or all that match the filters.

    What does not run has ended when this returns. A step that runs is cancelled by its node, within two seconds, and
    the instance ends as cancelled unless the step is done first. For each TARGET that has ended already, the reason is
    printed and the exit code is 1; the others are cancelled. Each leaves a receipt: see audit.

    An instance of a machine that compensates (on_cancel) enters that step instead; a second cancel of it needs
    --force. With --children cancel, its children are cancelled as well, in batches, by this command and by the nodes.
    """
    given = read_given(options)
    if given.where is not None:
        on_filter("cancel", given, force=force, children=children)
        return
    command = plan_command(**given.said)
    how = {"force": force, "children": children == "cancel"}
    found = on_targets(
        "cancel",
        given,
        lambda number: cancelling(given.schema, number, command, **how),
        then=partial(cascading, given.schema, rounds=COURTESY) if how["children"] else None,
    )

    def said(answer: Answer) -> str:
        if given.dry_run:
            return "would be cancelled"
        return str(answer.result) + ("" if answer.result == "cancelled" else _REQUESTED)

    if given.as_json:
        print_json(found)
    report(found, given, refused="not cancelled", said=said)


@attrs.frozen
class Retried:
    """The result of `retry` for one target."""

    id: int | None
    """None if no instance has the unique key."""
    retried: bool
    reason: str | None = None
    """Why it was not retried."""


@click.command(short_help="Run failed or cancelled instances again.")
@many_options("retry")
@command_options
@database_options
@json_option
def retry(**options: Any) -> None:
    """Run failed or cancelled instances again, from the step in which they ended, with attempts starting at 0.

    TARGETs are ids or unique keys. Without a TARGET, all failed instances that match the filters run again; with
    --status cancelled, all cancelled ones. State and step are unchanged. For each TARGET that cannot be retried, the
    reason is printed and the exit code is 1; the others run again. Each leaves a receipt: see audit.
    """
    given = read_given(options)
    if given.where is not None:
        on_filter("retry", given)
        return
    command = plan_command(**given.said)
    found = on_targets("retry", given, lambda number: carrying_out(RETRY, given.schema, number, command))
    if given.as_json:
        print_json([Retried(each.id, each.result is not None, each.reason) for each in found])
    report(
        found,
        given,
        refused="not retried",
        said=lambda _: "would run again" if given.dry_run else "runs again",
    )


@click.command("run-now", short_help="Let delayed instances run now.")
@many_options("run_now")
@command_options
@database_options
@json_option
def run_now(**options: Any) -> None:
    """Let runnable instances run now: skip their delay, schedule or back-off.

    TARGETs are ids or unique keys. Without a TARGET, all delayed instances that match the filters run now. For each
    TARGET that runs, waits for signals or children, or has ended, the reason is printed and the exit code is 1. Each
    leaves a receipt: see audit.
    """
    given = read_given(options)
    if given.where is not None:
        on_filter("run_now", given)
        return
    command = plan_command(**given.said)
    found = on_targets("run_now", given, lambda number: carrying_out(RUN_NOW, given.schema, number, command))
    words = {
        "hastened": "is due now",
        "paused": "is due now, and paused: it runs when it is resumed",
        "due": "was due already",
        "waiting": "waits for instances that it comes after: nothing changed; `durable-actors why` names them",
        "held": "is held, not delayed: nothing changed; `durable-actors why` says by what",
    }
    if given.as_json:
        print_json(found)
    report(
        found,
        given,
        refused="not run now",
        said=lambda each: "would run now" if given.dry_run else words[str(each.result)],
    )


@click.command(short_help="Start a new instance from an old one.")
@click.argument("target")
@click.option("--key", "as_key", is_flag=True, help="TARGET is a unique key even if it is a number.")
@click.option("--step", metavar="NAME", help="The first step. Default: the first step of the old one.")
@click.option(
    "--state", metavar="JSON", help="The first state; - reads stdin. Default: the first state of the old one."
)
@click.option(
    "--at-rev",
    type=Whole(1, 2**63 - 1),
    metavar="REV",
    help="Take step and state as they were at this revision; see history.",
)
@command_options
@database_options
@json_option
def rerun(
    *,
    target: str,
    as_key: bool,
    step: str | None,
    state: str | None,
    at_rev: int | None,
    by: str | None,
    reason: str | None,
    idempotency_key: str | None,
    dsn: str | None,
    schema: str,
    as_json: bool,
) -> None:
    """Start a new instance from an old one, by id or unique key, and print its id. The old one is not changed.

    The new one has the machine, queue, priority, partition key, tags and meta of the old one, but no unique key and no
    parent. Its first step and state are those of the old one, as far as they are recorded: the state at journal level
    full. Of a workflow, --step is a task: it runs again with all after it, and with what has no result; the results of
    the others are carried over. Leaves a receipt: see audit.
    """
    address = address_of(target, as_key=as_key)
    given = KEEP if state is None else read_json(state, option="--state")
    number = with_client(
        dsn,
        schema,
        lambda client: client.rerun(
            address,
            step=step,
            state=given,
            at_rev=at_rev,
            by=by,
            reason=reason,
            idempotency_key=idempotency_key,
        ),
    )
    if as_json:
        print_json({"id": number})
    else:
        click.echo(number)
    if step is not None:
        warning = trio.run(_unknown_step, dsn, schema, number)
        if warning is not None:
            click.echo(f"durable-actors: {warning}", err=True)


async def _unknown_step(dsn: str | None, schema: str, number: int) -> str | None:
    """A warning if live nodes know the machine and version of an instance, and none of them its step."""
    async with open_store(dsn, schema) as conn:
        try:
            new = await run_dialogue(conn, inspecting(schema, number))
        except NoTarget:
            return None  # an earlier call with the same key made it, long ago
        machine = f"{new.machine}/{new.version}"
        nodes = [each for each in await read_nodes(conn, schema) if each.alive and machine in each.machines]
    if not nodes or any(each.knows(machine, new.step) for each in nodes):
        return None
    known = {each for node in nodes for each in (node.steps or {}).get(machine, ())}
    near = difflib.get_close_matches(new.step, known, n=1)
    hint = f" (did you mean {near[0]!r}?)" if near else f" (they have: {', '.join(sorted(known))})"
    return (
        f"no live node has step {new.step!r} of {machine}{hint}: instance {number} waits for one that has; "
        f"`durable-actors cancel {number}` ends it"
    )
