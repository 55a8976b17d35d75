"""What comes out of user code: what it has raised, whose affair that is, and what it has left open in its task."""

from __future__ import annotations

from collections.abc import Generator
from typing import Literal, cast

import trio

from durable_actors._engine.node import Node, logger
from durable_actors._store.rows import Claim
from durable_actors._trio_inside import close_left, left_open


class Crashed(Exception):  # noqa: N818 - it is no error of ours
    """User code has ended its step without an outcome, and `handle` is not asked: counted, and backed off."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(error)
        self.error = error


def fate_of(error: BaseException, *, cancelled: bool) -> Literal["handle", "crash", "ends"]:
    """Whose affair it is what user code has raised. Pure.

    "handle": an Exception, or a group of them. "ends": the node is to stop, or its task is `cancelled`, and this must
    travel on. "crash": all else, also inside a group: SystemExit, GeneratorExit, asyncio's CancelledError, and a
    Cancelled of a scope that was left open or kept for later, which no scope around this task would take.
    """
    if isinstance(error, Exception):
        return "handle"
    if interrupt_in(error) is not None or (cancelled and cancelled_in(error)):
        return "ends"
    return "crash"


def cancelled_in(error: BaseException) -> bool:
    """Whether there is a Cancelled in it."""
    return any(isinstance(each, trio.Cancelled) for each in _members(error))


def interrupt_in(error: BaseException) -> KeyboardInterrupt | None:
    """The KeyboardInterrupt in it; a nursery of the step's may have wrapped it."""
    return next((each for each in _members(error) if isinstance(each, KeyboardInterrupt)), None)


def _members(error: BaseException) -> Generator[BaseException]:
    """It, and all that is in it, however deep: user code may nest groups deeper than Python's stack is."""
    todo = [error]
    while todo:
        each = todo.pop()
        yield each
        if isinstance(each, BaseExceptionGroup):
            todo += reversed(cast("BaseExceptionGroup[BaseException]", each).exceptions)


async def close_leftovers(node: Node, claim: Claim, home: object) -> bool:
    """Close what a step has left open in the current task; tell its author, once. False: nothing."""
    if not left_open(trio.lowlevel.current_task(), home):
        return False
    left = await close_left(home)
    where = (claim.fsm, claim.version, claim.step)
    level = "debug" if where in node.leaks_told else "warning"
    node.leaks_told.add(where)
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
