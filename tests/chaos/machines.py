"""The machines of the chaos runs. What each must come to is known when it is inserted (`tests.chaos.workload`).

Every step begins and ends in the effect log, a file outside of the database: what a step did is compared with what was
committed. Steps take a moment, so that faults hit them in between; a few take longer than a lease.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, Literal

import durable_actors as da
import psycopg
import trio
from durable_actors.machine import ENDED
from tests.chaos.graphs import Task, from_state
from tests.invariants.effect_log import EffectLog, Run

LONG = 3.0
"""Seconds of a step that outlives its first lease."""
LATER = 0.5
"""Seconds until some children are due."""
NAP = 0.1
"""Seconds of one nap of it."""


class Probe:
    """What a worker process plugs into the steps."""

    effects: EffectLog | None = None
    """Where steps tell what they do."""
    passing: Callable[[str], None] | None = None
    """Called with the name of every kill point that lies in a step."""
    block: float = 0.0
    """Seconds for which the next step blocks the event loop, once."""


probe = Probe()

State = dict[str, Any]
Ctx = da.Context[State]


class Boom(Exception):
    """A step's own failure, by design."""


@contextmanager
def effect(ctx: Ctx) -> Generator[Run]:
    """The outside world during a step. Its end is noted however the step ends, unless the process does."""
    log = probe.effects
    assert log is not None
    with log.run(ctx) as run:
        if probe.passing is not None:
            probe.passing("step")
        seconds, probe.block = probe.block, 0.0
        if seconds:
            log.paused()
            time.sleep(seconds)  # user code that blocks the loop: nothing of this worker moves
            log.resumed()
        yield run


async def moment(ctx: Ctx) -> None:
    """Take a moment: mostly a short one."""
    if ctx.state.get("long") and ctx.visit == 1 and ctx.attempt == 0:
        for _ in range(round(LONG / NAP)):  # many naps: who is stopped in one still has the others before it
            await trio.sleep(NAP)
    await trio.sleep(random.choice((0.0, 0.01, 0.02, 0.05, 0.1, 0.4)) * random.random())


class Base(da.Machine[State], name="chaos.Base", queue="work"):
    """Errors by design are tried again; any other ends the instance, and so the run."""

    @da.step
    async def start(self, ctx: Ctx) -> da.Outcome:
        """Nothing here is inserted."""
        return da.Done()

    async def handle(self, error: Exception, ctx: Ctx) -> da.Outcome:
        return da.Retry(delay=0.02) if isinstance(error, Boom) else da.Stop(error)


class Chain(Base, name="chaos.Chain", queue="work"):
    """Hops, one of them in a thread; some fail at first."""

    @da.step
    async def start(self, ctx: Ctx) -> da.Outcome:
        with effect(ctx) as run:
            await moment(ctx)
            return run.end(self._hop(ctx))

    @da.step
    def labour(self, ctx: Ctx) -> da.Outcome:
        """The same, in a thread that nobody can cancel."""
        with effect(ctx) as run:
            time.sleep(0.05 * random.random())
            return run.end(self._hop(ctx))

    def _hop(self, ctx: Ctx) -> da.Outcome:
        hops, fails, path = ctx.state["hops"], ctx.state["fails"], ctx.state["path"]
        if ctx.attempt < fails[len(path)]:
            raise Boom
        path = [*path, len(path)]
        if len(path) == hops:
            return da.Done(path)
        state = {**ctx.state, "path": path}
        return da.Next(self.labour if len(path) in ctx.state["threads"] else self.start, state)


class Tally(Base, name="chaos.Tally", queue="work"):
    """Counts ticks, then tocks; both may come at any time. Each must be counted once."""

    @da.step
    async def start(self, ctx: Ctx) -> da.Outcome:
        with effect(ctx) as run:
            return run.end(da.Await("tick", then=self.count, timeout=ctx.state["timeout"]))

    @da.step
    async def count(self, ctx: Ctx) -> da.Outcome:
        """Add what came; a time-out is a wake like any other."""
        with effect(ctx) as run:
            await moment(ctx)
            state = dict(ctx.state)
            for signal in ctx.awaited:
                state[signal.name] += 1
                state["sum"] += signal.payload
            name = "tick" if state["tick"] < state["ticks"] else "tock"
            if name == "tock" and state["tock"] == state["tocks"]:
                return run.end(da.Done({each: state[each] for each in ("tick", "tock", "sum")}))
            return run.end(
                da.Await(name, state, then=self.count, timeout=state["timeout"], consume=ctx.awaited)
            )


class Pack(Base, name="chaos.Pack", queue="work"):
    """Waits in one step until a pack of signals is complete."""

    @da.step
    async def start(self, ctx: Ctx) -> da.Outcome:
        with effect(ctx) as run:
            if len(ctx.awaited) < ctx.state["size"]:
                return run.end(da.Await("card"))
            await moment(ctx)
            return run.end(da.Done(sorted(signal.payload for signal in ctx.awaited)))


class Sleeper(Base, name="chaos.Sleeper", queue="work"):
    """A deadline that must fire, since nobody sends."""

    @da.step
    async def start(self, ctx: Ctx) -> da.Outcome:
        with effect(ctx) as run:
            return run.end(da.Await("never", then=self.wake, timeout=ctx.state["timeout"]))

    @da.step
    async def wake(self, ctx: Ctx) -> da.Outcome:
        with effect(ctx) as run:
            await moment(ctx)
            return run.end(da.Done(len(ctx.awaited)))


@da.job(name="chaos.job", queue="jobs", max_attempts=10_000, backoff=lambda _: 0.02)
async def job(args: State, ctx: Ctx) -> int:
    """Fails as often as it is told to, then tells its number."""
    with effect(ctx) as run:
        await moment(ctx)
        if ctx.attempt < args.get("fails", 0):
            raise Boom
        run.end(da.Done())
        return int(args["n"])


@da.job(name="chaos.hopeless", queue="jobs", max_attempts=3, backoff=lambda _: 0.02)
async def hopeless(args: State, ctx: Ctx) -> None:
    """Fails for good, by exhaustion or by its own word."""
    with effect(ctx):
        await moment(ctx)
        if args["cancel"]:
            raise da.Cancel("enough")
        raise Boom


class Family(Base, name="chaos.Family", queue="work"):
    """Children, some of whom fail; a barrier for all or for some of them; then a second generation."""

    @da.step
    async def start(self, ctx: Ctx) -> da.Outcome:
        with effect(ctx) as run:
            await moment(ctx)
            family, state = list(self._children(ctx.state)), ctx.state
            join, deadline = state.get("quorum", "all"), state.get("deadline")
            return run.end(da.ScheduleChildren(self.gather, family, join=join, timeout=deadline))

    @da.step
    async def gather(self, ctx: Ctx) -> da.Outcome:
        """What all (or enough) of them came to."""
        with effect(ctx) as run:
            await moment(ctx)
            ended = [child for child in ctx.children if child.status in ENDED]
            if "quorum" in ctx.state:
                return run.end(da.Done(len(ended) >= ctx.state["quorum"]))
            if "deadline" in ctx.state:
                return run.end(da.Done("in time"))
            found = [sum(c.result for c in ended if c.status == "done"), len(ended)]
            if ctx.state["generation"] == 1:
                return run.end(da.Done([ctx.state["first"], found]))
            state = {**ctx.state, "generation": 1, "first": found}
            return run.end(da.ScheduleChildren(self.gather, list(self._children(state)), state))

    def _children(self, state: State) -> Generator[da.Child]:
        for n in range(state["good"]):
            # Every second one waits for a moment: what is done to a child that no worker has claimed is done to these.
            yield da.Child(job, args={"n": n, "fails": n % 2}, schedule_in=LATER * (n % 2))
        for n in range(state["bad"]):
            yield da.Child(hopeless, args={"cancel": n % 2 == 0})


@da.job(name="chaos.task", queue="jobs", max_attempts=10_000, backoff=lambda _: 0.02)
async def task(args: State, ctx: Ctx) -> int | str:
    """A task of a graph: adds its number to what those before it came to, and tells of any that it must not follow."""
    with effect(ctx) as run:
        await moment(ctx)
        given = ctx.dependencies
        if sorted(given) != sorted(args["after"]):
            return f"it was given {sorted(given)}, not {sorted(args['after'])}"
        early = [key for key, view in given.items() if not _may_follow(view, any_end=args["any_end"])]
        # Whoever was retried after this one was released may be live again: the order is checked from the changes.
        if early and not await _any_retried([given[key].id for key in early]):
            return f"it ran although {', '.join(f'{key} is {given[key].status}' for key in early)}"
        if ctx.attempt < args["fails"]:
            raise Boom
        run.end(da.Done())
        return int(args["n"]) + sum(view.result for view in given.values() if view.status == "done")


def _may_follow(view: da.ChildView, *, any_end: bool) -> bool:
    return view.status == "done" or (any_end and view.status in ENDED)


async def _any_retried(instances: list[int]) -> bool:
    try:
        return any([await da.receipts(number, command="retry", limit=1) for number in instances])
    except (psycopg.Error, da.StoreUnavailable):
        raise Boom from None


class Graph(Base, name="chaos.Graph", queue="work"):
    """Tasks that come after one another; some fail, and with them what comes after them."""

    @da.step
    async def start(self, ctx: Ctx) -> da.Outcome:
        with effect(ctx) as run:
            await moment(ctx)
            children = [self._child(each) for each in from_state(ctx.state["tasks"])]
            return run.end(da.ScheduleChildren(self.gather, children))

    def _child(self, each: Task) -> da.Child:
        when = "ended" if each.any_end else "succeeded"
        if each.bad:
            return da.Child(hopeless, key=each.key, after=each.after, when=when, args={"cancel": True})
        args = {"n": each.number, "fails": each.fails, "after": each.after, "any_end": each.any_end}
        return da.Child(task, key=each.key, after=each.after, when=when, args=args)

    @da.step
    async def gather(self, ctx: Ctx) -> da.Outcome:
        """What each came to."""
        with effect(ctx) as run:
            await moment(ctx)
            return run.end(da.Done({child.key: [child.status, child.result] for child in ctx.children}))


class Courier(Base, name="chaos.Courier", queue="work"):
    """Sends and starts from inside its steps, which may run again: each of it must happen once."""

    @da.step
    async def start(self, ctx: Ctx) -> da.Outcome:
        with effect(ctx) as run:
            await moment(ctx)
            for payload in ctx.state["ticks"]:
                await self._send(ctx, payload)
                await moment(ctx)
            return run.end(da.Next(self.hire))

    async def _send(self, ctx: Ctx, payload: int) -> None:
        try:
            await ctx.signal(ctx.state["target"], "tick", payload)
        except da.NoTarget:
            # Its target was cancelled; or an earlier run of this one has sent the last tick that the target waited for,
            # and was cancelled and retried, or its worker was killed, or drained.
            try:
                excused = (
                    ctx.attempt > 0
                    or await da.receipts(ctx.state["target"], command="cancel", limit=1)
                    or await da.receipts(ctx.id, command="retry", limit=1)
                    or (await da.inspect(ctx.id)).interruptions
                )
            except (psycopg.Error, da.StoreUnavailable):
                raise Boom from None  # a read does not wait for a lock of the whole table
            if not excused:
                raise

    @da.step
    async def hire(self, ctx: Ctx) -> da.Outcome:
        with effect(ctx) as run:
            await ctx.start_child(job, key="helper", args={"n": 1})
            await moment(ctx)
            await ctx.insert(job, args={"n": 2})
            return run.end(da.Done("delivered"))


class Desk(Base, name="chaos.Desk", queue="work"):
    """Waits for what people decide: for an approval, in one way also at a pause before it."""

    @da.step
    async def start(self, ctx: Ctx) -> da.Outcome:
        with effect(ctx) as run:
            await moment(ctx)
            if ctx.state["way"] == "pause":
                return run.end(da.Pause(self.ask, title="go on?"))
            return run.end(self._approval(ctx))

    @da.step
    async def ask(self, ctx: Ctx) -> da.Outcome:
        """Somebody has let it proceed."""
        with effect(ctx) as run:
            await moment(ctx)
            # Cancelled at its own boundary and retried, it runs at a later visit, and its decision is used up.
            again = ctx.visit > 2 and ctx.decision is None
            if not again and (ctx.decision is None or ctx.decision.kind != "proceeded"):
                return run.end(da.Done(f"went on by {ctx.decision}"))
            return run.end(self._approval(ctx))

    def _approval(self, ctx: Ctx) -> da.Outcome:
        way = ctx.state["way"]
        refused = None if way == "strict" else self.refused
        if way != "timeout":
            return da.Approval(self.granted, on_reject=refused, title="may it?")
        deadline = ctx.state["timeout"]
        return da.Approval(self.granted, on_reject=refused, timeout=deadline, on_timeout=self.late)

    @da.step
    async def granted(self, ctx: Ctx) -> da.Outcome:
        with effect(ctx) as run:
            return await self._finish(ctx, run, "approved")

    @da.step
    async def refused(self, ctx: Ctx) -> da.Outcome:
        with effect(ctx) as run:
            return await self._finish(ctx, run, "rejected")

    @da.step
    async def late(self, ctx: Ctx) -> da.Outcome:
        with effect(ctx) as run:
            return await self._finish(ctx, run, "timed_out")

    async def _finish(self, ctx: Ctx, run: Run, kind: str) -> da.Outcome:
        """What was decided; it is there in every attempt."""
        await moment(ctx)
        if ctx.attempt == 0 and ctx.state["flops"]:
            raise Boom
        told = None if ctx.decision is None else ctx.decision.kind
        return run.end(da.Done(kind if told == kind else f"{kind} by {ctx.decision}"))


class Hang(Base, name="chaos.Hang", queue="work"):
    """Never ends by itself: whoever commands it to end must reach it, wherever it runs."""

    @da.step
    async def start(self, ctx: Ctx) -> da.Outcome:
        with effect(ctx):
            await trio.sleep_forever()


class Loop(Base, name="chaos.Loop", queue="work"):
    """Moves on and on, until somebody ends it: its history grows."""

    @da.step
    async def start(self, ctx: Ctx) -> da.Outcome:
        with effect(ctx) as run:
            await trio.sleep(0.05)
            return run.end(da.Next(self.start, {"n": ctx.state["n"] + 1}))


class Leaf(Base, name="chaos.Leaf", queue="work"):
    """A child that ends at once, or that only somebody else ends: it runs, or waits, for ever."""

    @da.step
    async def start(self, ctx: Ctx) -> da.Outcome:
        with effect(ctx) as run:
            await moment(ctx)
            if ctx.state["how"] == "hangs":
                await trio.sleep_forever()
            return run.end(da.Done(1) if ctx.state["how"] == "ends" else da.Await("never"))


class Undo(Base, name="chaos.Undo", queue="work"):
    """Never ends by itself, and compensates when it is cancelled."""

    @da.step
    async def start(self, ctx: Ctx) -> da.Outcome:
        with effect(ctx) as run:
            if ctx.state["how"] == "hangs":
                await trio.sleep_forever()
            return run.end(da.Await("never"))

    @da.step(on_cancel=True)
    async def undo(self, ctx: Ctx) -> da.Outcome:
        """Some fail at first."""
        with effect(ctx) as run:
            await moment(ctx)
            if ctx.attempt == 0 and ctx.state["flops"]:
                raise Boom
            return run.end(da.Done("undone"))


class Tree(Base, name="chaos.Tree", queue="work"):
    """Children that do not end, levels deep: whoever cancels it cancels them."""

    rest: Literal["leave", "cancel"] = "leave"

    @da.step
    async def start(self, ctx: Ctx) -> da.Outcome:
        with effect(ctx) as run:
            await moment(ctx)
            below = ctx.state["levels"]
            family = [da.Child(Leaf, state={"how": how}) for how in ("hangs", "waits")]
            family += [da.Child(Leaf, state={"how": "waits"}, schedule_in=LATER)]
            family += [da.Child(Undo, state={"how": "waits", "flops": bool(below % 2)})]
            family += [da.Child(Tree, state={"levels": below - 1})] * (below > 0)
            if self.rest == "leave":
                return run.end(da.ScheduleChildren(self.gather, family))
            family += [da.Child(Leaf, state={"how": "ends"})]
            return run.end(da.ScheduleChildren(self.gather, family, join=1, rest="cancel"))

    @da.step
    async def gather(self, ctx: Ctx) -> da.Outcome:
        """Enough of them have ended."""
        with effect(ctx) as run:
            await moment(ctx)
            return run.end(da.Done())


class Rest(Tree, name="chaos.Rest", queue="work"):
    """The same, with a child that ends: the others are cancelled then."""

    rest = "cancel"


LIMITS = {
    "press": da.Limit(slots=2),
    "seat": da.Limit(slots=2, held="instance"),
    "api": da.Limit(100, burst=3),
    "tokens": da.Limit(1_000, burst=20),
}
"""What `Limited` uses. Slow enough that there is always somebody who waits."""


class Limited(Base, name="chaos.Limited", queue="work"):
    """Takes a slot; then tokens of two limits, and a slot that it keeps while it waits; then goes on without them."""

    @da.step(initial=True, slot="press")
    async def start(self, ctx: Ctx) -> da.Outcome:
        with effect(ctx) as run:
            await moment(ctx)
            if ctx.attempt < ctx.state["fails"]:
                raise Boom
            uses = [da.Use("api"), da.Use("tokens", ctx.state["tenant"], weight=ctx.state["weight"])]
            return run.end(da.Next(self.call, rate_limit=uses, slot=("seat", ctx.state["tenant"])))

    @da.step
    async def call(self, ctx: Ctx) -> da.Outcome:
        """Some are told to wait."""
        with effect(ctx) as run:
            await moment(ctx)
            if ctx.state["told"] and random.random() < 0.5:
                raise da.RateLimited(retry_after=0.1)
            return run.end(da.Await("never", then=self.end, timeout=0.1))

    @da.step
    async def end(self, ctx: Ctx) -> da.Outcome:
        with effect(ctx) as run:
            await moment(ctx)
            return run.end(da.Done("through"))


class Lane(Base, name="chaos.Lane", queue="keys"):
    """One of several instances of a partition key: one step at a time."""

    @da.step
    async def start(self, ctx: Ctx) -> da.Outcome:
        with effect(ctx) as run:
            await moment(ctx)
            return run.end(da.Next(self.work))

    @da.step
    def work(self, ctx: Ctx) -> da.Outcome:
        """In a thread: it keeps its key as long as it runs, whatever became of its lease."""
        with effect(ctx) as run:
            for _ in range(random.choice((1, 2, 3, 40))):  # many naps, see `moment`
                time.sleep(0.02 * random.random())
            return run.end(da.Done(ctx.state["n"]))
