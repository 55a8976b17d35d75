"""Postgres servers of a test's own: started, killed, stopped, copied to a standby, promoted.

Not the embedded launcher: its supervisor restarts a server that was killed, which is what a failover must not see.
Nothing is left behind: the kernel ends a server with the thread that started it (Linux), so start servers from the
main thread.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path

import attrs
import psycopg
from durable_actors._postgres.embedded.account import Account, readable_binaries, server_account
from durable_actors._postgres.embedded.binaries import Binaries, find_binaries
from durable_actors._postgres.embedded.process import server_processes, server_status
from durable_actors.testing.database import IN_MEMORY, MEMORY_NEEDED
from psycopg.conninfo import make_conninfo

PATIENCE = 60.0
PR_SET_PDEATHSIG = 1
SETTINGS = {
    "listen_addresses": "",
    "fsync": "off",  # a process is killed, never the machine
    "full_page_writes": "off",
    "max_connections": "100",
    "dynamic_shared_memory_type": "mmap",
    "wal_level": "replica",
    "max_wal_senders": "4",
    "autovacuum_naptime": "10min",
    "log_min_messages": "fatal",
}


@attrs.define(eq=False)
class Cluster:
    """One server: its directory, its socket and its process."""

    place: Path
    """Holds `pgdata`, the socket and the log."""
    bin_dir: Path
    account: Account
    settings: dict[str, str] = attrs.field(factory=dict)
    process: subprocess.Popen[bytes] | None = None

    @property
    def pgdata(self) -> Path:
        return self.place / "pgdata"

    def dsn(self, **options: object) -> str:
        """A DSN for this server alone."""
        return make_conninfo(**{"host": str(self.place), "user": "postgres", "dbname": "postgres"} | options)

    def run(self, program: str, *arguments: str) -> None:
        """Run a program of Postgres to its end, as the server's user."""
        with (self.place / "log").open("ab") as log:
            done = subprocess.run(
                [*self.account.wrapper, str(self.bin_dir / program), *arguments],
                stdout=log, stderr=log, cwd="/", env=_environment(), check=False, timeout=PATIENCE,
                user=self.account.uid, group=self.account.gid,
                extra_groups=None if self.account.uid is None else [],
            )  # fmt: skip
        assert not done.returncode, f"{program}:\n{self.log()}"

    def log(self) -> str:
        return (self.place / "log").read_text(errors="replace")[-3000:]

    def start(self) -> None:
        """Start it and return when it takes connections; a standby takes those that only read."""
        settings = [word for each in self.settings.items() for word in ("-c", "=".join(each))]
        command = [str(self.bin_dir / "postgres"), "-D", str(self.pgdata), "-k", str(self.place), *settings]
        libc = ctypes.CDLL(None) if sys.platform == "linux" else None

        def die_with_parent() -> None:
            if libc is not None:
                libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGQUIT), 0, 0, 0)

        with (self.place / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [*self.account.wrapper, *command],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd="/", env=_environment(),
                start_new_session=True, preexec_fn=die_with_parent,
                user=self.account.uid, group=self.account.gid,
                extra_groups=None if self.account.uid is None else [],
            )  # fmt: skip
        deadline = time.monotonic() + PATIENCE
        while server_status(self.pgdata) not in {(self.process.pid, "ready"), (self.process.pid, "standby")}:
            assert self.process.poll() is None, self.log()
            assert time.monotonic() < deadline, self.log()
            time.sleep(0.01)

    def kill(self) -> None:
        """kill -9 of the postmaster and of every backend: the machine is gone."""
        for pid in server_processes(self.pgdata):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._wait_gone()

    def stop(self, how: signal.Signals = signal.SIGQUIT) -> None:
        """SIGQUIT: an immediate stop, recovered from at the next start. SIGINT: a fast, orderly one."""
        if self.process is not None:
            self.process.send_signal(how)
            self._wait_gone()

    def _wait_gone(self) -> None:
        process, self.process = self.process, None
        if process is not None:
            process.wait(PATIENCE)
        deadline = time.monotonic() + PATIENCE
        while server_processes(self.pgdata):
            assert time.monotonic() < deadline, "backends outlive their postmaster"
            time.sleep(0.005)
        _forget(self.pgdata / "postmaster.pid")

    def promote(self) -> None:
        """Make a standby the primary; return when it takes writes."""
        with psycopg.connect(self.dsn(), autocommit=True) as conn:
            assert conn.execute("select pg_promote(true, %s)", [int(PATIENCE)]).fetchone() == (True,)

    def follow(self, primary: Cluster) -> None:
        """Become a copy of a server that runs; `start` makes it its standby. What was here before is gone."""
        shutil.rmtree(self.pgdata, ignore_errors=True)
        source = primary.dsn(application_name="standby")
        where = ["-D", str(self.pgdata), "--checkpoint=fast", "--no-sync"]
        self.run("pg_basebackup", "-d", source, *where, "--write-recovery-conf", "--wal-method=stream")

    def require_standby(self) -> None:
        """From now on a commit is acknowledged only when the standby has it; return when there is one."""
        with psycopg.connect(self.dsn(), autocommit=True) as conn:
            conn.execute("alter system set synchronous_standby_names = '*'")
            conn.execute("select pg_reload_conf()")
            deadline = time.monotonic() + PATIENCE
            while conn.execute("select sync_state from pg_stat_replication").fetchall() != [("sync",)]:
                assert time.monotonic() < deadline, self.log()
                time.sleep(0.01)


def _forget(pid_file: Path) -> None:
    """A killed server leaves its pid file, and a segment of shared memory that the file names."""
    with contextlib.suppress(FileNotFoundError, IndexError):
        segment = int(pid_file.read_text().splitlines()[6].split()[1])
        ctypes.CDLL(None).shmctl(segment, 0, None)  # IPC_RMID
        pid_file.unlink()


def _environment() -> dict[str, str]:
    keep = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH") if name in os.environ}
    return keep | {"LC_ALL": "C"}


def multi_host(clusters: Sequence[Cluster], **options: object) -> str:
    """One DSN for all of them: libpq takes the first that can be written to."""
    hosts = ",".join(str(each.place) for each in clusters)
    return clusters[0].dsn(host=hosts, target_session_attrs="read-write", **options)


@contextlib.contextmanager
def open_place() -> Generator[Path]:
    """A directory that the server's user can reach, short enough for a socket; gone afterwards."""
    roomy = IN_MEMORY.is_dir() and shutil.disk_usage(IN_MEMORY).free > MEMORY_NEEDED
    base = IN_MEMORY if roomy else Path("/tmp")
    path = Path(tempfile.mkdtemp(prefix="durable-cluster-", dir=base))
    path.chmod(0o711)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def open_cluster(
    settings: Mapping[str, str] | None = None,
    *,
    place: Path | None = None,
    binaries: Binaries | None = None,
    auth: str = "trust",
) -> Generator[Cluster]:
    """A new server that runs; whatever became of it, it is gone afterwards."""
    with contextlib.ExitStack() as stack:
        base = place or stack.enter_context(open_place())
        account = server_account(Path("/nonexistent"))
        bin_dir = readable_binaries(binaries or find_binaries(), account)
        cluster = _make(base / "primary", bin_dir, account, {**SETTINGS, **(settings or {})})
        options = ["-U", "postgres", f"--auth={auth}", "-E", "UTF8", "--locale=C", "--no-sync"]
        cluster.run("initdb", "-D", str(cluster.pgdata), *options)
        stack.callback(cluster.kill)
        cluster.start()
        yield cluster


@contextlib.contextmanager
def open_pair(*, synchronous: bool = True) -> Generator[tuple[Cluster, Cluster]]:
    """A primary and its standby. Synchronous: what the primary has acknowledged is on the standby, too."""
    with open_place() as place, open_cluster(place=place) as primary:
        standby = _make(place / "standby", primary.bin_dir, primary.account, dict(primary.settings))
        try:
            standby.follow(primary)
            standby.start()
            if synchronous:
                primary.require_standby()
            yield primary, standby
        finally:
            standby.kill()


def _make(place: Path, bin_dir: Path, account: Account, settings: dict[str, str]) -> Cluster:
    place.mkdir(mode=0o711)
    if account.uid is not None and account.gid is not None:
        os.chown(place, account.uid, account.gid)
    (place / "log").touch()
    return Cluster(place, bin_dir, account, settings)


def free_port() -> int:
    """A TCP port that nobody has just now."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])
