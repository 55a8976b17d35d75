"""Every Python block of README.md and docs/ runs. The blocks of a page are one program, in order.

A block after `<!-- not run: why -->` is left out. `print(...)  # → text` promises that line. Line numbers in a
traceback are those of the page.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import click
import durable_actors as da
import pytest
from durable_actors._option_fields import options_of
from durable_actors.cli import cli
from durable_actors.cli.serve import serve
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


@pytest.mark.timeout(120)
@pytest.mark.parametrize("page", WITH_CODE, ids=relative)
def test_the_code_of_a_page_runs(page: Path, durable_dsn: str, tmp_path: Path):
    script = tmp_path / "page.py"
    script.write_text(program(page.read_text("utf-8")), "utf-8")
    environ = {**os.environ, "DURABLE_DSN": durable_dsn}
    code, out, err = warm().run(script, cwd=tmp_path, env=environ, timeout=110)
    assert code == 0, f"{relative(page)}\n{out}\n{err}"
    for promise in PROMISE.findall(script.read_text("utf-8")):
        assert promise in out.splitlines()


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


# -- the tables of options


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


@pytest.mark.parametrize(
    ("page", "name", "table"),
    [
        ("config.md", "Config", config_table),
        ("config.md", "Queue", queue_table),
        ("cli.md", "serve", serve_table),
    ],
    ids=["Config", "Queue", "serve"],
)
def test_a_table_of_options_follows_the_code(page: str, name: str, table: Callable[[], str]):
    text = (ROOT / "docs" / "reference" / page).read_text("utf-8")
    found = re.search(rf"<!-- table of {name}: .* -->\n((?:.*\n)*?)<!-- end of table -->", text)
    assert found is not None
    assert found[1].strip() == table().strip(), f"docs/reference/{page}: the table must be\n\n{table()}"
