"""The pages about the journal say what the code says; the ledger has every rule, and its tests exist."""

from __future__ import annotations

import re
from inspect import getdoc, isclass, isfunction, ismodule
from pathlib import Path

import msgspec
import pytest
from durable_actors import journal
from durable_actors.journal import (
    ANOMALIES,
    COLUMNS,
    FACTS,
    KINDS,
    NOT_IN_THE_JOURNAL,
    PROBLEMS,
    REASONS,
    expand,
)
from durable_actors.journal.attempts import ACTIONS, COLUMNS as MET, TABLE
from tests.journal.golden import RECORDS

ROOT = Path(__file__).parent.parent.parent
PAGE = (ROOT / "docs" / "internals" / "journal.md").read_text("utf-8")
LEDGER = (ROOT / "docs" / "internals" / "protocol.md").read_text("utf-8")
TESTS = [
    *(ROOT / "tests").rglob("test_*.py"),
    ROOT / "durable_actors" / "testing" / "journal_conformance.py",
]


def code(names) -> str:
    return ", ".join(f"`{name}`" for name in names) or "–"


def kinds() -> list[str]:
    lines = []
    for name, kind in KINDS.items():
        fields = msgspec.structs.fields(kind.data)
        needs = [*kind.fields, *(f"data.{one.name}" for one in fields if one.required)]
        may = [one.name for one in fields if not one.required and one.name not in {"round", "columns"}]
        lines.append(f"| `{name}` | {kind.meaning} | {kind.level} | {code(needs)} | {code(may)} |")
    return lines


def expansions() -> list[str]:
    lines = []
    for name, record in RECORDS.items():
        facts = " · ".join(f"`{fact.kind}`" for fact in expand(record))
        lines.append(f"| {name} | {facts} |")
    return lines


def facts() -> list[str]:
    lines = []
    for name, kind in FACTS.items():
        meaning = f"{kind.meaning} *" if kind.extension else kind.meaning
        lines.append(f"| `{name}` | {kind.thread} | {meaning} | {code(kind.needs)} | {code(kind.may)} |")
    return lines


def attempts() -> list[str]:
    return [
        f"| {state} | " + " | ".join(cells[kind] for kind in MET) + " |" for state, cells in TABLE.items()
    ]


TABLES = {
    "kinds": kinds(),
    "expansions": expansions(),
    "facts": facts(),
    "attempts": attempts(),
    "actions": [f"| {name} | {what} |" for name, what in ACTIONS.items()],
    "anomalies": [f"| `{name}` | {what} |" for name, what in ANOMALIES.items()],
    "columns": [
        f"| {level} | {code(one for one, first in COLUMNS.items() if first == level)} |"
        for level in ("outcomes", "claims", "full")
    ],
    "problems": [f"| `{name}` | {what} |" for name, what in PROBLEMS.items()],
    "not in the journal": [f"| `{name}` | {why} |" for name, why in NOT_IN_THE_JOURNAL.items()],
}


@pytest.mark.parametrize("table", TABLES)
def test_a_table_of_the_page_is_the_codes(table):
    missing = [line for line in TABLES[table] if line not in PAGE.splitlines()]
    assert not missing, "docs/internals/journal.md lacks:\n" + "\n".join(TABLES[table])


def test_the_page_has_no_row_that_the_code_lacks():
    rows = {line for line in PAGE.splitlines() if re.match(r"\| `\w+` \|", line)}
    known = {line for lines in TABLES.values() for line in lines}
    assert not rows - known
    assert " · ".join(REASONS) in PAGE


RULES = [*(f"R{number}" for number in range(1, 73)), *(f"C{number}" for number in range(1, 16))]


def test_the_ledger_has_every_rule_once():
    assert re.findall(r"^\| ([RC]\d+) \|", LEDGER, re.MULTILINE) == RULES


def test_the_tests_of_the_ledger_exist():
    found = {
        name
        for path in TESTS
        for name in re.findall(r"^ *(?:async )?def (\w+)", path.read_text("utf-8"), re.MULTILINE)
    }
    named = set(re.findall(r"`(test_\w+)`", LEDGER))
    assert len(named) > 40
    assert not named - found


def test_every_case_is_in_the_ledger_once():
    assert [int(number) for number in re.findall(r"^\| (\d+) \|", LEDGER, re.MULTILINE)] == [*range(1, 55)]


def test_every_case_of_the_pure_part_is_a_test():
    text = "\n".join(path.read_text("utf-8") for path in TESTS)
    numbers = {int(number) for number in re.findall(r"\bCase (\d+)\b", text)}
    assert set(range(1, 27)) | {30, 32, 33, 38, 39, 40, 41, 42, 45, 46, 47, 48, 49, 54} <= numbers


def test_the_reference_names_everything_that_is_public():
    page = (ROOT / "docs" / "reference" / "journal.md").read_text("utf-8")
    assert (
        sorted(journal.__all__, key=lambda name: (not name.isupper(), not name[0].isupper(), name))
        == journal.__all__
    )
    public = {
        name for name, value in vars(journal).items() if not name.startswith("_") and not ismodule(value)
    }
    assert public == set(journal.__all__)
    assert not [name for name in journal.__all__ if not re.search(rf"[ `]{name}\b", page)]


@pytest.mark.parametrize("name", journal.__all__)
def test_everything_public_is_documented(name):
    thing = getattr(journal, name)
    if not (isclass(thing) or isfunction(thing)):
        return
    assert thing.__doc__
    for attribute, member in vars(thing).items() if isclass(thing) else ():
        if not attribute.startswith("_") and (isfunction(member) or isinstance(member, property)):
            assert getdoc(member), f"{name}.{attribute}"
