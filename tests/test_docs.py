"""Every Python block of README.md and docs/ runs. The blocks of a page are one program, in order.

A block after `<!-- not run: why -->` is left out. `print(...)  # → text` promises that line. Line numbers in a
traceback are those of the page. A page with tests is run by pytest; there a block that begins with `# name.py` is a
file of its own, and blocks without a name go on with the last one.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import click
import durable_actors as da
import pytest
from durable_actors._option_fields import options_of
from durable_actors._store.holds import HOLDS
from durable_actors._store.moves import MOVES
from durable_actors.cli import cli
from durable_actors.cli.serve import serve
from durable_actors.machine import ENDED, Status
from durable_actors.testing.database import DatabaseServer
from tests.warm import warm

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"( *)```python\s*")
EXCUSE = re.compile(r"<!-- not run: \S.* -->")

PROMISE = re.compile(r"print\(.*\)  # → (.*)")


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def program(text: str) -> str:
    """The page's code, each line where it is on the page."""
    lines: list[str] = []
    indent: str | None = None
    excused = False
    last = ""
    for line in text.splitlines():
        if indent is not None and line.strip() == "```":
            indent, code = None, ""
        elif indent is not None:
            code = "" if excused else line.removeprefix(indent)
        else:
            code = ""
            if match := FENCE.fullmatch(line):
                indent, excused = match[1], bool(EXCUSE.fullmatch(last.strip()))
        lines.append(code)
        last = line if line.strip() else last
    return "\n".join(lines) + "\n"


WITH_CODE = [page for page in PAGES if program(page.read_text("utf-8")).strip()]
TEST = re.compile(r"^(async )?def test_", re.MULTILINE)
WITH_TESTS = [page for page in WITH_CODE if TEST.search(program(page.read_text("utf-8")))]
FILE = re.compile(r"# (\w+\.py)", re.MULTILINE)
SCRIPTS = [
    page for page in WITH_CODE if not (page in WITH_TESTS and FILE.search(program(page.read_text("utf-8"))))
]


def files_of(text: str) -> dict[str, str]:
    """The page's files, each line where it is on the page."""
    lines = program(text).split("\n")
    found: dict[str, list[str]] = {}
    name = "test_page.py"
    for number, line in enumerate(lines):
        if match := FILE.fullmatch(line):
            name = match[1]
        if line:
            own = found.setdefault(name, [])
            own += [""] * (number - len(own)) + [line]
    return {name: "\n".join(each) + "\n" for name, each in found.items()}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("page", SCRIPTS, ids=relative)
def test_the_code_of_a_page_runs(page: Path, durable_dsn: str, tmp_path: Path):
    script = tmp_path / "page.py"
    script.write_text(program(page.read_text("utf-8")), "utf-8")
    environ = {**os.environ, "DURABLE_DSN": durable_dsn}
    code, out, err = warm().run(script, cwd=tmp_path, env=environ, timeout=110)
    assert code == 0, f"{relative(page)}\n{out}\n{err}"
    for promise in PROMISE.findall(script.read_text("utf-8")):
        assert promise in out.splitlines()


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("page", WITH_TESTS, ids=relative)
def test_the_tests_of_a_page_pass(
    page: Path, durable_server: DatabaseServer, durable_dsn: str, tmp_path: Path
):
    files = files_of(page.read_text("utf-8"))
    for name, code in files.items():
        (tmp_path / name).write_text(code, "utf-8")
    script = tmp_path / "run.py"
    options = [
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:randomly",
        "-p",
        "no:asyncio",
        "-p",
        "no:trio",
        *files,
    ]
    script.write_text(f"import sys, pytest\nsys.exit(pytest.main({options}))\n", "utf-8")
    environ = {**os.environ, "DURABLE_TEST_DSN": durable_server.dsn, "DURABLE_DSN": durable_dsn}
    with (tmp_path / "output").open("w+b") as out:
        code = warm().start(script, (), [subprocess.DEVNULL, out, out], cwd=tmp_path, env=environ).wait(110)
        out.seek(0)
        text = out.read().decode()
    assert code == 0, f"{relative(page)}\n{text}"
    assert f"{len(TEST.findall(program(page.read_text('utf-8'))))} passed" in text


def test_a_page_becomes_a_program():
    page = "# x\n```python\na = 1\n```\n- y\n  ```python\n  b = a\n  ```\n<!-- not run: z -->\n```python\nboom\n```\n"
    assert program(page).split("\n") == ["", "", "a = 1", "", "", "", "b = a", "", "", "", "", "", ""]


def test_the_command_lines_reference_is_complete():
    text = (ROOT / "docs" / "reference" / "cli.md").read_text("utf-8")
    missing = [
        f"{name} {option}"
        for name, verb in cli.commands.items()
        for parameter in verb.params
        for option in parameter.opts
        if option.startswith("--")
        and option != "--json"
        and f"`{option}" not in text
        and f" {option}" not in text
    ]
    assert not missing
    assert not [name for name in cli.commands if f"`{name}`" not in text]


# -- tables that follow the code


def markdown(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(cells)} |\n".replace("|  |", "| |") for cells in lines)


def config_table() -> str:
    rows = [
        [f"`{o.name}`", o.values, o.default_words, o.meaning, f"`{o.flag}`" if o.flag else ""]
        for o in options_of(da.Config).values()
    ]
    return markdown(["option", "value", "default", "meaning", "`serve`"], rows)


def queue_table() -> str:
    rows = [[f"`{o.name}`", o.values, o.default_words, o.meaning] for o in options_of(da.Queue).values()]
    return markdown(["option", "value", "default", "meaning"], rows)


def retention_table() -> str:
    rows = [[f"`{o.name}`", o.values, o.default_words, o.meaning] for o in options_of(da.Retention).values()]
    return markdown(["option", "value", "default", "meaning"], rows)


def serve_table() -> str:
    """As `--help` says it."""
    rows: list[list[str]] = []
    for option in serve.params:
        if isinstance(option, click.Option):
            words = re.sub(r"--[a-z-]+|\$[A-Z_]+", r"`\g<0>`", option.help or "")
            meaning, _, default = words.partition(" Default: ")
            value = "" if option.is_flag else f" {option.make_metavar(click.Context(serve))}"
            names = "/".join([*option.opts, *option.secondary_opts])
            rows.append([f"`{names}{value}`".replace("|", "\\|"), default.removesuffix("."), meaning])
    return markdown(["option", "default", "meaning"], rows)


def statuses(some: frozenset[Status]) -> str:
    every = get_args(Status)
    for name, group in (("ended", ENDED), ("live", frozenset(every) - ENDED)):
        if some == group:
            return name
    return ", ".join(status for status in every if status in some) or "–"


def moves_table() -> str:
    rows = [
        [
            f"`{move.name}`",
            f"{statuses(move.before)} → {statuses(move.after)}",
            ", ".join(f"`{name}.sql`" for name in move.statements) or "–",
            move.meaning,
        ]
        for move in MOVES
    ]
    return markdown(["move", "from → to", "statements", "meaning"], rows)


def holds_table() -> str:
    rows = [["0", "offered", "yes", "`gen_durable_pick`", "–", "the pick may claim it"]]
    rows += [
        [
            str(hold.number),
            hold.name,
            "yes" if hold.keeps_place else "no",
            f"`{hold.index}`" if hold.index else "–",
            ", ".join(f"`{name}.sql`" for name in hold.released_by) or "–",
            hold.explanation,
        ]
        for hold in HOLDS
    ]
    head = ["`hold`", "name", "keeps its place", "index", "offered or claimed by", "what `show` says"]
    return markdown(head, rows)


@pytest.mark.parametrize(
    ("page", "name", "table"),
    [
        ("reference/config.md", "Config", config_table),
        ("reference/config.md", "Queue", queue_table),
        ("reference/config.md", "Retention", retention_table),
        ("reference/cli.md", "serve", serve_table),
        ("internals/store.md", "moves", moves_table),
        ("internals/keys.md", "holds", holds_table),
    ],
    ids=["Config", "Queue", "Retention", "serve", "moves", "holds"],
)
def test_a_table_follows_the_code(page: str, name: str, table: Callable[[], str]):
    text = (ROOT / "docs" / page).read_text("utf-8")
    found = re.search(rf"<!-- table of {name}: .* -->\n((?:.*\n)*?)<!-- end of table -->", text)
    assert found is not None
    assert found[1].strip() == table().strip(), f"docs/{page}: the table must be\n\n{table()}"


def test_a_page_names_the_migration_that_last_defined_a_function():
    """`judge_siblings` and its like are defined anew by later migrations: a page must send its readers to the last."""
    scripts = sorted((ROOT / "durable_actors/_store/migrations").glob("*.sql"))
    stale = []
    for page in (ROOT / "docs/internals").glob("*.md"):
        for function, named in re.findall(
            r"`(\w+)` \(`_store/migrations/(\w+\.sql)`", page.read_text("utf-8")
        ):
            defined = [
                path.name for path in scripts if f"function durable.{function}(" in path.read_text("utf-8")
            ]
            if defined[-1:] != [named]:
                stale.append(f"{page.name}: {function} is in {defined[-1:]}, not in {named}")
    assert not stale
