"""The pytest plugin in a project of its own: it loads by itself, and runs async tests on Trio beside other plugins."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from durable_actors.testing.database import DatabaseServer
from tests.warm import warm

TESTS = """
import durable_actors as da
import pytest
import trio


@da.job(name="greet")
async def greet(args: dict) -> str:
    return "hello " + args["name"]


async def test_bench(durable):
    assert trio.lowlevel.in_trio_run()
    number = await da.insert(greet, args={"name": "Ada"})
    drained = await durable.drain()
    assert drained.steps == ["perform"]
    await durable.assert_done(number, "hello Ada")


async def test_another_database(durable):
    assert not await durable.list_instances()


class TestMethods:
    @pytest.mark.parametrize("name", ["Ada", "Eve"])
    async def test_method(self, durable, name):
        number = await durable.insert(greet, args={"name": name})
        await durable.drain()
        assert await durable.result(number) == f"hello {name}"


async def test_engine(durable_dsn):
    async with da.open_engine(dsn=durable_dsn) as engine:
        number = await engine.client.insert(greet, args={"name": "Ada"})
        assert await engine.client.result(number, timeout=30) == "hello Ada"


def test_a_plain_function(durable):
    async def main():
        await durable.insert(greet, args={"name": "Ada"})
        return (await durable.drain()).steps

    assert trio.run(main) == ["perform"]


def test_without_a_loop_the_error_says_so(durable):
    call = durable.drain()
    with pytest.raises(da.DurableError, match="must be awaited inside trio.run"):
        call.send(None)
"""
HYPOTHESIS = """
from durable_actors.testing import check_crashes
from durable_actors.testing.strategies import crash_points
from hypothesis import given, settings


async def greeting(durable):
    number = await durable.insert(greet, args={"name": "Ada"})
    await durable.drain()
    return await durable.result(number)


@given(points=crash_points(runs=2))
@settings(max_examples=3, deadline=None)
async def test_crashes(durable_benches, points):
    await check_crashes(durable_benches, greeting, points)
"""
ASYNCIO = """
import asyncio


@pytest.mark.asyncio
async def test_told_to_run_on_asyncio(durable_dsn):
    assert asyncio.get_running_loop()
    with pytest.raises(da.DurableError, match="needs Trio, and this is an asyncio event loop"):
        await da.insert(greet, args={"name": "Ada"})
"""
NO_ENGINE = TESTS.replace("async def test_engine", "async def not_a_test")
"""Without the test that has only a DSN: where pytest-asyncio runs all async tests, it runs that one, too."""
AUTO = """
async def test_nobody_was_told(durable_dsn):
    assert asyncio.get_running_loop()
"""
TRIO_FIXTURES = """
@pytest.fixture
async def greeted(durable):
    number = await durable.insert(greet, args={"name": "Ada"})
    await durable.drain()
    yield number


async def test_fixture(durable, greeted, nursery):
    await durable.assert_done(greeted, "hello Ada")
"""
FAILING = """
async def test_fails(durable):
    number = await durable.insert(greet, args={})
    await durable.drain()
    await durable.assert_done(number)
"""


class Project:
    def __init__(self, path: Path, server: DatabaseServer) -> None:
        self.path = path
        self.environ = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "DURABLE_"))}
        self.environ |= {"DURABLE_TEST_DSN": server.dsn, "PYTHONPATH": ""}

    def run(
        self, *blocks: str, ini: str = "", args: tuple[str, ...] = (), conftest: str = ""
    ) -> tuple[int, str]:
        (self.path / "test_greet.py").write_text("\n".join(blocks), "utf-8")
        if "no:asyncio" not in args:
            ini += "\nasyncio_default_fixture_loop_scope = function"
        # The warm interpreter has imported the package already.
        warnings = "filterwarnings =\n error\n ignore::pytest.PytestAssertRewriteWarning\n"
        (self.path / "pytest.ini").write_text(f"[pytest]\n{warnings}{ini}\n", "utf-8")
        if conftest:
            (self.path / "conftest.py").write_text(conftest, "utf-8")
        script = self.path / "run.py"
        options = ["-q", "-p", "no:cacheprovider", "-p", "no:randomly", *args]
        script.write_text(f"import sys, pytest\nsys.exit(pytest.main({options}))\n", "utf-8")
        with (self.path / "output").open("w+b") as out:
            program = warm().start(
                script, (), [subprocess.DEVNULL, out, out], cwd=self.path, env=self.environ
            )
            code = program.wait(110)
            out.seek(0)
            return code, out.read().decode()


@pytest.fixture
def project(tmp_path: Path, durable_server: DatabaseServer) -> Project:
    return Project(tmp_path, durable_server)


NO_TRIO, NO_ASYNCIO = ("-p", "no:trio"), ("-p", "no:asyncio")
OLD_LINE = 'pytest_plugins = ["durable_actors.testing.plugin"]\n'
"""It loaded the plugin before there was an entry point, and does no harm."""


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("blocks", "ini", "args", "conftest", "passed"),
    [
        pytest.param((TESTS, HYPOTHESIS), "", NO_ASYNCIO, OLD_LINE, 8, id="pytest-trio"),
        pytest.param((TESTS, TRIO_FIXTURES), "trio_mode = true", NO_ASYNCIO, "", 8, id="trio_mode"),
        pytest.param((TESTS,), "", (*NO_TRIO, *NO_ASYNCIO, "-n", "2"), "", 7, id="xdist"),
        pytest.param((TESTS, HYPOTHESIS, ASYNCIO), "", NO_TRIO, "", 9, id="pytest-asyncio"),
        pytest.param((NO_ENGINE, ASYNCIO, AUTO), "asyncio_mode = auto", (), "", 8, id="pytest-asyncio, auto"),
    ],
)  # fmt: skip
def test_who_runs_async_tests(
    project: Project, blocks: tuple[str, ...], ini: str, args: tuple[str, ...], conftest: str, passed: int
) -> None:
    code, out = project.run(*blocks, ini=ini, args=args, conftest=conftest)
    assert code == 0, out
    assert f"{passed} passed" in out


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_plain_pytest_and_a_failing_assertion(project: Project) -> None:
    code, out = project.run(TESTS, HYPOTHESIS, FAILING, args=(*NO_TRIO, *NO_ASYNCIO))
    assert code == 1
    assert "1 failed, 8 passed" in out
    assert "AssertionError: instance 1 is not done, but runnable" in out
    assert "greet 1: it is scheduled: due in" in out
    assert "KeyError: 'name'" in out
    assert "assertions.py" not in out  # its frames are hidden
