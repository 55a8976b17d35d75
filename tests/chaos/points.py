"""Named points at which a worker kills or stops itself. Plugged in from outside: the engine knows nothing of it.

=============  ======================================================================================
picking        before a pick is sent
picked         a pick came back with claims, no step has begun
step           inside a step, its begin is in the effect log
outcome        the outcome is known, its commit not sent
sending        before a commit is sent: no step can be cancelled any more before it is
sent           a commit is under way: somewhere between its first byte and its answer
committed      the commit was answered, nobody has heard of it
spawning       before children and their parent's park are sent
spawned        they are committed, nobody has heard of it
signalling     before a step's signal is sent
signalled      after
starting       before a step's child is started
started        after
releasing      before claims are given back
released       after
renewing       before leases are renewed
renewed        after
reaping        before claims of others are taken back: what was known of them grows old
reaped         after
took           after, if there were any: they are taken back, nobody has heard of it
recovering     inside `recover`, before it takes claims back (worker --recover)
expiring       before deadlines that have passed are looked for
drain          a drain begins (send SIGTERM)
=============  ======================================================================================
"""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Awaitable, Callable
from types import ModuleType
from typing import Any, Final, NoReturn

from durable_actors import _history, telemetry
from durable_actors._engine.claiming import feeder
from durable_actors._engine.committing import flusher, releases, spawn
from durable_actors._engine.maintenance import heartbeat, reaper
from durable_actors._engine.running import context_port as port
from tests.chaos.machines import probe
from tests.invariants.effect_log import EffectLog

SENDING: Final = 0.004
"""Seconds that a commit takes, about; the kill at `sent` comes at a random time within."""

EVENTS: Final = {telemetry.StepStopped: "outcome", telemetry.DrainStarted: "drain"}
CALLS: Final[tuple[tuple[ModuleType, str, str, str], ...]] = (
    (feeder, "pick_instances", "picking", ""),
    (flusher, "commit_outcomes", "sending", "committed"),
    (spawn, "schedule_children", "spawning", "spawned"),
    (port, "signal_from_step", "signalling", "signalled"),
    (port, "start_child", "starting", "started"),
    (releases, "release_claims", "releasing", "released"),
    (heartbeat, "renew_leases", "renewing", "renewed"),
    (reaper, "reap_claims", "reaping", "reaped"),
    (_history, "reap_claims", "recovering", "reaped"),
    (feeder, "expire_awaits", "expiring", ""),
)
"""Calls of the engine, and the points before and after each."""


def die() -> NoReturn:
    """As the kernel would do it: nothing is flushed, nobody is told."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("unreachable")


def stand_still(log: EffectLog) -> None:
    """SIGSTOP, until somebody sends SIGCONT."""
    log.paused()
    os.kill(os.getpid(), signal.SIGSTOP)
    log.resumed()


class Point:
    """Acts when its point is passed for the n-th time, and every n times from then on."""

    def __init__(self, spec: str, act: Callable[[], object]) -> None:
        self.name, _, count = spec.partition(":")
        self._every = self._left = int(count or 1)
        self._act = act

    def install(self) -> None:
        """Plug it into the steps and around the engine's calls."""
        probe.passing = self.passing
        for module, name, before, after in CALLS:
            within = {"sending": "sent", "reaping": "took", "recovering": "took"}.get(before)
            if self.name in {before, after, within}:
                setattr(module, name, self._wrapped(getattr(module, name), before, after))

    def passing(self, name: str) -> None:
        """A point is passed."""
        if name == self.name and self._due():
            self._act()

    def observe(self, event: telemetry.Event) -> None:
        """An event of the engine."""
        if isinstance(event, telemetry.Picked) and event.claimed:
            self.passing("picked")
        elif type(event) in EVENTS:
            self.passing(EVENTS[type(event)])

    def _wrapped(
        self, call: Callable[..., Awaitable[Any]], before: str, after: str
    ) -> Callable[..., Awaitable[Any]]:
        async def wrapped(*args: Any, **options: Any) -> Any:
            self.passing(before)
            if self.name == "sent" and self._due():
                threading.Timer(random.random() * SENDING, self._act).start()
            result = await call(*args, **options)
            self.passing(after)
            if after == "reaped" and result[0]:
                self.passing("took")
            return result

        return wrapped

    def _due(self) -> bool:
        self._left -= 1
        if self._left:
            return False
        self._left = self._every
        return True
