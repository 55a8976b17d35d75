"""`top` in a terminal: it draws, q ends it, and the terminal is as it was."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import termios

import pytest

pytestmark = pytest.mark.slow  # whole programs

# Makes its standard input its controlling terminal, as a shell would, so that Ctrl-C is a signal.
OWN_TERMINAL = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""


def read_until(master: int, wanted: bytes) -> bytes:
    seen = b""
    while wanted not in seen:
        try:
            chunk = os.read(master, 65536)
        except OSError:  # the other end is closed
            chunk = b""
        if not chunk:
            raise AssertionError(seen.decode("utf-8", "replace"))
        seen += chunk
    return seen


@pytest.mark.parametrize("key", [b"q", b"Q", b"\x03"], ids=["q", "Q", "Ctrl-C"])
def test_top_draws_until_it_is_told_to_stop(durable_dsn: str, key: bytes):
    master, slave = pty.openpty()
    before = termios.tcgetattr(slave)
    environ = {**os.environ, "DURABLE_DSN": durable_dsn, "TERM": "xterm", "COLUMNS": "100", "LINES": "30"}
    command = [sys.executable, "-m", "durable_actors.cli", "top", "--interval", "100ms"]
    process = subprocess.Popen(
        [sys.executable, "-c", OWN_TERMINAL, *command],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env=environ,
        start_new_session=True,
    )
    try:
        read_until(master, b"no node is alive")
        os.write(master, key)
        read_until(master, b"\x1b[?1049l")  # the screen from before
        assert process.wait(timeout=20) == 0
        assert termios.tcgetattr(slave) == before
    finally:
        process.kill()
        process.wait()
        os.close(master)
        os.close(slave)
