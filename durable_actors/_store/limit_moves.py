"""The moves of rows that use limits; `moves.py` has all moves."""

from __future__ import annotations

from typing import Final

from durable_actors._store.move_parts import EXECUTING, LIVE, RUNNABLE, Move
from durable_actors._store.move_rules import is_dropped, is_throttled, same_claim

LIMIT_MOVES: Final = (
    Move(
        name="throttled",
        meaning="it waits for a token or a slot of a limit",
        before=RUNNABLE,
        after=RUNNABLE,
        statements=("pick_instances", "pick_fair", "claim_next"),
        functions=("throttle_alike",),
        columns=frozenset({"hold", "limited_by"}),
        when=is_throttled,
    ),
    Move(
        name="dropped",
        meaning="a limit is full: it is offered, and whoever claims it ends it as cancelled",
        before=RUNNABLE,
        after=RUNNABLE,
        statements=("pick_instances", "pick_fair", "claim_next"),
        functions=("drop_rows",),
        columns=frozenset({"hold", "cancellation"}),
        when=is_dropped,
    ),
    Move(
        name="limited",
        meaning="with its outcome: the limits of the step that it enters",
        before=LIVE - EXECUTING,
        after=LIVE - EXECUTING,
        statements=("write_limits", "complete"),
        columns=frozenset({"rate_limit"}),
        when=same_claim,
    ),
)
