"""Which exception an error of Postgres or of the connection becomes. Pure.

The driver collects the results; these functions decide what the caller gets:

* the server refused the statement (severity ERROR): a `psycopg.errors` class, nothing was done;
* the server or the network went away: `StoreUnavailable`, nothing was done;
* the connection was lost when the commit may already have happened: `CommitUnknown`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import psycopg
from psycopg import pq
from psycopg.pq import DiagnosticField, ExecStatus

from durable_actors.errors import CommitUnknown, StoreUnavailable

UNAVAILABLE: Final = frozenset(
    {
        "57P01",  # admin_shutdown: pg_terminate_backend, fast shutdown
        "57P02",  # crash_shutdown: another backend crashed
        "57P03",  # cannot_connect_now: starting up, shutting down
        "57P05",  # idle_session_timeout
        "25P03",  # idle_in_transaction_session_timeout
        "25006",  # read_only_sql_transaction: this server is a standby now; reconnect to the new primary
        "53300",  # too_many_connections
        "53200",  # out_of_memory
        "53100",  # disk_full
    }
)
"""SQLSTATEs (besides class 08) of a server that cannot serve at the moment; the statement was not done."""

RECONNECT: Final = frozenset({"57P01", "57P02", "57P03", "57P05", "25P03", "25006"})
"""After these the connection is unusable, even if the server has not closed it."""

RETRYABLE: Final = frozenset({"40001", "40P01", "55P03"})
"""Serialization failure, deadlock, lock not available: nothing was done, the same call may succeed."""

NO_COMMIT: Final = 0
"""For `loss`: the message does not commit anything."""
COMMIT: Final = -1
"""For `loss`: the server commits before it answers."""

_DONE: Final = frozenset({int(ExecStatus.COMMAND_OK), int(ExecStatus.TUPLES_OK), int(ExecStatus.EMPTY_QUERY)})
_COPY: Final = frozenset({int(ExecStatus.COPY_IN), int(ExecStatus.COPY_OUT), int(ExecStatus.COPY_BOTH)})


def sqlstate(result: pq.abc.PGresult) -> str | None:
    """The five-character code; None if the error comes from libpq, not from the server."""
    field = result.error_field(DiagnosticField.SQLSTATE)
    return field.decode() if field else None


def is_done(result: pq.abc.PGresult) -> bool:
    """Whether the server completed this statement (it may not have committed it yet)."""
    return result.status in _DONE


def is_copy(result: pq.abc.PGresult) -> bool:
    """Whether the statement was a COPY, which the engine's driver does not support."""
    return result.status in _COPY


def server_error(result: pq.abc.PGresult, *, doing: str) -> Exception:
    """Make the exception for a statement that the server refused. Nothing of it was done."""
    code = sqlstate(result)
    text = _text(result)
    kind = psycopg.OperationalError if code is None else _error_class(code)
    error = kind(text, info=result, encoding="utf-8")
    if _is_unavailable(code):
        unavailable = StoreUnavailable(f"Postgres cannot serve now ({code}): {text}; {doing} was not done")
        unavailable.__cause__ = error
        return unavailable
    error.add_note(f"while running {doing}")
    return error


def _text(result: pq.abc.PGresult) -> str:
    field = result.error_field(DiagnosticField.MESSAGE_PRIMARY) or result.error_message or b""
    return field.decode("utf-8", "replace").strip()


def _is_unavailable(code: str | None) -> bool:
    if code is None:
        return False
    # 08P01 is our own mistake (e.g. too few parameters): a retry would not help.
    return code in UNAVAILABLE or (code.startswith("08") and code != "08P01")


def _error_class(code: str) -> type[psycopg.Error]:
    try:
        return psycopg.errors.lookup(code)
    except KeyError:  # a code newer than this psycopg
        return psycopg.DatabaseError


def is_stale_plan(result: pq.abc.PGresult) -> bool:
    """Whether preparing the statement again would help: it is gone, or a migration changed its result type.

    Error texts are in the server's language, so the name of the function that raised the error distinguishes a stale
    plan from other unsupported features (0A000), for which preparing again would not help.
    """
    code = sqlstate(result)
    if code == "0A000":
        return result.error_field(DiagnosticField.SOURCE_FUNCTION) == b"RevalidateCachedQuery"
    return code == "26000"


def loss(
    results: Sequence[pq.abc.PGresult], cause: BaseException, *, expected: int, doing: str
) -> StoreUnavailable:
    """Make the exception for a connection that was lost after a message was sent.

    `expected` is NO_COMMIT, COMMIT, or a positive number: the number of results of a complete answer, if the Sync at
    the end of the message commits.

    An error with a SQLSTATE can prove "not done": in the extended protocol the server sends the completion of every
    statement before the Sync commits them, so if fewer than `expected` completions arrived before the error, the
    server did not get to the commit. COMMIT itself and a simple query (`script`) complete after they have committed,
    and so do the few commands that cannot run in a transaction block (VACUUM, CREATE INDEX CONCURRENTLY, a CALL that
    commits): there neither silence nor FATAL proves anything.
    """
    refusals = [result for result in results if not is_done(result) and sqlstate(result) is not None]
    why = " ".join(str(cause).split())
    if refusals:
        why = f"the server said {_text(refusals[-1])!r} ({sqlstate(refusals[-1])})"
    # Class 08 does not come from the backend: PgBouncer sends it when it lost the server, which may have committed.
    proof = any(not str(sqlstate(result)).startswith("08") for result in refusals)
    done = sum(is_done(result) for result in results)
    if expected == NO_COMMIT or (expected > 0 and proof and done < expected):
        return StoreUnavailable(f"the connection was lost while running {doing}, nothing was done: {why}")
    return CommitUnknown(
        f"the connection was lost while running {doing}, after its commit was sent: "
        f"it may have happened or not: {why}"
    )
