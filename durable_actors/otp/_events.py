"""What supervisors report: one value per start, exit, restart and surrender. Never per message."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import assert_never

import attrs

from durable_actors.otp._exit import Error, ExitReason

_log = logging.getLogger("durable_actors.otp")


@attrs.frozen(kw_only=True)
class ChildStarted:
    """A child is ready."""

    path: str
    """From the root: ``engine/queues/mail``."""
    restarts: int
    """How often it was started before."""


@attrs.frozen(kw_only=True)
class ChildExited:
    """An incarnation of a child has ended. Exactly one per incarnation, also of failed starts."""

    path: str
    reason: ExitReason
    lived: float
    """Seconds since it was started."""


@attrs.frozen(kw_only=True)
class ChildRestarting:
    """A child, and with it perhaps its siblings, will be started again."""

    path: str
    """The child whose exit is the cause."""
    siblings: tuple[str, ...]
    """All that will be started, in this order; it is among them."""
    delay: float
    """Seconds until then."""


@attrs.frozen(kw_only=True)
class SupervisorGaveUp:
    """A supervisor stops its children and fails: too many restarts."""

    path: str
    child: str
    """The child that failed once too often."""
    restarts: int
    period: float


Event = ChildStarted | ChildExited | ChildRestarting | SupervisorGaveUp
"""Anything that an observer is told."""

Observer = Callable[[Event], None]
"""Called synchronously. An error that it raises takes the supervisor down: it is never swallowed."""


def log_event(event: Event) -> None:
    """Write to the logger ``durable_actors.otp``; the default observer."""
    match event:
        case ChildStarted():
            _log.debug("%s: started", event.path)
        case ChildExited(reason=Error(error=error)):
            _log.error("%s: failed after %.3g s", event.path, event.lived, exc_info=error)
        case ChildExited():
            _log.debug("%s: ended after %.3g s (%s)", event.path, event.lived, event.reason)
        case ChildRestarting():
            names = ", ".join(event.siblings)
            _log.warning("%s: restarting %s in %.3g s", event.path, names, event.delay)
        case SupervisorGaveUp():
            text = "%s: gave up: %s needed %d restarts within %.3g s"
            _log.error(text, event.path, event.child, event.restarts, event.period)
        case _:
            assert_never(event)
