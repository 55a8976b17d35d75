"""The part of the walks of test_faithful.py that uses limits: their levels, and what waits for them."""

from __future__ import annotations

from random import Random
from typing import Any

import attrs
from durable_actors._limits import Limit
from durable_actors._store import claim as claims, holds, limits
from durable_actors._store.claim import Owner, PickFrom
from tests.simulation.limits import SECOND, spent
from tests.simulation.small_tables import Level, LimitRow
from tests.store.kit import known_steps

SLOW = 6000.0
"""Seconds for one token: none comes while a walk goes on."""
DECLARED = {"slow": Limit(1, per=SLOW, burst=2), "two": Limit(slots=2)}
OTHERS = (
    {"slow": Limit(1, per=SLOW, burst=1)},
    {"slow": Limit(1, per=SLOW, burst=3)},
    {"two": Limit(slots=1)},
)
USES = (
    None, "slow", "!two", "free", "slow:a", "slow:b\x1e2\x1f!two", "slow\x1fslow:a", "!two", "slow:a\x1e5", "odd", None,
)  # fmt: skip
"""Nobody has declared the odd one."""


class LimitWalks:
    """What nodes and steps do to limits, and the hand that moves time."""

    random: Random
    both: Any
    same: Any
    took: Any
    server: Any
    real: Any
    model: Any
    db: Any
    said: list[str]
    kinds: set[str]
    touched: set[int]

    async def declare(self) -> None:
        """One lets everything go, without a rate and without slots; a declaration has one of them."""
        self.db.execute("insert into durable.limits (name) values ('free')")
        self.server.tables.small["limits", "free"] = LimitRow(None, 1.0, None)
        await self.same(limits.declare_limits, "durable", DECLARED, node="a")

    async def redeclare(self) -> None:
        await self.same(
            limits.declare_limits, "durable", self.random.choice((DECLARED, DECLARED, *OTHERS)), node="a"
        )

    async def thaw(self) -> None:
        """What may go is looked for, and picked; mostly a token has come."""
        waits = sorted(key for table, key in self.server.tables.small if table == "limit_waits")
        if waits and self.random.random() < 0.7:
            self._ripen(*self.random.choice(waits))
        ours, theirs = await self.both(
            limits.read_thawed, "durable", "default", limit=self.random.choice((1, 3, 9))
        )
        assert sorted(ours.ids) == sorted(theirs.ids), self.said[-5:]
        assert (ours.next_in is None) == (theirs.next_in is None), self.said[-5:]
        ids = sorted(set(ours.ids))
        if not ids:
            return
        owner = Owner("durable", self.random.choice("ab"), b"hash", 6000.0)
        heads = self.random.choice((PickFrom((), (), ()), PickFrom([0, 1], ["-infinity"] * 2, [0, 0])))
        options = {"queue": "default", "limit": self.random.randint(1, 5), "now": 0.0}
        picks = await self.both(
            claims.pick_instances,
            owner,
            begin=attrs.evolve(heads, extras=ids),
            known=known_steps("m/1/s", "m/1/t"),
            **options,
        )
        self.took(owner, *picks)
        self.kinds |= {"thawed" for each in picks[0].claims if each.id in ids}

    async def charge(self) -> None:
        """A step has spent more than its weight, or one never began."""
        keys = self.random.sample(["slow", "slow:a", "slow:b", "two", "odd"], 2)
        await self.same(
            limits.charge_limits,
            "durable",
            [(key, self.random.choice((-1.0, -1.0, 1.0, 2.0))) for key in keys],
        )

    async def block(self) -> None:
        """An API has told a step to wait."""
        key = self.random.choice(["slow", "slow:a", "two", "free"])
        await self.same(limits.block_limits, "durable", [key], self.random.choice((SLOW, 0.0)))

    async def forget_keys(self) -> None:
        await self.same(limits.forget_limit_keys, "durable", after=0.0, limit=100)

    async def soon(self) -> None:
        """The time of a token has come."""
        waits = [name for name in self.server.tables.small if name[0] == "limit_waits"]
        if waits:
            table, (key, queue) = self.random.choice(sorted(waits))
            self.server.tables.small[table, (key, queue)] = self.server.now()
            self.db.execute(
                "update durable.limit_waits set next_at = now() where key = %s and queue = %s", [key, queue]
            )

    def _ripen(self, key: str, queue: str) -> None:
        """All tokens of a key are there, and it is time to look."""
        now = self.server.now()
        self.server.tables.small["limit_waits", (key, queue)] = now
        self.db.execute("update durable.limit_waits set next_at = now() where key = %s", [key])
        if ("limit_keys", key) in self.server.tables.small:
            self.server.tables.small["limit_keys", key] = Level(now, now)
            self.db.execute(
                "update durable.limit_keys set tat = now(), at = now(), blocked = null where key = %s", [key]
            )

    async def rest(self) -> None:
        """A key has all its tokens again, and is not blocked any more."""
        levels = [key for table, key in self.server.tables.small if table == "limit_keys"]
        if levels:
            key = self.random.choice(sorted(levels))
            self.server.tables.small["limit_keys", key] = Level(self.server.now(), self.server.now())
            self.db.execute(
                "update durable.limit_keys set tat = now(), at = now(), blocked = null where key = %s", [key]
            )

    async def hold(self) -> None:
        """A row is throttled or waits for others, or no longer is: by hand."""
        rows = [row for row in self.server.tables.rows.values() if row.status == "runnable"]
        by_hand = {holds.OFFERED, holds.THROTTLED, holds.WAITING}
        free = [row for row in rows if row.hold in by_hand and row.links is None]
        for row in self.random.sample(free, min(2, len(free))):
            self.touched.add(row.id)
            row.hold = self.random.choice([*by_hand])
            self.db.execute("update durable.gen_durable set hold = %s where id = %s", [row.hold, row.id])

    # -- comparing

    def compare_limits(self) -> None:
        """Definitions; levels; who waits, and whether it is time. What is not due stays so until a hand moves it."""
        self.db.execute(
            "update durable.limit_waits set next_at = next_at + interval '1 h'"
            " where next_at > now() and next_at < now() + interval '1 h'"
        )
        now, small = self.server.now(), self.server.tables.small
        found = {
            "limits": self.db.execute("select name, interval, burst, slots from durable.limits"),
            "limit_keys": self.db.execute(
                "select key, round(durable.spent(tat, at, now())::numeric / 600)::int,"
                " coalesce(durable.spent(blocked, at, now()) > 0, false) from durable.limit_keys"
            ),
            "limit_waits": self.db.execute("select key, queue, next_at <= now() from durable.limit_waits"),
        }
        for (table, key), at in small.items():
            if table == "limit_waits" and now < at < now + 3600 * SECOND:
                small[table, key] = at + 3600 * SECOND
        ours: dict[str, list[Any]] = {table: [] for table in found}
        for (table, key), row in small.items():
            match row:
                case LimitRow():
                    ours[table].append((key, row.interval, row.burst, row.slots))
                case Level():
                    level = round(spent(row.tat, row, now) / 600)
                    ours[table].append((key, level, spent(row.blocked, row, now) > 0))
                case int():
                    ours[table].append((*key, row <= now))
        for table, rows in found.items():
            assert sorted(ours[table], key=str) == sorted(rows.fetchall(), key=str), (table, self.said[-5:])
