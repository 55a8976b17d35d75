"""Soak: instances that await, signal one another and fan out, while their workers are killed.

    python -m tests.chaos.soak_signals --processes 8 --instances 20000 --seconds 120 --kill-every 1

A quarter of the instances are players, in pairs: after a short deadline each sends its partner a ball and awaits the
answer, for some rounds; then it starts three children and waits for their barrier. At the end every instance must be
done, every ball must have been counted once, and there must be exactly three children per player: a lost wake-up leaves
somebody parked, a signal consumed twice or never makes a sum wrong, a stale spawn leaves children too many.
"""

from __future__ import annotations

import argparse
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO, Any

import attrs
import durable_actors as da
import psycopg
import trio
from durable_actors._store.migrate import migrate
from durable_actors.testing.database import open_server

CHILDREN = 3
WORK = 0.3
"""Seconds that a step takes at most, twice."""
PATIENCE = 300.0
"""Seconds for the end, after the last kill."""
COUNT_REAPS = """
create sequence durable.reaps;
create function durable.note_reap() returns trigger language plpgsql as $$
begin perform nextval('durable.reaps'); return null; end $$;
create trigger note_reap after update on durable.gen_durable for each row
    when (new.crashes > old.crashes) execute function durable.note_reap();
"""
"""How many claims were taken back from killed workers: the proof that the kills have hit."""
LIVE = "select count(*) from durable.gen_durable where finished_at is null"


@attrs.frozen
class Player:
    """A player's state."""

    n: int
    rounds: int
    got: int = 0
    balls: int = 0


@da.job(name="soak.child", queue="children", max_attempts=10_000)
async def child(args: dict[str, int]) -> int:
    """A child tells its number."""
    await _work()
    return args["n"]


class Pair(da.Machine[Player], name="soak.Pair", queue="players"):
    """A player: even ones serve."""

    @da.step
    async def start(self, ctx: da.Context[Player]) -> da.Outcome:
        """Wait for nothing, to let a deadline fire."""
        return da.Await("never", then=self.serve, timeout=(ctx.id % 10) / 10)

    @da.step
    async def serve(self, ctx: da.Context[Player]) -> da.Outcome:
        """Send the first ball, or none."""
        if ctx.state.n % 2 == 0:
            await _throw(ctx, 1)
        return da.Await("ball", then=self.play)

    @da.step
    async def play(self, ctx: da.Context[Player]) -> da.Outcome:
        """Count the ball that came, and send it back.

        A run after a crash may be handed two: the partner has answered what the killed run had sent. The first call of
        `signal` is then the same as in that run, and not sent again.
        """
        state = ctx.state
        for ball in ctx.awaited:
            state = attrs.evolve(state, got=state.got + 1, balls=state.balls + ball.payload)
            if state.n % 2 or state.got < state.rounds:
                await _throw(ctx, ball.payload + 1)
        if state.got < state.rounds:
            return da.Await("ball", state, then=self.play, consume=ctx.awaited)
        family = [da.Child(child, args={"n": state.n * CHILDREN + k}) for k in range(CHILDREN)]
        return da.ScheduleChildren(self.finish, family, state)

    @da.step
    async def finish(self, ctx: da.Context[Player]) -> da.Outcome:
        """Tell the sums."""
        return da.Done({"balls": ctx.state.balls, "children": sum(each.result for each in ctx.children)})

    async def handle(self, error: Exception, ctx: da.Context[Player]) -> da.Outcome:
        """Nothing here fails by design, but for a worker's end."""
        if isinstance(error, da.StoreUnavailable | da.LeaseLost):
            return da.Retry(delay=0.1)
        return da.Stop(error)


async def _throw(ctx: da.Context[Player], ball: int) -> None:
    partner = ctx.state.n ^ 1
    await _work()
    try:
        await ctx.signal(f"player:{partner}", "ball", ball)
    except da.NoTarget:
        # A run before this one has sent the last ball, its worker was killed, and the partner has ended since.
        if ctx.attempt == 0:
            raise
    await _work()


async def _work() -> None:
    """Steps that take a moment, before and after what they send: a kill must hit them in between."""
    await trio.sleep(random.random() * WORK)


# -- processes


def serve(dsn: str) -> None:
    """One worker: short leases, quick eyes."""
    trio.run(
        da.serve,
        da.Config(
            dsn=dsn,
            queues={"players": 40, "children": 40},
            lease_ttl=3,
            heartbeat_interval=0.5,
            dead_after=1.5,
            reap_interval=1,
            poll_interval=0.2,
            max_poll_interval=0.5,
            migrate=False,
        ),
    )


@attrs.define
class Workers:
    """The worker processes of a soak, each with a log of its own."""

    dsn: str
    logs: Path
    running: list[tuple[subprocess.Popen[bytes], IO[bytes]]] = attrs.field(factory=list)
    kills: int = 0
    deaths: list[str] = attrs.field(factory=list)

    def start(self) -> None:
        log = (self.logs / f"{time.monotonic_ns()}.log").open("wb")
        command = [sys.executable, "-m", "tests.chaos.soak_signals", "--worker", self.dsn]
        self.running.append((subprocess.Popen(command, stdout=log, stderr=log), log))

    def kill_one(self) -> None:
        process, log = self.running.pop(random.randrange(len(self.running)))
        self._note_death(process, log)
        process.kill()
        process.wait()
        log.close()
        self.kills += 1
        self.start()

    def replace_dead(self) -> None:
        for entry in list(self.running):
            if entry[0].poll() is not None:
                self.running.remove(entry)
                self._note_death(*entry)
                entry[1].close()
                self.start()

    def _note_death(self, process: subprocess.Popen[bytes], log: IO[bytes]) -> None:
        if process.poll() is not None:
            self.deaths.append(f"exit {process.returncode}: {Path(log.name).read_text()[-2000:]}")

    def stop(self) -> None:
        for process, log in self.running:
            process.kill()
            process.wait()
            log.close()


async def insert(dsn: str, players: int, rounds: int) -> None:
    """All of them, before anybody plays."""
    async with da.open_client(dsn) as client:
        rows: list[Any] = [{"state": Player(n, rounds), "unique_key": f"player:{n}"} for n in range(players)]
        for first in range(0, players, 5000):
            await client.insert_many(Pair, rows[first : first + 5000])


def soak(dsn: str, options: argparse.Namespace) -> int:
    """Run it; return the exit code."""
    players = options.instances // (1 + CHILDREN) // 2 * 2
    trio.run(insert, dsn, players, options.rounds)
    with tempfile.TemporaryDirectory() as folder, psycopg.connect(dsn, autocommit=True) as db:
        workers = Workers(dsn, Path(folder))
        began = time.monotonic()
        next_kill = began + options.kill_every
        try:
            for _ in range(options.processes):
                workers.start()
            while True:
                now = time.monotonic()
                [live] = db.execute(LIVE).fetchone() or (0,)
                if not live or now > began + options.seconds + PATIENCE:
                    break
                workers.replace_dead()
                if now < began + options.seconds and now >= next_kill:
                    workers.kill_one()
                    next_kill += options.kill_every
                time.sleep(0.1)
            seconds = time.monotonic() - began
        finally:
            workers.stop()
        return report(db, players, options.rounds, seconds, workers)


def report(db: psycopg.Connection, players: int, rounds: int, seconds: float, workers: Workers) -> int:
    """Compare what is with what must be; print both."""
    found = db.execute(
        "select count(*), count(*) filter (where status = 'done'), count(*) filter (where fsm = 'soak.child'),"
        " sum((result->>'balls')::int) filter (where fsm = 'soak.Pair'),"
        " sum((result->>'children')::int) filter (where fsm = 'soak.Pair'),"
        " (select count(*) from durable.signals),"
        " (select case when is_called then last_value else 0 end from durable.reaps), sum(rev)"
        " from durable.gen_durable"
    ).fetchone()
    assert found is not None
    total, done, children, balls, sums, letters, reaps, revisions = found
    count = players * CHILDREN
    checks = {
        "instances": (total, players + count),
        "done": (done, players + count),
        "children": (children, count),
        "balls": (balls, players // 2 * sum(range(1, 2 * rounds + 1))),
        "children's sum": (sums, count * (count - 1) // 2),
        "signals left": (letters, 0),
    }
    for name, (is_, must) in checks.items():
        print(f"{name:>16}: {is_!s:>10} {'as it must be' if is_ == must else f'BUT MUST BE {must}'}")
    print(
        f"{'kills':>16}: {workers.kills:>10} in {seconds:.1f} s; workers that died by themselves: {len(workers.deaths)}"
    )
    print(f"{'moves':>16}: {revisions!s:>10} ({float(revisions) / seconds:.0f} per second)")
    print(f"{'claims reaped':>16}: {reaps!s:>10}")
    for death in workers.deaths[:3]:
        print(death)
    if done != total:
        for row in db.execute(
            "select status, step, count(*), min(last_error) from durable.gen_durable"
            " where status <> 'done' group by 1, 2 order by 1, 2"
        ):
            print("not done:", *row)
    return int(any(is_ != must for is_, must in checks.values()) or bool(workers.deaths))


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--instances", type=int, default=20_000)
    parser.add_argument("--seconds", type=float, default=120, help="how long workers are killed")
    parser.add_argument("--kill-every", type=float, default=1, help="seconds between kills")
    parser.add_argument("--rounds", type=int, default=3, help="balls that each player catches")
    parser.add_argument("--dsn", help="a server on which a database may be made; default: an own server")
    parser.add_argument("--worker", metavar="DSN", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker is not None:
        serve(options.worker)
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # take the workers with us
    with open_server(dsn=options.dsn) as server, server.database() as dsn:
        trio.run(migrate, dsn)
        with psycopg.connect(dsn, autocommit=True) as db:
            db.execute(COUNT_REAPS)
        return soak(dsn, options)


if __name__ == "__main__":
    sys.exit(main())
