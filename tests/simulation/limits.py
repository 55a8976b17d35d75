"""What a pick asks the limits, and who waits for them: the functions that statements share.

Not modelled: limits that drop (`on_full`), slots that instances keep (`held`), weights of rows, overrides of operators.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

import attrs
from tests.simulation.small_tables import Level, LimitRow
from tests.simulation.statements_journal import note
from tests.simulation.tables import Row, Tx

SECOND = 1_000_000
HAIR = 1e-6
UNKNOWN, NO_SLOT = 1e9, 1e8
"""Waits that no token ends."""
ALIKE = 500


@attrs.frozen
class Used:
    """One use of a limit."""

    key: str
    slot: bool
    weight: float


def uses_of(text: str) -> list[Used]:
    """durable.uses_of."""
    found = []
    for part in text.split("\x1f"):
        key, _, weight = part.partition("\x1e")
        found.append(Used(key.lstrip("!"), part.startswith("!"), float(weight or 1)))
    return found


def slot_of(row: Row) -> str | None:
    """durable.slot_of."""
    return next((use.key for use in uses_of(row.rate_limit or "") if use.slot), None)


def holders(tx: Tx, key: str) -> list[Row]:
    """durable.holders."""
    return [row for row in tx.all() if row.status == "executing" and slot_of(row) == key]


def spent(until: int | None, level: Level | None, now: int) -> float:
    """durable.spent: seconds of tokens."""
    return 0.0 if until is None or level is None else max(until - max(level.at, now), 0) / SECOND


def throttled(tx: Tx, queue: str, key: str) -> list[Row]:
    """What waits under a key, in the order of the pick."""
    return sorted(
        (
            row
            for row in tx.all()
            if row.status == "runnable" and row.hold == 3 and row.queue == queue and row.limited_by == key
        ),
        key=lambda row: row.urgency,
    )


@attrs.define
class Judged:
    """What durable.judge_limits returns."""

    claim: list[int] = attrs.field(factory=list)
    throttle: dict[int, str] = attrs.field(factory=dict)
    leave: list[int] = attrs.field(factory=list)

    def verdict(self, number: int) -> str:
        return "c" if number in self.claim else "t" if number in self.throttle else "l"


@attrs.define
class Key:
    """A key, while it is decided about."""

    name: str
    got: bool
    limit: LimitRow | None
    level: Level | None
    used: float
    blocked: float
    free: float
    head: Row | None
    waits: bool
    took: int = 0
    full: bool = False
    charged: bool = False
    pinned: bool = False
    next_in: float | None = None

    def wait(self, use: Used, row: Row) -> float:
        """Seconds until this use lets the row go; negative: now."""
        if self.limit is None:
            return UNKNOWN
        if self.head is not None and self.head.urgency < row.urgency:
            return 0.0
        if use.slot:
            return NO_SLOT if self.free - self.took <= 0 else self.blocked if self.blocked > HAIR else -1.0
        if self.full:
            return self.next_in or 0.0
        wait = self.blocked
        if self.limit.interval is not None:
            deep = self.limit.burst * self.limit.interval
            wait = max(wait, self.used + min(use.weight, self.limit.burst) * self.limit.interval - deep)
        return -1.0 if wait <= HAIR else wait


def _ends(row: Row) -> bool:
    return row.cancellation is not None and b'"upstream"' in row.cancellation


def judge_limits(scene: Any, tx: Tx, queue: str, rows: Sequence[Row], aside: Collection[int]) -> Judged:
    """durable.judge_limits, of rows in the order of the pick."""
    judged, ids = Judged(), {row.id for row in rows}
    keys: dict[str, Key] = {}
    for name in sorted({use.key for row in rows for use in uses_of(row.rate_limit)}):
        got = tx.try_lock("limit", name)
        limit: LimitRow | None = tx.read("limits", name.partition(":")[0])
        level: Level | None = tx.read("limit_keys", name)
        free = math.inf
        if limit is not None and limit.slots is not None and "slots" not in scene.broken:
            free = limit.slots - len(holders(tx, name))
        waits = tx.read("limit_waits", (name, queue)) is not None
        others = [row for row in throttled(tx, queue, name) if row.id not in ids] if waits and got else []
        keys[name] = Key(
            name, got, limit, level, spent(level and level.tat, level, tx.now),
            spent(level and level.blocked, level, tx.now), free, others[0] if others else None, waits,
        )  # fmt: skip
    for row in rows:
        _judge(tx, judged, keys, row)
    if len(judged.throttle) > len(judged.claim):
        last = [*judged.throttle][-1]
        _throttle_alike(tx, queue, next(row for row in rows if row.id == last), judged.throttle[last], aside)
    _charge(scene, tx, keys)
    _wait(tx, queue, keys, judged)
    return judged


def _judge(tx: Tx, judged: Judged, keys: dict[str, Key], row: Row) -> None:
    worst, by, busy, waiting = -1.0, None, False, []
    for use in uses_of(row.rate_limit):
        key = keys[use.key]
        if not key.got:
            busy = True
            continue
        if busy:
            continue
        wait = key.wait(use, row)
        if wait >= 0:
            worst, by = (wait, key) if wait > worst else (worst, by)
            if not use.slot:
                waiting.append(key)
            pause = 60.0 if wait >= UNKNOWN else 2.0 if wait >= NO_SLOT else wait
            key.next_in = pause if key.next_in is None else min(key.next_in, pause)
    ends = _ends(row)
    if by is not None and not ends:
        for key in waiting:
            key.full = True
    if ends:
        judged.claim.append(row.id)
    elif busy:
        judged.leave.append(row.id)
    elif by is None:
        judged.claim.append(row.id)
        for use in uses_of(row.rate_limit):
            key = keys[use.key]
            if use.slot:
                key.took += 1
            elif key.limit is not None and key.limit.interval is not None:
                key.used += use.weight * key.limit.interval
                key.charged = True
    elif worst == NO_SLOT and not by.took and not by.pinned and not _pin(tx, by):
        judged.leave.append(row.id)
    else:
        judged.throttle[row.id] = by.name


def _pin(tx: Tx, key: Key) -> bool:
    """Whether one who has a slot could be locked: its end comes after this transaction, and finds what waits."""
    for row in holders(tx, key.name):
        if not tx.is_locked(row.id):
            tx.lock(row.id)
            key.pinned = True
            return True
    return False


def _throttle_alike(tx: Tx, queue: str, one: Row, key: str, aside: Collection[int]) -> None:
    """durable.throttle_alike."""
    ahead = sorted(
        (
            row
            for row in tx.all()
            if row.status == "runnable" and row.hold == 0 and row.queue == queue
            and row.priority == one.priority and row.eligible_at <= tx.now and row.urgency > one.urgency
        ),
        key=lambda row: row.urgency,
    )[:ALIKE]  # fmt: skip
    for row in ahead:
        same = row.rate_limit == one.rate_limit and row.partition_key is None and row.cancellation is None
        if same and row.id not in aside and not tx.is_locked(row.id):
            throttle(tx, row, key)


def throttle(tx: Tx, row: Row, key: str) -> None:
    """It waits under a key; nothing if it does already."""
    if row.hold != 3 or row.limited_by != key:
        new = tx.write(row, "throttle")
        new.hold, new.limited_by = 3, key
        note(tx, new, "throttled", new, data={"limited_by": key})


def _charge(scene: Any, tx: Tx, keys: dict[str, Key]) -> None:
    for key in keys.values():
        if key.charged and "charge" not in scene.broken:
            tat = tx.now + round(key.used * SECOND)
            tx.put("limit_keys", key.name, Level(tat, tx.now, still_blocked(key.level, tx.now)))


def still_blocked(level: Level | None, now: int) -> int | None:
    if level is None or level.blocked is None or level.blocked <= level.at:
        return None
    return now + (level.blocked - max(level.at, now))


def _wait(tx: Tx, queue: str, keys: dict[str, Key], judged: Judged) -> None:
    """When to look at the throttled rows again."""
    under = set(judged.throttle.values())
    for key in keys.values():
        if not key.got:
            continue
        if key.name in under:
            tx.put("limit_waits", (key.name, queue), tx.now + round((key.next_in or 0) * SECOND))
            continue
        if not key.waits:
            continue
        decided = {*judged.claim, *judged.throttle}
        if not any(row.id not in decided for row in throttled(tx, queue, key.name)):
            tx.put("limit_waits", (key.name, queue), None)
            continue
        left = max(key.blocked, 0.0)
        if key.limit is not None and key.limit.interval is not None:
            left = max(left, key.used + (1 - key.limit.burst) * key.limit.interval)
        left = max(left, 2.0) if key.free - key.took <= 0 else left
        tx.put("limit_waits", (key.name, queue), tx.now + round(left * SECOND))


def expect_slot(tx: Tx, key: str) -> None:
    """durable.expect_slot: what waits under a key looks at once."""
    for (name, queue), at in tx.read_all("limit_waits").items():
        if name == key and at > tx.now:
            tx.put("limit_waits", (name, queue), tx.now)
