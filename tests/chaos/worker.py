"""A worker process of the chaos runs: `python -m tests.chaos.worker --dsn ... --node w1 --effects FILE --ready FILE`.

`--kill-at POINT:N` makes it kill itself (SIGKILL) when it passes a point for the N-th time, `--stop-at POINT:N` stop
itself (SIGSTOP) every N times; `tests.chaos.points` has the list. `--recover` makes it call `recover` again and again,
instead of serving.

SIGUSR1: the next step blocks the event loop for longer than a lease. SIGUSR2: the stacks of all threads, to the log.
"""

from __future__ import annotations

import argparse
import faulthandler
import logging
import os
import random
import signal
import time
from functools import partial
from pathlib import Path

import durable_actors as da
import trio
from tests.chaos import clock, releases, world
from tests.chaos.machines import LIMITS, probe
from tests.chaos.points import Point, die, stand_still
from tests.invariants.effect_log import EffectLog


class Ready:
    """Tells the runner that the engine serves."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def started(self, value: da.Engine | None = None) -> None:
        self._path.touch()


async def keep_recovering(dsn: str, ready: Ready) -> None:
    """What an operator may do at any time. Endless."""
    async with da.open_client(dsn) as client:
        ready.started()
        while True:
            await client.recover()
            await trio.sleep(world.REAP)


def block_once(*_: object) -> None:
    """The next step blocks the loop."""
    probe.block = world.BLOCK


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--dsn", required=True)
    parser.add_argument("--session-dsn")
    parser.add_argument("--node", required=True)
    parser.add_argument("--effects", type=Path, required=True)
    parser.add_argument("--ready", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kill-at")
    parser.add_argument("--stop-at")
    parser.add_argument("--drain", type=float, default=1.0)
    parser.add_argument(
        "--release", type=int, help="also the machines of this release (tests.chaos.releases)"
    )
    parser.add_argument("--retention", type=float, help="seconds for which it keeps what has ended")
    parser.add_argument("--history", type=int, help="moves that histories of live instances tell, at least")
    parser.add_argument("--recover", action="store_true", help="call recover, do not serve")
    parser.add_argument("--clock", type=float, default=0.0, help="seconds by which its wall clock is wrong")
    options = parser.parse_args()
    if options.clock:
        clock.skew(options.clock)
    random.seed(options.seed)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.Formatter.converter = time.gmtime
    faulthandler.register(signal.SIGUSR2, all_threads=True)
    signal.signal(signal.SIGUSR1, block_once)
    log = probe.effects = EffectLog(options.effects)
    points = [Point(options.kill_at, die)] if options.kill_at else []
    points += [Point(options.stop_at, partial(stand_still, log))] if options.stop_at else []
    if options.release is not None:
        releases.install(options.release)
    for point in points:
        point.install()
    if options.recover:
        trio.run(keep_recovering, options.dsn, Ready(options.ready))
        return
    age = options.retention
    kept = {} if age is None else {"retention": da.Retention(done=age, cancelled=age, failed=age, interval=1)}
    if options.history is not None:
        object.__setattr__(kept["retention"], "history", options.history)  # fewer than users may have
    config = da.Config(
        dsn=options.dsn,
        session_dsn=options.session_dsn,
        node=options.node,
        modules="tests.chaos.machines",
        queues={"work": 8, "keys": 4, "jobs": da.Queue(6, fair=True)},
        prefetch=2,
        lease_ttl=world.LEASE,
        heartbeat_interval=world.LEASE / 4,
        reap_interval=world.REAP,
        dead_after=world.DEAD_AFTER,
        poll_interval=0.05,
        max_poll_interval=0.25,
        drain_timeout=options.drain,
        migrate=False,
        journal=os.environ.get(world.JOURNAL, "auto"),
        limits=LIMITS,
        **kept,
        observers=[point.observe for point in points],
    )
    trio.run(partial(da.serve, config, task_status=Ready(options.ready)))


if __name__ == "__main__":
    main()
