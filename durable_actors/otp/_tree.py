"""Tree: runs a root supervisor, and turns cancellation from outside into an ordered stop.

Cancelling a scope cancels all tasks below it at once, which rules out a stop in reverse order. So the tree
runs in a shielded scope, and a watcher task outside the shield waits for the cancellation::

    nursery ── outer scope (cancellable)
    ├── watcher: sleeps; when cancelled, asks the root to stop; its Cancelled propagates
    └── shield
        └── root supervisor: stops in reverse order, for at most the root's `shutdown`
"""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import trio

from durable_actors.otp._child import ChildRecord
from durable_actors.otp._child_spec import Place
from durable_actors.otp._events import Observer, log_event
from durable_actors.otp._exit import Error, contains_cancelled, sole_error
from durable_actors.otp._snapshot import Node
from durable_actors.otp._supervisor import Supervisor


class Tree:
    """A running tree: the value of `task_status.started` in `run_tree`, and what `open_tree` yields."""

    def __init__(self, root: Supervisor, observe: Observer) -> None:
        self._fatal: list[BaseException] = []
        self._child = ChildRecord(
            root, Place(root.name, observe), on_exit=lambda _: None, on_fatal=self._fatal.append
        )
        self._stopped = trio.Event()

    def snapshot(self, *, tasks: int = 0) -> Node:
        """Return the current tree. At most `tasks` tasks of each pool are listed."""
        return self._child.node(tasks=tasks)

    def request_stop(self, why: str = "asked to stop") -> None:
        """Begin the ordered stop without waiting; `wait_stopped` waits for its end."""
        self._child.request_stop(why, restart=False)

    async def stop(self, why: str = "asked to stop") -> None:
        """Stop the children in reverse order and wait until they have ended.

        If this raises Cancelled, the stop continues.
        """
        self.request_stop(why)
        await self._stopped.wait()

    async def wait_stopped(self) -> None:
        """Wait until the tree has ended for any reason. Its errors are raised by `run_tree`, not here."""
        await self._stopped.wait()

    async def _live(self, task_status: trio.TaskStatus[Tree]) -> BaseException | None:
        """Run until the tree ends. Return its error, if it failed."""
        async with trio.open_nursery() as nursery:
            if await self._child.start(nursery):
                task_status.started(self)
            await self._child.wait_ended()
        if self._fatal:
            return self._fatal[0]
        return self._child.reason.error if isinstance(self._child.reason, Error) else None

    async def _watch(self) -> None:
        try:
            await trio.sleep_forever()
        finally:
            self.request_stop("cancelled from outside")


async def run_tree(
    root: Supervisor,
    *,
    drain_on_cancel: bool = True,
    observe: Observer = log_event,
    task_status: trio.TaskStatus[Tree] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Run a tree until it ends: ``tree = await nursery.start(run_tree, root)``.

    The tree counts as started when its last child is ready. It ends on a request to stop, by
    `auto_shutdown`, or with an error: `StartFailed`, `RestartLimitReached` or `StopFailed`, not wrapped in a group.

    With `drain_on_cancel`, cancelling the surrounding scope stops the tree in reverse order, within the
    root's `shutdown` seconds, and Cancelled is raised after the stop. Without it, all tasks are cancelled at
    once; actors still run `terminate`.
    """
    await trio.lowlevel.checkpoint()  # if already cancelled, start nothing
    tree = Tree(root, observe)
    error: BaseException | None = None
    try:
        async with trio.open_nursery() as outer:
            if drain_on_cancel:
                outer.start_soon(tree._watch)  # noqa: SLF001 - same module
            with trio.CancelScope(shield=drain_on_cancel):
                error = await tree._live(task_status)  # noqa: SLF001 - same module
            if error is not None and trio.current_effective_deadline() == -math.inf:
                raise error  # Cancelled leaves the nursery; after it this error would be lost
            outer.cancel_scope.cancel()
    finally:
        root.close()
        tree._stopped.set()  # noqa: SLF001 - same module
    if error is not None:
        raise error


@asynccontextmanager
async def open_tree(
    root: Supervisor, *, drain_on_cancel: bool = True, observe: Observer = log_event
) -> AsyncGenerator[Tree, None]:
    """Run a tree while a block runs: start it before the block, stop it in reverse order after the block.

    An exception of the block is raised unchanged, after the stop. If the tree fails, the block is cancelled
    and the tree's error is raised unchanged. If both fail, an ExceptionGroup of both is raised.
    """
    body: BaseException | None = None
    failure: BaseException | None = None

    async def run(*, task_status: trio.TaskStatus[Tree]) -> None:
        await run_tree(root, drain_on_cancel=drain_on_cancel, observe=observe, task_status=task_status)

    try:
        async with trio.open_nursery() as nursery:
            tree: Tree = await nursery.start(run)
            try:
                yield tree
            except BaseException as exc:
                if contains_cancelled(exc):
                    raise
                body = exc
            await _stop_after(tree, body)
    except BaseExceptionGroup as group:
        failure = sole_error(group)
    if failure is not None and contains_cancelled(failure):
        raise failure  # Cancelled propagates to its scope, together with the block's error
    if body is not None and failure is not None:
        raise BaseExceptionGroup("both the block and the tree failed", [body, failure])
    if body is not None:
        raise body
    if failure is not None:
        raise failure


async def _stop_after(tree: Tree, body: BaseException | None) -> None:
    """Stop the tree. If this is cancelled, raise the block's error, which would be lost otherwise."""
    stopped = False
    try:
        await tree.stop("the block ended" if body is None else "the block failed")
        stopped = True
    finally:
        if not stopped and body is not None:
            raise body
