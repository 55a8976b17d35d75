"""The command `tree`: the family of an instance, indented, with what each waits for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

import click
import trio
from rich.text import Text

from durable_actors._store.dialogues import climbing, run_dialogue
from durable_actors._store.tree import DEEPEST, MOST, Tree, TreeNode
from durable_actors._wording import counted
from durable_actors.cli.options import (
    Whole,
    database_options,
    json_option,
    key_bytes,
    open_store,
    read_target,
)
from durable_actors.cli.output import coloured, make_console, one_line, print_json, started_by

AFTER: Final = 6
"""Of those that an instance comes after, so many are named."""


@click.command("tree", short_help="Show the family of an instance: who started whom.")
@click.argument("target")
@click.option("--key", "as_key", is_flag=True, help="TARGET is a unique key even if it is a number.")
@click.option("--depth", type=Whole(0, DEEPEST), default=10, help="Levels below the instance. Default: 10.")
@click.option(
    "--children", type=Whole(1, MOST), default=20, help="The largest number of children of each. Default: 20."
)
@click.option(
    "--limit", type=Whole(1, MOST), default=1000, help="The largest number of descendants. Default: 1000."
)
@database_options
@json_option
def tree(
    *,
    target: str,
    as_key: bool,
    depth: int,
    children: int,
    limit: int,
    dsn: str | None,
    schema: str,
    as_json: bool,
) -> None:
    """Show the family of an instance, by id or unique key: its ancestors, and the descendants of the first of them.

    Each line has the status, the step, what the instance waits for, which step started it, and of children that have
    keys the key and what each comes after. Of many children, those that have not ended are shown first, then those that
    failed; the others are counted by status.
    """
    address = read_target(target, as_key=as_key)

    async def run() -> Tree:
        async with open_store(dsn, schema) as conn:
            found = address if isinstance(address, int) else key_bytes(address)
            return await run_dialogue(
                conn, climbing(schema, found, depth=depth, children=children, limit=limit)
            )

    found = trio.run(run)
    if as_json:
        print_json(found)
        return
    console = make_console()
    if (above := found.root.parent_run) is not None:
        console.print(Text(f"its parent {started_by(above)} is gone, or not shown", style="dim"))
    for line in _lines(found.root, found.target):
        console.print(line, soft_wrap=True)


def _lines(root: TreeNode, target: int) -> Iterator[Text]:
    """The lines of the output, parents first."""
    names = {node.id: str(node.id) if node.key is None else one_line(node.key) for node in root.walk()}
    todo: list[tuple[TreeNode | Text, str, str]] = [(root, "", "")]
    while todo:
        node, first, rest = todo.pop()
        if isinstance(node, Text):
            yield Text(first).append_text(node)
            continue
        yield Text(first).append_text(_line(node, target, names))
        below: list[TreeNode | Text] = [*node.children]
        if node.hidden:
            below.append(
                Text(f"… {node.hidden} more: {_counted(node.hidden_counts) or 'unknown'}", style="dim")
            )
        for index in range(len(below) - 1, -1, -1):
            last = index == len(below) - 1
            todo.append((below[index], rest + ("└─ " if last else "├─ "), rest + ("   " if last else "│  ")))


def _line(node: TreeNode, target: int, names: Mapping[int, str]) -> Text:
    style = "bold reverse" if node.id == target else "bold"
    line = Text(str(node.id), style=style).append(f" {one_line(node.machine)}/{node.version} ", style="")
    line.append_text(coloured(node.status)).append(f" in {one_line(node.step)}")
    if node.waits_for:
        line.append(f": {one_line(node.waits_for, limit=200)}")
    if (parent := node.parent_run) is not None and parent.step is not None:
        key = "" if parent.key is None else f", key {one_line(parent.key)}"
        line.append(f" (from step {one_line(parent.step)}{key})", style="dim")
    if node.key is not None:
        line.append(f" (key {one_line(node.key)})", style="dim")
    if node.after:
        shown = [names.get(each, str(each)) for each in node.after[:AFTER]]
        more = node.after_count - len(shown)
        line.append(f" (after {', '.join(shown)}{f' and {more} more' if more else ''})", style="dim")
    if node.rerun_of is not None:
        line.append(f" (rerun of {node.rerun_of})", style="dim")
    if node.counts:
        total = counted(sum(node.counts.values()), "child", "children")
        line.append(f" [{total}: {_counted(node.counts)}]", style="dim")
    return line


def _counted(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{number} {status}" for status, number in sorted(counts.items()))
