"""Whole processes: signals, exit codes, sudden death."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import durable_actors as da
import psycopg
import pytest
import trio
from tests.engine.kit import running
from tests.kit import PATIENCE
from tests.warm import Program, warm

pytestmark = pytest.mark.slow  # whole programs

WORKER = """
import json, logging, os, sys
from functools import partial
import trio
import durable_actors as da

def say(text):
    print(text, flush=True)

@da.job(name="nap")
async def nap(args: dict, ctx: da.Context[dict]):
    say(f"started {ctx.id} {ctx.attempt}")
    await trio.sleep(args.get("seconds", 0))
    return {"by": NODE}

@da.job(name="late")
async def late(args: dict):
    say("started")
    with trio.CancelScope(shield=True):
        await trio.sleep(args["seconds"])
    return "finished"

@da.job(name="dies")
async def dies(args: dict):
    os._exit(args["code"])

@da.job(name="exits")
async def exits(args: dict, ctx: da.Context[dict]):
    sys.exit(args["code"])

logging.basicConfig(stream=sys.stdout, format="%(message)s", level="INFO")
NODE, DSN = sys.argv[1:3]
options = json.loads(sys.argv[3])

class Ready:
    def started(self, value=None):
        say("ready")

config = da.Config(dsn=DSN, node=NODE, poll_interval=0.05, **options)
trio.run(partial(da.serve, config, task_status=Ready()))
say("stopped")
"""


class Worker:
    """A worker process; its lines of output as they come."""

    def __init__(self, process: Program, stdout: trio.lowlevel.FdStream) -> None:
        self.process = process
        self.lines: list[str] = []
        self._stdout = stdout
        self._changed = trio.Event()

    async def read(self) -> None:
        rest = b""
        async for chunk in self._stdout:
            *lines, rest = (rest + chunk).split(b"\n")
            self.lines += [line.decode() for line in lines]
            self._changed.set()
            self._changed = trio.Event()

    async def said(self, text: str, count: int = 1) -> None:
        with trio.fail_after(PATIENCE):
            while sum(line.startswith(text) for line in self.lines) < count:
                await self._changed.wait()

    async def ends(self) -> int:
        with trio.fail_after(PATIENCE):
            return await self.process.wait_ended()


@asynccontextmanager
async def worker(tmp_path: Path, dsn: str, node: str = "worker", **options: object) -> AsyncIterator[Worker]:
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    ours, theirs = os.pipe()
    process = warm().start(
        script,
        [node, dsn, json.dumps(options)],
        [subprocess.DEVNULL, theirs, 2],
        env=os.environ,
        warnings_are_errors=True,
    )
    os.close(theirs)
    async with trio.lowlevel.FdStream(ours) as stdout, trio.open_nursery() as nursery:
        try:
            found = Worker(process, stdout)
            nursery.start_soon(found.read)
            await found.said("ready")
            yield found
        finally:
            process.kill()
            with trio.CancelScope(shield=True):
                await process.wait_ended()


def insert(dsn: str, name: str, args: dict, **columns: object) -> int:
    """As any process could: nothing but the row."""
    names = ", ".join(["fsm", "step", "state", *columns])
    places = ", ".join(["%s"] * (3 + len(columns)))
    with psycopg.connect(dsn, autocommit=True) as conn:
        row = conn.execute(
            f"insert into durable.gen_durable ({names}) values ({places}) returning id",
            [name, "perform", psycopg.types.json.Jsonb(args), *columns.values()],
        ).fetchone()
    assert row is not None
    return row[0]


ROW = "status::text, attempt, crashes, locked_by"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_drains(durable_dsn, db, tmp_path, number):
    async with worker(tmp_path, durable_dsn, drain_timeout=60) as process:
        quick = insert(durable_dsn, "nap", {"seconds": 0.3})
        await process.said("started")
        process.process.send_signal(number)
        later = insert(durable_dsn, "nap", {})
        assert await process.ends() == 0
        await process.said("stopped")
    assert db.row(quick, ROW) == ("done", 0, 0, None)
    assert db.row(later, ROW) == ("runnable", 0, 0, None)


async def test_a_second_signal_cancels_running_steps(durable_dsn, db, tmp_path):
    async with worker(tmp_path, durable_dsn, drain_timeout=600) as process:
        number = insert(durable_dsn, "nap", {"seconds": 600})
        await process.said("started")
        process.process.send_signal(signal.SIGTERM)
        await process.said("engine default: received SIGTERM, draining")  # two signals at once would be one
        process.process.send_signal(signal.SIGTERM)
        assert await process.ends() == 0
    assert db.row(number, ROW) == ("runnable", 0, 0, None)


async def test_a_third_signal_kills(durable_dsn, db, tmp_path):
    """A step that does not listen: the process must end all the same when told often enough."""
    async with worker(tmp_path, durable_dsn, drain_timeout=600) as process:
        number = insert(durable_dsn, "late", {"seconds": 600})
        await process.said("started")
        process.process.send_signal(signal.SIGTERM)
        await process.said("engine default: received SIGTERM, draining")
        process.process.send_signal(signal.SIGTERM)
        await process.said("engine default: received SIGTERM again")
        process.process.send_signal(signal.SIGTERM)
        assert await process.ends() == -signal.SIGTERM
    assert db.row(number, "status::text, attempt") == (
        "executing",
        0,
    )  # its lease, or its lock, ends the claim


async def test_a_step_that_exits_does_not_end_the_process(durable_dsn, db, tmp_path):
    """It is a crash of that step; others go on, and the process still drains."""
    async with worker(tmp_path, durable_dsn) as process:
        number = insert(durable_dsn, "exits", {"code": 7})
        await db.eventually(
            "select crashes >= 2 from durable.gen_durable where id = %s", number, timeout=PATIENCE
        )
        other = insert(durable_dsn, "nap", {})
        await db.eventually(
            "select status = 'done' from durable.gen_durable where id = %s", other, timeout=PATIENCE
        )
        process.process.send_signal(signal.SIGTERM)
        assert await process.ends() == 0
    assert db.row(other, "attempt, crashes") == (0, 0)


async def test_a_step_that_ends_the_process_at_once(durable_dsn, db, tmp_path):
    """os._exit: nobody can catch it. The claims of that process come back; the step is quarantined, the others run."""
    options = {"lease_ttl": 2, "reap_interval": 0.2, "max_crashes": 1}
    async with worker(tmp_path, durable_dsn, "doomed", **options) as doomed:
        number = insert(durable_dsn, "dies", {"code": 9})
        assert await doomed.ends() == 9
    async with worker(tmp_path, durable_dsn, "left", **options):
        other = insert(durable_dsn, "nap", {})
        await db.eventually(
            "select status = 'done' from durable.gen_durable where id = %s", other, timeout=PATIENCE
        )
        await db.eventually(
            "select status = 'failed' from durable.gen_durable where id = %s", number, timeout=PATIENCE
        )
    assert db.row(other, "attempt, crashes") == (0, 0)
    assert db.row(number, "attempt, crashes") == (0, 1)


async def test_two_nodes_share_the_work_of_a_third_that_is_killed(durable_dsn, db, tmp_path):
    """kill -9: its claims come back when their leases are over, and somebody else does the work."""
    async with worker(tmp_path, durable_dsn, "doomed", lease_ttl=2, queues={"default": 3}) as doomed:
        ids = [insert(durable_dsn, "nap", {"seconds": 600}) for _ in range(3)]
        await doomed.said("started", count=3)
        db.execute("update durable.gen_durable set state = '{}'")
        doomed.process.kill()
        assert await doomed.ends() == -signal.SIGKILL
        async with (
            worker(tmp_path, durable_dsn, "left", reap_interval=0.2),
            worker(tmp_path, durable_dsn, "right", reap_interval=0.2),
        ):
            query = "select count(*) = 0 from durable.gen_durable where status <> 'done'"
            await db.eventually(query, timeout=PATIENCE)
            assert [db.row(number, "attempt, crashes") for number in ids] == [(1, 1)] * 3
            # Each of the two works: none can have all of it at a time.
            for _ in range(100):
                insert(durable_dsn, "nap", {"seconds": 600})
            query = "select count(distinct locked_by) = 2 from durable.gen_durable where status = 'executing'"
            await db.eventually(query, timeout=PATIENCE)


@pytest.mark.usefixtures("registry")
async def test_serve_in_a_thread_takes_no_signals(durable_dsn):
    """Only the main thread can have them: elsewhere `serve` runs without."""
    before = signal.getsignal(signal.SIGTERM)

    def elsewhere() -> None:
        async def main() -> None:
            async with trio.open_nursery() as nursery:
                engine = await nursery.start(da.serve, da.Config(dsn=durable_dsn, name="in a thread"))
                await engine.stop()

        trio.run(main)

    await trio.to_thread.run_sync(elsewhere)
    assert signal.getsignal(signal.SIGTERM) is before
    async with running(durable_dsn):
        assert signal.getsignal(signal.SIGTERM) is before  # nor does an embedded engine
