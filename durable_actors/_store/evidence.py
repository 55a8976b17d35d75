"""The facts under an explanation, as `why` prints them and programs read them. Pure."""

from __future__ import annotations

from typing import Any

import attrs

from durable_actors._store.holds import REASONS
from durable_actors._store.observe import InstanceDetails
from durable_actors._store.parked import level_name
from durable_actors._store.read import Instance


def evidence_of(instance: Instance, around: InstanceDetails, machine: str) -> dict[str, Any]:
    """What was read of an instance, by name."""
    held = REASONS.get(instance.hold)
    request = around.request
    return {
        "status": instance.status,
        "machine": machine,
        "step": instance.step,
        "queue": instance.queue,
        "priority": instance.priority,
        "partition_key": instance.partition_key,
        "fair_key": None if around.fair is None else around.fair[0],
        "rev": around.rev,
        "visit": instance.visit,
        "attempt": instance.attempt,
        "max_attempts": instance.max_attempts,
        "crashes": instance.crashes,
        "hold": None if held is None else held.name,
        "eligible_at": instance.eligible_at,
        "locked_by": instance.locked_by,
        "lease_expires_at": instance.lease_expires_at,
        "lease_left": around.lease_left,
        "children_pending": around.children_pending,
        "children": dict(around.children),
        "unread": dict(around.unread),
        "last_error": instance.last_error,
        "request": None if request is None else attrs.asdict(request),
        "cancellation": None if instance.cancellation is None else attrs.asdict(instance.cancellation),
        "cascade": around.cascade,
        "pauses": [attrs.asdict(each) for each in around.pauses],
        "boundary": None if instance.boundary is None else attrs.asdict(instance.boundary),
        "decision": None if instance.decision is None else attrs.asdict(instance.decision),
        "receipts": around.receipts,
        "journal": level_name(around.journal),
        "parent": instance.parent_id,
        "rerun_of": instance.rerun_of,
        "fingerprint": around.fingerprint,
        "other_definition": around.definition,
    }
