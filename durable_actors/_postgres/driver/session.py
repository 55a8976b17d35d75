"""What every session of the engine's driver is set to. Pure.

Behind a pooler that shares sessions out (PgBouncer in transaction mode) there is no session of ours: a SET would reach
one transaction of ours by luck and the sessions of strangers for certain. There the settings go with each transaction.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Final

import psycopg

from durable_actors._postgres.driver.statement import Params, Row, Statement
from durable_actors.errors import ConfigError, StoreUnavailable

_NOTICE_OUR_DEATH: Final = "client_connection_check_interval"
"""Else a backend goes on with a statement that nobody waits for (Ctrl-C, kill -9, a lost network) until it
wants to write. A server on Windows cannot, and refuses the setting."""

_SNAPSHOTS: Final = {"default_transaction_isolation": "read committed"}
"""Every statement needs a snapshot of its own: a recheck that runs on its transaction's first one sees no signal that
came since, whatever a role's or a database's default is."""

_DEFAULTS: Final = {
    **_SNAPSHOTS,
    "default_transaction_read_only": "off",
    "default_transaction_deferrable": "off",
}
"""What transactions begin with. A role's read-only default looks like a server that has become a standby."""

_MEANING: Final = {
    # How what we send is read:
    "array_nulls": "on",  # off: a NULL in an array is the text 'NULL'
    "standard_conforming_strings": "on",
    "transform_null_equals": "off",
    # How what we read is written:
    "bytea_output": "hex",
    "datestyle": "ISO",
    "extra_float_digits": "1",
    "intervalstyle": "postgres",
    "timezone": "UTC",
    # What a refusal does:
    "exit_on_error": "off",  # on: it ends the session
}
"""Parameters go in and columns come out as text: what that means must not depend on a role's or a database's defaults.
docs/reference/config.md lists them."""

_SEARCH_PATH: Final = (
    "case when pg_catalog.strpos(pg_catalog.current_setting('search_path'), 'pg_catalog') > 0 then "
    "pg_catalog.concat('pg_catalog, ', pg_catalog.current_setting('search_path')) "
    "else pg_catalog.current_setting('search_path') end"
)
"""Built-in functions and operators are those of pg_catalog, which comes first unless a path names it later. The rest of
the path stays: triggers of the user's may need it."""

_LEVEL: Final = (
    "case when current_setting('transaction_read_only') = 'on' and not pg_is_in_recovery() then 'read only' "
    "else current_setting('transaction_isolation') end"
)

_BLAMES_SETTING: Final = ("22", "42", "55P02")
"""SQLSTATEs of a wrong setting: a bad value; an unknown name or a missing privilege; fixed while the server runs."""

_NOT_WINDOWS: Final = "version() !~* 'windows|mingw|visual'"

Call = tuple[Statement, Params]


def session_calls(settings: Mapping[str, str], pid: int) -> list[Call]:
    """The statements that set a new session up, in one round trip; `settings` win over ours.

    They act, and the last one returns a row, only in server process `pid`, which is the one that we connected to: any
    other has a pooler before it, and is not ours to change.
    """
    return _calls(_DEFAULTS | _MEANING | dict(settings), "false", str(pid).encode())


def transaction_calls(settings: Mapping[str, str]) -> list[Call]:
    """The same for one transaction, whose first statements they are. Last column: isolation level, or "read only"."""
    return _calls(_MEANING | dict(settings), "true", None)


def _calls(settings: Mapping[str, str], local: str, pid: bytes | None) -> list[Call]:
    values = [text.encode() for setting in settings.items() for text in setting]
    own = [] if pid is None else [pid]
    notice, every = _statements(len(settings), local, pid is not None)
    return [(notice, own), (every, [*own, *values])]


@cache
def _statements(count: int, local: str, own: bool) -> tuple[Statement, Statement]:  # noqa: FBT001 - private, cached
    """For so many settings. read_only: losing the connection here means "not connected", never "unknown"."""
    first = 2 if own else 1
    places = [f"${number}::text" for number in range(first, first + 2 * count)]
    pairs = zip(places[::2], places[1::2], strict=True)
    calls = ", ".join(f"pg_catalog.set_config({name}, {value}, {local})" for name, value in pairs)
    calls += f", pg_catalog.set_config('search_path', {_SEARCH_PATH}, {local}), {_LEVEL}"
    where = "pg_backend_pid() = $1::int4" if own else "true"
    notice = f"select set_config('{_NOTICE_OUR_DEATH}', '2s', {local}) where {_NOT_WINDOWS} and {where}"
    return (
        Statement("notice_our_death", notice, read_only=True),
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
