"""Which Postgres is used: the DSN of an engine or client, from its options and from the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Final

from durable_actors import _option_checks as check
from durable_actors.errors import ConfigError

EMBEDDED: Final = "embedded"
"""The DSN of the embedded Postgres."""

_LIBPQ: Final = ("PGHOST", "PGHOSTADDR", "PGSERVICE")
_OFF: Final = frozenset({"0", "false", "no", "off"})


def resolve_dsn(dsn: Any = None, environ: Mapping[str, str] | None = None) -> str:
    """Decide which Postgres to use: a DSN for libpq, or `EMBEDDED`.

    The first of: `dsn`, `$DURABLE_DSN`, libpq's own environment (PGHOST, PGHOSTADDR, PGSERVICE), the embedded
    server. `DURABLE_EMBEDDED=0` forbids the embedded server. Pure except for reading the environment.
    """
    environ = os.environ if environ is None else environ
    if dsn is not None and not isinstance(dsn, str):
        raise ConfigError(f"dsn={check.shown(dsn)} must be a string", option="dsn", value=dsn)
    found: str | None = dsn if dsn is not None else environ.get("DURABLE_DSN") or None
    if found is None:
        found = "" if any(environ.get(name) for name in _LIBPQ) else EMBEDDED
    if found == EMBEDDED and environ.get("DURABLE_EMBEDDED", "").lower() in _OFF:
        asked = "dsn='embedded'" if dsn == EMBEDDED else "no DSN is set"
        raise ConfigError(
            f"{asked}, and DURABLE_EMBEDDED={environ['DURABLE_EMBEDDED']} forbids the embedded Postgres. "
            "Set DURABLE_DSN (postgresql://user@host/database), PGHOST or PGSERVICE.",
            option="dsn",
            value=dsn,
        )
    return found


def check_session_dsn(value: str | None) -> str | None:
    """Return the DSN of direct connections, which is never the embedded server."""
    given: Any = value  # untyped callers pass anything
    if given is not None and (not isinstance(given, str) or given == EMBEDDED):
        text = f"session_dsn={check.shown(value)} must be a connection string or URI"
        raise ConfigError(text, option="session_dsn", value=value)
    return value


def without_password(dsn: str | None) -> str:
    """Return the repr of a DSN for logs and tracebacks, without a password."""
    return "'…'" if dsn is not None and ("password" in dsn or "@" in dsn) else repr(dsn)
