"""The pytest plugin. Put ``pytest_plugins = ["durable_actors.testing.plugin"]`` into your top-level conftest.py.

===================  ========  =========================================================================
fixture              scope     value
===================  ========  =========================================================================
``durable_server``   session   the `DatabaseServer`: one Postgres for all workers of the run
``pg_dsn``           session   DSN of an empty database that all tests of this worker share
``empty_dsn``        test      DSN of a fresh empty database
``durable_dsn``      test      DSN of a fresh database with the schema in place, copied from a template
``durable_prepare``  session   the function that fills the template; override it to add your own tables
===================  ========  =========================================================================
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import pytest
import trio

from durable_actors._store.migrate import migrate
from durable_actors.testing.database import (
    DatabaseServer,
    Prepare,
    docker_answers,
    open_container,
    open_server,
)

_DSN = pytest.StashKey[str | None]()


@pytest.fixture(scope="session")
def durable_server(request: pytest.FixtureRequest) -> Iterator[DatabaseServer]:
    """The Postgres of this run. The first worker that needs it starts it; it stops after the last worker."""
    worker: dict[str, Any] = getattr(request.config, "workerinput", {})
    with open_server(run=worker.get("testrunuid"), dsn=worker.get("durable_test_dsn")) as server:
        yield server


@pytest.fixture(scope="session")
def durable_prepare() -> Prepare | None:
    """The function that fills the template database; it is called with its DSN. None leaves the template empty."""
    return _migrate


def _migrate(dsn: str) -> None:
    trio.run(migrate, dsn)


@pytest.fixture(scope="session")
def pg_dsn(durable_server: DatabaseServer) -> Iterator[str]:
    """An empty database that all tests of this worker share, for tests that need no tables of their own."""
    with durable_server.database() as dsn:
        yield dsn


@pytest.fixture
def empty_dsn(durable_server: DatabaseServer) -> Iterator[str]:
    """An empty database for this test alone."""
    with durable_server.database() as dsn:
        yield dsn


@pytest.fixture(scope="session")
def durable_template(durable_server: DatabaseServer, durable_prepare: Prepare | None) -> str:
    """Name of the template database."""
    return "template0" if durable_prepare is None else durable_server.template(durable_prepare)


@pytest.fixture
def durable_dsn(durable_server: DatabaseServer, durable_template: str) -> Iterator[str]:
    """A database with the schema in place, for this test alone."""
    with durable_server.database(template=durable_template) as dsn:
        yield dsn


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """With xdist the controller starts the container before the first worker, because it must outlive them all."""
    config: pytest.Config = node.config
    if _DSN not in config.stash:
        config.stash[_DSN] = None
        if not os.environ.get("DURABLE_TEST_DSN") and docker_answers():
            stack = contextlib.ExitStack()
            config.add_cleanup(stack.close)
            config.stash[_DSN] = stack.enter_context(open_container())
    node.workerinput["durable_test_dsn"] = config.stash[_DSN]
