"""Embedded Postgres: which processes use a cluster, how to end them, and when to restart a crashed server.

Standard library only: the supervisor loads this file by path.

A pid file alone proves nothing: after a power cut or in a new container its pid may belong to an unrelated process,
after kill -9 of everything it may be a zombie, and Postgres itself refuses to start if any process has that pid. The
working directory of a running ``postgres`` is its cluster, so we check that. The callers hold ``supervisor.lock``, so
no server of ours is started meanwhile.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

PID_FILE = "postmaster.pid"
STATUS_LINE = 7
HEALTHY_UPTIME = 60.0
"""Seconds. A server that crashes after it has run for this long is restarted without a pause."""
LONGEST_PAUSE = 5.0
"""Seconds before a restart; the pause doubles with each crash."""


def server_status(pgdata: Path) -> tuple[int, str]:
    """Pid and status (``starting``, ``ready``, …) from the pid file; (0, "") if there is none."""
    try:
        lines = (pgdata / PID_FILE).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return 0, ""
    pid = lines[0].strip() if lines else ""
    status = lines[STATUS_LINE].strip() if len(lines) > STATUS_LINE else ""
    return (int(pid) if pid.isdigit() else 0), status


def server_processes(pgdata: Path) -> list[int]:
    """Pids of the running postgres processes of this cluster, the postmaster first."""
    recorded = server_status(pgdata)[0]
    if sys.platform == "linux":
        cluster = os.path.realpath(pgdata)
        found = [int(p.name) for p in Path("/proc").iterdir() if p.name.isdigit() and _serves(p, cluster)]
    else:
        found = [recorded] if recorded and _ps_says_postgres(recorded) else []
    return sorted(found, key=lambda pid: (pid != recorded, pid))


def retire_server(pgdata: Path, *, timeout: float) -> None:
    """End every postgres process of this cluster and remove the pid file.

    Raises TimeoutError if one of them survives even SIGKILL for `timeout` seconds (a process in disk sleep).
    """
    started = time.monotonic()
    while pids := server_processes(pgdata):
        waited = time.monotonic() - started
        if waited > timeout:
            raise TimeoutError(f"processes {pids} of {pgdata} do not end")
        if pids[0] == server_status(pgdata)[0] and waited < 13.0:
            # Its supervisor was killed. Usually it is stopping already, because of the kernel's signal, and a second
            # SIGINT is harmless. After a while it must be an immediate shutdown.
            _signal(pids[0], signal.SIGINT if waited < 10.0 else signal.SIGQUIT)
        else:
            # Backends without a postmaster exit by themselves unless they are busy computing.
            for pid in pids:
                _signal(pid, signal.SIGQUIT if waited < 2.0 else signal.SIGKILL)
        time.sleep(0.02)
    (pgdata / PID_FILE).unlink(missing_ok=True)


def after_crash(before: int, *, lived: float) -> tuple[int, float]:
    """The number of crashes in a row, including this one, and the seconds until the restart. Pure."""
    crashes = 1 if lived >= HEALTHY_UPTIME else before + 1
    return crashes, 0.0 if crashes == 1 else min(0.05 * 2.0 ** min(crashes - 1, 10), LONGEST_PAUSE)


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _serves(process: Path, cluster: str) -> bool:
    """Whether it is a postgres of this cluster. A zombie has no working directory; a shell may have the same one."""
    try:
        if str((process / "cwd").readlink()) != cluster:
            return False
        return (process / "comm").read_text(encoding="utf-8", errors="replace").strip() == "postgres"
    except OSError:  # gone meanwhile, a zombie, or another user's: in any case not our server
        return False


def _ps_says_postgres(pid: int) -> bool:
    """The best check on macOS without extensions; not tested there."""
    command = ["/bin/ps", "-o", "state=,comm=", "-p", str(pid)]
    words = subprocess.run(command, capture_output=True, text=True, check=False).stdout.split()  # noqa: S603 - fixed
    return len(words) > 1 and not words[0].startswith("Z") and words[-1].endswith("postgres")
