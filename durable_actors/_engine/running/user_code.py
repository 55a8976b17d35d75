"""What user code may do besides returning: which errors it raises, who handles them, and what it leaves open."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import Literal, cast

import trio

from durable_actors._engine.node import Node, logger
from durable_actors._store.rows import Claim
from durable_actors._trio_inside import close_left, left_open
from durable_actors.errors import RateLimited


class Crashed(Exception):  # noqa: N818 - it is no error of ours
    """User code ended its step without an outcome, and `handle` is not called: the crash is counted and backed off."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(error)
        self.error = error


class Postponed(Exception):  # noqa: N818 - no error
    """The step is to run again later: its claim is released, and that is no attempt."""


def fate_of(error: BaseException, *, cancelled: bool) -> Literal["handle", "crash", "ends"]:
    """Who handles what user code has raised. Pure.

    "handle": an Exception, or a group of them. "ends": a KeyboardInterrupt, or the task is `cancelled`; it must
    propagate. "crash": anything else, also inside a group: SystemExit, GeneratorExit, asyncio's CancelledError, and a
    Cancelled of a scope that user code left open or stored, which no scope around this task would catch.
    """
    if isinstance(error, Exception):
        return "handle"
    if interrupt_in(error) is not None or (cancelled and cancelled_in(error) is not None):
        return "ends"
    return "crash"


def cancelled_in(error: BaseException) -> trio.Cancelled | None:
    """The first Cancelled that it is or contains."""
    return next((each for each in _members(error) if isinstance(each, trio.Cancelled)), None)


def only_cancelled(error: BaseException) -> bool:
    """Whether it is a Cancelled, or a group of nothing else."""
    return all(isinstance(each, trio.Cancelled | BaseExceptionGroup) for each in _members(error))


def interrupt_in(error: BaseException) -> KeyboardInterrupt | None:
    """The KeyboardInterrupt that it is or contains; a nursery of the step may have wrapped it."""
    return next((each for each in _members(error) if isinstance(each, KeyboardInterrupt)), None)


def told_to_wait(error: BaseException) -> float | None:
    """For how many seconds the step is to wait, if it is a RateLimited, or a group of nothing else."""
    leaves = [each for each in _members(error) if not isinstance(each, BaseExceptionGroup)]
    waits = [each.retry_after for each in leaves if isinstance(each, RateLimited)]
    return max(waits) if waits and len(waits) == len(leaves) else None


def _members(error: BaseException) -> Generator[BaseException]:
    """The error and all its members. Not recursive: user code may nest groups deeper than Python's stack."""
    todo = [error]
    while todo:
        each = todo.pop()
        yield each
        if isinstance(each, BaseExceptionGroup):
            todo += reversed(cast("BaseExceptionGroup[BaseException]", each).exceptions)


async def close_leftovers(node: Node, claim: Claim, home: object) -> bool:
    """Close what a step left open in the current task; log a warning, once per step. False: nothing was open."""
    if not left_open(trio.lowlevel.current_task(), home):
        return False
    left = await close_left(home)
    where = (claim.fsm, claim.version, claim.step)
    level = "debug" if where in node.leaks_logged else "warning"
    node.leaks_logged.add(where)
    with contextlib.suppress(
        Exception
    ):  # a user's log handler that raises must not cost the step its outcome
        getattr(logger, level)(
            "instance %d: %s v%d, step %s has left %s open in its task. Its worker is replaced, its outcome counts. "
            "Do not return or break out of an async generator that has a cancel scope or a nursery inside: "
            "surround it with contextlib.aclosing, or read from a memory channel instead; release what you acquire",
            claim.id,
            claim.fsm,
            claim.version,
            claim.step,
            " and ".join(left),
        )
    return True
