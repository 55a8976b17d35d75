"""Checks of connections that callers pass in; the error names the object to pass instead. Pure.

Classes of other libraries are recognised by the name of their module; the libraries are not imported.
"""

from __future__ import annotations

from typing import Final

import psycopg

from durable_actors._option_checks import shown
from durable_actors.errors import ConfigError
from durable_actors.machine import Context, Job, Machine

_SYNC: Final = "durable_actors.sync needs an open psycopg.Connection (psycopg 3)"
_AIO: Final = "durable_actors.aio needs an open psycopg.AsyncConnection (psycopg 3)"
_TRIO: Final = "conn= needs an open durable_actors.TrioConnection"

_ADVICE: Final[dict[type, str]] = {
    type(
        None
    ): "a connection that is not open yet has none (Django: call connection.ensure_connection() first)",
    str: "if it is a DSN, open a connection with it first",
    bytes: "if it is a DSN, open a connection with it first",
    psycopg.Connection: "use durable_actors.sync with it",
    psycopg.AsyncConnection: "use durable_actors.aio with it",
    Context: "a step's context has insert, signal and start_child, also for durable_actors.sync; "
    "an async step awaits da.inspect and the others, a def step calls trio.from_thread.run(da.inspect, ...)",
    Job: "the connection comes first, then the machine or job",
}

# (package, class, what to pass instead); an empty class means any class of that package.
_HINTS: Final[tuple[tuple[str, str, str], ...]] = (
    ("sqlalchemy", "AsyncSession", "(await (await session.connection()).get_raw_connection()).driver_connection"),
    ("sqlalchemy", "async_scoped_session",
     "(await (await session.connection()).get_raw_connection()).driver_connection"),
    ("sqlalchemy", "AsyncConnection", "(await connection.get_raw_connection()).driver_connection"),
    ("sqlalchemy", "AsyncEngine", "(await connection.get_raw_connection()).driver_connection, of a connection of it"),
    ("sqlalchemy", "Session", "session.connection().connection.driver_connection"),
    ("sqlalchemy", "scoped_session", "session.connection().connection.driver_connection"),
    ("sqlalchemy", "Engine", "connection.connection.driver_connection, of a connection of it"),
    ("sqlalchemy", "Connection", "connection.connection.driver_connection"),
    ("sqlalchemy", "", "its driver_connection"),
    ("flask_sqlalchemy", "", "db.session.connection().connection.driver_connection"),
    ("django", "", "connection.connection (django.db.connection, after connection.ensure_connection())"),
    ("psycopg_pool", "", "the connection of `with pool.connection() as conn`"),
    ("psycopg", "Cursor", "cursor.connection"),
    ("psycopg", "AsyncCursor", "cursor.connection"),
)  # fmt: skip

_DRIVERS: Final = ("psycopg2", "asyncpg", "aiopg", "pg8000", "pgdb", "psqlpy")


def check_sync(conn: object) -> None:
    """Raise `ConfigError` unless it is a plain psycopg connection."""
    if not isinstance(conn, psycopg.Connection):
        raise _wrong(conn, _SYNC)


def check_aio(conn: object) -> None:
    """Raise `ConfigError` unless it is an asynchronous psycopg connection."""
    if not isinstance(conn, psycopg.AsyncConnection):
        raise _wrong(conn, _AIO)


def check_trio(conn: object) -> None:
    """Raise `ConfigError` for connections that do not work on Trio: synchronous, asyncio's, other libraries'."""
    kind: type = type(conn)
    if not issubclass(kind, psycopg.AsyncConnection) or kind is psycopg.AsyncConnection:
        raise _wrong(conn, _TRIO)


def _wrong(conn: object, needed: str) -> ConfigError:
    text = f"{needed}, not {_described(conn)}"
    hint = _hint(conn)
    return ConfigError(f"{text}: {hint}" if hint else text, option="conn", value=conn)


def _described(conn: object) -> str:
    kind = type(conn)
    if isinstance(conn, str | bytes):
        return "a string"  # usually a DSN, and its password must not be logged
    if kind.__module__ == "builtins":
        return shown(conn)
    return f"a {kind.__module__}.{kind.__qualname__}"


def _hint(conn: object) -> str | None:
    kind: type = type(conn)
    for known, advice in _ADVICE.items():
        if issubclass(kind, known):
            return advice
    if isinstance(conn, type) and issubclass(conn, Machine):
        return _ADVICE[Job]
    names = [(each.__module__.partition(".")[0], each.__name__) for each in kind.__mro__]
    for package, name, instead in _HINTS:
        if any(package == module and name in {"", its} for module, its in names):
            return f"pass {instead}"
    if any(module in _DRIVERS for module, _ in names):
        return "that is another driver; open a connection with psycopg.connect or psycopg.AsyncConnection.connect"
    return None
