"""Signals: send them, read inboxes, wake instances whose deadline has passed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal, cast

import attrs

from durable_actors._option_checks import shown
from durable_actors._postgres.driver import encode
from durable_actors._postgres.driver.connection import PgConn
from durable_actors._postgres.driver.decode import decode_instant
from durable_actors._postgres.driver.statement import Params, Row, Statement
from durable_actors._store.boundaries import read_decision
from durable_actors._store.insert import MAX_OCCUPANT_READS, insert_params
from durable_actors._store.rows import Claim, Promoted
from durable_actors._store.schedules import read_scheduled
from durable_actors._store.sql import statement
from durable_actors.errors import ConfigError, StateError
from durable_actors.machine import Decision, InsertPlan, ScheduledRun, Signal, decode_or_text, encode_json

MAX_NAME_BYTES: Final = 500
MAX_PAYLOAD_BYTES: Final = 1_000_000
PAGE_SIZE: Final = 1000
"""Maximum length of `ctx.signals`, and page size of `iter_signals` and of reading children."""


@attrs.frozen
class Delivery:
    """One signal to send."""

    target: int | None
    """Instance id; None if it is addressed by key."""
    key: bytes | None
    name: str
    payload: bytes
    """JSON."""
    dedup_key: str | None


@attrs.frozen
class Sent:
    """The result of a delivery."""

    target: int | None
    outcome: Literal["sent", "duplicate", "no_target"]
    queue: str | None
    woken: bool


def plan_signal(target: object, name: object, payload: object, dedup_key: object) -> Delivery:
    """Check a signal before any SQL. Raises `ConfigError` for target and name, `StateError` for the payload. Pure."""
    if isinstance(target, bool) or not isinstance(target, int | str | bytes):
        raise ConfigError(
            f"a signal's target is an id or a unique key, not {shown(target)}", option="target", value=target
        )
    if isinstance(target, int) and not 0 < target < 2**63:
        raise ConfigError(f"target={shown(target)} is not an instance id", option="target", value=target)
    for option, value in (("name", name), ("dedup_key", dedup_key)):
        if not _is_short_text(value) and (value is not None or option == "name"):
            text = f"{option}={shown(value)} must be a string of 1 to {MAX_NAME_BYTES} bytes"
            text += " without NUL or lone surrogates"
            raise ConfigError(text, option=option, value=value)
    data = encode_json(payload, what=f"payload of signal {name!r}")
    if len(data) > MAX_PAYLOAD_BYTES:
        raise StateError(
            f"payload of signal {name!r} has {len(data)} bytes, the limit is {MAX_PAYLOAD_BYTES}; "
            "store it elsewhere and send a reference"
        )
    number = target if isinstance(target, int) else None
    key = key_bytes(target) if isinstance(target, str) else target if isinstance(target, bytes) else None
    return Delivery(number, key, str(name), data, None if dedup_key is None else str(dedup_key))


def key_bytes(target: str) -> bytes:
    """A unique key as the database stores it."""
    if not _is_unicode(target):
        raise ConfigError(f"target={shown(target)} contains lone surrogates", option="target", value=target)
    return target.encode()


def _is_short_text(value: object) -> bool:
    return (
        isinstance(value, str)
        and _is_unicode(value)
        and 0 < len(value.encode()) <= MAX_NAME_BYTES
        and "\0" not in value
    )


def _is_unicode(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def signal_params(deliveries: Sequence[Delivery]) -> list[bytes]:
    """The parameters of send_signals.sql. Pure."""
    return [
        encode.int_array([each.target for each in deliveries]),
        encode.bytea_array([each.key for each in deliveries]),
        encode.text_array([each.name for each in deliveries]),
        encode.json_array([each.payload for each in deliveries]),
        encode.text_array([each.dedup_key for each in deliveries]),
    ]


def read_sent(rows: Sequence[Row]) -> list[Sent]:
    """Read the rows of send_signals.sql. Pure."""
    return [
        Sent(
            None if row[0] is None else int(row[0]),
            cast('Literal["sent", "duplicate", "no_target"]', (row[1] or b"").decode()),
            None if row[2] is None else row[2].decode(),
            row[3] in {b"t", b"True"},
        )
        for row in rows
    ]


def signal_call(schema: str, deliveries: Sequence[Delivery]) -> tuple[Statement, Params]:
    """The statement that sends signals. Pure."""
    return statement("send_signals", schema), signal_params(deliveries)


async def send_signals(conn: PgConn, schema: str, deliveries: Sequence[Delivery]) -> list[Sent]:
    """Send signals; results in input order. One statement, all or nothing."""
    if not deliveries:
        return []
    return read_sent((await conn.run(*signal_call(schema, deliveries))).rows)


async def signal_from_step(
    conn: PgConn, schema: str, claim: Claim, deliveries: Sequence[Delivery]
) -> list[Sent] | None:
    """Send signals from a running step; None if its claim is stale: then nothing was written."""
    fence = [encode.number(claim.id), claim.claim_id.encode(), encode.number(claim.visit)]
    params = [*signal_params(deliveries), *fence]
    rows = (await conn.run(statement("signal_from_step", schema), params)).rows
    return read_sent(rows) if rows else None


async def start_with_signal(
    conn: PgConn, schema: str, plan: InsertPlan, delivery: Delivery
) -> tuple[Sent, bool]:
    """Insert the instance unless its key is occupied, then signal the occupant of the key; one transaction.

    Returns the result of the signal, and whether the instance is new. Repeats both if the occupant ended in between:
    then nothing was written, and the key is free, unless its scope occupies it beyond the end. In that case the second
    attempt meets the same occupant again.
    """
    calls = [
        (statement("insert_instances", schema), insert_params([plan])),
        (statement("send_signals", schema), signal_params([delivery])),
    ]
    last: bytes | None = None
    for _ in range(MAX_OCCUPANT_READS - 1):
        inserted, sent = await conn.batch(calls)
        [outcome] = read_sent(sent.rows)
        [[number, occupant]] = inserted.rows
        if outcome.target is not None or (occupant is not None and occupant == last):
            return outcome, number is not None
        last = occupant
    inserted, sent = await conn.batch(calls)
    return read_sent(sent.rows)[0], inserted.rows[0][0] is not None


def read_signal(row: Row) -> tuple[int, Signal]:
    """Read a row of an inbox: the target's id and the signal. Pure."""
    target, number, name, payload, dedup, at = row
    assert payload is not None
    return int(target or 0), Signal(
        int(number or 0),
        (name or b"").decode(),
        decode_or_text(payload),  # the inbox must stay readable, whatever was written with SQL
        None if dedup is None else dedup.decode(),
        decode_instant(at),
    )


class Inbox(list[Signal]):
    """The unread signals of an instance, and what a person decided for its step."""

    decision: Decision | None = None
    scheduled: ScheduledRun | None = None
    """The slot for which a schedule started it."""


async def read_inboxes(
    conn: PgConn, schema: str, ids: Sequence[int], *, limit: int = PAGE_SIZE
) -> dict[int, Inbox]:
    """The unread signals of instances, the first `limit` of each, oldest first; and their decisions."""
    params = [encode.int_array(ids), encode.number(limit)]
    rows = (await conn.run(statement("read_inboxes", schema, read_only=True), params)).rows
    found = {number: Inbox() for number in ids}
    for row in rows:
        if row[1] is None and row[2] == b"schedule":
            found[int(row[0] or 0)].scheduled = read_scheduled(decode_or_text(row[3] or b"null"))
        elif row[1] is None:
            found[int(row[0] or 0)].decision = read_decision(decode_or_text(row[3] or b"null"))
        else:
            target, signal = read_signal(row)
            found[target].append(signal)
    return found


async def read_awaited(
    conn: PgConn, schema: str, number: int, names: Sequence[str], *, limit: int = PAGE_SIZE
) -> list[Signal]:
    """The unread signals with these names, oldest first: for an inbox that is longer than `read_inboxes` returns."""
    params = [encode.number(number), encode.text_array(names), encode.number(limit)]
    rows = (await conn.run(statement("read_awaited", schema, read_only=True), params)).rows
    return [read_signal(row)[1] for row in rows]


async def read_matching(conn: PgConn, schema: str, number: int, names: Sequence[str]) -> list[int]:
    """The ids of all unread signals with these names."""
    params = [encode.number(number), encode.text_array(names)]
    rows = (await conn.run(statement("read_matching", schema, read_only=True), params)).rows
    return [int(row[0] or 0) for row in rows]


async def read_signals(conn: PgConn, schema: str, number: int, *, after: int, limit: int) -> list[Signal]:
    """A page of an inbox."""
    params = [encode.number(number), encode.number(after), encode.number(limit)]
    rows = (await conn.run(statement("read_signals", schema, read_only=True), params)).rows
    return [read_signal(row)[1] for row in rows]


@attrs.frozen
class Expired:
    """Instances whose deadline has passed."""

    woken: list[int]
    """Those that are runnable now."""
    ended: list[int]
    """Those that have failed: nobody decided in time, and they name no step for that."""
    offered: list[Promoted]
    """Parents of these whose barrier opened."""
    cascades: bool = False
    """Whether children of the woken ones are to be cancelled."""

    def __len__(self) -> int:
        """How many."""
        return len(self.woken) + len(self.ended)


async def expire_awaits(conn: PgConn, schema: str, queue: str, *, limit: int) -> Expired:
    """Wake instances whose await or barrier deadline has passed, and end approvals that nobody decided in time."""
    params = [queue.encode(), encode.number(limit)]
    rows = (await conn.run(statement("expire_awaits", schema), params)).rows
    return Expired(
        [int(row[0] or 0) for row in rows if row[1] == b"runnable"],
        [int(row[0] or 0) for row in rows if row[1] != b"runnable"],
        [Promoted(int(row[2] or 0), row[3].decode()) for row in rows if row[3] is not None],
        any(row[4] == b"t" for row in rows),
    )
