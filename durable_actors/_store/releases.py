"""Releases of this package: the schema version of each, and the features that nodes of an older one ignore. Pure.

While a deploy rolls, nodes of two releases share a database. The migrations keep it usable for the older one
(`works_with`). The older one does not know what is new: whoever starts such a thing says so while an old node lives
(`ignoring`, `feature_warning` in `_store/node.py`).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from typing import Final

import attrs

RELEASES: Final = {"0.1": 9, "0.2": 33}
"""Every minor release with its schema version: its newest migration. The last one is this package."""


def works_with(migration: int) -> int:
    """The oldest schema version whose code works with a database after this migration, unless its file says otherwise.

    The default rule is one minor release back: the schema version of the release before the migration's own.
    """
    return max((schema for schema in RELEASES.values() if schema < migration), default=0)


@attrs.frozen
class Feature:
    """Something that nodes of an older release ignore."""

    name: str
    """What it is, for people: it follows "which ignores"."""
    since: str
    """The minor release that brought it."""


COMMANDS: Final = Feature("commands to running steps", "0.2")
CANCELLED: Final = Feature("the status cancelled", "0.2")
HOLDS: Final = Feature("new reasons to hold a row", "0.2")
MOVES: Final = Feature("the count of claims in rev", "0.2")
CLOCK: Final = Feature("durable.now()", "0.2")
PAUSES: Final = Feature("pauses", "0.2")
DECISIONS: Final = Feature("decisions of people", "0.2")
GRAPHS: Final = Feature("children that come after others", "0.2")
SCHEDULES: Final = Feature("schedules", "0.2")
FAIRNESS: Final = Feature("fair queues", "0.2")
FEATURES: Final = (COMMANDS, CANCELLED, HOLDS, MOVES, CLOCK, PAUSES, DECISIONS, GRAPHS, SCHEDULES, FAIRNESS)
"""Every feature, in the order in which log lines name them. docs/how-to/deploy.md says what each means for a deploy."""


@attrs.frozen
class LiveNode:
    """A node that is alive, and the version that it runs."""

    incarnation: str
    """`locked_by` of its claims."""
    version: str | None
    """`durable_actors.__version__` there; None if it is not known."""

    def ignores(self, feature: Feature) -> bool:
        """Whether its release is older than the feature. A version that cannot be read counts as older."""
        return _minor(self.version) < _minor(feature.since)

    @property
    def ignored(self) -> list[str]:
        """The names of the features that it ignores."""
        return [feature.name for feature in FEATURES if self.ignores(feature)]


def older_nodes(nodes: Iterable[LiveNode]) -> list[str]:
    """One line for each older version that is alive: which nodes run it, and what they ignore."""
    by_version: defaultdict[str | None, list[LiveNode]] = defaultdict(list)
    for node in nodes:
        if node.ignored:
            by_version[node.version].append(node)
    lines: list[str] = []
    for version, several in sorted(by_version.items(), key=lambda item: _minor(item[0])):
        verb = "runs" if len(several) == 1 else "run"
        names = ", ".join(several[0].ignored)
        lines.append(f"{_named(several)} {verb} {_shown(version)}, which ignores: {names}")
    return lines


def ignoring(feature: Feature, nodes: Iterable[LiveNode]) -> str | None:
    """A warning for the answer of whoever uses this feature; None if every node that is alive knows it."""
    older = [node for node in nodes if node.ignores(feature)]
    if not older:
        return None
    verb = "ignores" if len(older) == 1 else "ignore"
    versions = ", ".join(sorted({_shown(node.version) for node in older}))
    return f"{_named(older)} ({versions}) {verb} {feature.name}: upgrade to {feature.since}"


_MOST_NAMES: Final = 5
_MINOR: Final = re.compile(r"(\d{1,9})\.(\d{1,9})(?!\d)", re.ASCII)


def _minor(version: str | None) -> tuple[int, int]:
    """Major and minor number. A pre-release has the features of its release."""
    match = _MINOR.match(version or "")
    return (int(match[1]), int(match[2])) if match else (-1, -1)


def _shown(version: str | None) -> str:
    return (version or "an unknown version")[:50]


def _named(nodes: list[LiveNode]) -> str:
    names = ", ".join(node.incarnation for node in nodes[:_MOST_NAMES])
    if len(nodes) == 1:
        return f"node {names}"
    more = len(nodes) - _MOST_NAMES
    return f"nodes {names}" + (f" and {more} more" if more > 0 else "")
