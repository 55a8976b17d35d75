"""Walks of `test_faithful.py` for graphs: children that come after each other, and what is told later."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

import durable_actors as da
import psycopg
from durable_actors._store import graph
from durable_actors._store.claim import Owner
from durable_actors._store.dialogues import run_dialogue
from durable_actors._store.rows import Claim
from durable_actors._store.siblings import Heir
from tests.simulation.server import Server

SCHEMA = "durable"


async def tell_untold(conn: Any, schema: str, most: int) -> graph.Told:
    return await run_dialogue(conn, graph.telling_untold(schema, most=most))


class GraphWalks:
    """What `Pair` does with graphs."""

    random: Random
    server: Server
    db: psycopg.Connection[Any]
    said: list[str]
    eager: bool
    node: str
    known: bytes

    async def both(self, function: Any, *args: Any, **options: Any) -> tuple[Any, Any]:
        raise NotImplementedError

    async def same(self, function: Any, *args: Any, **options: Any) -> Any:
        raise NotImplementedError

    def _children(self, count: int) -> list[Any]:
        """Children that come after each other, or not."""
        if self.random.random() < (0.1 if self.eager else 0.4):
            return ["m"] * count
        found: list[da.Child] = []
        for index in range(count):
            after = self.random.sample(found, self.random.randint(0, min(2, index)))
            when = self.random.choice(("succeeded", "succeeded", "ended"))
            found.append(da.Child("m", key=f"k{index}", after=after, when=when))
        self.random.shuffle(found)
        return found

    def room(self) -> Any:
        """What a commit may claim of the dependents that it offers."""
        owner = Owner(SCHEMA, self.node, b"hash", 6000.0)
        found = graph.Room(owner, {"default": self.random.randint(1, 3)}, [0, 1], self.known, 0.0)
        return self.random.choice(((lambda _queues: None), (lambda _queues: found)))

    def heir(self) -> Any:
        """The keys whose next rows a commit may claim: of none of its claims, of some, or of all."""
        owner = Owner(SCHEMA, self.node, b"hash", 6000.0)
        draw = Random(len(self.said))  # graphs have no keys: their walks stay what they are
        rooms, some = {"default": draw.randint(1, 3)}, draw.choice(((), (0,), (0, 1)))

        def heir(claims: Sequence[Claim]) -> Heir:
            ids = frozenset([claim.claim_id for claim in claims if claim.id % 2 in some])
            return Heir(owner, rooms, ids, self.known, 0.0)

        return draw.choice(((lambda _claims: None), heir, heir))

    def _ends(self) -> tuple[str, ...]:
        """How children end, by weight."""
        ends = ("done", "stop", "cancel") * 3
        return (*("done",) * 60, *ends * 5) if self.eager else ends

    async def untold(self) -> None:
        """What an actor does with ends that nobody has told; and what steps read."""
        ours, theirs = await self.both(tell_untold, SCHEMA, self.random.choice((1, 100)))
        assert sorted(map(str, ours.offered)) == sorted(map(str, theirs.offered)), self.said[-5:]
        assert ours.more == theirs.more, self.said[-5:]
        await self.same(graph.read_dependencies, SCHEMA, sorted(self.server.tables.graph))

    def compare_graphs(self) -> None:
        found = self.db.execute(
            "select id, needs, feeds, any_end, waits, owed, told_at is not null from durable.graph order by id"
        ).fetchall()
        nodes = [node for _, node in sorted(self.server.tables.graph.items())]
        ours = [
            (each.id, each.needs, each.feeds, each.any_end, each.waits, each.owed, each.told_at is not None)
            for each in nodes
        ]
        assert ours == found, self.said[-5:]
        untold = self.db.execute("select distinct id from durable.untold order by id").fetchall()
        assert sorted({*self.server.tables.untold}) == [number for (number,) in untold], self.said[-5:]
        self.dependents_wait_for_what_has_not_ended()

    def dependents_wait_for_what_has_not_ended(self) -> None:
        """Whatever the model says: one that waits has somebody who will tell it, and one that does not has nobody."""
        waiting = self.db.execute(
            "select g.id, g.hold, e.waits, (select count(*) from durable.graph u where g.id = any (u.owed))"
            " from durable.gen_durable g join durable.graph e using (id)"
            " where g.status = 'runnable' and g.cancellation is null and g.links in (1, 3) and g.visit = 1"
        ).fetchall()
        for number, hold, waits, owed in waiting:
            assert waits == owed, (number, self.said[-5:])
            assert hold == 4 or (hold == 5) == (waits > 0), (number, self.said[-5:])
