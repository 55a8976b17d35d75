"""The release before this one, taken from git: its package, and the programs of the chaos runs as they were then.

`release-before` names its commit. A new minor release puts its own there, and the tests of this folder then run that
one beside the next. Without git, or without that commit (an sdist, a shallow clone), nothing here is collected.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
from pathlib import Path
from typing import Final

import attrs

ROOT: Final = Path(__file__).parents[2]
COMMIT: Final = (Path(__file__).parent / "release-before").read_text().strip()
PARTS: Final = ("durable_actors", "tests/chaos", "tests/invariants", "tests/support", "tests/kit.py")

PATIENT_THEN: Final = "ABSENT: Final = 15.0"


@functools.cache
def missing() -> str | None:
    """Why the release before cannot be run here; None if it can."""
    if shutil.which("git") is None:
        return "git is not installed"
    if not (ROOT / ".git").exists():
        return "this is not a git checkout"
    found = subprocess.run(
        ["git", "cat-file", "-e", f"{COMMIT}^{{commit}}"], cwd=ROOT, capture_output=True, check=False
    )
    return f"commit {COMMIT[:12]} is not in this checkout's history" if found.returncode else None


@attrs.frozen
class OldRelease:
    """The release before, in a directory."""

    folder: Path

    @property
    def environ(self) -> dict[str, str]:
        """What a Python needs to import it. Its own tests come first, too; ours are found behind them."""
        return {"PYTHONPATH": os.pathsep.join([str(self.folder), str(ROOT)])}

    def sql(self) -> dict[str, str]:
        """Its statements, by name."""
        files = (self.folder / "durable_actors" / "_store" / "sql").glob("*.sql")
        return {path.stem: path.read_text("utf-8") for path in files}

    @property
    def schema(self) -> int:
        """Its newest migration."""
        files = (self.folder / "durable_actors" / "_store" / "migrations").glob("*.sql")
        return max(int(path.name[:4]) for path in files)


def extract(folder: Path) -> OldRelease:
    """Unpack it there."""
    archive = subprocess.run(
        ["git", "archive", "--format=tar", COMMIT, *PARTS], cwd=ROOT, capture_output=True, check=True
    )
    subprocess.run(["tar", "-x", "-C", str(folder)], input=archive.stdout, check=True)
    # Its sender waits for targets that the other sender inserts, which begins when the schema is migrated. That builds
    # nine indexes, each after the transactions before it: on a busy machine more than the 15 seconds of then.
    sender = folder / "tests/chaos/sender.py"
    text = sender.read_text("utf-8")
    assert text.count(PATIENT_THEN) == 1
    sender.write_text(text.replace(PATIENT_THEN, "ABSENT: Final = 120.0"), "utf-8")
    return OldRelease(folder)
