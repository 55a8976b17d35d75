"""Pool: temporary tasks in a limited number of slots.

Worker tasks are reused. A parked worker costs one reschedule where a new task costs a spawn, and it
keeps its cancel scope where a new one costs a scope: together about four fifths of a no-op task
(bench/otp.py). A worker whose scope was cancelled is spent and leaves; the next start makes a new
one. To the function that runs in it nothing shows: it gets a copy of its starter's context, as from
`start_soon`, and its scope is nobody else's while it runs.

A busy pool does without the reschedule, too: what `on_exit` starts for the slot that has just become
free runs on in the same worker, at once, if the task that ended has returned `Renewed`: it has given its
worker a context of which nobody has changed anything.
"""

from __future__ import annotations

import contextvars
import math
from collections.abc import Awaitable, Callable, Hashable
from typing import Any, TypeVarTuple

import trio

from durable_actors.otp._errors import PoolClosed, PoolFull, SpecError
from durable_actors.otp._exit import NORMAL, Error, ExitReason, Normal, Shutdown
from durable_actors.otp._snapshot import Node, PoolStatistics, waits_for

Ts = TypeVarTuple("Ts")

# Parked workers kept for reuse; a busy pool reuses them within microseconds, and an idle one should
# not hold 10,000 tasks (some 3 kB each) for ever. A group commit ends up to a thousand tasks at once: with 128,
# seven of ten tasks of a queue with 500 slots were spawned anew, a fifth of the worker's CPU. One that had a
# deadline keeps it while it is parked, and goes when that has passed.
_SPARE = 1000


class Renewed:
    """What a task returns, the class itself, when its context is as good as new: what follows may have it."""


class _Worker:
    """A task that runs one pool task after the other."""

    __slots__ = ("job", "scope", "task")

    def __init__(self, job: PoolTask, deadline: float) -> None:
        self.job: PoolTask | None = job
        self.scope = trio.CancelScope(deadline=deadline)
        self.task: trio.lowlevel.Task | None = None


class PoolTask:
    """A task in a pool: what `start_nowait` returns and `on_exit` gets."""

    __slots__ = ("_args", "_fn", "_why", "_worker", "key", "since")

    def __init__(
        self, fn: Callable[..., Awaitable[object]], args: tuple[Any, ...], key: Hashable, since: float
    ) -> None:
        self._fn = fn
        self._args = args
        self._worker: _Worker | None = None
        self._why: str | None = None
        self.key: Hashable = self if key is None else key
        """What it is known by; itself when it got no key."""
        self.since: float = since
        """When it was started, on Trio's clock."""

    def __repr__(self) -> str:
        name = getattr(self._fn, "__qualname__", repr(self._fn))
        return f"<PoolTask {name}{'' if self.key is self else f' key={self.key!r}'}>"

    @property
    def running(self) -> bool:
        """Whether it still holds its slot."""
        return self._worker is not None

    def cancel(self, why: str) -> bool:
        """Cancel it; `why` becomes its exit reason. False: it has ended already."""
        worker = self._worker
        if worker is None:
            return False  # its worker may be running somebody else by now
        if self._why is None:
            self._why = why
        worker.scope.cancel(reason=why)
        return True

    @property
    def deadline(self) -> float:
        """When it is cancelled, on Trio's clock; may be moved while it runs. A lease is a deadline."""
        return math.inf if self._worker is None else self._worker.scope.deadline

    @deadline.setter
    def deadline(self, at: float) -> None:
        if self._worker is not None:
            self._worker.scope.deadline = at


OnExit = Callable[[PoolTask, ExitReason], None]
"""Called in the task itself, after its slot is free; must not block. What it raises fails the pool."""


class Pool:
    """Up to `slots` tasks at a time; made before its `PoolChild`, and valid across restarts of it.

    An exception that escapes from a task goes to `on_exit` as Error. Without an `on_exit` it fails
    the whole pool (all tasks are cancelled, the supervisor decides): it is never swallowed.
    """

    def __init__(self, name: str, *, slots: int, on_exit: OnExit | None = None) -> None:
        if slots < 1:
            raise SpecError(f"pool {name!r}: slots must be at least 1, not {slots!r}")
        self.name: str = name
        """Its name in errors and the tree."""
        self.slots: int = slots
        """How many tasks may run at a time."""
        self._on_exit = on_exit
        self._nursery: trio.Nursery | None = None
        self._accepting = False
        self._ending = False  # asked to stop: no resume
        self._tasks: dict[Hashable, PoolTask] = {}
        self._idle: list[_Worker] = []
        self._here: _Worker | None = None  # ends a task right now, and would take the next one
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
            assert worker.task is not None
            # Moved before Trio looks at the old one again, so a worker that was parked for long is not hit.
            # To move a deadline costs 2 µs in Trio, so an equal one is left alone.
            if worker.scope.deadline != deadline:
                worker.scope.deadline = deadline
            worker.task.context = contextvars.copy_context()  # it is parked: takes effect when it resumes
            trio.lowlevel.reschedule(worker.task)
        else:
            worker = _Worker(job, deadline)
            self._nursery.start_soon(self._work, worker)
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

    async def _work(self, worker: _Worker) -> None:
        worker.task = trio.lowlevel.current_task()
        scope, idle = worker.scope, self._idle

        def leave(_: object) -> trio.lowlevel.Abort:
            idle.remove(worker)
            return trio.lowlevel.Abort.SUCCEEDED

        with scope:
            while (job := worker.job) is not None:
                await self._run(job, worker)
                if worker.job is not job:
                    continue  # `on_exit` has started another one here
                worker.job = None
                # A scope that was cancelled, or whose deadline has passed, would hit the next task.
                if scope.cancel_called or not self._accepting or len(idle) >= _SPARE:
                    return
                idle.append(worker)
                await trio.lowlevel.wait_task_rescheduled(leave)

    async def _run(self, job: PoolTask, worker: _Worker) -> None:
        reason: ExitReason | None = None
        value: object = None
        try:
            value = await job._fn(*job._args)  # noqa: SLF001 - its other half
            reason = NORMAL
        except Exception as exc:
            reason = Error(exc)
            if self._on_exit is None:
                self._accepting = False  # the pool fails with this
                raise
        except (KeyboardInterrupt, SystemExit) as exc:
            reason = Error(exc)
            raise
        except BaseExceptionGroup as group:
            # Cancelled and something else, from a nursery in the task: the scope takes only the former.
            cancelled, rest = group.split(trio.Cancelled)
            if rest is not None:
                reason = Error(rest)
            if cancelled is None or self._on_exit is None or not isinstance(rest, Exception):
                raise
            raise cancelled from None
        finally:
            # None: Cancelled passes through here, from `cancel`, its deadline, or the pool's end.
            if value is Renewed and self._accepting and not worker.scope.cancel_called:
                self._here = worker
            try:
                self._reap(job, Shutdown(job._why or "cancelled") if reason is None else reason)  # noqa: SLF001
            finally:
                self._here = None

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
