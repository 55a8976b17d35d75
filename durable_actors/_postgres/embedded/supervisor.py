"""Embedded Postgres: the detached parent of one ``postgres``.

Owns       the postmaster (its child), its pid file, ``state.json``; holds ``supervisor.lock`` while it lives.
Receives   SIGTERM or SIGINT: stop the server. It also stops the server when no client holds the lease any more.
Sends      SIGINT (fast shutdown), then SIGQUIT, then SIGKILL, to processes of its own cluster only.
Writes     ``state.json`` at each change of phase; the cluster, once, by initdb and rename.
If it dies the kernel sends the postmaster SIGINT (PR_SET_PDEATHSIG, Linux). The next client starts another supervisor,
           which waits until that server is gone. macOS has no such signal: there the next supervisor stops the server.

Standard library only, and run by path (``python -I -S …/embedded/supervisor.py``), so that it neither pays for nor
depends on the imports of the package: its first line runs after 50 ms.

Why a separate process: clients come and go, are killed, fork, and share the server. Only the parent of a process learns
reliably that it died, and only the kernel reliably releases the lock of a client that died. So the parent of the server
watches the lock. Rejected: ``pg_ctl`` (nothing stops the server after kill -9 of its client), a count in a file (wrong
after a crash), a thread in the first client (dies with it while other clients still work).
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
from pathlib import Path
from typing import IO, Any, NamedTuple

if __name__ == "__main__":  # run by path: the package is not importable
    sys.path.append(str(Path(__file__).parent))
    from process import after_crash, retire_server, server_status  # type: ignore[import-not-found]
else:
    from durable_actors._postgres.embedded.process import after_crash, retire_server, server_status

LEASE = "lease"
START_LOCK = "start.lock"
SUPERVISOR_LOCK = "supervisor.lock"
STATE = "state.json"
LOG = "server.log"
CLUSTER = "pgdata"
NEW_CLUSTER = "pgdata.new"

WATCH_INTERVAL = 0.2
"""Seconds between two checks of the server and the lease."""
START_ATTEMPTS = 3
MAX_LOG_BYTES = 10_000_000
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


class LaunchRequest(NamedTuple):
    """The launcher's request. It is passed as JSON in argv, so that ``ps`` shows which cluster this is."""

    data_dir: str
    bin_dir: str
    socket_dir: str
    settings: list[str]
    """``name=value``, each passed to postgres with ``-c``."""
    uid: int | None
    """Run initdb and postgres as this user; None: as the current one."""
    gid: int | None
    wrapper: list[str]
    """Prefix of the commands, where setuid is not allowed."""
    throwaway: bool
    """Delete the whole data directory at the end, and stop without a checkpoint."""
    grace: float
    """Seconds without a lease after which the server stops."""
    start_timeout: float


class StartFailed(Exception):  # noqa: N818 - reads well in `raise`
    """The server did not start; the client shows the text."""


class Supervisor:
    """One run: from taking the lock to the end of the server."""

    def __init__(self, request: LaunchRequest) -> None:
        self.request = request
        self.data_dir = Path(request.data_dir)
        self.socket_dir = Path(request.socket_dir)
        self.pgdata = self.data_dir / CLUSTER
        self.child: subprocess.Popen[bytes] | None = None
        self.state: dict[str, object] = {}
        self.stop_requested = False
        self.libc: Any = ctypes.CDLL(None) if sys.platform == "linux" else None

    def run(self) -> int:
        """Hold the lock, keep the server running, stop it when no client needs it."""
        self.lock = os.open(self.data_dir / SUPERVISOR_LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        if not self._flock(self.lock, wait=1.0):
            return 1  # there is another supervisor already
        self.lease = os.open(self.data_dir / LEASE, os.O_RDWR | os.O_CREAT, 0o600)
        self._listen_for_signals()
        if (
            self.libc is not None
        ):  # backends of a killed postmaster become children of this process, not of init
            self.libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        try:
            self._write_state("starting")
            self._make_cluster()
            self._launch()
            self._watch()
            self._write_state("stopping")
        except (StartFailed, OSError) as exc:
            if self._directory_is_ours():
                self._write_state("failed", error=str(exc))
            self._stop_child()
            return 1
        self._stop_child()
        if self.socket_dir.parent != self.data_dir:
            shutil.rmtree(self.socket_dir, ignore_errors=True)
        if self.request.throwaway and self._directory_is_ours():
            # Renamed first: a client that starts now creates a new directory instead of using this one.
            doomed = self.data_dir.rename(self.data_dir.with_name(f"{self.data_dir.name}.gone"))
            shutil.rmtree(doomed, ignore_errors=True)
        return 0

    def _watch(self) -> None:
        """Return when the server should stop: on request, without a lease, or because the directory is gone."""
        free_since: float | None = None
        crashes, up_since = 0, time.monotonic()
        while not self.stop_requested and self._directory_is_ours():
            if self.child is None or self.child.poll() is not None:
                self._write_state("starting")
                crashes, pause = after_crash(crashes, lived=time.monotonic() - up_since)
                self._sleep(pause)
                self._launch()
                up_since = time.monotonic()
            elif not (self.data_dir / STATE).exists():
                self._publish()  # a client that did not see us yet has removed it
            if not self._flock(self.lease):
                free_since = None
            else:
                # Held for microseconds only: a client that starts now must not wait for the grace period.
                fcntl.flock(self.lease, fcntl.LOCK_UN)
                free_since = free_since or time.monotonic()
                if time.monotonic() - free_since >= self.request.grace and self._flock(self.lease):
                    return  # the lock is kept until we exit: a client that starts now waits for that
            self._sleep(WATCH_INTERVAL)

    def _directory_is_ours(self) -> bool:
        """False if the path no longer leads to our lock file (``rm -rf`` of a directory in use)."""
        try:
            named = (self.data_dir / SUPERVISOR_LOCK).stat()
        except FileNotFoundError:
            return False
        return os.path.samestat(named, os.fstat(self.lock))

    # -- cluster -------------------------------------------------------------------------------------------

    def _make_cluster(self) -> None:
        """Run initdb in a temporary directory, then rename: a cluster exists completely or not at all."""
        for old in self.data_dir.glob(NEW_CLUSTER + "*"):
            shutil.rmtree(
                old, ignore_errors=True
            )  # left by an initdb that was killed: we hold the lock, so none is running
        if (self.pgdata / "PG_VERSION").exists():
            return
        fresh = self.data_dir / f"{NEW_CLUSTER}.{os.getpid()}"
        self._own_directory(fresh)
        # Explicit locale: the default differs between users.
        options = ["-U", "postgres", "--auth=trust", "-E", "UTF8", "--locale=C", "--no-instructions"]
        if self.request.throwaway:
            options.append("--no-sync")
        child = self._spawn("initdb", "-D", str(fresh), *options, death_signal=signal.SIGKILL)
        deadline = time.monotonic() + self.request.start_timeout
        while child.poll() is None:
            if time.monotonic() > deadline or self.stop_requested:
                child.kill()
                why = "was stopped on request" if self.stop_requested else "did not finish in time"
                raise StartFailed(f"initdb {why}" + self._log_tail())
            self._sleep(0.05)
        if child.returncode:
            shutil.rmtree(fresh, ignore_errors=True)
            raise StartFailed(f"initdb failed with exit code {child.returncode}" + self._log_tail())
        fresh.rename(self.pgdata)
        handle = os.open(self.data_dir, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def _own_directory(self, path: Path) -> None:
        """Create a private directory of the server's user, or accept one that belongs to that user."""
        wanted = os.geteuid() if self.request.uid is None else self.request.uid
        try:
            path.mkdir(0o700)
        except FileExistsError:
            if path.is_symlink() or not path.is_dir() or path.lstat().st_uid != wanted:
                raise StartFailed(f"{path} exists and does not belong to the server's user") from None
        else:
            if self.request.uid is not None and self.request.gid is not None:
                os.chown(path, self.request.uid, self.request.gid)

    # -- server --------------------------------------------------------------------------------------------

    def _launch(self) -> None:
        """Start postgres and return when it accepts connections.

        A server that is killed or signalled while it starts (the system is short of memory, somebody uses killall) is
        started again; one that refuses to start (exit code 1 and a reason in the log) is not.
        """
        deadline = time.monotonic() + self.request.start_timeout
        code: int | None = 0
        for _ in range(START_ATTEMPTS):
            code = self._try_launch(deadline)
            if code is None:
                return
            if code > 0:
                break
        raise StartFailed(f"postgres ended with code {code}" + self._log_tail())

    def _try_launch(self, deadline: float) -> int | None:
        """None if the server is ready or no longer wanted, else its exit code."""
        retire_server(self.pgdata, timeout=self.request.start_timeout)
        self._own_directory(self.socket_dir)
        for stale in self.socket_dir.glob(".s.PGSQL.*"):
            stale.unlink()  # its lock file contains a pid, too: that of a zombie or an unrelated process would block us
        settings = [word for setting in self.request.settings for word in ("-c", setting)]
        places = ["-D", str(self.pgdata), "-k", str(self.socket_dir)]
        # SIGINT is a fast shutdown: sessions end, a checkpoint is written, the next start is quick.
        self.child = self._spawn("postgres", *places, *settings, death_signal=signal.SIGINT)
        while server_status(self.pgdata) != (self.child.pid, "ready"):
            if self.child.poll() is not None:
                return self.child.returncode
            if time.monotonic() > deadline:
                raise StartFailed("postgres did not become ready in time" + self._log_tail())
            if self.stop_requested:
                return None
            self._sleep(0.01)
        self._write_state("ready", postmaster=self.child.pid)
        return None

    def _stop_child(self) -> None:
        """Stop the server, with a fast shutdown first; return when it is gone."""
        if self.child is None:
            return
        # Each signal has a timeout, because Postgres 18.6 was observed to hang for ever in a fast shutdown during crash
        # recovery. An immediate shutdown (SIGQUIT) loses nothing: the next start recovers.
        signals = [(signal.SIGINT, 10.0), (signal.SIGQUIT, 5.0), (signal.SIGKILL, 5.0)]
        for number, timeout in signals[1:] if self.request.throwaway else signals:
            if self.child.poll() is not None:
                break
            self.child.send_signal(number)
            deadline = time.monotonic() + timeout
            while self.child.poll() is None and time.monotonic() < deadline:
                self._sleep(0.05)
        if self.pgdata.is_dir():
            retire_server(self.pgdata, timeout=5.0)

    def _spawn(self, program: str, *arguments: str, death_signal: int) -> subprocess.Popen[bytes]:
        request, libc, parent = self.request, self.libc, os.getpid()

        def die_with_parent() -> None:
            # Runs after the change of user, which would clear the setting. The parent may already be dead.
            if libc is not None:
                libc.prctl(PR_SET_PDEATHSIG, int(death_signal), 0, 0, 0)
                if os.getppid() != parent:
                    os._exit(1)

        # No PG* variable of the client must reach the server.
        environment = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH") if name in os.environ}
        with self._open_log() as log:
            return subprocess.Popen(  # noqa: S603 - our own binaries and arguments
                [*request.wrapper, str(Path(request.bin_dir, program)), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd="/",
                env=environment | {"LC_ALL": "C"},
                start_new_session=True,
                preexec_fn=die_with_parent,  # noqa: PLW1509 - this process has one thread, by design
                user=request.uid,
                group=request.gid,
                extra_groups=None if request.uid is None else [],
            )

    # -- files and signals ---------------------------------------------------------------------------------

    def _open_log(self) -> IO[bytes]:
        path = self.data_dir / LOG
        if path.exists() and path.stat().st_size > MAX_LOG_BYTES:
            path.replace(path.with_suffix(".log.1"))
        return path.open("ab")

    def _log_tail(self) -> str:
        return "; the end of its log:\n" + (self.data_dir / LOG).read_text(errors="replace")[-1500:]

    def _write_state(self, phase: str, **more: object) -> None:
        places = {"socket_dir": self.request.socket_dir, "bin_dir": self.request.bin_dir}
        self.state = {"phase": phase, "supervisor": os.getpid(), **places, **more}
        self._publish()

    def _publish(self) -> None:
        temporary = self.data_dir / f"{STATE}.new"
        temporary.write_text(json.dumps(self.state), encoding="utf-8")
        temporary.replace(self.data_dir / STATE)

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
        self.wake, wake_w = os.pipe()
        for end in (self.wake, wake_w):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(wake_w, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, self._on_child)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_stop)

    def _on_stop(self, *_: object) -> None:
        self.stop_requested = True

    def _on_child(self, *_: object) -> None:
        """Do nothing: the byte in the pipe has ended the sleep."""

    def _sleep(self, seconds: float) -> None:
        """Sleep that long, or until a signal arrives (also SIGCHLD)."""
        if select.select([self.wake], [], [], seconds)[0]:
            os.read(self.wake, 4096)


def main(argument: str) -> int:
    """Detach from the client, which then need not reap this process, and supervise."""
    request = LaunchRequest(**json.loads(argument))
    if os.fork():
        return 0
    os.setsid()
    os.umask(0o077)
    return Supervisor(request).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
