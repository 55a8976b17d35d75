"""psycopg's own asynchronous test-suite, on TrioConnection.

    python -m tests.psycopg_suite path/to/psycopg [--dsn DSN] [--asyncio] [--slow] [-- pytest options]

`path/to/psycopg` is a checkout of psycopg's repository (nothing of it is ours, nothing is copied). Needs anyio
(its pytest plugin runs the tests, here on Trio) and pproxy. Without --dsn a throw-away server is started.
Exit code 0: every failure is one that `expected` explains. `--asyncio` is the control: AsyncConnection.
"""

from __future__ import annotations

import contextlib
import fnmatch
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import click
from durable_actors._postgres.embedded import server as embedded
from durable_actors.testing.database import throwaway_directory
from tests.psycopg_suite.expected import EXPECTED

FILES = (
    "connection", "copy", "cursor", "cursor_client", "cursor_common", "cursor_raw", "cursor_server", "notify",
    "pipeline", "prepared", "tpc", "transaction",
)  # fmt: skip
HERE = Path(__file__).parent


def reason_for(test: str) -> str | None:
    """Why this test may fail; None when it may not."""
    name = test.removeprefix("tests/")
    for reason, patterns in EXPECTED.items():
        if any(fnmatch.fnmatchcase(name.split("[")[0], pattern) for pattern in patterns):
            return reason
    return None


def run_pytest(root: Path, dsn: str, runner: str, options: list[str]) -> dict[str, str]:
    """Run it in psycopg's tree, with our plugin, and return the outcome of each test."""
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.json"
        environment = os.environ | {
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),  # pproxy
            "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parent.parent)]),
            "PSYCOPG_SUITE_RUNNER": runner,
            "PSYCOPG_SUITE_RESULTS": str(results),
            "PSYCOPG_TEST_DSN": dsn,
        }
        files = [f"tests/test_{name}_async.py" for name in FILES]
        command = [sys.executable, "-m", "pytest", "-p", "trio_plugin", "-q"]
        subprocess.run([*command, *options, *files], cwd=root, env=environment, check=False)
        return json.loads(results.read_bytes()) if results.exists() else {}


def report(outcomes: dict[str, str]) -> bool:
    """Print the figures; True when nothing failed that should not have."""
    count = Counter(outcomes.values())
    failed = [test for test, outcome in outcomes.items() if outcome == "failed"]
    explained = Counter(filter(None, map(reason_for, failed)))
    unexplained = [test for test in failed if reason_for(test) is None]
    ran = count["passed"] + count["failed"]
    print(f"\n{count['passed']} of {ran} passed, {count['failed']} failed, {count['skipped']} skipped")
    for reason, number in explained.most_common():
        print(f"{number:5}  {reason}")
    for test in unexplained:
        print(f"UNEXPECTED  {test}")
    return bool(outcomes) and not unexplained


@click.command()
@click.argument("checkout", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("pytest_options", nargs=-1)
@click.option("--dsn", help="A database to run in; its prepared transactions enabled, else those tests skip.")
@click.option("--asyncio", "control", is_flag=True, help="The control run: psycopg's own AsyncConnection.")
@click.option("--slow", is_flag=True, help="Also what psycopg marks as slow.")
def main(
    checkout: Path, pytest_options: tuple[str, ...], dsn: str | None, *, control: bool, slow: bool
) -> None:
    """Run psycopg's asynchronous tests on TrioConnection and compare with the expected failures."""
    root = checkout.resolve()
    root = root.parent if root.name == "tests" else root
    options = [] if slow else ["-m", "not slow and not subprocess"]
    with contextlib.ExitStack() as stack:
        if dsn is None:
            settings = {"max_prepared_transactions": "10"}
            folder = throwaway_directory(f"psycopg{os.getpid()}")
            server = stack.enter_context(embedded.start(folder, throwaway=True, settings=settings))
            dsn = server.dsn()
        runner = "asyncio" if control else "trio"
        outcomes = run_pytest(root, dsn, runner, [*options, *pytest_options])
    sys.exit(0 if report(outcomes) else 1)


if __name__ == "__main__":
    main()
