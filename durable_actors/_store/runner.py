"""Runners: claims that a worker of any kind takes, renews and ends, by the SQL functions for it.

The functions decide; this module translates. What a worker in another language can do is what these calls do.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Any, Final, assert_never, cast

import attrs
import msgspec
import psycopg

from durable_actors._postgres.driver import encode
from durable_actors._postgres.driver.connection import PgConn
from durable_actors._postgres.driver.decode import decode_instant
from durable_actors._postgres.driver.statement import Params, Row, Statement
from durable_actors._store.boundaries import read_decision
from durable_actors._store.commands import read_cancellation
from durable_actors._store.read import Instance, read_instance
from durable_actors._store.sql import statement
from durable_actors.errors import ConfigError, Conflict, DurableError, InvalidOutcome, LeaseLost, NoTarget
from durable_actors.machine import (
    KEEP,
    NO_DEPENDENCIES,
    Approval,
    Await,
    Cancellation,
    ChildView,
    Decision,
    Done,
    InsertPlan,
    MachineSpec,
    Next,
    Outcome,
    Pause,
    Retry,
    ScheduleChildren,
    Signal,
    Status,
    Stop,
    decode_or_text,
    encode_json,
    error_type,
    reason_text,
    traceback_text,
)

_ERRORS: Final[Mapping[str, type[DurableError]]] = {
    "RD001": LeaseLost,
    "RD002": LeaseLost,
    "RD003": Conflict,
    "RD004": InvalidOutcome,
    "RD005": NoTarget,
}


@attrs.define(eq=False, kw_only=True)
class Claimed:
    """A claim of `claim_next`: an instance that only its holder may complete."""

    id: int
    """The id of the instance."""
    claim_id: str
    """The claim. Together with the token it is the fence of `heartbeat`, `complete` and `fail`."""
    token: str = attrs.field(repr=False)
    """The secret of the claim. The database has its hash."""
    lease_until: datetime
    """When the claim ends unless it is renewed; `heartbeat` updates it."""
    machine: str
    """The name of the machine."""
    version: int
    """Its version."""
    step: str
    """The step to run."""
    state: Any
    """The stored JSON, not decoded to the machine's type."""
    attempt: int
    """Executions of this visit so far."""
    visit: int
    """The number of steps entered."""
    partition_key: str | None
    """Its partition key, if it has one."""
    parent_id: int | None
    """The instance that scheduled it, if there is one."""
    awaited: tuple[Signal, ...]
    """The signals that matched the await which led to this step. `Next` and `ScheduleChildren` consume them."""
    signals: tuple[Signal, ...]
    """The inbox, up to 1,000 signals."""
    more_signals: bool
    """Whether the inbox has more."""
    children: tuple[ChildView, ...] | None
    """The children of the barrier that led to this step; None: more than 10,000."""
    children_counts: Mapping[Status, int]
    """The same, counted by status."""
    decision: Decision | None = None
    """What a person decided, if a `Pause` or `Approval` led to this step."""
    cancellation: Cancellation | None = None
    """As `Context.cancellation`: why it was cancelled, if this step compensates."""
    dependencies: Mapping[str, ChildView] = NO_DEPENDENCIES
    """As `Context.dependencies`: what it comes after, by key."""
    request: Any = None
    """What a command asks of whoever runs this step, as of the last `heartbeat`; None: nothing."""

    @property
    def idempotency_key(self) -> str:
        """As `Context.idempotency_key`."""
        return f"{self.id}/{self.visit}/{self.step}"


async def claim_next(
    conn: PgConn, schema: str, *, queue: str, steps: Sequence[str], owner: str, lease: float
) -> Claimed | None:
    """Claim the most urgent due instance of the queue that stands at one of these steps; None if there is none.

    Raises `UnreadableClaimError` if it has claimed one whose inbox or children Python cannot decode: the caller must
    end it.
    """
    params = [queue.encode(), encode.text_array(steps), owner.encode(), encode.number(lease)]
    with _explained(ConfigError):
        rows = (await conn.run(statement("claim_next", schema), params)).rows
    return _read_claimed(rows[0]) if rows else None


def _read_claimed(row: Row) -> Claimed:
    def text(index: int) -> str:
        return (row[index] or b"").decode()

    def json(index: int) -> Any:
        return decode_or_text(row[index] or b"null")

    lease_until = decode_instant(row[3])
    assert lease_until is not None
    claimed = Claimed(
        id=int(text(0)),
        claim_id=text(1),
        token=text(2),
        lease_until=lease_until,
        machine=text(4),
        version=int(text(5)),
        step=text(6),
        state=json(7),
        attempt=int(text(8)),
        visit=int(text(9)),
        partition_key=None if row[10] is None else text(10),
        parent_id=None if row[11] is None else int(text(11)),
        awaited=(),
        signals=(),
        more_signals=row[14] == b"t",
        children=None,
        children_counts=cast("Mapping[Status, int]", json(16)),
        decision=read_decision(json(17)),
        cancellation=None if row[18] is None else read_cancellation(row[18]),
    )
    try:
        claimed.awaited = tuple(map(_read_signal, _signals(row[12] or b"[]")))
        claimed.signals = tuple(map(_read_signal, _signals(row[13] or b"[]")))
        claimed.children = None if row[15] is None else tuple(map(_read_child, _children(row[15])))
        named = _dependencies(row[19] or b"{}")
        claimed.dependencies = {key: _read_child(each) for key, each in named.items()}
    except (ValueError, RecursionError) as error:
        raise UnreadableClaimError(claimed) from error
    return claimed


class UnreadableClaimError(Exception):
    """`claim_next` has claimed an instance, and Python cannot decode what its step is to be handed.

    jsonb accepts deeper nesting than any decoder.
    """

    def __init__(self, claimed: Claimed) -> None:
        super().__init__(claimed.id)
        self.claimed = claimed


class _Told(msgspec.Struct):
    """A signal, as the function tells it. Its payload may be a number that Python cannot decode."""

    id: int
    name: str
    payload: msgspec.Raw
    inserted_at: str
    dedup_key: str | None = None


class _Child(msgspec.Struct):
    id: int
    machine: str
    status: Status
    result: msgspec.Raw = msgspec.Raw(b"null")
    last_error: str | None = None
    key: str | None = None


_signals: Final = msgspec.json.Decoder(list[_Told]).decode
_children: Final = msgspec.json.Decoder(list[_Child]).decode
_dependencies: Final = msgspec.json.Decoder(dict[str, _Child]).decode


def _read_signal(told: _Told) -> Signal:
    at = decode_instant(told.inserted_at.encode())
    assert at is not None
    # As for a step of an engine: the inbox must stay readable, whatever was written with SQL.
    return Signal(told.id, told.name, decode_or_text(bytes(told.payload)), told.dedup_key, at)


def _read_child(told: _Child) -> ChildView:
    result = decode_or_text(bytes(told.result))
    return ChildView(told.id, told.machine, told.status, result, told.last_error, told.key)


async def heartbeat(conn: PgConn, schema: str, claimed: Claimed, *, lease: float) -> datetime:
    """Extend the lease. Raises `LeaseLost`."""
    with _explained(ConfigError):
        [row] = (
            await conn.run(statement("heartbeat", schema), [*_fence(claimed), encode.number(lease)])
        ).rows
    lease_until = decode_instant(row[0])
    assert lease_until is not None
    claimed.lease_until, claimed.request = lease_until, decode_or_text(row[1] or b"null")
    return lease_until


async def complete(
    conn: PgConn,
    schema: str,
    claimed: Claimed,
    outcome: bytes,
    *,
    accept_late: bool,
    limits: str | None = None,
) -> Instance:
    """Commit an outcome (JSON, see `outcome_json`) and read the instance, in one transaction.

    `limits`: those of the step that is entered. The function names none; as for engines, a rider writes them.
    """
    params = [*_fence(claimed), outcome, b"t" if accept_late else b"f"]
    riders: list[tuple[Statement, Params]] = []
    if limits is not None:
        ids, claims = encode.int_array([claimed.id]), encode.text_array([claimed.claim_id])
        riders.append((statement("write_limits", schema), [ids, claims, encode.text_array([limits])]))
    return await _end(conn, schema, claimed, statement("complete", schema), params, riders=riders)


async def fail(
    conn: PgConn,
    schema: str,
    claimed: Claimed,
    error: bytes,
    *,
    retry_in: float | None,
    max_attempts: int,
    accept_late: bool,
) -> Instance:
    """Commit a failure (JSON, see `error_json`) and read the instance, in one transaction."""
    numbers = [encode.number(retry_in), encode.number(max_attempts)]
    params = [*_fence(claimed), error, *numbers, b"t" if accept_late else b"f"]
    return await _end(conn, schema, claimed, statement("fail", schema), params)


async def _end(
    conn: PgConn,
    schema: str,
    claimed: Claimed,
    call: Statement,
    params: Params,
    *,
    riders: Sequence[tuple[Statement, Params]] = (),
) -> Instance:
    read = statement("read_instances", schema, read_only=True)
    with _explained(InvalidOutcome):
        results = await conn.batch([(call, params), *riders, (read, [encode.int_array([claimed.id]), b"t"])])
    return read_instance(results[-1].rows[0])


def _fence(claimed: Claimed) -> list[bytes | None]:
    return [encode.number(claimed.id), claimed.claim_id.encode(), claimed.token.encode()]


@contextmanager
def _explained(invalid: type[DurableError]) -> Generator[None, None, None]:
    """Turn what the functions refuse into our errors; `invalid` is that for bad arguments."""
    try:
        yield
    except psycopg.Error as exc:
        kind = invalid if exc.sqlstate == "RD004" else _ERRORS.get(exc.sqlstate or "")
        if kind is None:
            raise
        raise kind(exc.diag.message_primary or str(exc)) from exc


# -- outcomes as JSON. Pure.


def outcome_json(outcome: Outcome, spec: MachineSpec | None, plans: Sequence[InsertPlan] = ()) -> bytes:  # noqa: PLR0911 - one per case
    """The JSON form of an outcome, as the function `complete` takes it. `plans` are the children to insert.

    States are encoded as the machine says, or as plain JSON if this process does not know it.
    """
    match outcome:
        case Next():
            fields = {"next": outcome.step, **_consume(outcome.consume)}
            if outcome.partition_key is not KEEP:
                fields["partition_key"] = outcome.partition_key
            return _object(fields, _state(spec, outcome.state, outcome.step))
        case Retry():
            return _object({"retry": outcome.delay}, _state(spec, outcome.state, ""))
        case Await():
            fields = {"await": outcome.names, "then": outcome.then, "timeout": outcome.timeout}
            return _object(
                {**fields, **_consume(outcome.consume)}, _state(spec, outcome.state, outcome.then or "")
            )
        case ScheduleChildren():
            fields = {"then": outcome.then, "join": outcome.join, "timeout": outcome.timeout}
            children = {"children": b"[" + b",".join(map(_child, plans)) + b"]"}
            return _object(fields, {**children, **_state(spec, outcome.state, outcome.then)})
        case Pause() | Approval():
            kind = "pause" if isinstance(outcome, Pause) else "approval"
            fields = {kind: outcome.then, "title": outcome.title}
            if isinstance(outcome, Approval):
                fields |= {
                    "on_reject": outcome.on_reject,
                    "timeout": outcome.timeout,
                    "on_timeout": outcome.on_timeout,
                }
            data = (
                {}
                if outcome.data is None
                else {"data": encode_json(outcome.data, what=f"the data of the {kind}")}
            )
            return _object(fields, {**data, **_state(spec, outcome.state, outcome.then)})
        case Done():
            return _object({}, {"done": encode_json(outcome.result, what="the result")})
        case Stop():
            return _object({}, {"stop": error_json(outcome.reason)})
        case _:
            assert_never(outcome)


def limits_of(outcome: Outcome, spec: MachineSpec | None) -> str | None:
    """The limits of the step that the outcome enters: as `Next` says, else as the step declares; None: none."""
    match outcome:
        case Next(limits=str() as given):
            return given
        case Next(step=step):
            pass
        case Await(then=str() as step) | ScheduleChildren(then=step) | Pause(then=step) | Approval(then=step):
            pass
        case _:
            return None
    return None if spec is None else spec.steps[step].limits


def error_json(error: object) -> bytes:
    """The JSON form of an error: its text, and of an exception its type and traceback."""
    told = {"text": reason_text(error)}
    if isinstance(error, BaseException):
        told |= {"type": error_type(error), "traceback": traceback_text(error) or ""}
    return encode_json(told, what="an error")


def _child(plan: InsertPlan) -> bytes:
    if plan.on_duplicate != "skip":
        raise InvalidOutcome(f'a child of a runner takes on_duplicate="skip", not {plan.on_duplicate!r}')
    if plan.fair_key is not None:
        raise InvalidOutcome(
            "a child of a runner takes no fair_key: let a machine or a job of an engine start it"
        )
    if plan.limits is not None:
        raise InvalidOutcome(
            f"a child of a runner uses no limits, and {plan.machine} does: let a machine or a job of an engine start it"
        )
    fields: dict[str, object] = {
        "machine": plan.machine,
        "version": plan.version,
        "step": plan.step,
        "queue": plan.queue,
        "priority": plan.priority,
        "partition_key": plan.partition_key,
        "schedule_in": plan.delay or None,
        "eligible_at": None if plan.eligible_at is None else plan.eligible_at.isoformat(),
        "journal": str(plan.journal),
        "fingerprint": plan.fingerprint,
        "max_attempts": plan.max_attempts,
    }
    if plan.unique_key is not None:
        fields |= {"unique_key_hex": plan.unique_key.hex(), "unique_scope": plan.unique_scope}
    encoded = {"state": plan.state}
    if plan.labels is not None:
        fields["tags"] = plan.labels.tags or None
        encoded |= {} if plan.labels.meta is None else {"meta": plan.labels.meta}
    return _object({name: value for name, value in fields.items() if value is not None}, encoded)


def _consume(ids: Sequence[int]) -> dict[str, object]:
    return {"consume": ids} if ids else {}


def _state(spec: MachineSpec | None, state: object, step: str) -> dict[str, bytes]:
    if state is KEEP:
        return {}
    return {
        "state": encode_json(state, what="the state") if spec is None else spec.codec.encode(state, step=step)
    }


def _object(fields: Mapping[str, object], encoded: Mapping[str, bytes]) -> bytes:
    """A JSON object of fields to encode and of fields that are encoded already, whose bytes must not change."""
    parts = {name: encode_json(value, what=name) for name, value in fields.items()} | dict(encoded)
    return (
        b"{" + b",".join(encode_json(name, what=name) + b":" + value for name, value in parts.items()) + b"}"
    )
