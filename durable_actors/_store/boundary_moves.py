"""The moves of rows that wait for a person, when that ends; `moves.py` has all moves."""

from __future__ import annotations

from functools import partial
from typing import Final

from durable_actors._store.move_parts import FAILED, FAULT, RUNNABLE, SIGNAL, WAKE, Move
from durable_actors._store.move_rules import is_decided

BOUNDARY_MOVES: Final = (
    Move(
        name="proceeded",
        meaning="the command `proceed`: the boundary of a `Pause` is resolved",
        before=SIGNAL,
        after=RUNNABLE,
        statements=("resolve_boundary",),
        columns=WAKE | {"manual"},
        when=partial(is_decided, "proceeded"),
    ),
    Move(
        name="approved",
        meaning="the command `approve`: the boundary of an `Approval` is resolved",
        before=SIGNAL,
        after=RUNNABLE,
        statements=("resolve_boundary",),
        columns=WAKE | {"manual"},
        when=partial(is_decided, "approved"),
    ),
    Move(
        name="rejected",
        meaning="the command `reject`; failed if the `Approval` names no step for that",
        before=SIGNAL,
        after=RUNNABLE | FAILED,
        statements=("resolve_boundary",),
        columns=WAKE | FAULT | {"manual"},
        when=partial(is_decided, "rejected"),
    ),
    Move(
        name="timed_out",
        meaning="nobody decided in time: as if it were rejected, unless the `Approval` names a step for that",
        before=SIGNAL,
        after=RUNNABLE | FAILED,
        statements=("expire_awaits", "claim_next"),
        columns=WAKE | FAULT | {"manual"},
        when=partial(is_decided, "timed_out"),
    ),
)
