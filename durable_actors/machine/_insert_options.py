"""The options of one new instance, as every insert takes them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from difflib import get_close_matches
from typing import Any, Literal, TypedDict

from durable_actors._option_checks import shown
from durable_actors.errors import DurableError
from durable_actors.machine._checks import Duration
from durable_actors.machine._step_ref import StepRef

Status = Literal["runnable", "executing", "awaiting_signal", "awaiting_children", "done", "failed"]
"""The statuses of an instance, as the database spells them."""


OnDuplicate = Literal["raise", "return", "skip"]
"""What an insert does when its unique key is occupied: raise `Duplicate`, return the existing id, return None."""


class RowOptions(TypedDict, total=False):
    """What a new instance is: the options of `start_child` and `signal_with_start`. All are optional."""

    state: Any
    """The machine's first state: its type, or a dict of that shape. Default: `{}`."""
    args: Any
    """A job's arguments: the same thing as `state`, by the name that fits jobs."""
    step: str | StepRef[Any]
    """Begin here instead of in the initial step."""
    queue: str
    """Instead of the machine's queue."""
    priority: int
    """Lower goes first; -32768 to 32767, default 0."""
    partition_key: str | None
    """At most one step of a key runs at a time, in order."""
    unique_key: str | bytes | None
    """At most one instance occupies a key."""
    unique_scope: Iterable[Status]
    """The statuses in which the key is occupied. Default: the live ones."""
    eligible_at: datetime | None
    """Not before this instant (with time zone). Wins over `schedule_at`, which wins over `schedule_in`."""
    schedule_at: datetime | None
    """Not before this instant (with time zone)."""
    schedule_in: Duration | None
    """Not before so many seconds from now, by the database's clock."""
    tags: Iterable[str] | None
    """Texts to filter by: up to 50, of up to 255 characters; equal ones are stored once."""
    meta: Mapping[str, Any] | None
    """A JSON object for people and tools, up to 64 kB. It is never state: no step sees it."""


class InsertOptions(RowOptions, total=False):
    """Options of `insert`, `insert_many` and `Child`. All are optional."""

    on_duplicate: OnDuplicate
    """When the unique key is occupied: "raise" `Duplicate` (default of `insert`), "return" the existing id, or "skip":
    insert nothing and return None (default of `insert_many` and of children)."""


OPTION_NAMES = tuple(InsertOptions.__annotations__)


def check_option_names(options: Mapping[str, object], *, error: type[DurableError]) -> None:
    """Refuse options that do not exist (a typing mistake would otherwise be silently ignored)."""
    given: object = options
    if not isinstance(given, Mapping):
        raise error(f"insert options are a dict, not {shown(given)}")
    for name in options:
        if not isinstance(name, str):
            raise error(f"unknown insert option {shown(name)}: the options are {', '.join(OPTION_NAMES)}")
        if name not in OPTION_NAMES:
            near = get_close_matches(name, OPTION_NAMES, n=1)
            hint = f"did you mean {near[0]}?" if near else f"the options are {', '.join(OPTION_NAMES)}"
            raise error(f"unknown insert option {name!r}: {hint}")
    if "state" in options and "args" in options:
        raise error("state and args are two names of the same thing: give one of them")
