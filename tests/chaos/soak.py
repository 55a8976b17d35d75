"""Soak: a steady load with kills for half an hour; what must stay flat is measured, drawn and judged.

    make soak                          30 minutes; SOAK_SECONDS=300 shortens it
    python -m tests.chaos.soak 300     the same, in the benchmarks' environment (matplotlib); Linux only

Four workers serve the chaos runs' workload (retries, awaits, signals, deadlines, children, partition and unique keys,
jobs). Two of them are killed again and again; the other two survive, and must not grow. At the end everything that was
sent must have ended as it must. Ctrl-C ends it at once, with a report of what there is.

Exit code: 0 all flat · 1 something grows, was lost, or was left behind · 130, 143 interrupted.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import attrs
import durable_actors as da
import psycopg
import trio
from durable_actors._client import Client
from durable_actors._postgres.embedded import server as embedded
from durable_actors._store.migrate import migrate
from durable_actors.testing.database import SERVER_SETTINGS, throwaway_directory
from tests.chaos.judge import find_leftovers, judge_sums
from tests.chaos.run import dismiss, settle, wait_serving
from tests.chaos.sender import Sender
from tests.chaos.soak_gauges import Gauges, Survivor
from tests.chaos.soak_plots import draw
from tests.chaos.soak_verdicts import Sample, as_json, judge, table
from tests.chaos.workload import SENDERS, Plan, make_plan
from tests.chaos.world import Place, World
from tests.chaos.zygote import Zygote, open_zygote
from tests.invariants.effect_log import EffectLog

SECONDS: Final = 1800.0
WORKERS: Final = 4
SURVIVORS: Final = 2
EPOCH: Final = 5.0
"""Seconds over which one plan's work is sent; then comes the next, by another seed."""
CROWD: Final = 2000
"""Live instances beyond which senders wait: a machine that is too slow must not look like a leak."""
SETTLE: Final = 120.0
TOLD: Final = 5.0
"""Seconds between lines of progress, at least."""


@attrs.define
class Soak:
    """What came of it, so far."""

    seconds: float
    """How long it is to be."""
    scale: float
    kill_every: float
    seed: int
    samples: list[Sample] = attrs.field(factory=list)
    plans: list[Plan] = attrs.field(factory=list)
    """What was sent, to the end of each."""
    failures: list[str] = attrs.field(factory=list)
    kills: int = 0
    interrupted: int = 0
    """The signal that ended it early."""
    checked: bool = False
    """Whether the sums were compared."""

    @property
    def sample_every(self) -> float:
        """180 samples, but not more than one a second."""
        return max(1.0, self.seconds / 180)

    @property
    def settings(self) -> dict[str, str]:
        """The server's. Autovacuum comes as often, for the run's length, as once a minute in half an hour."""
        return {
            **SERVER_SETTINGS,
            "shared_preload_libraries": "pg_stat_statements",
            "autovacuum_naptime": f"{max(1, min(60, round(self.seconds / 30)))}s",
        }


def renamed(plan: Plan, epoch: int) -> Plan:
    """The same work under other keys: every epoch has its own instances. Pure."""
    inserts = {}
    for each in plan.inserts:
        state = dict(each.state)
        if "target" in state:
            state["target"] = f"{epoch}/{state['target']}"
        inserts[each.key] = attrs.evolve(each, key=f"{epoch}/{each.key}", state=state)
    sends = [
        attrs.evolve(
            each,
            target=f"{epoch}/{each.target}",
            dedup_key=f"{epoch}/{each.dedup_key}",
            start=None if each.start is None else inserts[each.start.key],
        )
        for each in plan.sends
    ]
    return Plan(tuple(inserts.values()), tuple(sends))


class Neighbour(Sender):
    """A sender that shares its process with the others: so its client needs a name."""

    async def _connect(self) -> Client:
        client = da.open_client(self._dsn, name=f"sender{self._number}")
        self._client = await self._stack.enter_async_context(client)
        return self._client


# -- what goes on at the same time


async def load(soak: Soak, world: World) -> None:
    """One epoch after the other, until the time is over."""
    began = trio.current_time()
    epoch = 0
    while not world.over:
        plan = renamed(make_plan(soak.seed + epoch, EPOCH, scale=soak.scale), epoch)
        async with trio.open_nursery() as nursery:
            for number in range(SENDERS):
                sender = Neighbour(number, world.worker_dsn, world.folder / f"sender{number}.acks")
                nursery.start_soon(sender.run, plan)
        soak.plans.append(plan)
        epoch += 1
        while soak.samples and soak.samples[-1].values["live instances"] > CROWD and not world.over:
            await trio.sleep(soak.sample_every)
        await trio.sleep_until(min(began + epoch * EPOCH, world.until))


async def kill(soak: Soak, world: World, survivors: list[Survivor]) -> None:
    """One that is no survivor, every so often."""
    spared = {each.name for each in survivors}
    while await world.pause(soak.kill_every * 0.5, soak.kill_every * 1.5):
        mortals = [each for each in world.workers if each.serving and each.name not in spared]
        if mortals:
            world.kill(world.rng.choice(mortals))
            soak.kills += 1


async def measure(soak: Soak, world: World, gauges: Gauges) -> None:
    """Read everything every so often, and tell about it."""
    began = trio.current_time()
    told = 0.0
    while not world.over:
        values = await trio.to_thread.run_sync(gauges.read)
        now = trio.current_time() - began
        if soak.samples:
            last = soak.samples[-1]
            steps = values["moves"] - last.values["moves"]
            values["moves per second"] = steps / (now - last.at)
        soak.samples.append(Sample(now, values))
        if now >= told:
            told = now + TOLD
            print(progress(soak, now, values), flush=True)
        await trio.sleep_until(min(began + len(soak.samples) * soak.sample_every, world.until))


def progress(soak: Soak, now: float, values: Mapping[str, float]) -> str:
    """One line."""
    memory = "/".join(f"{value:.0f}" for name, value in values.items() if name.startswith("memory "))
    return (
        f"{now:5.0f} s of {soak.seconds:.0f}  {values.get('moves per second', 0):4.0f} moves/s"
        f"  {values['live instances']:4.0f} live of {values['rows']:,.0f}  {soak.kills} kills  {memory} MB"
        f"  {values['connections']:.0f} connections  {values['dead rows of gen_durable']:,.0f} dead"
        f"  pick {values['pages per pick of 20']:.0f} pages {values['CPU per pick of 20']:.2f} ms"
    )


async def listen(soak: Soak, world: World, scope: trio.CancelScope) -> None:
    """The first signal ends the load; a second one is for Python."""
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as received:
        async for number in received:
            # Ctrl-C goes to the workers, too: whoever ends now was told to.
            world.closing = True
            soak.interrupted = number
            scope.cancel()
            return


# -- from beginning to end


async def run(soak: Soak, place: Place, folder: Path) -> None:
    """The whole of it; afterwards nobody is left."""
    await migrate(place.dsn)
    async with open_zygote() as zygote, trio.open_nursery() as nursery:
        world = World(
            seed=soak.seed,
            rng=random.Random(soak.seed),
            folder=folder,
            place=place,
            worker_options=("--effects", os.devnull),  # half an hour of effects is a gigabyte
            nursery=nursery,
            zygote=zygote,
            log=EffectLog(folder / "world.jsonl"),
        )
        with trio.CancelScope() as scope:
            nursery.start_soon(listen, soak, world, scope)
            try:
                await live(soak, world)
            except* (
                OSError,
                psycopg.Error,
                trio.TooSlowError,
            ) as group:  # the report tells what there was before it
                soak.failures += [repr(each) for each in group.exceptions]
            finally:
                await end(world, zygote)
                soak.failures += world.failures
        nursery.cancel_scope.cancel()
    if not soak.interrupted:
        soak.failures += await find_leftovers(place.dsn)
        whole = Plan(
            tuple(each for plan in soak.plans for each in plan.inserts),
            tuple(each for plan in soak.plans for each in plan.sends),
        )
        soak.failures += await trio.to_thread.run_sync(judge_sums, place.dsn, whole, folder)
        soak.checked = True


async def live(soak: Soak, world: World) -> None:
    """Load, kills and readings; then all work must end, and the workers go."""
    for _ in range(WORKERS):
        await world.spawn()
    await wait_serving(world, WORKERS)
    survivors = [Survivor(each.name, each.process.pid) for each in world.workers[:SURVIVORS]]
    gauges = await trio.to_thread.run_sync(Gauges, world.dsn, survivors)
    try:
        world.until = trio.current_time() + soak.seconds
        async with trio.open_nursery() as acts:
            acts.start_soon(load, soak, world)
            acts.start_soon(kill, soak, world, survivors)
            acts.start_soon(measure, soak, world, gauges)
    finally:
        gauges.close()
    print("The load has ended; waiting for the end of all work.", flush=True)
    soak.failures += await settle(world, SETTLE)
    soak.failures += await dismiss(world)


async def end(world: World, zygote: Zygote) -> None:
    """Whoever is still there goes now."""
    world.closing = True
    with trio.CancelScope(shield=True):
        for worker in world.workers:
            if worker.alive:
                worker.process.kill()
        for worker in world.workers:
            await worker.process.wait()
        await zygote.bury()
    world.log.close()


def report(soak: Soak, folder: Path) -> int:
    """Tell, draw, write; return the exit code."""
    verdicts = [each for each in judge(soak.samples) if each.measure != "moves"]
    text = table(verdicts)
    last = soak.samples[-1] if soak.samples else Sample(0.0, {})
    grows = [each.measure for each in verdicts if each.flat is False]
    short = [each.measure for each in verdicts if each.word == "too short"]
    summary = (
        f"{last.at:.0f} s, {last.values.get('moves', 0):,.0f} moves,"
        f" {last.values.get('rows', 0):,.0f} rows, {soak.kills} workers killed."
    )
    told = [
        summary,
        "Finished rows stay (there is no retention): the table grows with them, the cost of a pick must not.",
        *(
            ["Interrupted: what was sent was not compared with what became of it."]
            if soak.interrupted
            else []
        ),
        *(["Everything that was sent has ended as it must."] if soak.checked and not soak.failures else []),
        *(f"FAILED: {each}" for each in soak.failures[:10]),
        *([f"Too short to judge: {', '.join(short)}."] if short else []),
        f"NOT FLAT: {', '.join(grows)}." if grows else "Nothing that was judged grows.",
    ]
    folder.mkdir(parents=True, exist_ok=True)
    files = draw(soak.samples, verdicts, folder) if soak.samples else []
    files += [folder / "soak.md", folder / "soak.json"]
    files[-2].write_text(f"# Soak\n\n{text}\n\n" + "\n\n".join(told) + "\n")
    files[-1].write_text(json.dumps(_as_json(soak, [as_json(each) for each in verdicts]), indent=1) + "\n")
    print("", text, "", *told, "", *files, sep="\n", flush=True)
    if soak.interrupted:
        return 128 + soak.interrupted
    return int(bool(grows or soak.failures or short or not soak.samples))


def _as_json(soak: Soak, verdicts: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "seconds": soak.seconds,
        "seed": soak.seed,
        "scale": soak.scale,
        "kill_every": soak.kill_every,
        "kills": soak.kills,
        "interrupted": soak.interrupted,
        "settings": soak.settings,
        "failures": soak.failures,
        "verdicts": verdicts,
        "samples": [{"at": round(each.at, 2), **each.values} for each in soak.samples],
    }


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.chaos.soak",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("seconds", type=float, nargs="?", default=SECONDS, help="how long (default 1800)")
    parser.add_argument(
        "--scale", type=float, default=1.0, help="how much work, 1.0 is about 100 commits a second"
    )
    parser.add_argument(
        "--kill-every", type=float, default=5.0, help="seconds between kills, about (default 5)"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("bench/results/soak"), help="folder of the report")
    options = parser.parse_args()
    if not Path("/proc/self/status").exists():
        parser.error("needs /proc: Linux")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # before the load begins; then `listen` does it
    soak = Soak(options.seconds, options.scale, options.kill_every, options.seed)
    folder = Path(tempfile.mkdtemp(prefix="durable-soak-"))
    directory = throwaway_directory(f"soak-{os.getpid()}-{time.monotonic_ns()}")
    print(f"Soak of {soak.seconds:.0f} s with {WORKERS} workers; Ctrl-C ends it with a report.", flush=True)
    try:
        with embedded.start(directory, throwaway=True, settings=soak.settings) as server:
            trio.run(partial(run, soak, Place(server.dsn(), server), folder))
    finally:
        shutil.rmtree(folder)
    return report(soak, options.out)


if __name__ == "__main__":
    sys.exit(main())
