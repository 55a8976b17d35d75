"""`serve --processes N`, `--health`, `--observer`, `--log-format json`: real processes, real signals."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import psycopg
import pytest
from durable_actors.cli import cli
from durable_actors.cli.processes import FIRST_PAUSE, LONGEST_PAUSE, STEADY, Backoff, worker_arguments
from durable_actors.cli.serve import serve
from tests.kit import wait_until

pytestmark = pytest.mark.slow  # whole programs

SHOP = """
import logging, os, time
from pathlib import Path
import trio
import durable_actors as da

@da.job(queue="mail")
async def send(args: dict) -> dict:
    logging.getLogger("shop").info("sending")
    while "until" in args and not Path(args["until"]).exists():
        await trio.sleep(0.02)
    return {"pid": os.getpid(), "worker": os.environ.get("DURABLE_WORKER")}

def watch(event):
    with open("events", "a") as file:
        file.write(type(event).__name__ + chr(10))

not_a_function = 3
"""

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(tmp_path: Path, durable_dsn: str) -> Iterator[Start]:
    (tmp_path / "proc_shop.py").write_text(SHOP)
    started: list[subprocess.Popen[str]] = []

    def begin(*arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "durable_actors.cli", "serve", *arguments]
        environ = {**os.environ, "DURABLE_DSN": durable_dsn}
        with (tmp_path / "log").open("w") as log:
            process = subprocess.Popen(
                command, cwd=tmp_path, env=environ, stdin=subprocess.DEVNULL, stderr=log, text=True
            )
        started.append(process)
        return process

    yield begin
    for process in started:
        process.kill()
        process.wait()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def fetch(port: int, path: str) -> tuple[int, str]:
    """Status and body; (0, "") while nobody listens."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as found:
            return found.status, found.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except OSError:
        return 0, ""


def run_job(conn: psycopg.Connection[Any], state: str = "{}") -> int:
    query = "insert into durable.gen_durable (fsm, step, queue, state) values ('proc_shop:send', 'perform', 'mail', %s)"
    [[number]] = conn.execute(query + " returning id", [state]).fetchall()
    return number


def result_of(conn: psycopg.Connection[Any], number: int) -> Any:
    def look() -> Any:
        [[status, result]] = conn.execute(
            "select status::text, result from durable.gen_durable where id = %s", [number]
        ).fetchall()
        return result if status == "done" else None

    return wait_until(look, f"instance {number} is done", timeout=50)


def test_pauses_grow_and_begin_anew():
    backoff = Backoff()
    pauses = [backoff.after(0.1) for _ in range(8)]
    assert pauses[:3] == [FIRST_PAUSE, 2 * FIRST_PAUSE, 4 * FIRST_PAUSE]
    assert pauses[-1] == LONGEST_PAUSE
    assert backoff.after(STEADY) == FIRST_PAUSE


def test_workers_get_the_arguments_that_were_given(monkeypatch):
    monkeypatch.setenv("DURABLE_SCHEMA", "from_environment")
    parent = click.Context(cli, info_name="durable-actors")
    given = ["a", "b", "--processes", "3", "--queue", "x=1", "--queue", "y", "--no-migrate", "--lease", "2m",
             "--health", "80", "--log-format", "JSON"]  # fmt: skip
    ctx = serve.make_context("serve", given, parent=parent)
    found = worker_arguments(ctx, without=("processes", "health", "stop_on_eof"))
    assert found == [
        "--queue", "x=1", "--queue", "y", "--no-migrate", "--lease", "120.0", "--log-format", "json", "--", "a", "b",
    ]  # fmt: skip
    again = serve.make_context("serve", found, parent=parent)
    differ = {name for name in ctx.params if ctx.params[name] != again.params[name]}
    assert differ == {"processes", "health"}


@pytest.mark.slow
def test_several_processes_share_one_log_and_come_back(start: Start, durable_dsn: str, tmp_path: Path):
    port = free_port()
    process = start(
        "proc_shop", "--processes", "2", "--health", str(port), "--poll", "50ms", "--log-format", "json"
    )
    serving = '"serving": 2'
    wait_until(lambda: serving in fetch(port, "/readyz")[1], "both serve", timeout=50)
    assert fetch(port, "/readyz")[0] == 200
    with psycopg.connect(durable_dsn, autocommit=True) as conn:
        first = result_of(conn, run_job(conn))
        assert first["worker"] in {"1/2", "2/2"}
        os.kill(first["pid"], signal.SIGKILL)
        wait_until(lambda: "ended with SIGKILL" in (tmp_path / "log").read_text(), "it is noticed")
        wait_until(lambda: serving in fetch(port, "/readyz")[1], "another one serves", timeout=50)
        nodes = "select count(*) from durable.nodes"
        assert conn.execute(nodes).fetchall() == [(3,)]
        held = run_job(conn, '{"until": "may-end"}')
        executing = "select 1 from durable.gen_durable where id = %s and status = 'executing'"
        wait_until(lambda: conn.execute(executing, [held]).fetchall(), "it runs")
        both = 'durable_queue_slots_limit{messaging_destination_name="mail"} 20.0'
        wait_until(lambda: both in fetch(port, "/metrics")[1], "both have told of their slots")
        process.send_signal(signal.SIGTERM)
        wait_until(lambda: '"state": "stopping"' in fetch(port, "/readyz")[1], "it stops")
        (tmp_path / "may-end").touch()
        assert process.wait(timeout=50) == 0
        assert result_of(conn, held)  # it was drained, not cancelled
        assert conn.execute(nodes + " where stopped_at is null").fetchall() == [(1,)]  # the killed one
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    sent = [line for line in lines if line["message"] == "sending"]
    assert {line["machine"] for line in sent} == {"proc_shop:send"}
    assert {line.get("process") for line in lines} == {None, "worker 1/2", "worker 2/2"}


@pytest.mark.slow
def test_workers_end_with_their_supervisor(start: Start, durable_dsn: str, tmp_path: Path):
    process = start("proc_shop", "--processes", "2", "--poll", "50ms")
    with psycopg.connect(durable_dsn, autocommit=True) as conn:
        pids = wait_until(
            lambda: (
                len(found := conn.execute("select about ->> 'pid' from durable.nodes").fetchall()) == 2
                and found
            ),
            "both have started",
            timeout=50,
        )
        process.kill()
        process.wait()
        left = "select 1 from durable.nodes where stopped_at is null"
        wait_until(lambda: not conn.execute(left).fetchall(), "both have drained", timeout=50)
    assert len(pids) == 2
    assert "[worker 1/2]" in (tmp_path / "log").read_text()


@pytest.mark.slow
def test_a_worker_that_cannot_start_ends_all(start: Start, tmp_path: Path):
    process = start("no_such_module", "--processes", "2")
    assert process.wait(timeout=50) == 1
    log = (tmp_path / "log").read_text()
    assert "cannot import 'no_such_module'" in log
    assert "so the others are stopped" in log
    assert "Traceback" not in log


@pytest.mark.slow
def test_health_and_observers_of_one_process(start: Start, durable_dsn: str, tmp_path: Path):
    port = free_port()
    process = start(
        "proc_shop", "--health", str(port), "--poll", "50ms", "--observer", "proc_shop:watch",
        "--observer", "durable_actors.prometheus:observe",
    )  # fmt: skip
    wait_until(lambda: fetch(port, "/readyz")[0] == 200, "it serves", timeout=50)
    assert fetch(port, "/healthz")[0] == 200
    with psycopg.connect(durable_dsn, autocommit=True) as conn:
        result_of(conn, run_job(conn))
    done = 'durable_instances_ended_total{durable_machine="proc_shop:send",durable_status="done"}'
    wait_until(lambda: f"{done} " in fetch(port, "/metrics")[1], "it is counted")
    assert f"{done} 1.0" in fetch(port, "/metrics")[1]  # once, although it is observed twice by name
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=50) == 0
    events = (tmp_path / "events").read_text().split()
    assert (events[0], events[-1]) == ("NodeStarted", "NodeStopped")
    assert "StepStopped" in events


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--observer", "proc_shop"], "is not MODULE:FUNCTION"),
        (["--observer", "proc_shop:not_a_function"], "has no function 'not_a_function'"),
        (["--observer", "proc_shop:nothing.at.all"], "has no function 'nothing.at.all'"),
        (["--processes", "0"], "is not a whole number from 1 to 1000"),
        (["--health", "x:y"], "is not PORT or HOST:PORT"),
        (["--processes", "2", "--lease", "0"], "lease_ttl=0.0"),
    ],
    ids=str,
)
def test_wrong_options_are_one_line(start: Start, tmp_path: Path, arguments: list[str], text: str):
    process = start("proc_shop", *arguments)
    assert process.wait(timeout=50) in {1, 2}
    log = (tmp_path / "log").read_text()
    assert text in log
    assert "Traceback" not in log
