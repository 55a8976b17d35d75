"""Embedded Postgres: from "no server runs" to "a supervisor says that one is ready".

Called by a client that holds its lease and ``start.lock``: nobody else starts one, and no supervisor begins
to stop.
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

# How long the server outlives its last user: commands that follow each other need not start it again.
GRACE_PERIOD = 1.0
SPAWN_ATTEMPTS = 3
SOCKET_NAME = ".s.PGSQL.5432"
# sun_path holds 108 bytes on Linux, 104 on macOS, with the final zero.
SOCKET_PATH_LIMIT = 100


@attrs.frozen
class Launch:
    """How to start the server, should it be this process that has to."""

    throwaway: bool
    settings: Mapping[str, str]


def ensure_running(data: DataDir, how: Launch, *, deadline: float) -> SupervisorState:
    """Return the state of a ready server; start one if there is none."""
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
        f"the embedded Postgres in {data.path} is killed whenever it starts; see {data.log}"
    )


def _wait_until_ready(data: DataDir, *, fresh: bool, deadline: float) -> SupervisorState | None:
    """Wait for the supervisor's word: ready, or (of a fresh one) failed; None when it ended.

    One that is not fresh starts for a client that was killed meanwhile, restarts a crashed server, is about
    to leave after a failure that was somebody else's, or stops.
    """
    silent_until = time.monotonic() + 5.0
    while True:
        alive = data.supervised()  # before the state is read: "ready" of a dead one counts for nothing
        state = data.read_state()
        if state is not None and ((fresh and state.phase == "failed") or (alive and state.phase == "ready")):
            return state
        if not alive and (state is not None or time.monotonic() > silent_until):
            return None
        if time.monotonic() > deadline:
            raise StoreUnavailable(
                f"the embedded Postgres in {data.path} is not ready in time; see {data.log}"
            )
        time.sleep(POLL_INTERVAL)


def _spawn_supervisor(data: DataDir, how: Launch, *, deadline: float) -> None:
    """Start the supervisor, detached; it forks once more, so that nobody has to reap it."""
    binaries = find_binaries(major=data.cluster_major())
    account = server_account(data.cluster)
    check_reachable(data.path, account)
    order = supervisor.LaunchRequest(
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
    command = [sys.executable, "-I", "-S", supervisor.__file__, json.dumps(order._asdict())]
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
    """Where the server listens: inside the data directory unless libpq could not get there.

    A socket's path is limited to about 100 bytes, and libpq and Postgres both split lists of hosts at commas.
    The other place is short, private, and the same for every process that asks.
    """
    inside = data.path / "run"
    too_long = len(os.fsencode(inside / SOCKET_NAME)) > SOCKET_PATH_LIMIT
    if not too_long and not set(str(inside)) & set(",'\"\\"):
        return inside
    name = hashlib.sha256(os.fsencode(data.path.resolve())).hexdigest()[:16]
    # Not TMPDIR, which may differ by process: a DSN must outlive a restart by somebody else.
    return Path("/tmp") / f"durable-{uid}-{name}"  # noqa: S108 - made private, its owner is checked


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
    if how.throwaway:  # so that nothing outside the directory is left, should all be killed
        settings["dynamic_shared_memory_type"] = "mmap"
    durable = "off" if how.throwaway else "on"
    settings |= dict.fromkeys(("fsync", "full_page_writes", "synchronous_commit"), durable)
    return settings | dict(how.settings)
