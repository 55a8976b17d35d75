"""Processes that start in milliseconds: forked from one that has imported everything.

A Python that imports Trio, psycopg and the engine takes half a second of CPU, and a run starts twenty: forked, a
run takes 9 s on two busy cores instead of 25. A child that ended stays a zombie until its run is over, so that its pid
cannot become somebody else's while a nemesis may still send it signals. When the runner is gone, the zygote kills them.
"""

from __future__ import annotations

import gc
import importlib
import json
import logging
import os
import select
import signal
import subprocess
import sys
import traceback
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NoReturn

import trio

MODULES = ("tests.chaos.machines", "tests.chaos.worker", "tests.chaos.sender", "tests.chaos.commander")
"""Imported before the first fork."""


class Forked:
    """A child of the zygote, with the face of a `trio.Process`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._ended = trio.Event()

    def poll(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs."""
        return self.returncode

    async def wait(self) -> int:
        """Wait for its end."""
        await self._ended.wait()
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal; one that has ended is a zombie, and feels nothing."""
        os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def ended(self, code: int) -> None:
        """The zygote tells."""
        self.returncode = code
        self._ended.set()


class Zygote:
    """The runner's side."""

    def __init__(self, process: trio.Process) -> None:
        self._process = process
        self._born: dict[int, trio.Event] = {}
        self._children: dict[int, Forked] = {}
        self._pids: dict[int, int] = {}
        self._count = 0
        self._speaking = trio.Lock()

    async def fork(
        self, module: str, arguments: Sequence[str], log: Path, environ: Mapping[str, str] | None = None
    ) -> Forked:
        """Run `module.main()` with these arguments in a child. A cancellation is felt by whoever awaits next."""
        self._count += 1
        number, born = self._count, trio.Event()
        self._born[number] = born
        request = {"number": number, "module": module, "arguments": list(arguments), "log": str(log)}
        with trio.CancelScope(shield=True):
            await self._ask({**request, "environ": dict(environ or {})})
            await born.wait()
        return self._children[self._pids.pop(number)]

    async def bury(self) -> None:
        """Let the zombies go: nobody will send them signals any more."""
        await self._ask({"bury": True})

    async def _ask(self, request: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        async with self._speaking:
            await self._process.stdin.send_all(json.dumps(request).encode() + b"\n")

    async def listen(self) -> None:
        """Take the zygote's news (`open_zygote` does this)."""
        assert self._process.stdout is not None
        rest = b""
        async for chunk in self._process.stdout:
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                news = json.loads(line)
                if "number" in news:
                    self._children[news["pid"]] = Forked(news["pid"])
                    self._pids[news["number"]] = news["pid"]
                    self._born.pop(news["number"]).set()
                else:
                    self._children[news["pid"]].ended(news["code"])
        raise RuntimeError("the zygote has ended")


@asynccontextmanager
async def open_zygote(
    environ: Mapping[str, str] | None = None, cwd: Path | None = None
) -> AsyncGenerator[Zygote]:
    """Have a zygote for the length of the block; its children do not outlive it.

    `environ` is added to the environment. It and the directory decide which package the zygote imports.
    """
    process = await trio.lowlevel.open_process(
        [sys.executable, "-m", "tests.chaos.zygote"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=cwd,
        env={**os.environ, **(environ or {})},
    )
    try:
        async with trio.open_nursery() as nursery:
            zygote = Zygote(process)
            nursery.start_soon(zygote.listen)
            yield zygote
            nursery.cancel_scope.cancel()
    finally:
        with trio.CancelScope(shield=True):
            assert process.stdin is not None
            await process.stdin.aclose()
            await process.wait()


# -- the zygote's side: no threads, no event loop, or a fork would copy half of them


def main() -> None:
    """Fork on request until the runner is gone."""
    for module in MODULES:
        importlib.import_module(module)
    gc.freeze()
    wake, woken = os.pipe()
    os.set_blocking(wake, False)
    os.set_blocking(woken, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the runner, which ends us
    signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    living: set[int] = set()
    zombies: set[int] = set()
    rest = b""
    while True:
        ready, _, _ = select.select([0, wake], [], [])
        if wake in ready:
            os.read(wake, 4096)
            _tell_ends(living, zombies)
        if 0 in ready:
            data = os.read(0, 65536)
            if not data:
                break
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                request = json.loads(line)
                if "bury" in request:
                    while zombies:
                        os.waitpid(zombies.pop(), 0)
                    continue
                pid = os.fork()
                if not pid:
                    _become(request)
                living.add(pid)
                _tell({"number": request["number"], "pid": pid})
    for pid in living:
        os.kill(pid, signal.SIGKILL)


def _tell(news: Mapping[str, object]) -> None:
    os.write(1, json.dumps(news).encode() + b"\n")


def _tell_ends(living: set[int], zombies: set[int]) -> None:
    for pid in list(living):
        found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
        if found is not None:
            living.remove(pid)
            zombies.add(pid)
            _tell(
                {"pid": pid, "code": found.si_status if found.si_code == os.CLD_EXITED else -found.si_status}
            )


def _become(request: Mapping[str, Any]) -> NoReturn:
    """The child: the same as `python -m module arguments`, with its output in a file of its own."""
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((nothing, 0), (log, 1), (log, 2)):
            os.dup2(source, target)
        os.closerange(3, 64)  # the pipes of the zygote, and nothing else: it has opened no other file
        os.environ.update(request["environ"])
        sys.argv = [request["module"], *request["arguments"]]
        importlib.import_module(request["module"]).main()
        code = 0
    except SystemExit as exc:
        code = exc.code if isinstance(exc.code, int) else 0 if exc.code is None else 1
    except BaseException:  # as the interpreter itself would do
        traceback.print_exc()
    finally:
        logging.shutdown()
        sys.stderr.flush()
        sys.stdout.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
