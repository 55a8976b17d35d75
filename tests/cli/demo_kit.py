"""The demo as a process, and what it may not leave behind."""

from __future__ import annotations

import os
import subprocess
import sys

import psycopg


def start_demo(dsn: str, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "durable_actors.cli", "demo", "--dsn", dsn, *arguments]
    return subprocess.Popen(
        command,
        env={**os.environ, "COLUMNS": "200"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def has_schema(conn: psycopg.Connection) -> bool:
    return conn.execute("select from pg_namespace where nspname = 'durable_demo'").fetchone() is not None


def assert_nothing_is_left(dsn: str) -> None:
    """No schema, and no session beside ours; a session may take a moment to see that its client is gone."""
    with psycopg.connect(dsn, autocommit=True) as conn:
        assert not has_schema(conn)
        for _ in range(1500):
            sessions = conn.execute(
                "select pid, query from pg_stat_activity where datname = current_database()"
                " and pid <> pg_backend_pid() and backend_type = 'client backend'"
            ).fetchall()
            if not sessions:
                return
            conn.execute("select pg_sleep(0.02)")
        raise AssertionError(sessions)
