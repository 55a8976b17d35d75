"""Operations on one instance that take several statements, for every kind of connection. Sans-I/O.

See `foreign.Dialogue`; `run_dialogue` runs one on the engine's driver.
"""

from __future__ import annotations

import math
import time
from typing import Any, Final, TypeVar

import psycopg

from durable_actors._option_checks import Duration, duration, shown
from durable_actors._postgres.driver import encode
from durable_actors._postgres.driver.connection import PgConn
from durable_actors._store.foreign import Dialogue
from durable_actors._store.insert import key_as_given
from durable_actors._store.read import Ending, Instance, endings_of, read_instance
from durable_actors._store.signal import key_bytes
from durable_actors._store.sql import statement
from durable_actors.errors import ConfigError, Conflict, Duplicate, InstanceFailed, NoTarget
from durable_actors.machine import decode_json

T = TypeVar("T")

FIRST_PAUSE: Final = 0.05
LONGEST_PAUSE: Final = 1.0
"""Seconds between the reads of `sync.result` and `aio.result`."""


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
        raise NoTarget(f"no instance has or had the unique key {key_as_given(key)!r}")
    return int(rows[0][0] or 0)


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
    params = [encode.int_array([number]), b"t"]
    rows = yield statement("read_instances", schema, read_only=True), params
    if not rows:
        raise NoTarget(f"there is no instance {number}")
    return read_instance(rows[0])


def ending(schema: str, number: int) -> Dialogue[Ending | None]:
    """How an instance ended; None if it has not. Raises `NoTarget`."""
    rows = yield statement("read_finals", schema, read_only=True), [encode.int_array([number])]
    finals, missing = endings_of(rows, [number])
    if missing:
        raise NoTarget(f"there is no instance {number}")
    return finals.get(number)


def retrying(schema: str, target: int | str | bytes) -> Dialogue[Instance]:
    """Let a failed instance run again; return it as it was before.

    Raises `NoTarget`, `Conflict` if it is not failed, `Duplicate` if another instance occupies its unique key by now.
    """
    number = yield from resolving(schema, target)
    while True:
        instance = yield from inspecting(schema, number)
        if instance.status != "failed":
            raise Conflict(f"instance {number} is {instance.status}, and only a failed one can be retried")
        try:
            rows = yield statement("retry_instance", schema), [encode.number(number)]
        except psycopg.errors.UniqueViolation:
            given = instance.unique_key or b""
            key = given if isinstance(given, bytes) else key_bytes(given)
            found = yield statement("find_by_key", schema, read_only=True), [encode.bytea(key)]
            holder = int(found[0][0] or 0) if found else number
            raise Duplicate(key_as_given(key), None if holder == number else holder) from None
        if rows:
            return instance
        # It was changed between the two statements: read it again.


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
    if final.status == "failed":
        raise InstanceFailed(final.id, final.last_error or "no reason was stored")
    if final.result is None:
        return None
    return decode_json(final.result, what=f"result of instance {final.id}", type=type)
