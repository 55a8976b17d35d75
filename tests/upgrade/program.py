"""A program that both releases run: it uses only what the release before has.

`python tests/upgrade/program.py --dsn ... --node old --queue old --effects FILE --ready FILE`
"""

from __future__ import annotations

import argparse
import logging
from functools import partial
from pathlib import Path
from typing import Any

import durable_actors as da
import trio
from tests.invariants.effect_log import EffectLog

State = dict[str, Any]
Ctx = da.Context[State]

SETTINGS: dict[str, Any] = {
    "poll_interval": 0.05,
    "max_poll_interval": 0.1,
    "lease_ttl": 3.0,
    "heartbeat_interval": 0.5,
    "reap_interval": 0.2,
    "dead_after": 0.6,
    "pool_size": 4,
    "drain_timeout": 10.0,
}


class Probe:
    """What the process plugs into the steps."""

    log: EffectLog
    """Where steps tell what they do."""


@da.job(name="upgrade.leaf", max_attempts=3, backoff=lambda _: 0.01)
async def leaf(args: State, ctx: Ctx) -> str:
    """A child; fails as often as it is told to."""
    with Probe.log.run(ctx) as run:
        if ctx.attempt < args.get("fails", 0):
            raise ValueError("by design")
        run.end(da.Done())
        return str(da.__version__)


@da.job(name="upgrade.keyed")
async def keyed(args: State, ctx: Ctx) -> int:
    """One of several of a partition key; it takes a moment, so that another one could overlap."""
    with Probe.log.run(ctx) as run:
        await trio.sleep(0.005)
        run.end(da.Done())
        return int(args["n"])


@da.job(name="upgrade.hang")
async def hang(args: State, ctx: Ctx) -> str:
    """Never ends in the process that runs it first, unless that drains: then it ends in time."""
    with Probe.log.run(ctx) as run:
        if ctx.attempt == 0:
            folder = Path(args["folder"])
            (folder / "hangs").touch()
            while not (folder / "go on").exists():
                await trio.sleep(0.01)
        run.end(da.Done())
        return str(da.__version__)


class Family(da.Machine[State], name="upgrade.Family"):
    """A parent whose children run where its state says."""

    @da.step(initial=True)
    async def start(self, ctx: Ctx) -> da.Outcome:
        with Probe.log.run(ctx) as run:
            children = [
                da.Child(leaf, args={"fails": n % 2}, queue=queue)
                for n, queue in enumerate(ctx.state["queues"])
            ]
            return run.end(da.ScheduleChildren(self.gather, children))

    @da.step
    async def gather(self, ctx: Ctx) -> da.Outcome:
        with Probe.log.run(ctx) as run:
            found = [[child.status, child.result] for child in ctx.children]
            return run.end(
                da.Done({"by": da.__version__, "children": found, "counts": dict(ctx.children_counts)})
            )


class Talk(da.Machine[State], name="upgrade.Talk"):
    """Two of them, one per release, send each other five signals each, in turns."""

    @da.step(initial=True)
    async def start(self, ctx: Ctx) -> da.Outcome:
        with Probe.log.run(ctx) as run:
            if ctx.state["begins"]:
                await ctx.signal(ctx.state["to"], "said", 1)
            return run.end(da.Await("said", then=self.answer))

    @da.step
    async def answer(self, ctx: Ctx) -> da.Outcome:
        with Probe.log.run(ctx) as run:
            [heard] = [signal.payload for signal in ctx.awaited]
            state = {**ctx.state, "heard": [*ctx.state["heard"], heard]}
            if heard < 10:
                await ctx.signal(ctx.state["to"], "said", heard + 1)
            if heard >= 9:
                return run.end(da.Done({"by": da.__version__, "heard": state["heard"]}))
            return run.end(da.Await("said", state, then=self.answer, consume=ctx.awaited))


class Walk(da.Machine[State], name="upgrade.Walk"):
    """Five steps, each after a signal; each tells who ran it."""

    @da.step(initial=True)
    async def one(self, ctx: Ctx) -> da.Outcome:
        return self._go(ctx, self.two)

    @da.step
    async def two(self, ctx: Ctx) -> da.Outcome:
        return self._go(ctx, self.three)

    @da.step
    async def three(self, ctx: Ctx) -> da.Outcome:
        return self._go(ctx, self.four)

    @da.step
    async def four(self, ctx: Ctx) -> da.Outcome:
        return self._go(ctx, self.five)

    @da.step
    async def five(self, ctx: Ctx) -> da.Outcome:
        with Probe.log.run(ctx) as run:
            return run.end(da.Done([*ctx.state["by"], da.__version__]))

    def _go(self, ctx: Ctx, step: Any) -> da.Outcome:
        with Probe.log.run(ctx) as run:
            state = {"by": [*ctx.state["by"], da.__version__]}
            return run.end(da.Await("go", state, then=step, consume=ctx.awaited))


class Ready:
    """Tells the test that the engine serves."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def started(self, value: da.Engine | None = None) -> None:
        self._path.touch()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--dsn", required=True)
    parser.add_argument("--node", required=True)
    parser.add_argument("--queue", action="append", required=True)
    parser.add_argument("--effects", type=Path, required=True)
    parser.add_argument("--ready", type=Path, required=True)
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO)
    Probe.log = EffectLog(options.effects)
    config = da.Config(dsn=options.dsn, node=options.node, queues=dict.fromkeys(options.queue, 4), **SETTINGS)
    trio.run(partial(da.serve, config, task_status=Ready(options.ready)))


if __name__ == "__main__":
    main()
