"""Our statements on connections of the caller's: psycopg's, synchronous or not. No I/O of its own.

psycopg's raw cursors take `$1` placeholders and texts, which Postgres casts as the statement says.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import psycopg

from durable_actors._postgres.statement import Params, Row, Statement
from durable_actors._store.signal import Delivery, signal_params
from durable_actors._store.sql import statement
from durable_actors.errors import SchemaError

_MISSING: Final = (
    psycopg.errors.UndefinedTable,
    psycopg.errors.InvalidSchemaName,
    psycopg.errors.UndefinedFunction,
    psycopg.errors.UndefinedObject,
    psycopg.errors.UndefinedColumn,
)


@contextmanager
def explained(schema: str) -> Generator[None, None, None]:
    """Say what to do when the tables are not there: nobody has looked before, and the caller's transaction is over."""
    try:
        yield
    except _MISSING as exc:
        raise SchemaError(
            f'schema "{schema}" does not exist in this database, or is older than this durable_actors: '
            f"{str(exc).splitlines()[0]}. Run `durable-actors migrate`."
        ) from exc


def foreign_call(call: Statement, params: Params) -> tuple[bytes, list[str | None]]:
    """A statement and its parameters, as psycopg takes them."""
    return call.sql.encode(), [None if param is None else param.decode() for param in params]


def foreign_rows(rows: Sequence[Sequence[Any]]) -> list[Row]:
    """Rows that psycopg has adapted, in the driver's own form."""
    return [[None if value is None else str(value).encode() for value in row] for row in rows]


def signal_call(deliveries: Sequence[Delivery], schema: str) -> tuple[bytes, list[str | None]]:
    """The statement and parameters that send these signals."""
    return foreign_call(statement("send_signals", schema), signal_params(deliveries))
