"""The effect log: steps record what they do in a file, outside the database.

If a database loses a commit, the database cannot show it. So the steps of a test write what they do to a file, and
`check` compares the rows with it. ::

    log = EffectLog("effects.jsonl")

    class Order(da.Machine[dict]):
        @da.step(initial=True)
        async def start(self, ctx):
            with log.run(ctx) as run:         # writes `begin`, and finally `left`, even if it is cancelled or raises
                ...
                return run.end(da.Done())     # writes `end`: the outcome exists, but is not committed yet

Each event is one line and one write(2) to a file opened with O_APPEND: several processes may share a file, and a
killed process leaves at most a torn line, which the reader skips. The clock is CLOCK_MONOTONIC: one for all processes
of a machine, and not affected when somebody sets the time.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TypeVar

import attrs
import trio
from durable_actors.machine import Approval, Await, Context, Decision, Next, Outcome, Pause, ScheduleChildren

O = TypeVar("O", bound=Outcome)  # noqa: E741 - an outcome

BEGIN: Final = "begin"
"""A step began."""
END: Final = "end"
"""The step has its outcome and is about to return it."""
LEFT: Final = "left"
"""The step's code no longer runs: it returned, raised, or was cancelled (written by `EffectLog.run`)."""
PAUSED: Final = "paused"
"""A process stopped running: SIGSTOP, or a blocked event loop."""
RESUMED: Final = "resumed"
"""The process runs again."""
OUTAGE: Final = "outage"
"""No work is possible: Postgres is down, or no worker is left."""
RECOVERED: Final = "recovered"
"""The outage is over."""
SESSIONS_LOST: Final = "sessions_lost"
"""Sessions ended without their owners' doing: Postgres restarted, backends were terminated, the network was cut."""


@attrs.frozen
class Effect:
    """One event."""

    at: int
    """CLOCK_MONOTONIC, in nanoseconds: comparable between processes of one machine."""
    pid: int
    """The process that wrote the event; for `paused` and `resumed`, the process that was paused."""
    kind: str
    """One of the kinds above, `handle`, or the kind passed to `note`."""
    id: int | None = None
    """The instance."""
    fsm: str | None = None
    """Its machine."""
    step: str | None = None
    visit: int | None = None
    attempt: int | None = None
    claim: str | None = None
    """The claim under which the step ran."""
    data: Mapping[str, Any] = attrs.field(factory=dict[str, Any])
    """Everything else that was recorded."""

    @property
    def run(self) -> tuple[str, int] | None:
        """The run of the step, as claim and visit: a claim runs each visit once. None: the event belongs to no run."""
        return None if self.claim is None or self.visit is None else (self.claim, self.visit)

    def __str__(self) -> str:
        data = " ".join(f"{name}={value!r}" for name, value in self.data.items() if value not in ([], None))
        if self.id is None:
            return f"process {self.pid}: {self.kind} {data}".rstrip()
        claim = "" if self.claim is None else f" under {self.claim[:8]}"
        step = "" if self.step is None else f" {self.step}, visit {self.visit}, attempt {self.attempt}{claim}"
        return f"process {self.pid}: {self.kind}{step} {data}".rstrip()


class EffectLog:
    """Appends events to a file, with one system call each. Threads and processes may share a file."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        self._file = os.open(self.path, flags, 0o644)

    def close(self) -> None:
        """Close the file. Close it after the engine: a step in a thread that still runs would fail."""
        os.close(self._file)

    def begin(self, ctx: Context[Any], **more: object) -> None:
        """Record that a step begins, as its first action: the signals that it received; whether it is in a thread."""
        data: dict[str, object] = {
            "awaited": [signal.id for signal in ctx.awaited],
            "signals": [signal.id for signal in ctx.signals],
            "children": sum(ctx.children_counts.values()),
        }
        if ctx.decision is not None:
            data["decision"] = _decided(ctx.decision)
        self._write("handle" if ctx.in_handle else BEGIN, ctx, data | more)

    def end(self, ctx: Context[Any], **more: object) -> None:
        """Record that the outcome exists: the step's last action.

        `outcome` is the outcome itself or the name of its class; `consumed` are the ids that it consumes explicitly.
        """
        outcome = more.pop("outcome", None)
        data = _describe(outcome) if isinstance(outcome, Outcome) else {"outcome": outcome}
        self._write(END, ctx, data | more)

    def note(self, kind: str, ctx: Context[Any] | None = None, **more: object) -> None:
        """Record anything else about a step (pass its context), an instance (pass `id`), or the whole run."""
        self._write(kind, ctx, more)

    @contextmanager
    def run(self, ctx: Context[Any], **more: object) -> Generator[Run]:
        """Record the begin, and `left` when the code has really left, even if it is cancelled or raises.

        Without it nobody knows what a step does after its last event.
        """
        self.begin(ctx, **more)
        try:
            yield Run(self, ctx)
        except BaseException as exc:
            self._write(LEFT, ctx, {"error": type(exc).__name__})
            raise
        else:
            self._write(LEFT, ctx, {})

    # -- recorded by the code that injects faults, so that the checkers do not blame the engine for their effects

    def paused(self, pid: int | None = None) -> None:
        """A process, by default this one, is about to stop running. Call it before SIGSTOP, or before a block."""
        self._write(PAUSED, None, {}, pid)

    def resumed(self, pid: int | None = None) -> None:
        """The process runs again. Call it before SIGCONT, or after the block."""
        self._write(RESUMED, None, {}, pid)

    def outage(self) -> None:
        """No work is possible from now on. Call it before Postgres, or the last worker, is stopped."""
        self._write(OUTAGE, None, {})

    def recovered(self) -> None:
        """Work is possible again. Call it after Postgres, or a worker, is up again."""
        self._write(RECOVERED, None, {})

    def sessions_lost(self, why: str) -> None:
        """Sessions were, or are being, terminated by force: their locks are gone."""
        self._write(SESSIONS_LOST, None, {"why": why})

    def _write(
        self, kind: str, ctx: Context[Any] | None, more: Mapping[str, object], pid: int | None = None
    ) -> None:
        event: dict[str, object] = {"at": time.monotonic_ns(), "pid": pid or os.getpid(), "kind": kind}
        data = dict(more)
        if ctx is None:
            event |= {name: data.pop(name) for name in _OF_STEP if name in data}
        else:
            claim = None if ctx.claim_id is None else str(ctx.claim_id)
            event |= {"id": ctx.id, "fsm": ctx.machine, "step": ctx.step, "visit": ctx.visit}
            event |= {"attempt": ctx.attempt, "claim": claim}
            if not trio.lowlevel.in_trio_run():
                data["thread"] = True
        line = json.dumps(event | {"data": data}, default=str).encode() + b"\n"
        written = os.write(self._file, line)
        if written != len(line):  # a full disk: this line is torn, and every later line would be
            raise OSError(f"wrote {written} of {len(line)} bytes to {self.path}")


_FIRST: Final = b'{"at": '
"""The first bytes of every event."""
_OF_STEP: Final = ("id", "fsm", "step", "visit", "attempt", "claim")


def _decided(decision: Decision) -> dict[str, object]:
    found = {"kind": decision.kind, "by": decision.by, "comment": decision.comment, "data": decision.data}
    return {name: value for name, value in found.items() if value is not None}


def _describe(outcome: Outcome) -> dict[str, object]:
    data: dict[str, object] = {"outcome": type(outcome).__name__}
    match outcome:
        case Next():
            data |= {"next": outcome.step, "consumed": list(outcome.consume)}
        case Await():
            data |= {"awaits": list(outcome.names), "next": outcome.then, "consumed": list(outcome.consume)}
        case ScheduleChildren():
            data |= {"next": outcome.then, "children": len(outcome.children)}
        case Pause() | Approval():
            data |= {"next": outcome.then}
        case _:
            pass
    return data


@attrs.frozen
class Run:
    """A step that is running."""

    log: EffectLog
    ctx: Context[Any]

    def end(self, outcome: O, **more: object) -> O:
        """Record the outcome and return it: `return run.end(da.Done())`."""
        self.log.end(self.ctx, outcome=outcome, **more)
        return outcome

    def note(self, kind: str, **more: object) -> None:
        """Record something about this run."""
        self.log.note(kind, self.ctx, **more)


def read_effects(*paths: str | os.PathLike[str]) -> list[Effect]:
    """Read logs, in the order of the events. For a directory: all `*.jsonl` in it."""
    effects = [effect for path in paths for file in _files(Path(path)) for effect in _read(file)]
    return sorted(effects, key=lambda effect: effect.at)


def _files(path: Path) -> Iterable[Path]:
    return sorted(path.glob("*.jsonl")) if path.is_dir() else [path]


def _read(path: Path) -> Iterable[Effect]:
    with path.open("rb") as lines:
        for line in lines:
            effect = _parse(line)
            if effect is not None:
                yield effect
            elif line.endswith(b"\n"):  # else its process was killed while it wrote the last line
                raise ValueError(f"{path}: not an event: {line[:200]!r}")


def _parse(line: bytes) -> Effect | None:
    """The event of a line. In a shared file the torn line of a killed process may precede it."""
    start = line.find(_FIRST)
    while start >= 0 and line.endswith(b"\n"):
        try:
            return Effect(**json.loads(line[start:]))
        except ValueError:
            start = line.find(_FIRST, start + 1)
    return None
