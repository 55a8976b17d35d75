"""`durable-actors demo`: a real Postgres that nobody installed, and a write that survives kill -9."""

from __future__ import annotations

import random
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from typing import Final

import click
import trio
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from durable_actors._postgres.connection import PgConn
from durable_actors._postgres.embedded import EmbeddedServer, open_embedded
from durable_actors._postgres.statement import Statement
from durable_actors._store import migrate as migrating
from durable_actors._store.sql import in_schema
from durable_actors.cli.demo_worker import Worker
from durable_actors.errors import DurableError

SCHEMA: Final = "durable_demo"
STEPS: Final = 100

_INSERT: Final = """
insert into durable.gen_durable (fsm, step, state)
values ('demo', 'count', '{"step": 0}') returning id
"""
_READ: Final = "select (state->>'step')::int, visit, claim_id from durable.gen_durable where id = $1::bigint"
_VERSION: Final = Statement("version", "select current_setting('server_version')", read_only=True)

console = Console(highlight=False)


@click.command()
def demo() -> None:
    """Show durable work on the embedded Postgres: a worker is killed, nothing is lost."""
    started = time.monotonic()
    trio.run(_demo)
    console.print(f"\nDone in {time.monotonic() - started:.1f} s. The server stops by itself now.")


async def _demo() -> None:
    began = time.monotonic()
    with console.status(
        "starting the embedded Postgres (the first time: creating its data, too) ..."
    ) as busy:
        async with open_embedded() as server:
            busy.stop()
            await _show(server, began)


async def _show(server: EmbeddedServer, began: float) -> None:
    dsn = server.dsn()
    conn = await PgConn.open(dsn)
    try:
        [[version]] = (await conn.run(_VERSION)).rows
        took = time.monotonic() - began
        _tick(f"PostgreSQL {(version or b'').decode()} in {server.data_dir}, up after {took:.1f} s")
        await migrating.uninstall(dsn, schema=SCHEMA)  # left over from a demo that was interrupted
        found = await migrating.migrate(
            dsn, schema=SCHEMA, on_progress=lambda m: _tick(f"migration {m.version:04d}_{m.name}")
        )
        _tick(f"schema {found.schema} is at version {found.current}")
        [[identity]] = (await conn.run(Statement("demo_insert", in_schema(_INSERT, SCHEMA)))).rows
        await _kill_and_recover(conn, dsn, int(identity or 0))
        await migrating.uninstall(dsn, schema=SCHEMA)
    finally:
        conn.close()


async def _kill_and_recover(conn: PgConn, dsn: str, instance: int) -> None:
    """Let a process work, kill it in the middle, show what the database has, go on from there."""
    read = Statement("demo_read", in_schema(_READ, SCHEMA), read_only=True)
    die_at = random.randint(STEPS // 3, STEPS // 2)  # noqa: S311 - which moment, not a secret
    columns = (
        TextColumn("  {task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("steps committed"),
    )
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("worker 1", total=STEPS)
        claim, reported = await _run_until(
            dsn, instance, die_at, lambda step: progress.update(bar, completed=step)
        )
        [[step, visit, _]] = (await conn.run(read, [str(instance).encode()])).rows
        survived = int(step or 0)
        progress.console.print(
            f"[red]✗[/] kill -9: worker 1 had reported step {reported}; the database has step {survived}"
        )
        if survived < reported:
            raise DurableError(f"a committed step was lost: reported {reported}, found {survived}")
        progress.update(bar, description="worker 2", completed=survived)
        successor = Worker(conn, SCHEMA, instance)
        await successor.claim("demo-successor")
        ghost = Worker(conn, SCHEMA, instance)
        ghost.claim_id, ghost.visit, ghost.step = claim, int(visit or 0), survived
        if await ghost.commit():
            raise DurableError("a worker that had lost its claim could commit")
        progress.console.print(
            "[green]✓[/] worker 2 has the claim; a late write of worker 1 is refused by the fence"
        )
        while successor.step < STEPS:
            await trio.sleep(0.01)
            await successor.commit()
            progress.update(bar, completed=successor.step)
    [[step, visit, _]] = (await conn.run(read, [str(instance).encode()])).rows
    _tick(f"{int(step or 0)} steps, {int(visit or 0) - 1} commits: each exactly once, across a kill -9")


async def _run_until(
    dsn: str, instance: int, last: int, on_step: Callable[[int], object]
) -> tuple[uuid.UUID, int]:
    """Run the worker until it has reported step `last`, then kill -9 it; return its claim and last report."""
    command = [sys.executable, "-m", "durable_actors.cli.demo_worker", dsn, SCHEMA, str(instance), str(STEPS)]
    claim: uuid.UUID | None = None
    step = 0
    async with trio.open_nursery() as nursery:
        process = await nursery.start(_start, command)
        buffer = b""
        try:
            async for chunk in process.stdout:
                *lines, buffer = (buffer + chunk).split(b"\n")
                for line in lines:
                    if line.startswith(b"claim"):
                        claim = uuid.UUID(line.split()[1].decode())
                    else:
                        step = int(line)
                        on_step(step)
                if step >= last:
                    break
        finally:
            process.kill()
    if claim is None:
        raise DurableError("the demo's worker ended before it had a claim")
    return claim, step


async def _start(command: list[str], task_status: trio.TaskStatus[trio.Process]) -> None:
    await trio.run_process(command, stdout=subprocess.PIPE, check=False, task_status=task_status)


def _tick(text: str) -> None:
    console.print(f"[green]✓[/] {text}")
