"""`conn.pipeline()` on Trio. If it is interrupted while it talks to the server, the connection is closed."""
# ruff: noqa: SLF001 - psycopg's internals, all listed in hooks

from __future__ import annotations

from types import TracebackType
from typing import Any

import trio
from psycopg import AsyncPipeline
from psycopg.pq import ConnStatus
from trio.lowlevel import checkpoint_if_cancelled

from durable_actors._postgres.trio.wait import TrioWaiter, is_cancelled


class TrioPipeline(AsyncPipeline):
    """A connection in pipeline mode. Made by `TrioConnection.pipeline()`."""

    _conn: TrioWaiter[Any]  # pyright: ignore[reportIncompatibleVariableOverride]

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc_val: BaseException | None,
        exc_tb: TracebackType | None,
    ) -> None:
        try:
            if not is_cancelled():
                await super().__aexit__(exc_type, exc_val, exc_tb)
            elif exc_val is not None:
                await self._unwind(exc_val)
            else:
                try:
                    await checkpoint_if_cancelled()
                except trio.Cancelled as cancelled:
                    await self._unwind(cancelled)
                    raise
        finally:
            if self.level == 0:
                self._conn._pipeline = None

    async def _unwind(self, exc: BaseException) -> None:
        """Leave the pipeline in a cancelled scope. psycopg logs an error of this, because `exc` is being raised."""
        if self.pgconn.status != ConnStatus.OK:
            self._exit(exc)  # closed when it was interrupted: there is nothing to synchronise
            return
        async with self._conn.stopping() if self.result_queue else self._conn.unwinding():
            await super().__aexit__(type(exc), exc, None)
