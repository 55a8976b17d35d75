"""Two worker processes on one database: SIGSTOP past the lease, and a Postgres that is killed; nothing lost or doubled.

A visit counts the committed transitions: five per instance, whatever happened to the workers in between.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest
import trio
from durable_actors._postgres.embedded import server as embedded
from durable_actors._store.migrate import migrate
from durable_actors.testing.database import throwaway_directory
from tests.warm import Program, warm

MODULE = """
import trio
import durable_actors as da

class Trip(da.Machine, name="trip"):
    @da.step(initial=True)
    async def start(self, ctx: da.Context[dict]) -> da.Outcome:
        n = ctx.state.get("n", 0)
        await trio.sleep(0.02)
        if n == 4:
            return da.Done(n)
        return da.Next(self.start, {"n": n + 1})
"""
OPTIONS = ["--lease", "1.5", "--poll", "0.1", "--reap", "0.5", "--dead-after", "1", "--queue", "default=4"]
COUNT = 60


@contextmanager
def worker(dsn: str, where: Path, name: str) -> Iterator[Program]:
    with (where / f"{name}.log").open("w") as log:
        process = warm().start(
            "from durable_actors.cli import main; main()",
            ["serve", "trips", "--dsn", dsn, "--node", name, *OPTIONS],
            [subprocess.DEVNULL, subprocess.DEVNULL, log],
            cwd=where,
            env=os.environ,
        )
    try:
        yield process
    except BaseException:
        print(f"{name}, exit code {process.poll()}:", (where / f"{name}.log").read_text(), sep="\n")
        raise
    finally:
        process.send_signal(signal.SIGCONT)
        process.kill()
        process.wait()


@pytest.fixture
def trips(tmp_path: Path) -> Path:
    (tmp_path / "trips.py").write_text(MODULE)
    return tmp_path


def tally(dsn: str) -> dict[str, int]:
    with psycopg.connect(dsn, autocommit=True) as conn:
        rows = conn.execute(
            "select status::text, count(*) from durable.gen_durable group by status"
        ).fetchall()
    return dict(rows)


async def wait_done(dsn: str, done: int) -> None:
    """Wait until so many instances are done; the server may be away meanwhile."""
    with trio.fail_after(50):
        while True:
            try:
                if (await trio.to_thread.run_sync(tally, dsn)).get("done", 0) >= done:
                    return
            except psycopg.OperationalError:
                pass
            await trio.sleep(0.05)


def insert_trips(dsn: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute(
            "insert into durable.gen_durable (fsm, step, state)"
            " select 'trip', 'start', '{}' from generate_series(1, %s)",
            [COUNT],
        )


def check(dsn: str) -> None:
    """Each instance was committed exactly five times: four transitions and its end."""
    with psycopg.connect(dsn, autocommit=True) as conn:
        rows = conn.execute(
            "select status::text, visit, result, state from durable.gen_durable order by id"
        ).fetchall()
    assert rows == [("done", 5, 4, {"n": 4})] * COUNT


@pytest.mark.slow
async def test_a_stopped_worker_loses_its_work_and_changes_nothing_when_it_wakes(
    durable_dsn: str, trips: Path
):
    insert_trips(durable_dsn)
    with worker(durable_dsn, trips, "one") as one, worker(durable_dsn, trips, "two"):
        await wait_done(durable_dsn, 5)
        one.send_signal(signal.SIGSTOP)
        await wait_done(durable_dsn, COUNT)  # the other one does it all, past the first one's leases
        one.send_signal(signal.SIGCONT)
        insert_more = COUNT // 10
        with psycopg.connect(durable_dsn, autocommit=True) as conn:
            conn.execute(
                "insert into durable.gen_durable (fsm, step, state, queue)"
                " select 'trip', 'start', '{}', 'default' from generate_series(1, %s)",
                [insert_more],
            )
        await wait_done(durable_dsn, COUNT + insert_more)
    with psycopg.connect(durable_dsn, autocommit=True) as conn:
        rows = conn.execute("select distinct status::text, visit, result from durable.gen_durable").fetchall()
    assert rows == [("done", 5, 4)]


@pytest.mark.slow
async def test_a_killed_postgres_comes_back_and_so_does_the_work(trips: Path):
    directory = throwaway_directory(f"two-nodes-{os.getpid()}-{trips.name}")
    # A throwaway server confirms commits before they are written: killed at once, it would forget all the instances.
    with embedded.start(directory, throwaway=True, settings={"synchronous_commit": "on"}) as server:
        dsn = server.dsn()
        await migrate(dsn)
        insert_trips(dsn)
        with worker(dsn, trips, "one"), worker(dsn, trips, "two"):
            await wait_done(dsn, 5)
            status = embedded.status(directory)
            assert status.postmaster is not None
            os.kill(status.postmaster, signal.SIGQUIT)  # immediate: every session and lock is gone at once
            try:
                await wait_done(dsn, COUNT)
            except trio.TooSlowError:
                print(
                    embedded.status(directory), (directory / "server.log").read_text(), tally(dsn), sep="\n"
                )
                raise
        check(dsn)
