"""`serve --processes N`: a process that starts N workers and starts those that end again.

The workers write to the same standard error. Each has its own session, so that Ctrl-C reaches only this process, which
passes it on; and each ends if this process is gone, because its standard input ends.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from functools import partial
from importlib import import_module
from typing import Any, Final

import attrs
import click
import trio
from click.core import ParameterSource

from durable_actors.cli.health import HealthServer, has_prometheus, prometheus_page
from durable_actors.telemetry import DrainStarted, Event, NodeStarted

logger: Final = logging.getLogger("durable_actors.processes")
READY_FD: Final = "DURABLE_READY_FD"
WORKER: Final = "DURABLE_WORKER"
METRICS_DIR: Final = "PROMETHEUS_MULTIPROC_DIR"
FIRST_PAUSE: Final = 0.5
LONGEST_PAUSE: Final = 30.0
STEADY: Final = 60.0
"""A worker that lived for so many seconds begins with the first pause again."""
GRACE: Final = 15.0
"""Seconds beyond the drain before a worker that does not end is killed."""


@attrs.define
class Backoff:
    """The pauses before a worker is started again. Sans-I/O."""

    _pause: float = 0.0

    def after(self, lived: float) -> float:
        """The pause after a worker that lived for so many seconds."""
        if lived >= STEADY or not self._pause:
            self._pause = FIRST_PAUSE
        else:
            self._pause = min(2 * self._pause, LONGEST_PAUSE)
        return self._pause


def worker_arguments(ctx: click.Context, *, without: Sequence[str]) -> list[str]:
    """The arguments of `serve` as they were given, but for some options."""
    options: list[str] = []
    arguments: list[str] = []
    for parameter in ctx.command.params:
        name = parameter.name or ""
        if name in without or ctx.get_parameter_source(name) is not ParameterSource.COMMANDLINE:
            continue
        value: Any = ctx.params[name]
        several: list[Any] = [*value] if parameter.multiple or parameter.nargs == -1 else [value]
        if isinstance(parameter, click.Argument):
            arguments += map(str, several)
        elif isinstance(parameter, click.Option) and parameter.is_flag:
            options.append((parameter.opts if value else parameter.secondary_opts)[0])
        else:
            options += [text for each in several for text in (parameter.opts[0], str(each))]
    return [*options, "--", *arguments]


def tell_ready(environ: MutableMapping[str, str]) -> Callable[[Event], object] | None:
    """An observer that tells the supervisor that this worker serves; None if there is no supervisor."""
    number = environ.pop(READY_FD, "")  # not for the processes of its steps
    if not number.isdigit():
        return None
    pipe = os.fdopen(int(number), "wb", buffering=0)
    os.set_inheritable(pipe.fileno(), False)

    def observe(event: Event) -> None:
        with contextlib.suppress(OSError, ValueError):  # the supervisor has gone
            if isinstance(event, NodeStarted):
                pipe.write(b"r")
            elif isinstance(event, DrainStarted):
                pipe.close()

    return observe


class Workers:
    """Starts the workers, and those that end again; stops them."""

    def __init__(
        self, count: int, command: Sequence[str], *, drain: float, metrics: str | None = None
    ) -> None:
        self._count = count
        self._command = command
        self._drain = drain
        self._metrics = metrics
        self._processes: dict[int, trio.Process] = {}
        self._ready: set[int] = set()
        self._served = False
        self._stops = 0
        self._stopping = trio.Event()
        self.code = 0
        """The exit code of this process: 0, or that of a worker which did not end well."""

    def ready(self) -> tuple[bool, Mapping[str, object]]:
        """Whether a worker serves; how many."""
        state = "stopping" if self._stops else "running" if self._served else "starting"
        facts = {"state": state, "processes": self._count, "serving": len(self._ready)}
        return bool(self._ready) and not self._stops, facts

    async def run(self) -> None:
        """Run the workers until they are stopped, and have ended."""
        async with trio.open_nursery() as nursery:
            for number in range(1, self._count + 1):
                nursery.start_soon(self._keep, number)

    def stop(self) -> None:
        """Let all workers drain; the second time, let them cancel their steps; the third time, kill them."""
        self._stops += 1
        self._stopping.set()
        for process in self._processes.values():
            if self._stops > 2:
                process.kill()
            else:
                process.terminate()

    async def _keep(self, number: int) -> None:
        """Run one worker after the other in this place."""
        backoff = Backoff()
        while not self._stopping.is_set():
            began = trio.current_time()
            code = await self._run_one(number)
            if self._stopping.is_set() or self._gave_up(number, code):
                break
            pause = backoff.after(trio.current_time() - began)
            logger.warning(
                "worker %d ended with %s; starting another one in %g s", number, _named(code), pause
            )
            with trio.move_on_after(pause):
                await self._stopping.wait()

    def _gave_up(self, number: int, code: int) -> bool:
        """A worker that cannot start before any has: a wrong module or option. Others would end the same way."""
        if self._served or code not in {1, 2}:
            return False
        logger.error("worker %d did not start (%s), so the others are stopped", number, _named(code))
        self.code = code
        self.stop()
        return True

    async def _run_one(self, number: int) -> int:
        """Run a worker to its end. If this is cancelled, the worker is killed."""
        read, write = os.pipe()
        pipe = trio.lowlevel.FdStream(read)
        environ = {**os.environ, READY_FD: str(write), WORKER: f"{number}/{self._count}"}
        if self._metrics is not None:
            environ[METRICS_DIR] = self._metrics
        try:
            process = await trio.lowlevel.open_process(
                self._command,
                stdin=subprocess.PIPE,  # ends with this process, even if it is killed
                pass_fds=[write],
                env=environ,
                start_new_session=True,
            )
        except BaseException:
            await trio.aclose_forcefully(pipe)
            raise
        finally:
            os.close(write)
        self._processes[number] = process
        if self._stops:  # meanwhile
            process.terminate()
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._watch_ready, number, pipe)
                nursery.start_soon(self._kill_if_late, process)
                code = await process.wait()
                nursery.cancel_scope.cancel()
        finally:
            del self._processes[number]
            self._ready.discard(number)
            if process.poll() is None:
                process.kill()
            if process.stdin is not None:
                await trio.aclose_forcefully(process.stdin)
            if self._metrics is not None:
                _forget_gauges(process.pid, self._metrics)
        if self._stops and code not in {0, -signal.SIGTERM}:
            self.code = self.code or 1
        return code

    async def _watch_ready(self, number: int, pipe: trio.lowlevel.FdStream) -> None:
        async with pipe:
            while await pipe.receive_some(16):
                self._served = True
                self._ready.add(number)
            self._ready.discard(number)

    async def _kill_if_late(self, process: trio.Process) -> None:
        await self._stopping.wait()
        await trio.sleep(self._drain + GRACE)
        logger.error("worker with pid %d does not end, killing it", process.pid)
        process.kill()


def _named(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    with contextlib.suppress(ValueError):
        return signal.Signals(-code).name
    return f"signal {-code}"


def _forget_gauges(pid: int, folder: str) -> None:
    """Gauges of a process that has ended do not count."""
    with contextlib.suppress(OSError):
        import_module("prometheus_client.multiprocess").mark_process_dead(pid, path=folder)


async def _pass_signals_on(workers: Workers, *, task_status: trio.TaskStatus[None]) -> None:
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as received:
        task_status.started()
        async for number in received:
            logger.info("received %s, stopping the workers", signal.Signals(number).name)
            workers.stop()


async def _stop_on_eof(workers: Workers) -> None:
    read = partial(os.read, sys.stdin.fileno(), 4096)
    while await trio.to_thread.run_sync(read, abandon_on_cancel=True):
        pass
    logger.info("standard input has ended, stopping the workers")
    workers.stop()


async def supervise(
    count: int,
    arguments: Sequence[str],
    *,
    drain: float,
    verbose: int,
    health: tuple[str, int] | None,
    stop_on_eof: bool,
) -> int:
    """Run `count` workers until a signal arrives; return the exit code."""
    flags = [] if not verbose else ["-" + "v" * verbose]
    command = [sys.executable, "-m", "durable_actors.cli", *flags, "serve", "--stop-on-eof", *arguments]
    with contextlib.ExitStack() as stack:
        folder: str | None = None
        if health is not None and has_prometheus():
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="durable-metrics-"))
        workers = Workers(count, command, drain=drain, metrics=folder)
        async with trio.open_nursery() as nursery:
            if health is not None:
                page = None if folder is None else partial(prometheus_page, folder)
                server = HealthServer(*health, ready=workers.ready, metrics=page)
                await nursery.start(server.run)
            await nursery.start(_pass_signals_on, workers)
            if stop_on_eof:
                nursery.start_soon(_stop_on_eof, workers)
            logger.info("starting %d workers", count)
            await workers.run()
            logger.info("all workers have ended")
            nursery.cancel_scope.cancel()
    return workers.code
