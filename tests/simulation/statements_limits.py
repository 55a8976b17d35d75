"""What the statements of limits mean; see `statements`, and `limits` for what is not modelled."""

from __future__ import annotations

import math
from typing import Any

from durable_actors._postgres.driver.statement import Params
from tests.simulation import literals as lit
from tests.simulation.limits import HAIR, expect_slot, holders, spent, still_blocked, throttled
from tests.simulation.small_tables import Level, LimitRow
from tests.simulation.statements import SECOND, Rows, Scene, meaning, shown
from tests.simulation.tables import Tx


@meaning
def read_thawed(scene: Scene, tx: Tx, params: Params) -> Rows:
    queue, most = (params[1] or b"").decode(), int(params[2] or 0)
    lines = {key: at for (key, of), at in tx.read_all("limit_waits").items() if of == queue}
    due = sorted((key for key in lines if lines[key] <= tx.now), key=lambda key: lines[key])[:most]
    out, room = list[Any](), most
    for key in due:
        if room <= 0:
            break
        waiting = [row for row in throttled(tx, queue, key) if row.eligible_at <= tx.now]
        found = waiting[: _may_go(tx, key, room)]
        room -= len(found)
        out += [shown(row.id, None) for row in found]
        if not found and tx.try_lock("limit", key) and not throttled(tx, queue, key):
            tx.put("limit_waits", (key, queue), None)
    later = [at for at in lines.values() if at > tx.now]
    if "thaw" in scene.broken:
        return []
    return [*out, *([shown(None, (min(later) - tx.now) / SECOND)] if later else [])]


def _may_go(tx: Tx, key: str, room: int) -> int:
    limit: LimitRow | None = tx.read("limits", key.partition(":")[0])
    if limit is None:
        return 1
    most: float = room
    if limit.interval:
        level: Level | None = tx.read("limit_keys", key)
        used = spent(level and level.tat, level, tx.now)
        most = min(most, math.floor((limit.burst * limit.interval - used) / limit.interval + HAIR))
    if limit.slots is not None:
        most = min(most, limit.slots - len(holders(tx, key)))
    return max(int(most), 1)


# -- definitions and levels


@meaning
def declare_limits(scene: Scene, tx: Tx, params: Params) -> Rows:
    given = zip(
        lit.texts(params[0]), lit.texts(params[2]), lit.floats(params[3]), lit.floats(params[4]),
        lit.numbers(params[5]), strict=True,
    )  # fmt: skip
    out: Rows = []
    for name, revision, interval, burst, slots in sorted(given, key=lambda each: str(each[0])):
        old: LimitRow | None = tx.read("limits", name)
        if old is not None and old.revision == revision:
            continue
        tx.lock(("limits", name))
        tx.put("limits", name, LimitRow(interval, burst or 1.0, slots, revision))
        out.append(shown(name))
        for (key, queue), _ in tx.read_all("limit_waits").items():
            if key.partition(":")[0] == name:
                tx.put("limit_waits", (key, queue), tx.now)
    return out


@meaning
def charge_limits(scene: Scene, tx: Tx, params: Params) -> Rows:
    weights: dict[str, float] = {}
    for key, weight in zip(lit.texts(params[1]), lit.floats(params[2]), strict=True):
        weights[str(key)] = weights.get(str(key), 0.0) + (weight or 0.0)
    for key in sorted(weights):
        tx.lock(("limit", key))
        limit: LimitRow | None = tx.read("limits", key.partition(":")[0])
        level: Level | None = tx.read("limit_keys", key)
        if limit is not None and limit.interval is not None:
            before = spent(level and level.tat, level, tx.now)
            after = max(before + weights[key] * limit.interval, 0.0)
            blocked = still_blocked(level, tx.now)
            tx.put("limit_keys", key, Level(tx.now + round(after * SECOND), tx.now, blocked))
            tx.tables.charged(key, weights[key])
        if weights[key] < 0:
            expect_slot(tx, key)
    return [shown(None)]


@meaning
def block_limits(scene: Scene, tx: Tx, params: Params) -> Rows:
    seconds = min(float(params[2] or 0), 1e8)
    for key in sorted(set(map(str, lit.texts(params[1])))):
        tx.lock(("limit", key))
        level: Level | None = tx.read("limit_keys", key)
        tat = tx.now + round(spent(level and level.tat, level, tx.now) * SECOND)
        longest = max(seconds, spent(level and level.blocked, level, tx.now))
        tx.put("limit_keys", key, Level(tat, tx.now, tx.now + round(longest * SECOND)))
    return [shown(None)]


@meaning
def forget_limit_keys(scene: Scene, tx: Tx, params: Params) -> Rows:
    old = tx.now - round(float(params[0] or 0) * SECOND)
    levels = tx.read_all("limit_keys").items()
    gone = [key for key, level in levels if max(level.tat, level.at, level.blocked or 0) < old]
    for key in gone[: int(params[1] or 0)]:
        tx.put("limit_keys", key, None)
    return [shown(len(gone[: int(params[1] or 0)]))]
