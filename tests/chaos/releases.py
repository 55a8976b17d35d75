"""Two releases of one program, for the rolling deploy.

Release 1 has `Order` version 1 and `Old`. Release 2 has `Order` in both versions, so that what began under version 1
ends under it, and `Old` no more.
"""

from __future__ import annotations

from typing import Any

import durable_actors as da
from tests.chaos.machines import Base, Ctx, effect, moment

HOPS = 3


async def _hop(machine: Any, ctx: Ctx, result: str) -> da.Outcome:
    with effect(ctx) as run:
        await moment(ctx)
        n = ctx.state.get("n", 0) + 1
        return run.end(da.Done(result) if n == HOPS else da.Next(machine.start, {**ctx.state, "n": n}))


def install(release: int) -> dict[str, type[da.Machine[Any]]]:
    """Define what this release has; by name and version."""

    class OrderOne(Base, name="chaos.Order", version=1, queue="work"):
        @da.step
        async def start(self, ctx: Ctx) -> da.Outcome:
            return await _hop(self, ctx, "by version 1")

    found: dict[str, type[da.Machine[Any]]] = {"order 1": OrderOne}
    if release == 1:

        class Old(Base, name="chaos.Old", version=1, queue="work"):
            @da.step
            async def start(self, ctx: Ctx) -> da.Outcome:
                return await _hop(self, ctx, "by the old one")

        return {**found, "old": Old}

    class OrderTwo(Base, name="chaos.Order", version=2, queue="work"):
        @da.step
        async def start(self, ctx: Ctx) -> da.Outcome:
            return await _hop(self, ctx, "by version 2")

    return {**found, "order 2": OrderTwo}
