"""PgBouncer before a test's database: the Debian package, run as the server's user from a directory of its own."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Generator
from pathlib import Path

from durable_actors._postgres.embedded.account import server_account
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from tests.chaos.cluster import PATIENCE, open_place

PROGRAM = shutil.which("pgbouncer", path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin")
"""None: not installed here."""
PORT = 6432

CONFIG = """
[databases]
* = {upstream}
[pgbouncer]
listen_addr =
listen_port = {port}
unix_socket_dir = {place}
auth_type = any
pool_mode = {mode}
default_pool_size = {size}
max_client_conn = 500
{more}
"""


@contextlib.contextmanager
def open_pgbouncer(dsn: str, *, mode: str = "transaction", size: int = 8, more: str = "") -> Generator[str]:
    """The DSN of the same database by way of PgBouncer."""
    assert PROGRAM is not None
    account = server_account(Path("/nonexistent"))
    parts = {name: value for name, value in conninfo_to_dict(dsn).items() if value is not None}
    database = parts.pop("dbname")
    upstream = " ".join(f"{name}={value}" for name, value in parts.items())
    with open_place() as place:
        if account.uid is not None and account.gid is not None:
            os.chown(place, account.uid, account.gid)
        config = place / "pgbouncer.ini"
        config.write_text(
            CONFIG.format(upstream=upstream, port=PORT, place=place, mode=mode, size=size, more=more)
        )
        config.chmod(0o644)
        with (place / "log").open("wb") as log:
            process = subprocess.Popen(
                [*account.wrapper, PROGRAM, str(config)], stdout=log, stderr=log, cwd="/",
                user=account.uid, group=account.gid, extra_groups=None if account.uid is None else [],
            )  # fmt: skip
        try:
            _wait_listening(process, place)
            yield make_conninfo(host=str(place), port=PORT, dbname=database, user=parts.get("user"))
        finally:
            process.kill()  # whatever signals this process was told to ignore, and so its children
            process.wait(PATIENCE)


def _wait_listening(process: subprocess.Popen[bytes], place: Path) -> None:
    """The socket is there a moment before anybody listens to it."""
    deadline = time.monotonic() + PATIENCE
    while not _listens(place / f".s.PGSQL.{PORT}"):
        assert process.poll() is None, (place / "log").read_text()
        assert time.monotonic() < deadline, (place / "log").read_text()
        time.sleep(0.005)


def _listens(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as client:
        return client.connect_ex(str(path)) == 0
