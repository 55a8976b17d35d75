"""What a process is told from outside: which Postgres, which schema. Frozen, validated once, passed down.

Only this module and the command line read the environment.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Final

import attrs

from durable_actors.errors import ConfigError

EMBEDDED: Final = "embedded"
"""The DSN that asks for the embedded Postgres by name."""

_SCHEMA_NAME: Final = re.compile(r"[a-z_][a-z0-9_]{0,62}")
_LIBPQ: Final = ("PGHOST", "PGHOSTADDR", "PGSERVICE")
_OFF: Final = frozenset({"0", "false", "no", "off"})


def check_schema_name(schema: str) -> str:
    """Return the name if it can be a schema of ours; names that start with `pg_` belong to Postgres."""
    if not _SCHEMA_NAME.fullmatch(schema) or schema.startswith("pg_"):
        raise ConfigError(
            f"schema={schema!r} is not a usable schema name: up to 63 of a-z, 0-9 and _, not starting with "
            "a digit or with pg_",
            option="schema",
            value=schema,
        )
    return schema


def resolve_dsn(dsn: str | None = None, environ: Mapping[str, str] | None = None) -> str:
    """Decide which Postgres to use: a DSN for libpq, or `EMBEDDED`.

    The first of: `dsn`, `$DURABLE_DSN`, libpq's own environment (PGHOST, PGHOSTADDR, PGSERVICE), the embedded
    server. `DURABLE_EMBEDDED=0` forbids the last one, also by name. Pure but for reading the environment.
    """
    environ = os.environ if environ is None else environ
    found = dsn if dsn is not None else environ.get("DURABLE_DSN") or None
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


def _check_schema(_: Config, __: attrs.Attribute[str], value: str) -> None:
    check_schema_name(value)


@attrs.frozen(kw_only=True)
class Config:
    """Settings of an engine or client. Every error names the option and the value."""

    dsn: str = attrs.field(default=None, converter=resolve_dsn)
    """Connection string or URI. Default: `$DURABLE_DSN`, else libpq's environment, else embedded."""
    schema: str = attrs.field(default="durable", validator=[attrs.validators.instance_of(str), _check_schema])
    """Where the tables live; created and migrated on start."""
