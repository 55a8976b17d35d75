"""The commands `versions` and `check`: what live instances need of the code."""

from __future__ import annotations

import sys
from typing import Any, Final

import attrs
import click
import trio

from durable_actors._store.observe import read_nodes
from durable_actors._store.versions import (
    Finding,
    Specs,
    VersionUse,
    missing_code,
    read_states,
    read_step_uses,
    unreadable_states,
    versions_of,
)
from durable_actors._wording import counted
from durable_actors.cli.options import (
    Whole,
    config_option,
    database_options,
    import_modules,
    json_option,
    open_store,
)
from durable_actors.cli.output import ago, make_console, one_line, plain, print_json, table
from durable_actors.machine import builtin_machines, current_registry

UNSAFE: Final = 3
"""The exit code of `check` if live instances need something that the code does not have."""


def known_here() -> Specs:
    """What the imported modules define, and the machines of this package."""
    return {**builtin_machines(), **current_registry().specs}


@click.command(short_help="Show which versions and steps live instances need.")
@click.argument("modules", nargs=-1, metavar="[MODULE]...")
@click.option("--steps", is_flag=True, help="One line per step instead of one per version.")
@database_options
@json_option
@click.pass_context
def versions(
    ctx: click.Context,
    /,
    *,
    modules: tuple[str, ...],
    steps: bool,
    dsn: str | None,
    schema: str,
    as_json: bool,
) -> None:
    """Show every version of every machine that live instances need, and whether its code can be removed.

    With MODULE... it also shows the versions of that code which nobody needs any more. READS THE WHOLE TABLE.
    """
    import_modules(modules, verbose=bool(ctx.obj))
    specs = known_here() if modules else None

    async def run() -> list[VersionUse]:
        async with open_store(dsn, schema) as conn:
            return versions_of(await read_step_uses(conn, schema), await read_nodes(conn, schema), specs)

    builtin = builtin_machines()
    found = [each for each in trio.run(run) if (each.machine, each.version) not in builtin or each.live]
    if as_json:
        print_json([{**plain(each), "removable": each.removable} for each in found])
        return
    make_console().print(_by_step(found) if steps else _by_version(found))


def _by_version(found: list[VersionUse]) -> Any:
    rows = [
        (
            one_line(each.machine),
            each.version,
            each.live,
            each.failed,
            "" if each.oldest is None else ago(each.oldest),
            each.nodes,
            _advice(each),
        )
        for each in found
    ]
    numbers = ("version", "live", "failed", "nodes")
    return table(("machine", "version", "live", "failed", "oldest", "nodes", "its code"), rows, right=numbers)


def _advice(use: VersionUse) -> str:
    if not use.removable:
        return "keep" if use.in_code is not False else "MISSING in these modules"
    if use.newest and use.in_code:
        return "the newest; no live instance"
    retries = f"; {counted(use.failed, 'failed instance')} could not be retried" if use.failed else ""
    return f"can be removed{retries}"


def _by_step(found: list[VersionUse]) -> Any:
    rows = [
        (
            one_line(use.machine),
            use.version,
            one_line(use.step),
            use.live,
            use.failed,
            "" if use.oldest is None else ago(use.oldest),
        )
        for each in found
        for use in each.steps
    ]
    return table(
        ("machine", "version", "step", "live", "failed", "oldest"), rows, right=("version", "live", "failed")
    )


@click.command(short_help="Check whether this code can run the live instances: a deploy gate.")
@click.argument("modules", nargs=-1, required=True, metavar="MODULE...")
@click.option(
    "--against",
    metavar="DSN",
    help="The database of the deployment. Without it only the code is checked.",
)
@click.option(
    "--sample",
    type=Whole(min=0, max=100_000),
    default=100,
    show_default=True,
    help="How many states of each step to try to read; 0 reads none.",
)
@config_option("schema")
@json_option
@click.pass_context
def check(
    ctx: click.Context,
    /,
    *,
    modules: tuple[str, ...],
    against: str | None,
    sample: int,
    schema: str,
    as_json: bool,
) -> None:
    """Check whether the code in MODULE... can run the live instances of a database. Changes nothing.

    Exit code 0: it can. 3: a live instance needs a version or a step that the code does not have, or has a state that
    the code cannot read. 1: it could not be checked. READS THE WHOLE TABLE.
    """
    import_modules(modules, verbose=bool(ctx.obj))
    specs = known_here()
    for spec in current_registry().specs.values():
        spec.codec.prepare()
    found: list[Finding] = [] if against is None else trio.run(_check, against, schema, specs, sample)
    if as_json:
        print_json(
            {
                "safe": not found,
                "machines": len(current_registry()),
                "findings": [attrs.asdict(each) for each in found],
            }
        )
    else:
        for each in found:
            click.echo(f"{each.kind}: {one_line(each.text, limit=1000)}")
        what = counted(len(current_registry()), "machine")
        if not found:
            only = "; nothing is compared with live instances, unless --against names their database"
            where = only if against is None else "; every live instance can go on"
            click.echo(f"{what} checked{where}")
    if found:
        sys.exit(UNSAFE)


async def _check(dsn: str, schema: str, specs: Specs, sample: int) -> list[Finding]:
    async with open_store(dsn, schema) as conn:
        uses = await read_step_uses(conn, schema)
        found = missing_code(uses, specs)
        for use in versions_of(uses, (), specs) if sample else ():
            spec = specs.get((use.machine, use.version))
            if spec is not None and use.live:
                states = await read_states(conn, schema, use.machine, use.version, limit=sample)
                found += unreadable_states(spec, states, use)
    return found
