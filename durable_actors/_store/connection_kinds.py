"""Connections that callers pass in: psycopg's, or the object of a framework that has one. Others are an error.

Classes of other libraries are recognised by the name of their module; the libraries are not imported.
"""

from __future__ import annotations

from typing import Any, Final, Protocol

import psycopg

from durable_actors._option_checks import shown
from durable_actors.errors import ConfigError
from durable_actors.machine import Context, Job, Machine


class HasConnection(Protocol):
    """A session or connection of SQLAlchemy, or the connection of Django."""

    @property
    def connection(self) -> Any:
        """What leads to the connection of the driver."""


SyncConnection = psycopg.Connection[Any] | HasConnection
"""What `durable_actors.sync` takes: psycopg's connection, a `Session` or `Connection` of SQLAlchemy, or Django's."""
AioConnection = psycopg.AsyncConnection[Any] | HasConnection
"""What `durable_actors.aio` takes: psycopg's connection, an `AsyncSession` or `AsyncConnection` of SQLAlchemy."""

_SYNC: Final = (
    "durable_actors.sync needs an open psycopg.Connection (psycopg 3), a Session or Connection of SQLAlchemy, or \
Django's connection"
)
_AIO: Final = (
    "durable_actors.aio needs an open psycopg.AsyncConnection (psycopg 3), or an AsyncSession or AsyncConnection of \
SQLAlchemy"
)
_TRIO: Final = "conn= needs an open durable_actors.TrioConnection"

_ADVICE: Final[dict[type, str]] = {
    type(None): "a connection that is not open yet has none (pass django.db.connection itself)",
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
    ("sqlalchemy", "AsyncSession", "it to durable_actors.aio"),
    ("sqlalchemy", "async_scoped_session", "it to durable_actors.aio"),
    ("sqlalchemy", "AsyncConnection", "it to durable_actors.aio"),
    ("sqlalchemy", "AsyncEngine", "a session or connection of it to durable_actors.aio"),
    ("sqlalchemy", "Session", "it to durable_actors.sync"),
    ("sqlalchemy", "scoped_session", "it to durable_actors.sync"),
    ("sqlalchemy", "Engine", "a session or connection of it to durable_actors.sync"),
    ("sqlalchemy", "Connection", "it to durable_actors.sync"),
    ("sqlalchemy", "", "its driver_connection"),
    ("flask_sqlalchemy", "", "db.session"),
    ("django", "", "django.db.connection to durable_actors.sync"),
    ("psycopg_pool", "", "the connection of `with pool.connection() as conn`"),
    ("psycopg", "Cursor", "cursor.connection"),
    ("psycopg", "AsyncCursor", "cursor.connection"),
)  # fmt: skip

_DRIVERS: Final = ("psycopg2", "asyncpg", "aiopg", "pg8000", "pgdb", "psqlpy")


def sync_connection(given: SyncConnection) -> psycopg.Connection[Any]:
    """Return the psycopg connection of what a caller passed, in the caller's transaction; raise `ConfigError`."""
    conn: Any = given
    if isinstance(conn, psycopg.Connection):  # first: nothing else is asked
        return conn  # pyright: ignore[reportUnknownVariableType]
    if _is_a(given, "sqlalchemy", "Session", "scoped_session"):
        conn = conn.connection()
    if _is_a(conn, "sqlalchemy", "Connection"):
        conn = _driver_connection(conn)
    elif _is_a(given, "django", "BaseDatabaseWrapper", "ConnectionProxy"):
        conn = _django_connection(given)
    if not isinstance(conn, psycopg.Connection):
        raise _wrong(conn if type(conn).__module__.partition(".")[0] in _DRIVERS else given, _SYNC)
    return conn  # pyright: ignore[reportUnknownVariableType]


async def aio_connection(given: AioConnection) -> psycopg.AsyncConnection[Any]:
    """As `sync_connection`, for asyncio."""
    conn: Any = given
    if isinstance(conn, psycopg.AsyncConnection):
        return conn  # pyright: ignore[reportUnknownVariableType]
    if _is_a(given, "sqlalchemy", "AsyncSession", "async_scoped_session"):
        conn = await conn.connection()
    if _is_a(conn, "sqlalchemy", "AsyncConnection"):
        if not conn.in_transaction():
            await conn.begin()
        conn = (await conn.get_raw_connection()).driver_connection
    if not isinstance(conn, psycopg.AsyncConnection):
        raise _wrong(conn if type(conn).__module__.partition(".")[0] in _DRIVERS else given, _AIO)
    return conn  # pyright: ignore[reportUnknownVariableType]


def _is_a(value: object, package: str, *names: str) -> bool:
    """Whether its class, or a base of it, is one of these classes of a library."""
    return any(
        each.__name__ in names and each.__module__.partition(".")[0] == package
        for each in type(value).__mro__
    )


def _driver_connection(conn: Any) -> object:
    """Of a connection of SQLAlchemy. Its `commit()` commits only what it has begun itself, so it begins here."""
    if not conn.in_transaction():
        conn.begin()
    return conn.connection.driver_connection


def _django_connection(conn: Any) -> object:
    """Of Django's. It connects when it is used first, and refuses statements after an error inside `atomic()`."""
    conn.ensure_connection()
    conn.validate_no_broken_transaction()
    return conn.connection


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
