"""Recovery: what no part of the engine leaves undone, done again for rows that a hand or a restored backup has changed.

Every statement corrects only what is wrong and fences itself by `rev`, so it may run beside working engines, any number
of times.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import attrs

from durable_actors._postgres.driver import encode
from durable_actors._postgres.driver.connection import PgConn
from durable_actors._postgres.driver.statement import Params
from durable_actors._store.commands import Command
from durable_actors._store.sql import statement

ROWS: Final = 5000
"""Rows that one statement looks at."""
NOBODY: Final = Command()


@attrs.frozen(kw_only=True)
class RecoveryReport:
    """What `recover` has corrected, or with `dry_run` would correct, as ids; all empty on a healthy database."""

    woken: tuple[int, ...] = ()
    """They waited for a signal that was in their inbox."""
    recounted: tuple[int, ...] = ()
    """The counts of their barriers were wrong."""
    offered: tuple[int, ...] = ()
    """They were held behind a sibling of their key, and none was there."""
    reaped: tuple[int, ...] = ()
    """The leases of their claims had expired."""
    told: tuple[int, ...] = ()
    """They had ended, or were gone, and the instances that come after them were not told."""

    @property
    def changed(self) -> bool:
        """Whether anything was, or would be, corrected."""
        return bool(self.woken or self.recounted or self.offered or self.reaped or self.told)


async def wake_lost_waits(
    conn: PgConn, schema: str, *, after: int, command: Command = NOBODY, dry_run: bool = False
) -> tuple[list[int], int | None]:
    """Wake instances of the next rows whose signal is there. Returns them, and where to go on (None: at the end)."""
    params = _params(after, command, dry_run=dry_run)
    return _read((await conn.run(statement("wake_lost_waits", schema), params)).rows)


async def recount_barriers(
    conn: PgConn, schema: str, *, after: int, command: Command = NOBODY, dry_run: bool = False
) -> tuple[list[int], int | None]:
    """Correct the barriers of the next rows. Returns them, and where to go on (None: at the end)."""
    params = _params(after, command, dry_run=dry_run)
    return _read((await conn.run(statement("recount_barriers", schema), params)).rows)


async def find_untold(
    conn: PgConn, schema: str, *, after: int, dry_run: bool = False
) -> tuple[list[int], int | None]:
    """Note ended instances whose dependents do not know it. Returns them, and where to go on (None: at the end)."""
    params = [encode.number(after), encode.number(ROWS), b"f" if dry_run else b"t"]
    return _read((await conn.run(statement("find_untold", schema), params)).rows)


async def read_first_held(conn: PgConn, schema: str, keys: Sequence[str]) -> list[int]:
    """Return the row of each key that `promote_siblings` would offer."""
    params = [encode.text_array(keys)]
    rows = (await conn.run(statement("read_first_held", schema, read_only=True), params)).rows
    return [int(row[0] or 0) for row in rows]


async def read_expired(conn: PgConn, schema: str) -> list[int]:
    """Return the instances whose claims `reap_claims` would take back."""
    rows = (await conn.run(statement("read_expired", schema, read_only=True), [])).rows
    return [int(row[0] or 0) for row in rows]


def _params(after: int, command: Command, *, dry_run: bool) -> Params:
    return [
        encode.number(after),
        encode.number(ROWS),
        *map(encode.text, (command.by, command.reason)),
        b"f" if dry_run else b"t",
    ]


def _read(rows: list[list[bytes | None]]) -> tuple[list[int], int | None]:
    last = rows[0][0]
    return [int(row[0] or 0) for row in rows[1:]], None if last is None else int(last)
