"""Events of supervisors: one per start, exit, restart and give-up; none per message."""

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
    """The path from the root: ``engine/queues/mail``."""
    restarts: int
    """How often it was restarted."""


@attrs.frozen(kw_only=True)
class ChildExited:
    """An incarnation of a child ended. Emitted exactly once per incarnation, including failed starts."""

    path: str
    reason: ExitReason
    lived: float
    """Seconds from its start to its end."""


@attrs.frozen(kw_only=True)
class ChildRestarting:
    """A child will be restarted, possibly together with siblings (see `Supervisor.strategy`)."""

    path: str
    """The child whose exit caused the restart."""
    siblings: tuple[str, ...]
    """The names of all children that will be started, in this order, including the cause."""
    delay: float
    """Seconds until the restart."""


@attrs.frozen(kw_only=True)
class SupervisorGaveUp:
    """A supervisor reached its restart limit. It stops its children and fails."""

    path: str
    child: str
    """The path of the child that reached the limit."""
    restarts: int
    period: float


Event = ChildStarted | ChildExited | ChildRestarting | SupervisorGaveUp
"""The union of all events."""

Observer = Callable[[Event], None]
"""A function that is called synchronously with each event. An exception that it raises fails the supervisor."""


def log_event(event: Event) -> None:
    """Log an event to the logger ``durable_actors.otp``. This is the default observer."""
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
            text = "%s: gave up: %s reached %d restarts within %.3g s"
            _log.error(text, event.path, event.child, event.restarts, event.period)
        case _:
            assert_never(event)
