"""Where a tracing library plugs in. The core calls it through this module and imports none.

A trace context is stored with the row that a traced program inserts: under `TRACE` in its `meta`, as the text that
`TraceContext.encode` makes. The pick hands it to the node that runs the row, which tells its observers
(`StepStarted.trace`). Without a tracer nothing is stored, and each place costs one test of a variable.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Final, Protocol

import attrs

TRACE: Final = "durable:trace"
"""The name in `meta`."""
MAX_TRACE: Final = 1000
"""Characters. A `tracestate` that would make it longer is left out."""


@attrs.frozen
class TraceContext:
    """The trace in which an instance was inserted, in the format of the W3C."""

    traceparent: str
    tracestate: str | None = None
    created: int | None = None
    """When it was inserted: Unix time, on the clock of the process that inserted it. None if that is not known."""

    def encode(self) -> str:
        """The text that is stored: traceparent, time, tracestate."""
        text = f"{self.traceparent} {'' if self.created is None else self.created}"
        if self.tracestate and len(text) + len(self.tracestate) < MAX_TRACE:
            text = f"{text} {self.tracestate}"
        return text.rstrip()

    @classmethod
    def decode(cls, text: str) -> TraceContext:
        """Read a stored text. Whoever uses it checks whether it is a trace context: a user may have written it."""
        traceparent, _, rest = text.partition(" ")
        created, _, state = rest.partition(" ")
        known = created.isascii() and created.isdigit() and len(created) < 12
        return cls(traceparent, state or None, int(created) if known else None)


class Sending(Protocol):
    """A span around an insert."""

    def sent(self, ids: Iterable[int | None]) -> None:
        """The ids of what was inserted."""


class Tracer(Protocol):
    """What a tracing library provides."""

    def sending(self) -> AbstractContextManager[Sending]:
        """A span around an insert. It is the current one inside the block."""
        ...

    def context(self, machine: str, queue: str, count: int) -> TraceContext | None:
        """The trace context to store with new instances; None: store none."""
        ...

    def current(self) -> tuple[str, str] | None:
        """Trace id and span id of the current span, for log records."""
        ...


class _Untraced:
    def sent(self, ids: Iterable[int | None]) -> None:
        pass


_UNTRACED: Final = nullcontext(_Untraced())
_tracer: Tracer | None = None


def install(tracer: Tracer | None) -> None:
    """Let this process trace with `tracer`; None ends that."""
    global _tracer  # noqa: PLW0603 - one per process, as the providers of OpenTelemetry
    _tracer = tracer


def tracer() -> Tracer | None:
    """The tracer of this process, if there is one."""
    return _tracer


def sending() -> AbstractContextManager[Sending]:
    """A span around an insert; without a tracer, nothing."""
    return _UNTRACED if _tracer is None else _tracer.sending()
