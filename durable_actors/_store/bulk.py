"""Bulk commands: a frozen filter, the commands that take one, and the statements that find what it matches.

A bulk walks over the ids in ascending order, in windows. What it is meant for is decided at its beginning: the filter,
with an instant for `older_than`, and the highest id. Each instance is a command of its own, in a transaction of its
own: a transaction over several would lock a parent, and then wait for a sibling whose commit waits for the parent.
`receipts_once` keeps a batch that runs again from doing anything twice: the key is the bulk's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, get_args

import attrs
import msgspec

from durable_actors._option_checks import choice, count, duration, shown
from durable_actors._postgres.driver import encode
from durable_actors._postgres.driver.connection import PgConn
from durable_actors._postgres.driver.decode import decode_instant
from durable_actors._postgres.driver.statement import Params, Row, Statement
from durable_actors._store.commands import Command
from durable_actors._store.dialogues import (
    CANCEL,
    RETRY,
    RUN_NOW,
    CarriedOut,
    InstanceCommand,
    attempting,
    cancelling,
)
from durable_actors._store.foreign import Dialogue
from durable_actors._store.observe import NEWEST, Filter
from durable_actors._store.pausing import PAUSE, RESUME, pausing
from durable_actors._store.signal import key_bytes
from durable_actors._store.sql import statement
from durable_actors.errors import ConfigError
from durable_actors.machine import Status, current_registry

SCOPE: Final = "bulk"
"""The scope of the receipt of a bulk command."""
TARGET: Final = "instances"
"""The target of that receipt."""
WINDOW: Final = 10_000
"""Rows that one statement looks at: about 10 ms of index and heap reads."""

_PARKED: Final = frozenset({"awaiting_signal", "awaiting_children"})

FIRST: Final = -(2**63)
"""Below every id."""

Options = Mapping[str, Any]
"""What a command takes beside its target, as JSON values: `force` of `cancel`."""


@attrs.frozen(kw_only=True)
class BulkCommand:
    """A command that can be given to many instances. One more is a line in `BULK`."""

    kind: InstanceCommand
    statuses: tuple[Status, ...]
    """The statuses that it is meant for, unless the filter names one."""
    carry_out: Callable[[str, int, Command, Options], Dialogue[CarriedOut]]
    """Carries it out on one instance: schema, id, command, options. Raises `Conflict` if its state forbids it."""
    due: bool | None = None
    """Whether it is meant for what is due only, or for what is not."""
    hold: int | None = None
    """The value of `hold` of the rows that it is meant for."""
    paused: bool | None = None
    """Whether it is meant for what is paused only, or for what is not."""
    makes_runnable: bool = True
    """Whether the instance may run then: its queue is to be hinted at."""

    @property
    def name(self) -> str:
        """As in the receipts."""
        return self.kind.name


_LIVE: Final[tuple[Status, ...]] = ("runnable", "executing", "awaiting_signal", "awaiting_children")

BULK: Final[Mapping[str, BulkCommand]] = {
    each.name: each
    for each in (
        BulkCommand(
            kind=CANCEL,
            statuses=_LIVE,
            carry_out=lambda schema, number, command, options: cancelling(
                schema, number, command, at_once=True, **options
            ),
            makes_runnable=False,
        ),
        BulkCommand(
            kind=RETRY,
            statuses=("failed",),
            carry_out=lambda schema, number, command, _: attempting(RETRY, schema, number, command),
        ),
        BulkCommand(
            kind=RUN_NOW,
            statuses=("runnable",),
            carry_out=lambda schema, number, command, _: attempting(RUN_NOW, schema, number, command),
            due=False,
            hold=0,
        ),
        BulkCommand(
            kind=PAUSE,
            statuses=_LIVE,
            carry_out=lambda schema, number, command, _: pausing(schema, number, command),
            paused=False,
            makes_runnable=False,
        ),
        BulkCommand(
            kind=RESUME,
            statuses=_LIVE,
            carry_out=lambda schema, number, command, _: attempting(RESUME, schema, number, command),
            paused=True,
        ),
    )
}
"""Every command that takes `where`."""


class Frozen(msgspec.Struct, frozen=True, kw_only=True):
    """Which instances a bulk is meant for: its filter, as plain values, fixed at its beginning."""

    statuses: tuple[str, ...]
    most: int
    """The highest id: what is inserted later is not meant."""
    machine: str | None = None
    queue: str | None = None
    step: str | None = None
    error: str | None = None
    tags: tuple[str, ...] = ()
    changed_before: str | None = None
    """An instant: what has changed since is not meant."""
    unique_key: str | None = None
    """In hexadecimal digits."""
    parent: int | None = None
    due: bool | None = None
    hold: int | None = None
    paused: bool | None = None
    waiting: str | None = None


class Matched(msgspec.Struct, frozen=True):
    """An instance that matches."""

    id: int
    queue: str
    priority: int


@attrs.frozen
class Window:
    """What one statement has found."""

    found: tuple[Matched, ...]
    after: int
    """Where the next one begins."""
    ended: bool
    """Whether there is nothing behind it."""


def check_where(command: BulkCommand, where: object) -> Filter:
    """Raise `ConfigError` for a filter that this command does not take, and for one that matches everything."""
    if not isinstance(where, Filter):
        raise ConfigError(f"where={shown(where)} must be a Filter", option="where", value=where)
    where.params()  # checks its values
    if where.status is not None:
        choice("status", where.status, *get_args(Status))
        if where.status not in command.kind.allowed:
            raise ConfigError(
                f"{command.name} does not apply to {where.status} instances: {command.kind.otherwise}",
                option="where",
                value=where,
            )
    if where.paused is not None and command.paused is not None and where.paused != command.paused:
        what = "paused" if where.paused else "not paused"
        raise ConfigError(
            f"{command.name} does not apply to instances that are {what}", option="where", value=where
        )
    if where.paused and command.kind.allowed.isdisjoint(_LIVE):
        raise ConfigError(
            f"{command.name} does not apply to paused instances: {command.kind.otherwise}",
            option="where",
            value=where,
        )
    if where.waiting is not None and _PARKED.isdisjoint(command.kind.allowed):
        raise ConfigError(
            f"{command.name} does not apply to instances that wait for {where.waiting}: {command.kind.otherwise}",
            option="where",
            value=where,
        )
    if attrs.evolve(where, tag=where.tag or None) == Filter():
        raise ConfigError(
            "where=Filter() names nothing: give a status, a machine, …, or say Filter(everything=True)",
            option="where",
            value=where,
        )
    return where


def given_filter(where: Filter) -> dict[str, Any]:
    """The filter as JSON values, for the receipt: what was given, without what was not."""
    machine = where.machine
    if machine is not None and not isinstance(machine, str):
        machine = current_registry().find(machine).name
    key = where.unique_key
    given = {
        "status": where.status,
        "machine": machine,
        "queue": where.queue,
        "step": where.step,
        "error": where.error,
        "tag": [where.tag] if isinstance(where.tag, str) else [*(where.tag or ())] or None,
        "unique_key": key if key is None or isinstance(key, str) else key.decode("utf-8", "backslashreplace"),
        "parent": where.parent,
        "waiting": where.waiting,
        "paused": where.paused,
        "older_than": None
        if where.older_than is None
        else duration("older_than", where.older_than, positive=False),
        "everything": where.everything or None,
    }
    return {name: value for name, value in given.items() if value is not None}


async def freeze(conn: PgConn, schema: str, command: BulkCommand, where: Filter) -> Frozen:
    """Fix what the filter means now."""
    given = given_filter(where)
    age = given.get("older_than")
    [[most, since]] = (
        await conn.run(statement("read_frontier", schema, read_only=True), [encode.number(age)])
    ).rows
    key = where.unique_key
    instant = decode_instant(since)
    if where.parent is not None:
        count("parent", where.parent, least=1, most=NEWEST)
    return Frozen(
        statuses=command.statuses if where.status is None else (where.status,),
        most=int(most or 0),
        machine=given.get("machine"),
        queue=where.queue,
        step=where.step,
        error=where.error,
        tags=tuple(given.get("tag", ())),
        changed_before=None if age is None or instant is None else instant.isoformat(),
        unique_key=None if key is None else (key_bytes(key) if isinstance(key, str) else key).hex(),
        parent=where.parent,
        due=command.due,
        hold=None if where.paused else command.hold,
        paused=command.paused if where.paused is None else where.paused,
        waiting=where.waiting,
    )


def match_call(schema: str, frozen: Frozen, *, after: int, limit: int) -> tuple[Statement, Params]:
    """The statement that finds the next instances that match."""
    texts = (frozen.machine, frozen.queue, frozen.step, frozen.error)
    params = [
        encode.number(after),
        encode.number(frozen.most),
        encode.number(WINDOW),
        encode.number(limit),
        encode.text_array(frozen.statuses),
        *map(encode.text, texts),
        encode.text_array(frozen.tags) if frozen.tags else None,
        encode.text(frozen.changed_before),
        None if frozen.unique_key is None else encode.bytea(bytes.fromhex(frozen.unique_key)),
        encode.number(frozen.parent),
        None if frozen.due is None else b"t" if frozen.due else b"f",
        encode.number(frozen.hold),
        None if frozen.paused is None else b"t" if frozen.paused else b"f",
        encode.text(frozen.waiting),
    ]
    if frozen.statuses == ("failed",) and frozen.unique_key is None and frozen.parent is None:
        return statement("match_failed", schema, read_only=True), params
    return statement("match_instances", schema, read_only=True), params


def read_window(rows: list[Row], *, after: int, limit: int) -> Window:
    """Read the rows of match_instances.sql. Pure."""
    found = tuple(
        Matched(int(row[0]), (row[1] or b"").decode(), int(row[2] or 0)) for row in rows if row[0] is not None
    )
    looked, highest = int(rows[0][3] or 0), rows[0][4]
    if len(found) == limit:
        return Window(found, found[-1].id, ended=False)
    return Window(found, after if highest is None else int(highest), ended=looked < WINDOW)


async def count_matching(conn: PgConn, schema: str, frozen: Frozen) -> int:
    """How many instances match. Reads all failed rows, or the whole table, up to the highest id, in windows."""
    total, after = 0, FIRST
    while True:
        rows = (await conn.run(*match_call(schema, frozen, after=after, limit=WINDOW))).rows
        found = read_window(rows, after=after, limit=WINDOW)
        total += len(found.found)
        if found.ended:
            return total
        after = found.after
