"""`Schedule`: what a user writes; `Definition`: when and how it fires, as the database keeps it. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any, Final, Literal

import attrs
import msgspec

from durable_actors import _option_checks as check
from durable_actors._option_checks import Duration, refuse_unknown_options
from durable_actors._scheduling.slots import Rule, check_rule
from durable_actors.errors import ConfigError

Overlap = Literal["skip", "allow", "buffer_one", "cancel_running"]
Missed = Literal["last", "skip", "all"]
Gap = Literal["shift", "skip"]
Fold = Literal["first", "both"]
QueuePaused = Literal["skip", "insert"]

DAY: Final = 86_400.0
MAX_NAME: Final = 200
INSERT_OPTIONS: Final = (
    "step", "queue", "priority", "partition_key", "tags", "meta", "journal",
    "max_attempts", "fair_key", "rate_limit", "weight", "slot",
)  # fmt: skip
"""Options of the instances, beside `args` or `state`: as `insert` takes them."""


@attrs.frozen(kw_only=True)
class Definition(Rule):
    """When a schedule fires, and what happens to slots that cannot fire in time. Stored as JSON."""

    overlap: Overlap = "skip"
    missed: Missed = "last"
    catch_up: float = DAY
    jitter: float = 0.0
    remaining: int | None = None
    queue_paused: QueuePaused = "skip"

    def to_json(self) -> bytes:
        """As the column `spec` has it."""
        return msgspec.json.encode(msgspec.to_builtins(self))

    @property
    def rule(self) -> Rule:
        """Only when it fires."""
        return Rule(**{name: getattr(self, name) for name in attrs.fields_dict(Rule)})


def definition_of(stored: object) -> Definition:
    """Read the column `spec`. Fields of a later release are ignored. Raises `msgspec.ValidationError`."""
    return msgspec.convert(stored, Definition)


@refuse_unknown_options
@attrs.frozen
class Schedule:
    """Starts an instance of a machine or job at given times: `Schedule("nightly", report, cron="0 3 * * *")`.

    Give it to `Config(schedules=[...])` or to `durable_actors.schedules.put`. It fires while an engine runs that has it
    in its code, or, if it was put, while any engine runs.
    """

    name: str
    """Identifies the schedule in its database."""
    machine: Any
    """What it starts: a machine class, a job, or the name of one."""
    cron: str | None = attrs.field(default=None, kw_only=True)
    """Minute, hour, day, month, day of the week, as `"0 3 * * *"`; `"@daily"` and its kin work, too."""
    every: Duration | None = attrs.field(default=None, kw_only=True)
    """Instead of `cron`: a period, at least a second, counted from `starts`, or from midnight UTC of 1 January 1970."""
    tz: str = attrs.field(default="UTC", kw_only=True)
    """The time zone of `cron`, as "Europe/Berlin"."""
    args: object = attrs.field(default=None, kw_only=True)
    """The arguments of each job; default: an empty object."""
    state: object = attrs.field(default=None, kw_only=True)
    """The state of each instance of a machine; default: an empty object."""
    overlap: Overlap = attrs.field(default="skip", kw_only=True)
    """If the last instance has not ended: "skip" the slot, "allow" both, "buffer_one" slot until it has ended, or
    "cancel_running"."""
    missed: Missed = attrs.field(default="last", kw_only=True)
    """What is done for slots that passed while no engine ran: the "last" one fires, "all" of them, or none ("skip").
    "all" needs `overlap="allow"`: else the first starts, and the others are skipped as overlapping."""
    catch_up: Duration = attrs.field(default=DAY, kw_only=True)
    """Slots that are older than this are not made up for."""
    jitter: Duration = attrs.field(default=0, kw_only=True)
    """Fire up to so many seconds after the slot, but before the next one: always the same for the same slot."""
    gap: Gap = attrs.field(default="shift", kw_only=True)
    """A time of day that a day lacks, where clocks go forward: "shift" it to the end of the gap, or "skip" it."""
    fold: Fold = attrs.field(default="first", kw_only=True)
    """A time of day that a day has twice, where clocks go back: fire at the "first", or at "both"."""
    starts: datetime | None = attrs.field(default=None, kw_only=True)
    """No slot comes before it."""
    ends: datetime | None = attrs.field(default=None, kw_only=True)
    """No slot comes after it."""
    remaining: int | None = attrs.field(default=None, kw_only=True)
    """How many slots fire, at most."""
    queue_paused: QueuePaused = attrs.field(default="skip", kw_only=True)
    """If the queue of its instances is paused: "skip" the slot, or "insert" an instance that waits."""
    options: Mapping[str, Any] = attrs.field(factory=dict[str, Any], kw_only=True)
    """Further options of each instance: step, queue, priority, partition_key, tags, meta, journal, max_attempts,
    fair_key, rate_limit, weight, slot."""

    def __attrs_post_init__(self) -> None:
        """Check everything that can be checked without the machine."""
        check_name(self.name)
        self.definition  # noqa: B018 - raises
        if self.args is not None and self.state is not None:
            raise ConfigError(
                f"schedule {self.name!r} has args= and state=: they are the same, give one",
                option="state",
                value=self.state,
            )
        given: object = self.options
        if not isinstance(given, Mapping) or not set(given) <= set(INSERT_OPTIONS):
            raise ConfigError(
                f"schedule {self.name!r}: options={check.shown(given)} must be a dict of {', '.join(INSERT_OPTIONS)}",
                option="options",
                value=given,
            )

    @property
    def definition(self) -> Definition:
        """When and how it fires. Raises `ConfigError`."""
        for option, value, choices in (
            ("overlap", self.overlap, ("skip", "allow", "buffer_one", "cancel_running")),
            ("missed", self.missed, ("last", "skip", "all")),
            ("gap", self.gap, ("shift", "skip")),
            ("fold", self.fold, ("first", "both")),
            ("queue_paused", self.queue_paused, ("skip", "insert")),
        ):
            check.choice(option, value, *choices)
        if self.remaining is not None:
            check.count("remaining", self.remaining, least=1, most=1_000_000_000)
        found = Definition(
            cron=_text("cron", self.cron),
            every=None if self.every is None else check.age("every", self.every),
            tz=_text("tz", self.tz) or "UTC",
            gap=self.gap,
            fold=self.fold,
            starts=_instant("starts", self.starts),
            ends=_instant("ends", self.ends),
            overlap=self.overlap,
            missed=self.missed,
            catch_up=check.duration("catch_up", self.catch_up, positive=False),
            jitter=check.duration("jitter", self.jitter, positive=False),
            remaining=self.remaining,
            queue_paused=self.queue_paused,
        )
        check_rule(found)
        return found

    @property
    def row_options(self) -> dict[str, Any]:
        """The options of each insert."""
        given = self.args if self.args is not None else self.state
        return {**self.options, **({} if given is None else {"state": given})}


def check_name(name: object) -> str:
    """Check the name of a schedule. Raises `ConfigError`."""
    return check.name("name", name)


def check_schedules(value: Iterable[Any]) -> tuple[Schedule, ...]:
    """Check `Config(schedules=...)`: schedules with different names. Raises `ConfigError`."""
    found = check.several("schedules", value)
    names = set[str]()
    for each in found:
        if not isinstance(each, Schedule):
            wrong = f"{check.shown(each)} is no Schedule"
        elif each.name in names:
            wrong = f"{each.name!r} is there twice"
        else:
            names.add(each.name)
            continue
        raise ConfigError(f"schedules={check.shown(value)}: {wrong}", option="schedules", value=value)
    return found


def revision_of(*parts: bytes | str | None) -> str:
    """A short hash of a definition and of what it inserts."""
    digest = hashlib.sha256()
    for part in parts:
        data = b"" if part is None else part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "big") + data)
    return digest.hexdigest()[:16]


def _text(option: str, value: object) -> str | None:
    return None if value is None else check.name(option, value)


def _instant(option: str, value: object) -> datetime | None:
    if value is None:
        return None
    if not isinstance(value, datetime) or not check.has_zone(value):
        raise ConfigError(
            f"{option}={check.shown(value)} must be a datetime with a time zone", option=option, value=value
        )
    return check.in_utc(value)
