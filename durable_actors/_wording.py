"""How counts read in log lines, errors and the command line. Pure."""

from __future__ import annotations


def counted(count: int, noun: str, plural: str | None = None) -> str:
    """`1 step`, `2 steps`."""
    return f"{count} {noun if count == 1 else plural or noun + 's'}"
