"""The one Postgres of a run: the embedded binaries, fsync on, a directory of its own, gone afterwards."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import tempfile
import time
from collections.abc import Generator
from pathlib import Path

import psycopg
import trio
from durable_actors._postgres.embedded import server as embedded
from durable_actors._postgres.embedded.account import check_reachable, server_account
from durable_actors._store.migrate import migrate
from durable_actors.errors import ConfigError
from psycopg import sql
from psycopg.conninfo import make_conninfo

# What a server for this work would have; the same for every contestant. fsync and synchronous_commit stay on.
SETTINGS = {
    "shared_buffers": "512MB",
    "max_wal_size": "4GB",
    "checkpoint_timeout": "15min",
    "max_connections": "200",
    "shared_preload_libraries": "pg_stat_statements",
    "pg_stat_statements.max": "5000",
    "track_wal_io_timing": "on",
}


class Server:
    """A running server and the databases of this run."""

    def __init__(self, dsn: str, postmaster: int) -> None:
        self.dsn = dsn
        self.postmaster = postmaster
        self._admin = psycopg.connect(dsn, autocommit=True)
        self._names = (f"bench_{n}" for n in itertools.count())
        self._template: str | None = None

    @property
    def version(self) -> str:
        return str(self._admin.info.parameter_status("server_version"))

    @contextlib.contextmanager
    def database(self, *, migrated: bool = True) -> Generator[str]:
        """DSN of a fresh database; with the engine's schema unless told otherwise."""
        name = next(self._names)
        template = self._migrated_template() if migrated else "template0"
        self._create(name, template)
        try:
            yield make_conninfo(self.dsn, dbname=name)
        finally:
            self._admin.execute(sql.SQL("drop database {} with (force)").format(sql.Identifier(name)))

    def _migrated_template(self) -> str:
        if self._template is None:
            self._template = "bench_template"
            self._create(self._template, "template0")
            dsn = make_conninfo(self.dsn, dbname=self._template)
            trio.run(migrate, dsn)
            with psycopg.connect(dsn, autocommit=True) as connection:
                connection.execute("create extension pg_stat_statements")
        return self._template

    def _create(self, name: str, template: str) -> None:
        command = sql.SQL("create database {} template {}")
        self._admin.execute(command.format(sql.Identifier(name), sql.Identifier(template)))

    def settle(self) -> None:
        """A checkpoint, so that no contestant pays for the pages of the one before."""
        self._admin.execute("checkpoint")

    def commit_times(self, count: int = 200) -> list[float]:
        """Seconds that one-row transactions take, one after the other: the yardstick of every latency."""
        with self.database(migrated=False) as dsn, psycopg.connect(dsn, autocommit=True) as connection:
            connection.execute("create table t (n int)")
            times: list[float] = []
            for n in range(count):
                begin = time.perf_counter()
                connection.execute("insert into t values (%s)", [n], prepare=True)
                times.append(time.perf_counter() - begin)
        return times

    def close(self) -> None:
        self._admin.close()


@contextlib.contextmanager
def open_server() -> Generator[Server]:
    """Start the run's server. On a disk: BENCH_DIR, else the system's directory for temporary files."""
    base = Path(os.environ.get("BENCH_DIR") or _reachable_base())
    directory = Path(tempfile.mkdtemp(prefix="durable-bench-", dir=base))
    directory.chmod(0o755)
    try:
        with embedded.start(directory / "server", settings=SETTINGS) as started:
            postmaster = embedded.status(directory / "server").postmaster
            assert postmaster is not None
            server = Server(started.dsn(), postmaster)
            try:
                yield server
            finally:
                server.close()
        embedded.stop(directory / "server", force=True)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _reachable_base() -> Path:
    """Not /dev/shm: there an fsync costs nothing and every figure lies."""
    account = server_account(Path("/nonexistent"))
    bases = (Path(tempfile.gettempdir()), Path("/var/tmp"))
    for base in bases:
        with contextlib.suppress(ConfigError):
            check_reachable(base, account)
            return base
    raise ConfigError("no directory for the server; set BENCH_DIR", option="BENCH_DIR", value=None)
