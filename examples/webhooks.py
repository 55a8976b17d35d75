"""Webhooks: a provider delivers each event at least once, in any order; the machine sees it exactly once.

`signal_with_start` delivers to the order's live instance or starts one; the provider's event id is the `dedup_key`.

Run it: `python examples/webhooks.py`. Without DURABLE_DSN it brings its own Postgres.
"""

from __future__ import annotations

import uuid
from typing import Any

import attrs
import durable_actors as da
import trio


@attrs.frozen
class Account:
    cents: int = 0
    events: int = 0


class Ledger(da.Machine[Account], name="examples:ledger"):
    @da.step(initial=True)
    async def collect(self, ctx: da.Context[Account]) -> da.Outcome:
        state = ctx.state
        for signal in ctx.awaited:  # what has arrived since the last commit, in order
            if signal.name == "close":
                return da.Done({"cents": state.cents, "events": state.events})
            state = Account(state.cents + signal.payload["cents"], state.events + 1)
        # Counted and consumed by one commit: never lost, never counted twice.
        return da.Await(["payment", "close"], state, consume=[signal.id for signal in ctx.awaited])


async def webhook(event: dict[str, Any]) -> int:
    """The HTTP handler: answer 200 only when this has returned."""
    return await da.signal_with_start(
        Ledger,
        key=event["account"],
        name=event["type"],
        payload={"cents": event.get("cents", 0)},
        dedup_key=event["id"],
    )


async def main() -> None:
    account = f"account:{uuid.uuid4().hex[:8]}"
    events: list[dict[str, Any]] = [
        {"id": f"evt-{n}", "account": account, "type": "payment", "cents": 100 * n} for n in (1, 2, 3)
    ]
    async with da.open_engine():
        number = 0
        for event in [*events, *events, events[0]]:  # the provider is not sure that we got them
            number = await webhook(event)
        await webhook({"id": "evt-close", "account": account, "type": "close"})
        print("7 deliveries of 3 events →", await da.result(number, timeout=30))


if __name__ == "__main__":
    trio.run(main)
