"""Schedules: fires the slots of schedules, and stores what this node's code says of them.

Owns       when it looks again, and which schedules nobody seemed to have at its last look. The rest is in the database.
Receives   a wake-up (`Node.schedules_changed`): a call of this process has changed a schedule.
Sends      hints to the feeders here about the instances that it inserts.
Writes     turn_schedule.sql, with cancel_instance.sql in its transaction for an instance that a slot is not to overlap;
           put_schedule.sql, adopt_schedule.sql and enable_schedules.sql; on the client lane.
Reads      due_schedules.sql, list_schedules.sql, read_declared.sql.
If it dies it is restarted, and every other node has one, too: no leader. Whoever turns a schedule first wins.
Never      uses this machine's clock to decide: the time comes with the rows.

It sleeps until the next slot, but looks once in `reap_interval`: the floor under all hints. Without a schedule that
look is all it does.
"""

from __future__ import annotations

import math
from typing import Final

import psycopg
import trio

from durable_actors._engine.lanes import answer_patience
from durable_actors._engine.node import Node, logger
from durable_actors._engine.outage import TRANSIENT_ERRORS, Outage
from durable_actors._postgres.driver.connection import PgConn
from durable_actors._postgres.driver.failures import RETRYABLE
from durable_actors._scheduling.decide import realigned
from durable_actors._store.dialogues import run_dialogue
from durable_actors._store.schedule_commands import declaring, reading, usable
from durable_actors._store.schedule_turns import Turned, turn_due
from durable_actors._store.schedules import (
    Due,
    Found,
    enable_schedules,
    read_declared,
    read_due,
    turn_call,
)
from durable_actors.otp import Actor
from durable_actors.telemetry import ScheduleFired, ScheduleSkipped

DECLARE_EVERY: Final = 60.0
"""Seconds between two looks at whose definitions count, and at schedules that no node has."""
UNDECIDED: Final = 1.0
"""Seconds until the next look if something is due that this node does not turn."""
SPREAD: Final = 0.02
"""Nodes that wait for the same slot should not all wake in the same millisecond."""


class Schedules(Actor[object]):
    """The actor; a message makes it look at once."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._outage = Outage(node, "schedules")
        self._declare_at = -math.inf
        self._gone: frozenset[str] = frozenset()
        self._gone_at = -math.inf
        self._aligned = False
        self._complained: set[str] = set()

    async def run(self) -> None:
        """Do what is due, sleep until something may be."""
        while True:
            try:
                wait = await self._round()
            except TRANSIENT_ERRORS as exc:
                wait = self._outage.failed(exc)
            else:
                self._outage.ok()
            with trio.move_on_after(wait):
                await self.mailbox.receive()

    async def _round(self) -> float:
        """Declare, fire, look for what left the code; return how long to sleep. Cancelled: each statement is whole."""
        node, patience = self._node, answer_patience(self._node.owner.lease_ttl)
        async with node.pool.acquire(node.lane("client"), within=patience) as conn:
            await self._declare(conn)
            due = await read_due(conn, node.owner.schema, node.schedules)
            if due.wait is not None and not self._aligned:
                await self._align(conn)
            turned = [each for each in [await self._turn(conn, found) for found in due.found] if each]
            await self._disable(conn, due)
        for error in due.broken:
            self._complain(error, "a schedule cannot be read: %s", error)
        if turned:
            return 0.0
        if due.wait is None:
            return node.config.reap_interval
        wait = max(due.wait, UNDECIDED if due.wait <= 0 else 0.0) + SPREAD * node.random()
        return min(wait, node.config.reap_interval)

    async def _declare(self, conn: PgConn) -> None:
        """Store what this node's code says, at its start and once a minute: another node's definition may have gone."""
        node, now = self._node, trio.current_time()
        if not node.schedules or now < self._declare_at:
            return
        live = await read_declared(conn, node.owner.schema)
        for name in await run_dialogue(conn, declaring(node.owner.schema, node.schedules, live)):
            logger.info("schedule %s: the code of this node defines it now", name)
        self._declare_at = now + DECLARE_EVERY

    async def _align(self, conn: PgConn) -> None:
        """Once per start: a schedule whose next slot is none any more, as time zones have changed, gets another."""
        for found in await run_dialogue(conn, reading(self._node.owner.schema, None)):
            if found.row.paused or not usable(found.row.definition):
                continue
            if (turn := realigned(found.row.standing(busy=False), found.now)) is not None:
                await conn.run(*turn_call(self._node.owner.schema, found.row, turn))
        self._aligned = True

    async def _turn(self, conn: PgConn, found: Found) -> Turned | None:
        node = self._node
        try:
            turned = await turn_due(conn, node.owner.schema, found)
        except psycopg.Error as error:  # of one schedule: the others go on
            if error.sqlstate in RETRYABLE:
                return (
                    None  # its row is locked, or that of the instance to be cancelled: the next look is soon
                )
            if isinstance(error, psycopg.OperationalError):
                raise
            self._complain(
                found.row.name, "schedule %s cannot fire, and is tried again: %s", found.row.name, error
            )
            return None
        if turned is not None:
            self._report(turned)
        return turned

    def _report(self, turned: Turned) -> None:
        """Hint at the new instances, and tell what became of the slots."""
        node, name = self._node, turned.found.row.name
        if turned.cancelled is not None:
            node.on_final(turned.cancelled)
        kinds = {each.slot: each.kind for each in turned.turn.fires}
        for each in turned.decided:
            if each.instance_id is None:
                continue
            node.notify(each.queue, instance_id=each.instance_id, priority=each.priority)
            if node.wakeups is not None:
                node.wakeups.add([each.instance_id])
            if node.telemetry.active:
                lag = (turned.found.now - each.slot).total_seconds()
                kind = kinds.get(each.slot, "slot")
                node.telemetry.emit(
                    ScheduleFired(
                        schedule=name, slot=each.slot, instance_id=each.instance_id, kind=kind, lag=lag
                    )
                )
        for skip in turned.skipped:
            logger.info("schedule %s: skipped %s: %s", name, skip.first.isoformat(), skip.reason)
            if node.telemetry.active:
                node.telemetry.emit(
                    ScheduleSkipped(
                        schedule=name,
                        slot=skip.first,
                        last_slot=skip.last,
                        slots=skip.count,
                        reason=skip.reason,
                    )
                )

    async def _disable(self, conn: PgConn, due: Due) -> None:
        """Disable the schedules that no live node has in its code, on two looks a minute apart."""
        node, now = self._node, trio.current_time()
        if not due.others:
            self._gone = frozenset()
            return
        if now < self._gone_at + DECLARE_EVERY:
            return
        gone = due.others - (await read_declared(conn, node.owner.schema)).keys()
        if certain := gone & self._gone:
            for name in await enable_schedules(conn, node.owner.schema, certain, enable=False):
                logger.warning("schedule %s is disabled: no live node has it in its code", name)
        self._gone, self._gone_at = gone, now

    def _complain(self, about: str, text: str, *values: object) -> None:
        """Log a problem once."""
        if about not in self._complained and len(self._complained) < 100:
            self._complained.add(about)
            logger.warning(text, *values)
