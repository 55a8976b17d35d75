"""Embedded Postgres: start a supervisor and wait until its server is ready.

The caller holds its lease and ``start.lock``, so no other process starts a server and no supervisor begins to stop.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import attrs

from durable_actors._postgres.embedded import supervisor
from durable_actors._postgres.embedded.account import check_reachable, readable_binaries, server_account
from durable_actors._postgres.embedded.binaries import find_binaries
from durable_actors._postgres.embedded.files import POLL_INTERVAL, DataDir, SupervisorState
from durable_actors.errors import StoreUnavailable

GRACE_PERIOD = 1.0
"""Seconds that the server stays up after its last client: consecutive commands need not start it again."""
SPAWN_ATTEMPTS = 3
SOCKET_NAME = ".s.PGSQL.5432"
MAX_SOCKET_PATH = 100
"""Bytes. sun_path has 108 on Linux, 104 on macOS, including the final zero."""


@attrs.frozen
class Launch:
    """How this process starts the server, if it has to."""

    throwaway: bool
    settings: Mapping[str, str]


def ensure_running(data: DataDir, how: Launch, *, deadline: float) -> SupervisorState:
    """Return the state of a ready server; start one if none is running."""
    for _ in range(SPAWN_ATTEMPTS):
        fresh = not data.supervised()
        if fresh:
            _spawn_supervisor(data, how, deadline=deadline)
        state = _wait_until_ready(data, fresh=fresh, deadline=deadline)
        if state is not None and state.phase == "failed":
            raise StoreUnavailable(f"the embedded Postgres in {data.path} did not start: {state.error}")
        if state is not None:
            return state
    raise StoreUnavailable(
        f"the embedded Postgres in {data.path} is killed each time it starts; see {data.log}"
    )


def _wait_until_ready(data: DataDir, *, fresh: bool, deadline: float) -> SupervisorState | None:
    """Wait until the supervisor reports ready or (if it is a fresh one) failed; None if it has ended.

    A supervisor that is not fresh may be starting for a client that was killed meanwhile, restarting a crashed server,
    about to exit after another client's failed start, or stopping.
    """
    silent_until = time.monotonic() + 5.0
    while True:
        alive = data.supervised()  # checked before the state is read: the "ready" of a dead one means nothing
        state = data.read_state()
        if state is not None and ((fresh and state.phase == "failed") or (alive and state.phase == "ready")):
            return state
        if not alive and (state is not None or time.monotonic() > silent_until):
            return None
        if time.monotonic() > deadline:
            raise StoreUnavailable(
                f"the embedded Postgres in {data.path} did not become ready in time; see {data.log}"
            )
        time.sleep(POLL_INTERVAL)


def _spawn_supervisor(data: DataDir, how: Launch, *, deadline: float) -> None:
    """Start the supervisor, detached. It forks once more, so this process need not reap it."""
    binaries = find_binaries(major=data.cluster_major())
    account = server_account(data.cluster)
    check_reachable(data.path, account)
    request = supervisor.LaunchRequest(
        data_dir=str(data.path),
        bin_dir=str(readable_binaries(binaries, account)),
        socket_dir=str(socket_directory(data, account.owner)),
        settings=[f"{name}={value}" for name, value in _settings(how).items()],
        uid=account.uid,
        gid=account.gid,
        wrapper=list(account.wrapper),
        throwaway=how.throwaway,
        grace=GRACE_PERIOD,
        start_timeout=max(1.0, deadline - time.monotonic()),
    )
    data.state.unlink(missing_ok=True)
    command = [sys.executable, "-I", "-S", supervisor.__file__, json.dumps(request._asdict())]
    with data.open_log() as log:
        done = subprocess.run(  # noqa: S603 - ourselves
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd="/",
            start_new_session=True,
            check=False,
        )
    if done.returncode:
        raise StoreUnavailable(f"the supervisor of the embedded Postgres did not start; see {data.log}")


def socket_directory(data: DataDir, uid: int) -> Path:
    """The directory of the server's socket: inside the data directory, unless libpq could not use it there.

    The path of a socket is limited to about 100 bytes, and libpq and Postgres both split lists of hosts at commas.
    The alternative is short, private, and the same for every process.
    """
    inside = data.path / "run"
    too_long = len(os.fsencode(inside / SOCKET_NAME)) > MAX_SOCKET_PATH
    if not too_long and not set(str(inside)) & set(",'\"\\"):
        return inside
    name = hashlib.sha256(os.fsencode(data.path.resolve())).hexdigest()[:16]
    # Not TMPDIR, which may differ between processes: a DSN must stay valid if another process restarts the server.
    return Path("/tmp") / f"durable-{uid}-{name}"  # noqa: S108 - private, and its owner is checked


def _settings(how: Launch) -> dict[str, str]:
    """Every setting that matters, passed with ``-c``: no file of the cluster has to be edited or trusted."""
    settings = {
        "listen_addresses": "",
        "unix_socket_permissions": "0700",
        "max_connections": "200",
        "timezone": "UTC",
        "log_timezone": "UTC",
        "logging_collector": "off",
        "log_destination": "stderr",
    }
    if how.throwaway:  # so that nothing is left outside the directory, even if everything is killed
        settings["dynamic_shared_memory_type"] = "mmap"
    durable = "off" if how.throwaway else "on"
    settings |= dict.fromkeys(("fsync", "full_page_writes", "synchronous_commit"), durable)
    return settings | dict(how.settings)
