"""The wording of counts, durations and values in log lines, errors, the command line and the dashboard. Pure."""

from __future__ import annotations

import json


def counted(count: int, noun: str, plural: str | None = None) -> str:
    """Return the count with its noun: `1 step`, `2 steps`."""
    return f"{count} {noun if count == 1 else plural or noun + 's'}"


def seconds(value: float | None) -> str:
    """Format a duration: 0.4 s, 12 s, 5 min, 3 h, 2 d."""
    if value is None:
        return ""
    for unit, size in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if abs(value) >= 2 * size:
            return f"{value / size:.0f} {unit}"
    return f"{value:.1f} s" if abs(value) < 10 else f"{value:.0f} s"


def one_line(value: object, *, limit: int = 80) -> str:
    """Format a value for a table cell: printable, on one line, cut at `limit`."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    text = "".join(c if c.isprintable() else "\\n" if c == "\n" else f"\\x{ord(c):02x}" for c in text)
    return text if len(text) <= limit else text[: limit - 1] + "…"
