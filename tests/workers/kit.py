"""A worker in another language beside an engine: it runs a report from its start to its end."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import durable_actors as da
import psycopg
import trio
from psycopg.conninfo import conninfo_to_dict
from tests.warm import warm
from tests.workers.tools import EXAMPLES, NODE_PATH

PATIENCE = 60.0
QUICK = {
    "HEARTBEAT_EVERY": "0.1",
    "PAGE_TAKES": "0.5",
    "POLL": "0.05",
    "LEASE": "20 seconds",
    "NODE_PATH": NODE_PATH,
}


def report_machine() -> Any:
    """The machine of reports.py, in the current registry."""
    spec = importlib.util.spec_from_file_location("example_reports", EXAMPLES / "reports.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Report


def url_of(dsn: str) -> str:
    """The DSN as a URL: the only form that drivers of other languages know."""
    parts = {name: str(value) for name, value in conninfo_to_dict(dsn).items()}
    user, password, database = (
        quote(parts.pop(name, ""), safe="") for name in ("user", "password", "dbname")
    )
    return f"postgresql://{user}{password and ':'}{password}@/{database}?{urlencode(parts)}"


@contextmanager
def worker(command: Sequence[str], dsn: str) -> Generator[subprocess.Popen[str]]:
    """A running worker; it must end when it is asked to."""
    environ = {**os.environ, "DURABLE_DSN": url_of(dsn), **QUICK}
    running = subprocess.Popen(
        command,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield running
        running.terminate()
        running.wait(PATIENCE)
    finally:
        if running.poll() is None:
            os.killpg(running.pid, signal.SIGKILL)
            running.communicate()


async def check_worker(command: Sequence[str], dsn: str, owner: str, place: Path) -> None:
    """The worker ends a report that needs every outcome, beside an engine that runs something else."""
    report = report_machine()

    @da.job(name="other")
    async def other() -> str:
        return "by the engine"

    with worker(command, dsn) as running:
        async with da.open_engine(dsn=dsn, queues={"default": 2}) as engine:
            with trio.fail_after(PATIENCE):
                number = await engine.client.insert(report, state={"pages": 2}, journal="full")
                beside = await engine.client.insert(other)
                while (await engine.client.inspect(number)).status != "awaiting_signal":
                    assert running.poll() is None, running.communicate()
                    await trio.sleep(0.02)
                await engine.client.signal(number, "approved", {"by": "ada"})
                assert await engine.client.result(number) == {"pages": ["page 1", "page 2"], "by": "ada"}
                assert await engine.client.result(beside) == "by the engine"
            report_of = await engine.client.verify()
            assert (report_of.checked, report_of.problems) == (4, [])
        _check_database(dsn, owner)
        code, said, errors = warm().run(
            EXAMPLES / "reports.py", cwd=place, env={**os.environ, "DURABLE_DSN": dsn}, timeout=PATIENCE
        )
        assert (code, said.strip(), errors) == (0, "{'by': 'ada', 'pages': ['page 1', 'page 2']}", "")
    out, err = running.communicate(timeout=PATIENCE)
    assert running.returncode == 0, out + err
    assert "failed" in out or "page/start: runnable" in out
    assert not err, err


def _check_database(dsn: str, owner: str) -> None:
    """Who ran it, that it failed once and said why, and that leases were renewed."""
    with psycopg.connect(dsn) as db:

        def all_of(query: str) -> list[Any]:
            return [row[0] for row in db.execute(query)]  # type: ignore[call-overload]

        assert all(
            node.startswith(f"runner:{owner}-")
            for node in all_of("select node from durable.journal where kind = 'claimed'")
        )
        assert all_of("select error->>'text' from durable.journal where kind = 'retry'") == [
            "the ink has run out"
        ]
        assert all_of(
            "select j.data->>'renewed_until' > c.data->>'lease_until' from durable.journal j join durable.journal c"
            " on c.instance_id = j.instance_id and c.claim_id = j.claim_id and c.kind = 'claimed'"
            " where j.kind = 'done' and j.step = 'start' and j.node like 'runner:%'"
        ) == [True, True]  # fmt: skip
