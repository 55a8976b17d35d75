"""Instants as Postgres writes them, with datestyle ISO."""

from __future__ import annotations

from datetime import datetime


def read_instant(value: bytes | None) -> datetime | None:
    """Read a timestamptz; its zone is written as `+00`, which Python 3.11 wants as `+00:00`."""
    if value is None:
        return None
    text = value.decode()
    return datetime.fromisoformat(text + ":00" if text[-3] in "+-" else text)
