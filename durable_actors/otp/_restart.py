"""Whom to restart, when, and when to give up. Pure: values in, values out, time is an argument.

The rules are OTP's (`supervisor.erl`), and two of ours:

* a restart may be delayed by a `Backoff`, so children can be *due* (ended, to be started later);
* a child that lived for `Backoff.reset_after` starts its back-off from the beginning.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, assert_never

import attrs

from durable_actors.otp._exit import Error, ExitReason, Normal, Shutdown

RestartType = Literal["permanent", "transient", "temporary"]
"""permanent: always restarted · transient: only after an Error · temporary: never."""

Strategy = Literal["one_for_one", "rest_for_one", "one_for_all"]
"""Who is restarted with a failed child: nobody · those started after it · everybody."""

AutoShutdown = Literal["never", "any_significant", "all_significant"]
"""Whether the end of significant children ends their supervisor."""


@attrs.frozen(kw_only=True)
class Backoff:
    """How long to wait before a restart: the first one is immediate, then doubling up to a ceiling."""

    initial: float = 0.1
    """Seconds before the second restart in a row."""
    factor: float = 2.0
    """Growth per further restart."""
    maximum: float = 10.0
    """Ceiling in seconds."""
    reset_after: float = 10.0
    """A child that lived so long has recovered: its next failure counts as the first."""

    def delay(self, streak: int) -> float:
        """Seconds to wait before restart number `streak` in a row (1 is the first)."""
        if streak <= 1:
            return 0.0
        # Beyond 64 doublings a float power could overflow; the ceiling was reached long before.
        return min(self.maximum, self.initial * self.factor ** min(streak - 2, 64))

    def next_streak(self, streak: int, *, lived: float) -> int:
        """The number of restarts in a row, after an incarnation that lived for `lived` seconds."""
        return 1 if lived >= self.reset_after else streak + 1


@attrs.frozen
class Sibling:
    """What a decision needs to know of a child."""

    restart: RestartType
    significant: bool = False
    status: Literal["alive", "due", "ended"] = "alive"
    """alive: runs, starts or stops · due: waits for its restart · ended: will not run by itself."""


@attrs.frozen
class Leave:
    """The child stays down; nobody else is touched."""


@attrs.frozen
class StopSupervisor:
    """A significant child ended: the supervisor ends, too (with Shutdown)."""


@attrs.frozen
class GiveUp:
    """Too many restarts: the supervisor fails."""

    restarts: int
    """How many would have happened within the period, this one included."""


@attrs.frozen
class RestartThese:
    """Stop `stop` in this order, then start `start` in this order. Indices in start order."""

    stop: tuple[int, ...]
    start: tuple[int, ...]
    drop: tuple[int, ...]
    """Those of `stop` that will not come back: temporary children."""
    history: tuple[float, ...]
    """The restart times to remember."""


Decision = Leave | StopSupervisor | GiveUp | RestartThese


def wants_restart(restart: RestartType, reason: ExitReason) -> bool:
    """Whether a child of this type is restarted after this exit."""
    match restart:
        case "permanent":
            return True
        case "temporary":
            return False
        case "transient":
            return is_crash(reason)
        case _:
            assert_never(restart)


def is_crash(reason: ExitReason) -> bool:
    """Whether this exit is a failure."""
    match reason:
        case Error():
            return True
        case Normal() | Shutdown():
            return False
        case _:
            assert_never(reason)


def affected(strategy: Strategy, failed: int, count: int) -> range:
    """The children (indices in start order) that are restarted when `failed` is."""
    match strategy:
        case "one_for_one":
            return range(failed, failed + 1)
        case "rest_for_one":
            return range(failed, count)
        case "one_for_all":
            return range(count)
        case _:
            assert_never(strategy)


def decide(
    siblings: Sequence[Sibling],
    failed: int,
    reason: ExitReason,
    *,
    strategy: Strategy,
    auto_shutdown: AutoShutdown,
    intensity: int,
    period: float,
    history: Sequence[float],
    now: float,
) -> Decision:
    """What to do now that child number `failed` has ended with `reason`.

    A restart older than `period` is forgotten; more than `intensity` within it is too many.
    """
    child = siblings[failed]
    if not wants_restart(child.restart, reason):
        return _after_end(siblings, failed, auto_shutdown)
    recent = (*(at for at in history if now - at <= period), now)
    if len(recent) > intensity:
        return GiveUp(restarts=len(recent))
    group = affected(strategy, failed, len(siblings))
    stop = tuple(i for i in reversed(group) if i != failed and siblings[i].status == "alive")
    return RestartThese(
        stop=stop,
        # A transient child that had ended well is started again with its group, as in OTP.
        start=tuple(i for i in group if siblings[i].restart != "temporary"),
        drop=tuple(i for i in stop if siblings[i].restart == "temporary"),
        history=recent,
    )


def _after_end(siblings: Sequence[Sibling], failed: int, auto_shutdown: AutoShutdown) -> Decision:
    if not siblings[failed].significant:
        return Leave()
    match auto_shutdown:
        case "never":
            return Leave()
        case "any_significant":
            return StopSupervisor()
        case "all_significant":
            others = (s for i, s in enumerate(siblings) if i != failed and s.significant)
            return Leave() if any(s.status != "ended" for s in others) else StopSupervisor()
        case _:
            assert_never(auto_shutdown)
