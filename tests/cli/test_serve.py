"""`serve`: the process that people run. Real processes, real signals."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import durable_actors as da
import psycopg
import pytest
import trio
from click.testing import CliRunner
from durable_actors.cli import VERBS, cli
from durable_actors.cli.serve import read_queues, serve
from durable_actors.config import Queue
from durable_actors.machine import isolated_registry
from tests.kit import until, verbs

pytestmark = pytest.mark.slow  # whole programs

SHOP = """
import time
from pathlib import Path
import trio
import durable_actors as da

@da.job(queue="mail")
async def send(args: dict) -> dict:
    Path(f"{args['to']} began").touch()
    while "until" in args and not Path(args["until"]).exists():
        await trio.sleep(0.02)
    return {"sent": args["to"]}

@da.job(queue="mail")
def block(args: dict) -> None:
    Path("blocks").touch()
    time.sleep(args["seconds"])
"""

LOGGED = """
import logging
import durable_actors as da

@da.job(queue="mail")
async def send(args: dict) -> None:
    logging.getLogger("logged").info("sent by the user")

for n in range(7):
    @da.job(queue="other", name=f"other {n}")
    async def other(args: dict) -> None: ...
"""

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(tmp_path: Path, durable_dsn: str) -> Iterator[Start]:
    """Run `durable-actors serve shop …` where shop.py lies; ended for sure."""
    (tmp_path / "served_shop.py").write_text(SHOP)
    started: list[subprocess.Popen[str]] = []

    def begin(*arguments: str, **options: Any) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "durable_actors.cli", "serve", *arguments]
        environ = {**os.environ, "DURABLE_DSN": durable_dsn, "PYTHONUNBUFFERED": "1"}
        process = subprocess.Popen(
            command,
            cwd=tmp_path,
            env=environ,
            stderr=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            **options,
        )
        started.append(process)
        return process

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def wait_for(process: subprocess.Popen[str], text: str) -> str:
    """Read what it says until it says that."""
    assert process.stderr is not None
    said = ""
    for line in process.stderr:
        said += line
        if text in line:
            return said
    raise AssertionError(said)


def insert(dsn: str, state: str, machine: str = "served_shop:send") -> int:
    with psycopg.connect(dsn, autocommit=True) as conn:
        row = conn.execute(
            "insert into durable.gen_durable (fsm, step, queue, state)"
            " values (%s, 'perform', 'mail', %s) returning id",
            [machine, state],
        ).fetchone()
    assert row is not None
    return row[0]


async def wait_status(dsn: str, number: int, status: str) -> tuple[Any, ...]:
    with psycopg.connect(dsn, autocommit=True) as conn, trio.fail_after(40):
        while True:
            row = conn.execute(
                "select status::text, result, attempt, locked_by from durable.gen_durable where id = %s",
                [number],
            ).fetchone()
            assert row is not None
            if row[0] == status:
                return row
            await trio.sleep(0.02)


async def test_it_serves_and_drains_on_sigterm(start: Start, durable_dsn: str, tmp_path: Path):
    process = start("served_shop", "--queue", "mail=2+1", "--node", "w1", "--poll", "50ms", "--drain", "50")
    said = wait_for(process, "serves mail")
    assert re.search(r"engine default: w1:[0-9a-f]+ serves mail", said)
    number = insert(durable_dsn, '{"to": "a"}')
    assert (await wait_status(durable_dsn, number, "done"))[1] == {"sent": "a"}
    slow = insert(durable_dsn, '{"to": "b", "until": "may-end"}')
    await wait_status(durable_dsn, slow, "executing")
    process.send_signal(signal.SIGTERM)
    wait_for(process, "draining: 1 step still running, 0 claimed rows to release")
    (tmp_path / "may-end").touch()  # it may finish its step
    out, _ = process.communicate(timeout=40)
    assert (process.returncode, out) == (0, "")
    assert (await wait_status(durable_dsn, slow, "done"))[1:3] == ({"sent": "b"}, 0)


async def test_what_does_not_finish_goes_back(start: Start, durable_dsn: str, tmp_path: Path):
    process = start("served_shop", "--drain", "100ms", "--poll", "50ms")
    wait_for(process, "serves")
    slow = insert(durable_dsn, '{"to": "b", "until": "never"}')
    # Wait until it has begun: a claimed row that has not begun is released with its attempt untouched.
    await until(lambda: (tmp_path / "b began").exists())
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=40)
    assert process.returncode == 0
    assert await wait_status(durable_dsn, slow, "runnable") == ("runnable", None, 0, None)


async def test_its_log(start: Start, durable_dsn: str, tmp_path: Path):
    """Times, the user's own lines, one line for machines of other queues, a polite end."""
    (tmp_path / "logged.py").write_text(LOGGED)
    process = start("logged", "--queue", "mail", "--poll", "50ms")
    said = wait_for(process, "serves mail")
    number = insert(durable_dsn, "{}", machine="logged:send")
    said += wait_for(process, "sent by the user")
    await wait_status(durable_dsn, number, "done")
    process.send_signal(signal.SIGTERM)
    said += process.communicate(timeout=40)[1]
    lines = said.splitlines()
    assert all(re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} [A-Z]+ [\w.]+: ", line) for line in lines), (
        said
    )
    assert [line for line in lines if " WARNING " in line] == [
        next(
            line for line in lines if "7 machines go to queues that this node does not serve: 'other'" in line
        )
    ]
    assert any(line.endswith(" INFO logged: sent by the user") for line in lines)
    drains = " INFO durable_actors.engine: engine default: received SIGTERM, draining for up to 5 s"
    assert any(drains in line for line in lines)
    assert re.search(r" INFO durable_actors.engine: engine default: \S+ stopped$", lines[-1])


@pytest.mark.parametrize("level", [None, "error"])
def test_the_modules_may_configure_the_log(start: Start, tmp_path: Path, level: str | None):
    configured = "import logging\nlogging.basicConfig(level='INFO', format='MINE %(message)s')\n"
    (tmp_path / "logged.py").write_text(configured + LOGGED)
    options = [] if level is None else ["--log-level", level]
    process = start("logged", "--stop-on-eof", *options, stdin=subprocess.PIPE)
    _, said = process.communicate(timeout=40)
    assert process.returncode == 0
    assert all(line.startswith("MINE ") for line in said.splitlines()), said
    assert ("stopped" in said) == (level is None)


async def test_a_thread_does_not_keep_the_process(start: Start, durable_dsn: str, tmp_path: Path):
    """A `def` step that blocks for ten minutes: the process leaves after --drain, and says which thread it left."""
    process = start("served_shop", "--drain", "100ms", "--poll", "50ms")
    wait_for(process, "serves")
    number = insert(durable_dsn, '{"seconds": 600}', machine="served_shop:block")
    await until(lambda: (tmp_path / "blocks").exists())
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=40)
    assert process.returncode == 0
    assert f"instance {number}: the thread of served_shop:block, step perform has run for" in said
    assert (await wait_status(durable_dsn, number, "executing"))[2] == 0


def test_it_ends_with_its_standard_input(start: Start):
    process = start("served_shop", "--stop-on-eof", stdin=subprocess.PIPE)
    wait_for(process, "serves")
    process.communicate(timeout=40)  # closes it
    assert process.returncode == 0


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        ([], 2, "Missing argument 'MODULE...'"),
        (["no_such_module"], 1, "durable-actors: cannot import 'no_such_module': ModuleNotFoundError"),
        (["json", "--queue", "=3"], 2, "is not NAME, NAME=CONCURRENCY"),
        (["json", "--queue", "a=x"], 2, "is not NAME, NAME=CONCURRENCY"),
        (["json", "--queue", "a", "--queue", "a=2"], 2, "is given twice"),
        (["json", "--queue", "a=0"], 1, "durable-actors: queues['a'] concurrency=0"),
        (["json", "--lease", "0"], 1, "durable-actors: lease_ttl=0.0"),
        (["json", "--pool-size", "1"], 1, "durable-actors: pool_size=1"),
        (
            ["json", "--no-migrate", "--schema", "elsewhere"],
            1,
            'durable-actors: schema "elsewhere" does not exist',
        ),
        (["json", "--start-timeout", "0", "--dsn", "host=/nowhere connect_timeout=1"], 1, "durable-actors: "),
    ],
    ids=str,
)
def test_it_refuses_in_one_line(durable_dsn: str, arguments: list[str], code: int, text: str):
    with isolated_registry():
        da.job(name="something")(lambda args: args)
        result = CliRunner().invoke(cli, ["serve", *arguments], env={"DURABLE_DSN": durable_dsn})
    assert result.exit_code == code, result.output
    assert text in result.stderr
    assert "Traceback" not in result.stderr


def test_the_error_of_the_whole_program_is_one_line(tmp_path: Path):
    run = subprocess.run(
        [sys.executable, "-m", "durable_actors.cli", "serve", "missing_module"],
        capture_output=True,
        text=True,
        timeout=30,
        cwd=tmp_path,
        check=False,
    )
    assert (run.returncode, run.stdout) == (1, "")
    assert run.stderr == (
        "durable-actors: cannot import 'missing_module': ModuleNotFoundError: No module named 'missing_module'\n"
    )


def test_a_mistake_in_a_module_is_placed_in_that_module(tmp_path):
    (tmp_path / "wrong_job.py").write_text("import durable_actors as da\n\n@da.job\ndef f(args, b): ...\n")
    run = subprocess.run(
        [sys.executable, "-m", "durable_actors.cli", "serve", "wrong_job"],
        cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert "(wrong_job.py, line 3; -v shows more)" in run.stderr


def test_queues_as_people_write_them():
    assert read_queues(()) is None
    assert read_queues(("a", "b=3", "c=3+7", "d")) == {"a": 10, "b": 3, "c": Queue(3, prefetch=7), "d": 10}
    for bad in ("", "=", "a=", "a=-1", "a=1+", "a=1.5", "a=٣"):
        with pytest.raises(click.BadParameter):
            read_queues((bad,))


def settings(*arguments: str) -> da.Config:
    """What these arguments of `serve` mean."""
    given = serve.make_context("serve", ["shop", *arguments]).params
    own = {
        "modules",
        "queues",
        "settings",
        "dashboard",
        "stop_on_eof",
        "log_level",
        "log_format",
        "observers",
        "processes",
        "health",
    }
    return da.Config(**{name: value for name, value in given.items() if name not in own})


def test_flags_are_options_of_the_config(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("DURABLE_DSN", "dbname=x")
    assert settings() == da.Config()
    assert settings("--migrate") == da.Config()
    assert settings("--no-migrate", "--lease", "2m", "--max-poll", "500ms", "--poll", "0.1") == da.Config(
        migrate=False, lease_ttl=120, max_poll_interval=0.5, poll_interval=0.1
    )
    assert settings("--threads", "3", "--max-crashes", "4", "--node", "n", "--session-dsn", "d") == da.Config(
        thread_limit=3, max_crashes=4, node="n", session_dsn="d"
    )


def test_help_tells_default_and_meaning():
    said = " ".join(CliRunner().invoke(cli, ["serve", "--help"]).stdout.split())
    assert "--lease DURATION How long a claim stays valid without a heartbeat. Default: 60. " in said
    assert "Default: 5, or --poll if that is longer. " in said
    assert '--schema NAME The schema of the tables. Default: $DURABLE_SCHEMA, else "durable". ' in said
    assert "Default: --migrate. " in said
    assert "`" not in said


def test_help_of_every_verb():
    runner = CliRunner()
    assert runner.invoke(cli, ["--help"]).exit_code == 0
    for name in verbs():
        result = runner.invoke(cli, [name, "--help"])
        assert result.exit_code == 0
        assert result.stdout.startswith("Usage: ")


def test_the_list_of_verbs_says_what_they_say():
    """`--help` imports none of them: it has their names and first sentences from a table."""
    found = verbs()
    assert list(found) == list(VERBS)
    assert {name: command.get_short_help_str(1000) for name, command in found.items()} == {
        name: text for name, (_, _, text) in VERBS.items()
    }
    assert [command.name for command in found.values()] == list(VERBS)


def test_verbs_that_print_data_have_json():
    without = {name for name, verb in verbs().items() if "as_json" not in {p.name for p in verb.params}}
    # no data · their own verbs have it
    assert without == {"serve", "dev", "dashboard", "init", "uninstall", "pg", "queue"}


def test_completion_is_clicks():
    result = CliRunner().invoke(
        cli, [], env={"_DURABLE_ACTORS_COMPLETE": "bash_source"}, prog_name="durable-actors"
    )
    assert "_DURABLE_ACTORS_COMPLETE=bash_complete" in result.stdout


def test_a_module_without_machines_is_refused(start: Start, tmp_path: Path):
    (tmp_path / "served_nothing.py").write_text("import durable_actors\n")
    process = start("served_nothing")
    _, said = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "no machine or job is defined in served_nothing" in said
