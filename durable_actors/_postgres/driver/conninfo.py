"""Connection strings: the defaults that we add, and the error for one that libpq cannot read. Pure."""

from __future__ import annotations

import re
from typing import Final

import psycopg
from psycopg import pq
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from durable_actors.errors import ConfigError

CONNECT_TIMEOUT: Final = 10
"""Seconds, if the DSN has no `connect_timeout`. It also bounds a connect whose task was cancelled."""
MIN_CONNECT_TIMEOUT: Final = 2
"""Seconds. libpq rounds anything shorter up to this."""

_KEEPALIVES: Final = {
    "keepalives_idle": "15",
    "keepalives_interval": "5",
    "keepalives_count": "3",
    "tcp_user_timeout": "30000",
}
"""With these a host that vanished is noticed within half a minute. The system's defaults are two hours for a connection
that waits for an answer and a quarter of an hour for a request that is never acknowledged. A slow statement is not
affected: its server still acknowledges."""


def engine_conninfo(dsn: str) -> str:
    """Return the DSN with our defaults for the options that it does not set.

    Raises `psycopg.ProgrammingError` if libpq cannot read it.
    """
    try:
        truncated = b"\0" in dsn.encode()  # libpq would read only the part before the NUL and connect to that
    except UnicodeEncodeError:
        truncated = True
    if truncated:
        raise psycopg.ProgrammingError("it contains a NUL character or a lone surrogate")
    given = conninfo_to_dict(dsn)
    ours = {name: value for name, value in _KEEPALIVES.items() if not given.get(name)}
    return make_conninfo(dsn, **ours, client_encoding="UTF8")


def with_connect_timeout(conninfo: str) -> str:
    """Add a `connect_timeout` if neither the DSN nor the environment sets one.

    libpq applies it to each host in turn, so several hosts share `CONNECT_TIMEOUT`. The pool waits no longer than that,
    and would never try the second host if the first one does not answer (a machine that is gone does not).
    """
    defaults = {option.keyword.decode(): option.val for option in pq.Conninfo.get_defaults()}
    given = conninfo_to_dict(conninfo)
    if given.get("connect_timeout") or defaults["connect_timeout"]:
        return conninfo
    hosts = given.get("hostaddr") or given.get("host") or (defaults["host"] or b"").decode()
    each = CONNECT_TIMEOUT // len(str(hosts).split(","))
    return make_conninfo(conninfo, connect_timeout=max(each, MIN_CONNECT_TIMEOUT))


def bad_dsn(dsn: str, error: Exception) -> ConfigError:
    """Make the exception for a malformed DSN. libpq quotes the part that it cannot read, which may be the password."""
    text = str(error).strip()
    if "password" in dsn or "@" in dsn:
        text = re.sub(r'".*"', '"…"', text, flags=re.DOTALL)
    if (found := re.match(r"[\w+]+:/*", dsn)) and found[0] not in {"postgresql://", "postgres://"}:
        text = f"a URI begins with postgresql://, not with {found[0]}"
    return ConfigError(f"dsn is not a Postgres connection string or URI: {text}", option="dsn")
