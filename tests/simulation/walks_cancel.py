"""The part of the walks of `test_faithful` that cancels: instances, their children, machines that compensate."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import attrs
from durable_actors._store import claim as claims
from durable_actors._store.cascade import cascading, write_compensations
from durable_actors._store.commands import Request
from durable_actors._store.dialogues import run_dialogue
from tests.simulation.compare import unordered
from tests.support.commands import cancel_instance

SCHEMA = "durable"


class Cancels:
    """Mixed into `Pair`."""

    random: Any
    server: Any
    db: Any
    real: Any
    model: Any
    claim_ids: dict[str, str]
    said: list[str]
    both: Any
    same: Any

    async def cancel(self) -> None:
        """An instance is cancelled, or its node is asked to; both tell the node."""
        if self.random.random() < 0.3:
            step = self.random.choice((None, "t"))
            steps = {"t": SimpleNamespace(limits=None)}
            spec = SimpleNamespace(name="m", version=1, key=("m", 1), on_cancel=step, steps=steps)
            await self.same(write_compensations, SCHEMA, [spec])
        row = self.random.choice(list(self.server.tables.rows.values()))
        force, children = self.random.random() < 0.3, self.random.random() < 0.5
        await self.same(cancel_instance, SCHEMA, row.id, force=force, children=children)
        ours, theirs = await self.both(claims.read_requests, SCHEMA, "a")
        theirs = {self.claim_ids[claim_id]: request for claim_id, request in theirs.items()}
        assert timeless(ours) == timeless(theirs), self.said[-5:]

    async def cascade(self) -> None:
        """Some of the children are cancelled that are to be."""
        most = self.random.choice((1, 2, 10))
        ours, theirs = [
            await run_dialogue(conn, cascading(SCHEMA, cascades=100, children=most))
            for conn in (self.real, self.model)
        ]
        assert ours.more == theirs.more, self.said[-5:]
        for name in ("ended", "asked", "offered"):
            assert unordered(getattr(ours, name)) == unordered(getattr(theirs, name)), self.said[-5:]

    def compare_cascades(self) -> None:
        found = self.db.execute(
            "select parent_id, barrier, up_to, after, missed, request - 'at' from durable.cascades"
        ).fetchall()
        mine = [
            (each.parent, each.barrier, each.up_to, each.after, each.missed,
             {name: value for name, value in each.request.items() if name != "at"})
            for each in self.server.tables.cascades.values()
        ]  # fmt: skip
        assert unordered(mine) == unordered(found), self.said[-5:]


def timeless(requests: dict[str, Request]) -> dict[str, Request]:
    return {claim_id: attrs.evolve(request, at=None) for claim_id, request in requests.items()}
