"""Picks of fair queues: read which keys have due rows, then claim so many of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, cast

import attrs

from durable_actors._postgres.driver import encode
from durable_actors._postgres.driver.connection import PgConn
from durable_actors._postgres.driver.decode import decode_int_array
from durable_actors._store.claim import Owner, read_pick, trusted_until
from durable_actors._store.rows import PickResult
from durable_actors._store.sql import statement


@attrs.frozen
class LookFrom:
    """Where a look at a fair queue begins."""

    priorities: Sequence[int]
    """Most urgent first."""
    keys: Sequence[str]
    """For each of them the key after which to begin; "" for the first."""
    due_keys: int
    """How many keys with a due row to find, at most."""
    plain: Mapping[int, tuple[str, int]] = MappingProxyType({})
    """Priority → the position after which to look for rows without a key."""


@attrs.define
class Look:
    """What a look at a fair queue has found."""

    due: list[tuple[int, str]] = attrs.field(factory=list[tuple[int, str]])
    """Priority and key, in the order of the index, of keys that have a due row."""
    ends: dict[int, str] = attrs.field(factory=dict[int, str])
    """Priority → the key after which to go on; "" if that was the last one."""
    plain: dict[int, list[int]] = attrs.field(factory=dict[int, list[int]])
    """Priority → due rows without a key, in order."""
    positions: dict[int, tuple[str, int]] = attrs.field(factory=dict[int, tuple[str, int]])
    """Priority → the last position that was read for them; missing if that was the end."""


@attrs.frozen
class Entry:
    """So many rows of a key, in one priority."""

    priority: int
    key: str
    """"" stands for rows without a key."""
    rows: int


@attrs.frozen
class FairPick:
    """What a fair pick takes."""

    entries: Sequence[Entry]
    """In the order in which they are served."""
    plain: Sequence[int] = ()
    """Rows without a key, whichever of them are still on offer."""
    skip: Sequence[int] = ()
    """Rows that were left a moment ago."""
    shelved: Sequence[str] = ()
    """Shelved steps that this node knows."""
    from_shelf: int = 0
    """Rows to take from the shelf."""


MAX_VISITS = 1000
"""Keys that one look reads, at most: 10 µs each. Keys whose rows are all in the future count, too."""
PLAIN_ROWS = 256
"""Rows that one look reads to find those without a key, per priority."""


async def read_fair_keys(conn: PgConn, schema: str, queue: str, begin: LookFrom) -> Look:
    """Read which keys have due rows, and which due rows have none."""
    positions = begin.plain.values()
    result = await conn.run(
        statement("read_fair_keys", schema, read_only=True),
        [
            queue.encode(),
            encode.int_array(begin.priorities),
            encode.text_array(begin.keys),
            encode.number(begin.due_keys),
            encode.number(MAX_VISITS),
            encode.int_array(list(begin.plain)),
            encode.text_array([at for at, _ in positions]),
            encode.int_array([number for _, number in positions]),
            encode.number(PLAIN_ROWS),
        ],
    )
    look = Look()
    for what, priority_, key, ids, count, at, number in result.rows:
        priority = int(priority_ or 0)
        if what == b"k":
            look.due.append((priority, (key or b"").decode()))
        elif what == b"e":
            look.ends[priority] = (key or b"").decode()
        else:
            look.plain[priority] = [] if ids is None else list(decode_int_array(ids))
            if int(count or 0) >= PLAIN_ROWS and at is not None:
                look.positions[priority] = (at.decode(), int(number or 0))
    return look


async def pick_fair(
    conn: PgConn, owner: Owner, *, queue: str, limit: int, known: bytes, take: FairPick, now: float
) -> tuple[PickResult, dict[str, str]]:
    """Claim up to `limit` rows, as `take` says; return also the fair key of each claim, by claim id.

    `known` and `now` are those of `pick_instances`, and so is what follows from a cancellation or `CommitUnknown`.
    """
    result = await conn.run(
        statement("pick_fair", owner.schema, typed=True),
        [
            queue.encode(),
            encode.number(limit),
            owner.name.encode(),
            encode.number(owner.lease_ttl),
            known,
            encode.int_array([entry.priority for entry in take.entries]),
            encode.text_array([entry.key for entry in take.entries]),
            encode.int_array([entry.rows for entry in take.entries]),
            encode.int_array(take.plain),
            owner.schema.encode(),
            encode.text_array(take.shelved),
            encode.bytea(owner.token_hash),
            encode.int_array(take.skip),
            encode.number(take.from_shelf),
        ],
    )
    rows = cast("list[tuple[Any, ...]]", result.rows)
    keys = {row[4]: row[-1] or "" for row in rows if row[4] is not None}
    found = read_pick(
        [row[:-1] for row in rows], queue=queue, trusted_until=trusted_until(now, owner.lease_ttl)
    )
    found.positions.clear()  # the rows before these were not read
    return found, keys


@attrs.frozen(kw_only=True)
class FairShare:
    """What a key of a fair queue has at the moment."""

    key: str | None
    """None: rows without a key."""
    running: int
    share: float
    """Its part of what runs in the queue, 0 to 1."""
    waiting: int | None
    """Rows on offer, due or not; of each priority 1,000 at most. None: not counted, for rows without a key."""


SHOWN_KEYS = 1000
"""Keys per queue that are counted."""


async def read_fair_shares(
    conn: PgConn, schema: str, queues: Sequence[str], *, keys: int = SHOWN_KEYS
) -> dict[str, list[FairShare]]:
    """Read what the keys of these queues have; those with most running steps first."""
    params = [encode.text_array(queues), encode.number(keys)]
    rows = (await conn.run(statement("read_fair_shares", schema, read_only=True), params)).rows
    found: dict[str, list[FairShare]] = {queue: [] for queue in queues}
    totals = dict.fromkeys(queues, 0)
    for queue, _, running, _ in rows:
        totals[(queue or b"").decode()] += int(running or 0)
    for queue, key, running, waiting in rows:
        name = (queue or b"").decode()
        found[name].append(
            FairShare(
                key=(key or b"").decode() or None,
                running=int(running or 0),
                share=int(running or 0) / (totals[name] or 1),
                waiting=None if waiting is None or not key else int(waiting),
            )
        )
    return found
