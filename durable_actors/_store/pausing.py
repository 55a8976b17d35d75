"""The commands that pause and resume: instances, queues, machines in queues. Sans-I/O; see `dialogues`."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Final

import attrs
import msgspec
import psycopg

from durable_actors._option_checks import duration, has_zone, in_utc, queue_name, shown
from durable_actors._postgres.driver import encode
from durable_actors._postgres.driver.connection import PgConn
from durable_actors._postgres.driver.statement import Statement
from durable_actors._store.claim import read_promoted
from durable_actors._store.commands import QUEUE, Command, read_receipt
from durable_actors._store.dialogues import CarriedOut, InstanceCommand, carrying_out
from durable_actors._store.foreign import Dialogue
from durable_actors._store.holds import PAUSED
from durable_actors._store.pauses import QueuePause, pause_of, pause_target
from durable_actors._store.read import Instance
from durable_actors._store.sql import statement
from durable_actors.errors import ConfigError, Conflict
from durable_actors.machine import MachineRef, current_registry, decode_or_text

Until = datetime | timedelta | float
"""When a pause ends by itself: an instant with a time zone, or seconds or a timedelta from now."""

_LIVE: Final = frozenset({"runnable", "executing", "awaiting_signal", "awaiting_children"})


# -- instances


def _not_pausable(instance: Instance) -> str | None:
    request = instance.request
    if request is None or not (request.pauses or request.cancels):
        return None
    by = f" by {request.by}" if request.by else ""
    return f"is paused already{by}" if request.pauses else f"is to be cancelled{by}"


def _not_paused(instance: Instance) -> str | None:
    by_hand = instance.status == "runnable" and instance.hold == PAUSED
    return None if instance.paused is not None or by_hand else f"is {instance.status}, and not paused"


PAUSE: Final = InstanceCommand(
    "pause_instance", "pause", _LIVE, "only one that has not ended can be paused", _not_pausable
)
RESUME: Final = InstanceCommand(
    "resume_instance", "resume", _LIVE, "only one that is paused can be resumed", _not_paused
)


def pausing(schema: str, target: int | str | bytes, command: Command) -> Dialogue[CarriedOut]:
    """Pause an instance; the result is "paused" or "requested". Raises as `carrying_out`.

    A second statement offers the next sibling of its key. If that is never sent, the sweep of a node does it.
    """
    done = yield from carrying_out(PAUSE, schema, target, command)
    if not done.more or done.more[0] is None:
        return done
    rows = yield statement("promote_siblings", schema), [encode.text_array([done.more[0].decode()])]
    return attrs.evolve(done, offered=tuple(read_promoted(rows)))


async def pause_instance(conn: PgConn, schema: str, number: int) -> str | None:
    """Pause an instance: "paused" or "requested"; None if it has ended, is paused, or is to be cancelled.

    Siblings of its key are not offered: see `pausing`.
    """
    params = [encode.number(number), *Command().params()]
    rows = (await conn.run(statement("pause_instance", schema), params)).rows
    return msgspec.json.decode(rows[0][0] or b"null", type=str) if rows else None


async def resume_instance(conn: PgConn, schema: str, number: int) -> bool:
    """End the pause of an instance; False if it is not paused."""
    params = [encode.number(number), *Command().params()]
    return bool((await conn.run(statement("resume_instance", schema), params)).rows)


# -- queues


@attrs.frozen
class QueuePlan:
    """Which queue, or machine in a queue, and until when: the checked arguments of a command on a queue."""

    queue: str
    machine: str | None
    until: datetime | None = None
    seconds: float | None = None

    @property
    def target(self) -> str:
        """How receipts name it."""
        return pause_target(self.queue, self.machine)


def plan_queue(queue: object, machine: object = None, until: object = None) -> QueuePlan:
    """Check the arguments of `pause_queue` and `resume_queue`. Raises `ConfigError`."""
    given = queue_name("queue", queue)
    of = None if machine is None else _machine_name(machine)
    if until is None:
        return QueuePlan(given, of)
    if isinstance(until, datetime):
        if not has_zone(until):
            raise ConfigError(
                f"until={shown(until)} has no time zone: use an instant with one, or seconds from now",
                option="until",
                value=until,
            )
        return QueuePlan(
            given, of, until=in_utc(until)
        )  # Postgres does not read every offset that Python has
    return QueuePlan(given, of, seconds=duration("until", until))


def _machine_name(machine: object) -> str:
    if isinstance(machine, str):
        return queue_name("machine", machine)
    found: MachineRef = machine  # type: ignore[assignment] # `find` refuses anything else
    return current_registry().find(found).name


@attrs.frozen
class QueueCommand:
    """A command on a queue was carried out, now or by an earlier call with the same idempotency key."""

    pause: QueuePause
    """The pause: as it is now, or as it was when it ended."""
    repeated: bool


def pausing_queue(schema: str, plan: QueuePlan, command: Command) -> Dialogue[QueueCommand]:
    """Pause a queue, or change its pause. Raises `Conflict` if its end has passed, by the clock of the database."""
    instant = None if plan.until is None else plan.until.isoformat().encode()
    call = statement("pause_queue", schema), [instant, encode.number(plan.seconds)]
    done = yield from _on_queue("pause", schema, plan, command, call)
    if done is None:
        raise Conflict(f"until={shown(plan.until)} has passed: nothing would be paused")
    return done


def resuming_queue(schema: str, plan: QueuePlan, command: Command) -> Dialogue[QueueCommand]:
    """End the pause of a queue. Raises `Conflict` if it is not paused."""
    call = statement("resume_queue", schema), list[bytes | None]()
    done = yield from _on_queue("resume", schema, plan, command, call)
    if done is None:
        what = f"queue {plan.queue!r}"
        what = what if plan.machine is None else f"machine {plan.machine!r} in {what}"
        raise Conflict(f"{what} is not paused")
    return done


def _on_queue(
    name: str,
    schema: str,
    plan: QueuePlan,
    command: Command,
    call: tuple[Statement, list[bytes | None]],
) -> Dialogue[QueueCommand | None]:
    """Carry it out, or find that an earlier call with the same key did. None: the statement found nothing to do."""
    earlier = yield from _earlier(schema, name, plan, command)
    if earlier is not None:
        return earlier
    queue, machine = encode.text(plan.queue), encode.text(plan.machine or "")
    params = [encode.text(plan.target), *command.params(), queue, machine, *call[1]]
    try:
        rows = yield call[0], params
    except psycopg.errors.UniqueViolation:
        earlier = yield from _earlier(schema, name, plan, command)
        if earlier is None:
            raise  # a snapshot that is older than the receipt does not show it
        return earlier
    return QueueCommand(pause_of(decode_or_text(rows[0][0] or b"null")), repeated=False) if rows else None


def _earlier(schema: str, name: str, plan: QueuePlan, command: Command) -> Dialogue[QueueCommand | None]:
    if command.idempotency_key is None:
        return None
    params = [*map(encode.text, (name, QUEUE, plan.target, command.idempotency_key))]
    rows = yield statement("find_receipt", schema, read_only=True), params
    return QueueCommand(pause_of(read_receipt(rows[0]).result), repeated=True) if rows else None
