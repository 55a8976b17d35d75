"""When the worker of a bench dies: plans that `crash_after` and `crash_anywhere` make. Sans-I/O."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Self

import attrs

from durable_actors._store.rows import Claim
from durable_actors._wording import counted
from durable_actors.machine import builtin_machines, current_registry


class WorkerDied(Exception):  # noqa: N818 - it is no error of the test
    """`crash_after` has stopped the worker here. `drain` catches it; `execute_next` of a bench raises it."""

    def __init__(self, claim: Claim, *, committed: bool) -> None:
        when = "after its commit" if committed else "before its outcome was committed"
        super().__init__(f"the worker died after step {claim.step!r} of instance {claim.id}, {when}")
        self.claim = claim
        self.committed = committed


@attrs.define(eq=False)
class CrashAfter:
    """What `Bench.crash_after` returns: a plan that is in force, and a context manager around its use."""

    step: str
    owner: type[object] | None
    """The class of the step; None: the step of any machine."""
    machine: str | None
    """A job's name."""
    committed: bool
    times: int
    _withdraw: Callable[[CrashAfter], None]
    crashes: int = attrs.field(default=0, init=False)
    """How often the worker has died."""

    def wants(self, claim: Claim, *, committed: bool) -> bool:
        """Whether the worker dies here. Counts it."""
        if committed != self.committed or self.crashes >= self.times or claim.step != self.step:
            return False
        if self.machine is not None and claim.fsm != self.machine:
            return False
        if self.owner is not None:
            key = (claim.fsm, claim.version)
            spec = current_registry().get(*key) or builtin_machines().get(key)
            definition = None if spec is None else spec.definition
            if not (isinstance(definition, type) and issubclass(definition, self.owner)):
                return False
        self.crashes += 1
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        __tracebackhide__ = True
        self._withdraw(self)
        if error is None and self.crashes < self.times:
            wanted, found = counted(self.times, "crash", "crashes"), counted(self.crashes, "crash", "crashes")
            raise AssertionError(
                f"crash_after({self.step!r}): expected {wanted} inside the block, and there were {found}: the step did "
                "not run that often"
            )


@attrs.frozen(order=True)
class CrashPoint:
    """A point of a scenario: the n-th run of a step, counted from 0, before or after its outcome is committed."""

    run: int
    committed: bool = False

    def __str__(self) -> str:
        return f"{'after the commit' if self.committed else 'before the commit'} of run {self.run + 1}"


@attrs.define(eq=False)
class Numbered:
    """Crashes at numbered points; the worker that follows goes on at once."""

    points: frozenset[CrashPoint]
    runs: list[str] = attrs.field(factory=list[str])
    """What has run so far: machine, instance and step."""

    def wants(self, claim: Claim, *, committed: bool) -> bool:
        """Whether the worker dies here. Counts the runs."""
        if not committed:
            self.runs.append(f"{claim.fsm} {claim.id}, step {claim.step!r}")
        return CrashPoint(len(self.runs) - 1, committed) in self.points
