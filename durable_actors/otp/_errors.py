"""Every exception of durable_actors.otp, with who has to act.

::

    DurableError
    └── OtpError
        ├── SpecError             the author: the specification of a child, address or tree is invalid
        ├── ActorDown             the sender: the actor is not running; nothing was done
        ├── ActorDied             the caller: the actor ended during the call; it may or may not be done
        ├── CallTimeout           the caller: no reply in time (also a trio.TooSlowError)
        ├── MailboxFull           the sender: the mailbox is full (also a trio.WouldBlock)
        ├── MailboxClosed         the actor itself: it was asked to stop (also a trio.EndOfChannel)
        ├── PoolFull              the caller: no slot is free (also a trio.WouldBlock)
        ├── PoolClosed            the caller: the pool is draining, stopped, or not started
        ├── StartFailed           the author: a child failed before it was ready; see `__cause__`
        ├── StartTimeout          the author: a child was not ready within its start_timeout
        ├── TerminateTimeout      the author: `terminate` took longer than the child's shutdown time
        ├── RestartLimitReached   (an ExceptionGroup) a child failed too often and its supervisor gave up
        └── StopFailed            (an ExceptionGroup) children failed while they were being stopped
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import trio

from durable_actors.errors import DurableError


class OtpError(DurableError):
    """Base class of all errors of `durable_actors.otp`."""


class SpecError(OtpError, ValueError):
    """The specification of a child, address or tree is invalid. The message names it. Nothing was started."""


class ActorDown(OtpError):  # noqa: N818 - a state of the other side, not a fault of this one
    """The actor is not running: it is not started yet, restarting, stopping or ended. Nothing was done.

    It is safe to send the message again. With `on_down="wait"` a call waits for the next incarnation instead.
    """

    def __init__(self, actor: str, status: str, reason: object = None) -> None:
        super().__init__(actor, status, reason)
        self.actor: str = actor
        """The name of the address."""
        self.status: str = status
        """The status of the actor: new, starting, stopping, restarting or down."""
        self.reason: object = reason
        """The exit reason of the last incarnation, or None if there was none."""

    def __str__(self) -> str:
        why = "" if self.reason is None else f" (last exit: {self.reason})"
        return f"actor {self.actor!r} is {self.status}{why}; nothing was done"


class ActorDied(OtpError):  # noqa: N818 - a state of the other side, not a fault of this one
    """The actor ended after it took the call and before it replied: the work may or may not be done.

    `__cause__` is the actor's exception, if it ended with one.
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
    """The actor did not reply in time. The actor is not affected.

    A call that was still queued is withdrawn and will not be handled. A call that the actor had taken
    continues, and its late reply is dropped and counted.
    """

    def __init__(self, actor: str, message: str, timeout: float) -> None:
        super().__init__(actor, message, timeout)
        self.actor: str = actor
        """The address's name."""
        self.message: str = message
        """The type of the call's message."""
        self.timeout: float = timeout
        """The timeout in seconds."""

    def __str__(self) -> str:
        return f"actor {self.actor!r} did not answer {self.message} within {self.timeout:g} s"


class MailboxFull(OtpError, trio.WouldBlock):  # noqa: N818 - reads like trio.WouldBlock
    """The mailbox is full. Use `send` to wait for room, or `cast` to drop the message."""


class MailboxClosed(OtpError, trio.EndOfChannel):  # noqa: N818 - reads like trio.EndOfChannel
    """Raised in an actor that reads its mailbox after it was asked to stop and has handled all messages.

    Do not catch it: when it leaves `run`, the actor ends normally.
    """


class PoolFull(OtpError, trio.WouldBlock):  # noqa: N818 - reads like trio.WouldBlock
    """Every slot of the pool is occupied. `Pool.wait_free` waits for one."""


class PoolClosed(OtpError):  # noqa: N818 - a state of the other side, not a fault of this one
    """The pool does not accept tasks: it is draining, stopped, or not started yet."""


class StartFailed(OtpError):  # noqa: N818 - says what happened
    """A child failed before it was ready, so its supervisor did not start. `__cause__` is the child's error.

    The children that had started before it were stopped in reverse order.
    """

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.path: str = path
        """The path of the child from the root: ``engine/queues/mail``."""

    def __str__(self) -> str:
        cause = self.__cause__
        return (
            f"child {self.path!r} failed to start: {cause if isinstance(cause, StartFailed) else repr(cause)}"
        )


class StartTimeout(OtpError, TimeoutError):  # noqa: N818 - says what happened
    """The child was not ready within its `start_timeout` and was cancelled."""


class TerminateTimeout(OtpError, TimeoutError):  # noqa: N818 - says what happened
    """The actor's `terminate` took longer than the child's shutdown time and was cancelled."""


class _ErrorGroup(ExceptionGroup[Exception], OtpError):  # noqa: N818 - private, never raised itself
    """An exception group whose class is preserved by `split`, `subgroup` and ``except*``."""

    def derive(self, excs: Sequence[Exception], /) -> Self:  # type: ignore[override]  # typeshed's is generic
        return type(self)(self.message, excs)


class RestartLimitReached(_ErrorGroup):
    """A child failed more often than its supervisor's `intensity` within `period`.

    The supervisor stopped its other children in reverse order and failed with this error; its own
    supervisor treats that like any other crash. The notes name the child, the count and the period.
    """


class StopFailed(_ErrorGroup):
    """All children were stopped, but these failed while they were being stopped."""
