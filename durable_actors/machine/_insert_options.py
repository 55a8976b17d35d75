"""The options of a new instance, shared by all insert calls."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from difflib import get_close_matches
from typing import Any, Final, Literal, TypedDict

from durable_actors._journal_level import JournalLevel
from durable_actors._limits import RateLimit, Slot
from durable_actors._option_checks import shown
from durable_actors.errors import DurableError
from durable_actors.machine._checks import Duration
from durable_actors.machine._step_ref import StepRef

Status = Literal[
    "runnable", "executing", "awaiting_signal", "awaiting_children", "done", "failed", "cancelled"
]
"""The statuses of an instance, as the database spells them."""

ENDED: Final[frozenset[Status]] = frozenset({"done", "failed", "cancelled"})
"""The statuses of an instance that has ended."""


OnDuplicate = Literal["raise", "return", "skip"]
"""What an insert does if its unique key is occupied: raise `Duplicate`, return the existing id, or return None."""


class RowOptions(TypedDict, total=False):
    """The options of a new instance, as in `start_child` and `signal_with_start`. All are optional."""

    state: Any
    """The initial state: an object of the machine's state type, or a dict with its fields. Default: `{}`."""
    args: Any
    """The arguments of a job: another name for `state`."""
    step: str | StepRef[Any]
    """The step to begin with. Default: the initial step."""
    queue: str
    """The queue. Default: the machine's queue."""
    priority: int
    """The priority, -32768 to 32767. Lower values run first. Default: 0."""
    partition_key: str | None
    """Steps with the same partition key run one at a time, in order."""
    fair_key: str | None
    """Whose work it is, such as a tenant's name: in a queue with `fair=True` the keys share the slots."""
    unique_key: str | bytes | None
    """At most one instance occupies a unique key at a time; see `unique_scope`."""
    unique_scope: Iterable[Status]
    """The statuses in which an instance occupies its unique key. Default: all but done, failed and cancelled."""
    eligible_at: datetime | None
    """Do not run before this instant (with a time zone). Takes precedence over `schedule_at` and `schedule_in`."""
    schedule_at: datetime | None
    """Do not run before this instant (with a time zone). Takes precedence over `schedule_in`."""
    schedule_in: Duration | None
    """Do not run before this many seconds from now, by the clock of the database."""
    tags: Iterable[str] | None
    """Texts to filter by: up to 50, of up to 255 characters each. Equal ones are stored once."""
    meta: Mapping[str, Any] | None
    """A JSON object for people and tools, up to 64 kB. Steps do not see it."""
    rate_limit: RateLimit
    """The rates that its first step uses: a name, a pair of name and key, or a list of `Use`. Default: the step's."""
    weight: int
    """How many tokens of `rate_limit` it costs. Default: 1."""
    slot: Slot
    """The limit of which its first step takes a slot: a name, or a pair of name and key. Default: the step's."""
    journal: JournalLevel
    """How much of its history is recorded. Default: the machine's `journal`, else the engine's, else "auto"."""
    max_attempts: int | None
    """How often a job, or a step with a `Backoff`, runs at most. Default: what the job or the `Backoff` says."""


class InsertOptions(RowOptions, total=False):
    """Options of `insert`, `insert_many` and `Child`. All are optional."""

    on_duplicate: OnDuplicate
    """What to do if the unique key is occupied: "raise" `Duplicate` (the default of `insert`), "return" the existing
    id, or "skip" the insert and return None (the default of `insert_many` and of children)."""


InsertRows = Iterable[Mapping[str, Any]]
"""The rows of `insert_many`: `InsertOptions`, or plain dicts such as `dict(args=...)`.

Type checkers check the names of options only where a row is declared as `InsertOptions`."""

OPTION_NAMES = tuple(InsertOptions.__annotations__)


def check_option_names(options: Mapping[str, object], *, error: type[DurableError]) -> None:
    """Refuse unknown options, so that a misspelt one is not silently ignored."""
    given: object = options
    if not isinstance(given, Mapping):
        raise error(f"insert options must be a dict, not {shown(given)}")
    for name in options:
        if not isinstance(name, str):
            raise error(f"unknown insert option {shown(name)}: the options are {', '.join(OPTION_NAMES)}")
        if name not in OPTION_NAMES:
            near = get_close_matches(name, OPTION_NAMES, n=1)
            hint = f"did you mean {near[0]}?" if near else f"the options are {', '.join(OPTION_NAMES)}"
            raise error(f"unknown insert option {name!r}: {hint}")
    if "state" in options and "args" in options:
        raise error("state and args are two names for the same option: give only one of them")
