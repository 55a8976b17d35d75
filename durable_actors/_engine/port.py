"""The engine's side of `Context`: what a step may do to other instances while it runs."""

# ruff: noqa: ARG002 - the protocol's parameters

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from durable_actors.client import find_client
from durable_actors.errors import DurableError
from durable_actors.machine import ChildView, Context, InsertOptions, MachineRef, Signal


class EnginePort:
    """One object per engine, shared by all contexts."""

    async def insert(self, ctx: Context[Any], machine: MachineRef, options: InsertOptions, /) -> int | None:
        """Insert an instance; committed at once, not with the step's outcome."""
        return await find_client().insert(machine, **options)

    async def signal(
        self, ctx: Context[Any], target: int | str, name: str, payload: object, dedup_key: str | None, /
    ) -> None:
        """Send a signal."""
        raise DurableError(_later("ctx.signal()"))

    async def start_child(
        self, ctx: Context[Any], machine: MachineRef, key: str, options: InsertOptions, /
    ) -> int:
        """Start a child."""
        raise DurableError(_later("ctx.start_child()"))

    def iter_signals(self, ctx: Context[Any], /) -> AsyncIterator[Signal]:
        """The whole inbox."""
        raise DurableError(_later("ctx.iter_signals()"))

    def iter_children(self, ctx: Context[Any], /) -> AsyncIterator[ChildView]:
        """All children."""
        raise DurableError(_later("ctx.iter_children()"))


def _later(what: str) -> str:
    return f"{what} is not available yet"
