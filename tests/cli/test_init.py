"""`init`: a project that runs, has tests, and overwrites nothing."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import durable_actors as da
import pytest
from click.testing import CliRunner, Result
from durable_actors.cli import cli
from durable_actors.cli.init import files_of, package_name
from durable_actors.errors import ConfigError
from packaging.requirements import Requirement

pytestmark = pytest.mark.slow  # whole programs


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli, ["init", *map(str, arguments)])


def test_the_project_passes_its_own_tests(tmp_path: Path, pg_dsn: str):
    made = run(tmp_path / "my-shop")
    assert made.exit_code == 0, made.output
    assert "durable-actors dev my_shop.machines" in made.output
    tests = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "-p",
            "no:randomly",
            "-p",
            "no:asyncio",
        ],
        cwd=tmp_path / "my-shop",
        env={**os.environ, "DURABLE_TEST_DSN": pg_dsn},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert "3 passed" in tests.stdout, tests.stdout + tests.stderr


def test_it_requires_the_release_that_wrote_it():
    project = tomllib.loads(files_of("my_shop", "my-shop")["pyproject.toml"])["project"]
    (requirement,) = map(Requirement, project["dependencies"])
    assert (requirement.name, project["name"]) == ("durable-actors", "my-shop")
    assert requirement.specifier.contains(da.__version__, prereleases=True)
    major, minor = da.__version__.split(".")[:2]
    assert not requirement.specifier.contains(f"{major}.{int(minor) + 1}.0")


def test_nothing_is_overwritten(tmp_path: Path):
    (tmp_path / "README.md").write_text("mine")
    refused = run(tmp_path, "--name", "shop")
    assert refused.exit_code == 1
    assert "README.md already; nothing was written" in refused.output
    assert [path.name for path in tmp_path.iterdir()] == ["README.md"]
    assert (tmp_path / "README.md").read_text() == "mine"


def test_a_directory_that_cannot_be_written(tmp_path: Path):
    (tmp_path / "file").write_text("")
    refused = run(tmp_path / "file" / "shop")
    assert refused.exit_code == 1
    assert "cannot write" in refused.output


@pytest.mark.parametrize(
    ("text", "name"), [("my-shop", "my_shop"), ("Shop 2", "shop_2"), ("a.b", "a_b"), (" x ", "x")]
)
def test_names_of_packages(text: str, name: str):
    assert package_name(text) == name
    assert all(name in path or "/" not in path or path.startswith("tests/") for path in files_of(name, name))


@pytest.mark.parametrize("text", ["", "class", "3d", "…", "tests", "durable-actors"])
def test_names_that_cannot_be_packages(text: str):
    with pytest.raises(ConfigError, match="--name"):
        package_name(text)
