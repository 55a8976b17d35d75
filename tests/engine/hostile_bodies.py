"""Step bodies that do what no step should. Each is `async def body(ctx)` or `def body(ctx)`, with its fate.

Fates: "done" and "failed" as the instance ends; "crash": no outcome, and quarantined where `max_crashes` is 1.
"""

from __future__ import annotations

import asyncio
import contextvars
import gc
import sys
import time
import warnings
from collections.abc import AsyncIterator, Callable
from typing import Any, Final

import attrs
import durable_actors as da
import trio
from durable_actors._client import current_client

variable: Final = contextvars.ContextVar("variable", default="nobody's")
kept: Final = list[Any]()
"""What bodies keep alive beyond their end."""


@attrs.frozen
class Hostile:
    body: Callable[..., Any]
    fate: str
    says: str = ""
    """Part of the stored error."""
    options: dict[str, Any] = attrs.field(factory=dict[str, Any])


HOSTILE: Final = dict[str, Hostile]()


def hostile(fate: str, says: str = "", **options: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def note(body: Callable[..., Any]) -> Callable[..., Any]:
        HOSTILE[body.__name__] = Hostile(body, fate, says, options)
        return body

    return note


class Odd(BaseException):
    """Of a library that does not care."""


class Mute(Exception):
    """Cannot be told."""

    def __str__(self) -> str:
        raise RuntimeError("no text")

    __repr__ = __str__


# -- what is left open in the task


async def timed() -> AsyncIterator[int]:
    with trio.move_on_after(0.01):
        yield 1
        yield 2


async def cancelled_scope() -> AsyncIterator[int]:
    with trio.CancelScope() as scope:
        scope.cancel()
        yield 1


async def shielded() -> AsyncIterator[int]:
    with trio.CancelScope(shield=True):
        yield 1


async def nursery_inside() -> AsyncIterator[int]:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.sleep_forever)
        yield 1


async def two_deep() -> AsyncIterator[int]:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.sleep_forever)
        with trio.CancelScope(shield=True), trio.move_on_after(0.01):
            yield 1


@hostile("done")
async def leaks_a_scope(ctx: Any) -> Any:
    async for each in timed():
        return each
    return None


@hostile("done")
async def leaks_a_cancelled_scope(ctx: Any) -> Any:
    async for each in cancelled_scope():
        return each
    return None


@hostile("done")
async def leaks_a_scope_after_a_wait(ctx: Any) -> Any:
    await trio.sleep(0)
    async for each in timed():
        return each
    return None


@hostile("done")
async def leaks_a_shield(ctx: Any) -> Any:
    async for each in shielded():
        return each
    return None


@hostile("done")
async def leaks_a_nursery(ctx: Any) -> Any:
    async for each in nursery_inside():
        return each
    return None


@hostile("done")
async def leaks_all_of_it(ctx: Any) -> Any:
    async for each in two_deep():
        return each
    return None


@hostile("done", timeout=60)
async def leaks_within_its_timeout(ctx: Any) -> Any:
    async for each in two_deep():
        return each
    return None


@hostile("done")
async def leaks_and_keeps_the_generator(ctx: Any) -> Any:
    kept.append(two_deep())
    return await anext(kept[-1])


@hostile("failed", "stopped")
async def leaks_and_raises(ctx: Any) -> Any:
    async for _ in two_deep():
        raise da.Cancel("stopped")


@hostile("crash", "Cancelled")
async def is_cancelled_by_what_it_leaks(ctx: Any) -> Any:
    async for _ in timed():
        break
    await trio.sleep_forever()


@hostile("done")
async def leaks_from_a_child(ctx: Any) -> Any:
    async def child() -> None:
        async for _ in timed():
            break
        await trio.sleep(0.02)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(child)
    return 1


@hostile("done")
def leaks_from_a_thread(ctx: Any) -> Any:
    return trio.from_thread.run(leaks_a_scope, ctx)


@hostile("done")
async def enters_and_never_leaves(ctx: Any) -> Any:
    trio.CancelScope(shield=True).__enter__()
    trio.CancelScope(deadline=0).__enter__()
    return 1


@hostile("done")
async def catches_what_trio_says(ctx: Any) -> Any:
    """The scope is closed then, and the nursery is not."""
    try:
        with trio.CancelScope():
            async for _ in nursery_inside():
                break
    except RuntimeError:
        return 1


@hostile("done")
async def keeps_a_lock(ctx: Any) -> Any:
    lock = trio.Lock()
    kept.append(lock)
    await lock.acquire()
    return 1


@hostile("done")
async def leaves_a_generator_with_a_lock(ctx: Any) -> Any:
    async def locked() -> AsyncIterator[int]:
        async with trio.Lock():
            yield 1

    async for each in locked():
        return each
    return None


@hostile("done")
async def sets_variables(ctx: Any) -> Any:
    variable.set("mine")
    await trio.sleep(0)
    variable.set("mine again")


@hostile("done")
async def changes_its_engine(ctx: Any) -> Any:
    current_client.set(None)
    await trio.sleep(0)


# -- cancellation


@hostile("failed", "StepTimeout", timeout=0.02, max_attempts=1)
async def never_ends(ctx: Any) -> Any:
    while True:
        await trio.sleep(0.001)


@hostile("done", timeout=0.02)
async def swallows_cancelled(ctx: Any) -> Any:
    for _ in range(5):
        try:
            await trio.sleep(60)
        except BaseException:
            continue
    return "late"


@hostile("crash", "Cancelled")
async def raises_a_cancelled_of_old(ctx: Any) -> Any:
    found: list[BaseException] = []
    with trio.CancelScope() as scope:
        scope.cancel()
        try:
            await trio.sleep(60)
        except trio.Cancelled as exc:
            found.append(exc)
    raise found.pop()


# -- what is no Exception


@hostile("crash", "SystemExit")
async def exits(ctx: Any) -> Any:
    sys.exit(2)


@hostile("crash", "SystemExit")
def exits_in_a_thread(ctx: Any) -> Any:
    sys.exit("enough")


@hostile("crash", "SystemExit")
async def exits_in_a_nursery(ctx: Any) -> Any:
    async def child() -> None:
        sys.exit(2)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(child)
        nursery.start_soon(trio.sleep_forever)


@hostile("crash", "GeneratorExit")
async def ends_a_generator_that_is_none(ctx: Any) -> Any:
    raise GeneratorExit


@hostile("crash", "CancelledError")
async def is_cancelled_by_asyncio(ctx: Any) -> Any:
    await trio.sleep(0)
    raise asyncio.CancelledError


@hostile("crash", "Odd")
async def raises_a_base_exception(ctx: Any) -> Any:
    raise Odd


@hostile("crash", "Odd")
async def raises_a_mixed_group(ctx: Any) -> Any:
    raise BaseExceptionGroup("mixed", [ValueError("plain"), Odd()])


@hostile("crash", "SystemExit")
async def exits_and_leaks(ctx: Any) -> Any:
    async for _ in two_deep():
        sys.exit(2)


@hostile("failed", "StopIteration", max_attempts=1)
def stops_an_iteration(ctx: Any) -> Any:
    raise StopIteration


@hostile("failed", "Mute", max_attempts=1)
async def raises_what_cannot_be_told(ctx: Any) -> Any:
    raise Mute


@hostile("failed", "RecursionError", max_attempts=1)
async def recurses(ctx: Any) -> Any:
    def deeper(n: int) -> int:
        return deeper(n + 1) + 1

    return deeper(0)


# -- what it returns


@hostile("failed", "the limit is 32000000", max_attempts=1)
async def returns_much(ctx: Any) -> Any:
    return "x" * 33_000_000


@hostile("failed", "result", max_attempts=1)
async def returns_what_is_no_json(ctx: Any) -> Any:
    return object()


@hostile("failed", "coroutine", max_attempts=1)
async def returns_a_coroutine(ctx: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        kept.append(trio.sleep(0))
        return kept[-1]


# -- the rest


@hostile("done")
async def blocks_the_loop(ctx: Any) -> Any:
    time.sleep(0.3)


@hostile("done")
async def leaves_a_generator_half_consumed(ctx: Any) -> Any:
    async def numbers() -> AsyncIterator[int]:
        try:
            for number in range(10):
                yield number
        finally:
            await trio.sleep(0)

    async for each in numbers():
        return each
    return None


@hostile("done")
async def collects_garbage(ctx: Any) -> Any:
    cycle: list[Any] = [two_deep()]
    cycle.append(cycle)
    found = await anext(cycle[0])
    del cycle
    gc.collect()
    await trio.lowlevel.cancel_shielded_checkpoint()
    gc.collect()
    return found


@hostile("failed", "UserWarning", max_attempts=1)
async def warns_with_errors(ctx: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.warn("mine", stacklevel=1)
