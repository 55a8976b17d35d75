"""Limits in the database: definitions, levels, and throttled rows whose time has come."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime

import attrs
import msgspec
import psycopg

from durable_actors._limits import Limit, check_limit_name, uses_of
from durable_actors._postgres.driver import encode
from durable_actors._postgres.driver.connection import PgConn
from durable_actors._postgres.driver.statement import Statement
from durable_actors._store.commands import Command
from durable_actors._store.rows import Claim
from durable_actors._store.sql import statement
from durable_actors.errors import ConfigError


@attrs.frozen
class Thawed:
    """Throttled rows to pick again."""

    ids: list[int]
    next_in: float | None
    """Seconds until others are due; None: no others are throttled."""


async def read_thawed(
    conn: PgConn, schema: str, queue: str, *, limit: int, ended: Iterable[str] = ()
) -> Thawed:
    """Throttled rows of a queue whose token has come. They are locked by nobody: the pick decides.

    `ended`: slots (name and key) of steps that have ended, which are looked at in any case.
    """
    params = [schema.encode(), queue.encode(), encode.number(limit), encode.text_array(list(ended))]
    rows = (await conn.run(statement("read_thawed", schema), params)).rows
    return Thawed(
        [int(row[0]) for row in rows if row[0] is not None],
        min((max(float(row[1]), 0.0) for row in rows if row[1] is not None), default=None),
    )


async def charge_limits(conn: PgConn, schema: str, charges: Iterable[tuple[str, float]]) -> None:
    """Charge weights to limits (name and key), or give back negative ones."""
    given = list(charges)
    params = [
        schema.encode(),
        encode.text_array([target for target, _ in given]),
        encode.float_array([float(weight) for _, weight in given]),
    ]
    await conn.run(statement("charge_limits", schema), params)


async def block_limits(conn: PgConn, schema: str, targets: Sequence[str], seconds: float) -> None:
    """Let nothing begin that uses these limits (name and key) for so many seconds."""
    params = [schema.encode(), encode.text_array(targets), encode.number(seconds)]
    await conn.run(statement("block_limits", schema), params)


async def forget_limit_keys(conn: PgConn, schema: str, *, after: float, limit: int) -> int:
    """Delete keys that have been at rest for so many seconds."""
    params = [encode.number(after), encode.number(limit)]
    [[count]] = (await conn.run(statement("forget_limit_keys", schema), params)).rows
    return int(count or 0)


def refunds_of(claims: Iterable[Claim]) -> list[tuple[str, float]]:
    """What to give back for claims whose step never began. Pure."""
    return [
        (target, -float(weight))
        for claim in claims
        # What is claimed to be ended was charged nothing.
        if claim.cancellation is None or not claim.cancellation.ends(claim.visit)
        if (text := claim.recorded.rate_limit) is not None
        for target, weight in uses_of(text, claim.recorded.weight).rates
    ]


async def declare_limits(conn: PgConn, schema: str, limits: Mapping[str, Limit], *, node: str) -> None:
    """Write what the code of this node declares, where that differs from what is declared."""
    if not limits:
        return
    named: Sequence[tuple[str, Limit]] = sorted(limits.items())
    params = [
        encode.text_array([name for name, _ in named]),
        encode.json_array([encode_declaration(limit) for _, limit in named]),
        encode.text_array([limit.revision for _, limit in named]),
        encode.float_array([limit.interval for _, limit in named]),
        encode.float_array([float(limit.depth) for _, limit in named]),
        encode.int_array([limit.slots for _, limit in named]),
        node.encode(),
    ]
    await conn.run(statement("declare_limits", schema), params)


def encode_declaration(limit: Limit) -> bytes:
    """A declaration as JSON."""
    return msgspec.json.encode(limit.declaration)


class LimitKey(msgspec.Struct, frozen=True):
    """A key of a limit that is not at rest."""

    key: str
    """Name and key."""
    spent: float | None
    """Tokens that are spent; None: the limit has no rate."""
    blocked_until: datetime | None
    next_at: datetime | None
    """When what waits is looked at again: the time of the next token."""
    waiting: int
    """Instances that wait, counted up to 10,000 in each queue."""
    holders: tuple[int, ...]
    """Instances that have a slot, 20 at most."""
    taken: int = 0
    """How many have a slot, counted up to 10,001."""
    first: tuple[int, ...] = ()
    """The first three that wait."""


class LimitInfo(msgspec.Struct, frozen=True):
    """A limit as the database has it."""

    name: str
    known: bool
    """False: instances wait for it, and nobody has declared it."""
    declared: dict[str, float | str] | None
    declared_at: datetime | None
    declared_by: str | None
    override: dict[str, float | str] | None
    """An operator's definition, which counts until it is cleared."""
    set_at: datetime | None
    set_by: str | None
    reason: str | None
    interval: float | None
    """Seconds for one token; None: it has no rate."""
    burst: float | None
    slots: int | None
    on_full: str
    """What finds no token or no slot: "wait", or "drop" ends it as cancelled."""
    held: str
    """How long a slot is held: until the "step" ends, or the "instance"."""
    keys: tuple[LimitKey, ...]
    """Those under which somebody waits come first."""
    keys_total: int = 0
    """How many keys are not at rest."""
    capped: bool = False
    """Whether not everything was looked at: there may be more keys."""


@attrs.frozen(kw_only=True)
class LimitCaps:
    """How much a look at the limits may cost."""

    keys: int = 100
    """Keys of each limit."""
    waiting: int = 10_000
    """Instances that are counted of each key and queue."""
    lines: int = 2**31 - 1
    """Keys and slots that are looked at, of all limits."""


async def read_limits(
    conn: PgConn,
    schema: str,
    *,
    caps: LimitCaps | None = None,
    name: str | None = None,
    containing: str | None = None,
) -> list[LimitInfo]:
    """All limits by name, or one of them, with those of their keys that are not at rest."""
    caps = caps or LimitCaps()
    numbers = map(encode.number, (caps.keys, caps.waiting, caps.lines))
    params = [*numbers, encode.text(name), encode.text(containing)]
    rows = (await conn.run(statement("read_limits", schema, read_only=True), params)).rows
    return [msgspec.json.decode(row[0] or b"null", type=LimitInfo) for row in rows]


async def find_undeclared(conn: PgConn, schema: str, *, lines: int, limit: int) -> tuple[str, ...]:
    """Names of limits for which instances wait, and which nobody has declared."""
    params = [encode.number(lines), encode.number(limit)]
    rows = (await conn.run(statement("find_undeclared", schema, read_only=True), params)).rows
    return tuple((row[0] or b"").decode() for row in rows)


async def count_throttled(conn: PgConn, schema: str, *, cap: int) -> tuple[Counter[str], Counter[str]]:
    """How many instances wait for a limit: by queue, of each at most `cap`; and by limit."""
    rows = (await conn.run(statement("sample_limits", schema, read_only=True), [encode.number(cap)])).rows
    queues: Counter[str] = Counter()
    names: Counter[str] = Counter()
    for queue, name, count in rows:
        queues[(queue or b"").decode()] += int(count or 0)
        names[(name or b"").decode()] += int(count or 0)
    return queues, names


async def set_limit(conn: PgConn, schema: str, name: str, limit: Limit | None, command: Command) -> bool:
    """Let this definition count instead of the code's; None: the code's again. False: there was nothing to clear.

    With an idempotency key that was used before, nothing is done.
    """
    check_limit_name(name, what="the limit", error=ConfigError)
    params = [
        name.encode(),
        *command.params(),
        None if limit is None else encode_declaration(limit),
        encode.number(None if limit is None else limit.interval),
        encode.number(1 if limit is None else limit.depth),
        encode.number(None if limit is None else limit.slots),
    ]
    return await _command(conn, statement("set_limit", schema), params)


async def release_limit(
    conn: PgConn, schema: str, key: str, command: Command, *, instance: int | None = None
) -> bool:
    """Let a key (name and key) begin anew, or take the slot that an instance keeps. False: there was nothing to do.

    With an idempotency key that was used before, nothing is done.
    """
    check_limit_name(key.partition(":")[0], what="the limit", error=ConfigError)
    params = [key.encode(), *command.params(), encode.number(instance), schema.encode()]
    return await _command(conn, statement("release_limit", schema), params)


async def _command(conn: PgConn, sql: Statement, params: Sequence[bytes | None]) -> bool:
    try:
        return bool((await conn.run(sql, params)).rows)
    except psycopg.errors.UniqueViolation as refused:
        if refused.diag.constraint_name != "receipts_once":
            raise
        return True
