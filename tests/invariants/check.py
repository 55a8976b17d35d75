r"""The seventeen invariants, each a pure function over the history of a run: START HERE.

::

    install_audit(dsn)                  # before the run: triggers record every change
    ...                                 # run workers whose steps write an `EffectLog`, and inject faults
    history = read_history(dsn, [log.path], lease=2.0, reap_interval=0.5)
    assert not check(history), "\n".join(map(str, check(history)))

A checker never guesses: if the evidence does not decide, there is no violation. Steps run at least once, so a run
without an outcome is lawful. The checkers judge what the engine commits, not what a step does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from os import PathLike
from types import MappingProxyType
from typing import Any, Final, Literal

import psycopg
from tests.invariants import commands, graphs, limits, ownership, schedules, waiting
from tests.invariants.audit import (
    fetch_changes,
    fetch_clock,
    fetch_needs,
    fetch_receipts,
    fetch_rows,
    fetch_schedules,
    fetch_signals,
    fetch_slots,
)
from tests.invariants.effect_log import read_effects
from tests.invariants.history import History, Violation

Checker = Callable[[History], list[Violation]]

INVARIANTS: Final[Mapping[str, Checker]] = MappingProxyType(
    {
        "I1": ownership.i1_commit_before_proceed,
        "I2": ownership.i2_one_live_claim,
        "I3": ownership.i3_fences_only_grow,
        "I4": ownership.i4_stale_writes_change_nothing,
        "I5": ownership.i5_inside_the_trust_window,
        "I6": waiting.i6_consumed_by_what_saw_it,
        "I7": waiting.i7_no_wake_up_is_lost,
        "I8": ownership.i8_terminal_rows_never_change,
        "I9": waiting.i9_one_step_per_key,
        "I10": waiting.i10_unique_keys_are_unique,
        "I11": waiting.i11_barriers_open_once,
        "I12": ownership.i12_nothing_without_an_owner,
        "I13": commands.i13_commands_do_what_they_answered,
        "I14": commands.i14_retention_removes_nothing_that_lives,
        "I15": graphs.i15_dependents_run_after_what_they_need,
        "I16": schedules.i16_every_slot_is_accounted_for,
        "I17": limits.i17_slots_are_never_exceeded,
    }
)
"""By number."""


def check(history: History) -> list[Violation]:
    """Every violation of every invariant. One event may cause several."""
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
    retention: float = 86_400.0,
    snapshots: bool = False,
    schema: str = "durable",
) -> History:
    """Read the evidence of a run. Workers may still be running: the result is one consistent moment.

    `lease`, `reap_interval` and `late_commit` are the options of the workers. `margin` is how many seconds late a
    loaded machine may be. `ended` is the time (server clock, `select extract(epoch from clock_timestamp())`) at which
    the workers stopped serving; None: they still serve. `patience` is how long a due row may wait in a quiet queue;
    None: a lease, a reap interval and two margins. `operator`: failed instances were retried by hand. `retention`: how
    long the workers keep what has ended, at least. `snapshots`: they shorten long histories.
    """
    effects = read_effects(*effect_paths)  # first, so that the commits which they rely on are in the audit
    with psycopg.connect(dsn) as connection:
        clock = fetch_clock(connection, schema)
        connection.rollback()
        connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        return History(
            changes=fetch_changes(connection, schema),
            effects=effects,
            rows=fetch_rows(connection, schema),
            signals=fetch_signals(connection, schema),
            needs=fetch_needs(connection, schema),
            receipts=fetch_receipts(connection, schema),
            schedules=fetch_schedules(connection, schema),
            slots=fetch_slots(connection, schema),
            clock=clock,
            lease=lease,
            reap_interval=reap_interval,
            margin=margin,
            patience=lease + reap_interval + 2 * margin if patience is None else patience,
            ended=_now(connection) if ended is None else ended,
            late_commit=late_commit,
            operator=operator,
            retention=retention,
            snapshots=snapshots,
        )


def _now(connection: psycopg.Connection[Any]) -> float:
    """The begin of this transaction: its snapshot contains what was committed by then, so it decides what is due."""
    row = connection.execute("select extract(epoch from now())::float8").fetchone()
    assert row is not None
    return float(row[0])
