"""Tables of a few rows each: limits, levels of their keys, what waits for them; schedules, and their records.

A transaction writes beside what is committed (`SmallTables`, a part of `tables.Tx`); their locks have names.
"""

from __future__ import annotations

from typing import Any

import attrs

Name = tuple[str, Any]
"""A table, and a key in it."""


@attrs.frozen
class LimitRow:
    """A row of limits."""

    interval: float | None
    """Seconds for one token."""
    burst: float
    slots: int | None
    revision: str | None = None


@attrs.frozen
class Level:
    """A row of limit_keys. Instants are microseconds of the server's clock."""

    tat: int
    at: int
    blocked: int | None = None


class SmallTables:
    """The part of a transaction that writes them. None is a row that is deleted."""

    tables: Any

    def __init__(self) -> None:
        self._small: dict[Name, Any] = {}

    def lock(self, number: Any) -> None:
        raise NotImplementedError

    def is_locked(self, number: Any) -> bool:
        raise NotImplementedError

    def read(self, table: str, key: Any) -> Any:
        """A row, as this transaction sees it."""
        return self._small.get((table, key), self.tables.small.get((table, key)))

    def read_all(self, table: str) -> dict[Any, Any]:
        """All rows of a table, by key, in its order."""
        both = {**self.tables.small, **self._small}
        found = {key: row for (name, key), row in both.items() if name == table and row is not None}
        return {key: found[key] for key in sorted(found)}

    def put(self, table: str, key: Any, row: Any) -> None:
        """Write a row, or delete it. The caller has its lock, if it needs one."""
        self._small[table, key] = row

    def try_lock(self, name: str, key: Any) -> bool:
        """An advisory lock until the end of the transaction; False: somebody else has it."""
        if self.is_locked((name, key)):
            return False
        self.lock((name, key))
        return True

    def commit_small(self) -> None:
        for name, row in self._small.items():
            if row is None:
                self.tables.small.pop(name, None)
            else:
                self.tables.small[name] = row
