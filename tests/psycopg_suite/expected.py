"""Tests of psycopg's suite that fail on TrioConnection, each with the reason. Anything else is a bug of ours."""

from __future__ import annotations

from typing import Final

EXPECTED: Final[dict[str, tuple[str, ...]]] = {
    "checks the exact class or repr of psycopg's own cursor, server cursor or pipeline; ours are subclasses": (
        "test_connection_async.py::test_cursor_factory",
        "test_connection_async.py::test_server_cursor_factory",
        "test_cursor_async.py::test_default_cursor",
        "test_cursor_async.py::test_str",
        "test_pipeline_async.py::test_repr",
    ),
    "a failed transaction is not committed quietly: commit() and transaction() raise InFailedSqlTransaction": (
        "test_connection_async.py::test_auto_transaction_fail",
        "test_pipeline_async.py::test_outer_transaction_error",
    ),
    "connects through psycopg.Connection in a thread, and with a connect_timeout: the patched part is not used": (
        "test_connection_async.py::test_connect_args",
        "test_connection_async.py::test_resolve_hostaddr_conn",
        "test_connection_async.py::test_multi_hosts",
    ),
    "LISTEN and NOTIFY are refused": ("test_notify_async.py::*",),
    "AsyncQueuedLibpqWriter runs an asyncio task; refused": ("test_copy_async.py::test_worker_*",),
    "leaves a stream() generator to the garbage collector, of which Trio warns": (
        "test_cursor_common_async.py::test_stream_row_factory",
        "test_cursor_common_async.py::test_stream_chunked_row_factory",
    ),
    "slow: counts every object of the process, in which a worker thread (4 objects) comes and goes": (
        "test_*_async.py::test_leak",
        "test_copy_async.py::test_copy_*_leaks",
    ),
    "slow: fails on asyncio, too, where unknown hosts refuse instead of keeping silent, or pproxy does not start": (
        "test_connection_async.py::test_connect_error_multi_hosts_each_message_preserved",
        "test_connection_async.py::test_cancel_safe_error",
        "test_connection_async.py::test_cancel_safe_timeout",
    ),
    "depends on timing, now and then; on asyncio more often (20 of 150 runs, here 11 of 150)": (
        "test_pipeline_async.py::test_errors_raised_on_commit",
    ),
    "the test itself calls asyncio": (
        "test_pipeline_async.py::test_concurrency",
        "test_concurrency_async.py::*",
    ),
}
"""Reason → patterns of test ids."""
