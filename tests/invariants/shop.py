"""Machines that use every feature of machines and write an effect log, for the tests of the checkers."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import durable_actors as da
import trio
from tests.invariants.effect_log import EffectLog

State = dict[str, Any]
Ctx = da.Context[State]


def define(log: EffectLog) -> SimpleNamespace:
    """Define the machines in the current registry."""
    jobs = _jobs(log)
    order = _order(log, jobs["ship"])
    return SimpleNamespace(**jobs, Order=order, Pack=_pack(log), Sleeper=_sleeper(log), Print=_print(log))


def _jobs(log: EffectLog) -> dict[str, Any]:
    @da.job(max_attempts=3, backoff=lambda _: 0.01)
    async def ship(args: State, ctx: Ctx) -> str:
        with log.run(ctx):
            await trio.sleep(0)
            if args.get("fails", 0) > ctx.attempt:
                raise ValueError("out of stock")
            return "shipped"

    @da.job
    def count(args: State, ctx: Ctx) -> int:
        """In a thread."""
        with log.run(ctx):
            time.sleep(0.002)
            return args["n"]

    @da.job(keep=0)
    async def glance(args: State, ctx: Ctx) -> None:
        """Its row is deleted by its commit."""
        with log.run(ctx):
            await trio.sleep(0)

    return {"ship": ship, "count": count, "glance": glance}


def _order(log: EffectLog, ship: Any) -> type[da.Machine[State]]:
    class Order(da.Machine[State]):
        """Runs ahead, retries, starts a child, schedules children (all, a quorum, until one fails), and joins them."""

        @da.step(initial=True)
        async def start(self, ctx: Ctx) -> da.Outcome:
            with log.run(ctx) as run:
                if ctx.attempt < 1:
                    return run.end(da.Retry({**ctx.state, "tried": 1}))
                return run.end(da.Next(self.pay, ctx.state))

        @da.step
        async def pay(self, ctx: Ctx) -> da.Outcome:
            with log.run(ctx) as run:
                await ctx.start_child(ship, key="bill", args={})
                return run.end(da.Next(self.spread))

        @da.step
        async def spread(self, ctx: Ctx) -> da.Outcome:
            with log.run(ctx) as run:
                children = [da.Child(ship, args={"fails": n}) for n in ctx.state["fails"]]
                if ctx.state.get(
                    "graph"
                ):  # each comes after the one before; one with a key is offered, never handed over
                    children = []
                    for i, n in enumerate(ctx.state["fails"]):
                        key = "graph" if i == 1 else None
                        children.append(
                            da.Child(ship, args={"fails": n}, after=children[-1:], partition_key=key)
                        )
                join = ctx.state.get("join", "all")
                return run.end(da.ScheduleChildren(self.close, children, join=join, timeout=30))

        @da.step
        async def close(self, ctx: Ctx) -> da.Outcome:
            with log.run(ctx) as run:
                return run.end(da.Done({"children": [child.status for child in ctx.children]}))

    return Order


def _pack(log: EffectLog) -> type[da.Machine[State]]:
    class Pack(da.Machine[State]):
        """Awaits until it has three parts, then one approval, whatever else is in its inbox."""

        @da.step(initial=True)
        async def start(self, ctx: Ctx) -> da.Outcome:
            with log.run(ctx) as run:
                if len(ctx.awaited) < 3:
                    return run.end(da.Await("part"))
                return run.end(da.Await("approved", then=self.close, timeout=30))

        @da.step
        async def close(self, ctx: Ctx) -> da.Outcome:
            with log.run(ctx) as run:
                if ctx.attempt < 1:
                    return run.end(da.Retry())
                others = [signal.id for signal in ctx.signals if signal.name == "noise"][:1]
                return run.end(da.Next(self.last, consume=others))

        @da.step
        async def last(self, ctx: Ctx) -> da.Outcome:
            with log.run(ctx) as run:
                return run.end(da.Done(len(ctx.signals)))

    return Pack


def _sleeper(log: EffectLog) -> type[da.Machine[State]]:
    class Sleeper(da.Machine[State]):
        """Awaits a signal that never comes, until its deadline; then fails, or sleeps for ever."""

        @da.step(initial=True)
        async def start(self, ctx: Ctx) -> da.Outcome:
            with log.run(ctx) as run:
                return run.end(da.Await("never", then=self.wake, timeout=0.1))

        @da.step
        async def wake(self, ctx: Ctx) -> da.Outcome:
            with log.run(ctx) as run:
                if ctx.state.get("long"):
                    await trio.sleep_forever()
                return run.end(da.Stop("nobody came"))

    return Sleeper


def _print(log: EffectLog) -> type[da.Machine[State]]:
    class Print(da.Machine[State]):
        """Takes a slot, and then goes on without it."""

        @da.step(initial=True, slot="press")
        async def start(self, ctx: Ctx) -> da.Outcome:
            with log.run(ctx) as run:
                return run.end(da.Next(self.fold))

        @da.step
        async def fold(self, ctx: Ctx) -> da.Outcome:
            with log.run(ctx) as run:
                return run.end(da.Done())

    return Print
