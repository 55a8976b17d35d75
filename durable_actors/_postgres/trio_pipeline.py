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
            if not is_cancelled():
                await super().__aexit__(exc_type, exc_val, exc_tb)
                return
            if self.pgconn.status == ConnStatus.OK:
                async with self._conn.unwinding():
                    if self.result_queue:
                        await self._conn._try_cancel()  # a statement of the block may run for long
                    await super().__aexit__(exc_type, exc_val, exc_tb)
            else:
                self._exit(exc_val)  # closed when it was interrupted: nothing to synchronise
            if exc_val is None:
                await checkpoint_if_cancelled()
        finally:
            if self.level == 0 and self._conn._pipeline is self:
                self._conn._pipeline = None
