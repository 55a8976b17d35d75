"""Tree: runs a root supervisor, and turns cancellation from outside into an ordered stop.

Cancellation reaches all tasks below a scope at once, and a stop in reverse order would be impossible.
So the tree runs in a shielded scope, and a watcher outside it waits to be cancelled::

    nursery ── outer scope (cancellable)
    ├── watcher: sleeps; when cancelled, asks the root to stop; its Cancelled travels on
    └── shield
        └── root supervisor: stops in reverse order, for at most the root's `shutdown`
"""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import trio

from durable_actors.otp._child import Child
from durable_actors.otp._child_spec import Place
from durable_actors.otp._events import Observer, log_event
from durable_actors.otp._exit import Error, contains_cancelled, sole_error
from durable_actors.otp._snapshot import Node
from durable_actors.otp._supervisor import Supervisor


class Tree:
    """A running tree: what `run_tree` reports as started and `open_tree` yields."""

    def __init__(self, root: Supervisor, observe: Observer) -> None:
        self._fatal: list[BaseException] = []
        self._child = Child(
            root, Place(root.name, observe), on_exit=lambda _: None, on_fatal=self._fatal.append
        )
        self._stopped = trio.Event()

    def snapshot(self, *, tasks: int = 0) -> Node:
        """The tree as it is now; of each pool at most `tasks` tasks are listed."""
        return self._child.node(tasks=tasks)

    def request_stop(self, why: str = "asked to stop") -> None:
        """Begin the ordered stop; `wait_stopped` tells when it is done."""
        self._child.request_stop(why, restart=False)

    async def stop(self, why: str = "asked to stop") -> None:
        """Stop in reverse order and wait. If this raises Cancelled, the stop goes on."""
        self.request_stop(why)
        await self._stopped.wait()

    async def wait_stopped(self) -> None:
        """Wait until everything has ended, for whatever reason; errors leave through `run_tree`."""
        await self._stopped.wait()

    async def _live(self, task_status: trio.TaskStatus[Tree]) -> BaseException | None:
        """Run to the end. Returns what the tree failed with."""
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
    """Run a tree until it ends; ``tree = await nursery.start(run_tree, root)``.

    Started when the last child is ready. Ends when asked to stop, when it gives up (raises the
    `RestartLimitReached` or `StartFailed`, not wrapped), or by `auto_shutdown`.

    With `drain_on_cancel`, cancelling the surrounding scope stops the tree in reverse order, for at
    most the root's `shutdown` seconds, and then lets the cancellation pass. Without, all tasks are
    cancelled at once; actors still run `terminate`.
    """
    await trio.lowlevel.checkpoint()  # cancelled already: start nothing
    tree = Tree(root, observe)
    error: BaseException | None = None
    try:
        async with trio.open_nursery() as outer:
            if drain_on_cancel:
                outer.start_soon(tree._watch)  # noqa: SLF001 - same module
            with trio.CancelScope(shield=drain_on_cancel):
                error = await tree._live(task_status)  # noqa: SLF001 - same module
            if error is not None and trio.current_effective_deadline() == -math.inf:
                raise error  # with Cancelled on its way out, behind the nursery it would be too late
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
    """Run a tree around a block: started when the block begins, stopped in order when it ends.

    An error of the block leaves it as it is, after the stop. If the tree fails meanwhile, the block is
    cancelled and the tree's error is raised, as it is; if both fail, an ExceptionGroup of both.
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
        raise failure  # on its way to its scope, the block's error with it
    if body is not None and failure is not None:
        raise BaseExceptionGroup("the block failed, and so did the tree", [body, failure])
    if body is not None:
        raise body
    if failure is not None:
        raise failure


async def _stop_after(tree: Tree, body: BaseException | None) -> None:
    """Stop the tree; if cancelled meanwhile, raise the block's error, or it would be lost."""
    stopped = False
    try:
        await tree.stop("the block has ended" if body is None else "the block has failed")
        stopped = True
    finally:
        if not stopped and body is not None:
            raise body
