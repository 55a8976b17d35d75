"""Whole engines: opened with quick settings, watched through their own events."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import durable_actors as da
import trio
from durable_actors.telemetry import Event, StepCommitted, StepStarted

E = TypeVar("E")

PATIENCE = 30.0
"""Seconds until a test gives up waiting; the machine may be slow."""
QUICK: dict[str, Any] = {"poll_interval": 0.05, "max_poll_interval": 0.05, "node": "test"}
"""Polls often. The leases are long unless a test says otherwise."""
QUIET: dict[str, Any] = {"poll_interval": 60, "max_poll_interval": 60, "long_poll": 0, "node": "test"}
"""Polls never, as far as a test can tell: only hints and due times start anything."""


class Recorder:
    """Remembers every event of an engine, and waits for them."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._changed = trio.Event()

    def __call__(self, event: Event) -> None:
        self.events.append(event)
        self._changed.set()
        self._changed = trio.Event()

    def all(self, kind: type[E], **fields: object) -> list[E]:
        """Those that happened already."""
        return [
            event
            for event in self.events
            if isinstance(event, kind)
            and all(getattr(event, name) == value for name, value in fields.items())
        ]

    async def wait(self, kind: type[E], *, count: int = 1, **fields: object) -> E:
        """Until the `count`-th of these has happened, now or before; return it."""
        with trio.fail_after(PATIENCE):
            while True:
                changed = self._changed
                found = self.all(kind, **fields)
                if len(found) >= count:
                    return found[count - 1]
                await changed.wait()

    def started(self, number: int | None = None) -> list[StepStarted]:
        return self.all(StepStarted) if number is None else self.all(StepStarted, id=number)

    async def final(self, number: int) -> str:
        """Until an instance has ended here; its status."""
        with trio.fail_after(PATIENCE):
            while True:
                changed = self._changed
                for event in self.all(StepCommitted, id=number):
                    if event.status in {"done", "failed"}:
                        return event.status
                await changed.wait()


class Run:
    """An open engine and what it tells."""

    def __init__(self, engine: da.Engine, events: Recorder) -> None:
        self.engine = engine
        self.events = events

    async def insert(self, machine: Any, **options: Any) -> int:
        number = await self.engine.client.insert(machine, **options)
        assert number is not None
        return number

    async def insert_anyway(self, machine: Any, **options: Any) -> int:
        """Insert, however often the store has to be asked."""
        with trio.fail_after(PATIENCE):
            while True:
                try:
                    return await self.insert(machine, **options)
                except da.StoreUnavailable:
                    await trio.sleep(0.01)

    async def run(self, machine: Any, **options: Any) -> da.Instance:
        """Insert one and wait for its end, whatever it is."""
        return await self.ended(await self.insert(machine, **options))

    async def ended(self, number: int) -> da.Instance:
        with contextlib.suppress(da.InstanceFailed):
            await self.engine.client.result(number, timeout=PATIENCE)
        return await self.engine.client.inspect(number)


@asynccontextmanager
async def running(dsn: str, **options: Any) -> AsyncIterator[Run]:
    """An engine with quick settings; options replace them."""
    events = Recorder()
    async with da.open_engine(**{"dsn": dsn, "observers": [events], **QUICK, **options}) as engine:
        yield Run(engine, events)


class Gate:
    """Holds steps at a point, in tasks and in threads; tells how many have come."""

    def __init__(self) -> None:
        self.entered = 0
        self._event = trio.Event()
        self._open = trio.Event()
        self._thread_open = threading.Event()

    def arrive(self) -> None:
        self.entered += 1
        self._event.set()
        self._event = trio.Event()

    async def wait(self) -> None:
        """Come, and wait until it is opened."""
        self.arrive()
        await self._open.wait()

    def wait_in_thread(self, timeout: float = PATIENCE) -> None:
        trio.from_thread.run_sync(self.arrive)
        assert self._thread_open.wait(timeout)

    async def wait_entered(self, count: int = 1) -> None:
        with trio.fail_after(PATIENCE):
            while self.entered < count:
                await self._event.wait()

    def open(self) -> None:
        self._open.set()
        self._thread_open.set()


async def until(condition: Callable[[], object]) -> None:
    """Until it holds; for what the server does, which has no event for us."""
    with trio.fail_after(PATIENCE):
        while not condition():
            await trio.sleep(0.005)
