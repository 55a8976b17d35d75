"""Two releases of one program, for the rolling deploy.

Release 1 has `Order` version 1 and `Old`. Release 2 has `Order` in both versions, so that what began under version 1
ends under it, and `Old` no more. `Parcel` has the same version in both, but release 2 has no step `pack` any more, and
has a step `ship` that release 1 does not have.
"""

from __future__ import annotations

from typing import Any

import durable_actors as da
from tests.chaos.machines import Base, Ctx, effect, moment

HOPS = 3


async def _hop(machine: Any, ctx: Ctx, result: str, step: str = "start") -> da.Outcome:
    with effect(ctx) as run:
        await moment(ctx)
        n = ctx.state.get("n", 0) + 1
        return run.end(
            da.Done(result) if n == HOPS else da.Next(getattr(machine, step), {**ctx.state, "n": n})
        )


def _parcel(release: int) -> type[da.Machine[Any]]:
    """The machine whose steps change. Each instance crosses the step that only its release has, several times."""

    class Parcel(Base, name="chaos.Parcel", version=1, queue="work"):
        @da.step
        async def start(self, ctx: Ctx) -> da.Outcome:
            with effect(ctx) as run:
                await moment(ctx)
                if release == 1:
                    return run.end(da.Next("pack"))
                # Whoever sees that the time is over need not know the step to which it goes.
                return run.end(da.Await("never", then="ship", timeout=0.05))

        if release == 1:

            @da.step
            async def pack(self, ctx: Ctx) -> da.Outcome:
                return await _hop(self, ctx, "packed", "pack")

        else:

            @da.step
            async def ship(self, ctx: Ctx) -> da.Outcome:
                return await _hop(self, ctx, "shipped", "ship")

    return Parcel


def install(release: int) -> dict[str, type[da.Machine[Any]]]:
    """Define what this release has; by name and version."""

    class OrderOne(Base, name="chaos.Order", version=1, queue="work"):
        @da.step
        async def start(self, ctx: Ctx) -> da.Outcome:
            return await _hop(self, ctx, "by version 1")

    found: dict[str, type[da.Machine[Any]]] = {"order 1": OrderOne, f"parcel {release}": _parcel(release)}
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
