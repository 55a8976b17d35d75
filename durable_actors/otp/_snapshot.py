"""A snapshot of the running tree: the state, age, restarts and current wait of each child."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import attrs
import trio

from durable_actors.otp._mailbox import MailboxStatistics

ChildState = Literal["new", "starting", "running", "stopping", "waiting", "ended"]
"""waiting: ended, will be restarted · ended: will not be restarted."""

NodeKind = Literal["supervisor", "actor", "task", "pool", "pool task"]


@attrs.frozen(kw_only=True)
class PoolStatistics:
    """A snapshot of a pool. Counts start when the pool is created."""

    active: int
    """Running tasks."""
    slots: int
    """The maximum number of running tasks."""
    accepting: bool
    """Whether the pool accepts new tasks."""
    started: int
    """Tasks started so far."""
    finished: int
    """Tasks that returned."""
    failed: int
    """Tasks that raised an exception."""
    cancelled: int
    """Tasks that were cancelled."""
    oldest_age: float
    """Seconds since the longest-running task started; 0 when no task runs."""
    waiting: int
    """Callers blocked in `wait_free` or `drain`."""


@attrs.frozen(kw_only=True)
class SupervisorStatistics:
    """How a supervisor restarts, and how near it is to giving up."""

    strategy: str
    """Which children are restarted when one ends."""
    intensity: int
    """Restarts that are allowed within `period`."""
    period: float
    """Seconds."""
    used: int
    """Restarts within the last `period`."""


@attrs.frozen(kw_only=True)
class Node:
    """A snapshot of one supervisor, actor, task or pool of the tree."""

    name: str
    kind: NodeKind
    state: ChildState
    since: float
    """Seconds since it entered this state."""
    restarts: int = 0
    """How often it was restarted."""
    last_error: str | None = None
    """The `repr` of the exception that ended it last."""
    waits_for: str | None = None
    """The innermost function on its stack that is not part of Trio."""
    mailbox: MailboxStatistics | None = None
    """For actors only."""
    pool: PoolStatistics | None = None
    """For pools only."""
    supervisor: SupervisorStatistics | None = None
    """For supervisors that run."""
    children: tuple[Node, ...] = ()
    """Children in start order. The tasks of a pool are listed only on request."""

    def walk(self) -> Iterator[Node]:
        """Iterate over this node and its descendants, parents first."""
        yield self
        for child in self.children:
            yield from child.walk()

    def render(self) -> str:
        """Format the tree as text, one line per node."""
        return "\n".join(self._lines("", "", ""))

    def _lines(self, first: str, rest: str, mark: str) -> Iterator[str]:
        yield first + mark + self._line()
        for child in self.children:
            last = child is self.children[-1]
            step = "└── " if last else "├── "
            yield from child._lines(rest, rest + ("    " if last else "│   "), step)  # noqa: SLF001 - ourselves

    def _line(self) -> str:
        parts = [f"{self.name} [{self.kind}] {self.state} {self.since:.3g} s"]
        if self.mailbox is not None:
            parts.append(f"mailbox {self.mailbox.depth}/{self.mailbox.capacity}")
            if self.mailbox.depth:
                parts.append(f"oldest {self.mailbox.oldest_age:.3g} s")
        if self.pool is not None:
            parts.append(f"{self.pool.active}/{self.pool.slots} busy")
            if not self.pool.accepting:
                parts.append("closed")
        if self.supervisor is not None and self.supervisor.used:
            parts.append(f"{self.supervisor.used} of {self.supervisor.intensity} restarts used")
        if self.restarts:
            parts.append(f"restarts {self.restarts}")
        if self.last_error is not None:
            parts.append(f"last error {self.last_error}")
        if self.waits_for is not None:
            parts.append(f"in {self.waits_for}")
        return " · ".join(parts)


_TRIO = str(Path(trio.__file__).parent)


def waits_for(task: trio.lowlevel.Task | None) -> str | None:
    """Return where a task waits: the innermost function on its stack that is not part of Trio."""
    if task is None:
        return None
    found = None
    for frame, line in task.iter_await_frames():
        code = frame.f_code
        if not code.co_filename.startswith(_TRIO):
            found = f"{code.co_qualname}:{line}"
    return found
