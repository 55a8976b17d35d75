"""Shorter arrays for columns that have the same value, or null, in every row of a batch. Pure.

A batch goes to Postgres as one array per column. Writing an array here, and reading and unnesting it there, costs 0.1
µs per row each, and most columns of most batches have one value. The header of a statement lists the arrays that may be
short: unnest fills them up with nulls, and `coalesce(u.step, ($7::text[])[1])` takes the first value for all rows.
"""

from __future__ import annotations

from typing import TypeVar

T = TypeVar("T")


def one_for_all(values: list[T]) -> list[T]:
    """Only the first value, if all are equal."""
    return values[:1] if values.count(values[0]) == len(values) else values


def none_for_all(values: list[T | None]) -> list[T | None]:
    """An empty array, if all values are null."""
    return values if values.count(None) < len(values) else []
