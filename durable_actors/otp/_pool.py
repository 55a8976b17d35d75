"""Pool: temporary tasks in a limited number of slots.

A pool reuses its Trio tasks, called workers. Waking a parked worker costs one reschedule instead of a spawn,
and the worker keeps its cancel scope; together this saves about four fifths of the cost of a no-op task
(bench/otp.py). A worker is not reused if its scope was cancelled, or if a pool task left a scope, a nursery or
a lock open in it; the next start spawns a new worker. The function that runs in a worker cannot see the
difference: it gets a copy of the starter's context, as with `start_soon`, and a cancel scope of its own.

A busy pool avoids the reschedule as well. A task that `on_exit` starts runs at once in the worker of the task
that just ended, provided that task returned `ContextReset` (its context is unchanged and can be used again).
"""

from __future__ import annotations

import contextvars
import logging
import math
from collections.abc import Awaitable, Callable, Coroutine, Hashable
from functools import partial
from types import CoroutineType
from typing import Any, Final, TypeVarTuple, cast

import trio

from durable_actors._trio_inside import LOCKS, close_left, innermost, is_cancelled, keep_generators
from durable_actors.otp._errors import PoolClosed, PoolFull, SpecError
from durable_actors.otp._exit import NORMAL, Error, ExitReason, Normal, Shutdown
from durable_actors.otp._pool_task import ContextReset, PoolTask, PoolWorker
from durable_actors.otp._snapshot import Node, PoolStatistics, waits_for
from durable_actors.otp._watched import Watched

logger: Final = logging.getLogger("durable_actors.otp")

Ts = TypeVarTuple("Ts")

_MAX_IDLE_WORKERS = 1000
"""Parked workers to keep for reuse. A busy pool reuses them within microseconds; an idle one should not hold
10,000 tasks (about 3 kB each) forever. A group commit ends up to a thousand tasks at once: with a limit of 128, seven
of ten tasks of a queue with 500 slots were spawned anew, which took a fifth of the process's CPU. A parked worker
keeps the deadline of its last task, and ends when that deadline passes."""

_TIME_SLICE = 0.001
"""Seconds for which tasks that never wait may run one after another in a worker before it lets other tasks run."""


OnExit = Callable[[PoolTask, ExitReason], None]
"""Called in the ending task after its slot is free. It must not block. An exception that it raises fails the pool."""

OnWait = Callable[[PoolTask], None]
"""Called in the task when it first waits for something, if it ever does. It must not raise."""


class Pool:
    """Runs temporary tasks, up to `slots` at a time. A `PoolChild` puts it into a tree.

    Create the pool before its `PoolChild`; it stays valid across restarts. An exception that a task raises is
    passed to `on_exit` as an `Error`. Without an `on_exit` it fails the whole pool: all tasks are cancelled, and the
    supervisor decides what follows.
    """

    def __init__(
        self,
        name: str,
        *,
        slots: int,
        on_exit: OnExit | None = None,
        on_wait: OnWait | None = None,
        context: contextvars.Context | None = None,
    ) -> None:
        if slots < 1:
            raise SpecError(f"pool {name!r}: slots must be at least 1, not {slots!r}")
        self.name: str = name
        """The name of the pool in errors and in the tree."""
        self.slots: int = slots
        """The maximum number of running tasks."""
        self.context: contextvars.Context | None = context
        """Each task runs in a copy of this context; if None, in a copy of its starter's context."""
        self._on_exit = on_exit
        self._on_wait = on_wait
        self._nursery: trio.Nursery | None = None
        self._accepting = False
        self._ending = False  # asked to stop: no resume
        self._tasks: dict[Hashable, PoolTask] = {}
        self._idle: list[PoolWorker] = []
        self._freed_worker: PoolWorker | None = None  # its task is ending; it can run the next one
        self._waiters = trio.lowlevel.ParkingLot()  # wait_free, drain
        self._now = trio.current_time
        self._counts = {Normal: 0, Shutdown: 0, Error: 0}
        self._started = 0

    def __repr__(self) -> str:
        return f"<Pool {self.name!r} {len(self._tasks)}/{self.slots}>"

    def __len__(self) -> int:
        """The number of running tasks."""
        return len(self._tasks)

    @property
    def free(self) -> int:
        """The number of free slots; 0 while the pool accepts no tasks."""
        return self.slots - len(self._tasks) if self._accepting else 0

    @property
    def can_follow(self) -> bool:
        """Inside `on_exit`: whether a task started now runs at once in the worker of the ending task."""
        return self._freed_worker is not None

    def start_nowait(
        self,
        fn: Callable[[*Ts], Awaitable[object]],
        *args: *Ts,
        key: Hashable = None,
        deadline: float = math.inf,
    ) -> PoolTask:
        """Start ``fn(*args)`` in a free slot and return the task. It is cancelled at the `deadline` (Trio's clock).

        Raises `PoolFull` if no slot is free, `PoolClosed` if the pool does not accept tasks, and `SpecError` if a task
        with this `key` is running.
        """
        tasks = self._tasks
        if not self._accepting or self._nursery is None:
            raise PoolClosed(
                f"pool {self.name!r} does not accept tasks: it is not started, draining or stopped"
            )
        if len(tasks) >= self.slots:
            raise PoolFull(f"all {self.slots} slots of pool {self.name!r} are taken")
        job = PoolTask(fn, args, key, self._now())
        if job.key in tasks:
            raise SpecError(f"pool {self.name!r} already runs a task with the key {key!r}")
        worker = self._freed_worker
        if worker is not None:
            self._freed_worker = None
            worker.job = job
            if worker.scope.deadline != deadline:
                worker.scope.deadline = deadline
        elif self._idle:
            worker = self._idle.pop()
            worker.job = job
            worker.busy_since = job.since
            assert worker.task is not None
            # The deadline moves before Trio checks the old one again, so a worker that was parked for long is not
            # cancelled. Moving a deadline costs 2 µs in Trio, so an equal one is left alone.
            if worker.scope.deadline != deadline:
                worker.scope.deadline = deadline
            # The worker is parked, so the new context takes effect when it resumes.
            worker.task.context = contextvars.copy_context() if self.context is None else self.context.copy()
            trio.lowlevel.reschedule(worker.task)
        else:
            worker = PoolWorker(job, deadline)
            context = contextvars.copy_context() if self.context is None else self.context
            context.run(self._nursery.start_soon, self._work, worker)
        job._worker = worker  # noqa: SLF001 - its other half
        tasks[job.key] = job
        self._started += 1
        return job

    def get(self, key: Hashable) -> PoolTask | None:
        """Return the running task with this key, or None."""
        return self._tasks.get(key)

    async def wait_free(self) -> None:
        """Wait until a slot is free. The slot is not reserved: another task may take it first.

        Raises `PoolClosed` if the pool does not accept tasks.
        """
        await trio.lowlevel.checkpoint()
        while True:
            if not self._accepting:
                raise PoolClosed(
                    f"pool {self.name!r} does not accept tasks: it is not started, draining or stopped"
                )
            if len(self._tasks) < self.slots:
                return
            await self._waiters.park()

    async def drain(self, *, timeout: float = math.inf) -> None:
        """Stop accepting tasks, wait for running ones, and cancel them after `timeout` seconds.

        Returns when all tasks have ended. The pool accepts no tasks until `resume`. If this raises Cancelled, the
        pool is closed and tasks may still be running.
        """
        self._accepting = False
        self._waiters.unpark_all()
        await trio.lowlevel.checkpoint()
        with trio.move_on_after(timeout):
            await self._wait_empty()
        for job in list(self._tasks.values()):
            job.cancel("drain deadline")
        await self._wait_empty()

    def resume(self) -> None:
        """Accept tasks again after `drain`. Does nothing while the pool is being stopped."""
        self._accepting = self._nursery is not None and not self._ending

    def statistics(self) -> PoolStatistics:
        """Return the current load, and counts of the tasks so far by how they ended."""
        oldest = next(iter(self._tasks.values()), None)  # insertion order is start order
        return PoolStatistics(
            active=len(self._tasks),
            slots=self.slots,
            accepting=self._accepting,
            started=self._started,
            finished=self._counts[Normal],
            failed=self._counts[Error],
            cancelled=self._counts[Shutdown],
            oldest_age=0.0 if oldest is None else self._now() - oldest.since,
            waiting=len(self._waiters),
        )

    # -- the workers

    async def _wait_empty(self) -> None:
        while self._tasks:
            await self._waiters.park()

    async def _work(self, worker: PoolWorker) -> None:
        worker.task = trio.lowlevel.current_task()
        scope, idle = worker.scope, self._idle

        def on_cancel(_: object) -> trio.lowlevel.Abort:
            idle.remove(worker)
            return trio.lowlevel.Abort.SUCCEEDED

        with scope:
            home = innermost(worker.task)
            while (job := worker.job) is not None:
                if worker.busy_since is None:
                    worker.busy_since = job.since
                elif job.since - worker.busy_since > _TIME_SLICE:
                    worker.busy_since = job.since
                    await trio.lowlevel.cancel_shielded_checkpoint()
                await self._run(job, worker, home)
                if worker.job is not job:
                    continue  # `on_exit` started the next task in this worker
                worker.job = None
                # A cancelled scope, or one whose deadline has passed, would cancel the next task.
                if (
                    worker.spent
                    or scope.cancel_called
                    or not self._accepting
                    or len(idle) >= _MAX_IDLE_WORKERS
                ):
                    return
                idle.append(worker)
                await trio.lowlevel.wait_task_rescheduled(on_cancel)

    async def _run(self, job: PoolTask, worker: PoolWorker, home: object) -> None:
        reason: ExitReason | None = None
        value: object = None
        task = cast("Any", worker.task)
        try:
            try:
                value = await (job._fn(*job._args) if self._on_wait is None else self._watched(job))  # noqa: SLF001
            finally:
                # Private attributes, read here for speed: see `_trio_inside`.
                if task._cancel_status is not home or task._child_nurseries or (LOCKS and task in LOCKS):  # noqa: SLF001
                    worker.spent = True
                    await self._close_left(job, home)
            reason = NORMAL
        except BaseException as exc:
            reason, propagated = self._exit_of(job, exc)
            if propagated is exc:
                raise
            if propagated is not None:
                raise propagated from None
        finally:
            # reason is None while Cancelled propagates: from `cancel`, the deadline, or the end of the pool.
            if value is ContextReset and self._accepting and not (worker.spent or worker.scope.cancel_called):
                self._freed_worker = worker
            try:
                self._finish(job, Shutdown(job._why or "cancelled") if reason is None else reason)  # noqa: SLF001
            finally:
                self._freed_worker = None

    def _exit_of(self, job: PoolTask, error: BaseException) -> tuple[Error | None, BaseException | None]:
        """Return the exit reason (None if it was cancelled), and the exception that propagates and fails the pool."""
        handled = self._on_exit is not None
        if isinstance(error, Exception):
            self._accepting = self._accepting and handled  # without `on_exit` the pool fails
            return Error(error), None if handled else error
        inside, rest = _split(error)
        if inside is not None and not is_cancelled() and (rest is None or isinstance(rest, Exception)):
            # It comes from a scope that was left open, or was stored and raised later: no scope here catches it.
            self._accepting = self._accepting and handled
            stray = RuntimeError(f"{job!r} raised Cancelled, but it was not cancelled")
            stray.__cause__ = error
            return Error(stray), None if handled else stray
        # Cancelled and another error, from a nursery in the task: the scope catches only Cancelled.
        reason = None if rest is None else Error(rest)
        return reason, inside if inside is not None and handled and isinstance(rest, Exception) else error

    async def _close_left(self, job: PoolTask, home: object) -> None:
        """Close what the task left open: it would affect the pool and the next task in this worker."""
        for what in await close_left(home):
            logger.warning("pool %r: %r left %s open; closed it", self.name, job, what)

    def _watched(self, job: PoolTask) -> Awaitable[object]:
        found = job._fn(*job._args)  # noqa: SLF001 - its other half
        coro = (
            cast("Coroutine[Any, Any, object]", found)
            if isinstance(found, CoroutineType)
            else _as_coroutine(found)
        )
        return Watched(coro, partial(self._on_first_wait, job))

    def _on_first_wait(self, job: PoolTask) -> None:
        assert job._worker is not None  # noqa: SLF001 - its other half
        job._worker.busy_since = None  # noqa: SLF001
        if self._on_wait is not None:
            self._on_wait(job)

    def _finish(self, job: PoolTask, reason: ExitReason) -> None:
        del self._tasks[job.key]
        job._worker = None  # noqa: SLF001 - its other half
        self._counts[type(reason)] += 1
        if self._waiters:
            # Wake all, not one: a woken waiter may not use the slot and would have to wake the next.
            self._waiters.unpark_all()
        if self._on_exit is not None:
            self._on_exit(job, reason)

    # -- the incarnation's side

    def _check_closed(self) -> None:
        if self._nursery is not None:
            raise SpecError(f"pool {self.name!r} is already running; one PoolChild per pool")

    def _open(self, nursery: trio.Nursery) -> None:
        keep_generators()
        self._nursery = nursery
        self._now = trio.lowlevel.current_clock().current_time
        self._accepting = True
        self._ending = False
        self._waiters.unpark_all()

    def _shut(self) -> None:
        """Stop accepting tasks and end idle workers. Busy workers end after their task."""
        self._accepting = False
        self._ending = True
        self._waiters.unpark_all()
        while self._idle:
            task = self._idle.pop().task
            assert task is not None
            trio.lowlevel.reschedule(task)

    def _closed(self) -> None:
        self._accepting = False
        self._nursery = None
        self._waiters.unpark_all()

    def _nodes(self, limit: int) -> tuple[Node, ...]:
        now = self._now()
        nodes: list[Node] = []
        for job in self._tasks.values():
            if len(nodes) >= limit:
                break
            worker = job._worker  # noqa: SLF001 - its other half
            nodes.append(
                Node(
                    name=repr(job) if job.key is job else str(job.key),
                    kind="pool task",
                    state="running",
                    since=now - job.since,
                    waits_for=None if worker is None else waits_for(worker.task),
                )
            )
        return tuple(nodes)


def _split(error: BaseException) -> tuple[BaseException | None, BaseException | None]:
    """Split an error into its Cancelled part and the rest."""
    if isinstance(error, BaseExceptionGroup):
        return cast("BaseExceptionGroup[BaseException]", error).split(trio.Cancelled)
    return (error, None) if isinstance(error, trio.Cancelled) else (None, error)


async def _as_coroutine(found: Awaitable[object]) -> object:
    """Turn any awaitable into a coroutine."""
    return await found
