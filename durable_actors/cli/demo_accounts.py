"""What the demo places, and its end: is every order accounted for? Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, cast

import attrs

from durable_actors._store.read import Instance

SCHEMA: Final = "durable_demo"
"""Where everything of the demo lives; its machines have it in their SQL."""
STEPS: Final = 4
"""Steps of an order; its row counts the visits."""


@attrs.frozen
class Order:
    """What an order carries along."""

    number: int
    cents: int


@attrs.frozen(kw_only=True)
class Accounts:
    """What the demo found in the end."""

    orders: int
    """That were placed."""
    done: int
    cents_placed: int
    cents_done: int
    lost: int
    """Placed, and not done."""
    twice: int
    """With more step commits than steps."""
    payments: int
    """That the bank made."""
    cents_paid: int
    asked: int
    """How often it was asked; more often than it paid where a step ran again."""
    mails: int
    mailed: int
    """Orders that got exactly one."""
    recovered: tuple[int, ...]
    """Numbers of the orders that the killed worker had."""
    recovery_seconds: float
    seconds: float

    @property
    def right(self) -> bool:
        """Whether every sum matches."""
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
    """Compare what was placed with what the database has. `payments`: number, cents, how often asked."""
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
