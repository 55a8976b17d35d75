"""What a drain did, as values and as text. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal, cast

import attrs

from durable_actors._engine.running.user_code import Postponed
from durable_actors._store.read import Instance
from durable_actors._wording import counted
from durable_actors.machine import reason_text
from durable_actors.telemetry import Event, StepCommitted, StepCrashed, StepInterrupted, StepStopped

SHOWN: Final = 20
"""Steps and instances that a text lists, at most."""

RunOutcome = Literal[
    "Next",
    "Retry",
    "Await",
    "ScheduleChildren",
    "Pause",
    "Approval",
    "Done",
    "Stop",
    "crashed",
    "postponed",
    "worker died",
    "lost",
]
"""How a run ended: the outcome of the step; "crashed": it raised SystemExit or the like; "postponed": it raised
`RateLimited`, and runs again later; "worker died": `crash_after` has stopped the worker; "lost": another worker took
the claim."""


@attrs.frozen(kw_only=True)
class Ran:
    """One run of one step."""

    id: int
    """The instance."""
    machine: str
    step: str
    attempt: int
    """0 for the first run of this visit of the step."""
    outcome: RunOutcome
    error: BaseException | None = None
    """What the step raised, if it did; `handle` (or a job's rules) then chose the outcome."""
    committed: bool = True
    """Whether the outcome was committed."""

    def __str__(self) -> str:
        attempt = f", attempt {self.attempt}" if self.attempt else ""
        error = "" if self.error is None else f" ({_one_line(reason_text(self.error))})"
        return f"{self.machine} {self.id}, step {self.step!r}{attempt} → {self.outcome}{error}"


class Runs:
    """The runs of a bench, as its events tell them."""

    def __init__(self) -> None:
        self.ran: Final[list[Ran]] = []

    def note(self, event: Event) -> None:
        """Add a run that has ended, or say that the last one is committed."""
        match event:
            case StepStopped():
                self._add(event, cast("RunOutcome", event.outcome), event.error)
            case StepCrashed():
                self._add(event, "crashed", event.error)
            case StepInterrupted(error=Postponed()):
                self._add(event, "postponed", None, committed=True)
            case StepCommitted():
                self.change(event.id, None, committed=True)
            case _:
                pass

    def change(self, number: int, ended: RunOutcome | None, *, committed: bool) -> None:
        """Change the record of an instance's last run."""
        for index in reversed(range(len(self.ran))):
            if self.ran[index].id == number:
                ran = self.ran[index]
                self.ran[index] = attrs.evolve(ran, outcome=ended or ran.outcome, committed=committed)
                return

    def _add(
        self,
        event: StepStopped | StepCrashed | StepInterrupted,
        ended: RunOutcome,
        error: BaseException | None,
        *,
        committed: bool = False,
    ) -> None:
        self.ran.append(
            Ran(
                id=event.id,
                machine=event.machine,
                step=event.step,
                attempt=event.attempt,
                outcome=ended,
                error=error,
                committed=committed,
            )
        )


@attrs.frozen(kw_only=True)
class Waiting:
    """An instance that has not ended, and why it does not run now."""

    instance: Instance
    why: str
    """A sentence: `it awaits a signal named 'payment' until its deadline in 3 d, then runs step 'ship'`."""

    def __str__(self) -> str:
        return f"{self.instance.machine} {self.instance.id}: {self.why}"


@attrs.frozen(kw_only=True)
class Drained:
    """What `drain` did. `print(drained)` shows it."""

    ran: tuple[Ran, ...]
    """Every run, in order."""
    waiting: tuple[Waiting, ...]
    """The instances that have not ended, oldest first, at most 100; `waiting_count` counts all of them."""
    waiting_count: int

    @property
    def steps(self) -> list[str]:
        """The names of the steps that ran, in order."""
        return [each.step for each in self.ran]

    @property
    def worker_died(self) -> bool:
        """Whether `crash_after` ended this drain. Another drain goes on."""
        return bool(self.ran) and self.ran[-1].outcome == "worker died"

    def __str__(self) -> str:
        ran = f"{counted(len(self.ran), 'step')} ran" + (":" if self.ran else "")
        waiting = f"{counted(self.waiting_count, 'instance waits', 'instances wait')}" + (
            ":" if self.waiting else ""
        )
        rest = self.waiting_count - min(len(self.waiting), SHOWN)
        return "\n".join([
            ran,
            *last_steps(self.ran),
            waiting,
            *(f"  {each}" for each in self.waiting[:SHOWN]),
            *([f"  … and {rest} more"] if rest else []),
        ])  # fmt: skip


def last_steps(ran: Sequence[Ran], *, most: int = SHOWN) -> list[str]:
    """The last runs, one line each."""
    skipped = max(len(ran) - most, 0)
    lines = [f"  {number:>3}  {each}" for number, each in enumerate(ran[skipped:], skipped + 1)]
    return [f"  … {counted(skipped, 'step')} before", *lines] if skipped else lines


def _one_line(text: str, limit: int = 200) -> str:
    line = " ".join(text.split())
    return line if len(line) <= limit else line[: limit - 1] + "…"
