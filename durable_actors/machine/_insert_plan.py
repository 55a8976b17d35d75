"""From insert options to one new row, checked before any SQL. Pure; used by every client and for every child."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import Any, TypeGuard, get_args

import attrs

from durable_actors._journal_level import OFF, OUTCOMES, JournalLevel, check_journal, journal_level
from durable_actors._limits import text_of
from durable_actors._option_checks import has_zone, in_utc, shown
from durable_actors.errors import ConfigError
from durable_actors.machine._backoff import MAX_INT4
from durable_actors.machine._checks import MAX_KEY, MAX_NAME, key_text, seconds, text, whole
from durable_actors.machine._insert_options import InsertOptions, OnDuplicate, Status, check_option_names
from durable_actors.machine._labels import Labels, labels_of
from durable_actors.machine._spec import MachineSpec, identity_of
from durable_actors.machine._step_ref import StepRef

STATUSES: tuple[Status, ...] = get_args(Status)
ON_DUPLICATE: tuple[OnDuplicate, ...] = get_args(OnDuplicate)
LIVE: tuple[Status, ...] = ("runnable", "executing", "awaiting_signal", "awaiting_children")


@attrs.define  # not frozen: that costs 0.8 µs a row
class InsertPlan:
    """One row to insert."""

    machine: str
    version: int
    step: str
    queue: str
    state: bytes
    """JSON."""
    priority: int
    partition_key: str | None
    unique_key: bytes | None
    unique_scope: tuple[Status, ...]
    eligible_at: datetime | None
    """Do not run before this instant; None if `delay` applies."""
    delay: float
    """Seconds from now, by the clock of the database."""
    on_duplicate: OnDuplicate
    labels: Labels | None = None
    """Tags and meta; None if there are none."""
    journal: int = OFF
    """What is recorded of its history (`_journal_level`)."""
    fingerprint: str | None = None
    """The definition that it is started with, if its outcomes are recorded."""
    max_attempts: int | None = None
    """How often a job or a step with a `Backoff` may run; None: what the definition says."""
    fair_key: str | None = None
    """Whose work it is."""
    limits: str | None = None
    """The limits that its first step uses (`_limits.text_of`)."""

    @property
    def plain(self) -> bool:
        """Whether an id means that the row is new, due at once, and not waiting for a partition key."""
        keyed = self.partition_key is not None or self.on_duplicate == "return"
        return not keyed and self.limits is None and self.eligible_at is None and not self.delay


def plan_insert(
    spec: MachineSpec,
    options: InsertOptions,
    *,
    on_duplicate: OnDuplicate = "raise",
    journal: JournalLevel = "auto",
) -> InsertPlan:
    """Return the row for these options; raise `ConfigError` for an invalid option, `StateError` for an invalid state.

    `on_duplicate` and `journal` are the defaults of the calling function, and of its engine.
    """
    check_option_names(options, error=ConfigError)
    if len(options) == 1 and ("args" in options or "state" in options):
        # The fast path: checking all the options that are not given would double the cost of a row.
        document = spec.codec.encode(
            options["args"] if "args" in options else options["state"], step=spec.initial
        )
        level = spec.journal_level(journal)
        return InsertPlan(
            spec.name,
            spec.version,
            spec.initial,
            spec.queue,
            document,
            0,
            None,
            None,
            (),
            None,
            0.0,
            on_duplicate,
            None,
            level,
            spec.fingerprint if level >= OUTCOMES else None,
            limits=spec.steps[spec.initial].limits,
        )
    return _plan_checked(spec, options, on_duplicate, journal)


def _plan_checked(
    spec: MachineSpec, options: InsertOptions, on_duplicate: OnDuplicate, journal: JournalLevel
) -> InsertPlan:
    """The same for any options: each of them is checked."""
    step = _first_step(spec, options.get("step"))
    unique_key = _unique_key(options.get("unique_key"))
    state = options["args"] if "args" in options else options.get("state", {})
    scope = closed_scope(options["unique_scope"]) if "unique_scope" in options else LIVE
    instant = _instant(options)
    level = _journal(spec, options, journal)
    return InsertPlan(
        machine=spec.name,
        version=spec.version,
        step=step,
        queue=_queue(spec, options),
        state=spec.codec.encode(state, step=step),
        priority=_priority(options),
        partition_key=_partition_key(options),
        unique_key=unique_key,
        unique_scope=() if unique_key is None else scope,
        eligible_at=instant,
        delay=0.0 if instant is not None else _delay(options),
        on_duplicate=_on_duplicate(options, on_duplicate),
        labels=labels_of(options.get("tags"), options.get("meta")),
        journal=level,
        fingerprint=spec.fingerprint if level >= OUTCOMES else None,
        max_attempts=_max_attempts(spec, options),
        fair_key=_fair_key(options),
        limits=_limits(spec, options, step),
    )


def _partition_key(options: InsertOptions) -> str | None:
    key = options.get("partition_key")
    return None if key is None else key_text(key, what="partition_key", error=ConfigError)


def _fair_key(options: InsertOptions) -> str | None:
    key = options.get("fair_key")
    return None if key is None else text(key, what="fair_key", error=ConfigError, maximum=MAX_NAME)


def _limits(spec: MachineSpec, options: InsertOptions, step: str) -> str | None:
    if options.keys() & {"rate_limit", "weight", "slot"}:
        given = (options.get("rate_limit"), options.get("weight", 1), options.get("slot"))
        return text_of(*given, error=ConfigError)
    return spec.steps[step].limits


def _queue(spec: MachineSpec, options: InsertOptions) -> str:
    if "queue" not in options:
        return spec.queue
    return text(options["queue"], what="queue", error=ConfigError, maximum=MAX_NAME)


def _priority(options: InsertOptions) -> int:
    given = options.get("priority", 0)
    return whole(given, what="priority", error=ConfigError, minimum=-32768, maximum=32767)


def _max_attempts(spec: MachineSpec, options: InsertOptions) -> int | None:
    given = options.get("max_attempts")
    if given is None:
        return None
    if spec.kind != "job" and all(step.retry is None for step in spec.steps.values()):
        raise ConfigError(
            f"max_attempts limits jobs, and steps with a retry policy; {spec} has none: give a step "
            "retry=da.Backoff(...)",
            option="max_attempts",
            value=given,
        )
    return whole(given, what="max_attempts", error=ConfigError, minimum=1, maximum=MAX_INT4)


def _on_duplicate(options: InsertOptions, default: OnDuplicate) -> OnDuplicate:
    on_duplicate = options.get("on_duplicate", default)
    if on_duplicate not in ON_DUPLICATE:  # not a set: a list would be unhashable
        raise ConfigError(
            f'on_duplicate must be "raise", "return" or "skip"; it is {shown(on_duplicate)}',
            option="on_duplicate",
            value=on_duplicate,
        )
    return on_duplicate


def _journal(spec: MachineSpec, options: InsertOptions, default: JournalLevel) -> int:
    if "journal" in options:
        return journal_level(check_journal(options["journal"]), spec.kind)
    return spec.journal_level(default)


def closed_scope(scope: object) -> tuple[Status, ...]:
    """Check the statuses in which a unique key is occupied; return them in the order of the enum.

    The scope must be closed: if a row could leave it and enter it again (parked, then runnable), its key might be
    occupied by then, and the pick or the reaper would fail. So the scope is empty, or contains all live statuses and
    optionally done, failed and cancelled. `awaiting_children` is added to the other live statuses.
    """
    if not _is_collection(scope):
        raise ConfigError(
            f"unique_scope must be several statuses; it is {shown(scope)}", option="unique_scope", value=scope
        )
    scope = tuple(scope)
    given = {each for each in scope if isinstance(each, str)}
    if unknown := [shown(each) for each in scope if each not in STATUSES]:
        raise ConfigError(
            f"unique_scope has unknown statuses {', '.join(unknown)}; the statuses are {', '.join(STATUSES)}",
            option="unique_scope",
            value=scope,
        )
    if given >= set(LIVE) - {"awaiting_children"}:
        given.add("awaiting_children")
    if given and not given >= set(LIVE):
        missing = [each for each in LIVE if each not in given]
        raise ConfigError(
            f"unique_scope must be empty or contain all live statuses; {', '.join(missing)} is missing. A row that "
            "left the scope and entered it again could find its key occupied",
            option="unique_scope",
            value=scope,
        )
    return tuple(each for each in STATUSES if each in given)


def _first_step(spec: MachineSpec, step: object) -> str:
    return spec.initial if step is None else check_step(spec, step)


def check_step(spec: MachineSpec, step: object) -> str:
    """Return the name of a step of this machine; raise `ConfigError` if it has no such step."""
    if isinstance(step, StepRef):
        owner = step.owner
        if owner is not None and owner is not spec.definition and identity_of(owner) not in spec.lineage:
            raise ConfigError(
                f"step={step!r} belongs to another machine, not to {spec}", option="step", value=step.name
            )
        step = step.name
    if not isinstance(step, str) or step not in spec.steps:
        known = ", ".join(spec.steps)
        raise ConfigError(
            f"{spec} has no step {shown(step)}; its steps are {known}", option="step", value=step
        )
    return step


def _unique_key(key: object) -> bytes | None:
    if key is None:
        return None
    if not isinstance(key, str | bytes):
        raise ConfigError(
            f"unique_key must be str or bytes; it is {shown(key)}", option="unique_key", value=key
        )
    if isinstance(key, str):
        return key_text(key, what="unique_key", error=ConfigError).encode()
    if not 0 < len(key) <= MAX_KEY:
        raise ConfigError(
            f"unique_key must have 1 to {MAX_KEY} bytes, it has {len(key)}", option="unique_key"
        )
    return key


def _instant(options: InsertOptions) -> datetime | None:
    for name in ("eligible_at", "schedule_at"):
        instant: object = options.get(name)
        if instant is None:
            continue
        if not isinstance(instant, datetime) or not has_zone(instant):
            raise ConfigError(
                f"{name} must be a datetime with a time zone; it is {shown(instant)}",
                option=name,
                value=instant,
            )
        return in_utc(instant) if instant.year in {1, 9999} or _is_odd(instant) else instant
    return None


def _is_odd(instant: datetime) -> bool:
    """Whether Postgres does not read its offset: a datetime's may have 24 hours, and fractions of a second."""
    offset = instant.utcoffset() or timedelta()
    return abs(offset) >= timedelta(hours=16) or offset.microseconds != 0


def _delay(options: InsertOptions) -> float:
    delay = options.get("schedule_in")
    return 0.0 if delay is None else seconds(delay, what="schedule_in", error=ConfigError)


def _is_collection(value: object) -> TypeGuard[Iterable[Any]]:
    return isinstance(value, Iterable) and not isinstance(value, str | bytes)
