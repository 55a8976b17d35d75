"""What a stretch of work cost: seconds, CPU of the worker and of the server, WAL, statements, fsyncs.

Imported in the environments of the peers, too, so it needs nothing but psycopg.

Server CPU  /proc: the live children to the nanosecond where Linux tells; the postmaster's own and that of its reaped
            children in ticks of 10 ms.
WAL         pg_current_wal_lsn: exact, of the whole server.
Statements  pg_stat_statements of this database; the meter's own are taken off.
fsyncs      pg_stat_io (18 and newer) or pg_stat_wal: backends report about once a second, so read them over
            stretches of several seconds.
"""

from __future__ import annotations

import os
import resource
import time
from dataclasses import dataclass
from pathlib import Path

import psycopg

_TICK = os.sysconf("SC_CLK_TCK")


def server_cpu(postmaster: int) -> float:
    """CPU seconds that the server has used so far."""
    total = sum(_cpu(postmaster)[:4]) / _TICK
    tasks = Path(f"/proc/{postmaster}/task/{postmaster}/children")
    for child in tasks.read_text().split():
        try:
            total += on_cpu(int(child))
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended meanwhile: the postmaster's figure has it now
    return total


def _cpu(pid: int) -> list[int]:
    """utime, stime, cutime, cstime in ticks."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return [int(field) for field in fields[11:15]]


def worker_cpu() -> float:
    """CPU seconds of this process and of the children it has waited for."""
    own = resource.getrusage(resource.RUSAGE_SELF)
    reaped = resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.ru_utime + own.ru_stime + reaped.ru_utime + reaped.ru_stime


def process_cpu(pid: int) -> float:
    """CPU seconds of another process."""
    return sum(_cpu(pid)[:2]) / _TICK


def on_cpu(pid: int) -> float:
    """Seconds that a process has been on a CPU, to the nanosecond where Linux tells; else in ticks."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9
    except FileNotFoundError:
        return process_cpu(pid)


@dataclass(frozen=True)
class Reading:
    at: float
    worker: float
    server: float
    wal: int
    statements: int
    fsyncs: int


class Meter:
    """Measures from `start` to `stop`; opens a connection of its own, before the measured stretch."""

    def __init__(self, dsn: str, postmaster: int) -> None:
        self._postmaster = postmaster
        self._conn = psycopg.connect(dsn, autocommit=True)
        self._conn.execute("create extension if not exists pg_stat_statements")
        self._io = self._conn.info.server_version >= 180000
        self._before: Reading | None = None

    def start(self) -> None:
        self._before = self._read()

    @property
    def running(self) -> bool:
        return self._before is not None

    def stop(self, units: int) -> dict[str, float]:
        """Figures of the stretch, per unit where that makes sense. CPU is read before anything else is asked."""
        at, worker, server = time.monotonic(), worker_cpu(), server_cpu(self._postmaster)
        before, after = self._before, self._read()
        assert before is not None
        seconds = at - before.at
        return {
            "units": units,
            "seconds": seconds,
            "per_second": units / seconds,
            "worker_us": (worker - before.worker) * 1e6 / units,
            "server_us": (server - before.server) * 1e6 / units,
            "wal_bytes": (after.wal - before.wal) / units,
            "statements": max(after.statements - before.statements - 2, 0) / units,
            "fsyncs": (after.fsyncs - before.fsyncs) / units,
        }

    def _read(self) -> Reading:
        fsyncs = (
            "select coalesce(sum(fsyncs), 0)::int8 from pg_stat_io where object = 'wal'"
            if self._io
            else "select coalesce(wal_sync, 0) from pg_stat_wal"
        )
        row = self._conn.execute(
            "select pg_wal_lsn_diff(pg_current_wal_insert_lsn(), '0/0')::int8,"
            " (select coalesce(sum(calls), 0)::int8 from pg_stat_statements s"
            f"   join pg_database d on d.oid = s.dbid where d.datname = current_database()), ({fsyncs})"
        ).fetchone()
        assert row is not None
        return Reading(time.monotonic(), worker_cpu(), server_cpu(self._postmaster), *row)

    def close(self) -> None:
        self._conn.close()
