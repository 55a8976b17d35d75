"""The undocumented parts of psycopg that `TrioConnection` depends on.

Patch releases of psycopg have changed such parts (3.3.6: `wait` gained `timeout=`; 3.3.7: entering a transaction was
rewritten). So each one is listed here, with what to do when it changes, and `tests/postgres/trio/test_trio_hooks.py`
checks each one against the installed psycopg. The same test fails if a module of this package uses a private name that
is not listed. Checked: 3.3.6, 3.3.7, 3.3.8.
"""

from __future__ import annotations

from typing import Final

import attrs


@attrs.frozen(kw_only=True)
class Hook:
    """One undocumented name of psycopg, or one undocumented behaviour of a documented name."""

    owner: str
    """Where it is defined: `module:Class`, or a module."""
    name: str
    """The attribute."""
    params: str | None = None
    """Names of its parameters, in order; None for an attribute that is not called."""
    use: str
    """How we use it: call, read, set, or override (psycopg calls ours)."""
    why: str
    """Why we need it."""
    since: str
    """The first release that has it in this form, as far as we checked."""
    if_changed: str
    """Where to look, and what to do."""


_CONN: Final = "psycopg:AsyncConnection"
_TX: Final = "psycopg:AsyncTransaction"
_PIPE: Final = "psycopg:AsyncPipeline"
_CUR: Final = "psycopg:AsyncCursor"
_COPY: Final = "psycopg.copy:AsyncCopy"
_WRITER: Final = "psycopg.copy:AsyncLibpqWriter"

HOOKS: Final = (
    # ------------------------------------------------------------------ waiting
    Hook(
        owner=_CONN, name="wait", params="self gen interval timeout", use="override", since="3.3.6",
        why="the event loop: every cursor, transaction, pipeline and COPY does its I/O through it",
        if_changed="accept the new parameters in TrioWaiter.wait; see who passes them and why",
    ),
    Hook(
        owner=_CONN, name="lock", use="set", since="3.0",
        why="asyncio.Lock needs asyncio; used only as `async with`",
        if_changed="find the new lock, or what else FreeLock must offer",
    ),
    Hook(
        owner="psycopg.waiting", name="WAIT_R", use="read", since="3.0",
        why="generators yield 1, 2, 3 for read, write, either, and take the same numbers as what is ready",
        if_changed="adapt the numbers in wait and cursor",
    ),
    Hook(
        owner=_CONN, name="_try_cancel", params="self timeout", use="override", since="3.2",
        why="stream() and COPY call it when they are left early; must be shielded and bounded",
        if_changed="see what AsyncCursor.stream and AsyncCopy.finish call now",
    ),
    Hook(
        owner=_CONN, name="_should_cancel", params="self", use="call", since="3.2",
        why="cancel_safe() is a no-op on a closed connection, an error in a prepared two-phase transaction",
        if_changed="inline the two checks in TrioWaiter.cancel_safe",
    ),
    Hook(
        owner=_CONN, name="_closed", use="set", since="3.0",
        why="distinguishes `closed` from `broken`",
        if_changed="see AsyncConnection.close",
    ),
    # ------------------------------------------------------------------ connection
    Hook(
        owner=_CONN, name="_autocommit", use="set", since="3.0",
        why="connect(autocommit=): the setter is asynchronous and the connection is not shared yet",
        if_changed="await set_autocommit() in connect",
    ),
    Hook(
        owner=_CONN, name="_adapters", use="set", since="3.0",
        why="connect(context=)",
        if_changed="see AsyncConnection.connect",
    ),
    Hook(
        owner=_CONN, name="_commit_gen", params="self", use="call", since="3.0",
        why="commit() must know whether COMMIT was sent when the connection is lost",
        if_changed="see AsyncConnection.commit",
    ),
    Hook(
        owner=_CONN, name="_exec_command", params="self command result_format", use="call", since="3.0",
        why="ROLLBACK of a transaction whose COMMIT was cancelled",
        if_changed="send the command with pgconn.send_query and psycopg.generators.execute",
    ),
    Hook(
        owner=_CONN, name="_check_connection_ok", params="self", use="call", since="3.0",
        why="pipeline() on a closed connection must say so",
        if_changed="check `closed` and raise OperationalError",
    ),
    # ------------------------------------------------------------------ transaction
    Hook(
        owner=_TX, name="_enter_gen", params="self", use="call", since="3.0; 3.3.7 moved a check out of it",
        why="BEGIN or SAVEPOINT; sets `status` before it sends anything",
        if_changed="compare AsyncTransaction.__aenter__ with TrioTransaction.__aenter__",
    ),
    Hook(
        owner=_TX, name="_exit_gen", params="self exc_type exc_val exc_tb", use="call", since="3.0",
        why="COMMIT, ROLLBACK, RELEASE; sets `status` before it sends anything; logs errors of a rollback",
        if_changed="compare AsyncTransaction.__aexit__ with TrioTransaction.__aexit__",
    ),
    Hook(
        owner=_TX, name="_get_rollback_commands", params="self", use="call", since="3.0",
        why="to end a transaction or savepoint whose COMMIT or RELEASE was cancelled",
        if_changed="send ROLLBACK, or ROLLBACK TO and RELEASE, by hand",
    ),
    Hook(
        owner=_TX, name="_outer_transaction", use="read", since="3.0",
        why="only the outermost block sends COMMIT",
        if_changed="note pgconn.transaction_status before entering",
    ),
    Hook(
        owner=_TX, name="_conn", use="read", since="3.0",
        why="the connection, for `wait` and `lock`",
        if_changed="`connection` is public, and typed less precisely",
    ),
    # ------------------------------------------------------------------ pipeline
    Hook(
        owner=_CONN, name="_pipeline", use="set", since="3.1",
        why="the pipeline in force; cursors look at it",
        if_changed="see AsyncConnection.pipeline",
    ),
    Hook(
        owner=_CONN, name="_pipeline_nolock", params="self", use="override", since="3.2",
        why="executemany makes its pipeline with it; must be a TrioPipeline",
        if_changed="see AsyncCursor.executemany",
    ),
    Hook(
        owner=_PIPE, name="__init__", params="self conn _no_lock", use="call", since="3.2",
        why="executemany holds the lock already",
        if_changed="see AsyncConnection._pipeline_nolock",
    ),
    Hook(
        owner=_PIPE, name="_enter_gen", params="self", use="call", since="3.1",
        why="enters pipeline mode and counts levels",
        if_changed="compare AsyncPipeline.__aenter__ with TrioConnection.pipeline",
    ),
    Hook(
        owner=_PIPE, name="_exit", params="self exc", use="call", since="3.1",
        why="leaves a level without talking to a closed connection",
        if_changed="decrement `level`; leave pipeline mode at 0",
    ),
    Hook(
        owner=_PIPE, name="_conn", use="read", since="3.1",
        why="the connection, for `wait`",
        if_changed="pass it in TrioPipeline.__init__",
    ),
    # ------------------------------------------------------------------ cursors and COPY
    Hook(
        owner=_CUR, name="_fetch_pipeline", params="self", use="override", since="3.1",
        why="the first call of every fetch: the place to let other tasks run",
        if_changed="override fetchone, fetchmany, fetchall, __anext__ and scroll instead",
    ),
    Hook(
        owner=_CUR, name="_execmany_returning", use="read", since="3.1",
        why="executemany without returning has nothing to fetch",
        if_changed="compare AsyncCursor._fetch_pipeline with TrioCursor._fetch_pipeline",
    ),
    Hook(
        owner=_PIPE, name="_fetch_gen", params="self flush", use="call", since="3.1",
        why="a fetch in a pipeline waits for the answer",
        if_changed="compare AsyncCursor._fetch_pipeline with TrioCursor._fetch_pipeline",
    ),
    Hook(
        owner=_CUR, name="_start_copy_gen", params="self statement params", use="call", since="3.1",
        why="copy() must make a TrioCopy",
        if_changed="compare AsyncCursor.copy with TrioCursor.copy",
    ),
    Hook(
        owner=_CUR, name="_select_current_result", params="self i format", use="call", since="3.1",
        why="rowcount after a COPY",
        if_changed="compare AsyncCursor.copy with TrioCursor.copy",
    ),
    Hook(
        owner="psycopg:AsyncServerCursor", name="_close", params="self", use="call", since="3.0",
        why="a server-side cursor is closed even if its CLOSE was cancelled",
        if_changed="see AsyncCursor.close",
    ),
    Hook(
        owner="psycopg:AsyncServerCursor", name="_described", use="set", since="3.2",
        why="False makes psycopg check that the cursor exists before it closes it",
        if_changed="see ServerCursorMixin._close_gen",
    ),
    Hook(
        owner=_CUR, name="_conn", use="read", since="3.0",
        why="the connection, for `wait` and `lock`",
        if_changed="`connection` is public, and typed less precisely",
    ),
    Hook(
        owner=_COPY, name="finish", params="self exc", use="override", since="3.1",
        why="called by __aexit__; talks to the server",
        if_changed="override __aexit__ instead",
    ),
    Hook(
        owner=_COPY, name="_direction", use="read", since="3.1",
        why="a COPY TO that is left early must be cancelled, a COPY FROM rejected",
        if_changed="read cursor.pgresult.status before the COPY starts",
    ),
    Hook(
        owner=_COPY, name="_end_copy_out_gen", params="self", use="call", since="3.1",
        why="reads the rest of a cancelled COPY TO",
        if_changed="read() until it returns nothing; ignore QueryCanceled",
    ),
    Hook(
        owner=_COPY, name="_pgconn", use="read", since="3.1",
        why="to check whether the COPY is still active",
        if_changed="connection.pgconn",
    ),
    Hook(
        owner=_WRITER, name="_pgconn", use="read", since="3.1",
        why="to put COPY data",
        if_changed="connection.pgconn",
    ),
)  # fmt: skip
"""Every hook, grouped like the modules."""

OVERRIDDEN_FOR_ASYNCIO: Final = frozenset(
    {"__init__", "connect", "cancel_safe", "wait", "transaction", "pipeline", "_pipeline_nolock"}
)
"""The methods of psycopg's AsyncConnection that use asyncio or create asyncio-bound objects: all are overridden."""
