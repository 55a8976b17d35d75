"""Loop watch: logs which step blocks the event loop, while it does, and afterwards for how long it did.

A thread checks twice a second what the loop's thread runs. That costs the loop and the steps nothing: if two checks
find the same task, without a turn of the scheduler between them, its code blocks the loop. So a block of a second is
always noticed, one of half a second sometimes; one by code that never releases the GIL may not be.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from typing import Final

import attrs
import trio

from durable_actors._engine.node import Node, logger
from durable_actors._step_log import RunningStep, current_step
from durable_actors._trio_inside import Running, runs_in_real_time, what_runs
from durable_actors.telemetry import LoopBlocked

INTERVAL: Final = 0.5
"""Seconds between two checks."""
MEASURE_EVERY: Final = 10.0
"""Seconds between two events that tell how full mailboxes and lanes are."""


@attrs.define
class Seen:
    """What ran at the last check, and since when at least."""

    what: Running
    step: RunningStep | None
    since: float
    told: bool = False

    def same(self, what: Running, step: object) -> bool:
        """Whether the same step of the same task still runs, without a turn of the scheduler in between."""
        return self.what.task is what.task and self.what.turns == what.turns and self.step is step


class LoopWatch:
    """Watches one loop, for one engine."""

    def __init__(self, node: Node, measure: Callable[[], object] = lambda: None) -> None:
        self._node = node
        self._measure = measure
        self._measure_at = 0.0
        self._loop = threading.get_ident()
        self._token = trio.lowlevel.current_trio_token()
        self._seen: Seen | None = None
        self.ended = threading.Event()

    def look(self, now: float) -> None:
        """Check what the loop runs. Called in the watching thread."""
        node = self._node
        if node.telemetry.active and now >= self._measure_at and node.state.value != "starting":
            self._measure_at = now + MEASURE_EVERY
            with suppress(trio.RunFinishedError):
                self._token.run_sync_soon(self._measure_now, idempotent=True)
        what = what_runs(self._loop)
        if what is None:
            self._seen = None
            return
        step = what.task.context.get(current_step)
        seen = self._seen
        if seen is None or not seen.same(what, step):
            self._seen = Seen(what, step, now)
        elif not seen.told:
            seen.told = True
            logger.warning(
                "%s has blocked the event loop for %.1f s, and goes on, at %s: all other steps and heartbeats of this "
                "process wait. Make it a def step, which runs in a thread, or use trio.to_thread.run_sync",
                _name(seen),
                now - seen.since,
                what.where,
            )
            try:
                self._token.run_sync_soon(self._over, seen, what.where)
            except trio.RunFinishedError:
                self._seen = None

    def _measure_now(self) -> None:
        """Called in the loop; by then the engine may have ended."""
        if not self.ended.is_set():
            self._measure()

    def _over(self, seen: Seen, where: str) -> None:
        """The loop runs again. Called in the loop."""
        seconds = time.monotonic() - seen.since
        logger.warning("%s blocked the event loop for %.1f s", _name(seen), seconds)
        if self._node.telemetry.active:
            step = seen.step
            self._node.telemetry.emit(
                LoopBlocked(
                    id=None if step is None else step.id,
                    machine=None if step is None else step.machine,
                    step=None if step is None else step.step,
                    task=seen.what.task.name,
                    where=where,
                    seconds=seconds,
                )
            )


def _name(seen: Seen) -> str:
    step = seen.step
    if step is None:
        return f"task {seen.what.task.name}"
    return f"instance {step.id}: {step.machine}, step {step.step}"


@contextmanager
def watch_loop(node: Node, measure: Callable[[], object] = lambda: None) -> Generator[None]:
    """Watch the loop of the current task while this is open. Does nothing if the clock is simulated.

    While there are observers, `measure` is called in the loop every ten seconds.
    """
    if not runs_in_real_time():
        yield
        return
    watch = LoopWatch(node, measure)

    def run() -> None:
        while not watch.ended.wait(INTERVAL):
            watch.look(time.monotonic())

    threading.Thread(target=run, name="durable_actors loop watch", daemon=True).start()
    try:
        yield
    finally:
        watch.ended.set()
