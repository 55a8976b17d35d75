"""Packs: gather signals until there are enough of them, or until no more come, then handle them together.

An `Await` keeps the signals that it was handed and awaits again, so that they accumulate in `ctx.awaited`; `consume=`
takes out those that are dealt with, in the same commit as the new state.

Run it: `python examples/packs.py`. Without DURABLE_DSN it brings its own Postgres.
"""

from __future__ import annotations

import attrs
import durable_actors as da
import trio

SIZE = 5
QUIET = 0.5
"""Seconds without a new parcel after which the rest is shipped."""


@attrs.frozen
class Packed:
    packs: list[list[str]] = attrs.field(factory=list[list[str]])
    left: int = -1
    """Parcels that were too few for a pack at the last look; -1 before the first."""


class Depot(da.Machine[Packed], name="examples:depot"):
    @da.step(initial=True)
    async def gather(self, ctx: da.Context[Packed]) -> da.Outcome:
        parcels = [str(signal.payload) for signal in ctx.awaited]
        if len(parcels) == ctx.state.left:  # the timeout woke us: nothing new came
            return da.Done([*ctx.state.packs, parcels] if parcels else ctx.state.packs)
        whole = len(parcels) // SIZE * SIZE
        packs = [*ctx.state.packs, *(parcels[i : i + SIZE] for i in range(0, whole, SIZE))]
        state = Packed(packs, left=len(parcels) - whole)
        return da.Await("parcel", state, timeout=QUIET, consume=ctx.awaited[:whole])


async def main() -> None:
    async with da.open_engine():
        depot = await da.insert(Depot)
        assert depot is not None
        await da.signal_many([{"target": depot, "name": "parcel", "payload": f"p{n}"} for n in range(1, 9)])
        for n in range(9, 13):
            await da.signal(depot, "parcel", f"p{n}")
        for pack in await da.result(depot, timeout=30):
            print("a pack of", len(pack), "→", " ".join(pack))


if __name__ == "__main__":
    trio.run(main)
