"""Instants as Postgres writes them, with datestyle ISO."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Final

_FIRST: Final = datetime.min.replace(tzinfo=UTC)
_LAST: Final = datetime.max.replace(tzinfo=UTC)


def read_instant(value: bytes | None) -> datetime | None:
    """Read a timestamptz; its zone is written as `+00`, which Python 3.11 wants as `+00:00`.

    What Python has no datetime for (infinity, years before 1 and after 9999: SQL is open to every hand) becomes the
    first or the last one that it has. Raised instead, one such row would end every step and listing that meets it.
    """
    if value is None:
        return None
    text = value.decode()
    try:
        return datetime.fromisoformat(text + ":00" if text[-3] in "+-" else text)
    except ValueError:
        past = text.startswith("-") or text.endswith("BC")
        return _FIRST if past else _LAST
