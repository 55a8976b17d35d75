"""docs/explanation/races.md is true: the tests that it names exist, and no hazard is missing."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
HAZARDS = 63


@cache
def page() -> str:
    return (ROOT / "docs" / "explanation" / "races.md").read_text("utf-8")


def test_every_test_named_here_exists():
    named = set(re.findall(r"`(test_\w+)`", page()))
    found: set[str] = set()
    for path in (ROOT / "tests").glob("**/*.py"):
        found |= set(re.findall(r"^(?:async )?def (test_\w+)", path.read_text("utf-8"), re.MULTILINE))
    assert len(named) > 50
    assert named <= found, f"named in races.md, but gone: {sorted(named - found)}"


def test_every_hazard_has_its_line():
    ledger = page().split("## Hazards ledger")[1]
    numbers = [
        int(number)
        for row in re.findall(r"^\| (H[^|]+)\|", ledger, re.MULTILINE)
        for number in re.findall(r"H(\d+)", row)
    ]
    assert sorted(numbers) == list(range(1, HAZARDS + 1)), "each once"
    assert all(row.strip() for row in re.findall(r"^\| H[^|]+\|([^|]*)\|", ledger, re.MULTILINE))
