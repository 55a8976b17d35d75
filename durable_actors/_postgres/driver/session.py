"""The settings of every session of the engine's driver, with and without a pooler. Pure.

Poolers in transaction mode (PgBouncer, Odyssey, pgcat) run each transaction in any of their server processes. A setting
or prepared statement would stay behind in a process that others use: another application would run with our
`lock_timeout`, and the name of a prepared statement could mean a statement of another version or schema of ours. So
behind a pooler nothing is prepared, and every transaction begins with its settings. That costs 111 instead of 59 µs of
this process's CPU per round trip.

A pooler is recognised by the process id that it shows to its clients: it is not the one of a server process.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Final

import psycopg

from durable_actors._postgres.driver.statement import Params, Row, Statement
from durable_actors.errors import ConfigError, StoreUnavailable

_CLIENT_CHECK: Final = "client_connection_check_interval"
"""Without it a backend continues a statement whose client is gone (Ctrl-C, kill -9, a lost network) until it has
something to send. A server on Windows does not support it and refuses the setting."""

_SNAPSHOTS: Final = {"default_transaction_isolation": "read committed"}
"""Every statement needs its own snapshot, whatever the default of the role or the database is: with the snapshot of its
transaction, a recheck would not see a signal that was committed since the transaction began."""

_DEFAULTS: Final = {
    **_SNAPSHOTS,
    "default_transaction_read_only": "off",
    "default_transaction_deferrable": "off",
}
"""Defaults of transactions. A role's read-only default would look like a server that has become a standby."""

_TEXT_FORMAT: Final = {
    # How the server reads our parameters:
    "array_nulls": "on",  # off: a NULL in an array is the text 'NULL'
    "standard_conforming_strings": "on",
    "transform_null_equals": "off",
    # How the server writes columns:
    "bytea_output": "hex",
    "datestyle": "ISO",
    "extra_float_digits": "1",
    "intervalstyle": "postgres",
    "timezone": "UTC",
    # What an error does:
    "exit_on_error": "off",  # on: an error ends the session
}
"""Parameters and columns are sent as text, whose meaning must not depend on the defaults of a role or a database.
docs/reference/config.md lists these settings."""

_SEARCH_PATH: Final = (
    "case when pg_catalog.strpos(pg_catalog.current_setting('search_path'), 'pg_catalog') > 0 then "
    "pg_catalog.concat('pg_catalog, ', pg_catalog.current_setting('search_path')) "
    "else pg_catalog.current_setting('search_path') end"
)
"""Our statements need the functions and operators of pg_catalog, which is searched first unless the path names it
later. The rest of the path stays: the user's triggers may need it."""

_LEVEL: Final = (
    "case when current_setting('transaction_read_only') = 'on' and not pg_is_in_recovery() then 'read only' "
    "else current_setting('transaction_isolation') end"
)

_BLAMES_SETTING: Final = ("22", "42", "55P02")
"""SQLSTATEs of a wrong setting: a bad value; an unknown name or a missing privilege; fixed while the server runs."""

_NOT_WINDOWS: Final = "version() !~* 'windows|mingw|visual'"

Call = tuple[Statement, Params]


def session_calls(settings: Mapping[str, str], pid: int) -> list[Call]:
    """The statements that set up a new session, in one round trip; `settings` override ours.

    They take effect, and the last one returns a row, only in server process `pid`, the one that we connected to. In any
    other process a pooler is in between, and the session is not ours to change.
    """
    return _calls(_DEFAULTS | _TEXT_FORMAT | dict(settings), "false", str(pid).encode())


def transaction_calls(settings: Mapping[str, str]) -> list[Call]:
    """The same for one transaction, which begins with them. The last column is the isolation level, or "read only"."""
    return _calls(_TEXT_FORMAT | dict(settings), "true", None)


def _calls(settings: Mapping[str, str], local: str, pid: bytes | None) -> list[Call]:
    values = [text.encode() for setting in settings.items() for text in setting]
    own = [] if pid is None else [pid]
    check, every = _statements(len(settings), local, pid is not None)
    return [(check, own), (every, [*own, *values])]


@cache
def _statements(count: int, local: str, own: bool) -> tuple[Statement, Statement]:  # noqa: FBT001 - private, cached
    """The statements for `count` settings. read_only: a connection lost here is "not connected", never "unknown"."""
    first = 2 if own else 1
    places = [f"${number}::text" for number in range(first, first + 2 * count)]
    pairs = zip(places[::2], places[1::2], strict=True)
    calls = ", ".join(f"pg_catalog.set_config({name}, {value}, {local})" for name, value in pairs)
    calls += f", pg_catalog.set_config('search_path', {_SEARCH_PATH}, {local}), {_LEVEL}"
    where = "pg_backend_pid() = $1::int4" if own else "true"
    check = f"select set_config('{_CLIENT_CHECK}', '2s', {local}) where {_NOT_WINDOWS} and {where}"
    return (
        Statement("client_check", check, read_only=True),
        Statement("set_config", f"select {calls} where {where}", read_only=True),
    )


def refused_setting(settings: Mapping[str, str], error: psycopg.Error) -> ConfigError | StoreUnavailable:
    """Make the exception for a session that could not be set up.

    `ConfigError` if a setting is wrong, `StoreUnavailable` for what may pass: a role's `statement_timeout`, somebody's
    `pg_cancel_backend`.
    """
    why = f"Postgres refused a session setting of {dict(settings)}: {error}"
    if (error.sqlstate or "").startswith(_BLAMES_SETTING):
        return ConfigError(why)
    return StoreUnavailable(why)


def check_shared_session(row: Row) -> None:
    """Raise `ConfigError` if transactions behind the pooler are not read committed and writable.

    `row` is the last one that `transaction_calls` returned.
    """
    level = (row[-1] or b"").decode()
    if level == "read committed":
        return
    name, wanted = "default_transaction_isolation", "'read committed'"
    if level == "read only":
        name, wanted = "default_transaction_read_only", "off"
    raise ConfigError(
        f"{name} makes transactions {level!r} for this role or database, and behind a pooler it cannot be set per "
        f"connection. Set it to {wanted} there (ALTER ROLE … SET), or connect directly",
        option="dsn",
    )
