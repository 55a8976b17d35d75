"""Why something ended: the three exit reasons, as values."""

from __future__ import annotations

from typing import cast

import attrs
import trio


@attrs.frozen
class Normal:
    """It had nothing more to do."""

    def __str__(self) -> str:
        return "normal"


@attrs.frozen
class Shutdown:
    """It was asked to stop, or was cancelled from outside. Never a crash."""

    why: str = "stopped"
    """Who asked, in words."""
    killed: bool = False
    """It had to be cancelled: brutal, or its shutdown time was over."""

    def __str__(self) -> str:
        return f"shutdown: {self.why}{' (killed)' if self.killed else ''}"


@attrs.frozen(eq=False)
class Error:
    """An exception escaped from it."""

    error: BaseException
    """The exception, with its traceback."""

    def __str__(self) -> str:
        return f"error: {self.error!r}"


ExitReason = Normal | Shutdown | Error
"""Normal, Shutdown or Error."""

NORMAL = Normal()


def sole_error(error: BaseException) -> BaseException:
    """The one error inside a nursery's group, or the error itself.

    An actor's nursery wraps whatever its body raised; the reader of a crash report wants the error.
    """
    inner = _members(error)
    return inner[0] if len(inner) == 1 else error


def contains_cancelled(error: BaseException) -> bool:
    """Whether a cancellation is under way in `error`; it must travel on to its scope."""
    return isinstance(error, trio.Cancelled) or any(contains_cancelled(inner) for inner in _members(error))


def _members(error: BaseException) -> tuple[BaseException, ...]:
    if not isinstance(error, BaseExceptionGroup):
        return ()
    return cast("BaseExceptionGroup[BaseException]", error).exceptions
