"""A coroutine that is watched until it waits: what is told, and that nothing of it shows."""

from __future__ import annotations

import contextvars
import time

import pytest
import trio
from durable_actors import otp
from durable_actors.otp._watched import Watched


class Told:
    def __init__(self) -> None:
        self.times = 0

    def __call__(self) -> None:
        self.times += 1


async def test_one_that_waits_for_nothing_is_not_told():
    told = Told()

    async def work() -> str:
        return "value"

    assert await Watched(work(), told) == "value"
    assert told.times == 0


async def test_the_first_wait_is_told_and_no_other():
    told = Told()
    seen: list[int] = []

    async def work() -> str:
        for _ in range(3):
            await trio.lowlevel.checkpoint()
            seen.append(told.times)
        return "value"

    assert await Watched(work(), told) == "value"
    assert seen == [1, 1, 1]


@pytest.mark.parametrize("waits", [True, False])
async def test_its_errors_are_its_own(waits):
    async def work() -> None:
        if waits:
            await trio.lowlevel.checkpoint()
        raise ValueError("its own")

    with pytest.raises(ValueError, match="its own"):
        await Watched(work(), Told())


async def test_it_is_cancelled_as_it_would_be_without():
    cleaned = trio.Event()

    async def work() -> None:
        try:
            await trio.sleep_forever()
        finally:
            with trio.CancelScope(shield=True):
                await trio.lowlevel.checkpoint()
            cleaned.set()

    with trio.move_on_after(0.01) as scope:
        await Watched(work(), Told())
    assert scope.cancelled_caught
    assert cleaned.is_set()


async def test_whoever_looks_at_the_stack_sees_the_coroutine(nursery):
    async def innermost() -> None:
        await trio.sleep_forever()

    async def work() -> None:
        await innermost()

    async def outer() -> None:
        await Watched(work(), Told())

    before = set(nursery.child_tasks)
    nursery.start_soon(outer)
    await trio.testing.wait_all_tasks_blocked()
    [task] = set(nursery.child_tasks) - before
    names = [frame.f_code.co_name for frame, _ in task.iter_await_frames()]
    assert names[:4] == ["outer", "work", "innermost", "sleep_forever"]
    nursery.cancel_scope.cancel()


async def test_a_pool_tells_which_task_waits():
    told: list[object] = []

    async def work(waits: bool) -> None:
        if waits:
            await trio.lowlevel.checkpoint()
            await trio.lowlevel.checkpoint()

    pool = otp.Pool("p", slots=2, on_wait=lambda task: told.append(task.key))
    async with otp.open_tree(otp.Supervisor("root", [otp.PoolChild(pool)])):
        pool.start_nowait(work, True, key="waits")
        pool.start_nowait(work, False, key="does not")
        await pool.drain()
    assert told == ["waits"]


async def test_every_task_of_a_pool_with_a_context_has_a_copy_of_it():
    var: contextvars.ContextVar[str] = contextvars.ContextVar("var", default="none")
    context = contextvars.copy_context()
    context.run(var.set, "the pool's")
    seen: list[str] = []

    async def work() -> None:
        seen.append(var.get())
        var.set("a task's")

    pool = otp.Pool("p", slots=1, context=context)
    var.set("the starter's")
    async with otp.open_tree(otp.Supervisor("root", [otp.PoolChild(pool)])):
        for _ in range(3):  # the first worker is new, then it is parked and used again
            pool.start_nowait(work)
            await pool.wait_free()
            await trio.testing.wait_all_tasks_blocked()
    assert seen == ["the pool's"] * 3
    assert context[var] == "the pool's"


async def test_tasks_that_wait_for_nothing_leave_the_loop_to_others_now_and_then(nursery):
    """Without a turn between them, and not for longer than a slice."""
    turns, at = 0, list[int]()

    async def count_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await trio.lowlevel.checkpoint()

    async def work(seconds: float) -> object:
        at.append(turns)
        time.sleep(seconds)
        return otp.ContextReset

    def on_exit(task: otp.PoolTask, reason: otp.ExitReason) -> None:
        number = len(at)
        if number < 40:
            assert pool.can_follow
            pool.start_nowait(work, 0.0 if number < 20 else 0.002)

    pool = otp.Pool("p", slots=1, on_exit=on_exit)
    async with otp.open_tree(otp.Supervisor("root", [otp.PoolChild(pool)])):
        nursery.start_soon(count_turns)
        pool.start_nowait(work, 0.0)
        with trio.fail_after(10):
            while len(at) < 40:
                await trio.lowlevel.checkpoint()
        await pool.drain()
    nursery.cancel_scope.cancel()
    assert len(set(at[:20])) < 10, "mostly in one turn"
    assert len(set(at[21:])) >= 9, "each took longer than a slice; two tasks take turns in either order"
