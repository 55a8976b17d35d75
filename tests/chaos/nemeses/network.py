"""What is done to the network between workers, senders and Postgres: silence, delay, resets, lost messages."""

from __future__ import annotations

from typing import Final

import trio
from tests.chaos.nemeses import nemesis
from tests.chaos.world import LEASE, World
from tests.support.faults import Direction, Ending, FaultProxy

STATEMENTS: Final = (
    b"commit_outcomes",
    b"commit_parks",
    b"pick_instances",
    b"insert_instances",
    b"send_signals",
    b"renew_leases",
    b"release_claims",
    b"reap_claims",
    b"take_keys",
    b"hand_siblings",
    b"COMMIT",
)
"""Whose answer, or whose question, is lost. A statement's name is in every message that runs it."""
COMMANDS: Final = (b"cancel_instance", b"retry_instance")
"""The same, where somebody gives commands."""
MOMENT: Final = 1.0
"""Seconds in which a statement that is waited for should have been sent."""


def proxy_of(world: World) -> FaultProxy:
    """The way that everybody takes."""
    assert world.proxy is not None
    return world.proxy


@nemesis("blackhole", proxy=True, outages=True)
async def blackhole(world: World) -> None:
    """Nothing comes through, one way or both, and nobody is told; at times for longer than a lease."""
    proxy = proxy_of(world)
    directions: tuple[Direction, ...] = ("both", "to_server", "to_client")
    while await world.pause(0.2, 0.8):
        direction = world.rng.choice(directions)
        world.outage()
        world.log.sessions_lost("blackhole")
        proxy.blackhole(direction=direction)
        world.count("blackhole", direction)
        await trio.sleep(world.rng.choice((0.1, 0.5, LEASE * 1.5)) * world.rng.uniform(0.5, 1.0))
        proxy.heal()
        world.recovered()


@nemesis("delay", proxy=True)
async def delay(world: World) -> None:
    """Every message takes longer, by a millisecond or by a second; at times the line is thin, too."""
    proxy = proxy_of(world)
    while not world.over:
        seconds = world.rng.choice((0.001, 0.005, 0.02, 0.06, 0.3, 1.3))
        proxy.latency(seconds)
        world.count("delay", f"{seconds * 1000:g} ms")
        # Who reaps asks, hears and writes: three messages take four seconds, and no row can be taken back in time.
        slow = 3 * seconds > LEASE
        if slow:
            world.outage()
        if world.rng.random() < 0.3:
            proxy.throttle(200_000)
            world.count("thin line")
        await world.pause(0.3, 1.0)
        proxy.heal()
        if slow:
            world.recovered()


@nemesis("reset", proxy=True, outages=True)
async def reset(world: World) -> None:
    """Connections are reset, some or all; at times nobody gets in for a while."""
    proxy = proxy_of(world)
    while await world.pause(0.1, 0.6):
        world.log.sessions_lost("reset")
        if world.rng.random() < 0.3:
            world.outage()
            proxy.refuse()
            proxy.reset()
            world.count("refused")
            await trio.sleep(world.rng.uniform(0.1, 1.0))
            proxy.heal()
            world.recovered()
        elif world.rng.random() < 0.3:
            proxy.reset()
            world.count("reset", "all")
        else:
            for connection in world.rng.sample(proxy.connections, min(4, len(proxy.connections))):
                connection.reset()
                world.count("reset")


@nemesis("lost-messages", proxy=True, outages=True)
async def lost_messages(world: World) -> None:
    """The answer to a commit (pick, insert, signal, …) never arrives, though it is done; or the question is lost."""
    await _lose(world, STATEMENTS)


async def lost_commands(world: World) -> None:
    """The same, and half of the time to commands: theirs is repeated with its key."""
    await _lose(world, (*STATEMENTS, *COMMANDS * 5))


async def _lose(world: World, statements: tuple[bytes, ...]) -> None:
    proxy = proxy_of(world)
    endings: tuple[Ending, ...] = ("close", "reset")
    while not world.over:
        statement, how = world.rng.choice(statements), world.rng.choice(endings)
        world.log.sessions_lost("a message is lost")
        reply = world.rng.random() < 0.75
        if reply:
            proxy.lose_reply(statement, then=how)
        else:
            proxy.lose_request(statement, then=how)
        with trio.move_on_after(MOMENT):
            await proxy.wait_lost()
            world.count("lost reply" if reply else "lost request", statement.decode())
        proxy.heal()
        await world.pause(0.01, 0.2)


# I5: a step that is cancelled in the middle of ctx.signal stays in the driver for up to 4 s, which tries to get its
# connection back. Nothing of the user's runs meanwhile. I12: reapers that wait for an answer do so for 5 s, which is
# longer than these leases.
@nemesis("deaf", proxy=True, outages=True, seconds=6.0, forgives=frozenset({"I5", "I12"}))
async def deaf(world: World) -> None:
    """One connection falls silent for ever, in mid-statement or idle; all others work."""
    proxy = proxy_of(world)
    while not world.over:
        world.log.sessions_lost("a connection falls silent")
        if world.rng.random() < 0.5 and proxy.connections:
            world.rng.choice(proxy.connections).half_open()
            world.count("half-open")
        else:
            statement = world.rng.choice(STATEMENTS)
            proxy.lose_reply(statement, then="silence")
            with trio.move_on_after(MOMENT):
                await proxy.wait_lost()
                world.count("deaf", statement.decode())
            proxy.heal()
        await world.pause(0.5, 1.5)
