"""The turn of a schedule: what is due is decided, and done at once."""

from __future__ import annotations

import attrs

from durable_actors._postgres.driver.connection import PgConn
from durable_actors._scheduling.decide import Skip, Turn, decide
from durable_actors._store.commands import Command
from durable_actors._store.dialogues import cancelling, run_dialogue
from durable_actors._store.schedules import SCHEDULE, Decided, Found, read_decided, turn_call
from durable_actors.errors import Conflict, NoTarget


@attrs.frozen
class Turned:
    """A schedule that was turned: what was decided, and what became of it."""

    found: Found
    turn: Turn
    decided: tuple[Decided, ...]
    cancelled: int | None = None
    """The instance of an earlier slot, if it was cancelled at once, for a slot that waits until it has ended."""

    @property
    def skipped(self) -> tuple[Skip, ...]:
        """All slots that did not fire."""
        late = [
            Skip(each.slot, each.slot, 1, "queue_paused" if each.queue_paused else "overlap")
            for each in self.decided
            if each.instance_id is None
        ]
        return (*(each for each in self.turn.skips if each.reason != "buffered"), *late)


async def turn_due(conn: PgConn, schema: str, found: Found) -> Turned | None:
    """Decide what is due of a schedule, and do it; None: nothing is, or somebody else has done it.

    If the running instance is to be cancelled, that is the same transaction: the slot is decided once, and nobody would
    cancel it later.
    """
    turn = decide(found.row.standing(busy=found.running is not None), found.now)
    if turn is None:
        return None
    if not turn.cancels or found.running is None:
        return await _turn(conn, schema, found, turn)
    async with conn.transaction():
        turned = await _turn(conn, schema, found, turn)
        if turned is not None and await _cancel(conn, schema, found.row.name, found.running):
            turned = attrs.evolve(turned, cancelled=found.running)
        return turned


async def _turn(conn: PgConn, schema: str, found: Found, turn: Turn) -> Turned | None:
    rows = (await conn.run(*turn_call(schema, found.row, turn))).rows
    return Turned(found, turn, tuple(read_decided(rows))) if rows else None


async def _cancel(conn: PgConn, schema: str, name: str, number: int) -> bool:
    """Cancel the instance of an earlier slot, or ask its node to. Returns whether it has ended by that."""
    command = Command(by=f"{SCHEDULE} {name}", reason='overlap="cancel_running"')
    try:
        done = await run_dialogue(conn, cancelling(schema, number, command, force=False))
    except (NoTarget, Conflict):
        return False  # it has ended meanwhile, or is about to
    return bool(done.result == "cancelled")
