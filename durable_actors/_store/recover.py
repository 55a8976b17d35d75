"""Recovery: what no part of the engine leaves undone, done again for rows that a hand or a restored backup has changed.

Every statement corrects only what is wrong and fences itself by `rev`, so it may run beside working engines, any number
of times.
"""

from __future__ import annotations

from typing import Final

import attrs

from durable_actors._postgres.driver import encode
from durable_actors._postgres.driver.connection import PgConn
from durable_actors._store.commands import Command
from durable_actors._store.sql import statement

ROWS: Final = 5000
"""Rows that one statement looks at."""
NOBODY: Final = Command()


@attrs.frozen(kw_only=True)
class RecoveryReport:
    """What `recover` has corrected, as ids of instances; all empty on a healthy database."""

    woken: tuple[int, ...] = ()
    """They waited for a signal that was in their inbox."""
    recounted: tuple[int, ...] = ()
    """The counts of their barriers were wrong."""
    offered: tuple[int, ...] = ()
    """They were held behind a sibling of their key, and none was there."""
    reaped: tuple[int, ...] = ()
    """The leases of their claims had expired."""

    @property
    def changed(self) -> bool:
        """Whether anything was corrected."""
        return bool(self.woken or self.recounted or self.offered or self.reaped)


async def wake_lost_waits(
    conn: PgConn, schema: str, *, after: int, command: Command = NOBODY
) -> tuple[list[int], int | None]:
    """Wake instances of the next rows whose signal is there. Returns them, and where to go on (None: at the end)."""
    params = [encode.number(after), encode.number(ROWS), *map(encode.text, (command.by, command.reason))]
    return _read((await conn.run(statement("wake_lost_waits", schema), params)).rows)


async def recount_barriers(
    conn: PgConn, schema: str, *, after: int, command: Command = NOBODY
) -> tuple[list[int], int | None]:
    """Correct the barriers of the next rows. Returns them, and where to go on (None: at the end)."""
    params = [encode.number(after), encode.number(ROWS), *map(encode.text, (command.by, command.reason))]
    return _read((await conn.run(statement("recount_barriers", schema), params)).rows)


def _read(rows: list[list[bytes | None]]) -> tuple[list[int], int | None]:
    last = rows[0][0]
    return [int(row[0] or 0) for row in rows[1:]], None if last is None else int(last)
