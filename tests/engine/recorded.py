"""A random workload that is recorded, for the tests of histories: all outcomes, signals, children, failures, keys."""

from __future__ import annotations

import random
from typing import Any

import attrs
import durable_actors as da
import trio
from tests.engine.kit import Run
from tests.kit import PATIENCE


@attrs.frozen
class Plan:
    """What an instance does: one letter per step."""

    todo: str
    n: int = 0


def define() -> type[da.Machine[Plan]]:
    """The machine of the workload, and the job of its children."""

    @da.job(name="leaf", max_attempts=2, backoff=lambda _: 0.0)
    async def leaf(args: dict[str, Any], ctx: da.Context[Any]) -> Any:
        if args.get("fails") or (args.get("once") and not ctx.attempt):
            raise ValueError(f"leaf {args}")
        return args

    class Walk(da.Machine[Plan], name="walk"):
        @da.step
        async def start(self, ctx: da.Context[Plan]) -> da.Outcome:
            return await self.step(ctx)

        @da.step
        async def other(self, ctx: da.Context[Plan]) -> da.Outcome:
            return await self.step(ctx)

        @da.step
        async def joined(self, ctx: da.Context[Plan]) -> da.Outcome:
            return await self.step(ctx)

        async def step(self, ctx: da.Context[Plan]) -> da.Outcome:
            state = ctx.state
            then = self.start if ctx.step == "other" else self.other
            letter, rest = state.todo[:1], Plan(state.todo[1:], state.n + 1)
            match letter:
                case "n":
                    return da.Next(then, rest)
                case "k":
                    return da.Next(then, rest, partition_key=f"key {state.n % 3}")
                case "r":
                    return da.Retry(rest)
                case "e":
                    if ctx.attempt:
                        return da.Next(then, rest)
                    raise ValueError("once")
                case "a":
                    return da.Await("go", then=then, state=rest)
                case "t":
                    return da.Await("never", then=then, state=rest, timeout=0.001)
                case "c":
                    children = [da.Child(leaf, args={"i": i, "once": i == 1}) for i in range(3)]
                    return da.ScheduleChildren(self.joined, children, rest)
                case "f":
                    return da.Stop("as planned")
                case _:
                    return da.Done({"n": state.n})

        async def handle(self, error: Exception, ctx: da.Context[Plan]) -> da.Outcome:
            return da.Retry(delay=0.001) if str(error) == "once" else da.Stop(error)

    return Walk


LETTERS = "nnkreatc"


def plans(seed: int, count: int, letters: str = LETTERS) -> list[Plan]:
    """Random plans; one in eight fails."""
    chance = random.Random(seed)
    found = []
    for _ in range(count):
        todo = "".join(chance.choices(letters, k=chance.randrange(1, 8)))
        found.append(Plan(todo + ("f" if chance.random() < 0.125 else "")))
    return found


async def work(run: Run, machine: Any, some: list[Plan], **options: Any) -> list[int]:
    """Insert them, send the signals that they wait for, and wait until all have ended."""
    ids = await run.engine.client.insert_many(machine, [{"state": each, **options} for each in some])
    found = [number for number in ids if number is not None]
    await finish(run, found)
    return found


async def finish(run: Run, ids: list[int]) -> None:
    """Send the signals that they wait for, until all have ended."""
    client = run.engine.client
    with trio.fail_after(PATIENCE):
        live = set(ids)
        while live:
            for number in sorted(live):
                row = await client.inspect(number)
                if row.status == "awaiting_signal":
                    await client.signal_many([{"target": number, "name": "go"}])
                elif row.finished_at is not None:
                    live.remove(number)
            await trio.sleep(0.01)
