"""The command group `pg`: manage the embedded Postgres.

The server starts and stops automatically; these commands inspect it, stop it, and delete its data.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import attrs
import click

from durable_actors._postgres.embedded import server as embedded
from durable_actors.errors import ConfigError

_data_option = click.option(
    "--data",
    "data_dir",
    type=click.Path(file_okay=False, path_type=Path),
    help="The data directory. Default: $DURABLE_DATA, else a directory in the user's data directory.",
)


@click.group()
def pg() -> None:
    """Manage the embedded Postgres."""


@pg.command()
@_data_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def status(data_dir: Path | None, as_json: bool) -> None:
    """Show whether the server is running, its data directory, and the processes that use it."""
    found = embedded.status(data_dir)
    if as_json:
        values = attrs.asdict(found)
        click.echo(json.dumps({name: str(v) if isinstance(v, Path) else v for name, v in values.items()}))
        return
    lines = {
        "status": found.phase,
        "data": f"{found.data_dir}{'' if found.exists else ' (does not exist yet)'}",
        "postgres": f"{found.version}" if found.version is not None else "",
        "process": f"{found.postmaster}, supervised by {found.supervisor}"
        if found.postmaster is not None
        else "",
        "used by": ", ".join(map(str, found.clients)),
        "dsn": found.dsn or "",
        "log": str(found.log) if found.log.exists() else "",
    }
    for name, value in lines.items():
        if value:
            click.echo(f"{name:<9} {value}")


@pg.command()
@_data_option
@click.option(
    "--force", is_flag=True, help="Stop the server even while processes use it; they may start it again."
)
@click.option("--quiet", is_flag=True, help="Print nothing on success.")
def stop(data_dir: Path | None, force: bool, quiet: bool) -> None:
    """Stop the server now, not a second after the last process that uses it has ended."""
    stopped = embedded.stop(data_dir, force=force)
    if not quiet:
        click.echo("stopped" if stopped else "not running")


@pg.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@_data_option
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def psql(data_dir: Path | None, arguments: tuple[str, ...]) -> None:
    """Open psql on the server. ARGUMENTS are passed to psql, for example: -c 'select 1'."""
    with embedded.start(data_dir) as server:
        program = shutil.which("psql", path=f"{server.bin_dir}{os.pathsep}{os.environ.get('PATH', '')}")
        if program is None:
            raise ConfigError(
                "psql was found neither in the embedded binaries nor on this system. Install it (Debian: "
                f"postgresql-client, macOS: libpq), or use another client while your process runs: {server.dsn()}"
            )
        server.lend_to_exec()
        os.execv(program, [program, "--dbname", server.dsn(), *arguments])  # noqa: S606 - that is the command


@pg.command()
@_data_option
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
def reset(data_dir: Path | None, yes: bool) -> None:
    """Delete all data of the server. This cannot be undone."""
    found = embedded.status(data_dir)
    if not found.exists:
        click.echo(f"nothing to delete in {found.data_dir}")
        return
    if not yes:
        click.confirm(f"Delete the database in {found.data_dir} and everything in it?", abort=True)
    embedded.reset(data_dir)
    click.echo(f"deleted {found.data_dir}")
