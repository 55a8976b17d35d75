"""The views: each module has its pages, its actions, and nothing of other views. Here is the list of them."""

from __future__ import annotations

from typing import Final

from durable_actors.dashboard.desk import Action, Page
from durable_actors.dashboard.views import (
    approvals,
    audit,
    commands,
    instance,
    instances,
    limits,
    machines,
    nodes,
    overview,
    queues,
    schedules,
    triage,
)

PAGES: Final[tuple[Page, ...]] = (
    *overview.PAGES,
    *queues.PAGES,
    *instances.PAGES,
    *instance.PAGES,
    *approvals.PAGES,
    *triage.PAGES,
    *machines.PAGES,
    *limits.PAGES,
    *schedules.PAGES,
    *nodes.PAGES,
    *audit.PAGES,
)
"""Every page, in the order of the navigation."""
ACTIONS: Final[tuple[Action, ...]] = (
    *queues.ACTIONS,
    *commands.ACTIONS,
    *approvals.ACTIONS,
    *triage.ACTIONS,
    *limits.ACTIONS,
    *schedules.ACTIONS,
)
"""Every command that a page can give."""
