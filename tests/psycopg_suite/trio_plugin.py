"""pytest plugin for psycopg's checkout: TrioConnection in place of AsyncConnection, Trio in place of asyncio.

Loaded by `python -m tests.psycopg_suite` into a pytest that runs in psycopg's source tree, so it must not be
imported as a part of our `tests` package: psycopg's package has the same name.
"""

from __future__ import annotations

import importlib
import json
import math
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import psycopg
import pytest
import trio
from durable_actors._postgres.trio.connection import TrioConnection

_results: dict[str, str] = {}


class AsyncTrioConnection(TrioConnection[Any]):
    """psycopg's tests recognise an asynchronous connection by the word in its name."""


class Task:
    """What `spawn` returns, in the tests' vocabulary of asyncio."""

    def __init__(self) -> None:
        self.ended = trio.Event()
        self.value: Any = None
        self.error: BaseException | None = None
        self.scope = trio.CancelScope()

    async def run(self, function: Callable[..., Awaitable[Any]], args: tuple[Any, ...]) -> None:
        try:
            with self.scope:
                self.value = await function(*args)
        except BaseException as error:
            self.error = error
        finally:
            self.ended.set()

    def cancel(self) -> None:
        self.scope.cancel()

    def done(self) -> bool:
        return self.ended.is_set()


def spawn(function: Callable[..., Awaitable[Any]], args: tuple[Any, ...] | None = None) -> Task:
    task = Task()
    trio.lowlevel.spawn_system_task(task.run, function, tuple(args or ()))
    return task


async def gather(*tasks: Task, return_exceptions: bool = False, timeout: float = 10) -> list[Any]:
    answers = []
    with trio.fail_after(timeout):
        for task in tasks:
            await task.ended.wait()
            if task.error is not None and not return_exceptions:
                raise task.error
            answers.append(task.value if task.error is None else task.error)
    return answers


class AEvent:
    def __init__(self) -> None:
        self._event = trio.Event()

    def set(self) -> None:
        self._event.set()

    def is_set(self) -> bool:
        return self._event.is_set()

    def clear(self) -> None:
        self._event = trio.Event()

    async def wait(self) -> bool:
        await self._event.wait()
        return True

    async def wait_timeout(self, timeout: float) -> bool:
        with trio.move_on_after(timeout):
            return await self.wait()
        return False


class AQueue:
    def __init__(self, maxsize: int = 0) -> None:
        self._send, self._receive = trio.open_memory_channel[Any](maxsize or math.inf)

    async def put(self, item: object) -> None:
        await self._send.send(item)

    async def get(self) -> Any:
        return await self._receive.receive()


def pytest_configure(config: pytest.Config) -> None:
    if os.environ.get("PSYCOPG_SUITE_RUNNER") != "asyncio":
        psycopg.AsyncConnection = AsyncTrioConnection  # type: ignore[misc]


def pytest_collection(session: pytest.Session) -> None:
    if os.environ.get("PSYCOPG_SUITE_RUNNER") == "asyncio":
        return
    acompat: Any = importlib.import_module("tests.acompat")  # of psycopg's package, not of ours
    for ours in (spawn, gather, AEvent, AQueue):
        setattr(acompat, ours.__name__, ours)
    acompat.asleep = trio.sleep
    acompat.is_alive = lambda task: not task.done()


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup(fixturedef: Any, request: pytest.FixtureRequest) -> Any:
    if fixturedef.argname != "anyio_backend" or os.environ.get("PSYCOPG_SUITE_RUNNER") == "asyncio":
        return None
    backend = ("trio", {})
    fixturedef.cached_result = (backend, fixturedef.cache_key(request), None)
    return backend


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" or report.outcome != "passed":
        _results.setdefault(report.nodeid, report.outcome)
        if report.outcome == "failed":
            _results[report.nodeid] = "failed"


def pytest_sessionfinish() -> None:
    target = os.environ.get("PSYCOPG_SUITE_RESULTS")
    if target:
        Path(target).write_text(json.dumps(_results))
