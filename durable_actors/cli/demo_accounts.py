"""The orders of the demo, and the check that every order is accounted for. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, cast

import attrs

from durable_actors._store.read import Instance

SCHEMA: Final = "durable_demo"
"""The schema of the demo; its machines use the name in their SQL."""
STEPS: Final = 4
"""The number of steps of an order, which equals the visits of its row."""


@attrs.frozen
class Order:
    """The state of an order."""

    number: int
    cents: int


@attrs.frozen(kw_only=True)
class Accounts:
    """The totals at the end of the demo."""

    orders: int
    """Orders placed."""
    done: int
    cents_placed: int
    cents_done: int
    lost: int
    """Orders that were placed and are not done."""
    twice: int
    """Orders with more step commits than steps."""
    payments: int
    """Payments that the bank made."""
    cents_paid: int
    asked: int
    """Requests to the bank: more than payments if a step ran again."""
    mails: int
    mailed: int
    """Orders with exactly one mail."""
    recovered: tuple[int, ...]
    """The numbers of the orders that the killed worker was running."""
    recovery_seconds: float
    seconds: float

    @property
    def right(self) -> bool:
        """Whether all totals match."""
        return (
            self.done == self.orders == self.payments == self.mails == self.mailed
            and self.cents_placed == self.cents_done == self.cents_paid
            and not self.lost
            and not self.twice
        )


def audit(
    placed: Sequence[Order],
    orders: Sequence[Instance],
    mails: Sequence[Instance],
    payments: Sequence[tuple[int, int, int]],
    *,
    recovered: Sequence[int],
    recovery_seconds: float,
    seconds: float,
) -> Accounts:
    """Compare the orders placed with the database. `payments` are tuples of number, cents and requests."""
    done = {_field(each.state, "number"): each for each in orders if each.status == "done"}
    sent: dict[Any, int] = {}
    for mail in mails:
        if mail.status == "done":
            number = _field(mail.state, "number")
            sent[number] = sent.get(number, 0) + 1
    return Accounts(
        orders=len(placed),
        done=len(done),
        cents_placed=sum(order.cents for order in placed),
        cents_done=sum(_field(each.result, "cents") for each in done.values()),
        lost=sum(order.number not in done for order in placed),
        twice=sum(each.visit != STEPS for each in orders),
        payments=len(payments),
        cents_paid=sum(cents for _, cents, _ in payments),
        asked=sum(asked for _, _, asked in payments),
        mails=len(mails),
        mailed=sum(sent.get(order.number) == 1 for order in placed),
        recovered=tuple(recovered),
        recovery_seconds=recovery_seconds,
        seconds=seconds,
    )


def _field(value: object, name: str) -> Any:
    return cast("dict[str, Any]", value)[name]
