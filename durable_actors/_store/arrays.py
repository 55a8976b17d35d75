"""Columns of a batch that say the same for every row, or nothing. Pure.

A batch goes to Postgres as one array per column. To write one here, and to read and unnest it there, costs 0.1 µs a row
each, and most columns of most batches are the same from row to row. The statements say which of their arrays may be
short: unnest fills up with nulls, and `coalesce(u.step, ($7::text[])[1])` takes the first for all.
"""

from __future__ import annotations

from typing import TypeVar

T = TypeVar("T")


def one_for_all(values: list[T]) -> list[T]:
    """The first, when all are the same."""
    return values[:1] if values.count(values[0]) == len(values) else values


def none_for_all(values: list[T | None]) -> list[T | None]:
    """Nothing, when all are null."""
    return values if values.count(None) < len(values) else []
