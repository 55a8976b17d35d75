"""The effect log: what steps did, told by themselves, outside of the database.

A database that lost a commit does not know it. So the steps of a test write what they do to a file, and the rows are
compared with it (`invariants`). ::

    log = EffectLog("effects.jsonl")

    class Order(da.Machine[dict]):
        @da.step(initial=True)
        async def start(self, ctx):
            with log.run(ctx) as run:         # begin now; left, also when it is cancelled or raises
                ...
                return run.end(da.Done())     # end: the outcome is there, nothing of it is committed yet

Each event is one line and one write(2) to a file opened with O_APPEND: several processes may share a file, and one that
is killed leaves at most a torn last line, which the reader passes over. The clock is CLOCK_MONOTONIC, one for all
processes of a machine, and untouched by whoever sets the time.
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
from durable_actors.machine import Await, Context, Next, Outcome, ScheduleChildren

O = TypeVar("O", bound=Outcome)  # noqa: E741 - an outcome

BEGIN: Final = "begin"
"""A step began."""
END: Final = "end"
"""It has its outcome, and is about to return it."""
LEFT: Final = "left"
"""Its code runs no more: it returned, raised, or was cancelled (written by `EffectLog.run`)."""
PAUSED: Final = "paused"
"""A process stopped running: SIGSTOP, or its event loop was blocked."""
RESUMED: Final = "resumed"
"""It goes on."""
OUTAGE: Final = "outage"
"""No work can be done by anybody: Postgres is away, or no worker is left."""
RECOVERED: Final = "recovered"
"""The outage is over."""
SESSIONS_LOST: Final = "sessions_lost"
"""Sessions were ended behind their owners' backs: Postgres restarted, backends were terminated, the network was cut."""


@attrs.frozen
class Effect:
    """One event."""

    at: int
    """CLOCK_MONOTONIC, in nanoseconds: comparable between processes of one machine."""
    pid: int
    """The process it happened in, or, of `paused` and `resumed`, to."""
    kind: str
    """`begin`, `end`, `left`, or what `note` was given."""
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
    """What else was told."""

    @property
    def run(self) -> tuple[str, int] | None:
        """The run that it belongs to: a claim runs each visit once. None: it belongs to none."""
        return None if self.claim is None or self.visit is None else (self.claim, self.visit)

    def __str__(self) -> str:
        told = " ".join(f"{name}={value!r}" for name, value in self.data.items() if value not in ([], None))
        if self.id is None:
            return f"process {self.pid}: {self.kind} {told}".rstrip()
        claim = "" if self.claim is None else f" under {self.claim[:8]}"
        step = "" if self.step is None else f" {self.step}, visit {self.visit}, attempt {self.attempt}{claim}"
        return f"process {self.pid}: {self.kind}{step} {told}".rstrip()


class EffectLog:
    """Appends events to a file. Cheap (one system call), usable from threads, and by many processes at once."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        self._file = os.open(self.path, flags, 0o644)

    def close(self) -> None:
        """Close the file. Steps that outlive the log, in threads, would fail: close it after the engine."""
        os.close(self._file)

    def begin(self, ctx: Context[Any], **more: object) -> None:
        """A step begins: the first thing that it does. Tells which signals it was given, and whether in a thread."""
        told: dict[str, object] = {
            "awaited": [signal.id for signal in ctx.awaited],
            "signals": [signal.id for signal in ctx.signals],
            "children": sum(ctx.children_counts.values()),
        }
        self._write("handle" if ctx.in_handle else BEGIN, ctx, told | more)

    def end(self, ctx: Context[Any], **more: object) -> None:
        """The outcome is there: the last thing that a step does.

        `outcome` may be the outcome itself or the name of its class; `consumed` the ids that it consumes explicitly.
        """
        outcome = more.pop("outcome", None)
        told = _told_of(outcome) if isinstance(outcome, Outcome) else {"outcome": outcome}
        self._write(END, ctx, told | more)

    def note(self, kind: str, ctx: Context[Any] | None = None, **more: object) -> None:
        """Anything else: of a step (give its context), of an instance (give `id`), or of the world."""
        self._write(kind, ctx, more)

    @contextmanager
    def run(self, ctx: Context[Any], **more: object) -> Generator[Run]:
        """Begin; and tell when the code has really left, also when it is cancelled or raises.

        What a step without it does after its last event cannot be known.
        """
        self.begin(ctx, **more)
        try:
            yield Run(self, ctx)
        except BaseException as exc:
            self._write(LEFT, ctx, {"error": type(exc).__name__})
            raise
        else:
            self._write(LEFT, ctx, {})

    # -- told by whoever breaks things, so that what nobody could prevent is not blamed on the engine

    def paused(self, pid: int | None = None) -> None:
        """This process (or another) is about to stand still: before SIGSTOP, before a block of the event loop."""
        self._write(PAUSED, None, {}, pid)

    def resumed(self, pid: int | None = None) -> None:
        """It goes on: before SIGCONT, after the block."""
        self._write(RESUMED, None, {}, pid)

    def outage(self) -> None:
        """From now on nobody can work: before Postgres, or the last worker, is stopped."""
        self._write(OUTAGE, None, {})

    def recovered(self) -> None:
        """Now they can: after Postgres, or a worker, is up again."""
        self._write(RECOVERED, None, {})

    def sessions_lost(self, why: str) -> None:
        """Sessions were, or are just being, ended by force: locks held by them are gone."""
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
        if written != len(line):  # a full disk: the line is torn, and so would be every line after it
            raise OSError(f"wrote {written} of {len(line)} bytes to {self.path}")


_FIRST: Final = b'{"at": '
"""How every event begins."""
_OF_STEP: Final = ("id", "fsm", "step", "visit", "attempt", "claim")


def _told_of(outcome: Outcome) -> dict[str, object]:
    told: dict[str, object] = {"outcome": type(outcome).__name__}
    match outcome:
        case Next():
            told |= {"next": outcome.step, "consumed": list(outcome.consume)}
        case Await():
            told |= {"awaits": list(outcome.names), "next": outcome.then, "consumed": list(outcome.consume)}
        case ScheduleChildren():
            told |= {"next": outcome.then, "children": len(outcome.children)}
        case _:
            pass
    return told


@attrs.frozen
class Run:
    """A run under way."""

    log: EffectLog
    ctx: Context[Any]

    def end(self, outcome: O, **more: object) -> O:
        """Tell the outcome, and give it back: `return run.end(da.Done())`."""
        self.log.end(self.ctx, outcome=outcome, **more)
        return outcome

    def note(self, kind: str, **more: object) -> None:
        """Tell something of this run."""
        self.log.note(kind, self.ctx, **more)


def read_effects(*paths: str | os.PathLike[str]) -> list[Effect]:
    """Read logs, in the order of what happened. A path may be a directory: all `*.jsonl` in it."""
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
            elif line.endswith(
                b"\n"
            ):  # else: its process was killed in the middle of it, and nobody wrote since
                raise ValueError(f"{path}: not an event: {line[:200]!r}")


def _parse(line: bytes) -> Effect | None:
    """The event of a line. In a shared file it may stand behind the torn one of a process that was killed."""
    start = line.find(_FIRST)
    while start >= 0 and line.endswith(b"\n"):
        try:
            return Effect(**json.loads(line[start:]))
        except ValueError:
            start = line.find(_FIRST, start + 1)
    return None
