"""What is wrong with a parked instance that a hand has changed: signals that woke nobody, lost children. Pure."""

from __future__ import annotations

from collections.abc import Iterator

import attrs

from durable_actors._store.boundaries import Boundary
from durable_actors._store.observe import InstanceDetails
from durable_actors._wording import counted
from durable_actors.journal.kinds import LEVELS


def awaited(name: str, around: InstanceDetails) -> str:
    """What is to be said about a signal that it awaits."""
    if name in around.lost:
        return f"a signal named {name!r} is in its inbox and did not wake it: `durable-actors recover`"
    if around.unread.get(name):
        return f"it has kept the signals named {name!r} that it was handed, and no other one has arrived"
    return f"no signal named {name!r} has arrived"


@attrs.frozen
class Barrier:
    """What is wrong with a barrier, if anything is."""

    gone: int = 0
    """So many of the children that it waits for have no row."""
    miscounted: bool = False

    @property
    def text(self) -> str:
        """For the summary."""
        gone = f"; {counted(self.gone, 'child has', 'children have')} no row: `durable-actors verify`"
        wrong = "; that cannot be right: `durable-actors recover` recounts them"
        return (gone if self.gone else "") + (wrong if self.miscounted else "")


def barrier_of(around: InstanceDetails) -> Barrier:
    """What is wrong with the barrier that it waits at."""
    if around.barrier is None:
        return Barrier()
    rows, live = around.barrier
    pending, total = around.children_pending, around.children_total
    lacking = max(total - rows, 0)
    # A barrier may wait for fewer than are alive, if its count= says so.
    gone = min(lacking, max(pending - live, 0))
    return Barrier(gone, pending <= 0 or pending > live + lacking)


def repairs_of(around: InstanceDetails, *, parked: bool) -> Iterator[tuple[str, str]]:
    """What one can do about it: what it does, and the verb."""
    barrier = barrier_of(around) if parked and not around.awaits else Barrier()
    if around.lost or barrier.miscounted:
        yield "correct what waits although it need not", "recover"
    if barrier.gone:
        yield "find the children whose row is gone, and rebuild them, if they were recorded", "verify"


def level_name(stored: int) -> str:
    """The name of a journal level; the number, if it is none."""
    return LEVELS[stored] if 0 <= stored < len(LEVELS) else str(stored)


def asked(boundary: Boundary, deadline: str) -> str:
    """The summary of an instance that waits for a person."""
    title = f" ({boundary.title})" if boundary.title else ""
    if boundary.kind == "pause":
        then = f"then runs step {boundary.then!r}"
        return f"its step has paused it{title}: it waits until somebody lets it proceed, {then}"
    rejected = f"step {boundary.on_reject!r} runs" if boundary.on_reject else "it fails"
    text = f"it waits for an approval{title}, then runs step {boundary.then!r}; if it is rejected, {rejected}"
    if not deadline:
        return text
    late = f"step {boundary.on_timeout!r} runs" if boundary.on_timeout else rejected
    if deadline.startswith(","):  # it has passed
        return f"{text}; nobody has decided{deadline}, then {late}"
    return f"{text}; if nobody decides{deadline}, {late}"


def ways_of(boundary: Boundary) -> Iterator[tuple[str, str]]:
    """What one can do about it: what it does, and the verb."""
    if boundary.kind == "pause":
        yield "let it proceed", "proceed"
    else:
        yield "approve it", "approve"
        yield "reject it", "reject"
