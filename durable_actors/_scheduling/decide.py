"""What a schedule does now: which slots fire, which are skipped and why, when it looks again. Pure.

Time is an argument, and comes from the database: a node whose clock is wrong decides the same. The next slot is
computed from the last one, never from the time at which a node looked.
"""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime, timedelta
from typing import Final, Literal

import attrs

from durable_actors._scheduling.schedule import DAY, Definition
from durable_actors._scheduling.slots import TICK

ON_TIME: Final = 60.0
"""Seconds by which a slot may be late without being missed: a restart, a busy server."""
MOST_CAUGHT_UP: Final = 100
"""Slots that `missed="all"` makes up for at a time: the latest ones."""
MOST_COUNTED: Final = 1000
"""Skipped slots that are counted; of more than that, the record has the first and the last one."""
RECORDS: Final = 1000
"""Slots of which the records are kept, about; but for a day at least, and for 400 days at most."""

Reason = Literal["overlap", "missed", "paused", "queue_paused", "changed"]
"""Why a slot did not fire."""
Kind = Literal["slot", "caught_up", "run_now", "backfill"]
"""How an instance came to be: at its slot, later because the slot was missed, or by a command."""


@attrs.frozen
class Standing:
    """Where a schedule stands, as the database has it."""

    name: str
    definition: Definition
    next_slot: datetime | None
    """The first slot that has not been decided; None: there is none any more."""
    last_slot: datetime | None = None
    remaining: int | None = None
    """How many slots may still fire; None: all."""
    buffered: datetime | None = None
    """A slot that waits until the running instance has ended."""
    busy: bool = False
    """Whether the instance of an earlier slot has not ended."""


@attrs.frozen
class Fire:
    """A slot that fires now."""

    slot: datetime
    kind: Kind = "slot"


@attrs.frozen
class Skip:
    """Slots that do not fire, from `first` to `last`; or that wait."""

    first: datetime
    last: datetime
    count: int | None
    """None: more than `MOST_COUNTED`."""
    reason: Reason | Literal["buffered"]


@attrs.frozen
class Turn:
    """What a schedule does now, and where it stands then."""

    next_slot: datetime | None
    fire_at: datetime | None
    last_slot: datetime | None
    remaining: int | None
    buffered: datetime | None = None
    fires: tuple[Fire, ...] = ()
    skips: tuple[Skip, ...] = ()
    cancels: bool = False
    """Whether the running instance is to be cancelled."""


def fire_time(name: str, definition: Definition, slot: datetime) -> datetime:
    """When a slot fires: at the slot, or a little later, before the next one. Always the same for a slot."""
    if not definition.jitter:
        return slot
    following = definition.next_after(slot)
    span = definition.jitter
    if following is not None:
        span = min(span, (following - slot).total_seconds())
    digest = hashlib.sha256(f"{name}@{slot.astimezone(UTC).isoformat()}".encode()).digest()
    return slot + timedelta(microseconds=int(span * 1e6 * int.from_bytes(digest[:6], "big") / 2**48))


def keep_seconds(definition: Definition, slot: datetime) -> float:
    """How long the records of its slots are kept."""
    following = definition.next_after(slot)
    period = 400 * DAY if following is None else (following - slot).total_seconds()
    return min(max(RECORDS * period, DAY), 400 * DAY)


def first_turn(name: str, definition: Definition, now: datetime) -> Turn:
    """Where a schedule stands that is new: its first slot comes after now."""
    slot = definition.next_after(now)
    at = None if slot is None else fire_time(name, definition, slot)
    return Turn(slot, at, None, definition.remaining)


def decide(standing: Standing, now: datetime) -> Turn | None:
    """What is due now; None: nothing."""
    definition, slot = standing.definition, standing.next_slot
    due = slot is not None and fire_time(standing.name, definition, slot) <= now
    if not due and (standing.buffered is None or standing.busy):
        return None
    fires: list[Fire] = []
    skips: list[Skip] = []
    last = standing.last_slot
    following, remaining = slot, standing.remaining
    if due and slot is not None:
        last = _last_due(standing, slot, now)
        fires = _to_fire(standing, slot, last, now)
        if remaining is not None and len(fires) > remaining > 0:  # it ends with the last one that may fire
            fires = fires[:remaining]
            last = fires[-1].slot
        first = fires[0].slot if fires else None
        skips = skipped(definition, slot, last if first is None else first - TICK, "missed")
        following = definition.next_after(last)
        if remaining is not None:
            remaining -= len(fires)
            following = following if remaining else None
    at = None if following is None else fire_time(standing.name, definition, following)
    return _overlapping(standing, Turn(following, at, last, remaining, None, tuple(fires), tuple(skips)))


def _last_due(standing: Standing, slot: datetime, now: datetime) -> datetime:
    """The last slot that is due: jitter never reaches the next slot, so all before it are due, too."""
    definition = standing.definition
    last = definition.last_at(now, after=slot - TICK) or slot
    if last > slot and fire_time(standing.name, definition, last) > now:
        last = definition.last_at(last - TICK, after=slot - TICK) or slot
    return last


def _to_fire(standing: Standing, slot: datetime, last: datetime, now: datetime) -> list[Fire]:
    """The slots from `slot` to `last` that fire, by the rule for missed ones."""
    definition = standing.definition

    def late(each: datetime) -> float:
        return (now - fire_time(standing.name, definition, each)).total_seconds()

    def kind(each: datetime) -> Kind:
        return "slot" if late(each) <= ON_TIME else "caught_up"

    oldest = now - timedelta(seconds=max(definition.catch_up, ON_TIME))
    if definition.missed == "skip":
        return [Fire(last)] if late(last) <= ON_TIME else []
    if definition.missed == "last":
        return [Fire(last, kind(last))] if last >= oldest or late(last) <= ON_TIME else []
    found: list[Fire] = []
    each: datetime | None = last
    while each is not None and len(found) < MOST_CAUGHT_UP and (each >= oldest or late(each) <= ON_TIME):
        found.append(Fire(each, kind(each)))
        each = definition.last_at(each - TICK, after=slot - TICK)
    return found[::-1]


def skipped(definition: Definition, first: datetime, last: datetime, reason: Reason) -> list[Skip]:
    """The record of the slots from `first` on, up to `last`; none if there are none."""
    if last < first:
        return []
    end = definition.last_at(last, after=first - TICK)
    count = definition.count(first - TICK, last, most=MOST_COUNTED)
    return [Skip(first, first if end is None else end, count, reason)]


def _overlapping(standing: Standing, turn: Turn) -> Turn:
    """What becomes of the slots to fire if the instance of an earlier one has not ended.

    For "skip" and "allow" the unique key decides, in the statement that inserts.
    """
    policy, held = standing.definition.overlap, standing.buffered
    if policy not in {"buffer_one", "cancel_running"}:
        return turn
    pending = [*([] if held is None else [Fire(held, "caught_up")]), *turn.fires]
    if not pending:
        return turn
    if policy == "cancel_running":
        chosen, dropped = pending[-1], pending[:-1]
        waits = chosen if standing.busy else None
        fires = () if standing.busy else (chosen,)
    else:
        fires = () if standing.busy else (pending[0],)
        rest = pending[len(fires) :]
        waits, dropped = (rest[0] if rest else None), rest[1:]
    skips = [*turn.skips, *(Skip(each.slot, each.slot, 1, "overlap") for each in dropped)]
    if waits is not None and waits.slot != held:
        skips.append(Skip(waits.slot, waits.slot, 1, "buffered"))
    return attrs.evolve(
        turn,
        fires=fires,
        skips=tuple(skips),
        buffered=None if waits is None else waits.slot,
        cancels=policy == "cancel_running" and standing.busy and bool(turn.fires),
    )


def resumed(standing: Standing, paused_at: datetime, now: datetime) -> Turn:
    """Where a schedule stands that goes on after a pause. Nothing fires at once: a pause is no reason to catch up."""
    definition, slot = standing.definition, standing.next_slot
    skips: list[Skip] = []
    last, following = standing.last_slot, slot
    if slot is not None and slot <= now:
        since = definition.next_after(paused_at)
        if since is None or since > slot:
            skips += skipped(definition, slot, min(paused_at, now), "missed")
        begin = slot if since is None else max(slot, since)
        skips += skipped(definition, begin, now, "paused")
        last = definition.last_at(now, after=slot - TICK) or slot
        following = definition.next_after(now)
    at = None if following is None else fire_time(standing.name, definition, following)
    return Turn(following, at, last, standing.remaining, standing.buffered, (), tuple(skips))


def redefined(standing: Standing, new: Definition, now: datetime) -> Turn:
    """Where a schedule stands whose definition changes.

    If it fires at the same times, a slot that is due stays due. Else the new times count from now on.
    """
    old = standing.definition
    if old.rule == new.rule:
        slot, last, skips = standing.next_slot, standing.last_slot, list[Skip]()
        if slot is None and new.remaining != old.remaining:  # it had fired as often as it was to
            slot = new.next_after(now)
    else:
        slot, last = new.next_after(now), standing.last_slot
        due = standing.next_slot
        skips = [] if due is None else skipped(old, due, now, "changed")
    remaining = standing.remaining if new.remaining == old.remaining else new.remaining
    at = None if slot is None else fire_time(standing.name, new, slot)
    return Turn(slot, at, last, remaining, standing.buffered, (), tuple(skips))


def realigned(standing: Standing, now: datetime) -> Turn | None:
    """Where a schedule stands if its next slot is none by the rules of today's time zones; None: it is one.

    A slot that is due stays: it was one when it was computed.
    """
    definition, slot = standing.definition, standing.next_slot
    if slot is None or slot <= now or definition.every is not None:
        return None
    expected = definition.next_after(max(now, standing.last_slot or now))
    if expected == slot:
        return None
    at = None if expected is None else fire_time(standing.name, definition, expected)
    return Turn(expected, at, standing.last_slot, standing.remaining, standing.buffered)
