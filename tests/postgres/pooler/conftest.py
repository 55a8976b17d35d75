"""PgBouncer is a program of the system: where it is not installed there is nothing to collect."""

from __future__ import annotations

from tests.chaos.pgbouncer import PROGRAM

collect_ignore_glob = [] if PROGRAM else ["test_*.py"]
