"""Exit reasons: why an actor, task or pool ended."""

from __future__ import annotations

from typing import cast

import attrs
import trio


@attrs.frozen
class Normal:
    """It returned without an error."""

    def __str__(self) -> str:
        return "normal"


@attrs.frozen
class Shutdown:
    """It was asked to stop, or it was cancelled from outside. A shutdown is not a crash."""

    why: str = "stopped"
    """A short description of the cause."""
    killed: bool = False
    """Whether it was cancelled: its `shutdown` is "brutal", or its shutdown time was over."""

    def __str__(self) -> str:
        return f"shutdown: {self.why}{' (killed)' if self.killed else ''}"


@attrs.frozen(eq=False)
class Error:
    """It raised an exception."""

    error: BaseException
    """The exception, with its traceback."""

    def __str__(self) -> str:
        return f"error: {self.error!r}"


ExitReason = Normal | Shutdown | Error
"""The union of `Normal`, `Shutdown` and `Error`."""

NORMAL = Normal()


def sole_error(error: BaseException) -> BaseException:
    """Return the only error inside a nursery's exception group, or `error` itself.

    A nursery wraps the exception of its body in a group; crash reports should show the exception.
    """
    inner = _members(error)
    return inner[0] if len(inner) == 1 else error


def contains_cancelled(error: BaseException) -> bool:
    """Return whether `error` contains a `trio.Cancelled`, which must propagate to its cancel scope."""
    return isinstance(error, trio.Cancelled) or any(contains_cancelled(inner) for inner in _members(error))


def _members(error: BaseException) -> tuple[BaseException, ...]:
    if not isinstance(error, BaseExceptionGroup):
        return ()
    return cast("BaseExceptionGroup[BaseException]", error).exceptions
