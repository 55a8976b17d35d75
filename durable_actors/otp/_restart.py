"""Which children to restart, when, and when to give up. Pure: values in, values out, time is an argument.

The rules are those of OTP (`supervisor.erl`), with two additions:

* a restart can be delayed by a `Backoff`, so a child can be *due* (ended, to be restarted later);
* the back-off of a child starts from the beginning after it ran for `Backoff.reset_after`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, assert_never

import attrs

from durable_actors.otp._exit import Error, ExitReason, Normal, Shutdown

RestartType = Literal["permanent", "transient", "temporary"]
"""permanent: always restarted · transient: only after an Error · temporary: never."""

Strategy = Literal["one_for_one", "rest_for_one", "one_for_all"]
"""What is restarted with a failed child: nothing else · the children after it · all children."""

AutoShutdown = Literal["never", "any_significant", "all_significant"]
"""Whether a supervisor ends when its significant children have ended."""


@attrs.frozen(kw_only=True)
class Backoff:
    """The delay before a restart: none for the first in a row, then growing exponentially up to a maximum."""

    initial: float = 0.1
    """Seconds before the second restart in a row."""
    factor: float = 2.0
    """The factor by which the delay grows with each further restart."""
    maximum: float = 10.0
    """The longest delay in seconds."""
    reset_after: float = 10.0
    """Seconds. After a run of this length, the next failure counts as the first in a row."""

    def delay(self, streak: int) -> float:
        """Return the seconds to wait before restart number `streak` in a row (1 is the first)."""
        if streak <= 1:
            return 0.0
        # The power of a float overflows eventually; the maximum is reached long before 64 doublings.
        return min(self.maximum, self.initial * self.factor ** min(streak - 2, 64))

    def next_streak(self, streak: int, *, lived: float) -> int:
        """Return the number of restarts in a row after an incarnation that ran for `lived` seconds."""
        return 1 if lived >= self.reset_after else streak + 1


@attrs.frozen
class Sibling:
    """What `decide` needs to know about a child."""

    restart: RestartType
    significant: bool = False
    status: Literal["alive", "due", "ended"] = "alive"
    """alive: running, starting or stopping · due: will be restarted · ended: will not be restarted."""


@attrs.frozen
class Leave:
    """Leave the child down and its siblings alone."""


@attrs.frozen
class StopSupervisor:
    """End the supervisor (with Shutdown), because a significant child ended."""


@attrs.frozen
class GiveUp:
    """Fail the supervisor, because the restart limit is reached."""

    restarts: int
    """The restarts within the period, including the one that was refused."""


@attrs.frozen
class RestartThese:
    """Stop the children `stop` in this order, then start `start` in this order. Indices are in start order."""

    stop: tuple[int, ...]
    start: tuple[int, ...]
    drop: tuple[int, ...]
    """Those of `stop` that are not restarted: temporary children."""
    history: tuple[float, ...]
    """The restart times to remember."""


Decision = Leave | StopSupervisor | GiveUp | RestartThese


def wants_restart(restart: RestartType, reason: ExitReason) -> bool:
    """Return whether a child of this type is restarted after this exit."""
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
    """Return whether this exit is a failure."""
    match reason:
        case Error():
            return True
        case Normal() | Shutdown():
            return False
        case _:
            assert_never(reason)


def affected(strategy: Strategy, failed: int, count: int) -> range:
    """Return the children (indices in start order) that are restarted together with `failed`."""
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
    """Decide what to do after child number `failed` ended with `reason`.

    Restarts older than `period` do not count; more than `intensity` within it are too many.
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
        # As in OTP, a transient child that ended normally is started again with its group.
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
