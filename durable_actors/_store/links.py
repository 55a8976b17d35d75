"""Which children come after which, by their positions; the columns that say it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import attrs

from durable_actors.machine import InsertPlan

NEEDS: Final = 1
"""The bit of `links` of a child that comes after others."""
FEEDS: Final = 2
"""The bit of `links` of a child that others come after."""


@attrs.frozen
class Graph:
    """Which children come after which. Each field has one entry per plan."""

    keys: Sequence[str | None]
    """What the child is called among them; None: nothing, and none comes after it."""
    needs: Sequence[tuple[int, ...]]
    """The positions of those that it comes after."""
    any_end: Sequence[bool]
    """Whether it runs however those ended; otherwise all must be done."""


@attrs.frozen
class Links:
    """Columns of children in a graph: one entry per plan."""

    keys: Sequence[str | None]
    """`child_key`."""
    links: Sequence[int | None]
    """`links`: whether it comes after others, and whether others come after it; None: neither."""
    feeds: Sequence[Sequence[int]] = ()
    """The positions of those that come after it."""

    def part(self, first: int, end: int) -> Links:
        """Those of some plans."""
        return Links(self.keys[first:end], self.links[first:end])

    def only(self, places: Sequence[int]) -> Links:
        """Those at these positions."""
        if len(places) == len(self.keys):
            return self
        return Links([self.keys[at] for at in places], [self.links[at] for at in places])

    def firm(self, plans: Sequence[InsertPlan]) -> Sequence[InsertPlan]:
        """The plans: a child that others come after must not be left out because its unique key is occupied."""
        return [
            attrs.evolve(plan, on_duplicate="raise")
            if plan.unique_key is not None
            and plan.on_duplicate == "skip"
            and links is not None
            and links & FEEDS
            else plan
            for plan, links in zip(plans, self.links, strict=True)
        ]


def links_of(graph: Graph) -> Links:
    """The columns of the children of a graph."""
    feeds: list[list[int]] = [[] for _ in graph.needs]
    for position, needs in enumerate(graph.needs):
        for each in needs:
            feeds[each].append(position)
    links = [
        ((NEEDS if needs else 0) | (FEEDS if fed else 0)) or None
        for needs, fed in zip(graph.needs, feeds, strict=True)
    ]
    return Links(graph.keys, links, feeds)
