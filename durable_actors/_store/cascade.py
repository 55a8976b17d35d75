"""Cascades: the children of cancelled instances are cancelled, in small batches; and which step a machine enters then.

Whoever decides that children are cancelled writes a row of `cascades` in the same statement: a command (`cancel`), the
end of a claim that was asked for it, a barrier that opens (`rest="cancel"`). The rest is done by whoever comes: the
caller of the command, an actor of every engine, `execute_next`, and runners (`durable.claim_next`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import attrs

from durable_actors._postgres.driver import encode
from durable_actors._postgres.driver.connection import PgConn
from durable_actors._store.claim import read_promoted
from durable_actors._store.foreign import Dialogue
from durable_actors._store.rows import Promoted
from durable_actors._store.sql import statement
from durable_actors.machine import MachineSpec

CASCADES: Final = 20
CHILDREN: Final = 200
"""Per statement: cascades, and children of each. A child costs about 0.1 ms."""
LAP: Final = 0.5
"""Seconds for which a cascade rests that has met a locked child, in cancel_children.sql."""
COURTESY: Final = 20
"""Statements by which a call cancels children, where no engine runs in this process."""


@attrs.frozen
class Cascaded:
    """What some statements have done."""

    ended: tuple[int, ...] = ()
    """Children that are cancelled."""
    asked: tuple[int, ...] = ()
    """Children that run: their nodes were asked to cancel them."""
    offered: tuple[Promoted, ...] = ()
    """What is offered now: children that compensate, parents whose barrier opened, siblings of freed keys."""
    more: bool = False
    """Whether there may be more to do at once."""
    rests: bool = False
    """Whether there is more to do in a moment (`LAP`): somebody has locked a child."""


def cascading(
    schema: str, *, rounds: int = 1, cascades: int = CASCADES, children: int = CHILDREN
) -> Dialogue[Cascaded]:
    """Cancel children that are to be cancelled, in at most so many statements. Each should be a transaction of its own.

    A second statement of a round offers the next siblings of freed keys. If that is never sent, a node's sweep does it.
    """
    done = Cascaded()
    for _ in range(rounds):
        rows = yield (
            statement("cancel_children", schema),
            [encode.number(cascades), encode.number(children)],
        )
        found: dict[bytes, list[Promoted]] = {}
        keys: set[str] = set()
        for what, number, queue, key in rows:
            found.setdefault(what or b"", []).append(Promoted(int(number or 0), (queue or b"").decode()))
            if key is not None:
                keys.add(key.decode())
        offered = [*found.get(b"entered", ()), *found.get(b"opened", ())]
        if keys:
            promoted = yield statement("promote_siblings", schema), [encode.text_array(sorted(keys))]
            offered += read_promoted(promoted)
        done = Cascaded(
            (*done.ended, *(each.id for each in found.get(b"ended", ()))),
            (*done.asked, *(each.id for each in found.get(b"asked", ()))),
            (*done.offered, *offered),
            any(each.id for each in found.get(b"looked", ())),
            done.rests or b"rests" in found,
        )
        if not done.more:
            break
    return done


async def write_compensations(conn: PgConn, schema: str, specs: Iterable[MachineSpec]) -> None:
    """Record which step each of these machines enters when it is cancelled. Writes nothing if that is recorded."""
    known = sorted(specs, key=lambda spec: spec.key)
    params = [
        encode.text_array([spec.name for spec in known]),
        encode.int_array([spec.version for spec in known]),
        encode.text_array([spec.on_cancel for spec in known]),
        encode.text_array([spec.on_cancel and spec.steps[spec.on_cancel].limits for spec in known]),
    ]
    await conn.run(statement("write_compensations", schema), params)
