"""A machine of three steps with a timeout of three days, and a job, for the tests of the bench."""

from __future__ import annotations

from typing import Any

import attrs
import durable_actors as da


@attrs.frozen
class Order:
    order: int
    paid: bool = False


class Bank:
    """A fake payment provider: it knows each idempotency key once."""

    def __init__(self) -> None:
        self.charges: dict[str, int] = {}
        self.calls = 0
        self.down = False

    async def charge(self, key: str, order: int) -> None:
        self.calls += 1
        if self.down:
            raise ConnectionError("the bank is down")
        self.charges.setdefault(key, order)


bank = Bank()


class DeclinedError(Exception):
    pass


@da.job(name="shop:mail", queue="mail", max_attempts=3)
async def mail(args: dict[str, Any]) -> str:
    if args.get("bad"):
        raise DeclinedError("no such address")
    return f"mailed {args['to']}"


class Checkout(da.Machine[Order], name="shop:Checkout"):
    @da.step(initial=True)
    async def ask(self, ctx: da.Context[Order]) -> da.Outcome:
        await ctx.insert(mail, args={"to": f"order-{ctx.state.order}"})
        return da.Await("confirmed", then=self.charge, timeout=3 * 86400)

    @da.step
    async def charge(self, ctx: da.Context[Order]) -> da.Outcome:
        if not ctx.awaited:
            return da.Stop("nobody confirmed the order")
        await bank.charge(ctx.idempotency_key, ctx.state.order)
        return da.Next(self.ship, attrs.evolve(ctx.state, paid=True))

    @da.step
    def ship(self, ctx: da.Context[Order]) -> da.Outcome:
        return da.Done({"shipped": ctx.state.order, "paid": ctx.state.paid})

    async def handle(self, error: Exception, ctx: da.Context[Order]) -> da.Outcome:
        if isinstance(error, ConnectionError) and ctx.attempt < 3:
            return da.Retry(delay=60)
        return da.Stop(error)
