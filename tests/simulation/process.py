"""Virtual time, and processes that live in it.

A process is a guest run of Trio whose host is this world. Its clock never asks to sleep: it notes the next deadline,
and the world ticks it when that has come, or when something from outside has. So a process can be paused (as SIGSTOP
does: nothing of it runs, time goes on, what comes from outside waits in front of it) and killed; no real time passes.
"""

from __future__ import annotations

import heapq
import math
import sys
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from random import Random
from typing import Any

import outcome
import trio
from trio._core._run import GLOBAL_RUN_CONTEXT

HOT = 20_000
"""Ticks of one process at one instant: more is a loop that never sleeps."""

current_process: ContextVar[Process] = ContextVar("current_process")


class Violation(Exception):
    """An invariant does not hold; `rule` is its name."""

    def __init__(self, rule: str, text: str) -> None:
        super().__init__(rule, text)  # both: it comes out of another process
        self.rule = rule

    def __str__(self) -> str:
        return ": ".join(self.args)


class World:
    """The event queue, the clock, the history."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.now = 0.0
        self.history: list[tuple[Any, ...]] = []
        self.processes: list[Process] = []
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._serial = 0

    def at(self, when: float, call: Callable[[], None]) -> None:
        self._serial += 1
        heapq.heappush(self._events, (max(when, self.now), self._serial, call))

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        self.at(self.now + seconds, call)

    def log(self, *what: Any) -> None:
        self.history.append((round(self.now, 6), *what))

    def run(self, until: Callable[[], bool], *, horizon: float) -> bool:
        """Let events happen until the condition holds; False when there are none left, or time is over."""
        events = self._events
        while events and not until():
            when, _, call = heapq.heappop(events)
            if when > horizon:
                self.now = horizon
                return until()
            self.now = when
            call()
        return until()

    def end(self) -> None:
        """End every process, as a crash would: nothing of the world is left behind."""
        for process in self.processes:
            process.kill()


class ProcessClock(trio.abc.Clock):
    """Trio's clock of one process: the world's, from another origin; its own once the process is dead."""

    def __init__(self, world: World, offset: float) -> None:
        self.world = world
        self.offset = offset
        self.deadline: float | None = None
        self.frozen: float | None = None

    def start_clock(self) -> None:
        pass

    def current_time(self) -> float:
        return self.world.now + self.offset if self.frozen is None else self.frozen

    def deadline_to_sleep_time(self, deadline: float) -> float:
        self.deadline = deadline
        return 0.0


class Process:
    """One simulated operating system process: running, paused, or gone."""

    def __init__(self, world: World, name: str, main: Callable[[Process], Awaitable[object]]) -> None:
        self.world = world
        self.name = name
        self.paused = False
        self.dead = False
        """Killed: it has no effects any more, though its coroutines still unwind."""
        self.ended = False
        self.error: BaseException | None = None
        self.resumed_at = -1.0
        self.started_at = world.now
        self.scope = trio.CancelScope()
        self.on_end: Callable[[], None] = lambda: None
        self.on_kill: list[Callable[[], None]] = []
        self._clock = ProcessClock(world, world.random.uniform(0, 10_000))
        self._next: Callable[[], object] | None = None
        self._inbox: list[Callable[[], None]] = []
        self._turn = 0
        self._hot = (0.0, 0)
        world.processes.append(self)
        self._start(main)

    # -- what happens to it

    def deliver(self, call: Callable[[], None]) -> None:
        """Something from outside: run `call` inside it, now or when it goes on."""
        if self.ended or self.dead:
            return
        if self.paused:
            self._inbox.append(call)
        else:
            self._inside(call)
            self._wake(self.world.now)

    def pause(self) -> None:
        if not self.dead and not self.ended:
            self.paused = True

    def resume(self) -> None:
        """Go on: as in Trio, what came from outside is looked at before deadlines are."""
        if not self.paused or self.dead or self.ended:
            return
        self.paused = False
        self.resumed_at = self.world.now
        inbox, self._inbox = self._inbox, []
        for call in inbox:
            self._inside(call)
        self._wake(self.world.now)

    def kill(self) -> None:
        """SIGKILL. What unwinds afterwards reaches nobody."""
        if self.dead or self.ended:
            return
        self.paused = False
        self.dead = True
        for call in self.on_kill:
            call()
        self._clock.frozen = self._clock.current_time()
        self._inside(self.scope.cancel)
        for _ in range(HOT):
            if self.ended:
                return
            self._clock.deadline = None
            self._step()
            deadline = self._clock.deadline
            if deadline is not None and math.isfinite(deadline):
                self._clock.frozen = max(self._clock.frozen, deadline)
        raise Violation("cancellation", f"{self.name} does not end when it is cancelled")

    async def sleep(self, seconds: float) -> None:
        """What a step does while it works."""
        await trio.sleep(seconds)

    # -- the guest run

    def _start(self, main: Callable[[Process], Awaitable[object]]) -> None:
        async def run() -> None:
            current_process.set(self)
            with self.scope:
                await main(self)

        hooks = sys.get_asyncgen_hooks()
        try:
            trio.lowlevel.start_guest_run(
                run,
                run_sync_soon_threadsafe=self._soon,
                run_sync_soon_not_threadsafe=self._soon,
                done_callback=self._done,
                host_uses_signal_set_wakeup_fd=True,
                clock=self._clock,
            )
            self._runner = GLOBAL_RUN_CONTEXT.runner
            self._hooks = sys.get_asyncgen_hooks()
        finally:
            GLOBAL_RUN_CONTEXT.__dict__.clear()
            sys.set_asyncgen_hooks(*hooks)
        self._wake(self.world.now)

    def _soon(self, call: Callable[[], object]) -> None:
        self._next = call

    def _done(self, result: outcome.Outcome[None]) -> None:
        self.ended = True
        self.error = result.error if isinstance(result, outcome.Error) else None
        self._next = None

    def _inside(self, call: Callable[[], object]) -> None:
        """Run something in this process's Trio context, which Trio keeps per thread."""
        hooks = sys.get_asyncgen_hooks()
        GLOBAL_RUN_CONTEXT.runner = self._runner
        sys.set_asyncgen_hooks(*self._hooks)
        try:
            call()
        finally:
            GLOBAL_RUN_CONTEXT.__dict__.clear()
            sys.set_asyncgen_hooks(*hooks)

    def _step(self) -> None:
        call, self._next = self._next, None
        assert call is not None
        self._inside(call)

    def _has_events(self) -> bool:
        """Trio has woken itself through its own socket, e.g. to close an asynchronous generator."""
        state = getattr(self._next, "__self__", None)
        return bool(state is not None and state.unrolled_run_next_send.value)

    def _wake(self, when: float) -> None:
        self._turn += 1
        turn = self._turn
        self.world.at(when, lambda: self._tick(turn))

    def _tick(self, turn: int) -> None:
        if turn != self._turn or self.paused or self.dead or self.ended:
            return
        instant, count = self._hot
        self._hot = (self.world.now, count + 1 if instant == self.world.now else 0)
        if count > HOT:
            raise Violation("hot loop", f"{self.name} never sleeps")
        self._clock.deadline = None
        self._step()
        if self.ended:
            self.on_end()
        elif self._clock.deadline is None or self._has_events():
            self._wake(self.world.now)
        elif math.isfinite(self._clock.deadline):
            # A nanosecond late: an offset rounds, and a deadline that is not quite over would be asked for for ever.
            self._wake(max(self.world.now, self._clock.deadline - self._clock.offset + 1e-9))
