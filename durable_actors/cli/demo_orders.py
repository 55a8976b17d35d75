"""The machines of `durable-actors demo`: an order pipeline and the mail that follows it.

A worker process runs them with the real command: `durable-actors serve durable_actors.cli.demo_orders`. Nothing else of
the command line imports this module, or every worker would know these machines.
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
    """The bank said no, for now."""


class Fulfil(da.Machine[Order], name="demo:order", queue="orders"):
    """charge → pack → ship → close."""

    @da.step(initial=True)
    async def charge(self, ctx: da.Context[Order]) -> da.Outcome:
        """Ask the bank. Every seventh card is declined at first; the step is retried."""
        order = ctx.state
        if order.number % 7 == 0 and ctx.attempt == 0:
            raise CardDeclinedError(f"order {order.number}: declined")
        # The effect, in a table that stands for the bank: it may be asked twice, the key makes it pay once.
        async with await da.TrioConnection.connect(os.environ["DURABLE_DSN"]) as bank:
            await bank.execute(PAY, [ctx.idempotency_key, order.number, order.cents])
        await _work()
        return da.Next(self.pack)

    @da.step
    async def pack(self, _ctx: da.Context[Order]) -> da.Outcome:
        """Somebody packs."""
        await _work()
        return da.Next(self.ship)

    @da.step
    async def ship(self, ctx: da.Context[Order]) -> da.Outcome:
        """Ship, and have a mail sent; a second run of this step finds the same mail."""
        await _work()
        await ctx.insert(send_mail, args={"number": ctx.state.number})
        return da.Next(self.close)

    @da.step
    async def close(self, ctx: da.Context[Order]) -> da.Outcome:
        """The books."""
        return da.Done({"cents": ctx.state.cents})

    async def handle(self, error: Exception, ctx: da.Context[Order]) -> da.Outcome:
        """Try again in a moment; give up after ten attempts."""
        return da.Retry(delay=0.2) if ctx.attempt < 10 else da.Stop(error)


@da.job(name="demo:mail", queue="mail")
async def send_mail(args: dict[str, int]) -> dict[str, int]:
    """One mail per order."""
    await trio.sleep(0.02)
    return {"number": args["number"]}


async def _work() -> None:
    await trio.sleep(random.uniform(0.08, 0.2))  # noqa: S311 - a pause, not a secret
