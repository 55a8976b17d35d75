"""`conn.pipeline()` on Trio. Interrupted in the middle of talking, a pipeline closes the connection."""
# ruff: noqa: SLF001 - psycopg's internals, each named in trio_hooks

from __future__ import annotations

from types import TracebackType
from typing import Any, Self

from psycopg import AsyncPipeline
from psycopg.pq import ConnStatus
from trio.lowlevel import checkpoint_if_cancelled

from durable_actors._postgres.trio_wait import TrioWaiter, is_cancelled


class TrioPipeline(AsyncPipeline):
    """A connection in pipeline mode. Made by `TrioConnection.pipeline()`."""

    _conn: TrioWaiter[Any]  # pyright: ignore[reportIncompatibleVariableOverride]

    async def __aenter__(self) -> Self:
        async with self._lock:
            await self._conn.wait(self._enter_gen())
            # Another task may have left the outermost block, and forgotten the pipeline, while we waited.
            self._conn._pipeline = self
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc_val: BaseException | None,
        exc_tb: TracebackType | None,
    ) -> None:
        try:
            if self.pgconn.status != ConnStatus.OK:
                # Nothing to synchronise. A block that ended well must not look as if its statements had run.
                self._drop_queues()
                self._exit(exc_val)
                if exc_val is None:
                    self._conn._check_connection_ok()
            elif is_cancelled():
                with self._conn.unwinding():
                    await super().__aexit__(exc_type, exc_val, exc_tb)
                if exc_val is None:
                    await checkpoint_if_cancelled()
            else:
                await super().__aexit__(exc_type, exc_val, exc_tb)
        finally:
            if self.level == 0 and self._conn._pipeline is self:
                self._conn._pipeline = None

    def _drop_queues(self) -> None:
        self.command_queue.clear()
        self.result_queue.clear()
