"""Rows as Python values, made by psycopg's loaders in C: for statements that return hundreds of rows.

A column at a time, that is a third of what it costs to copy bytes out one by one and to convert them in Python. The
adapters are our own: what an application registers with psycopg for itself changes nothing here.
"""

from __future__ import annotations

from typing import Any, Final

from psycopg import Connection, abc, pq
from psycopg.adapt import AdaptersMap, Loader, Transformer
from psycopg.types.bool import BoolLoader
from psycopg.types.numeric import IntLoader
from psycopg.types.string import TextLoader

_LOADERS: Final[dict[type[Loader], tuple[int, ...]]] = {
    IntLoader: (20, 21, 23),  # int8, int2, int4
    BoolLoader: (16,),
    TextLoader: (
        0,
    ),  # everything else: text, uuid, timestamptz, jsonb, arrays and enums as the server writes them
}


class _Adapters:
    """What a Transformer wants to know: an `AdaptContext` without a connection, that is in UTF-8."""

    def __init__(self) -> None:
        self.adapters = AdaptersMap()
        self.connection: Connection[Any] | None = None
        for loader, oids in _LOADERS.items():
            for oid in oids:
                self.adapters.register_loader(oid, loader)


_ADAPTERS: Final = _Adapters()
_SPARE: Final[list[abc.Transformer]] = []
"""Not in use now. One knows the loaders of the types that it has met; to find them again is half of a short result."""


def typed_rows(result: pq.abc.PGresult) -> list[tuple[Any, ...]]:
    """All rows: numbers as int, booleans as bool, NULL as None, anything else as text."""
    try:
        transformer = _SPARE.pop()  # in one step: other threads may do the same
    except IndexError:
        transformer = Transformer(_ADAPTERS)
    transformer.set_pgresult(result)
    rows = transformer.load_rows(0, result.ntuples, tuple)
    transformer.set_pgresult(None)  # it would keep the result alive
    _SPARE.append(transformer)
    return rows
