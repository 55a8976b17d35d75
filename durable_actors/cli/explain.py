"""The command `why`: one sentence, the facts under it, what one can do."""

from __future__ import annotations

from collections.abc import Iterator

import click
import trio
from rich.text import Text

from durable_actors._store.dialogues import explaining, run_dialogue
from durable_actors._store.explanation import Blocker, Explanation
from durable_actors.cli.options import database_options, json_option, key_bytes, open_store, read_target
from durable_actors.cli.output import ago, make_console, one_line, print_json

_LEFT_OUT = frozenset({"status", "machine", "step", "queue", "receipts", "lease_left"})
"""Facts that the first lines show already, and those that `show` and `audit` print."""


@click.command(short_help="Explain why an instance waits, runs or has ended.")
@click.argument("target")
@click.option("--key", "as_key", is_flag=True, help="TARGET is a unique key even if it is a number.")
@database_options
@json_option
def why(*, target: str, as_key: bool, dsn: str | None, schema: str, as_json: bool) -> None:
    """Explain why an instance, by id or unique key, waits, runs or has ended, and what one can do.

    It is what the workers themselves would say: `ready` means that a live worker takes it as soon as a slot is free and
    nothing is ahead of it in its queue.
    """
    address = read_target(target, as_key=as_key)

    async def run() -> Explanation:
        async with open_store(dsn, schema) as conn:
            found = address if isinstance(address, int) else key_bytes(address)
            return await run_dialogue(conn, explaining(schema, found))

    explanation = trio.run(run)
    if as_json:
        print_json(explanation)
        return
    console = make_console()
    for name, text in _lines(explanation):
        console.print(Text(f"{name:<10} ", style="bold").append(one_line(text, limit=2000)), soft_wrap=True)


def _lines(explanation: Explanation) -> Iterator[tuple[str, str]]:
    """The lines of the output, each with its label."""
    facts = explanation.evidence
    yield "why", explanation.summary
    yield "reason", explanation.reason
    yield "instance", f"{explanation.id} of {facts['machine']}, step {facts['step']}, queue {facts['queue']}"
    if explanation.since is not None:
        yield "since", f"{explanation.since.isoformat()} ({ago(explanation.since)})"
    if explanation.until is not None:
        yield "until", explanation.until.isoformat()
    for blocker in explanation.blockers:
        yield from _blocker_lines(blocker, "")
    shown = {name: value for name, value in facts.items() if name not in _LEFT_OUT and value}
    yield "facts", ", ".join(f"{name} {_shown(value)}" for name, value in shown.items())
    for action in explanation.next_actions:
        yield "you can", f"{action.text}: {action.command}" if action.command else action.text


def _blocker_lines(blocker: Blocker, indent: str) -> Iterator[tuple[str, str]]:
    yield "waits for", indent + blocker.text
    for each in () if blocker.because is None else blocker.because.blockers:
        yield from _blocker_lines(each, indent + "  ")


def _shown(value: object) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name} {_shown(each)}" for name, each in value.items()) + "}"  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_shown, value)) + "]"  # pyright: ignore[reportUnknownArgumentType]
    isoformat = getattr(value, "isoformat", None)
    return str(value) if isoformat is None else isoformat()
