"""What actors and pools cost over bare Trio, as ratios within one run: `python -m bench.otp`.

The machine is shared and its speed changes by the second, so each round times every contender once,
in CPU time, and the ratio reported is the median of the rounds' ratios.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Awaitable, Callable

import attrs
import trio
from durable_actors import otp

CAST_LIMIT = 3.0
POOL_LIMIT = 2.5
BATCH = 100
QUEUE = 1000  # the default capacity of a mailbox


@attrs.frozen
class Add:
    n: int


@attrs.frozen
class Get(otp.Call[int]):
    pass


ADD = Add(1)


class Sink(otp.Actor[Add | Get]):
    """Does as little as possible: the message's way is measured, not the handler's work."""

    async def handle(self, msg: Add | Get) -> None:
        if msg is not ADD and isinstance(msg, Get):
            msg.reply(self.mailbox.processed)


async def channel_for(n: int) -> None:
    """What one writes without actors: `send_nowait`, and a task with ``async for``."""
    send, receive = trio.open_memory_channel[Add](BATCH)
    total = 0

    async def reader() -> None:
        nonlocal total
        async for msg in receive:
            total += msg.n

    msg = ADD
    async with trio.open_nursery() as nursery:
        nursery.start_soon(reader)
        sent = 0
        while sent < n:
            for _ in range(BATCH):
                send.send_nowait(msg)
            sent += BATCH
            while total < sent:
                await trio.lowlevel.checkpoint()
        nursery.cancel_scope.cancel()


async def bare_pair(n: int) -> None:
    """The floor: send_nowait and receive_nowait in one task, no handler, no switch."""
    send, receive = trio.open_memory_channel[Add](QUEUE)
    msg = ADD
    for _ in range(n // QUEUE):
        for _ in range(QUEUE):
            send.send_nowait(msg)
        for _ in range(QUEUE):
            receive.receive_nowait()
        await trio.lowlevel.checkpoint()


async def casts(n: int) -> None:
    address = otp.Address[Add | Get]("sink", capacity=QUEUE + 1)
    async with otp.open_tree(otp.Supervisor("bench", [otp.ActorChild(address, Sink)])):
        for i in range(n // QUEUE):
            for _ in range(QUEUE):
                address.cast(ADD)
            assert await address.call(Get()) == (i + 1) * (QUEUE + 1)  # all of them were handled


async def calls(n: int) -> None:
    address = otp.Address[Add | Get]("sink")
    async with otp.open_tree(otp.Supervisor("bench", [otp.ActorChild(address, Sink)])):
        for _ in range(n):
            await address.call(Get(), timeout=math.inf)


async def channel_round_trips(n: int) -> None:
    """A request and a reply over two bare channels: what a call must be compared with."""
    ask, asked = trio.open_memory_channel[Add](1)
    tell, told = trio.open_memory_channel[int](1)

    async def server() -> None:
        async for msg in asked:
            await tell.send(msg.n)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(server)
        for _ in range(n):
            await ask.send(ADD)
            await told.receive()
        nursery.cancel_scope.cancel()


async def noop() -> None:
    pass


async def start_soon(n: int) -> None:
    async with trio.open_nursery() as nursery:
        for _ in range(n // BATCH):
            for _ in range(BATCH):
                nursery.start_soon(noop)
            await trio.lowlevel.checkpoint()


async def pooled(n: int) -> None:
    pool = otp.Pool("pool", slots=BATCH, on_exit=lambda _task, _reason: None)
    async with otp.open_tree(otp.Supervisor("bench", [otp.PoolChild(pool)])):
        for _ in range(n // BATCH):
            for _ in range(BATCH):
                pool.start_nowait(noop)
            while len(pool):
                await trio.lowlevel.checkpoint()


async def snapshot_10k(n: int) -> None:
    """`n` snapshots of a tree with 10,000 pool tasks."""
    pool = otp.Pool("pool", slots=10_000)
    async with otp.open_tree(otp.Supervisor("bench", [otp.PoolChild(pool, shutdown="brutal")])) as tree:
        for _ in range(10_000):
            pool.start_nowait(trio.sleep_forever)
        await trio.lowlevel.checkpoint()
        begin = time.process_time()
        for _ in range(n):
            tree.snapshot()
        took = (time.process_time() - begin) / n
        begin = time.process_time()
        tree.snapshot(tasks=10_000)
        listed = time.process_time() - begin
    print(f"snapshot with 10,000 tasks    {took * 1e6:8.1f} us   listing them all {listed * 1e3:.0f} ms")


Contender = Callable[[int], Awaitable[None]]


async def once(fn: Contender, n: int) -> float:
    begin = time.process_time()
    await fn(n)
    return (time.process_time() - begin) / n


async def ratio(name: str, ours: Contender, bare: Contender, n: int, rounds: int) -> float:
    ratios: list[float] = []
    best = math.inf
    for _ in range(rounds):
        base = await once(bare, n)
        mine = await once(ours, n)
        ratios.append(mine / base)
        best = min(best, mine)
    median = statistics.median(ratios)
    print(f"{name:<29} {best * 1e6:8.2f} us   {median:5.2f} x {bare.__name__}")
    return median


async def main(rounds: int = 7) -> dict[str, float]:
    """Print the table; returns the ratios that have a limit."""
    print("contender                       best          ratio (median of rounds)")
    result = {
        "cast": await ratio("cast, handled", casts, bare_pair, 20_000, rounds),
        "pool": await ratio("pooled no-op task", pooled, start_soon, 5_000, rounds),
    }
    await ratio("cast, handled", casts, channel_for, 5_000, rounds)
    await ratio("call, replied", calls, channel_round_trips, 2_000, rounds)
    await snapshot_10k(100)
    print(f"limits: cast {CAST_LIMIT} x bare_pair, pool {POOL_LIMIT} x start_soon")
    return result


if __name__ == "__main__":
    found = trio.run(main)
    sys.exit(found["cast"] > CAST_LIMIT or found["pool"] > POOL_LIMIT)
