"""A Trio loop in a thread of its own, for tests that Hypothesis drives synchronously."""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager
from typing import Any, TypeVar

import trio
from durable_actors._postgres.driver.connection import PgConn
from tests.store.kit import ROLES

T = TypeVar("T")


class Portal:
    """Calls store functions on one connection."""

    def __init__(self, token: trio.lowlevel.TrioToken, conn: PgConn) -> None:
        self._token = token
        self.conn = conn

    def call(self, function: Callable[..., Awaitable[T]], *args: Any, **options: Any) -> T:
        """Run `function(conn, *args, **options)` to its end."""

        async def run() -> T:
            return await function(self.conn, *args, **options)

        return trio.from_thread.run(run, trio_token=self._token)


@contextmanager
def open_portal(dsn: str) -> Generator[Portal]:
    """A portal with a connection as the engine's claim lane has it."""
    ready = threading.Event()
    made: list[Portal] = []
    over: list[trio.Event] = []

    async def main() -> None:
        conn = await PgConn.open(dsn, settings=ROLES["claim"].settings)
        try:
            over.append(trio.Event())
            made.append(Portal(trio.lowlevel.current_trio_token(), conn))
            ready.set()
            await over[0].wait()
        finally:
            conn.close()

    thread = threading.Thread(target=trio.run, args=(main,))
    thread.start()
    assert ready.wait(30)
    try:
        yield made[0]
    finally:
        trio.from_thread.run_sync(over[0].set, trio_token=made[0]._token)
        thread.join()
