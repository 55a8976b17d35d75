"""Embedded Postgres: a real server without installation, shared by all processes of one data directory.

::

    with embedded.start() as server:      # a client process: holds a lease while it uses the server
        psycopg.connect(server.dsn())

    client ──lease (shared flock)──┐
    client ──lease────────────────┐│
                                  ▼▼
    supervisor (detached) ── waits until no lease is held ── stops ──> postgres ──> pgdata
        └ restarts postgres when it crashes; if the supervisor itself is killed, the kernel stops postgres

This module is the clients' side: it decides whether a server must be started, starts the supervisor, and waits until it
is ready. docs/internals/embedded.md lists what happens after a crash at each point.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import threading
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import attrs
import trio
from psycopg.conninfo import make_conninfo

from durable_actors._dsn import EMBEDDED, resolve_dsn
from durable_actors._postgres.embedded import supervisor
from durable_actors._postgres.embedded.files import (
    POLL_INTERVAL,
    DataDir,
    SupervisorState,
    default_data_dir,
    lock_holders,
    locked,
    try_lock,
    wait_lock,
)
from durable_actors._postgres.embedded.launch import Launch, ensure_running
from durable_actors.errors import ConfigError, StoreUnavailable

logger = logging.getLogger(__name__)

DEFAULT_TIMEOUT = 60.0
"""Seconds to start or stop a server."""


class EmbeddedServer:
    """A running server, as used by this process. The server stays up until `close` or the end of the process."""

    def __init__(self, data: DataDir, state: SupervisorState, lease: int, *, launch: Launch) -> None:
        self._data = data
        self._state = state
        self._lease: int | None = lease
        self._launch = launch

    @property
    def data_dir(self) -> Path:
        """The directory of the cluster, its log and its locks."""
        return self._data.path

    @property
    def bin_dir(self) -> Path:
        """The directory of the server's programs; with most providers also of `psql`."""
        return self._state.bin_dir

    def dsn(self, dbname: str = "postgres", **options: str) -> str:
        """A libpq connection string; options such as ``application_name`` are added to it."""
        return make_dsn(self._state.socket_dir, dbname=dbname, **options)

    @property
    def supervised(self) -> bool:
        """Whether the server has a supervisor. Costs a few system calls that do not block."""
        return self._data.supervised()

    def ensure(self, *, timeout: float = DEFAULT_TIMEOUT) -> None:
        """Start the server again if its supervisor was killed.

        If only postgres crashed, the supervisor restarts it.
        """
        if self._lease is None:
            raise StoreUnavailable(f"this process has closed the embedded server of {self.data_dir}")
        if not self.supervised:
            deadline = time.monotonic() + timeout
            with locked(self._data, self._data.start_lock, deadline=deadline):
                self._state = ensure_running(self._data, self._launch, deadline=deadline)

    def close(self) -> None:
        """Release the lease; the server stops one second after its last client."""
        lease, self._lease = self._lease, None
        if lease is not None:
            os.close(lease)

    def lend_to_exec(self) -> None:
        """Pass the lease on to the program that replaces this process by exec: the server stays up for it."""
        if self._lease is not None:
            os.set_inheritable(self._lease, True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<EmbeddedServer {self.data_dir}{'' if self._lease is not None else ' closed'}>"


@attrs.frozen
class EmbeddedStatus:
    """The output of `durable-actors pg status`."""

    data_dir: Path
    exists: bool
    """Whether there is a cluster."""
    phase: str
    """stopped, starting, ready, stopping or failed."""
    version: int | None
    """Major version of the cluster."""
    supervisor: int | None
    postmaster: int | None
    clients: tuple[int, ...]
    """Processes that hold a lease (Linux only)."""
    dsn: str | None
    """Set while the server is ready."""
    log: Path


def start(
    data_dir: Path | str | None = None,
    *,
    throwaway: bool = False,
    settings: Mapping[str, str] | None = None,
    timeout: float = DEFAULT_TIMEOUT,
) -> EmbeddedServer:
    """Start the server of this directory, or join the running one. Blocks; in Trio use `open_embedded`.

    With `throwaway`, for tests, the server runs without fsync and its directory is deleted after its last client. It
    also confirms commits before they are written: a test that kills the server sets `synchronous_commit` to on.
    `settings` are server settings; they apply if this call starts the server, not if it joins one.
    Raises ConfigError if the configuration cannot work, StoreUnavailable if the server did not start in time.
    """
    data = DataDir(Path(data_dir).absolute() if data_dir is not None else default_data_dir())
    how = Launch(throwaway=throwaway, settings=dict(settings or {}))
    deadline = time.monotonic() + timeout
    # The lease comes first: from now on no supervisor begins to stop.
    lease = wait_lock(data, data.lease, exclusive=False, deadline=deadline)
    try:
        with locked(data, data.start_lock, deadline=deadline):
            state = ensure_running(data, how, deadline=deadline)
    except BaseException:
        os.close(lease)
        raise
    return EmbeddedServer(data, state, lease, launch=how)


_servers: Final[dict[Path, EmbeddedServer]] = {}
_servers_lock: Final = threading.Lock()


def embedded_dsn(dbname: str = "postgres") -> str:
    """Start or join the embedded Postgres and return a connection string for it: for psycopg, Django, SQLAlchemy.

    The server stays up as long as this process lives, connected or not. Call it again when connections fail: it starts
    a server whose supervisor was killed. Blocks for a tenth of a second, for some seconds if the database is new; in
    Trio: `await trio.to_thread.run_sync(durable_actors.embedded_dsn)`.
    Raises `ConfigError` if it cannot run here or `DURABLE_EMBEDDED=0` forbids it, `StoreUnavailable` if it did not
    start in time.
    """
    resolve_dsn(EMBEDDED)
    data_dir = default_data_dir()
    with _servers_lock:
        server = _servers.get(data_dir)
        if server is None:
            server = _servers[data_dir] = start(data_dir)
        else:
            server.ensure()
    return server.dsn(dbname)


@asynccontextmanager
async def open_embedded(data_dir: Path | str | None = None) -> AsyncGenerator[EmbeddedServer]:
    """Run `start` in a worker thread; close the server after the body.

    Cancelled during the start: the thread finishes and its lease is released before `Cancelled` propagates.
    A long-running process runs `keep_up` concurrently.
    """
    with await trio.to_thread.run_sync(start, data_dir) as server:
        await trio.lowlevel.checkpoint_if_cancelled()
        yield server


async def keep_up(server: EmbeddedServer, *, interval: float = 1.0) -> None:
    """Restart the server when its supervisor was killed, which nothing else would notice. Runs for ever.

    If the restart fails, it is retried; the reason is logged each time.
    """
    while True:
        await trio.sleep(interval)
        if server.supervised:
            continue
        try:
            await trio.to_thread.run_sync(server.ensure)
        except StoreUnavailable as exc:
            logger.warning("the embedded Postgres is down; trying again in %s s: %s", interval, exc)


def status(data_dir: Path | str | None = None) -> EmbeddedStatus:
    """Read the status, without starting anything."""
    data = DataDir(Path(data_dir).absolute() if data_dir is not None else default_data_dir())
    supervised = data.supervised()
    state = data.read_state() if supervised else None
    phase = state.phase if state is not None else "starting" if supervised else "stopped"
    clients = lock_holders(data.lease)
    return EmbeddedStatus(
        data_dir=data.path,
        exists=data.cluster.exists(),
        phase=phase,
        version=data.cluster_major(),
        supervisor=state.supervisor if state is not None else None,
        postmaster=state.postmaster if state is not None else None,
        clients=tuple(pid for pid in clients if state is None or pid != state.supervisor),
        dsn=make_dsn(state.socket_dir) if state is not None and phase == "ready" else None,
        log=data.log,
    )


def stop(
    data_dir: Path | str | None = None, *, force: bool = False, timeout: float = DEFAULT_TIMEOUT
) -> bool:
    """Stop the server; return whether one was running. Raises ConfigError while it is in use, unless `force`."""
    data = DataDir(Path(data_dir).absolute() if data_dir is not None else default_data_dir())
    if not data.supervised():
        return False
    deadline = time.monotonic() + timeout
    with locked(data, data.start_lock, deadline=deadline):
        lease = None if force else _lease_of_unused(data)
        try:
            _end_supervisor(data, deadline=deadline)
        finally:
            if lease is not None:
                os.close(lease)
    return True


def reset(data_dir: Path | str | None = None, *, timeout: float = DEFAULT_TIMEOUT) -> None:
    """Stop the server and delete its data permanently. Raises ConfigError while it is in use."""
    data = DataDir(Path(data_dir).absolute() if data_dir is not None else default_data_dir())
    if not data.path.exists():
        return
    deadline = time.monotonic() + timeout
    with locked(data, data.start_lock, deadline=deadline):
        lease = _lease_of_unused(data)
        try:
            _end_supervisor(data, deadline=deadline)
            # Renamed first: an interrupted reset must not leave half a cluster that looks complete.
            doomed = data.path / f"{supervisor.NEW_CLUSTER}.reset"
            if data.cluster.exists():
                shutil.rmtree(doomed, ignore_errors=True)
                data.cluster.rename(doomed)
            shutil.rmtree(doomed, ignore_errors=True)
            for leftover in (data.state, data.log, data.log.with_suffix(".log.1")):
                leftover.unlink(missing_ok=True)
        finally:
            os.close(lease)


def make_dsn(socket_dir: Path, *, dbname: str = "postgres", **options: str) -> str:
    """The connection string of the server whose socket is in this directory."""
    return make_conninfo(host=str(socket_dir), user="postgres", dbname=dbname, **options)


def _lease_of_unused(data: DataDir) -> int:
    """Take the exclusive lease: no process uses the server, and none can begin to. Raises ConfigError if one does."""
    deadline = time.monotonic() + 0.3  # the supervisor itself takes the lease for microseconds at each check
    while True:
        lease = try_lock(data.lease, exclusive=True)
        if lease is not None:
            return lease
        state = data.read_state()
        stopping = state is not None and state.phase == "stopping"
        if not stopping and time.monotonic() > deadline:
            break
        time.sleep(POLL_INTERVAL)
    users = ", ".join(str(pid) for pid in lock_holders(data.lease)) or "unknown"
    raise ConfigError(
        f"the embedded Postgres in {data.path} is in use (processes: {users}); stop them first, or "
        "stop it anyway with: durable-actors pg stop --force",
        option="DURABLE_DATA",
        value=str(data.path),
    )


def _end_supervisor(data: DataDir, *, deadline: float) -> None:
    """Stop the supervisor and wait until it is gone. The caller holds start.lock."""
    asked = 0
    while data.supervised():
        state = data.read_state()
        if state is not None and state.supervisor != asked:
            asked = state.supervisor
            with suppress(ProcessLookupError):
                os.kill(asked, signal.SIGTERM)
        if time.monotonic() > deadline:
            raise StoreUnavailable(f"the embedded Postgres in {data.path} does not stop; see {data.log}")
        time.sleep(POLL_INTERVAL)
