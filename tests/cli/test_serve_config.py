"""`serve --config MODULE:NAME`: the settings of a `Config`, and what the command line says before it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import durable_actors as da
import psycopg
import pytest
from click.testing import CliRunner
from durable_actors.cli import cli
from durable_actors.cli.serve import changed
from tests.kit import wait_until

SETTINGS = """
import durable_actors as da

@da.job(name="configured:send", queue="mail", rate_limit="smtp")
async def send(args: dict) -> str:
    return "sent"

@da.job(name="configured:other", queue="other")
async def other(args: dict) -> None: ...

config = da.Config(
    node="from-the-code",
    queues={"mail": 3, "other": 3},
    limits={"smtp": da.Limit(100)},
    schedules=[da.Schedule("often", other, args={}, every=3600)],
)
not_a_config = {}
"""


def test_the_command_line_goes_before_the_config():
    config = da.Config(dsn="dbname=x", lease_ttl=60, poll_interval=1, limits={"a": da.Limit(1)}, node="mine")
    assert changed(config, None, {}) == config
    other = changed(config, None, {"lease_ttl": 6.0, "poll_interval": 10.0, "dsn": "dbname=y"})
    assert (other.lease_ttl, other.heartbeat_interval) == (6, 2)  # derived anew
    assert (other.poll_interval, other.max_poll_interval, other.dsn) == (10, 10, "dbname=y")
    assert (other.limits, other.node) == (config.limits, "mine")


def test_what_the_config_says_itself_is_not_derived_anew():
    config = da.Config(lease_ttl=60, heartbeat_interval=5, max_poll_interval=30)
    other = changed(config, None, {"lease_ttl": 90.0, "poll_interval": 2.0})
    assert (other.heartbeat_interval, other.max_poll_interval) == (5, 30)
    with pytest.raises(da.ConfigError, match="three heartbeats must fit into a lease"):
        changed(config, None, {"lease_ttl": 6.0})


def test_a_queue_keeps_what_the_command_line_does_not_say():
    config = da.Config(queues={"mail": da.Queue(20, fair=True, weights={"a": 2}, prefetch=7), "other": 3})
    assert config.queues is not None
    other = changed(config, {"mail": 5, "new": da.Queue(1, prefetch=1)}, {}).queues
    assert other == {
        "mail": da.Queue(5, fair=True, weights={"a": 2}, prefetch=7),
        "new": da.Queue(1, prefetch=1),
    }
    assert changed(config, {"mail": da.Queue(5, prefetch=1)}, {}).queues == {
        "mail": da.Queue(5, fair=True, weights={"a": 2}, prefetch=1)
    }
    assert changed(config, None, {}).queues == config.queues


@pytest.mark.parametrize(
    ("name", "code", "text"),
    [
        ("configured", 2, "is not MODULE:NAME"),
        ("configured:nothing", 1, "module 'configured' has no durable_actors.Config named 'nothing'"),
        ("configured:not_a_config", 1, "has no durable_actors.Config named 'not_a_config'"),
        ("no_such_module:config", 1, "cannot import 'no_such_module'"),
    ],
)
@pytest.mark.parametrize("more", [(), ("--processes", "2")], ids=["one", "several"])
def test_a_wrong_name_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: tuple[str, ...], name: str, code: int, text: str
):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "configured", raising=False)
    (tmp_path / "configured.py").write_text(SETTINGS)
    with da.machine.isolated_registry():
        result = CliRunner().invoke(cli, ["serve", "--config", name, *more])
    assert result.exit_code == code, result.output
    assert text in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.slow  # whole programs
@pytest.mark.parametrize("processes", ["1", "2"])
def test_a_worker_has_limits_and_schedules_of_its_config(tmp_path: Path, durable_dsn: str, processes: str):
    (tmp_path / "configured.py").write_text(SETTINGS)
    options = ["--config", "configured:config", "--queue", "mail", "--processes", processes]
    command = [sys.executable, "-m", "durable_actors.cli", "serve", *options]
    environ = {**os.environ, "DURABLE_DSN": durable_dsn}
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(command, cwd=tmp_path, env=environ, stdin=subprocess.DEVNULL, stderr=log)
    try:
        with psycopg.connect(durable_dsn, autocommit=True) as conn:

            def nodes() -> bool:
                found = conn.execute("select node from durable.nodes").fetchall()
                return len(found) == int(processes) and all(name == "from-the-code" for (name,) in found)

            wait_until(nodes, "the nodes have started", timeout=40)
            query = "insert into durable.gen_durable (fsm, step, queue) values ('configured:send', 'perform', 'mail')"
            [[number]] = conn.execute(query + " returning id").fetchall()
            assert da.sync.result(conn, number, timeout=40) == "sent"
            assert conn.execute("select name from durable.schedules").fetchall() == [("often",)]
            assert conn.execute("select name from durable.limits").fetchall() == [("smtp",)]
        process.send_signal(signal.SIGTERM)
        assert process.wait(40) == 0, (tmp_path / "log").read_text()
    finally:
        process.kill()
        process.wait()
