"""What operators do: commands on random instances, while work goes on; alone, and during all other faults."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Final

import durable_actors as da
import trio
from psycopg.conninfo import make_conninfo
from tests.chaos.commander import ASKING, INSIST, PAUSED, STARVED, Command, Orders, decision, look
from tests.chaos.nemeses import Attack, database, nemesis, network, process, strangers
from tests.chaos.world import World
from tests.invariants.effect_log import read_effects
from tests.invariants.notes import ANSWERED

COMMANDERS: Final = 2
LOOK: Final = 0.2
"""Seconds between looks for instances that wait for what will never come."""
MOVES: Final = 8
"""Moves that the history of a live instance tells at least, where histories are shortened."""
KEPT: Final = 1.0
"""Seconds for which ended instances are kept, where they are forgotten soon."""


async def command(world: World) -> None:
    """Commanders, each a process of its own, until the time for faults is over and their last command is answered."""
    async with trio.open_nursery() as nursery:
        for number in range(COMMANDERS):
            nursery.start_soon(_commander, world, number)


async def _commander(world: World, number: int) -> None:
    name = f"commander{number}"
    effects, log = world.folder / f"{name}.jsonl", world.folder / f"{name}.log"
    arguments = [
        *("--dsn", make_conninfo(world.worker_dsn, application_name=name), "--direct", world.dsn),
        *("--seed", str(world.seed), "--seconds", f"{max(0.0, world.until - trio.current_time()):.2f}"),
        *("--number", str(number), "--effects", str(effects)),
    ]
    forked = await world.zygote.fork("tests.chaos.commander", arguments, log)
    try:
        with trio.move_on_at(world.until + INSIST + 5):
            if code := await forked.wait():
                world.fail(f"{name} ended with {code}: {log.read_text()[-2000:]}")
            answers = Counter(
                _told(dict(note.data)) for note in read_effects(effects) if note.kind == ANSWERED
            )
            for text, count in answers.items():
                world.count(text, number=count)
            return
        world.fail(f"{name} did not come to its end: {log.read_text()[-2000:]}")
    finally:
        if forked.poll() is None:
            forked.kill()
            with trio.CancelScope(shield=True):
                await forked.wait()


def _told(data: dict[str, object]) -> str:
    answer = data.get("answer")
    if "target" in data:
        return f"{data['command']} of a queue {data.get('refused') or 'done'}"
    return f"{data['command']} {data.get('refused') or (answer if isinstance(answer, str) else 'done')}"


async def end_the_starved(world: World) -> None:
    """Cancel who waits for signals that a command has kept from it, and decide what is asked, again and again."""
    keys = itertools.count()
    async with da.open_client(world.dsn, name=f"closing {world.seed}") as client:
        orders = Orders(client, world.log)
        while True:
            for (number,) in await trio.to_thread.run_sync(look, world.dsn, STARVED):
                await orders.give(Command(name="cancel", target=number, key=f"closing:{next(keys)}"))
            for (number,) in await trio.to_thread.run_sync(look, world.dsn, PAUSED):
                await orders.give(Command(name="resume", target=number, key=f"closing:{next(keys)}"))
            for number, kind in await trio.to_thread.run_sync(look, world.dsn, ASKING):
                name = "proceed" if kind == "pause" else "reject"
                await orders.give(decision(name, number, f"closing:{next(keys)}"))
            await trio.sleep(LOOK)


async def _with_commands(world: World, *attacks: Attack) -> None:
    async with trio.open_nursery() as nursery:
        for attack in (command, *attacks):
            nursery.start_soon(attack, world)


@nemesis("commands", afterwards=end_the_starved)
async def commands(world: World) -> None:
    """Cancels (also of whole trees), retries, reruns, pauses, of one or many; pauses of queues; decisions."""
    await command(world)


@nemesis(
    "commands-retention",
    retention=KEPT,
    worker_options=("--history", str(MOVES)),
    seconds=6.0,
    afterwards=end_the_starved,
)
async def commands_retention(world: World) -> None:
    """The same, while workers are killed that delete what ended a second ago, and shorten long histories."""
    await _with_commands(world, process.kill)


@nemesis("commands-mixed", seconds=6.0, afterwards=end_the_starved)
async def commands_mixed(world: World) -> None:
    """The same, during kills, stops, drains, blocks and kill points."""
    await _with_commands(world, process.mixed)


@nemesis("commands-network", proxy=True, outages=True, seconds=5.0, afterwards=end_the_starved)
async def commands_network(world: World) -> None:
    """The same, during kills and a fault of the network, by seed: lost messages, resets, silence, delay."""
    faults = (network.lost_commands, network.reset, network.blackhole, network.delay)
    await _with_commands(world, faults[world.seed % len(faults)], process.kill)


# I12: as for row-locks.
@nemesis(
    "commands-strangers", outages=True, seconds=5.0, afterwards=end_the_starved, forgives=frozenset({"I12"})
)
async def commands_strangers(world: World) -> None:
    """The same, during kills and what others do to the database, by seed: locked rows, ended sessions, refusals, …"""
    faults = (
        database.row_locks,
        database.terminate,
        strangers.parent_locks,
        database.refusals,
        strangers.cancel_storm,
        strangers.deferred,
        database.timeouts,
        strangers.ddl,
    )
    await _with_commands(world, faults[world.seed % len(faults)], process.kill)


@nemesis(
    "commands-restart",
    settings={"synchronous_commit": "on"},
    outages=True,
    seconds=6.0,
    afterwards=end_the_starved,
)
async def commands_restart(world: World) -> None:
    """The same, while Postgres, or one of its backends, is killed and started again."""
    await _with_commands(world, (database.restart, database.kill_backend)[world.seed % 2])
