"""The command `graph`: the tasks of an instance or the steps of a machine, as text, Mermaid, DOT or SVG."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, cast

import click
import trio
from rich.text import Text

from durable_actors._dsn import EMBEDDED
from durable_actors._store.dialogues import run_dialogue
from durable_actors._store.drawing import MOST_NODES, drawing
from durable_actors.cli.options import (
    Whole,
    database_options,
    find_machine,
    import_modules,
    json_option,
    key_bytes,
    make_config,
    open_store,
    read_target,
)
from durable_actors.cli.output import STYLES, as_document, make_console
from durable_actors.diagrams import FORMATS, LIMIT, Diagram, Format, render
from durable_actors.diagrams.model import capped
from durable_actors.diagrams.text import WIDTH, Style, text_lines
from durable_actors.errors import ConfigError, UnknownMachine
from durable_actors.machine import MachineSpec, current_registry, machine_graph

_STYLES: Final[dict[Style, str]] = {
    "title": "bold",
    "dim": "dim",
    "current": "bold reverse",
    "running": STYLES["executing"],
    "done": STYLES["done"],
    "failed": STYLES["failed"],
    "cancelled": STYLES["cancelled"],
    "waiting": STYLES["awaiting_signal"],
}
LONGEST_LINE: Final = 120


@click.command(short_help="Draw the tasks of an instance, or the steps of a machine.")
@click.argument("target", metavar="ID|MACHINE")
@click.option("--key", "as_key", is_flag=True, help="The argument is a unique key.")
@click.option(
    "--module",
    "modules",
    multiple=True,
    metavar="MODULE",
    help="A module that defines machines. Can be repeated.",
)
@click.option("--format", "form", type=click.Choice(FORMATS), default="text", help="Default: text.")
@click.option(
    "-o", "--output", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE", help="Write to a file."
)
@click.option(
    "--barrier", type=Whole(0), metavar="N", help="The children of this visit. Default: the latest."
)
@click.option("--steps", is_flag=True, help="Of an instance: its steps, also if it has a graph of tasks.")
@click.option(
    "--observed/--no-observed",
    default=None,
    help="Of a machine: add what only journals show. Default: if a database is configured.",
)
@click.option(
    "--limit",
    type=Whole(1, MOST_NODES),
    help=f"The largest number of nodes. Default: {LIMIT}, with --json {MOST_NODES}.",
)
@database_options
@json_option
@click.pass_context
def graph(
    ctx: click.Context,
    /,
    *,
    target: str,
    as_key: bool,
    modules: tuple[str, ...],
    form: str,
    output: Path | None,
    limit: int | None,
    as_json: bool,
    **given: Any,
) -> None:
    """Draw the graph of an instance or of a machine.

    Of an instance, by id (or --key and its unique key): the children that come after each other, with how far each is;
    without such children the steps of its machine, where it stands and what it has passed.

    Of a machine, by its name or module:Class: its steps, and what leads from one to the other, read from their source.
    Nothing is executed. What the source does not show is listed below the graph, as are steps that nothing enters.

    The steps of an instance need the source of its machine: give its --module. Without it, only what its journal shows
    is drawn.
    """
    most = limit or (MOST_NODES if as_json else LIMIT)
    address = read_target(target, as_key=as_key)
    if as_key or isinstance(address, int):
        import_modules(modules, verbose=bool(ctx.obj))
        number = key_bytes(target) if as_key else cast("int", address)
        diagram = _of_instance(number, most, given)
    else:
        spec = _spec(target, modules, verbose=bool(ctx.obj))
        diagram = _of_machine(spec, most, given)
    if as_json:
        _write(f"{as_document(diagram)}\n", output)
    elif form == "text" and output is None:
        _print_text(capped(diagram, most))
    else:
        _write(render(diagram, cast("Format", form), limit=most), output)


def _spec(target: str, modules: tuple[str, ...], *, verbose: bool) -> MachineSpec:
    """Find a machine by its name, or by the module and class that define it."""
    try:
        return find_machine(target, modules, verbose=verbose)
    except (UnknownMachine, ConfigError) as exc:
        specs = current_registry().specs.values()
        found = [spec for spec in specs if ":".join(spec.identity) == target]
        if found:
            return max(found, key=lambda spec: spec.version)
        hint = "for an instance give its id, or --key and its unique key"
        raise UnknownMachine(f"{str(exc).rstrip('.')} ({hint})") from exc


def _of_instance(target: int | bytes, limit: int, given: dict[str, Any]) -> Diagram:
    async def run() -> Diagram:
        async with open_store(given["dsn"], given["schema"]) as conn:
            return await run_dialogue(
                conn,
                drawing(given["schema"], target, barrier=given["barrier"], steps=given["steps"], limit=limit),
            )

    return trio.run(run)


def _of_machine(spec: MachineSpec, limit: int, given: dict[str, Any]) -> Diagram:
    if given["barrier"] is not None or given["steps"]:
        raise click.UsageError("--barrier and --steps are for an instance")
    config = make_config(given["dsn"], given["schema"])
    observed = given["observed"]
    if not (config.dsn != EMBEDDED if observed is None else observed):
        return capped(machine_graph(spec.definition), limit)

    async def run() -> Diagram:
        async with open_store(given["dsn"], given["schema"]) as conn:
            return await run_dialogue(conn, drawing(config.schema, spec.definition, limit=limit))

    return trio.run(run)


def _print_text(diagram: Diagram) -> None:
    """Print in colours to a terminal, at its width."""
    console = make_console()
    width = min(console.width, LONGEST_LINE) if console.is_terminal else WIDTH
    for line in text_lines(diagram, width):
        text = Text()
        for piece, style in line:
            text.append(piece, style=_STYLES.get(style, ""))
        console.print(text, soft_wrap=True)


def _write(text: str, output: Path | None) -> None:
    if output is None:
        click.echo(text, nl=False)
        return
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as exc:
        raise ConfigError(f"cannot write {str(output)!r}: {exc.strerror}", option="output") from exc
