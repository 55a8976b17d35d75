"""The wording of counts and durations in log lines, errors and the command line. Pure."""

from __future__ import annotations


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
