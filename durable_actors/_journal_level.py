"""How much of an instance's history is recorded: the names that users write, and the numbers that rows store. Pure."""

from __future__ import annotations

from typing import Final, Literal, get_args

from durable_actors._option_checks import shown
from durable_actors.errors import ConfigError, DurableError

JournalLevel = Literal["off", "auto", "outcomes", "claims", "full"]
"""What is recorded: nothing; of machines every outcome, of jobs every failed attempt; every outcome; every move of the
row; every move with state, result and payloads."""

OFF: Final = 0
FAILURES: Final = 1
"""What "auto" means for a job."""
OUTCOMES: Final = 2
CLAIMS: Final = 3
FULL: Final = 4

LEVELS: Final[tuple[str, ...]] = get_args(JournalLevel)
_NUMBERS: Final = {"off": OFF, "outcomes": OUTCOMES, "claims": CLAIMS, "full": FULL}


def check_journal(
    value: object, *, what: str = "journal=", error: type[DurableError] = ConfigError
) -> JournalLevel:
    """Return the level if it is one; else raise an error that lists them."""
    if not isinstance(value, str) or value not in LEVELS:
        text = f"{what} must be one of {', '.join(LEVELS)}; it is {shown(value)}"
        raise ConfigError(text, option="journal", value=value) if error is ConfigError else error(text)
    return value  # type: ignore[return-value]


def journal_level(name: JournalLevel, kind: str) -> int:
    """The number that the row of a machine or job stores."""
    return (FAILURES if kind == "job" else OUTCOMES) if name == "auto" else _NUMBERS[name]
