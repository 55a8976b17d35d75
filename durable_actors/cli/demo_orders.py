"""The machines of `durable-actors demo`: an order pipeline and the mail that follows it.

A worker process runs them with `durable-actors serve durable_actors.cli.demo_orders`. Nothing else in the command line
imports this module; otherwise every worker would know these machines.
"""

from __future__ import annotations

import os
import random
from typing import Final

import trio

import durable_actors as da
from durable_actors.cli.demo_accounts import Order

PAY: Final = """
insert into durable_demo.payments (key, number, cents) values (%s, %s, %s)
on conflict (key) do update set asked = payments.asked + 1
"""


class CardDeclinedError(Exception):
    """The bank declined the payment; it may succeed later."""


class Fulfil(da.Machine[Order], name="demo:order", queue="orders"):
    """charge → pack → ship → close."""

    @da.step(initial=True)
    async def charge(self, ctx: da.Context[Order]) -> da.Outcome:
        """Charge the card. Every seventh card is declined at first, and the step is retried."""
        order = ctx.state
        if order.number % 7 == 0 and ctx.attempt == 0:
            raise CardDeclinedError(f"order {order.number}: declined")
        # A table plays the bank. It may receive the request twice; the key makes it pay once.
        async with await da.TrioConnection.connect(os.environ["DURABLE_DSN"]) as bank:
            await bank.execute(PAY, [ctx.idempotency_key, order.number, order.cents])
        await _work()
        return da.Next(self.pack)

    @da.step
    async def pack(self, _ctx: da.Context[Order]) -> da.Outcome:
        """Pack the order."""
        await _work()
        return da.Next(self.ship)

    @da.step
    async def ship(self, ctx: da.Context[Order]) -> da.Outcome:
        """Ship the order and insert a mail job. If this step runs again, it finds the same job."""
        await _work()
        await ctx.insert(send_mail, args={"number": ctx.state.number})
        return da.Next(self.close)

    @da.step
    async def close(self, ctx: da.Context[Order]) -> da.Outcome:
        """Close the order."""
        return da.Done({"cents": ctx.state.cents})

    async def handle(self, error: Exception, ctx: da.Context[Order]) -> da.Outcome:
        """Retry after 0.2 seconds; fail after ten attempts."""
        return da.Retry(delay=0.2) if ctx.attempt < 10 else da.Stop(error)


@da.job(name="demo:mail", queue="mail")
async def send_mail(args: dict[str, int]) -> dict[str, int]:
    """Send one mail per order."""
    await trio.sleep(0.02)
    return {"number": args["number"]}


async def _work() -> None:
    await trio.sleep(random.uniform(0.08, 0.2))  # noqa: S311 - a pause, not a secret
