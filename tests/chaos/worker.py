"""A worker process of the chaos runs: `python -m tests.chaos.worker --dsn ... --node w1 --effects FILE --ready FILE`.

`--kill-at POINT:N` makes it kill itself (SIGKILL) when it passes a point for the N-th time:

=============  ======================================================================================
claimed        a pick came back with claims, no step has begun
step           inside a step, its begin is in the effect log
outcome        the outcome is known, its commit not sent
sent           a commit is under way: somewhere between its first byte and its answer
committed      the commit was answered, nobody has heard of it
spawned        children and their parent's park are committed, nobody has heard of it
released       claims were given back
reaped         claims of others were taken back
renewed        the leases were renewed
drain          a drain begins (send SIGTERM)
=============  ======================================================================================

SIGUSR1: the next step blocks the event loop for longer than a lease. SIGUSR2: the stacks of all threads, to the log.
"""

from __future__ import annotations

import argparse
import faulthandler
import logging
import os
import random
import signal
import threading
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any, Final, NoReturn

import durable_actors as da
import trio
from durable_actors import telemetry
from durable_actors._engine import flusher, heartbeat, step_task
from durable_actors.testing.history import EffectLog
from tests.chaos import world
from tests.chaos.machines import probe

BLOCK: Final = world.LEASE * 1.4
"""Seconds for which a step blocks the loop."""
SENDING: Final = 0.004
"""Seconds that a commit takes, about; the kill at `sent` comes at a random time within."""

EVENTS: Final = {
    telemetry.StepStopped: "outcome",
    telemetry.ClaimsReaped: "reaped",
    telemetry.DrainStarted: "drain",
}
AFTER: Final = (
    (flusher, "commit_outcomes", "committed"),
    (step_task, "spawn_children", "spawned"),
    (flusher, "release_claims", "released"),
    (heartbeat, "renew_leases", "renewed"),
)
"""Calls of the engine, and the point after each. Wrapped here, so that the engine knows nothing of it."""


def die() -> NoReturn:
    """As the kernel would do it: nothing is flushed, nobody is told."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("unreachable")


class KillPoint:
    """Kills the process when its point is passed often enough."""

    def __init__(self, spec: str) -> None:
        self.name, _, count = spec.partition(":")
        self._left = int(count or 1)

    def passing(self, name: str) -> None:
        """A point is passed."""
        if name == self.name and self._due():
            die()

    def observe(self, event: telemetry.Event) -> None:
        """An event of the engine."""
        if isinstance(event, telemetry.Picked) and event.claimed:
            self.passing("claimed")
        elif type(event) in EVENTS:
            self.passing(EVENTS[type(event)])

    def install(self) -> None:
        """Plug it into the steps and around the engine's calls."""
        probe.passing = self.passing
        for module, name, point in AFTER:
            setattr(module, name, self._wrapped(getattr(module, name), point))

    def _wrapped(self, call: Callable[..., Awaitable[Any]], point: str) -> Callable[..., Awaitable[Any]]:
        async def wrapped(*args: Any, **options: Any) -> Any:
            if point == "committed" and self.name == "sent" and self._due():
                threading.Timer(random.random() * SENDING, die).start()
            result = await call(*args, **options)
            self.passing(point)
            return result

        return wrapped

    def _due(self) -> bool:
        self._left -= 1
        return self._left == 0


class Ready:
    """Tells the runner that the engine serves."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def started(self, value: da.Engine | None = None) -> None:
        self._path.touch()


def block_once(*_: object) -> None:
    """The next step blocks the loop."""
    probe.block = BLOCK


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--dsn", required=True)
    parser.add_argument("--session-dsn")
    parser.add_argument("--node", required=True)
    parser.add_argument("--effects", type=Path, required=True)
    parser.add_argument("--ready", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kill-at", default="never")
    parser.add_argument("--drain", type=float, default=1.0)
    parser.add_argument("--modules", default="tests.chaos.machines")
    options = parser.parse_args()
    random.seed(options.seed)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.Formatter.converter = time.gmtime
    faulthandler.register(signal.SIGUSR2, all_threads=True)
    signal.signal(signal.SIGUSR1, block_once)
    point = KillPoint(options.kill_at)
    if options.kill_at != "never":
        point.install()
    probe.effects = EffectLog(options.effects)
    config = da.Config(
        dsn=options.dsn,
        session_dsn=options.session_dsn,
        node=options.node,
        modules=options.modules,
        queues={"work": 8, "keys": 4, "jobs": 6},
        prefetch=2,
        lease_ttl=world.LEASE,
        heartbeat_interval=world.LEASE / 4,
        reap_interval=world.REAP,
        dead_after=world.DEAD_AFTER,
        poll_interval=0.05,
        max_poll_interval=0.25,
        drain_timeout=options.drain,
        migrate=False,
        observers=[point.observe] if options.kill_at != "never" else [],
    )
    trio.run(partial(da.serve, config, task_status=Ready(options.ready)))


if __name__ == "__main__":
    main()
