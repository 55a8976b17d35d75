"""What a feeder tells the observers. Pure."""

from __future__ import annotations

from durable_actors._store.rows import Claim, Picked
from durable_actors.telemetry import PartitionContended, Picked as PickedEvent


def pick_event(queue: str, picked: Picked, *, wanted: int, seconds: float) -> PickedEvent:
    """A pick and what became of its window."""
    return PickedEvent(
        queue=queue,
        wanted=wanted,
        claimed=len(picked.claims),
        held=sum(row.what == "h" for row in picked.seen),
        shelved=sum(row.what == "s" for row in picked.seen),
        left=sum(row.left for row in picked.seen),
        seconds=seconds,
    )


def contended_event(claim: Claim) -> PartitionContended:
    """A claim went back, for its key is busy elsewhere."""
    return PartitionContended(
        id=claim.id, machine=claim.fsm, version=claim.version, step=claim.step, attempt=claim.attempt,
        visit=claim.visit, queue=claim.queue, key=claim.partition_key or "",
    )  # fmt: skip
