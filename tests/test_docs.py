"""Every Python block of README.md and docs/ runs. The blocks of a page are one program, in order.

A block after `<!-- not run: why -->` is left out. `print(...)  # → text` promises that line. Line numbers in a
traceback are those of the page. A page with tests is run by pytest; there a block that begins with `# name.py` is a
file of its own, and blocks without a name go on with the last one.
"""

from __future__ import annotations

import ast
import inspect
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import attrs
import click
import durable_actors as da
import pytest
from durable_actors import otp
from durable_actors._option_fields import options_of
from durable_actors._store.holds import HOLDS
from durable_actors._store.moves import MOVES
from durable_actors.cli.serve import serve
from durable_actors.machine import ENDED, Status
from durable_actors.testing.database import DatabaseServer
from tests.kit import verbs
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


# -- links

LINK = re.compile(r"\[[^\]\[]*(?:\[[^\]]*\][^\]\[]*)*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#{1,6} (.*)$", re.MULTILINE)
CODE = re.compile(r"^( *)(`{3,}|:{3,}\{toctree\}).*?^\1`{3,}$|`[^`\n]+`", re.MULTILINE | re.DOTALL)


def slug(heading: str) -> str:
    """The anchor of a heading, as GitHub and MyST make it."""
    words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").strip().lower()
    return re.sub(r"[^\w\- ]", "", words).replace(" ", "-")


def anchors_of(page: Path) -> set[str]:
    text = re.sub(r"^( *)```.*?^\1```$", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    return {slug(heading) for heading in HEADING.findall(text)}


def dead_links(page: Path, text: str) -> list[str]:
    dead = []
    for target in LINK.findall(CODE.sub("", text)):
        if re.match(r"[a-z]+:", target):
            continue  # another site: not looked at, the suite works offline
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        if not path.exists() or (anchor and path.suffix == ".md" and anchor not in anchors_of(path)):
            dead.append(target)
    return dead


WITH_LINKS = [*PAGES, ROOT / "ARCHITECTURE.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]


@pytest.mark.parametrize("page", WITH_LINKS, ids=relative)
def test_links_within_the_project_lead_somewhere(page: Path):
    assert dead_links(page, page.read_text("utf-8")) == []


def test_a_dead_link_is_found():
    text = "[a](nowhere.md) `[b](code.md)` [c](how-to/deploy.md#the-database) [d](how-to/deploy.md#nothing) [e](https://e)"
    assert dead_links(ROOT / "docs" / "index.md", text) == ["nowhere.md", "how-to/deploy.md#nothing"]


def test_the_command_lines_reference_is_complete():
    text = (ROOT / "docs" / "reference" / "cli.md").read_text("utf-8")
    missing = [
        f"{name} {option}"
        for name, verb in verbs().items()
        for parameter in verb.params
        for option in parameter.opts
        if option.startswith("--")
        and option != "--json"
        and f"`{option}" not in text
        and f" {option}" not in text
    ]
    assert not missing
    assert not [name for name in verbs() if f"`{name}`" not in text]


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


def dashboard_table() -> str:
    rows = [[f"`{o.name}`", o.values, o.default_words, o.meaning] for o in options_of(da.Dashboard).values()]
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
        ("reference/config.md", "Dashboard", dashboard_table),
        ("reference/cli.md", "serve", serve_table),
        ("internals/store.md", "moves", moves_table),
        ("internals/keys.md", "holds", holds_table),
    ],
    ids=["Config", "Queue", "Retention", "Dashboard", "serve", "moves", "holds"],
)
def test_a_table_follows_the_code(page: str, name: str, table: Callable[[], str]):
    text = (ROOT / "docs" / page).read_text("utf-8")
    found = re.search(rf"<!-- table of {name}: .* -->\n((?:.*\n)*?)<!-- end of table -->", text)
    assert found is not None
    assert found[1].strip() == table().strip(), f"docs/{page}: the table must be\n\n{table()}"


LONGEST, LONGEST_OF_TWO = 100, 68
"""Columns that fit on a screen of 1,440 pixels: of a block, and of one beside another."""
BLOCK = re.compile(r"^( *)```([^\n]*)\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
SIDE_BY_SIDE = re.compile(r"^::::\{container\} side-by-side$.*?^::::$", re.MULTILINE | re.DOTALL)


def wide_lines(text: str, longest: int) -> list[str]:
    shown = [block for _, what, block in BLOCK.findall(text) if what != "{eval-rst}"]
    return [line for block in shown for line in block.splitlines() if len(line) > longest]


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_code_fits_its_box(page: Path):
    """On a wide screen without scrolling. On a narrow one each box scrolls by itself."""
    text = page.read_text("utf-8")
    assert wide_lines(text, LONGEST) == []
    assert [line for each in SIDE_BY_SIDE.findall(text) for line in wide_lines(each, LONGEST_OF_TWO)] == []


def test_a_wide_line_is_found_in_every_block():
    text = "```sh\nshort\n```\n\ntext\n\n```python\n" + "x" * 101 + "\n```\n\n```sh\nshort\n```\n"
    assert wide_lines(text, LONGEST) == ["x" * 101]


# -- everything has an example

EXAMPLES = "\n".join(program(page.read_text("utf-8")) for page in WITH_CODE)
NO_EXAMPLE = {"__version__"}


@pytest.mark.parametrize(
    "module", [da, da.sync, da.aio, da.schedules, otp], ids=lambda module: module.__name__
)
def test_every_public_name_has_an_example(module: Any):
    missing = {name for name in module.__all__ if not re.search(rf"\b{name}\b", EXAMPLES)}
    assert missing - NO_EXAMPLE == set()


def keywords() -> set[str]:
    """Every option that a call or a class on the page of examples gives, by what it is given to."""
    page = ROOT / "docs" / "reference" / "by-example.md"
    tree = ast.parse(program(page.read_text("utf-8")))
    found: set[str] = set()
    for node in ast.walk(tree):
        given = node.keywords if isinstance(node, ast.Call | ast.ClassDef) else []
        names = [node.func] if isinstance(node, ast.Call) else getattr(node, "bases", [])
        for name in names:
            text = ast.unparse(name).partition("[")[0].removeprefix("da.")
            found |= {f"{text}.{each.arg}" for each in given}
    return found


def parameters(call: Callable[..., Any]) -> set[str]:
    """Those that are given by name."""
    found = inspect.signature(call).parameters.values()
    return {each.name for each in found if each.kind is each.KEYWORD_ONLY}


OPTIONS: dict[str, set[str]] = {
    "Config": set(options_of(da.Config)),
    "Queue": set(options_of(da.Queue)) - {"concurrency"},
    "Retention": set(options_of(da.Retention)),
    "Dashboard": set(options_of(da.Dashboard)),
    "Limit": {"rate", "per", "burst", "slots"},
    "Backoff": {each.name for each in attrs.fields(da.Backoff)},
    "Schedule": {each.name for each in attrs.fields(da.Schedule)} - {"name", "machine", "args"},
    "Filter": {each.name for each in attrs.fields(da.Filter)} - {"everything"},
    "Machine": parameters(da.Machine.__init_subclass__) - {"state", "max_attempts"},
    "job": parameters(da.job),
    "step": parameters(da.step) - {"initial", "on_cancel"},
    "task": parameters(da.task),
    "insert": set(da.InsertOptions.__annotations__) - {"args", "schedule_at", "eligible_at"},
    "Next": parameters(da.Next),
    "Await": parameters(da.Await),
    "Approval": parameters(da.Approval),
    "ScheduleChildren": parameters(da.ScheduleChildren),
    "Child": parameters(da.Child),
}
"""What takes options, without those that the page shows elsewhere (of a job as a class, in `insert_many`)."""


@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_has_an_example(name: str):
    assert {option for option in OPTIONS[name] if f"{name}.{option}" not in keywords()} == set()


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
