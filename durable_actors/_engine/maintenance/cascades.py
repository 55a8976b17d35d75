"""Cascades: cancels children that are to be cancelled, and tells dependents of ends that no outcome has told.

Of whatever queue or machine.

Owns       nothing: what is to be done is in the tables `cascades` and `untold`.
Receives   a wake-up (`Node.cascade`): a statement of this node has written such a row, or the long poll has seen one.
Sends      hints to the feeders here about children that compensate, and rows that are offered now; `on_final` for
           instances that it ends.
Writes     cancel_children.sql, promote_siblings.sql, tell_untold.sql, on the client lane.
If it dies it is restarted, and every other node has one, too: no leader, SKIP LOCKED, bounded batches.
Never      waits for a child that runs: the node of that one ends it. To cancel, it waits for no lock; to tell, as long
           as a commit would.

Without a wake-up it looks once in `reap_interval`: the floor under all hints.
"""

from __future__ import annotations

import attrs
import trio

from durable_actors._engine.lanes import answer_patience
from durable_actors._engine.node import Node, logger
from durable_actors._engine.outage import TRANSIENT_ERRORS, Outage
from durable_actors._postgres.driver.connection import PgConn
from durable_actors._store.cascade import LAP, Cascaded, cascading
from durable_actors._store.dialogues import run_dialogue
from durable_actors._store.graph import telling_untold
from durable_actors._wording import counted
from durable_actors.otp import Actor


class Cascades(Actor[object]):
    """The actor; a message makes it look at once."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._outage = Outage(node, "cascades")

    async def run(self) -> None:
        """Sleep until something may be to do, and do it."""
        interval = self._node.config.reap_interval
        wait = interval * self._node.random()  # nodes that start together should not look together
        while True:
            with trio.move_on_after(wait):
                await self.mailbox.receive()
            try:
                wait = LAP if await self._round() else interval
            except TRANSIENT_ERRORS as exc:
                wait = self._outage.failed(exc)
            else:
                self._outage.ok()

    async def _round(self) -> bool:
        """Cancel until nothing is left that can be cancelled now. Returns whether somebody has locked the rest.

        Work goes first: this rests as long as it works.
        """
        node, patience = self._node, answer_patience(self._node.owner.lease_ttl)
        rests = False
        while True:
            began = trio.current_time()
            async with node.pool.acquire(node.lane("client"), within=patience) as conn:
                done = await cascade_some(node, conn)
            rests = rests or done.rests
            if not done.more:
                return rests
            await trio.sleep(trio.current_time() - began)


# Used by `execute_next`, too.


async def cascade_some(node: Node, conn: PgConn, *, rounds: int = 1) -> Cascaded:
    """Cancel some of the children that are to be cancelled, tell some dependents, and whoever waits for that."""
    done = await run_dialogue(conn, cascading(node.owner.schema, rounds=rounds))
    told = await run_dialogue(conn, telling_untold(node.owner.schema))
    done = attrs.evolve(done, offered=(*done.offered, *told.offered), more=done.more or told.more)
    _report(node, done)
    return done


def _report(node: Node, done: Cascaded) -> None:
    for number in done.ended:
        node.on_final(number)
    node.offer([*done.offered])
    if done.ended or done.asked:
        logger.info(
            "cancelled %s of cancelled instances, and asked the nodes of %s to",
            counted(len(done.ended), "child", "children"),
            counted(len(done.asked), "child", "children"),
        )
