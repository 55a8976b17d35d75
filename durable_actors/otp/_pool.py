"""Pool: temporary tasks in a limited number of slots.

Worker tasks are reused. A parked worker costs one reschedule where a new task costs a spawn, and it
keeps its cancel scope where a new one costs a scope: together about four fifths of a no-op task
(bench/otp.py). A worker whose scope was cancelled, or in which a task has left a scope, a nursery or a
lock open, is spent and leaves; the next start makes a new one. To the function that runs in it nothing
shows: it gets a copy of its starter's context, as from `start_soon`, and its scope is nobody else's while
it runs.

A busy pool does without the reschedule, too: what `on_exit` starts for the slot that has just become
free runs on in the same worker, at once, if the task that ended has returned `ContextReset`: it has given its
worker a context of which nobody has changed anything.
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
from durable_actors.otp._pool_task import ContextReset, PoolTask, Worker
from durable_actors.otp._snapshot import Node, PoolStatistics, waits_for
from durable_actors.otp._watched import Watched

logger: Final = logging.getLogger("durable_actors.otp")

Ts = TypeVarTuple("Ts")

# Parked workers kept for reuse; a busy pool reuses them within microseconds, and an idle one should
# not hold 10,000 tasks (some 3 kB each) for ever. A group commit ends up to a thousand tasks at once: with 128,
# seven of ten tasks of a queue with 500 slots were spawned anew, a fifth of the worker's CPU. One that had a
# deadline keeps it while it is parked, and goes when that has passed.
_SPARE = 1000

_SLICE = 0.001
"""Seconds for which tasks that wait for nothing may follow each other in one worker before others run."""


OnExit = Callable[[PoolTask, ExitReason], None]
"""Called in the task itself, after its slot is free; must not block. What it raises fails the pool."""

OnWait = Callable[[PoolTask], None]
"""Called in the task itself, when it first waits for something; one that never does is never told. Must not raise."""


class Pool:
    """Up to `slots` tasks at a time; made before its `PoolChild`, and valid across restarts of it.

    An exception that escapes from a task goes to `on_exit` as Error. Without an `on_exit` it fails
    the whole pool (all tasks are cancelled, the supervisor decides): it is never swallowed.
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
        """Its name in errors and the tree."""
        self.slots: int = slots
        """How many tasks may run at a time."""
        self.context: contextvars.Context | None = context
        """What each task gets a copy of; None: of its starter's."""
        self._on_exit = on_exit
        self._on_wait = on_wait
        self._nursery: trio.Nursery | None = None
        self._accepting = False
        self._ending = False  # asked to stop: no resume
        self._tasks: dict[Hashable, PoolTask] = {}
        self._idle: list[Worker] = []
        self._here: Worker | None = None  # ends a task right now, and would take the next one
        self._lot = trio.lowlevel.ParkingLot()  # wait_free, drain
        self._now = trio.current_time
        self._counts = {Normal: 0, Shutdown: 0, Error: 0}
        self._started = 0

    def __repr__(self) -> str:
        return f"<Pool {self.name!r} {len(self._tasks)}/{self.slots}>"

    def __len__(self) -> int:
        """Tasks that run."""
        return len(self._tasks)

    @property
    def free(self) -> int:
        """Slots that `start_nowait` would find free now; 0 while the pool takes nothing."""
        return self.slots - len(self._tasks) if self._accepting else 0

    @property
    def can_follow(self) -> bool:
        """Asked in `on_exit`: what is started now follows in the worker of the task that has just ended."""
        return self._here is not None

    def start_nowait(
        self,
        fn: Callable[[*Ts], Awaitable[object]],
        *args: *Ts,
        key: Hashable = None,
        deadline: float = math.inf,
    ) -> PoolTask:
        """Start ``fn(*args)`` in a slot, cancelled at the `deadline`.

        `PoolFull`: none is free; `PoolClosed`: nothing is taken now.
        """
        tasks = self._tasks
        if not self._accepting or self._nursery is None:
            raise PoolClosed(f"pool {self.name!r} takes no tasks now")
        if len(tasks) >= self.slots:
            raise PoolFull(f"all {self.slots} slots of pool {self.name!r} are taken")
        job = PoolTask(fn, args, key, self._now())
        if job.key in tasks:
            raise SpecError(f"pool {self.name!r} already runs a task with the key {key!r}")
        worker = self._here
        if worker is not None:
            self._here = None
            worker.job = job
            if worker.scope.deadline != deadline:
                worker.scope.deadline = deadline
        elif self._idle:
            worker = self._idle.pop()
            worker.job = job
            worker.busy_since = job.since
            assert worker.task is not None
            # Moved before Trio looks at the old one again, so a worker that was parked for long is not hit.
            # To move a deadline costs 2 µs in Trio, so an equal one is left alone.
            if worker.scope.deadline != deadline:
                worker.scope.deadline = deadline
            # It is parked: takes effect when it resumes.
            worker.task.context = contextvars.copy_context() if self.context is None else self.context.copy()
            trio.lowlevel.reschedule(worker.task)
        else:
            worker = Worker(job, deadline)
            context = contextvars.copy_context() if self.context is None else self.context
            context.run(self._nursery.start_soon, self._work, worker)
        job._worker = worker  # noqa: SLF001 - its other half
        tasks[job.key] = job
        self._started += 1
        return job

    def get(self, key: Hashable) -> PoolTask | None:
        """The running task with this key."""
        return self._tasks.get(key)

    async def wait_free(self) -> None:
        """Wait until a slot is free. Reserves nothing: try again if another task was faster."""
        await trio.lowlevel.checkpoint()
        while True:
            if not self._accepting:
                raise PoolClosed(f"pool {self.name!r} takes no tasks now")
            if len(self._tasks) < self.slots:
                return
            await self._lot.park()

    async def drain(self, *, timeout: float = math.inf) -> None:
        """Take nothing new, wait for what runs, cancel it after `timeout`; returns when all have exited.

        The pool stays closed until `resume`. If this raises Cancelled, it is closed and tasks may run.
        """
        self._accepting = False
        self._lot.unpark_all()
        await trio.lowlevel.checkpoint()
        with trio.move_on_after(timeout):
            await self._wait_empty()
        for job in list(self._tasks.values()):
            job.cancel("drain deadline")
        await self._wait_empty()

    def resume(self) -> None:
        """Take tasks again after a `drain`. Does nothing while the pool is being stopped."""
        self._accepting = self._nursery is not None and not self._ending

    def statistics(self) -> PoolStatistics:
        """Slots taken, and what became of the tasks so far."""
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
            waiting=len(self._lot),
        )

    # -- the workers

    async def _wait_empty(self) -> None:
        while self._tasks:
            await self._lot.park()

    async def _work(self, worker: Worker) -> None:
        worker.task = trio.lowlevel.current_task()
        scope, idle = worker.scope, self._idle

        def leave(_: object) -> trio.lowlevel.Abort:
            idle.remove(worker)
            return trio.lowlevel.Abort.SUCCEEDED

        with scope:
            home = innermost(worker.task)
            while (job := worker.job) is not None:
                if worker.busy_since is None:
                    worker.busy_since = job.since
                elif job.since - worker.busy_since > _SLICE:
                    worker.busy_since = job.since
                    await trio.lowlevel.cancel_shielded_checkpoint()
                await self._run(job, worker, home)
                if worker.job is not job:
                    continue  # `on_exit` has started another one here
                worker.job = None
                # A scope that was cancelled, or whose deadline has passed, would hit the next task.
                if worker.spent or scope.cancel_called or not self._accepting or len(idle) >= _SPARE:
                    return
                idle.append(worker)
                await trio.lowlevel.wait_task_rescheduled(leave)

    async def _run(self, job: PoolTask, worker: Worker, home: object) -> None:
        reason: ExitReason | None = None
        value: object = None
        task = cast("Any", worker.task)
        try:
            try:
                value = await (job._fn(*job._args) if self._on_wait is None else self._watched(job))  # noqa: SLF001
            finally:
                # Read in place: see `_trio_inside`.
                if task._cancel_status is not home or task._child_nurseries or (LOCKS and task in LOCKS):  # noqa: SLF001
                    worker.spent = True
                    await self._close_left(job, home)
            reason = NORMAL
        except BaseException as exc:
            reason, goes_on = self._judge(job, exc)
            if goes_on is exc:
                raise
            if goes_on is not None:
                raise goes_on from None
        finally:
            # None: Cancelled passes through here, from `cancel`, its deadline, or the pool's end.
            if value is ContextReset and self._accepting and not (worker.spent or worker.scope.cancel_called):
                self._here = worker
            try:
                self._reap(job, Shutdown(job._why or "cancelled") if reason is None else reason)  # noqa: SLF001
            finally:
                self._here = None

    def _judge(self, job: PoolTask, error: BaseException) -> tuple[Error | None, BaseException | None]:
        """What a task has ended with, None if it was cancelled; and what of it goes on from here, to the pool's end."""
        told = self._on_exit is not None
        if isinstance(error, Exception):
            self._accepting = self._accepting and told  # else the pool fails with this
            return Error(error), None if told else error
        inside, rest = _split(error)
        if inside is not None and not is_cancelled() and (rest is None or isinstance(rest, Exception)):
            # Of a scope that was left open, or kept for later: no scope around this would take it.
            self._accepting = self._accepting and told
            stray = RuntimeError(f"{job!r} raised Cancelled, and nobody has cancelled it")
            stray.__cause__ = error
            return Error(stray), None if told else stray
        # Cancelled and something else, from a nursery in the task: the scope takes only the former.
        reason = None if rest is None else Error(rest)
        return reason, inside if inside is not None and told and isinstance(rest, Exception) else error

    async def _close_left(self, job: PoolTask, home: object) -> None:
        """It would hit what runs next in this worker, and the pool: Trio wants it closed by the task that opened it."""
        for what in await close_left(home):
            logger.warning("pool %r: %r has left %s open", self.name, job, what)

    def _watched(self, job: PoolTask) -> Awaitable[object]:
        found = job._fn(*job._args)  # noqa: SLF001 - its other half
        coro = (
            cast("Coroutine[Any, Any, object]", found) if isinstance(found, CoroutineType) else _wait(found)
        )
        return Watched(coro, partial(self._waits, job))

    def _waits(self, job: PoolTask) -> None:
        assert job._worker is not None  # noqa: SLF001 - its other half
        job._worker.busy_since = None  # noqa: SLF001
        if self._on_wait is not None:
            self._on_wait(job)

    def _reap(self, job: PoolTask, reason: ExitReason) -> None:
        del self._tasks[job.key]
        job._worker = None  # noqa: SLF001 - its other half
        self._counts[type(reason)] += 1
        if self._lot:
            # All, not one: a woken waiter may not use the slot, and would have to pass the wake on.
            self._lot.unpark_all()
        if self._on_exit is not None:
            self._on_exit(job, reason)

    # -- the incarnation's side

    def _check_closed(self) -> None:
        if self._nursery is not None:
            raise SpecError(f"pool {self.name!r} runs already")

    def _open(self, nursery: trio.Nursery) -> None:
        keep_generators()
        self._nursery = nursery
        self._now = trio.lowlevel.current_clock().current_time
        self._accepting = True
        self._ending = False
        self._lot.unpark_all()

    def _shut(self) -> None:
        """Take nothing new; let idle workers go. Busy ones go when they are done."""
        self._accepting = False
        self._ending = True
        self._lot.unpark_all()
        while self._idle:
            task = self._idle.pop().task
            assert task is not None
            trio.lowlevel.reschedule(task)

    def _closed(self) -> None:
        self._accepting = False
        self._nursery = None
        self._lot.unpark_all()

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
    """The cancellation in it, and the rest."""
    if isinstance(error, BaseExceptionGroup):
        return cast("BaseExceptionGroup[BaseException]", error).split(trio.Cancelled)
    return (error, None) if isinstance(error, trio.Cancelled) else (None, error)


async def _wait(found: Awaitable[object]) -> object:
    """Any awaitable as a coroutine."""
    return await found
