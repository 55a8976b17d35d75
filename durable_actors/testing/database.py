"""Databases for tests: one server per run, one fresh database per test.

The server is the first of these that applies:

1. ``DURABLE_TEST_DSN``: your own server. The user needs CREATEDB.
2. A container, if a Docker engine answers at its socket within 100 ms.
3. The embedded Postgres without fsync, in a temporary directory that all workers of a run share. Each worker holds
   a file lock, which the kernel releases when the process ends, so server and directory are removed even if the run
   is killed with SIGKILL.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import re
import shutil
import socket
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import LiteralString
from urllib.parse import urlsplit

import psycopg
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from durable_actors._postgres.embedded import server as embedded
from durable_actors._postgres.embedded.account import check_reachable, server_account
from durable_actors._postgres.embedded.binaries import find_binaries
from durable_actors._postgres.embedded.files import DataDir, try_lock
from durable_actors._postgres.embedded.process import retire_server
from durable_actors.errors import ConfigError

PREFIX = "durable_test_"
STALE_AFTER = 6 * 3600
IN_MEMORY = Path("/dev/shm")  # noqa: S108 - private names inside it, here and below
BASES = (IN_MEMORY, Path(tempfile.gettempdir()), Path("/tmp"), Path("/var/tmp"))  # noqa: S108
MEMORY_NEEDED = 2 * 1024**3
PROBE_TIMEOUT = 0.1
IMAGE = "postgres:18-alpine"
# Test data need not survive a crash of the server, so checkpoints are rare.
SERVER_SETTINGS = {
    "max_connections": "300",
    "max_wal_size": "512MB",
    "checkpoint_timeout": "30min",
    "autovacuum_naptime": "10min",
}

Prepare = Callable[[str], None]


class DatabaseServer:
    """Creates and drops databases on one Postgres. One object per process; several processes may share the server."""

    def __init__(self, provider: str, dsn: str, *, run: str, disposable: bool = False) -> None:
        self.provider = provider
        """``DURABLE_TEST_DSN``, ``docker`` or ``embedded``."""
        self.dsn = dsn
        """The maintenance database. Tests should not write to it."""
        self._run = run
        self._disposable = disposable
        self._closing = False
        self._names = (f"{PREFIX}{int(time.time()):x}_{uuid.uuid4().hex[:8]}_{n}" for n in itertools.count())
        self._admin = psycopg.connect(dsn, autocommit=True, application_name="durable test harness")
        if provider == "embedded":
            self._copy_in_the_kernel()
            self._create_statistics()
        self._doomed: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._dropper = threading.Thread(target=self._drop_doomed, name="drop test databases", daemon=True)
        self._dropper.start()

    @property
    def version(self) -> int:
        """Major version of the server."""
        return self._admin.info.server_version // 10000

    def create(self, *, template: str = "template0") -> str:
        """Create a database as a copy of `template`, and return its DSN."""
        name = next(self._names)
        self._create(name, template)
        return self.dsn_of(name)

    def drop(self, dsn: str) -> None:
        """Drop the database in the background, with force. Returns at once."""
        name = _database_name(dsn)
        if not name.startswith(PREFIX):
            raise ValueError(f"{name!r} is not a database of these fixtures")
        self._doomed.put(name)

    @contextlib.contextmanager
    def database(self, *, template: str = "template0") -> Generator[str]:
        """Create a database for the length of the block; yields its DSN."""
        dsn = self.create(template=template)
        try:
            yield dsn
        finally:
            self.drop(dsn)

    def template(self, prepare: Prepare, *, kind: str = "", base: str = "template0") -> str:
        """Name of the run's template database. The first worker that asks for it fills it with `prepare`.

        `kind` names another template, e.g. one with data that takes seconds to insert; it begins as a copy of `base`.
        """
        suffix = f"_{self._run}_template{kind}"
        with self._exclusive(f"durable template {self._run} {kind}"):
            row = self._admin.execute(
                "select datname from pg_database where datname like %s", [f"%{suffix}"]
            ).fetchone()
            if row is not None:
                return str(row[0])
            name = f"{PREFIX}{int(time.time()):x}{suffix}"
            unfinished = self.create(template=base)
            try:
                prepare(unfinished)
            except BaseException:
                self.drop(unfinished)
                raise
            self._execute("alter database {} rename to {}", _database_name(unfinished), name)
            return name

    def dsn_of(self, name: str, **options: str) -> str:
        """DSN of another database of this server."""
        return make_conninfo(self.dsn, dbname=name, **options)

    def drop_stale(self) -> None:
        """Drop the databases that killed runs left on your server more than six hours ago."""
        rows = self._admin.execute(
            "select datname from pg_database where datname like %s", [PREFIX + "%"]
        ).fetchall()
        for (name,) in rows:
            stamp = re.match(rf"{PREFIX}([0-9a-f]{{8}})_", str(name))
            if stamp is not None and time.time() - int(stamp[1], 16) > STALE_AFTER:
                self._doomed.put(str(name))

    def close(self) -> None:
        """Drop the remaining databases, unless the server itself is removed, and disconnect."""
        self._closing = True
        self._doomed.put(None)
        self._dropper.join()
        if not self._disposable:
            with self._exclusive(f"durable template {self._run} "):
                self._drop_template_if_last()
        self._admin.close()

    def _drop_template_if_last(self) -> None:
        """Drop the templates if this is the last worker of the run."""
        others = self._admin.execute(
            "select count(*) from pg_stat_activity where application_name = %s and pid <> pg_backend_pid()",
            ["durable test harness"],
        ).fetchone()
        pattern = f"{PREFIX}%_{self._run}_template%"
        rows = self._admin.execute(
            "select datname from pg_database where datname like %s", [pattern]
        ).fetchall()
        if others == (0,):
            for (name,) in rows:
                self._execute("drop database if exists {} with (force)", str(name))

    def _create(self, name: str, template: str) -> None:
        # Without fsync, copying files is faster than writing 7 MB to the WAL. Postgres 14 always copies files.
        strategy: LiteralString = " strategy file_copy" if self.version >= 15 else ""
        self._execute("create database {} template {}" + strategy, name, template)

    def _copy_in_the_kernel(self) -> None:
        """Let the kernel copy or share file blocks (Postgres 18): a database takes 11 ms of CPU instead of 14."""
        self._admin.execute(
            "select set_config(name, 'clone', false) from pg_settings"
            " where name = 'file_copy_method' and 'clone' = any(enumvals)"
        )

    def _create_statistics(self) -> None:
        with self._exclusive("durable statistics"):  # "if not exists" does not lock
            self._admin.execute(
                "do $$ begin if current_setting('shared_preload_libraries') like '%pg_stat_statements%' then"
                " create extension if not exists pg_stat_statements; end if; end $$"
            )

    def _execute(self, statement: LiteralString, *names: str) -> None:
        self._admin.execute(sql.SQL(statement).format(*map(sql.Identifier, names)))

    @contextlib.contextmanager
    def _exclusive(self, name: str) -> Generator[None]:
        self._admin.execute("select pg_advisory_lock(hashtextextended(%s, 0))", [name])
        try:
            yield
        finally:
            self._admin.execute("select pg_advisory_unlock(hashtextextended(%s, 0))", [name])

    def _drop_doomed(self) -> None:
        """Drop one database after the other, in a thread: a drop needs a checkpoint, and no test should wait for it."""
        with psycopg.connect(
            self.dsn, autocommit=True, application_name="durable test dropper"
        ) as connection:
            while (name := self._doomed.get()) is not None:
                if not (self._closing and self._disposable):
                    _drop(connection, name)


def _drop(connection: psycopg.Connection, name: str) -> None:
    """Drop a database and its statistics: with those of hundreds, each look at them took 90 ms of CPU."""
    row = connection.execute(
        "select d.oid from pg_database d join pg_extension on extname = 'pg_stat_statements'"
        " join pg_roles on rolname = current_user and rolsuper where datname = %s",
        [name],
    ).fetchone()
    connection.execute(sql.SQL("drop database if exists {} with (force)").format(sql.Identifier(name)))
    if row is not None:
        connection.execute("select pg_stat_statements_reset(0, %s, 0)", row)


def _database_name(dsn: str) -> str:
    return str(conninfo_to_dict(dsn).get("dbname", ""))


@contextlib.contextmanager
def open_server(*, run: str | None = None, dsn: str | None = None) -> Generator[DatabaseServer]:
    """Find, join or start the server of this test run, as described above; leave or stop it at the end.

    Processes that pass the same `run` share one embedded server and one template. `dsn` skips the search.
    """
    run = (run or uuid.uuid4().hex)[:12]
    dsn = dsn or os.environ.get("DURABLE_TEST_DSN")
    with contextlib.ExitStack() as stack:
        if dsn:
            server = DatabaseServer("DURABLE_TEST_DSN", dsn, run=run)
            server.drop_stale()
        elif docker_answers():
            server = DatabaseServer("docker", stack.enter_context(open_container()), run=run, disposable=True)
        else:
            started = stack.enter_context(start_throwaway(throwaway_directory(run)))
            server = DatabaseServer("embedded", started.dsn(), run=run, disposable=True)
        stack.callback(server.close)
        yield server


def start_throwaway(directory: Path) -> embedded.EmbeddedServer:
    """Start the embedded server of a test run, with pg_stat_statements if the binaries include it."""
    settings = dict(SERVER_SETTINGS)
    library_dir = find_binaries().bin_dir.parent / "lib"
    if any(library_dir.glob("**/pg_stat_statements.*")):
        settings |= {"shared_preload_libraries": "pg_stat_statements", "pg_stat_statements.max": "5000"}
    return embedded.start(directory, throwaway=True, settings=settings)


def throwaway_directory(run: str) -> Path:
    """The directory of the run's embedded server: the same for all its processes, reachable by the server's user.

    In memory if there is room: copying a database took 12 ms there, and 17 to 250 ms on a busy disk.
    """
    bases = [base for base in BASES if base.is_dir()]
    places = [base / f"{_directory_prefix()}{run}" for base in bases]
    for place in places:
        if place.exists():  # made by another worker of this run, when there may have been more room
            return place
    for base in bases:
        remove_abandoned(base)
    account = server_account(Path("/nonexistent"))
    for base, place in zip(bases, places, strict=True):
        if base == IN_MEMORY and shutil.disk_usage(base).free < MEMORY_NEEDED:
            continue
        with contextlib.suppress(ConfigError):
            check_reachable(base, account)
            return place
    text = f"none of {', '.join(map(str, bases))} can be reached by the server's user"
    raise ConfigError(text, option="TMPDIR", value=tempfile.gettempdir())


def remove_abandoned(base: Path) -> None:
    """Delete the directories of runs of which no process is left, not even the supervisor."""
    for path in base.glob(f"{_directory_prefix()}*"):
        if path.is_symlink() or path.stat().st_uid != os.geteuid():
            continue
        data = DataDir(path)
        lease = try_lock(data.lease, exclusive=True)
        if lease is not None:
            if not data.supervised():
                with contextlib.suppress(FileNotFoundError):  # another run may be doing the same
                    retire_server(data.cluster, timeout=10.0)
                    shutil.rmtree(path.rename(path.with_name(f"{path.name}.{uuid.uuid4().hex[:6]}")))
            os.close(lease)


def _directory_prefix() -> str:
    return f"durable-test-{os.geteuid()}-"


def docker_answers(environ: Mapping[str, str] | None = None) -> bool:
    """Whether a Docker engine answers ``GET /_ping`` within 100 ms."""
    environ = os.environ if environ is None else environ
    address = urlsplit(environ.get("DOCKER_HOST") or "unix:///var/run/docker.sock")
    try:
        with _connect(address.scheme, address.path, address.hostname, address.port) as engine:
            engine.sendall(b"GET /_ping HTTP/1.0\r\nHost: docker\r\n\r\n")
            return engine.recv(64).split(b" ")[1:2] == [b"200"]
    except OSError:
        return False


def _connect(scheme: str, path: str, host: str | None, port: int | None) -> socket.socket:
    if scheme in {"tcp", "http"} and host is not None:
        return socket.create_connection((host, port or 2375), timeout=PROBE_TIMEOUT)
    engine = socket.socket(socket.AF_UNIX)
    try:
        engine.settimeout(PROBE_TIMEOUT)
        engine.connect(path)
    except BaseException:
        engine.close()
        raise
    return engine


@contextlib.contextmanager
def open_container() -> Generator[str]:
    """Start a Postgres in a container; yields its DSN. Its reaper removes it if this process is killed."""
    # Imported here because it takes half a second, and only runs with Docker need it.
    from testcontainers.community.postgres import PostgresContainer  # noqa: PLC0415

    settings = SERVER_SETTINGS | {"fsync": "off", "shared_preload_libraries": "pg_stat_statements"}
    container = PostgresContainer(IMAGE, username="postgres", dbname="postgres", driver=None)
    container.with_command("postgres " + " ".join(f"-c {name}={value}" for name, value in settings.items()))
    with container:
        yield container.get_connection_url(driver=None)
