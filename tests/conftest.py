"""What holds for every test."""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest
import trio
from durable_actors._store.migrate import migrate
from durable_actors.machine import isolated_registry
from durable_actors.testing.database import DatabaseServer, Prepare
from tests.browser import tools as browser
from tests.upgrade import old as release_before
from tests.workers import tools as other_languages

pytest_plugins = ["durable_actors.testing.plugin"]

# A shell that starts the suite in the background has it ignore these, and so would every program that a test starts:
# nobody could interrupt them.
if threading.current_thread() is threading.main_thread():
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGQUIT) is signal.SIG_IGN:
        signal.signal(signal.SIGQUIT, signal.SIG_DFL)


# What is collected lives to the end: see `pytest_collection_finish`.
gc.disable()


@pytest.fixture
def registry():
    """Machines that the test defines are forgotten afterwards, and it sees no others."""
    with isolated_registry() as found:
        yield found


def prepare(dsn: str) -> None:
    """The schema, in fewer files: without the catalog's free space maps a copy takes 10 ms of CPU, not 12."""
    trio.run(migrate, dsn)
    with psycopg.connect(dsn, autocommit=True) as conn:
        tables = (
            "select oid::regclass::text from pg_class where relkind = 'r' and not relisshared and oid < 16384"
        )
        for (table,) in conn.execute(tables).fetchall():
            conn.execute(f"vacuum full {table}")  # type: ignore[arg-type]
    with psycopg.connect(dsn):
        """The first session writes down what it knows of the catalog, and all copies have it."""


@pytest.fixture(scope="session")
def durable_prepare() -> Prepare:
    return prepare


@pytest.fixture(scope="session")
def take_database(durable_server: DatabaseServer, durable_template: str) -> Iterator[Callable[[], str]]:
    """Databases made in advance, one at a time: a test does not wait for the 40 ms that a copy takes beside others."""
    maker = DatabaseServer(durable_server.provider, durable_server.dsn, run="spare", disposable=True)
    with ThreadPoolExecutor(1, "spare database") as thread:
        spare = thread.submit(maker.create, template=durable_template)

        def take() -> str:
            nonlocal spare
            taken, spare = spare, thread.submit(maker.create, template=durable_template)
            return taken.result()

        yield take
        durable_server.drop(spare.result())
    maker.close()


@pytest.fixture
def durable_dsn(durable_server: DatabaseServer, take_database: Callable[[], str]) -> Iterator[str]:
    """A database with the schema in place, for this test alone."""
    dsn = take_database()
    yield dsn
    durable_server.drop(dsn)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Slow tests first, shared out: each worker begins with an equal part of the list, and steals from others' ends."""
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    slow = [item for item in items if item.get_closest_marker("slow")]
    rest = [item for item in items if not item.get_closest_marker("slow")]
    size = -(-len(rest) // workers)
    items[:] = [
        item
        for number in range(workers)
        for part in (slow[number::workers], rest[number * size : (number + 1) * size])
        for item in part
    ]


def pytest_collection_finish() -> None:
    """Collected tests are 300,000 objects, which live to the end: a full garbage collection took 0.4 s to see that."""
    gc.freeze()
    gc.enable()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say what was not collected, and why."""
    if reason := release_before.missing():
        terminalreporter.write_line(
            f"tests/upgrade was left out, because {reason}: it runs the release before"
        )
    if reason := browser.missing():
        terminalreporter.write_line(
            f"tests/browser was left out, because {reason}: it looks at the dashboard"
        )
    for test, reason in other_languages.missing().items():
        terminalreporter.write_line(f"tests/workers/{test} was left out, because {reason}")
