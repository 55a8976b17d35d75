"""Operations on one instance that take several statements, for every kind of connection; all commands. Sans-I/O.

See `foreign.Dialogue`; `run_dialogue` runs one on the engine's driver.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Final, TypeVar, get_args

import attrs
import psycopg

from durable_actors._option_checks import Duration, duration, shown
from durable_actors._postgres.driver import encode
from durable_actors._postgres.driver.connection import PgConn
from durable_actors._postgres.driver.statement import Params, Statement
from durable_actors._store.boundaries import DecisionPlan, Verb, decision_of, told
from durable_actors._store.bulk_receipts import MACHINE, stopping
from durable_actors._store.claim import read_promoted
from durable_actors._store.commands import INSTANCE, Command, Receipt, read_receipt
from durable_actors._store.explanation import Explanation
from durable_actors._store.foreign import Dialogue
from durable_actors._store.insert import key_as_given
from durable_actors._store.observe import (
    NEWEST,
    NodeView,
    Observed,
    nodes_call,
    observe_call,
    read_node,
    read_observed,
)
from durable_actors._store.read import Ending, Instance, endings_of, read_instance
from durable_actors._store.rows import Promoted
from durable_actors._store.signal import key_bytes
from durable_actors._store.sql import statement
from durable_actors._store.tree import Tree, check_limits, origins_call, origins_of, tree_call, tree_of
from durable_actors._store.why import explain_observed
from durable_actors.errors import (
    ConfigError,
    Conflict,
    Duplicate,
    InstanceCancelled,
    InstanceFailed,
    NoTarget,
)
from durable_actors.machine import Status, decode_json, decode_or_text

T = TypeVar("T")

FIRST_PAUSE: Final = 0.05
LONGEST_PAUSE: Final = 1.0
"""Seconds between the reads of `sync.result` and `aio.result`."""
LOST_BATCH: Final = 5000
"""Instances that one statement looks at for one whose row is gone: about 50 ms."""


async def run_dialogue(conn: PgConn, dialogue: Dialogue[T]) -> T:
    """Run a dialogue. Each statement is a transaction of its own."""
    try:
        call, params = next(dialogue)
        while True:
            try:
                rows = (await conn.run(call, params)).rows
            except psycopg.errors.UniqueViolation as exc:
                call, params = dialogue.throw(exc)
            else:
                call, params = dialogue.send(rows)
    except StopIteration as end:
        value: T = end.value
        return value


def resolving(schema: str, target: int | str | bytes) -> Dialogue[int]:
    """The id of a target: the id itself, or the occupant of the unique key, else its last owner. Raises `NoTarget`."""
    if not isinstance(target, str | bytes):
        return check_id(target)
    key = key_bytes(target) if isinstance(target, str) else target
    rows = yield statement("find_by_key", schema, read_only=True), [encode.bytea(key)]
    if not rows:
        raise NoTarget(
            f"no instance has or had the unique key {shown(key_as_given(key))}; "
            "retention deletes instances some time after their end; if its row was deleted by hand, "
            "`durable-actors verify` tells its id, and `rebuild` finds it by the key"
        )
    return int(rows[0][0] or 0)


def resolving_lost(schema: str, target: int | str | bytes) -> Dialogue[int]:
    """As `resolving`; finds also the last owner of a unique key whose row is gone, by the records that it left.

    That looks at every recorded instance: for repairs. Raises `NoTarget`.
    """
    if not isinstance(target, str | bytes):
        return check_id(target)
    try:
        return (yield from resolving(schema, target))
    except NoTarget as nobody:
        key = key_bytes(target) if isinstance(target, str) else target
        found: list[int] = []
        after: int | None = -(2**63)
        while after is not None:
            params = [f"\\x{key.hex()}".encode(), encode.number(after), encode.number(LOST_BATCH)]
            rows = yield statement("find_lost_by_key", schema, read_only=True), params
            after = None if rows[0][0] is None else int(rows[0][0])
            found += [int(row[0] or 0) for row in rows[1:]]
        if not found:
            raise NoTarget(
                f"no instance has or had the unique key {key_as_given(key)!r}, and no record names it"
            ) from nobody
        return max(found)


def check_id(target: object) -> int:
    """Raise `ConfigError` unless it can be an instance id. Pure."""
    if not isinstance(target, int) or isinstance(target, bool):
        hint = " (insert returns None when the unique key is occupied)" if target is None else ""
        raise ConfigError(
            f"an instance is named by its id or unique key, not by {shown(target)}{hint}",
            option="target",
            value=target,
        )
    if not -(2**63) <= target < 2**63:  # it would fail the shared read of all tasks that wait for a result
        raise ConfigError(f"target={shown(target)} is not an instance id", option="target", value=target)
    return target


def inspecting(schema: str, target: int | str | bytes) -> Dialogue[Instance]:
    """Read an instance. Raises `NoTarget`."""
    number = yield from resolving(schema, target)
    rows = yield _read_instance(schema, number)
    if not rows:
        raise (yield from _nobody(schema, number))
    return (yield from _with_parent(schema, read_instance(rows[0])))


def _with_parent(schema: str, instance: Instance) -> Dialogue[Instance]:
    """The instance with all that is recorded of who started it: one more statement, for children only."""
    if instance.parent_id is None:
        return instance
    rows = yield origins_call(schema, [instance.id])
    return attrs.evolve(instance, parent_run=origins_of(rows).get(instance.id, instance.parent_run))


def climbing(
    schema: str, target: int | str | bytes, *, depth: int, children: int, limit: int
) -> Dialogue[Tree]:
    """Read the family of an instance: two statements, whatever its size. Raises `NoTarget`."""
    check_limits(depth, children, limit)
    number = yield from resolving(schema, target)
    rows = yield tree_call(schema, number, depth=depth, children=children, limit=limit)
    ids = [int(row[0] or 0) for row in rows if row[1] is not None]
    origins = (yield origins_call(schema, ids)) if ids else []
    return tree_of(number, rows, origins_of(origins))


def _nobody(schema: str, number: int) -> Dialogue[NoTarget]:
    """The error for an id without a row. It says whether there is a journal."""
    params = [encode.number(number), b"0", b"1"]
    rows = yield statement("read_records", schema, read_only=True), params
    gone = rows and rows[0][2] is not None
    hint = f": its row is gone, its journal is not; `durable-actors rebuild {number}`" if gone else ""
    return NoTarget(f"there is no instance {number}{hint}")


def undelivered(schema: str, name: str, target: int | str | bytes) -> Dialogue[NoTarget]:
    """The error for a signal that found no live instance: it says whether there was one."""
    try:
        instance = yield from inspecting(schema, target)
    except NoTarget as error:
        return NoTarget(f"signal {name!r}: {error}")
    return NoTarget(f"signal {name!r}: instance {instance.id} has ended: {instance.status}")


def _read_instance(schema: str, number: int) -> tuple[Statement, Params]:
    return statement("read_instances", schema, read_only=True), [encode.int_array([number]), b"t"]


def observing(
    schema: str, target: int | str | bytes, *, full: bool, parent: bool = False
) -> Dialogue[tuple[dict[int, Observed], int, list[NodeView]]]:
    """Read what explains an instance: the instance and its missing children, by id; its own id; the nodes.

    Raises `NoTarget`. Two statements, which lock nothing. `parent`: also who started it, by
    a third one if it is a child.
    """
    number = yield from resolving(schema, target)
    rows = yield observe_call(schema, [number], full=full)
    found = {each.instance.id: each for each in map(read_observed, rows)}
    if number not in found:
        raise (yield from _nobody(schema, number))
    nodes = yield nodes_call(schema)
    if parent:
        whole = yield from _with_parent(schema, found[number].instance)
        found[number] = attrs.evolve(found[number], instance=whole)
    return found, number, [*map(read_node, nodes)]


def explaining(schema: str, target: int | str | bytes) -> Dialogue[Explanation]:
    """Explain an instance. Raises `NoTarget`."""
    found, number, nodes = yield from observing(schema, target, full=True)
    return explain_observed(found[number], nodes, found)


def ending(schema: str, number: int) -> Dialogue[Ending | None]:
    """How an instance ended; None if it has not. Raises `NoTarget`."""
    rows = yield statement("read_finals", schema, read_only=True), [encode.int_array([number])]
    finals, missing = endings_of(rows, [number])
    if missing:
        raise NoTarget(f"there is no instance {number}")
    return finals.get(number)


# -- commands


@attrs.frozen
class InstanceCommand:
    """One command on an instance, and the statuses that allow it."""

    sql: str
    """Its statement: effect and receipt. Takes the id and `Command.params`, and returns the result, or nothing."""
    name: str
    """As in the receipts."""
    allowed: frozenset[str]
    otherwise: str
    """Which instances allow it, for the error."""
    refuses: Callable[[Instance], str | None] | None = None
    """What of an instance in such a status does not allow it, for the error; None: nothing."""
    recalls: Callable[[str, Instance], Dialogue[str]] | None = None
    """What the error says after that: it may read."""


RETRY: Final = InstanceCommand(
    "retry_instance",
    "retry",
    frozenset({"failed", "cancelled"}),
    "only a failed or cancelled one can be retried",
)


def _compensates(instance: Instance) -> str | None:
    if instance.cancellation is None or instance.cancellation.ends(instance.visit):
        return None
    return f"was cancelled, and compensates in step {instance.step!r}; force=True ends it without that"


CANCEL: Final = InstanceCommand(
    "cancel_instance",
    "cancel",
    frozenset({"runnable", "executing", "awaiting_signal", "awaiting_children"}),
    "only one that has not ended can be cancelled",
    refuses=_compensates,
)
FORCE_CANCEL: Final = attrs.evolve(CANCEL, refuses=None)


RUN_NOW: Final = InstanceCommand(
    "hasten_instance", "run_now", frozenset({"runnable"}), "only a runnable one can be run now"
)


def _undecidable(kind: str, what: str, instance: Instance) -> str | None:
    """Why it does not wait for this decision; None: it does."""
    otherwise = f", and only one that waits for {_ASKS[kind]} can be {what}"
    if instance.boundary is not None:
        asks = _ASKS[instance.boundary.kind]
        return None if instance.boundary.kind == kind else f"waits for {asks}{otherwise}"
    known = None if instance.decision is None else told(instance.decision)
    if instance.status == "failed":
        known = instance.last_error
    return f"is {instance.status}" + (f" ({known})" if known else "") + otherwise


def _last_decision(schema: str, instance: Instance) -> Dialogue[str]:
    """What was decided last, by its receipt: the row forgets it when the step that got it has ended."""
    if instance.boundary is not None or instance.decision is not None:
        return ""
    params = [encode.text(INSTANCE), encode.text(str(instance.id)), encode.number(NEWEST), b"100", None]
    rows = yield statement("list_receipts_of", schema, read_only=True), params
    decisions = (decision_of(read_receipt(row)) for row in rows)
    last = next((each for each in decisions if each is not None), None)
    return "" if last is None else f"; {told(last)}"


_ASKS: Final = {"pause": "somebody to let it proceed", "approval": "an approval"}


def _decision(verb: Verb, kind: str, what: str) -> InstanceCommand:
    otherwise = f"only one that waits for {_ASKS[kind]} can be {what}"
    return InstanceCommand(
        "resolve_boundary",
        verb,
        frozenset(get_args(Status)),
        otherwise,
        refuses=partial(_undecidable, kind, what),
        recalls=_last_decision,
    )


DECISIONS: Final[dict[Verb, InstanceCommand]] = {
    "proceed": _decision("proceed", "pause", "let proceed"),
    "approve": _decision("approve", "approval", "approved"),
    "reject": _decision("reject", "approval", "rejected"),
}


@attrs.frozen
class CarriedOut:
    """A command is carried out, now or by an earlier call with the same idempotency key."""

    id: int
    """The instance."""
    result: Any
    """What the call returns: what the first call returned."""
    found: Instance | None
    """The instance as it was before; None if an earlier call did it."""
    more: tuple[bytes | None, ...] = ()
    """What the statement returned beside the result."""
    offered: tuple[Promoted, ...] = ()
    """Instances that are offered now."""
    cascades: bool = False
    """Whether children are to be cancelled."""


def carrying_out(
    kind: InstanceCommand, schema: str, target: int | str | bytes, command: Command, *further: bytes | None
) -> Dialogue[CarriedOut]:
    """Carry out a command on an instance: done, already done (the same key), or `Conflict`.

    `further`: the statement's parameters after those of every command. Raises `NoTarget`, `Conflict` if its state does
    not allow it, `Duplicate` if it would need a unique key that another instance occupies. Nothing is written then.
    """
    number = yield from resolving(schema, target)
    while True:
        # The receipt is read after the instance: who sees the effect of an earlier call also sees its receipt.
        rows = yield _read_instance(schema, number)
        earlier = yield from earlier_receipt(schema, kind.name, number, command)
        if earlier is not None:
            return CarriedOut(number, earlier.result, None)
        if not rows:
            raise NoTarget(f"there is no instance {number}")
        instance = read_instance(rows[0])
        if instance.status not in kind.allowed:
            raise Conflict(f"instance {number} is {instance.status}, and {kind.otherwise}")
        refusal = None if kind.refuses is None else kind.refuses(instance)
        if refusal is not None:
            known = "" if kind.recalls is None else (yield from kind.recalls(schema, instance))
            raise Conflict(f"instance {number} {refusal}{known}")
        try:
            done = yield statement(kind.sql, schema), [encode.number(number), *command.params(), *further]
        except psycopg.errors.UniqueViolation as refused:
            if refused.diag.constraint_name != "receipts_once":
                duplicate = yield from _occupied(schema, instance)
                raise duplicate from None
            earlier = yield from earlier_receipt(schema, kind.name, number, command)
            if earlier is None:
                raise  # a snapshot that is older than the receipt does not show it
            return CarriedOut(number, earlier.result, None)
        if done:
            return CarriedOut(number, decode_or_text(done[0][0] or b"null"), instance, tuple(done[0][1:]))
        # It was changed between the two statements: read it again.


def attempting(
    kind: InstanceCommand, schema: str, number: int, command: Command, *further: bytes
) -> Dialogue[CarriedOut]:
    """As `carrying_out`, for one of many: the statement alone. `found` is None; nothing is read that tells why not."""
    try:
        done = yield statement(kind.sql, schema), [encode.number(number), *command.params(), *further]
    except psycopg.errors.UniqueViolation as refused:
        if refused.diag.constraint_name != "receipts_once":
            raise Duplicate("unique key", None) from refused
        return CarriedOut(number, None, None)
    if not done:
        raise Conflict(f"instance {number} has changed, and {kind.otherwise}")
    return CarriedOut(number, decode_or_text(done[0][0] or b"null"), None, tuple(done[0][1:]))


def cancelling(
    schema: str,
    target: int | str | bytes,
    command: Command,
    *,
    force: bool,
    children: bool = False,
    at_once: bool = False,
) -> Dialogue[CarriedOut]:
    """Cancel an instance; the result is "cancelled" or "requested". Raises as `carrying_out`.

    `at_once`: it is an id, one of many (`attempting`).

    A second statement offers the next sibling of its key. If that is never sent, the sweep of a node does it. Its
    children are not cancelled here: see `cascade.py`.
    """
    kind = FORCE_CANCEL if force else CANCEL
    flags = (b"t" if force else b"f", b"t" if children else b"f")
    if at_once:
        done = yield from attempting(kind, schema, check_id(target), command, *flags)
    else:
        done = yield from carrying_out(kind, schema, target, command, *flags)
    if not done.more:
        return done
    if done.result == "cancelled" and done.found is not None and done.found.machine == MACHINE:
        yield from stopping(schema, done.found.state)
    key, parent, queue, entered = done.more
    offered: list[Promoted] = []
    if entered is not None:
        offered.append(Promoted(done.id, entered.decode()))
    if parent is not None and queue is not None:
        offered.append(Promoted(int(parent), queue.decode()))
    if key is not None:
        rows = yield statement("promote_siblings", schema), [encode.text_array([key.decode()])]
        offered += read_promoted(rows)
    ended = done.result == "cancelled"
    return attrs.evolve(
        done,
        offered=tuple(offered),
        cascades=parent is not None or (children and (ended or entered is not None)),
    )


def deciding(schema: str, target: int | str | bytes, plan: DecisionPlan) -> Dialogue[CarriedOut]:
    """Resolve the boundary where an instance waits for a person; the result is its id. Raises as `carrying_out`."""
    done = yield from carrying_out(DECISIONS[plan.verb], schema, target, plan.command, *plan.params)
    if not done.more or done.more[1] is None:
        return done
    parent, queue = done.more
    return attrs.evolve(done, offered=(Promoted(int(parent or 0), (queue or b"").decode()),))


def earlier_receipt(schema: str, name: str, number: int, command: Command) -> Dialogue[Receipt | None]:
    """The receipt of the same command with the same key, if there is one."""
    if command.idempotency_key is None:
        return None
    params = [*map(encode.text, (name, INSTANCE, str(number), command.idempotency_key))]
    rows = yield statement("find_receipt", schema, read_only=True), params
    return read_receipt(rows[0]) if rows else None


def _occupied(schema: str, instance: Instance) -> Dialogue[Duplicate]:
    """The error for a unique key that another instance occupies."""
    given = instance.unique_key or b""
    key = given if isinstance(given, bytes) else key_bytes(given)
    found = yield statement("find_by_key", schema, read_only=True), [encode.bytea(key)]
    holder = int(found[0][0] or 0) if found else instance.id
    return Duplicate(key_as_given(key), None if holder == instance.id else holder)


def listing_receipts(
    schema: str, target: int | str | bytes | None, *, command: str | None, before: int, limit: int
) -> Dialogue[list[Receipt]]:
    """The newest receipts with ids below `before`, of one instance or of all commands. Raises `NoTarget` for a key."""
    page = [encode.number(before), encode.number(limit), encode.text(command)]
    if target is None:
        rows = yield statement("list_receipts", schema, read_only=True), page
    else:
        number = yield from resolving(schema, target)
        of = [encode.text(INSTANCE), encode.text(str(number))]
        rows = yield statement("list_receipts_of", schema, read_only=True), [*of, *page]
    return [*map(read_receipt, rows)]


class ResultPolling:
    """The pauses between two reads of a result, and the timeout."""

    def __init__(self, timeout: Duration | None) -> None:
        limit = math.inf if timeout is None else duration("timeout", timeout, positive=False)
        self._until = time.monotonic() + limit
        self._pause = FIRST_PAUSE

    def pause(self, number: int) -> float:
        """Seconds until the next read, at most until the timeout. Raises `TimeoutError` after it."""
        left = self._until - time.monotonic()
        if left <= 0:
            raise TimeoutError(f"instance {number} has not ended in time")
        self._pause, pause = min(self._pause * 1.5, LONGEST_PAUSE), self._pause
        return min(pause, left)


def value_of(final: Ending, type: Any) -> Any:  # noqa: A002 - as `result(type=...)`
    """What `result` returns or raises for an instance that has ended. Pure."""
    if final.status == "cancelled":
        raise InstanceCancelled(final.id, final.last_error or "no reason was given")
    if final.status == "failed":
        raise InstanceFailed(final.id, final.last_error or "no reason was stored")
    if final.result is None:
        return None
    return decode_json(final.result, what=f"result of instance {final.id}", type=type)
