"""The demo, interrupted at every stage: no schema, no process, no session is left.

The stages are held in the server: an event trigger, or a table lock, makes the demo's statement wait for the test.
"""

from __future__ import annotations

import importlib
import io
import os
import select
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import psycopg
import pytest
import trio
from durable_actors._postgres.driver import waiting
from durable_actors._store import migrate as migrating
from durable_actors.cli.demo_accounts import SCHEMA, Accounts
from rich.console import Console
from tests.cli.demo_kit import assert_nothing_is_left, has_schema, start_demo
from tests.kit import until
from trio.testing import wait_all_tasks_blocked

pytestmark = pytest.mark.slow  # whole programs

demo = importlib.import_module("durable_actors.cli.demo")  # the package has the command under that name

GATE = """
create function public.wait_at_gate() returns event_trigger language plpgsql as $$ begin
    if not current_query() ~ {query} then return; end if;
    perform pg_advisory_lock_shared(4711);
    perform pg_advisory_unlock_shared(4711);
end $$;
create event trigger gate on ddl_command_start when tag in ({tags}) execute function public.wait_at_gate();
select pg_advisory_lock(4711);
"""
AT_GATE = (
    "select pid from pg_locks where locktype = 'advisory' and objid = 4711 and not granted"
    " and database = (select oid from pg_database where datname = current_database())"
)
LOOKING = (
    "select pid from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'"
    " and query like '-- count_statuses%'"
)
SESSIONS = (
    "select pid from pg_stat_activity where datname = current_database()"
    " and pid <> pg_backend_pid() and backend_type = 'client backend'"
)

Start = Callable[..., subprocess.Popen[str]]


class Gate:
    """Holds a session of the demo's in the middle of a statement."""

    def __init__(self, dsn: str) -> None:
        self.conn = psycopg.connect(dsn, autocommit=True)

    def shut(self, *tags: str, query: str = "") -> None:
        """Whoever starts such a command, in a query that matches, waits until the gate opens."""
        names = ", ".join(f"'{tag}'" for tag in tags)
        self.conn.execute(GATE.format(tags=names, query=f"'{query}'").encode())

    def open(self) -> None:
        self.conn.execute("select pg_advisory_unlock(4711)")

    @contextmanager
    def locked(self, table: str, mode: str) -> Iterator[None]:
        with self.conn.transaction():
            self.conn.execute(f"lock table {table} in {mode} mode".encode())
            yield

    async def wait(self, query: str = AT_GATE, *, count: int = 1) -> list[int]:
        """Wait for the sessions that this query finds. Another process: no event."""
        with trio.fail_after(30):
            while len(pids := self._found(query)) < count:
                await trio.sleep(0.005)
        return pids

    async def wait_gone(self, query: str) -> None:
        await until(lambda: not self._found(query))

    def _found(self, query: str) -> list[int]:
        # In a transaction (see `locked`) the first look at pg_stat_activity is shown again and again.
        self.conn.execute("select pg_stat_clear_snapshot()")
        return [row[0] for row in self.conn.execute(query.encode())]


@pytest.fixture
def gate(empty_dsn: str) -> Iterator[Gate]:
    gate = Gate(empty_dsn)
    yield gate
    gate.conn.close()


@pytest.fixture
def start(empty_dsn: str) -> Iterator[Start]:
    """Start the demo as a process; none is left running by a test that fails."""
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: str) -> subprocess.Popen[str]:
        started.append(start_demo(empty_dsn, *arguments))
        return started[-1]

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
            process.communicate()


class Run:
    """The demo in this process."""

    def __init__(self, nursery: trio.Nursery, dsn: str) -> None:
        self.said = io.StringIO()
        self.found: Accounts | str | None = "runs"
        self._dsn = dsn
        nursery.start_soon(self._run)

    async def _run(self) -> None:
        self.found = await demo._until_signal(Console(file=self.said, width=200), self._dsn, 20)


STAGES = {
    "before the first clean-up": ("DROP TABLE", "payments"),
    "before the schema is there": ("CREATE SCHEMA", ""),
    "between the schema and its record": ("CREATE TABLE", "migrations"),
    "in the first migration": ("CREATE INDEX", "signals_inbox"),
    "in the second migration": ("CREATE FUNCTION", "judge_keys"),
    "in the last migration": ("DROP INDEX", ""),
    "after the migrations": ("CREATE TABLE", "payments"),
}


@pytest.mark.parametrize("stage", STAGES)
async def test_interrupted_before_the_workers_start(empty_dsn: str, gate: Gate, stage: str):
    tag, query = STAGES[stage]
    gate.shut(tag, query=query)
    async with trio.open_nursery() as nursery:
        run = Run(nursery, empty_dsn)
        await gate.wait()
        signal.raise_signal(signal.SIGINT)
        await wait_all_tasks_blocked()
        gate.open()
    assert run.found is None
    assert "PostgreSQL" in run.said.getvalue()
    assert "The demo has removed everything" not in run.said.getvalue()
    gate.conn.close()
    assert_nothing_is_left(empty_dsn)


async def make_schema(run: Any, count: int) -> None:
    """Instead of the story: its beginning."""
    await run.clean_up()
    await migrating.migrate(run.dsn, schema=SCHEMA)
    await run.conn.script(demo._PAYMENTS)


@pytest.mark.parametrize("tag", ["DROP TABLE", "DROP SCHEMA"])
async def test_interrupted_while_it_cleans_up(
    empty_dsn: str, gate: Gate, monkeypatch: pytest.MonkeyPatch, tag: str
):
    monkeypatch.setattr(demo.Demo, "show", make_schema)
    gate.shut(tag, query="drop schema")
    async with trio.open_nursery() as nursery:
        Run(nursery, empty_dsn)
        await gate.wait()
        signal.raise_signal(signal.SIGINT)
        await wait_all_tasks_blocked()
        assert has_schema(gate.conn)
        gate.open()
    gate.conn.close()
    assert_nothing_is_left(empty_dsn)


async def test_a_clean_up_that_takes_too_long_says_so(
    empty_dsn: str, gate: Gate, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(demo.Demo, "show", make_schema)
    monkeypatch.setattr(demo, "CLEANUP_TIMEOUT", 0.3)
    gate.shut("DROP TABLE", query="drop schema")
    with pytest.RaisesGroup(
        pytest.RaisesExc(demo.DurableError, match="could not be dropped"), flatten_subgroups=True
    ):
        async with trio.open_nursery() as nursery:
            Run(nursery, empty_dsn)
    gate.open()
    monkeypatch.setattr(demo, "CLEANUP_TIMEOUT", 30.0)
    async with trio.open_nursery() as nursery:
        Run(nursery, empty_dsn)  # the next one tries again
    gate.conn.close()
    assert_nothing_is_left(empty_dsn)


async def test_no_other_demo_starts_before_it_has_cleaned_up(
    empty_dsn: str, gate: Gate, monkeypatch: pytest.MonkeyPatch
):
    """Its schema would be dropped by the first. A cancelled query may cost its connection, not the lock."""
    monkeypatch.setattr(waiting, "CANCEL_TIMEOUT", 0.0)
    gate.shut("CREATE TABLE", "DROP SCHEMA", query="payments|drop schema")
    async with trio.open_nursery() as nursery:
        run = Run(nursery, empty_dsn)
        [creating] = await gate.wait()
        signal.raise_signal(signal.SIGINT)
        await gate.wait(f"{AT_GATE} and pid <> {creating}")
        with pytest.raises(demo.DurableError, match="another demo is running"):
            await demo._demo(Console(file=io.StringIO()), empty_dsn, 20)
        gate.open()
    assert run.found is None
    gate.conn.close()
    assert_nothing_is_left(empty_dsn)


async def end(process: subprocess.Popen[str]) -> tuple[str, str]:
    return await trio.to_thread.run_sync(partial(process.communicate, timeout=50))


def read_until(process: subprocess.Popen[str], text: str) -> list[str]:
    """What it says, up to the line with this text."""
    assert process.stdout is not None
    lines: list[str] = []
    for line in process.stdout:
        lines.append(line)
        if text in line:
            return lines
    raise AssertionError((lines, process.communicate()))


def worker_pids(process: subprocess.Popen[str]) -> list[int]:
    lines = read_until(process, "orders placed")
    [line] = [line for line in lines if "share the work" in line]
    return [int(part.partition(")")[0]) for part in line.split("(pid ")[1:]]


@contextmanager
def watching(pids: list[int]) -> Iterator[None]:
    """They have ended when the block has."""
    watched = [os.pidfd_open(pid) for pid in pids]
    yield
    for each in watched:  # readable when the process has ended
        assert select.select([each], [], [], 30)[0], "a worker outlived the demo"
        os.close(each)


@pytest.mark.timeout(120)
async def test_interrupted_while_its_workers_start(empty_dsn: str, gate: Gate, start: Start):
    process = start()
    await trio.to_thread.run_sync(read_until, process, "schema durable_demo created")
    await gate.wait(SESSIONS, count=3)  # the demo's two, and the first of a worker
    process.send_signal(signal.SIGTERM)
    out, err = await end(process)
    assert (process.returncode, err) == (1, "Aborted!\n"), out
    gate.conn.close()
    assert_nothing_is_left(empty_dsn)


@pytest.mark.timeout(120)
async def test_interrupted_in_the_middle_of_a_query(empty_dsn: str, gate: Gate, start: Start):
    """As KeyboardInterrupt it cost the connection that was to clean up."""
    process = start("--orders", "2000")  # many: it is far from asking anything else
    with watching(await trio.to_thread.run_sync(worker_pids, process)):
        with gate.locked("durable_demo.gen_durable", "access exclusive"):
            await gate.wait(LOOKING)
            process.send_signal(signal.SIGINT)
            await gate.wait_gone(LOOKING)
        out, err = await end(process)
        assert (process.returncode, err) == (1, "Aborted!\n"), out
    gate.conn.close()
    assert_nothing_is_left(empty_dsn)


@pytest.mark.timeout(120)
async def test_killed(start: Start):
    process = start()
    with watching(await trio.to_thread.run_sync(worker_pids, process)):
        process.kill()
        await end(process)


async def test_a_second_signal_ends_it_at_once(gate: Gate, start: Start):
    gate.shut("DROP SCHEMA", "CREATE INDEX", query="durable_demo")
    process = start()
    [first] = await gate.wait()
    process.send_signal(signal.SIGINT)
    [second] = await gate.wait(f"{AT_GATE} and pid <> {first}")
    assert has_schema(gate.conn)
    process.send_signal(signal.SIGINT)
    await end(process)
    assert process.returncode == -signal.SIGINT
    gate.open()
    await gate.wait_gone(f"{SESSIONS} and pid in ({first}, {second})")
