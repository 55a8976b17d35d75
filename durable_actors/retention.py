"""`Retention`: how long ended instances, and the histories of live ones, are kept. A value; the janitor acts on it."""

from __future__ import annotations

from typing import Final

import attrs

from durable_actors._option_checks import refuse_unknown_options
from durable_actors._option_fields import AGE, about, optional, optional_seconds, seconds, whole
from durable_actors._wording import seconds as in_words

DAY: Final = 86_400.0

LEAST_HISTORY: Final = 1000
"""How far the functions for runners look back for a completion that is repeated."""

_FOR_EVER: Final = "; None: for ever"


@refuse_unknown_options
@attrs.frozen(kw_only=True)
class Retention:
    """How long ended instances are kept: `Retention(done=86_400, failed=None)`. Durations are seconds or `timedelta`.

    `keep=` of a machine goes before `done` and `cancelled`, and before `failed` if it is longer. An instance that
    lives on keeps the history of its last moves, at least as many as `history` says.
    """

    done: float | None = attrs.field(
        default=7 * DAY,
        converter=optional_seconds,
        validator=optional(AGE),
        metadata=about(
            "How long an instance is kept after it is done.", default="7 days", values=AGE.words + _FOR_EVER
        ),
    )
    cancelled: float | None = attrs.field(
        default=7 * DAY,
        converter=optional_seconds,
        validator=optional(AGE),
        metadata=about("The same, after it was cancelled.", default="7 days", values=AGE.words + _FOR_EVER),
    )
    failed: float | None = attrs.field(
        default=30 * DAY,
        converter=optional_seconds,
        validator=optional(AGE),
        metadata=about("The same, after it has failed.", default="30 days", values=AGE.words + _FOR_EVER),
    )
    history: int | None = attrs.field(
        default=10_000,
        validator=optional(whole(LEAST_HISTORY, 1_000_000_000)),
        metadata=about(
            "How many of its last moves the history of an instance that has not ended tells, at least: "
            "records from before a snapshot that lies further back are deleted.",
            values=f"{LEAST_HISTORY} to 1000000000; None: all",
        ),
    )
    interval: float = attrs.field(
        default=60,
        converter=seconds,
        validator=AGE,
        metadata=about("The time between two rounds of deleting."),
    )

    def __str__(self) -> str:
        """One sentence for the log."""
        ages = ((name, getattr(self, name)) for name in ("done", "cancelled", "failed"))
        told = ", ".join(
            f"{name} ones for {in_words(age)}" if age is not None else f"{name} ones for ever"
            for name, age in ages
        )
        moves = "all their moves" if self.history is None else f"their last {self.history} moves"
        kept = f"ended instances are kept: {told}; machines with keep= say otherwise"
        return f"{kept}; live ones keep the history of {moves}"
