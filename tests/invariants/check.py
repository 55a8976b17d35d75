r"""The twelve invariants, each a pure function over the history of a run: START HERE.

::

    install_audit(dsn)                          # before the run: triggers record every change
    ...                                         # workers whose steps write an `EffectLog`; faults; more faults
    history = read_history(dsn, [log.path], lease=2.0, reap_interval=0.5)
    assert not check(history), "\n".join(map(str, check(history)))

A checker never guesses: what the evidence does not decide is no violation. Steps run at least once, so a run that
nothing came of is none; what a step does is its own business, what is committed of it is the engine's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from os import PathLike
from types import MappingProxyType
from typing import Any, Final, Literal

import psycopg
from tests.invariants.audit import fetch_changes, fetch_clock, fetch_rows, fetch_signals
from tests.invariants.checks_effects import i1_commit_before_proceed, i5_inside_the_trust_window
from tests.invariants.checks_keys import (
    i9_one_step_per_key,
    i10_unique_keys_are_unique,
    i11_barriers_open_once,
)
from tests.invariants.effect_log import read_effects
from tests.invariants.history import History, Violation
from tests.invariants.ownership import (
    i2_one_live_claim,
    i3_fences_only_grow,
    i4_stale_writes_change_nothing,
    i8_terminal_rows_never_change,
    i12_nothing_without_an_owner,
)
from tests.invariants.waiting import i6_consumed_by_what_saw_it, i7_no_wake_up_is_lost

__all__ = [
    "INVARIANTS",
    "Checker",
    "History",
    "Violation",
    "check",
    "i1_commit_before_proceed",
    "i2_one_live_claim",
    "i3_fences_only_grow",
    "i4_stale_writes_change_nothing",
    "i5_inside_the_trust_window",
    "i6_consumed_by_what_saw_it",
    "i7_no_wake_up_is_lost",
    "i8_terminal_rows_never_change",
    "i9_one_step_per_key",
    "i10_unique_keys_are_unique",
    "i11_barriers_open_once",
    "i12_nothing_without_an_owner",
    "read_history",
]

Checker = Callable[[History], list[Violation]]

INVARIANTS: Final[Mapping[str, Checker]] = MappingProxyType(
    {
        "I1": i1_commit_before_proceed,
        "I2": i2_one_live_claim,
        "I3": i3_fences_only_grow,
        "I4": i4_stale_writes_change_nothing,
        "I5": i5_inside_the_trust_window,
        "I6": i6_consumed_by_what_saw_it,
        "I7": i7_no_wake_up_is_lost,
        "I8": i8_terminal_rows_never_change,
        "I9": i9_one_step_per_key,
        "I10": i10_unique_keys_are_unique,
        "I11": i11_barriers_open_once,
        "I12": i12_nothing_without_an_owner,
    }
)
"""By number."""


def check(history: History) -> list[Violation]:
    """Every violation of every invariant; of one event there may be several."""
    return [violation for checker in INVARIANTS.values() for violation in checker(history)]


def read_history(
    dsn: str,
    effect_paths: Iterable[str | PathLike[str]] = (),
    *,
    lease: float,
    reap_interval: float,
    margin: float = 1.0,
    patience: float | None = None,
    ended: float | None = None,
    late_commit: Literal["accept", "reject"] = "accept",
    operator: bool = False,
    schema: str = "durable",
) -> History:
    """Read what is known of a run. Workers may still be at it: what is read is one consistent moment.

    `lease`, `reap_interval` and `late_commit` are the options of the workers, `margin` the seconds by which a loaded
    machine may be late. `ended` is when the workers stopped serving, as `select extract(epoch from clock_timestamp())`
    told then; None: they still do. `patience` is how long a due row may wait in a quiet queue; None: a lease, a reap
    interval and two margins. `operator`: somebody retried failed instances by hand.
    """
    effects = read_effects(*effect_paths)  # first: what they tell of was committed before
    with psycopg.connect(dsn) as connection:
        clock = fetch_clock(connection, schema)
        connection.rollback()
        connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        return History(
            changes=fetch_changes(connection, schema),
            effects=effects,
            rows=fetch_rows(connection, schema),
            signals=fetch_signals(connection, schema),
            clock=clock,
            lease=lease,
            reap_interval=reap_interval,
            margin=margin,
            patience=lease + reap_interval + 2 * margin if patience is None else patience,
            ended=_now(connection) if ended is None else ended,
            late_commit=late_commit,
            operator=operator,
        )


def _now(connection: psycopg.Connection[Any]) -> float:
    """When this transaction began: what is due then, and what was committed by then, belong together."""
    row = connection.execute("select extract(epoch from now())::float8").fetchone()
    assert row is not None
    return float(row[0])
