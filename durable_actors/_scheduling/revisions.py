"""Whose definition of a schedule counts while nodes of several versions of the code run. Pure.

Every definition has a revision, a hash. The database keeps the revisions that it has seen, newest last; the last one
counts. A revision that it has not seen is newer. One that it has seen comes from older code: during a rolling deploy an
old node that restarts must not bring the old definition back, but after a rollback it must. The difference is whether a
node with a newer revision is alive.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

KEPT: Final = 50
"""Revisions that are kept."""


def may_declare(mine: str, seen: Sequence[str], live: Collection[str]) -> bool:
    """Whether this node's revision is to be the current one. `live` are those of the nodes that are alive."""
    if not seen or seen[-1] == mine:
        return not seen
    if mine not in seen:
        return True
    newer = seen[len(seen) - seen[::-1].index(mine) :]
    return not any(each in live for each in newer)


def with_revision(mine: str, seen: Sequence[str]) -> list[str]:
    """The revisions after this one has become the current one."""
    return [*(each for each in seen if each != mine), mine][-KEPT:]
