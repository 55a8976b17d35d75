"""The step that runs in this task or thread, and log records that carry it."""

from __future__ import annotations

import logging
from contextvars import ContextVar
from typing import Final, Protocol


class RunningStep(Protocol):
    """What `StepLogFilter` needs to know about a step. A `Context` provides it."""

    @property
    def id(self) -> int:
        """The id of the instance."""
        ...

    @property
    def machine(self) -> str:
        """The name of the machine."""
        ...

    @property
    def step(self) -> str:
        """The name of the step."""
        ...

    @property
    def attempt(self) -> int:
        """How often the step has run before in this visit."""
        ...


current_step: Final[ContextVar[RunningStep | None]] = ContextVar("durable_actors_step", default=None)
"""The step that runs in this task or thread; None outside of steps."""


class StepLogFilter(logging.Filter):
    """A logging filter that adds `instance`, `machine`, `step` and `attempt` to every record.

    They are None outside of steps. No record is filtered out.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        """Add the fields of the current step to the record."""
        running = current_step.get()
        record.instance = None if running is None else running.id
        record.machine = None if running is None else running.machine
        record.step = None if running is None else running.step
        record.attempt = None if running is None else running.attempt
        return True
