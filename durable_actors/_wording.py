"""The wording of counts in log lines, errors and the command line. Pure."""

from __future__ import annotations


def counted(count: int, noun: str, plural: str | None = None) -> str:
    """Return the count with its noun: `1 step`, `2 steps`."""
    return f"{count} {noun if count == 1 else plural or noun + 's'}"
