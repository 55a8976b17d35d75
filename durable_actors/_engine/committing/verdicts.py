"""The verdict on an outcome: committed, stale, overruled or refused; and what a refusal blames. Pure."""

from __future__ import annotations

from typing import Final

import attrs
import psycopg

from durable_actors._store.commands import Request
from durable_actors._store.rows import Committed
from durable_actors.errors import Duplicate

_DATA: Final = frozenset({"22", "23", "54"})
"""SQLSTATE classes that blame the data: exceptions, constraints, limits."""
_RULES: Final = frozenset({"P0", "09", "27", "2F", "38", "39", "44"})
"""Classes that a user's trigger or function raises: RAISE EXCEPTION, failed assertions, WITH CHECK OPTION."""


@attrs.frozen
class Stale:
    """The fence refused the transition: this worker no longer owns the claim."""


@attrs.frozen
class Overruled:
    """The fence refused the transition: the claim is ours, but its node was asked to cancel the instance."""

    request: Request


@attrs.frozen
class Refused:
    """Postgres refused the data of this transition; nothing was written."""

    error: psycopg.Error | Duplicate


Verdict = Committed | Stale | Overruled | Refused

STALE: Final = Stale()


def blames_data(error: psycopg.Error) -> bool:
    """Whether Postgres or a rule of the user's refuses the transition's own data: then the error is for `handle`.

    All other errors blame the server or us, and the statement is tried again. An SQLSTATE that Postgres does not define
    comes from a rule, too (RAISE … USING ERRCODE).
    """
    code = error.sqlstate or ""
    if code[:2] in _DATA | _RULES:
        return True
    try:
        psycopg.errors.lookup(code)
    except KeyError:
        return len(code) == len("P0001") and code[:2] != "XX"
    return False
