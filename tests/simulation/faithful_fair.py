"""The part of the walks of test_faithful.py that looks at a fair queue and picks from it."""

from __future__ import annotations

from random import Random
from typing import Any

from durable_actors._store import fair
from durable_actors._store.claim import Owner
from durable_actors._store.fair import Entry, FairPick, LookFrom
from tests.store.kit import address, known_steps

START = ("-infinity", -(2**63))


class FairWalks:
    """Looks and picks."""

    random: Random
    both: Any
    same: Any
    took: Any
    server: Any
    said: list[str]

    async def look_fair(self) -> None:
        begin = LookFrom(
            [0, 1],
            [self.random.choice(("", "", "x")) for _ in range(2)],
            due_keys=self.random.choice((1, 2, 9)),
            plain={0: START, 1: START},
        )
        ours, theirs = await self.both(fair.read_fair_keys, "durable", "default", begin)
        assert (theirs.due, theirs.ends, theirs.plain) == (ours.due, ours.ends, ours.plain), self.said[-5:]

    async def pick_fair(self) -> None:
        draw, ids = self.random, sorted(self.server.tables.rows)
        owner = Owner("durable", draw.choice("ab"), b"hash", 6000.0)
        keys = [
            (priority, key) for priority in (0, 1) for key in draw.sample(["", "x", "y"], draw.randint(0, 3))
        ]
        take = FairPick(
            [Entry(priority, key, draw.randint(0, 2)) for priority, key in keys],
            plain=draw.sample(ids, min(5, len(ids))),
            skip=draw.sample(ids, min(2, len(ids))),
            shelved=draw.choice(((), (address("m/1"), address("m/1", "t")))),
            from_shelf=draw.randint(1, 2),
        )
        known = known_steps("m/1/s", "m/1/t")
        options = {"queue": "default", "limit": draw.randint(1, 4), "known": known, "take": take, "now": 0.0}
        (ours, keys_here), (theirs, keys_there) = await self.both(fair.pick_fair, owner, **options)
        assert sorted(keys_here.values()) == sorted(keys_there.values()), self.said[-5:]
        self.took(owner, ours, theirs)
