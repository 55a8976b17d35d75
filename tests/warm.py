"""Python programs that start in milliseconds: forked from an interpreter that has imported the package.

Importing Trio, psycopg and the package takes half a second of CPU, and the suite starts a hundred programs. One
interpreter per test worker has done it (`python tests/warm.py`); its children get their files through the socket, and
run as if they had been started: `__main__`, arguments, directory, environment, exit code.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import trio

ROOT = Path(__file__).parents[1]


class Program:
    """A child of the warm interpreter, with the face of a `Popen`. Nobody buries it but us: its pid stays its own."""

    def __init__(self, warm: Warm, pid: int) -> None:
        self._warm = warm
        self._ended = os.pidfd_open(pid)
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None and select.select([self._ended], [], [], 0)[0]:
            self.returncode = self._warm.ask({"bury": self.pid})
            os.close(self._ended)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            select.select([self._ended], [], [], timeout)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired(f"pid {self.pid}", timeout or 0.0)
        return code

    async def wait_ended(self) -> int:
        if self.returncode is None:
            await trio.lowlevel.wait_readable(self._ended)
        return self.wait()

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Warm:
    """The tests' side."""

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        """`environ` is added to the environment of the interpreter; it may lead to another package than this one."""
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, str(Path(__file__).resolve()), str(theirs.fileno())]
            self._process = subprocess.Popen(
                command,
                pass_fds=[theirs.fileno()],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                env={**os.environ, **(environ or {})},
            )
        atexit.register(self.close)

    def close(self) -> None:
        self._socket.close()
        self._process.wait()

    def start(
        self,
        program: Path | str,
        arguments: Sequence[str],
        files: Sequence[IO[Any] | int],
        *,
        cwd: Path | None = None,
        env: Mapping[str, str],
        warnings_are_errors: bool = False,
    ) -> Program:
        """Run a file, or the text of a program, with these as standard input, output and error."""
        request = {
            "path" if isinstance(program, Path) else "code": str(program),
            "arguments": list(arguments),
            "cwd": str(cwd or Path.cwd()),
            "env": dict(env),
            "warnings": warnings_are_errors,
        }
        return Program(self, self.ask(request, [f if isinstance(f, int) else f.fileno() for f in files]))

    def run(self, path: Path, *, cwd: Path, env: Mapping[str, str], timeout: float) -> tuple[int, str, str]:
        """Run a script, warnings being errors, to its end: exit code, output, errors."""
        with (cwd / ".stdout").open("w+b") as out, (cwd / ".stderr").open("w+b") as err:
            program = self.start(
                path, (), [subprocess.DEVNULL, out, err], cwd=cwd, env=env, warnings_are_errors=True
            )
            try:
                code = program.wait(timeout)
            except subprocess.TimeoutExpired:
                program.kill()
                program.wait()
                raise
            said = []
            for each in (out, err):
                each.seek(0)
                said.append(each.read().decode())
            return code, *said

    def ask(self, request: Mapping[str, Any], files: Sequence[int] = ()) -> int:
        nothing = os.open(os.devnull, os.O_RDWR)
        try:
            descriptors = [nothing if each == subprocess.DEVNULL else each for each in files]
            socket.send_fds(self._socket, [json.dumps(request).encode()], descriptors)
            return int(json.loads(self._socket.recv(64)))
        finally:
            os.close(nothing)


@functools.cache
def warm() -> Warm:
    """The one of this test worker; ends with it."""
    return Warm()


# ---------------------------------------------------------------------------------- the warm interpreter


def serve(channel: socket.socket) -> dict[str, Any] | None:
    """Fork a child for each request. Returns in every child with what it is to do, and None when the tests are over."""
    while True:
        data, files, _, _ = socket.recv_fds(channel, 1 << 20, 3)
        if not data:
            return None
        request = json.loads(data)
        if "bury" in request:
            _, status = os.waitpid(request["bury"], 0)
            channel.send(str(os.waitstatus_to_exitcode(status)).encode())
            continue
        pid = os.fork()
        if pid == 0:
            for number, each in enumerate(files):
                os.dup2(each, number)
                os.close(each)
            return request
        for each in files:
            os.close(each)
        channel.send(str(pid).encode())


def become(request: Mapping[str, Any]) -> None:
    """Run the program in this child."""
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    if request["warnings"]:
        warnings.simplefilter("error")
    if path := request.get("path"):
        sys.argv[:] = [path, *request["arguments"]]
        sys.path[0] = str(Path(path).parent)
        runpy.run_path(path, run_name="__main__")
    else:
        sys.argv[:] = ["-c", *request["arguments"]]
        sys.path[0] = ""
        exec(request["code"], {"__name__": "__main__"})


def main() -> None:
    import durable_actors.cli  # noqa: F401, PLC0415 - only here: whoever wants a `Warm` has imported what it needs

    channel = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job starts with it ignored
    with channel:
        request = serve(channel)
    if request is not None:
        become(request)


if __name__ == "__main__":
    main()
