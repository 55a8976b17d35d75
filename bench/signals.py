"""7. Signals: how many a second, and how long from the call of signal to the first line of the woken step."""

from __future__ import annotations

import time

import durable_actors as da
import trio

from bench.contest import Figure, Progress, Sample
from bench.latency import Yardstick, quantiles
from bench.meter import Meter
from bench.server import Server
from bench.workload import BEST, QUEUE, engine

_woken: trio.MemorySendChannel[float]


class Waiter(da.Machine[dict], name="bench:waiter", queue=QUEUE):  # type: ignore[type-arg]
    @da.step(initial=True)
    async def wait(self, ctx: da.Context[dict]) -> da.Outcome:  # type: ignore[type-arg] # noqa: ARG002
        return da.Await("go", then=self.went)

    @da.step
    async def went(self, ctx: da.Context[dict]) -> da.Outcome:  # type: ignore[type-arg] # noqa: ARG002
        _woken.send_nowait(time.perf_counter())
        return da.Done()


async def park(count: int) -> list[int]:
    """Insert instances and wait until all of them await their signal."""
    found: list[int] = []
    for start in range(0, count, 1000):
        ids = await da.insert_many(Waiter, [{"state": {}} for _ in range(min(1000, count - start))])
        found += [number for number in ids if number is not None]
    for number in reversed(found):
        while (await da.inspect(number)).status != "awaiting_signal":
            await trio.sleep(0.002)
    return found


async def wake(dsn: str, count: int) -> tuple[Sample, Sample]:
    global _woken
    _woken, receive = trio.open_memory_channel[float](10)
    yardstick = Yardstick(dsn)
    seconds: list[float] = []
    async with engine(dsn, {"concurrency": 10}):
        for n in range(count + 10):
            (number,) = await park(1)
            await trio.sleep(0.01)
            begin = time.perf_counter()
            await da.signal(number, "go")
            took = await receive.receive() - begin
            await trio.sleep(0.01)
            yardstick.take()
            if n >= 10:
                seconds.append(took)
    yardstick.close()
    return quantiles(seconds), quantiles(yardstick.seconds[10:])


async def flood(server: Server, dsn: str, count: int, *, many: bool) -> Sample:
    """Signals to parked instances until the last of them has woken and ended."""
    global _woken
    _woken, receive = trio.open_memory_channel[float](count)
    meter = Meter(dsn, server.postmaster)

    async def some(ids: list[int]) -> None:
        for number in ids:
            await da.signal(number, "go")

    async with engine(dsn, BEST, pool_size=12):
        ids = await park(count)
        meter.start()
        if many:
            for start in range(0, count, 500):
                await da.signal_many([{"target": n, "name": "go"} for n in ids[start : start + 500]])
        else:
            async with trio.open_nursery() as nursery:
                for lane in range(50):
                    nursery.start_soon(some, ids[lane::50])
        for _ in range(count):
            await receive.receive()
        found = meter.stop(count)
    meter.close()
    return found


def run(server: Server, progress: Progress, *, quick: bool) -> list[Figure]:
    count, rounds = (60, 1) if quick else (200, 2)
    load = 500 if quick else 3_000
    samples: dict[str, list[Sample]] = {
        "signal → step": [], "one commit": [], "signal, 50 tasks, woken and run": [], "signal_many, woken and run": [],
    }  # fmt: skip
    for number in range(rounds):
        progress(f"signals ({number + 1}/{rounds})")
        with server.database() as dsn:
            ours, commit = trio.run(wake, dsn, count)
        samples["signal → step"].append(ours)
        samples["one commit"].append(commit)
        for name, many in (("signal, 50 tasks, woken and run", False), ("signal_many, woken and run", True)):
            with server.database() as dsn:
                samples[name].append(trio.run(_flood, server, dsn, load, many))
    return [Figure.of("signals", name, "signal", each) for name, each in samples.items()]


async def _flood(server: Server, dsn: str, count: int, many: bool) -> Sample:
    return await flood(server, dsn, count, many=many)
