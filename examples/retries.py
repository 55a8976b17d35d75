"""A machine with retries: `handle` decides what an exception means.

A bank that is down is asked again, later each time; a card that is refused ends the order at once. The payment carries
`ctx.idempotency_key`, so that a step that runs again (retry, crash) pays once.

Run it: `python examples/retries.py`. Without DURABLE_DSN it brings its own Postgres.
"""

from __future__ import annotations

import attrs
import durable_actors as da
import trio


@attrs.frozen
class Payment:
    card: str
    cents: int
    receipt: str = ""


class BankDownError(Exception):
    pass


class CardRefusedError(Exception):
    pass


PAID: dict[str, str] = {}  # the bank's own books, by idempotency key


async def bank(key: str, payment: Payment, attempt: int) -> str:
    """A bank that fails twice, and does not like one card."""
    if payment.card == "stolen":
        raise CardRefusedError("the card is blocked")
    PAID.setdefault(key, f"receipt-{len(PAID) + 1}")
    if attempt < 2:
        raise BankDownError("no answer")  # it has paid, and we do not know
    return PAID[key]


class Charge(da.Machine[Payment], name="examples:charge"):
    @da.step(initial=True, timeout=10)
    async def pay(self, ctx: da.Context[Payment]) -> da.Outcome:
        receipt = await bank(ctx.idempotency_key, ctx.state, ctx.attempt)
        return da.Next(self.book, attrs.evolve(ctx.state, receipt=receipt))

    @da.step
    async def book(self, ctx: da.Context[Payment]) -> da.Outcome:
        return da.Done({"receipt": ctx.state.receipt, "cents": ctx.state.cents})

    async def handle(self, error: Exception, ctx: da.Context[Payment]) -> da.Outcome:
        print(f"{ctx.state.card}: attempt {ctx.attempt} of step {ctx.step}: {error!r}")
        if isinstance(error, CardRefusedError) or ctx.attempt >= 5:
            return da.Stop(error)
        return da.Retry(delay=0.05 * 2**ctx.attempt)


async def main() -> None:
    async with da.open_engine():
        good = await da.insert(Charge, state=Payment("good", 1200))
        stolen = await da.insert(Charge, state=Payment("stolen", 99))
        assert good is not None
        assert stolen is not None
        print("good →", await da.result(good, timeout=30), f"(payments made: {len(PAID)})")
        try:
            await da.result(stolen, timeout=30)
        except da.InstanceFailed as exc:
            print("stolen →", exc.reason)


if __name__ == "__main__":
    trio.run(main)
