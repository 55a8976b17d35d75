"""Every exception of durable_actors.otp, split by who must act.

::

    DurableError
    └── OtpError
        ├── SpecError             the author: a child, address or tree is described wrongly
        ├── ActorDown             the sender: the actor does not run; nothing was done
        ├── ActorDied             the caller: it died while it worked on the call; done or not, unknown
        ├── CallTimeout           the caller: no reply in time (also trio.TooSlowError)
        ├── MailboxFull           the sender: no room now (also trio.WouldBlock)
        ├── MailboxClosed         the actor itself: it was asked to stop (also trio.EndOfChannel)
        ├── PoolFull              the starter: no free slot now (also trio.WouldBlock)
        ├── PoolClosed            the starter: the pool drains, stopped, or never ran
        ├── StartFailed           the author: a child failed before it was ready; `__cause__` tells why
        ├── StartTimeout          the author: a child was not ready within its start_timeout
        ├── TerminateTimeout      the author: `terminate` needed more than the child's shutdown time
        ├── RestartLimitReached   (an ExceptionGroup) a child failed too often, its supervisor gave up
        └── StopFailed            (an ExceptionGroup) children failed while the tree was stopped
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import trio

from durable_actors.errors import DurableError


class OtpError(DurableError):
    """Base of all errors of `durable_actors.otp`."""


class SpecError(OtpError, ValueError):
    """A child, address or tree is described wrongly. The text names it. Nothing was started."""


class ActorDown(OtpError):  # noqa: N818 - a state of the other side, not a fault of this one
    """The actor does not run: not started yet, restarting, stopping or ended. Nothing was done.

    Safe to repeat. `on_down="wait"` makes a call wait for the next incarnation instead.
    """

    def __init__(self, actor: str, status: str, reason: object = None) -> None:
        super().__init__(actor, status, reason)
        self.actor: str = actor
        """The address's name."""
        self.status: str = status
        """What it was doing: new, starting, stopping, restarting or down."""
        self.reason: object = reason
        """The exit reason of its last incarnation, if it had one."""

    def __str__(self) -> str:
        why = "" if self.reason is None else f" (last exit: {self.reason})"
        return f"actor {self.actor!r} is {self.status}{why}; nothing was done"


class ActorDied(OtpError):  # noqa: N818 - a state of the other side, not a fault of this one
    """The actor ended after it took the call and before it replied: done or not, unknown.

    `__cause__` is the actor's error, where it ended with one.
    """

    def __init__(self, actor: str, message: str, reason: object) -> None:
        super().__init__(actor, message, reason)
        self.actor: str = actor
        """The address's name."""
        self.message: str = message
        """The type of the call's message."""
        self.reason: object = reason
        """The actor's exit reason."""

    def __str__(self) -> str:
        return f"actor {self.actor!r} ended while it worked on {self.message}: {self.reason}"


class CallTimeout(OtpError, trio.TooSlowError):  # noqa: N818 - reads like trio.TooSlowError
    """No reply in time. The server is unharmed.

    A call that was still queued is withdrawn (it will not be handled); one that the actor had
    taken goes on, and its late reply is dropped and counted.
    """

    def __init__(self, actor: str, message: str, timeout: float) -> None:
        super().__init__(actor, message, timeout)
        self.actor: str = actor
        """The address's name."""
        self.message: str = message
        """The type of the call's message."""
        self.timeout: float = timeout
        """The seconds that were allowed."""

    def __str__(self) -> str:
        return f"actor {self.actor!r} did not answer {self.message} within {self.timeout:g} s"


class MailboxFull(OtpError, trio.WouldBlock):  # noqa: N818 - reads like trio.WouldBlock
    """The mailbox has no room now. Wait with `send`, or drop the message knowingly with `cast`."""


class MailboxClosed(OtpError, trio.EndOfChannel):  # noqa: N818 - reads like trio.EndOfChannel
    """Raised to the actor that reads its mailbox: it was asked to stop and nothing is left to handle.

    Let it pass: out of `run` it is the normal end.
    """


class PoolFull(OtpError, trio.WouldBlock):  # noqa: N818 - reads like trio.WouldBlock
    """Every slot is taken. `wait_free` waits for one."""


class PoolClosed(OtpError):  # noqa: N818 - a state of the other side, not a fault of this one
    """The pool takes nothing: it drains, has stopped, or does not run yet."""


class StartFailed(OtpError):  # noqa: N818 - says what happened
    """A child failed before it was ready, so its supervisor did not start. `__cause__` tells why.

    The children started before it were stopped in reverse order.
    """

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.path: str = path
        """The child, from the root: ``engine/queues/mail``."""

    def __str__(self) -> str:
        cause = self.__cause__
        return (
            f"child {self.path!r} failed to start: {cause if isinstance(cause, StartFailed) else repr(cause)}"
        )


class StartTimeout(OtpError, TimeoutError):  # noqa: N818 - says what happened
    """The child was not ready within its `start_timeout` and was cancelled."""


class TerminateTimeout(OtpError, TimeoutError):  # noqa: N818 - says what happened
    """The actor's `terminate` needed longer than the child's shutdown time and was cancelled."""


class _ErrorGroup(ExceptionGroup[Exception], OtpError):  # noqa: N818 - private, never raised itself
    """A group that stays what it is through `split`, `subgroup` and ``except*``."""

    def derive(self, excs: Sequence[Exception], /) -> Self:  # type: ignore[override]  # typeshed's is generic
        return type(self)(self.message, excs)


class RestartLimitReached(_ErrorGroup):
    """A child failed more often than its supervisor's `intensity` within `period`.

    The supervisor stopped its other children in reverse order and fails with this; its own
    supervisor treats that as any crash. The notes tell the child, the count and the window.
    """


class StopFailed(_ErrorGroup):
    """Everything was stopped, but these children failed while they were stopping."""
