"""An approval with a deadline: somebody says yes or no in time, or the machine goes on without them.

A deadline is a wake, not a failure: the step runs with an empty `ctx.awaited`.

Run it: `python examples/approval.py`. Without DURABLE_DSN it brings its own Postgres.
"""

from __future__ import annotations

import attrs
import durable_actors as da
import trio

PATIENCE = 0.5
"""Seconds; three days in real life: the row waits in the database and costs nothing meanwhile."""


@attrs.frozen
class Expense:
    who: str
    cents: int


class Approval(da.Machine[Expense], name="examples:approval"):
    @da.step(initial=True)
    async def ask(self, ctx: da.Context[Expense]) -> da.Outcome:
        if ctx.state.cents < 1000:
            return da.Done("approved: a small sum")
        # Here a mail goes out, with a link that sends the signal.
        return da.Await(["approve", "reject"], then=self.decide, timeout=PATIENCE)

    @da.step
    async def decide(self, ctx: da.Context[Expense]) -> da.Outcome:
        if not ctx.awaited:
            return da.Done("escalated: nobody answered in time")
        first = ctx.awaited[0]
        return da.Done(f"{'approved' if first.name == 'approve' else 'rejected'} by {first.payload['by']}")


async def main() -> None:
    async with da.open_engine():
        ids: dict[str, int] = {}
        for who, cents in (("ada", 999), ("eve", 5000), ("kay", 5000), ("lea", 5000)):
            number = await da.insert(Approval, state=Expense(who, cents))
            assert number is not None
            ids[who] = number
        await da.signal(ids["eve"], "approve", {"by": "the boss"})
        await da.signal(ids["kay"], "reject", {"by": "the boss"})
        for who, number in ids.items():
            print(f"{who} →", await da.result(number, timeout=30))


if __name__ == "__main__":
    trio.run(main)
