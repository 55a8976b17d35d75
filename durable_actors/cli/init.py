"""The command `init`: a small project that runs and has tests."""

from __future__ import annotations

import keyword
import re
from pathlib import Path
from typing import Final

import click

from durable_actors._version import __version__
from durable_actors.errors import ConfigError

MACHINES: Final = '''\
"""Machines and jobs. A step may run more than once, so give ctx.idempotency_key to the services that you call."""

import attrs

import durable_actors as da


@attrs.frozen
class Order:
    number: int
    cents: int


async def charge_card(key: str, cents: int) -> str:
    """Call the payment provider here."""
    return f"receipt {key}: {cents} cents"


@da.job(queue="mail", max_attempts=5)
async def send_mail(args: dict[str, str]) -> str:
    """Runs again after a growing delay if it raises, up to five times."""
    print(f"mail to {args['to']}: {args['text']}", flush=True)
    return "sent"


class Checkout(da.Machine[Order], queue="orders"):
    """Charge a customer, wait for the parcel to leave, and say so."""

    @da.step(initial=True, retry=da.Backoff(max_attempts=5, on=ConnectionError))
    async def charge(self, ctx: da.Context[Order]) -> da.Outcome:
        receipt = await charge_card(ctx.idempotency_key, ctx.state.cents)
        print(f"order {ctx.state.number}: {receipt}", flush=True)
        return da.Await("shipped", then=self.tell, timeout=3 * 86400)

    @da.step
    async def tell(self, ctx: da.Context[Order]) -> da.Outcome:
        if not ctx.awaited:
            return da.Stop("nothing was shipped within three days")
        text = f"order {ctx.state.number} is on its way"
        await ctx.insert(send_mail, args={"to": ctx.awaited[0].payload["mail"], "text": text})
        return da.Done({"told": ctx.state.number})
'''

TESTS: Final = '''\
"""`durable` is a database of the test's own, in which nothing runs by itself and time stands still."""

import pytest
from PACKAGE import machines
from PACKAGE.machines import Checkout, Order, send_mail


async def test_an_order(durable):
    order = await durable.insert(Checkout, state=Order(1, 4200))
    await durable.drain()  # run everything that is due
    await durable.assert_waiting(order, signal="shipped")

    await durable.signal(order, "shipped", {"mail": "ada@example.org"})
    await durable.drain()
    await durable.assert_done(order, {"told": 1})
    await durable.assert_inserted(send_mail)


async def test_nothing_is_shipped(durable):
    order = await durable.insert(Checkout, state=Order(2, 4200))
    await durable.drain()
    await durable.advance("3d")
    await durable.drain()
    await durable.assert_failed(order, "nothing was shipped within three days")


async def test_the_bank_does_not_answer_at_first(durable, monkeypatch: pytest.MonkeyPatch):
    calls = []

    async def charge_card(key: str, cents: int) -> str:
        calls.append(key)
        if len(calls) == 1:
            raise ConnectionError("no answer")
        return "paid"

    monkeypatch.setattr(machines, "charge_card", charge_card)
    order = await durable.insert(Checkout, state=Order(3, 4200))
    await durable.drain()
    await durable.advance("1m")
    await durable.drain()
    await durable.assert_waiting(order, signal="shipped")
    assert len(calls) == 2
    assert len(set(calls)) == 1  # the same key in both runs: the bank charges once
'''

PROJECT: Final = """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "PROJECT"
version = "0.1"
requires-python = ">=3.11"
dependencies = ["durable-actors~=VERSION"]

[project.optional-dependencies]
dev = ["durable-actors[dashboard,testing]"]  # the dashboard, pytest, the fixture `durable`, a Postgres to run on

[tool.hatch.build.targets.wheel]
packages = ["PACKAGE"]

[tool.pytest.ini_options]
testpaths = ["tests"]
pythonpath = ["."]
"""

README: Final = """\
# PROJECT

```sh
pip install -e '.[dev]'
pytest
durable-actors dev PACKAGE.machines   # a worker that starts again when you save a file, and the dashboard
```

In a second terminal:

```sh
durable-actors insert PACKAGE.machines:Checkout --state '{"number": 1, "cents": 4200}' --unique-key order:1
durable-actors why order:1
durable-actors signal order:1 shipped '{"mail": "ada@example.org"}'
durable-actors show order:1
```

Without `DURABLE_DSN` this uses an embedded Postgres. In production: `durable-actors serve PACKAGE.machines`.
"""


def files_of(package: str, project: str) -> dict[str, str]:
    """The files of the project by their paths. Pure.

    It requires the minor release that wrote it: on the public index the name belongs to another project.
    """
    texts = {
        f"{package}/__init__.py": "",
        f"{package}/machines.py": MACHINES,
        "tests/test_machines.py": TESTS,
        "pyproject.toml": PROJECT,
        "README.md": README,
    }
    words = {"PACKAGE": package, "PROJECT": project, "VERSION": __version__}
    return {
        path: re.sub("|".join(words), lambda match: words[match[0]], text) for path, text in texts.items()
    }


def package_name(text: str) -> str:
    """The name of a package that the name of a directory suggests. Pure; raises `ConfigError`."""
    name = re.sub(r"\W+", "_", text.strip().lower(), flags=re.ASCII).strip("_")
    if not name.isidentifier() or keyword.iskeyword(name) or name in {"tests", "durable_actors"}:
        raise ConfigError(
            f"{text!r} cannot be the name of a package: give another one with --name", option="name"
        )
    return name


@click.command(short_help="Write a small project that runs and has tests.")
@click.argument("directory", default=".", type=click.Path(path_type=Path, file_okay=False))
@click.option("--name", metavar="NAME", help="The name of the package. Default: that of the directory.")
def init(directory: Path, name: str | None) -> None:
    """Write a small project to DIRECTORY (default: here): a machine, a job, and their tests.

    Files that exist are never overwritten: if there is one of these names, nothing is written.
    """
    package = package_name(directory.resolve().name if name is None else name)
    files = files_of(package, package.replace("_", "-"))
    there = [path for path in files if (directory / path).exists()]
    if there:
        raise ConfigError(
            f"{directory} has {', '.join(there)} already; nothing was written. Give an empty directory, or another "
            "--name",
            option="directory",
        )
    try:
        for path, text in files.items():
            (directory / path).parent.mkdir(parents=True, exist_ok=True)
            with (directory / path).open("x", encoding="utf-8") as file:  # "x": it may have come in between
                file.write(text)
            click.echo(directory / path)
    except OSError as exc:
        raise ConfigError(f"cannot write {exc.filename}: {exc.strerror}", option="directory") from exc
    into = "" if directory == Path() else f"cd {directory} && "
    click.echo(f"\nNext: {into}pip install -e '.[dev]' && pytest, then durable-actors dev {package}.machines")
