"""What came of an outcome that was sent, and whom a refusal blames. Pure."""

from __future__ import annotations

from typing import Final

import attrs
import psycopg

from durable_actors._store.rows import Committed
from durable_actors.errors import Duplicate

_DATA: Final = frozenset({"22", "23", "54"})
"""SQLSTATE classes that blame the data: exceptions, constraints, limits."""
_RULES: Final = frozenset({"P0", "09", "27", "2F", "38", "39", "44"})
"""Classes of what a trigger or function of the user's says: RAISE EXCEPTION, failed assertions, WITH CHECK OPTION."""


@attrs.frozen
class Stale:
    """The fence refused the transition: this worker no longer owns the claim."""


@attrs.frozen
class Refused:
    """Postgres refused the data of this very transition; nothing was written."""

    error: psycopg.Error | Duplicate


Verdict = Committed | Stale | Refused

STALE: Final = Stale()


def blames_data(error: psycopg.Error) -> bool:
    """Whether the transition's own data are refused, by Postgres or by a rule of the user's: it is for `handle`.

    Everything else blames the server or us: try again. A code that Postgres does not have is a rule's, too
    (RAISE … USING ERRCODE).
    """
    code = error.sqlstate or ""
    if code[:2] in _DATA | _RULES:
        return True
    try:
        psycopg.errors.lookup(code)
    except KeyError:
        return len(code) == len("P0001") and code[:2] != "XX"
    return False
