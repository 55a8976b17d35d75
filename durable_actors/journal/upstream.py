"""Emitters of `expand.py`: a run that waits for what it comes after. Pure."""

from __future__ import annotations

from typing import cast

from durable_actors.journal.kinds import ResolvedData, RevivedData, UpstreamEndedData
from durable_actors.journal.moves import Move


def waits_again(move: Move) -> None:
    """A revived run waits for what it comes after."""
    hold = cast("RevivedData", move.data).hold
    if hold:
        move.add("hold_changed", {"hold": hold, "step": move.place["step"]})


def waits_on(move: Move) -> dict[str, int]:
    """Of a resumed run: what holds it now."""
    hold = cast("ResolvedData", move.data).hold
    return {"hold": hold} if hold else {}


def upstream_ended(move: Move) -> None:
    """Its attempt may run, or is claimed to end the run."""
    visible_at = cast("UpstreamEndedData", move.data).eligible_at
    move.add("upstream_ended", {"runnable_key": move.key, "visible_at": visible_at})
