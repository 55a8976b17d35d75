"""Helpers for all tests: waiting for a condition, and a connection of the test's own."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import attrs
import click
import psycopg
import trio
from durable_actors.cli import cli

T = TypeVar("T")

PATIENCE = 30.0
"""Seconds until a test gives up waiting; the machine may be slow."""


async def until(condition: Callable[[], T], *, timeout: float = PATIENCE, poll: float = 0.003) -> T:
    """Poll until the condition holds, and return its value. For state that has no event to wait for."""
    with trio.fail_after(timeout):
        while not (value := condition()):
            await trio.sleep(poll)
    return value


def wait_until(condition: Callable[[], T], what: str, *, timeout: float = PATIENCE) -> T:
    """`until` for tests without Trio: poll for what another process does."""
    deadline = time.monotonic() + timeout
    while not (value := condition()):
        assert time.monotonic() < deadline, f"never happened: {what}"
        time.sleep(0.02)
    return value


def verbs() -> dict[str, click.Command]:
    """Every command of the command line, imported."""
    context = click.Context(cli)
    found = {name: cli.get_command(context, name) for name in cli.list_commands(context)}
    return {name: command for name, command in found.items() if command is not None}


def open_files() -> int:
    """How many file descriptors this process has."""
    return sum(1 for _ in Path("/dev/fd").iterdir())


@attrs.frozen
class Session:
    """A connection of the test's own, in autocommit mode."""

    conn: psycopg.Connection[tuple[Any, ...]]

    def execute(self, query: str, *args: object) -> list[tuple]:
        cursor = self.conn.execute(query, list(args))  # type: ignore[call-overload]
        return cursor.fetchall() if cursor.description else []

    def value(self, query: str, *args: object) -> Any:
        """The first column of the first row."""
        return self.execute(query, *args)[0][0]

    async def eventually(self, query: str, *args: object, timeout: float = PATIENCE) -> None:
        """Wait until the query returns true. The server is another process: there is no event to wait for."""
        await until(lambda: self.value(query, *args), timeout=timeout)

    async def idle(self, pid: int) -> None:
        """Wait until the server runs nothing for that session: it is idle, or gone."""
        await self.eventually(
            "select not exists (select from pg_stat_activity where pid = %s and state <> 'idle')", pid
        )
