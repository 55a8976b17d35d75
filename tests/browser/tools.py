"""The browser of these tests, and what is missing for them."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from pathlib import Path

AXE = Path(sys.prefix) / "node" / "node_modules" / "axe-core" / "axe.min.js"


def chromium() -> str | None:
    """The program; Debian calls it chromium."""
    return shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def missing() -> str | None:
    """Why these tests cannot run; None if they can."""
    if importlib.util.find_spec("playwright") is None:
        return "playwright is not installed"
    if chromium() is None:
        return "no Chromium was found (apt-get install chromium)"
    if not AXE.exists():
        return "axe-core is not installed (make test installs it where npm is)"
    return None
