"""What an error of Postgres or of the connection means: not done, or unknown.

Pure. The driver collects what the server said; these functions decide which exception the caller sees:

* the server refused the statement (severity ERROR): a `psycopg.errors` class, nothing was done;
* the server or the network went away: `StoreUnavailable`, nothing was done;
* it went away when the commit may already have happened: `CommitUnknown`.
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
"""SQLSTATEs (beside class 08) that say the server cannot serve now; the statement was not done."""

RECONNECT: Final = frozenset({"57P01", "57P02", "57P03", "57P05", "25P03", "25006"})
"""After these the connection is of no use, even if the server has not closed it."""

RETRYABLE: Final = frozenset({"40001", "40P01", "55P03"})
"""Serialization failure, deadlock, lock not available: nothing was done, the same call may succeed."""

_DONE: Final = frozenset({ExecStatus.COMMAND_OK, ExecStatus.TUPLES_OK, ExecStatus.EMPTY_QUERY})
_COPY: Final = frozenset({ExecStatus.COPY_IN, ExecStatus.COPY_OUT, ExecStatus.COPY_BOTH})


def sqlstate(result: pq.abc.PGresult) -> str | None:
    """The five-character code; None when libpq, not the server, made the error up."""
    field = result.error_field(DiagnosticField.SQLSTATE)
    return field.decode() if field else None


def is_done(result: pq.abc.PGresult) -> bool:
    """Tell whether the server completed this statement (it may not have committed it yet)."""
    return result.status in _DONE


def is_copy(result: pq.abc.PGresult) -> bool:
    """Tell whether the statement was a COPY, which the engine's driver does not speak."""
    return result.status in _COPY


def server_error(result: pq.abc.PGresult, *, doing: str) -> Exception:
    """Make the exception for a statement that the server refused. Nothing of it was done."""
    code = sqlstate(result)
    text = (result.error_field(DiagnosticField.MESSAGE_PRIMARY) or result.error_message or b"").decode(
        "utf-8", "replace"
    )
    error: psycopg.Error
    if code is None:
        error = psycopg.OperationalError(text)
    else:
        error = _error_class(code)(text, info=result, encoding="utf-8")
    if code in UNAVAILABLE or (code is not None and code.startswith("08")):
        unavailable = StoreUnavailable(f"Postgres cannot serve now ({code}): {text}")
        unavailable.__cause__ = error
        return unavailable
    error.add_note(f"while running {doing}")
    return error


def _error_class(code: str) -> type[psycopg.Error]:
    try:
        return psycopg.errors.lookup(code)
    except KeyError:  # a code newer than this psycopg
        return psycopg.DatabaseError


def is_stale_plan(result: pq.abc.PGresult) -> bool:
    """Tell whether preparing the statement again would help: it is gone, or a migration changed its type."""
    code = sqlstate(result)
    if code == "0A000":  # also "feature not supported", where preparing again helps nobody
        return b"cached plan" in (result.error_field(DiagnosticField.MESSAGE_PRIMARY) or b"")
    return code == "26000"


def loss(
    results: Sequence[pq.abc.PGresult], *, expected: int | None, commits: bool, cause: object
) -> StoreUnavailable:
    """Make the exception for a connection that was lost in mid-conversation.

    `expected` is how many results a complete answer has, or None for a COMMIT; `commits` tells whether the
    completion commits (autocommit, or COMMIT itself).

    Why a refusal (an error with a SQLSTATE) may prove "not done": the server writes the completion of every
    statement before it commits them, so when fewer than `expected` arrived before the refusal, it never got
    so far. A COMMIT, however, completes after it has committed: there, silence and FATAL prove nothing.
    """
    if not commits:
        return StoreUnavailable(f"the connection was lost: {cause}")
    refused = any(sqlstate(result) is not None and not is_done(result) for result in results)
    done = sum(is_done(result) for result in results)
    if expected is not None and refused and done < expected:
        return StoreUnavailable(f"the server ended the connection, nothing was done: {cause}")
    return CommitUnknown(
        f"the connection was lost after the commit was sent; it may have happened or not: {cause}"
    )
