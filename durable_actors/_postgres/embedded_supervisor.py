"""Embedded Postgres: the detached parent of one ``postgres``.

Owns       the postmaster (its direct child), the pid file, ``state.json`` and, while it lives, ``supervisor.lock``.
Receives   SIGTERM or SIGINT: stop the server. The kernel's news that the lease file is free: stop, too.
Sends      SIGINT (fast shutdown), then SIGQUIT, then SIGKILL to its own server only.
Writes     ``state.json`` at each change of phase; the cluster, once, by initdb and rename.
If it dies the kernel sends the postmaster SIGINT (PR_SET_PDEATHSIG, Linux); the next client starts another one,
           which waits for that server to be gone. macOS has no such signal: there the next one stops the server.

Standard library only, and run by path (``python -I -S .../embedded_supervisor.py``), so that it neither pays for
nor depends on what the package imports: 60 ms instead of 400 ms until the first line runs.

Why a process of its own: clients come and go, are killed, fork and share. Only the parent of a process gets told
reliably that it died, only the kernel drops a lock reliably when a client dies, so the one who has the child waits
for the lock. Rejected: ``pg_ctl`` (nobody stops the server after kill -9 of its user), a reference count in a file
(never comes down after a crash), a thread in the first client (dies with it, while others still work).
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from typing import Any, NamedTuple

if __name__ == "__main__":  # run by path: the package is not importable, and not wanted
    sys.path.append(os.path.dirname(os.path.abspath(__file__)))
    from embedded_process import retire_server, server_status  # type: ignore[import-not-found, no-redef]
else:
    from durable_actors._postgres.embedded_process import retire_server, server_status

LEASE = "lease"
START_LOCK = "start.lock"
SUPERVISOR_LOCK = "supervisor.lock"
STATE = "state.json"
LOG = "server.log"
CLUSTER = "pgdata"
NEW_CLUSTER = "pgdata.new"

TICK = 0.2
LOG_LIMIT = 10_000_000
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


class Order(NamedTuple):
    """What the launcher asks for; travels as JSON in argv, so that ``ps`` shows which cluster this is."""

    data_dir: str
    bin_dir: str
    socket_dir: str
    settings: list[str]
    """``name=value``, each passed to postgres with ``-c``."""
    uid: int | None = None
    """Run initdb and postgres as this user; None: as ourselves."""
    gid: int | None = None
    wrapper: list[str] = []
    """Put before the commands where setuid is not allowed."""
    throwaway: bool = False
    """Delete the whole data directory at the end; stop without a checkpoint."""
    grace: float = 1.0
    """How long the lease file must be free before the server stops."""
    start_timeout: float = 60.0


class StartFailed(Exception):  # noqa: N818 - reads as what happened
    """The server did not come up; the text is shown to the client."""


class Supervisor:
    """One run: from taking the lock to the end of the server."""

    def __init__(self, order: Order) -> None:
        self.order = order
        self.data_dir = order.data_dir
        self.pgdata = os.path.join(order.data_dir, CLUSTER)
        self.child: subprocess.Popen[bytes] | None = None
        self.stop_requested = False
        self.lease = -1
        self.lock = -1
        self.libc: Any = ctypes.CDLL(None) if sys.platform == "linux" else None

    # -- life ------------------------------------------------------------------------------------------

    def run(self) -> int:
        """Hold the lock, keep the server up, stop it when nobody needs it."""
        self.lock = os.open(self._path(SUPERVISOR_LOCK), os.O_RDWR | os.O_CREAT, 0o600)
        if not self._flock(self.lock, wait=5.0):
            return 1  # another one supervises; ours is not needed
        self.lease = os.open(self._path(LEASE), os.O_RDWR | os.O_CREAT, 0o600)
        self._listen_for_signals()
        if self.libc is not None:  # backends of a killed postmaster become ours, so that we can wait for them
            self.libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        try:
            self._write_state("starting")
            self._make_cluster()
            self._launch()
            self._watch()
        except StartFailed as exc:
            self._write_state("failed", error=str(exc))
            self._stop_child()
            return 1
        except FileNotFoundError:
            # Somebody removed the data directory under us: stop, there is nothing left to keep.
            self._stop_child()
            return 1
        self._write_state("stopping")
        self._stop_child()
        self._tidy()
        return 0

    def _watch(self) -> None:
        """Return when the server is to stop: asked to, nobody holds a lease, or the directory is gone."""
        free_since: float | None = None
        crashes = 0
        while not self.stop_requested and self._directory_is_ours():
            if self.child is None or self.child.poll() is not None:
                crashes += 1
                self._write_state("starting")
                self._sleep(min(0.05 * 2**crashes, 5.0) if crashes > 1 else 0.0)
                self._launch()
            if not self._flock(self.lease):
                free_since = None
            else:
                # Held for microseconds only: a client that comes now must not wait for the grace period.
                fcntl.flock(self.lease, fcntl.LOCK_UN)
                free_since = free_since or time.monotonic()
                if time.monotonic() - free_since >= self.order.grace and self._flock(self.lease):
                    return  # kept until we exit: who comes now waits for the stop and then starts afresh
            self._sleep(TICK)

    def _directory_is_ours(self) -> bool:
        """False when the lock file's name no longer leads to our lock (``rm -rf`` of a directory in use)."""
        try:
            named = os.stat(self._path(SUPERVISOR_LOCK))
        except FileNotFoundError:
            return False
        return os.path.samestat(named, os.fstat(self.lock))

    def _tidy(self) -> None:
        if self.order.socket_dir != os.path.join(self.data_dir, "run"):
            shutil.rmtree(self.order.socket_dir, ignore_errors=True)
        if self.order.throwaway and self._directory_is_ours():
            shutil.rmtree(self.data_dir, ignore_errors=True)

    # -- cluster ---------------------------------------------------------------------------------------

    def _make_cluster(self) -> None:
        """initdb beside the final place, then rename: a cluster is there whole or not at all."""
        for name in os.listdir(self.data_dir):
            if name.startswith(NEW_CLUSTER):  # an initdb that was killed; the lock says that it is not ours
                shutil.rmtree(self._path(name), ignore_errors=True)
        if os.path.exists(os.path.join(self.pgdata, "PG_VERSION")):
            return
        fresh = self._path(f"{NEW_CLUSTER}.{os.getpid()}")
        self._own_directory(fresh)
        command = [self._program("initdb"), "-D", fresh, "-U", "postgres", "--auth=trust", "-E", "UTF8"]
        command += ["--locale=C", "--no-instructions"]  # the default locale differs by user
        if self.order.throwaway:
            command.append("--no-sync")
        child = self._spawn(command, death_signal=signal.SIGKILL)
        deadline = time.monotonic() + self.order.start_timeout
        while child.poll() is None:
            if time.monotonic() > deadline or self.stop_requested:
                child.kill()
                raise StartFailed("initdb did not end in time" + self._log_tail())
            self._sleep(0.05)
        if child.returncode:
            shutil.rmtree(fresh, ignore_errors=True)
            raise StartFailed(f"initdb failed with exit code {child.returncode}" + self._log_tail())
        os.rename(fresh, self.pgdata)
        self._sync_directory()

    def _sync_directory(self) -> None:
        handle = os.open(self.data_dir, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def _own_directory(self, path: str) -> None:
        """Make a private directory for the server's user. Only ever a new one or one that is already theirs."""
        wanted = os.geteuid() if self.order.uid is None else self.order.uid
        try:
            os.mkdir(path, 0o700)
        except FileExistsError:
            there = os.lstat(path)
            if not os.path.isdir(path) or os.path.islink(path) or there.st_uid != wanted:
                raise StartFailed(f"{path} exists and does not belong to the server's user") from None
        else:
            if self.order.uid is not None and self.order.gid is not None:
                os.chown(path, self.order.uid, self.order.gid)

    # -- server ----------------------------------------------------------------------------------------

    def _launch(self) -> None:
        """Start postgres and return when it accepts connections."""
        retire_server(self.pgdata, timeout=self.order.start_timeout)
        self._own_directory(self.order.socket_dir)
        command = [self._program("postgres"), "-D", self.pgdata, "-k", self.order.socket_dir]
        for setting in self.order.settings:
            command += ["-c", setting]
        # SIGINT is a fast shutdown: sessions are cut, a checkpoint is written, the next start is quick.
        self.child = self._spawn(command, death_signal=signal.SIGINT)
        deadline = time.monotonic() + self.order.start_timeout
        while server_status(self.pgdata) != (self.child.pid, "ready"):
            if self.child.poll() is not None:
                raise StartFailed(f"postgres ended with exit code {self.child.returncode}" + self._log_tail())
            if time.monotonic() > deadline:
                raise StartFailed("postgres did not become ready in time" + self._log_tail())
            if self.stop_requested:
                return
            self._sleep(0.01)
        self._write_state("ready", postmaster=self.child.pid)

    def _stop_child(self) -> None:
        """Stop the server, gently first; return when it is gone."""
        if self.child is None:
            return
        signals = [(signal.SIGINT, 30.0), (signal.SIGQUIT, 5.0), (signal.SIGKILL, 5.0)]
        for number, patience in signals[1:] if self.order.throwaway else signals:
            if self.child.poll() is not None:
                break
            self.child.send_signal(number)
            deadline = time.monotonic() + patience
            while self.child.poll() is None and time.monotonic() < deadline:
                self._sleep(0.05)
        if os.path.isdir(self.pgdata):
            retire_server(self.pgdata, timeout=5.0)

    def _spawn(self, command: list[str], *, death_signal: int) -> subprocess.Popen[bytes]:
        order, libc, parent = self.order, self.libc, os.getpid()

        def die_with_parent() -> None:
            # Runs after the change of user, which would clear the setting. The parent may be dead already.
            if libc is not None:
                libc.prctl(PR_SET_PDEATHSIG, int(death_signal), 0, 0, 0)
                if os.getppid() != parent:
                    os._exit(1)

        as_user: dict[str, Any] = {}
        if order.uid is not None:
            as_user = {"user": order.uid, "group": order.gid, "extra_groups": []}
        keep = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH") if name in os.environ}
        with self._open_log() as log:
            return subprocess.Popen(  # noqa: S603 - our own binaries, our own arguments
                [*order.wrapper, *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd="/",
                env=keep | {"LC_ALL": "C"},
                start_new_session=True,
                preexec_fn=die_with_parent,  # noqa: PLW1509 - one thread only, by design
                **as_user,
            )

    # -- small things ----------------------------------------------------------------------------------

    def _program(self, name: str) -> str:
        return os.path.join(self.order.bin_dir, name)

    def _path(self, name: str) -> str:
        return os.path.join(self.data_dir, name)

    def _open_log(self) -> Any:
        path = self._path(LOG)
        try:
            if os.path.getsize(path) > LOG_LIMIT:
                os.replace(path, path + ".1")
        except FileNotFoundError:
            pass
        return open(path, "ab", opener=lambda p, flags: os.open(p, flags, 0o600))  # noqa: SIM115

    def _log_tail(self) -> str:
        try:
            with open(self._path(LOG), "rb") as log:
                log.seek(max(0, os.path.getsize(self._path(LOG)) - 1500))
                return "; the end of its log:\n" + log.read().decode("utf-8", "replace")
        except OSError:
            return ""

    def _write_state(self, phase: str, **more: object) -> None:
        order = self.order
        state = {
            "phase": phase,
            "supervisor": os.getpid(),
            "socket_dir": order.socket_dir,
            "bin_dir": order.bin_dir,
        }
        temporary = self._path(f"{STATE}.{os.getpid()}")
        with open(temporary, "w", encoding="utf-8") as file:
            json.dump(state | more, file)
        os.replace(temporary, self._path(STATE))

    def _flock(self, handle: int, *, wait: float = 0.0) -> bool:
        deadline = time.monotonic() + wait
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    return False
                time.sleep(0.005)
            else:
                return True

    def _listen_for_signals(self) -> None:
        self.wake_r, wake_w = os.pipe()
        for end in (self.wake_r, wake_w):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(wake_w, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_stop)

    def _on_stop(self, *_: object) -> None:
        self.stop_requested = True

    def _sleep(self, seconds: float) -> None:
        """Sleep until then, or until a signal (a child's end among them) arrives."""
        if select.select([self.wake_r], [], [], seconds)[0]:
            os.read(self.wake_r, 4096)


def main(arguments: list[str]) -> int:
    """Detach from the client (it must not have to reap us), then supervise."""
    order = Order(**json.loads(arguments[0]))
    if os.fork():
        return 0
    os.setsid()
    return Supervisor(order).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
