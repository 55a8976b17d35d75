"""Embedded Postgres: the files of a data directory and the locks on them.

Three lock files, all flock(2), which the kernel drops at any death of the holder:

``lease``            shared by every client process as long as it uses the server; the supervisor takes it
                     exclusively to stop the server.
``start.lock``       exclusive, by a client that looks whether a server runs and starts one.
``supervisor.lock``  exclusive, by the supervisor as long as it lives: held means a supervisor is there.

They are never deleted while the directory lives: a lock on an unlinked name protects nobody.
LaunchRequest of taking them: lease, then start.lock, then supervisor.lock.
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


def default_data_dir(environ: Mapping[str, str] | None = None) -> Path:
    """``DURABLE_DATA``, else the user's data directory, else (root) one that the server's user can reach."""
    environ = os.environ if environ is None else environ
    if chosen := environ.get("DURABLE_DATA"):
        return Path(chosen).expanduser().absolute()
    if os.geteuid() == 0:  # root's home is closed to every other user, and must stay so
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
    """Names inside one data directory."""

    path: Path

    @property
    def cluster(self) -> Path:
        """The Postgres data directory proper."""
        return self.path / supervisor.CLUSTER

    @property
    def log(self) -> Path:
        """What initdb, postgres and the supervisor say."""
        return self.path / supervisor.LOG

    @property
    def lease(self) -> Path:
        """Locked, shared, by every user of the server."""
        return self.path / supervisor.LEASE

    @property
    def start_lock(self) -> Path:
        """Locked by who starts, stops or resets."""
        return self.path / supervisor.START_LOCK

    @property
    def supervisor_lock(self) -> Path:
        """Locked by the living supervisor."""
        return self.path / supervisor.SUPERVISOR_LOCK

    @property
    def state(self) -> Path:
        """The supervisor's last word."""
        return self.path / supervisor.STATE

    def create(self) -> None:
        """Make the directory, private but passable: as root the server's user has to get through."""
        try:
            if self.path.is_dir():
                return
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileExistsError):
                self.path.mkdir()
                self.path.chmod(0o711 if os.geteuid() == 0 else 0o700)  # whatever the umask says
        except OSError as exc:
            raise self.unusable(f"cannot be reached or made ({exc.strerror})") from exc

    def unusable(self, why: str) -> ConfigError:
        """The error for a directory that this user cannot work with."""
        remedy = "run as its owner, or set DURABLE_DATA to a directory of your own"
        return ConfigError(
            f"the data directory {self.path} {why}; {remedy}", option="DURABLE_DATA", value=str(self.path)
        )

    def open_log(self) -> IO[bytes]:
        """The log, for appending; private, because statements in it may show data."""
        return open(self.log, "ab", opener=lambda path, flags: os.open(path, flags, 0o600))

    def cluster_major(self) -> int | None:
        """Major version of the cluster there; None when there is none yet."""
        try:
            text = (self.cluster / "PG_VERSION").read_text(encoding="ascii").strip()
        except FileNotFoundError:
            return None
        except PermissionError as exc:
            raise self.unusable("holds a cluster of another user") from exc
        return int(text) if text.isdigit() else None

    def supervised(self) -> bool:
        """Whether a supervisor lives."""
        try:
            if not self.supervisor_lock.exists():
                return False
        except PermissionError as exc:
            raise self.unusable(f"cannot be reached ({exc.strerror})") from exc
        # Shared, so that two who look do not take each other for a supervisor.
        handle = try_lock(self.supervisor_lock, exclusive=False)
        if handle is None:
            return True
        os.close(handle)
        return False

    def read_state(self) -> SupervisorState | None:
        """What the living supervisor wrote last; None when it has not written yet or there is none.

        Whoever spawns a supervisor removes the old file first, so under a held ``supervisor.lock`` it is new.
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
    """Why it failed."""


def try_lock(path: Path, *, exclusive: bool) -> int | None:
    """Lock the file now and return its descriptor, which owns the lock; None when somebody else has it.

    The file may have been removed with its directory between open and lock: then the lock would protect
    nothing, and the caller gets None and tries again.
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
    """As try_lock, until the deadline (of time.monotonic). Raises StoreUnavailable after it."""
    while True:
        data.create()  # a throw-away directory may vanish while we wait for its last user
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
    """Hold the exclusive lock in the body."""
    handle = wait_lock(data, path, exclusive=True, deadline=deadline)
    try:
        yield
    finally:
        os.close(handle)


def lock_holders(path: Path) -> tuple[int, ...]:
    """Pids of the processes that locked this file, where the system tells (Linux); for messages only."""
    try:
        inode = path.stat().st_ino
        lines = Path("/proc/locks").read_text(encoding="ascii").splitlines()
    except OSError:
        return ()
    fields = [line.split() for line in lines if "->" not in line]
    return tuple(
        sorted({int(f[4]) for f in fields if f[5].rpartition(":")[2] == str(inode) and int(f[4]) > 0})
    )
