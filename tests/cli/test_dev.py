"""`dev`: a worker that starts again when a file changes. Real processes, real files."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import durable_actors as da
import psycopg
import pytest
import trio
from durable_actors.cli import cli
from durable_actors.cli.dev import changes, has_verb, look, wait_for_change
from tests.kit import until

pytestmark = pytest.mark.slow  # whole programs

JOB = """
import durable_actors as da

@da.job
async def answer(args: dict) -> str:
    return "{}"
"""


@pytest.fixture
def dev(tmp_path: Path, durable_dsn: str) -> Iterator[subprocess.Popen[bytes]]:
    (tmp_path / "shop_dev.py").write_text(JOB.format("old"))
    command = [sys.executable, "-m", "durable_actors.cli", "dev", "shop_dev", "--no-dashboard"]
    environ = {**os.environ, "DURABLE_DSN": durable_dsn, "PYTHONDONTWRITEBYTECODE": "1"}
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(command, cwd=tmp_path, env=environ, stdout=log, stderr=log)
        yield process
        process.kill()
        process.wait()


def test_changes_are_found(tmp_path: Path):
    (tmp_path / "shop" / "__pycache__").mkdir(parents=True)
    (tmp_path / ".git").mkdir()
    for name in ("shop/a.py", "shop/b.py", "shop/__pycache__/a.py", ".git/a.py", "note.txt"):
        (tmp_path / name).write_text("x")
    before = look([tmp_path])
    assert {Path(path).name for path in before} == {"a.py", "b.py"}
    (tmp_path / "shop" / "a.py").write_text("xy")
    (tmp_path / "shop" / "b.py").unlink()
    (tmp_path / "c.py").write_text("")
    assert [Path(path).name for path in changes(before, look([tmp_path]))] == ["c.py", "a.py", "b.py"]
    assert changes(before, before) == []


async def test_a_change_is_reported_when_it_is_over(tmp_path: Path):
    before = look([tmp_path])
    found: list[str] = []

    async def wait() -> None:
        found.extend(await wait_for_change([tmp_path], before))

    with trio.fail_after(20):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait)
            (tmp_path / "a.py").write_text("1")
            (tmp_path / "b.py").write_text("1")
    assert [Path(path).name for path in found] == ["a.py", "b.py"]


def test_the_dashboard_is_asked_for_by_its_command():
    with click.Context(cli) as ctx:
        assert has_verb(ctx, "serve")
        assert not has_verb(ctx, "no such command")


async def answers(dsn: str) -> str:
    with psycopg.connect(dsn, autocommit=True) as conn:
        number = da.sync.insert(conn, "shop_dev:answer")

        def ended() -> bool:
            return da.sync.inspect(conn, number).status == "done"

        await until(ended, timeout=40)
        return str(da.sync.inspect(conn, number).result)


@pytest.mark.slow
async def test_a_change_starts_the_worker_again(
    dev: subprocess.Popen[bytes], tmp_path: Path, durable_dsn: str, registry: object
):
    @da.job(name="shop_dev:answer")
    async def answer(args: dict) -> str: ...

    module, log = tmp_path / "shop_dev.py", tmp_path / "log"
    assert await answers(durable_dsn) == "old"
    module.write_text("this is no Python")
    await until(lambda: "cannot import 'shop_dev'" in log.read_text(), timeout=40)
    module.write_text(JOB.format("new"))
    assert await answers(durable_dsn) == "new"
    dev.send_signal(signal.SIGTERM)
    assert await trio.to_thread.run_sync(dev.wait) == 0
    with psycopg.connect(durable_dsn) as conn:
        assert conn.execute(
            "select count(*) from pg_stat_activity where datname = current_database()"
        ).fetchone() == (1,)
