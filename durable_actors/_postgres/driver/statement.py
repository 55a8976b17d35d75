"""Statements, their results, and which of them a connection has prepared. Nothing here waits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, cast

import attrs
from psycopg import pq
from psycopg.pq import ExecStatus

from durable_actors._postgres.driver import failures
from durable_actors._postgres.driver.decode import typed_rows

_COMMAND_OK: Final = int(ExecStatus.COMMAND_OK)

Params = Sequence[bytes | None]
"""Parameters in text format (see `encode`); None for NULL."""
Row = list[bytes | None]
"""Columns in text format; None for NULL."""


@attrs.frozen(eq=False)
class Statement:
    """One SQL statement. Each connection prepares it when it first runs it."""

    name: str
    """Appears in `pg_prepared_statements`, in error notes and in statistics."""
    sql: str
    """One statement with parameters `$1`, `$2`, …, each with a cast if its type is not evident."""
    read_only: bool = False
    """If the connection is lost, the error says "not done" instead of "unknown"."""
    typed: bool = False
    """Its rows are tuples of Python values (`decode.typed_rows`) instead of lists of bytes: faster from some dozen rows
    on."""


@attrs.define(eq=False)  # not frozen: that costs 0.6 µs per statement
class Result:
    """The answer to one statement."""

    rows: list[Row]
    """Columns in text format, None for NULL; for a typed statement tuples of Python values."""
    tag: str
    """The command tag, e.g. `UPDATE 3`."""


Message = tuple[Statement, bytes, Params | None]
"""One message of a pipeline: statement, its name on the connection, parameters (None: prepare it). With an empty name
the statement is parsed, run and forgotten."""


class Prepared:
    """The statements that one connection has prepared, and their names."""

    __slots__ = ("_serial", "names", "off")

    def __init__(self) -> None:
        self.names: Final[dict[Statement, bytes]] = {}
        """Prepared statement → its name on the server."""
        self.off = True
        """Prepare nothing: the next transaction may run in another server process, where the name is unknown or, worse,
        belongs to somebody else's statement."""
        self._serial = 0

    def plan(self, calls: Sequence[tuple[Statement, Params]]) -> list[Message]:
        """The messages for these calls: a Parse before the first use of a statement, then its execution."""
        if self.off:
            return [(statement, b"", params) for statement, params in calls]
        messages: list[Message] = []
        fresh: dict[Statement, bytes] = {}
        for statement, params in calls:
            name = self.names.get(statement) or fresh.get(statement)
            if name is None:
                # No name is used twice: a cancelled Parse may have left one behind on the server.
                self._serial += 1
                name = fresh[statement] = f"{statement.name}_{self._serial}".encode()
                messages.append((statement, name, None))
            messages.append((statement, name, params))
        return messages

    def learn(self, messages: list[Message], results: list[pq.abc.PGresult]) -> list[pq.abc.PGresult]:
        """Record which statements are prepared now; return only the results of the executions.

        If a Parse was refused, its result replaces that of the execution, which only says "aborted".
        """
        executed: list[pq.abc.PGresult] = []
        refused: pq.abc.PGresult | None = None
        for (statement, name, params), result in zip(messages, results, strict=True):
            if params is not None:
                executed.append(refused or result)
                refused = None
            elif result.status == _COMMAND_OK:
                self.names[statement] = name
            else:
                refused = result
        return executed

    def forget(self, known: Sequence[Statement], result: pq.abc.PGresult) -> bool:
        """Forget statements that the server lost or cannot use any more; return whether to run them again.

        Only those that were `known` before: a statement that fails right after its Parse would fail again.
        """
        if not known or not failures.is_stale_plan(result):
            return False
        for statement in known:
            self.names.pop(statement, None)
        return True


def send_pipeline(pgconn: pq.abc.PGconn, messages: Sequence[Message]) -> None:
    """Put the messages and one Sync into libpq's buffer."""
    pgconn.enter_pipeline_mode()
    for statement, name, params in messages:
        if params is None:
            pgconn.send_prepare(name, statement.sql.encode())
        elif name:
            pgconn.send_query_prepared(name, params)
        else:
            pgconn.send_query_params(statement.sql.encode(), params)
    pgconn.pipeline_sync()


def read_result(statement: Statement, result: pq.abc.PGresult) -> Result:
    """Copy the columns out of libpq's memory."""
    if statement.typed:
        rows = cast("list[Row]", typed_rows(result))
    else:
        value, columns = result.get_value, range(result.nfields)
        rows = [[value(row, column) for column in columns] for row in range(result.ntuples)]
    return Result(rows=rows, tag=(result.command_status or b"").decode())
