"""What is done to worker processes: killed, stopped, told to go, blocked, given a wrong clock."""

from __future__ import annotations

import signal
from typing import Final

import trio
from tests.chaos.nemeses import nemesis
from tests.chaos.world import LEASE, World

KILLS: Final = {
    "picked": 10,
    "step": 15,
    "outcome": 15,
    "sent": 10,
    "committed": 10,
    "spawned": 2,
    "signalled": 2,
    "started": 2,
    "released": 1,
    "reaped": 1,
    "renewed": 4,
    "drain": 1,
}
"""Points for a SIGKILL, and how often each is passed at most before it (tests.chaos.points says what they are)."""
DRAINING: Final = frozenset({"released", "drain"})
"""Points that lie in a drain."""
STOPS: Final = {
    "picking": 10,
    "picked": 6,
    "step": 10,
    "outcome": 10,
    "sending": 8,
    "spawning": 2,
    "signalling": 2,
    "starting": 2,
    "renewing": 3,
    "reaping": 1,
    "expiring": 3,
}
"""Points for a SIGSTOP that outlasts the lease: what was true before it is not true after it."""


@nemesis("none", seconds=3.0)
async def none(world: World) -> None:
    """Nothing: what fails here is no fault's fault."""
    await trio.sleep_until(world.until)


@nemesis("kill")
async def kill(world: World) -> None:
    """SIGKILL at random times, one worker after the other; once all of them at the same time."""
    massacre = world.rng.random() < 0.5
    while await world.pause(0.3, 1.2):
        victims = [each for each in world.workers if each.serving]
        if massacre and len(victims) > 1 and trio.current_time() > world.until - 2:
            massacre = False
        elif victims:
            victims = [world.rng.choice(victims)]
        for worker in victims:
            world.kill(worker)


@nemesis("kill-points", workers=1)
async def kill_points(world: World) -> None:
    """Workers that kill themselves at a named point between a claim and the news of its commit."""
    deck = world.rng.sample(list(KILLS), len(KILLS))
    async with trio.open_nursery() as nursery:
        for _ in range(2):
            nursery.start_soon(_doom, world, deck)


async def _doom(world: World, deck: list[str]) -> None:
    """One doomed worker after the other, each for another point."""
    while not world.over:
        deck.append(point := deck.pop(0))
        count = world.rng.randint(1, KILLS[point])
        worker = await world.spawn(replace=False, kill_at=f"{point}:{count}")
        while worker.alive and not worker.serving and not world.over:
            await trio.sleep(0.02)
        await world.pause(0.1, 0.3)
        if point in DRAINING:
            world.terminate(worker)
        with trio.move_on_after(2.0):  # the point may be a rare one
            await worker.process.wait()
        if worker.alive:
            world.kill(worker)


@nemesis("stop")
async def stop(world: World) -> None:
    """SIGSTOP for longer than a lease, then SIGCONT: it wakes and believes that nothing happened."""
    async with trio.open_nursery() as nursery:
        for _ in range(2):
            nursery.start_soon(_stop_and_go, world)


async def _stop_and_go(world: World) -> None:
    while await world.pause(0.1, 0.6):
        if (worker := world.pick()) is None:
            continue
        world.stop(worker)
        # Mostly beyond the lease; at times it is back before its end, and still the owner. Not cut short by the end.
        beyond = world.rng.random() < 0.7
        await trio.sleep(LEASE * (world.rng.uniform(1.05, 1.6) if beyond else world.rng.uniform(0.6, 0.95)))
        world.resume(worker)


@nemesis("stop-points", workers=1)
async def stop_points(world: World) -> None:
    """Workers that stop at a named point for longer than a lease, and then do what they were about to do."""
    # A commit that is sent late is what the fence is for: it comes more often than the others.
    names = [*STOPS, "sending", "sending"]
    deck = world.rng.sample(names, len(names))
    async with trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(_stop_at, world, deck)


async def _stop_at(world: World, deck: list[str]) -> None:
    """One worker after the other that stops at another point."""
    while not world.over:
        deck.append(point := deck.pop(0))
        spec = f"{point}:{world.rng.randint(1, STOPS[point])}"
        worker = await world.spawn("--stop-at", spec, replace=False)
        while worker.alive and not (worker.ready.exists() or worker.is_stopped() or world.over):
            await trio.sleep(0.02)
        with trio.move_on_after(1.5):  # the point may be a rare one
            while not worker.stopped:
                await trio.sleep(0.02)
                if worker.is_stopped():
                    worker.stopped = True
                    world.count(f"stopped at {point}", worker.name)
        if worker.stopped:
            # It wakes while somebody else is at its work, or has just done it.
            await trio.sleep(LEASE * world.rng.uniform(1.0, 1.3))
            world.resume(worker)
            await trio.sleep(0.3)  # so that it does what it was about to do
        world.kill(worker, "SIGKILL")


@nemesis("term", worker_options=("--drain", "0.3"))
async def term(world: World) -> None:
    """SIGTERM while steps run; a second one, which cancels them; at times a SIGKILL in the middle of the drain."""
    while await world.pause(0.3, 1.0):
        if (worker := world.pick()) is None:
            continue
        world.terminate(worker)
        how = world.rng.random()
        if how < 0.3:
            await trio.sleep(world.rng.random() * 0.2)
            worker.send(signal.SIGTERM)
            world.count("second SIGTERM", worker.name)
        elif how < 0.6:
            await trio.sleep(world.rng.random() * 0.4)
            if worker.alive:
                world.kill(worker, "SIGKILL in a drain")


@nemesis("block")
async def block(world: World) -> None:
    """User code that blocks a worker's event loop for longer than a lease."""
    while await world.pause(0.3, 1.5):
        if (worker := world.pick()) is not None:
            world.block(worker)


@nemesis("clock")
async def clock(world: World) -> None:
    """Workers whose clocks are an hour off, one ahead, one behind; each is killed, and another one comes."""
    for hour in (3600, -3600):
        await world.spawn("--clock", str(hour))
        world.count("wrong clock", f"{hour:+} s")
    while await world.pause(0.8, 2.0):
        if (worker := world.pick()) is not None:
            world.kill(worker)


@nemesis("mixed", seconds=6.0)
async def mixed(world: World) -> None:
    """Kills, stops, drains, blocks and kill points, all at once."""
    async with trio.open_nursery() as nursery:
        for attack in (kill, stop, term, block, kill_points):
            nursery.start_soon(attack, world)
