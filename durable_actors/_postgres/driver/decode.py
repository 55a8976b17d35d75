"""Columns as Python values: the inverse of `encode`. Pure.

`decode_*` reads single columns in Postgres' text format. `typed_rows` reads whole results with psycopg's loaders in C,
a column at a time: for statements that return hundreds of rows this costs a third of copying bytes out one by one and
converting them in Python. The adapters are our own, so what an application registers with psycopg has no effect here.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Any, Final

from psycopg import Connection, abc, pq
from psycopg.adapt import AdaptersMap, Loader, Transformer
from psycopg.types.bool import BoolLoader
from psycopg.types.numeric import IntLoader
from psycopg.types.string import TextLoader

# One element of an array literal: quoted (with backslash escapes), or bare up to the next comma.
_ELEMENT: Final = re.compile(r'"((?:[^"\\]|\\.)*)"|([^,{}]+)', re.DOTALL)
_ESCAPE: Final = re.compile(r"\\(.)", re.DOTALL)

_MIN_INSTANT: Final = datetime.min.replace(tzinfo=UTC)
_MAX_INSTANT: Final = datetime.max.replace(tzinfo=UTC)


def decode_text_array(value: bytes) -> tuple[str, ...]:
    """Read a one-dimensional text array literal without NULLs: `{a,"b c"}`."""
    return tuple(
        _ESCAPE.sub(r"\1", match[1]) if match[1] is not None else match[2]
        for match in _ELEMENT.finditer(value.decode()[1:-1])
    )


def decode_int_array(value: bytes) -> tuple[int, ...]:
    """Read a one-dimensional array of numbers without NULLs: `{1,2}`."""
    return tuple(int(each) for each in value[1:-1].split(b",")) if len(value) > 2 else ()


def decode_nullable_array(literal: str) -> list[str | None]:
    """Read an array literal as `encode` writes it: an unquoted NULL is None."""
    return [
        _ESCAPE.sub(r"\1", match[1]) if match[1] is not None else None if match[2] == "NULL" else match[2]
        for match in _ELEMENT.finditer(literal[1:-1])
    ]


def decode_instant(value: bytes | None) -> datetime | None:
    """Read a timestamptz, written with datestyle ISO. Its zone is `+00`, and Python 3.11 needs `+00:00`.

    Instants that a `datetime` cannot hold (infinity, years before 1 and after 9999: anybody can write them with SQL)
    become the first or the last one that it can. Raising instead would end every step and listing that reads the row.
    """
    if value is None:
        return None
    text = value.decode()
    try:
        return datetime.fromisoformat(text + ":00" if text[-3] in "+-" else text)
    except ValueError:
        past = text.startswith("-") or text.endswith("BC")
        return _MIN_INSTANT if past else _MAX_INSTANT


_LOADERS: Final[dict[type[Loader], tuple[int, ...]]] = {
    IntLoader: (20, 21, 23),  # int8, int2, int4
    BoolLoader: (16,),
    # Every other type is text as the server writes it: text, uuid, timestamptz, jsonb, arrays, enums.
    TextLoader: (0,),
}


class _Adapters:
    """The `AdaptContext` of a Transformer: no connection, which means UTF-8."""

    def __init__(self) -> None:
        self.adapters = AdaptersMap()
        self.connection: Connection[Any] | None = None
        for loader, oids in _LOADERS.items():
            for oid in oids:
                self.adapters.register_loader(oid, loader)


_ADAPTERS: Final = _Adapters()
_SPARE: Final[list[abc.Transformer]] = []
"""Transformers that are not in use. A transformer caches the loaders of the types that it has met; finding them again
would take half the time of a short result."""


def typed_rows(result: pq.abc.PGresult) -> list[tuple[Any, ...]]:
    """All rows: numbers as int, booleans as bool, NULL as None, anything else as text."""
    try:
        transformer = _SPARE.pop()  # atomic: other threads may do the same
    except IndexError:
        transformer = Transformer(_ADAPTERS)
    transformer.set_pgresult(result)
    rows = transformer.load_rows(0, result.ntuples, tuple)
    transformer.set_pgresult(None)  # it would keep the result alive
    _SPARE.append(transformer)
    return rows
