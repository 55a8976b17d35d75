"""The pytest plugin. It loads by itself where durable_actors is installed.

===================  ========  =========================================================================
fixture              scope     value
===================  ========  =========================================================================
``durable``          test      a `Bench` on a fresh database
``durable_benches``  session   the `Benches`: makes other benches, for tests that need more than one
``durable_server``   session   the `DatabaseServer`: one Postgres for all workers of the run
``pg_dsn``           session   DSN of an empty database that all tests of this worker share
``empty_dsn``        test      DSN of a fresh empty database
``durable_dsn``      test      DSN of a fresh database with the schema in place, copied from a template
``durable_prepare``  session   the function that fills the template; override it to add your own tables
===================  ========  =========================================================================

An ``async def`` test that uses one of them runs on Trio: by pytest-trio if that is installed, otherwise by this plugin.
A test that another plugin was told to run (``pytest.mark.asyncio``, ``pytest.mark.anyio``) is left to it. Where
pytest-asyncio runs every async test (``asyncio_mode = auto``), tests that use ``durable`` run on Trio nevertheless.
"""

from __future__ import annotations

import contextlib
import inspect
import os
from collections.abc import Callable, Iterator
from functools import partial, wraps
from typing import Any, Final

import pytest
import trio

from durable_actors._store.migrate import migrate
from durable_actors.testing.bench import Bench
from durable_actors.testing.benches import Benches
from durable_actors.testing.database import (
    DatabaseServer,
    Prepare,
    docker_answers,
    open_container,
    open_server,
)

_DSN = pytest.StashKey[str | None]()
_OURS: Final = frozenset(
    {"durable", "durable_benches", "durable_dsn", "empty_dsn", "pg_dsn", "durable_server"}
)
_OTHERS: Final = ("asyncio", "anyio", "twisted", "tornado")
"""Markers of plugins that run async tests elsewhere."""


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


@pytest.fixture(scope="session")
def durable_benches(durable_server: DatabaseServer, durable_template: str) -> Benches:
    """Makes benches, each on a fresh database."""
    return Benches(durable_server, durable_template)


@pytest.fixture
def durable(durable_benches: Benches) -> Iterator[Bench]:
    """A bench on a fresh database, for this test alone."""
    with durable_benches.fresh() as bench:
        yield bench


# -- async tests


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Decide who runs the async tests that use our fixtures."""
    _check_prepare(items)
    by_trio = config.pluginmanager.hasplugin("trio")
    for index, item in enumerate(items):
        if not isinstance(item, pytest.Function) or not _is_for_trio(item):
            continue
        if type(item) is not pytest.Function and type(item).__module__.startswith("pytest_asyncio"):
            item = items[index] = _plain(item)  # noqa: PLW2901
        if by_trio and item.get_closest_marker("trio") is None:
            item.add_marker("trio")


def _check_prepare(items: list[pytest.Item]) -> None:
    """Refuse tests that see different `durable_prepare`: the template is made once, by the first test that needs it."""
    found: dict[str, str] = {}
    for item in items:
        info = getattr(item, "_fixtureinfo", None)
        for definition in () if info is None else info.name2fixturedefs.get("durable_prepare", ())[-1:]:
            where = f"{definition.func.__module__}:{definition.func.__code__.co_firstlineno}"
            found.setdefault(where, item.nodeid)
    if len(found) > 1:
        seen = "; ".join(f"{where} for {node}" for where, node in found.items())
        raise pytest.UsageError(
            "durable_prepare fills one template for the whole run, and these tests see different ones: "
            f"{seen}. Override it in the conftest.py above all of them"
        )


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> object:
    """Run an async test on Trio. pytest-trio has replaced its own tests by functions that are not async."""
    if not _is_for_trio(pyfuncitem):
        return None
    test: Any = pyfuncitem.obj
    inner = getattr(test, "hypothesis", None)
    if inner is not None:  # Hypothesis calls the test for every example
        inner.inner_test = _on_trio(inner.inner_test)
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}  # noqa: SLF001
    _on_trio(test)(**arguments)
    return True


def _is_for_trio(item: pytest.Function) -> bool:
    """Whether it is an async test that uses our fixtures, and that nobody else was told to run."""
    test: Any = item.obj
    test = getattr(getattr(test, "hypothesis", None), "inner_test", test)
    if not inspect.iscoroutinefunction(test):
        return False
    used = _OURS.intersection(item.fixturenames)
    if not used or any(
        item.get_closest_marker(name) is not None for name in _OTHERS if not _is_auto(item, name)
    ):
        return False
    # Of several event loops a test with only a DSN may mean any.
    return "durable" in used or "durable_benches" in used or type(item) is pytest.Function


def _is_auto(item: pytest.Function, marker: str) -> bool:
    """Whether a marker was not written by a person: pytest-asyncio marks every async test in its mode "auto"."""
    if marker != "asyncio" or type(item) is pytest.Function:
        return False
    test: Any = item.obj
    written = getattr(test, "pytestmark", [])
    above = [mark for node in item.listchain()[:-1] for mark in node.own_markers]
    return not any(mark.name == marker for mark in (*written, *above))


def _plain(item: pytest.Function) -> pytest.Function:
    """The same test as pytest itself would have collected it."""
    function: Any = pytest.Function
    made: pytest.Function = function.from_parent(
        item.parent,
        name=item.name,
        callspec=getattr(item, "callspec", None),
        callobj=item.obj,
        fixtureinfo=item._fixtureinfo,  # noqa: SLF001
        keywords={key: value for key, value in item.keywords.items() if key != "asyncio"},
        originalname=item.originalname,
    )
    made.own_markers[:] = [mark for mark in made.own_markers if mark.name != "asyncio"]
    return made


def _on_trio(test: Callable[..., Any]) -> Callable[..., None]:
    @wraps(test)
    def run(*args: object, **arguments: object) -> None:
        __tracebackhide__ = True
        trio.run(partial(test, *args, **arguments))

    return run


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
