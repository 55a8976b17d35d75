"""Embedded Postgres: the files of a data directory and the locks on them.

There are three lock files. All are locked with flock(2), which the kernel releases however the holder dies:

``lease``            shared, held by every client process while it uses the server; the supervisor takes it exclusively
                     to stop the server.
``start.lock``       exclusive, held by a client that checks whether a server is running and starts one.
``supervisor.lock``  exclusive, held by the supervisor as long as it lives: if it is locked, there is a supervisor.

They are not deleted as long as the directory exists: a lock on an unlinked file protects nothing.
Lock order: lease, start.lock, supervisor.lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import sys
import time
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import IO

import attrs

from durable_actors._postgres.embedded import supervisor
from durable_actors.errors import ConfigError, StoreUnavailable

POLL_INTERVAL = 0.01
"""Seconds between two checks of a lock or of the supervisor's state."""


def default_data_dir(environ: Mapping[str, str] | None = None) -> Path:
    """``DURABLE_DATA``; else the user's data directory; for root one that the server's user can reach."""
    environ = os.environ if environ is None else environ
    if chosen := environ.get("DURABLE_DATA"):
        return Path(chosen).expanduser().absolute()
    if os.geteuid() == 0:  # other users cannot reach root's home, and that must stay so
        return Path("/var/lib/durable_actors")
    if (base := environ.get("XDG_DATA_HOME")) and Path(base).is_absolute():
        return Path(base, "durable_actors")
    try:
        home = Path.home()
    except RuntimeError as exc:
        raise ConfigError("this user has no home directory; set DURABLE_DATA", option="DURABLE_DATA") from exc
    folder = "Library/Application Support" if sys.platform == "darwin" else ".local/share"
    return home / folder / "durable_actors"


@attrs.frozen
class DataDir:
    """The files of one data directory."""

    path: Path

    @property
    def cluster(self) -> Path:
        """The data directory of Postgres itself."""
        return self.path / supervisor.CLUSTER

    @property
    def log(self) -> Path:
        """Output of initdb, postgres and the supervisor."""
        return self.path / supervisor.LOG

    @property
    def lease(self) -> Path:
        """Locked, shared, by every client of the server."""
        return self.path / supervisor.LEASE

    @property
    def start_lock(self) -> Path:
        """Locked by a client that starts, stops or resets the server."""
        return self.path / supervisor.START_LOCK

    @property
    def supervisor_lock(self) -> Path:
        """Locked by the living supervisor."""
        return self.path / supervisor.SUPERVISOR_LOCK

    @property
    def state(self) -> Path:
        """The state that the supervisor wrote last."""
        return self.path / supervisor.STATE

    def create(self) -> None:
        """Create the directory: private, but as root the server's user can pass through it."""
        try:
            if self.path.is_dir():
                return
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileExistsError):
                self.path.mkdir()
                self.path.chmod(0o711 if os.geteuid() == 0 else 0o700)  # regardless of the umask
        except OSError as exc:
            raise self.unusable(f"cannot be reached or created ({exc.strerror})") from exc

    def unusable(self, why: str) -> ConfigError:
        """The error for a directory that this user cannot use."""
        remedy = "run as its owner, or set DURABLE_DATA to a directory of your own"
        return ConfigError(
            f"the data directory {self.path} {why}; {remedy}", option="DURABLE_DATA", value=str(self.path)
        )

    def open_log(self) -> IO[bytes]:
        """Open the log for appending. It is private, because logged statements may contain data."""
        return open(self.log, "ab", opener=lambda path, flags: os.open(path, flags, 0o600))

    def cluster_major(self) -> int | None:
        """Major version of the cluster; None if there is none yet."""
        try:
            text = (self.cluster / "PG_VERSION").read_text(encoding="ascii").strip()
        except FileNotFoundError:
            return None
        except PermissionError as exc:
            raise self.unusable("contains a cluster of another user") from exc
        return int(text) if text.isdigit() else None

    def supervised(self) -> bool:
        """Whether a supervisor is running."""
        try:
            if not self.supervisor_lock.exists():
                return False
        except PermissionError as exc:
            raise self.unusable(f"cannot be reached ({exc.strerror})") from exc
        # Shared, so that two processes that check at the same time do not take each other for a supervisor.
        handle = try_lock(self.supervisor_lock, exclusive=False)
        if handle is None:
            return True
        os.close(handle)
        return False

    def read_state(self) -> SupervisorState | None:
        """The state that the supervisor wrote last; None if it has not written one yet.

        The old file is removed before a supervisor is spawned, so while ``supervisor.lock`` is held it is current.
        """
        try:
            content = json.loads(self.state.read_bytes())
        except FileNotFoundError:
            return None
        return SupervisorState(
            phase=content["phase"],
            supervisor=content["supervisor"],
            postmaster=content.get("postmaster"),
            socket_dir=Path(content["socket_dir"]),
            bin_dir=Path(content["bin_dir"]),
            error=content.get("error", ""),
        )


@attrs.frozen
class SupervisorState:
    """``state.json``."""

    phase: str
    """starting, ready, stopping or failed."""
    supervisor: int
    postmaster: int | None
    socket_dir: Path
    bin_dir: Path
    error: str = ""
    """Why the start failed."""


def try_lock(path: Path, *, exclusive: bool) -> int | None:
    """Lock the file and return its descriptor, which owns the lock; None if another process holds it.

    Also None if the file was removed with its directory between open and lock: that lock would protect nothing. The
    caller tries again.
    """
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    except FileNotFoundError:
        return None
    except OSError as exc:
        raise DataDir(path.parent).unusable(f"cannot be written by this user ({exc.strerror})") from exc
    try:
        fcntl.flock(handle, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        if os.path.samestat(path.stat(), os.fstat(handle)):
            return handle
    except (BlockingIOError, FileNotFoundError):
        pass
    except BaseException:
        os.close(handle)
        raise
    os.close(handle)
    return None


def wait_lock(data: DataDir, path: Path, *, exclusive: bool, deadline: float) -> int:
    """Repeat try_lock until the deadline (of time.monotonic), then raise StoreUnavailable."""
    while True:
        data.create()  # a throwaway directory may be deleted while we wait for its last client
        handle = try_lock(path, exclusive=exclusive)
        if handle is not None:
            return handle
        if time.monotonic() > deadline:
            raise StoreUnavailable(
                f"{path} is still locked by another process (see: durable-actors pg status)"
            )
        time.sleep(POLL_INTERVAL)


@contextlib.contextmanager
def locked(data: DataDir, path: Path, *, deadline: float) -> Generator[None]:
    """Hold the exclusive lock during the body."""
    handle = wait_lock(data, path, exclusive=True, deadline=deadline)
    try:
        yield
    finally:
        os.close(handle)


def lock_holders(path: Path) -> tuple[int, ...]:
    """Pids of the processes that have locked this file (Linux only); for messages."""
    try:
        inode = path.stat().st_ino
        lines = Path("/proc/locks").read_text(encoding="ascii").splitlines()
    except OSError:
        return ()
    fields = [line.split() for line in lines if "->" not in line]
    return tuple(
        sorted({int(f[4]) for f in fields if f[5].rpartition(":")[2] == str(inode) and int(f[4]) > 0})
    )
