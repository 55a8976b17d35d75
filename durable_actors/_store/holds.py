"""Why a runnable row is not offered to the pick: the values of `hold`, in one table.

A reason is a line here, a partial index that finds its rows (`where status = 'runnable' and hold = N`), unless another
table names them, and a statement that releases them by setting `hold` to 0. `durable.keeps_place` says the same as
`keeps_place` here, and the constraint `gen_durable_counts` allows exactly these numbers; tests/store/test_holds.py
compares them.
"""

from __future__ import annotations

from typing import Final, Literal

import attrs

OFFERED: Final = 0
"""The value of `hold` of a row that the pick may claim."""
HELD: Final = 1
SHELVED: Final = 2
THROTTLED: Final = 3
PAUSED: Final = 4
WAITING: Final = 5

HoldName = Literal["held", "shelved", "throttled", "paused", "waiting"]


@attrs.frozen(kw_only=True)
class HoldReason:
    """One reason not to offer a runnable row."""

    number: int
    """The value of `hold`."""
    name: HoldName
    keeps_place: bool
    """Whether the row keeps its place among the due rows of its partition key: the rows behind it wait for it."""
    index: str | None
    """The index that finds these rows; None: `graph` knows their ids."""
    released_by: tuple[str, ...]
    """The statements that offer such a row again, or claim it. Commands that pause or end it change its `hold`, too."""
    explanation: str
    """Why it does not run, for people."""


HOLDS: Final = (
    HoldReason(
        number=HELD,
        name="held",
        keeps_place=True,
        index="gen_durable_held",
        released_by=(
            "promote_siblings",
            "hand_siblings",
            "free_holds",
            "pick_instances",
            "pick_fair",
            "claim_next",
            "complete",
            "fail",
        ),
        explanation="it waits for its partition key: another instance of the key runs first",
    ),
    HoldReason(
        number=SHELVED,
        name="shelved",
        keeps_place=True,  # for a node that has its step; the others pass it by
        index="gen_durable_shelf",
        released_by=("pick_instances", "pick_fair", "claim_next"),
        explanation="it is shelved: a node that read it did not have its step, or its machine was paused",
    ),
    HoldReason(
        number=THROTTLED,
        name="throttled",
        keeps_place=True,
        index="gen_durable_throttled",
        released_by=("pick_instances", "claim_next"),
        explanation="it waits for a limit",
    ),
    HoldReason(
        number=PAUSED,
        name="paused",
        keeps_place=False,
        index="gen_durable_paused",
        released_by=("resume_instance",),
        explanation="it is paused",
    ),
    HoldReason(
        number=WAITING,
        name="waiting",
        keeps_place=False,
        index=None,
        released_by=("tell_dependents", "tell_untold", "claim_next", "complete", "fail"),
        explanation="it waits for instances that it comes after",
    ),
)
"""Every reason, by number."""

REASONS: Final = {reason.number: reason for reason in HOLDS}
