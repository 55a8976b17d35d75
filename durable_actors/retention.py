"""`Retention`: how long ended instances are kept. A value; the janitor acts on it."""

from __future__ import annotations

from typing import Final

import attrs

from durable_actors._option_fields import AGE, about, optional, optional_seconds, seconds
from durable_actors._wording import seconds as in_words

DAY: Final = 86_400.0

_FOR_EVER: Final = "; None: for ever"


@attrs.frozen(kw_only=True)
class Retention:
    """How long ended instances are kept: `Retention(done=86_400, failed=None)`. Durations are seconds or `timedelta`.

    `keep=` of a machine goes before `done` and `cancelled`, and before `failed` if it is longer.
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
        return f"ended instances are kept: {told}; machines with keep= say otherwise"
