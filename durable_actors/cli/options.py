"""Options that several verbs share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from durable_actors.config import Config

_F = TypeVar("_F", bound=Callable[..., Any])

_DSN_HELP = "Postgres to use: a libpq connection string or URI, or 'embedded'. Default: $DURABLE_DSN."
_SCHEMA_HELP = "Schema of the tables. Default: $DURABLE_SCHEMA, else 'durable'."


def database_options(function: _F) -> _F:
    """Add `--dsn` and `--schema`."""
    function = click.option("--schema", envvar="DURABLE_SCHEMA", default="durable", help=_SCHEMA_HELP)(
        function
    )
    return click.option("--dsn", metavar="DSN", help=_DSN_HELP)(function)


def make_config(dsn: str | None, schema: str) -> Config:
    """The validated settings of a verb."""
    return Config(dsn=dsn, schema=schema)
