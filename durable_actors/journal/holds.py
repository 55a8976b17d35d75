"""Facts of moves that change why a row is not offered to picks. Pure."""

from __future__ import annotations

from typing import Final, cast

from durable_actors.journal.kinds import ThrottledData
from durable_actors.journal.moves import Move

_HOLDS: Final = {"offered": 0, "limited": 0, "dropped": 0, "held": 1, "shelved": 2, "throttled": 3}


def hold_changed(move: Move) -> None:
    """The row is offered, or waits for what its kind says."""
    hold = _HOLDS[move.record.kind]
    fact = {"hold": hold, "step": move.place["step"]}
    if move.record.kind == "throttled":
        fact["limited_by"] = cast("ThrottledData", move.data).limited_by
    if move.record.kind == "dropped":  # recorded where the moves before it may not be
        fact |= {**move.place, "runnable_key": move.key}
    move.add("hold_changed", fact)
