"""`ARCHITECTURE.md`, "Follow one step": a real step takes the hops of its table, in order, through six files."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import durable_actors as da
import pytest
from durable_actors._engine.running import dispatcher
from tests.engine.kit import QUIET, running

ROOT = Path(__file__).parent.parent.parent
TEXT = (ROOT / "ARCHITECTURE.md").read_text("utf-8")
SECTION = TEXT.split("## Follow one step")[1].split("\n## ")[0]
Place = tuple[str, str]
"""A file, relative to the package, and a function in it."""


def hops() -> list[Place]:
    """The third column of the table: one place per hop."""
    rows = [line.split(" | ") for line in SECTION.splitlines() if re.match(r"\| \d", line)]
    assert [int(row[0].strip("| ")) for row in rows] == list(range(1, len(rows) + 1))
    found = [re.fullmatch(r"`([\w/]+\.py)::([\w.]+)`", row[2]) for row in rows]
    return [(match[1], match[2]) for match in found if match is not None]


def files_in_prose() -> set[str]:
    """Those that the sentence before the table lists."""
    first = SECTION.split("What follows the commit")[0]
    names = re.findall(r"`([\w/]+\.py)`", first)
    return {name if name == "_client.py" else f"_engine/{name}" for name in names}


@contextmanager
def calls(places: set[Place]) -> Iterator[list[Place]]:
    """The calls of these functions in this thread; a coroutine that goes on counts, too."""
    package = str(ROOT / "durable_actors") + "/"
    found: list[Place] = []

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(package):
            place = (frame.f_code.co_filename.removeprefix(package), frame.f_code.co_qualname)
            if place in places:
                found.append(place)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        yield found
    finally:
        sys.setprofile(before)


def test_it_is_six_files_from_insert_to_commit():
    files = [file for file, _ in hops()]
    commit = hops().index(("_engine/committing/flusher.py", "Flusher._commit"))
    assert set(files[: commit + 1]) == files_in_prose()
    assert len(files_in_prose()) == 6


@pytest.mark.usefixtures("registry")
async def test_a_step_takes_the_hops_of_the_table_in_order(durable_dsn: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(dispatcher, "RUN_AHEAD_SECONDS", 3600.0)  # however slow the machine is

    class Two(da.Machine, name="two"):
        @da.step
        async def start(self, ctx):
            return da.Next(self.then)

        @da.step
        async def then(self, ctx):
            return da.Done()

    table = hops()
    async with running(durable_dsn, machines=[Two], **QUIET) as run:
        with calls(set(table)) as found:
            assert (await run.run(Two)).status == "done"
    rest = iter(found)
    missed = next((hop for hop in table if hop not in rest), None)
    assert missed is None, f"{missed} does not come after the hops before it, in {found}"
