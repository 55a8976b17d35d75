"""Why an instance waits, runs or has ended, as values: `Explanation` and its parts. Pure; `why` makes them."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final, Literal, get_args

import attrs

Reason = Literal[
    "done",
    "failed",
    "cancelled",
    "paused",
    "awaiting_approval",
    "awaiting_proceed",
    "awaiting_dependencies",
    "throttled",
    "lease_expired",
    "ready",
    "owner_lost",
    "executing",
    "scheduled",
    "queue_paused",
    "waiting_for_key",
    "unknown_step",
    "unserved",
    "awaiting_signal",
    "awaiting_children",
]
"""Why an instance is where it is. Where several are true, the first one in this order is the reason."""

REASONS_IN_ORDER: Final[tuple[Reason, ...]] = get_args(Reason)

BlockerKind = Literal[
    "instance",
    "child",
    "dependency",
    "signal",
    "person",
    "queue",
    "machine",
    "step",
    "node",
    "limit",
    "pause",
]
"""What a blocker is."""


@attrs.frozen(kw_only=True)
class Blocker:
    """One thing that an instance waits for."""

    kind: BlockerKind
    """`instance` is one of its partition key, `child` one of its own, `dependency` one that it comes after, `pause` is
    that of its queue or machine."""
    name: str
    """The id, or the name of the signal, queue, machine, step or node; of a pause the queue, or `queue/machine`."""
    text: str
    """What it has to do with the instance, for people."""
    id: int | None = None
    """The id of the instance, child or dependency."""
    because: Explanation | None = None
    """Of a child or a dependency: why it has not ended."""


@attrs.frozen(kw_only=True)
class NextAction:
    """Something that one can do about it."""

    text: str
    """What it does."""
    command: str | None = None
    """On the command line."""
    call: str | None = None
    """In Python."""


@attrs.frozen(kw_only=True)
class Explanation:
    """Why an instance waits, runs or has ended. See `durable_actors.explain`."""

    id: int
    """The instance."""
    reason: Reason
    """The first reason that holds, in the order of the reference."""
    summary: str
    """One sentence, for people. Its wording may change."""
    since: datetime | None
    """Since when: its end, its claim, its park, or when it became due."""
    until: datetime | None
    """When that ends by itself: it becomes due, its deadline passes, its lease expires. None: not by itself."""
    blockers: tuple[Blocker, ...] = ()
    """What it waits for, the most important first."""
    next_actions: tuple[NextAction, ...] = ()
    """What one can do about it."""
    evidence: Mapping[str, Any] = attrs.field(factory=dict[str, Any])
    """The facts behind it: status, step, rev, attempt, lease, hold, request, receipts, …"""
