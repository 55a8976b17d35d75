"""The programs of workers in other languages: where one is missing, its test is left out, and the summary says so."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples" / "other_languages"
NODE_PATH = os.pathsep.join(
    [str(Path(sys.prefix) / "node" / "node_modules"), os.environ.get("NODE_PATH", "")]
)
"""Where `make` installs the package pg, and where else the user has it."""


@cache
def missing() -> dict[str, str]:
    """Tests that cannot run here, each with the reason."""
    found: dict[str, str] = {}
    if shutil.which("bash") is None or shutil.which("psql") is None:
        found["test_bash_worker.py"] = "there is no bash or psql here"
    if shutil.which("node") is None:
        found["test_node_worker.py"] = "there is no node here"
    elif _node("require('pg')"):
        found["test_node_worker.py"] = "node has no package pg here (npm install pg)"
    return found


def _node(code: str) -> int:
    environ = {**os.environ, "NODE_PATH": NODE_PATH}
    return subprocess.run(["node", "-e", code], env=environ, capture_output=True, check=False).returncode
