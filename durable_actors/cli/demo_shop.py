"""The machines of `durable-actors dashboard --demo`: a shop with every kind of work that the dashboard shows.

Only `--demo` imports this module, so that no other process knows these machines.
"""

from __future__ import annotations

import random
from typing import Any, Final

import attrs
import trio

import durable_actors as da

SCHEMA: Final = "durable_shop"
"""The schema of the demo."""
DICE: Final = random.Random(7)  # noqa: S311 - a demo, not a secret


class PaymentTimeoutError(Exception):
    """The bank did not answer."""


class AddressError(Exception):
    """The address does not exist."""


@attrs.frozen
class Order:
    """The state of an order."""

    number: int
    cents: int
    customer: str
    card_token: str = "tok_4242"  # noqa: S105 - a pretended one: the dashboard does not show it
    parcels: int = 0


class Checkout(da.Machine[Order], name="shop.Checkout", queue="orders", journal="full"):
    """charge → approve (if expensive) → pack → ship → wait for delivery."""

    @da.step(initial=True)
    async def charge(self, ctx: da.Context[Order]) -> da.Outcome:
        """Charge the card. Some banks never answer."""
        await trio.sleep(DICE.uniform(0.05, 0.6))
        if ctx.state.number % 9 == 0:
            raise PaymentTimeoutError(f"bank of {ctx.state.customer} did not answer within 30 s")
        if ctx.state.cents > 50_000:
            return da.Approval(
                self.pack,
                title=f"Order {ctx.state.number} of {ctx.state.customer} for {ctx.state.cents / 100:,.2f} EUR",
                data={"number": ctx.state.number, "cents": ctx.state.cents},
                timeout=86400,
            )
        return da.Next(self.pack)

    @da.step
    async def pack(self, ctx: da.Context[Order]) -> da.Outcome:
        """Pack the order."""
        await trio.sleep(DICE.uniform(0.05, 0.4))
        return da.Next(self.ship, attrs.evolve(ctx.state, parcels=1 + ctx.state.number % 3))

    @da.step
    async def ship(self, ctx: da.Context[Order]) -> da.Outcome:
        """Ship it."""
        if ctx.state.number % 13 == 0:
            raise AddressError(f"order {ctx.state.number}: there is no such street")
        return da.Await(["delivered"], then=self.deliver, timeout=3 * 86400)

    @da.step
    async def deliver(self, ctx: da.Context[Order]) -> da.Outcome:
        """End it."""
        return da.Done({"number": ctx.state.number, "parcels": ctx.state.parcels})

    async def handle(self, error: Exception, ctx: da.Context[Order]) -> da.Outcome:
        """Retry twice."""
        return da.Retry(delay=0.5 * 2**ctx.attempt) if ctx.attempt < 2 else da.Stop(error)


@da.job(name="shop.send_mail", queue="mail")
async def send_mail(args: dict[str, Any]) -> None:
    """Send a mail."""
    await trio.sleep(DICE.uniform(0.02, 0.2))


@da.job(name="shop.thumbnail", queue="images")
async def thumbnail(args: dict[str, Any]) -> None:
    """Make a picture smaller."""
    await trio.sleep(DICE.uniform(0.5, 3.0))


@da.job(name="shop.clean_up", queue="mail", every=30)
async def clean_up() -> None:
    """Runs every half minute."""


LIMITS: Final = {
    "bank": da.Limit(6, per=60, burst=3),
    "labels": da.Limit(slots=2),
    "newsletter": da.Limit(1000, per=3600, burst=50),
}
"""What the jobs below use; `courier`, which one of them uses, too, is not declared: somebody should see that."""


@da.job(name="shop.refund", queue="payments")
async def refund(args: dict[str, Any]) -> None:
    """Pay money back. Each bank allows so many calls a minute."""
    await trio.sleep(DICE.uniform(0.05, 0.3))


@da.job(name="shop.print_label", queue="payments", slot="labels")
async def print_label(args: dict[str, Any]) -> None:
    """Print a label: there are two printers."""
    await trio.sleep(DICE.uniform(4.0, 9.0))


@attrs.frozen
class Month:
    """The parameters of a report."""

    month: str


class Report(da.Workflow[Month], name="shop.Report", queue="reports"):
    """A graph of tasks."""

    @da.task
    async def orders(self, ctx: da.Context[Month]) -> int:
        """Count the orders."""
        await trio.sleep(1.0)
        return 1042

    @da.task
    async def refunds(self, ctx: da.Context[Month]) -> int:
        """Count the refunds."""
        await trio.sleep(2.0)
        return 17

    @da.task(after=[orders, refunds])
    async def totals(self, ctx: da.Context[Month]) -> int:
        """Add up."""
        return ctx.result_of(Report.orders) - ctx.result_of(Report.refunds)

    @da.task(after=[totals])
    async def charts(self, ctx: da.Context[Month]) -> str:
        """Draw."""
        raise RuntimeError("the printer of charts is out of ink")

    @da.task(after=[totals])
    async def letter(self, ctx: da.Context[Month]) -> str:
        """Write."""
        await trio.sleep(1.0)
        return "sent"

    @da.task(after=[charts, letter])
    async def publish(self, ctx: da.Context[Month]) -> None:
        """Publish."""


@da.job(name="legacy.import", queue="legacy")
async def legacy_import(args: dict[str, Any]) -> None:
    """No node serves its queue."""


async def fill() -> None:
    """Insert work of every kind."""
    names = ("Ann", "Ben", "Cem", "Dora", "Emil", "Fee")
    for number in range(1, 121):
        order = Order(number, 90_000 if number % 17 == 0 else DICE.randint(500, 40_000), names[number % 6])
        await da.insert(
            Checkout,
            state=order,
            unique_key=f"order-{number}",
            tags=["web" if number % 2 else "shop", f"customer-{order.customer.lower()}"],
            on_duplicate="skip",
        )
    await da.insert_many(send_mail, [{"args": {"to": f"{names[n % 6]}@example.org"}} for n in range(60)])
    pictures: list[da.InsertOptions] = [
        {"args": {"picture": n}, "fair_key": names[min(n % 11, 5)].lower()} for n in range(400)
    ]
    await da.insert_many(thumbnail, pictures)
    banks = ("north", "north", "south", "west")
    await da.insert_many(
        refund, [{"args": {"order": n}, "rate_limit": ("bank", banks[n % 4])} for n in range(48)]
    )
    await da.insert_many(print_label, [{"args": {"order": n}} for n in range(30)])
    await da.insert_many(refund, [{"args": {"order": n}, "rate_limit": "courier"} for n in range(3)])
    await da.insert_many(legacy_import, [{"args": {"file": f"export-{n}.csv"}} for n in range(12)])
    await da.insert_many(send_mail, [{"args": {"to": "later"}, "schedule_in": 3600 + n} for n in range(25)])
    await da.insert(Report, state=Month("2026-10"))
    await da.pause_queue("mail", "shop.send_mail", 7200, by="dora", reason="the mail provider is down")


async def go_on() -> None:
    """Keep the shop busy: new orders, deliveries."""
    number = 1000
    while True:
        await trio.sleep(DICE.uniform(0.3, 1.2))
        number += 1
        order = Order(number, DICE.randint(500, 60_000), DICE.choice(("Ann", "Ben", "Cem")))
        await da.insert(Checkout, state=order, tags=["web"])
        waiting = await da.list_instances(da.Filter(status="awaiting_signal", machine=Checkout), limit=20)
        for each in waiting[10:12]:
            if each.boundary is None:
                await da.signal(each.id, "delivered", {"by": "courier", "note": "<b>left at the door</b>"})
