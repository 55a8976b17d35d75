"""The live tree as a value: who runs, since when, how often restarted, what it waits for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import attrs
import trio

from durable_actors.otp._mailbox import MailboxStatistics

ChildState = Literal["new", "starting", "running", "stopping", "waiting", "ended"]
"""waiting: has ended and will be started again · ended: will not run by itself any more."""

NodeKind = Literal["supervisor", "actor", "task", "pool", "pool task"]


@attrs.frozen(kw_only=True)
class PoolStatistics:
    """A pool at one moment; counts are since it was made."""

    active: int
    """Tasks that run."""
    slots: int
    """How many may run."""
    accepting: bool
    """Whether it takes new tasks now."""
    started: int
    finished: int
    """Ended normally."""
    failed: int
    """Ended with an exception."""
    cancelled: int
    """Were cancelled."""
    oldest_age: float
    """Seconds since the longest-running task was started; 0 when none runs."""
    waiting: int
    """Tasks in `wait_free` or `drain`."""


@attrs.frozen(kw_only=True)
class Node:
    """One place of the tree at one moment."""

    name: str
    kind: NodeKind
    state: ChildState
    since: float
    """Seconds in this state."""
    restarts: int = 0
    """How often it was started again."""
    last_error: str | None = None
    """The `repr` of the error of its last crash."""
    waits_for: str | None = None
    """The innermost function, outside Trio, in which its task waits."""
    mailbox: MailboxStatistics | None = None
    """Of an actor."""
    pool: PoolStatistics | None = None
    """Of a pool."""
    children: tuple[Node, ...] = ()
    """In start order; of a pool only when asked for."""

    def walk(self) -> Iterator[Node]:
        """This node and everything below it, parents first."""
        yield self
        for child in self.children:
            yield from child.walk()

    def render(self) -> str:
        """The tree as text, one line per node."""
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
        if self.restarts:
            parts.append(f"restarts {self.restarts}")
        if self.last_error is not None:
            parts.append(f"last error {self.last_error}")
        if self.waits_for is not None:
            parts.append(f"in {self.waits_for}")
        return " · ".join(parts)


_TRIO = str(Path(trio.__file__).parent)


def waits_for(task: trio.lowlevel.Task | None) -> str | None:
    """Where a task waits: the innermost function on its stack that is not Trio's own."""
    if task is None:
        return None
    found = None
    for frame, line in task.iter_await_frames():
        code = frame.f_code
        if not code.co_filename.startswith(_TRIO):
            found = f"{code.co_qualname}:{line}"
    return found
