"""A connection that has just been made: whether the session is ours, and what it is set to.

Poolers in transaction mode (PgBouncer, Odyssey, pgcat) hand each transaction to any of their server processes. What we
set or prepare there stays behind and meets strangers: another application would run with our `lock_timeout`, and a
name that we prepared may mean a statement of another version or schema of ours. So behind a pooler nothing is prepared
and every transaction begins with its settings: 111 instead of 59 µs of this process's CPU per round trip.

How it is noticed: a pooler shows its clients a process number of its own making.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from durable_actors._postgres.driver.session import session_calls, transaction_calls
from durable_actors.errors import ConfigError, StoreUnavailable

if TYPE_CHECKING:
    from durable_actors._postgres.driver.connection import PgConn

_KEEPALIVES: Final = {
    "keepalives_idle": "15",
    "keepalives_interval": "5",
    "keepalives_count": "3",
    "tcp_user_timeout": "30000",
}
"""A host that has vanished is noticed within half a minute: the system's own defaults are two hours for a connection
that waits for an answer, a quarter of one for a question that nobody confirms. A slow statement does no harm."""

_BLAMES_SETTING: Final = ("22", "42", "55P02")
"""SQLSTATEs: a bad value; an unknown name, or no right to it; one that is fixed while the server runs."""


def engine_conninfo(dsn: str) -> str:
    """The DSN with our defaults, where it does not say otherwise."""
    try:
        cut = b"\0" in dsn.encode()  # libpq would read up to there, and connect to who knows what
    except UnicodeEncodeError:
        cut = True
    if cut:
        raise psycopg.ProgrammingError("it contains a NUL character or a lone surrogate")
    given = conninfo_to_dict(dsn)
    ours = {name: value for name, value in _KEEPALIVES.items() if not given.get(name)}
    return make_conninfo(dsn, **ours, client_encoding="UTF8")


async def set_up(conn: PgConn, settings: Mapping[str, str]) -> None:
    """Set the session up, or note what each transaction must begin with. One round trip; two behind a pooler.

    Raises `ConfigError` for a refused setting, `StoreUnavailable` for what may pass: a role's `statement_timeout`,
    somebody's `pg_cancel_backend`. Failed or cancelled: the caller closes the connection.
    """
    try:
        *_, ours = await conn.batch(session_calls(settings, conn.pid))
        if ours.rows:
            conn.prepared.off = False
            return
        preamble = transaction_calls(settings)
        *_, shared = await conn.batch(preamble)
    except psycopg.Error as exc:
        why = f"Postgres refused a session setting of {dict(settings)}: {exc}"
        if (exc.sqlstate or "").startswith(_BLAMES_SETTING):
            raise ConfigError(why) from exc
        raise StoreUnavailable(why) from exc
    except StoreUnavailable as exc:
        raise StoreUnavailable(f"cannot connect to Postgres: {exc}") from exc
    level = (shared.rows[0][-1] or b"").decode()
    if level != "read committed":
        name, wanted = "default_transaction_isolation", "'read committed'"
        if level == "read only":
            name, wanted = "default_transaction_read_only", "off"
        raise ConfigError(
            f"{name} makes transactions {level!r} for this role or database, and behind a pooler it cannot be set per "
            f"connection. Set it to {wanted} there (ALTER ROLE … SET), or connect directly",
            option="dsn",
        )
    conn.preamble = preamble
