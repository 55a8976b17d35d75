"""What we know of the inside of Trio. A test here fails: Trio has changed, look at `_trio_inside.py`."""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
import threading
import time
from collections.abc import AsyncIterator

import pytest
import trio
from durable_actors._trio_inside import (
    LOCKS,
    close_left,
    innermost,
    is_cancelled,
    keep_generators,
    left_open,
    runs_in_real_time,
    what_runs,
)
from trio.testing import wait_all_tasks_blocked

pytestmark = pytest.mark.filterwarnings("ignore:Async generator:ResourceWarning")


def in_a_run(fn):
    """The main task of a run of its own: nothing is open in it."""

    @functools.wraps(fn)
    def test(*args, **kwargs):
        trio.run(functools.partial(fn, *args, **kwargs))

    return test


async def with_nursery() -> AsyncIterator[trio.Nursery]:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.sleep_forever)
        yield nursery


@contextlib.asynccontextmanager
async def manager() -> AsyncIterator[None]:
    async with trio.open_nursery():
        yield


async def through_manager() -> AsyncIterator[int]:
    async with manager():
        yield 1


async def through_stack() -> AsyncIterator[int]:
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(manager())
        yield 1


async def through_another() -> AsyncIterator[int]:
    async for each in through_manager():
        yield each


@in_a_run
async def test_the_names_that_the_hot_path_reads():
    task = trio.lowlevel.current_task()
    assert innermost(task) is task._cancel_status
    assert task._child_nurseries == []
    before = innermost(task)
    with trio.CancelScope() as scope:
        assert innermost(task) is not before
        assert task._cancel_status._scope is scope
        assert left_open(task, before)
    assert innermost(task) is before
    async with trio.open_nursery() as nursery:
        assert task._child_nurseries == [nursery]
        assert nursery.__dict__["_parent_task"] is task
        assert callable(nursery._nested_child_finished)
    assert not left_open(task, before)
    lock = trio.Lock()
    async with lock:
        assert task in LOCKS
    assert task not in LOCKS


@in_a_run
async def test_whether_a_cancelled_finds_its_scope():
    assert not is_cancelled()
    with trio.CancelScope() as scope:
        scope.cancel()
        assert is_cancelled()
        with trio.CancelScope(shield=True):
            assert not is_cancelled()
    assert not is_cancelled()


@in_a_run
async def test_scopes_are_closed_innermost_first():
    task = trio.lowlevel.current_task()
    home = innermost(task)
    scopes = [
        trio.CancelScope(shield=True),
        trio.CancelScope(deadline=trio.current_time() - 1),
        trio.CancelScope(),
    ]
    for scope in scopes:
        scope.__enter__()
    scopes[2].cancel()
    assert is_cancelled()
    assert await close_left(home) == ["a cancel scope"] * 3
    assert innermost(task) is home
    assert not is_cancelled()
    await trio.sleep(0)


@in_a_run
async def test_a_nursery_is_closed_with_its_children():
    task = trio.lowlevel.current_task()
    home = innermost(task)
    ended = trio.Event()

    async def child():
        try:
            await trio.sleep_forever()
        finally:
            ended.set()
            raise ValueError("while it was cancelled")

    opened = trio.open_nursery()
    nursery = await opened.__aenter__()
    nursery.start_soon(child)
    await wait_all_tasks_blocked()
    trio.CancelScope().__enter__()
    assert await close_left(home) == ["a cancel scope", "a nursery with 1 task, which raised ExceptionGroup"]
    assert ended.is_set()
    assert not left_open(task, home)
    with pytest.raises(RuntimeError, match="already been exited"):  # late, and without effect
        await opened.__aexit__(None, None, None)
    assert not left_open(task, home)


@pytest.mark.parametrize("make", [with_nursery, through_manager, through_stack, through_another])
@pytest.mark.parametrize("cycle", [False, True])
@in_a_run
async def test_a_generator_with_a_nursery_is_closed_where_it_was_opened(make, cycle):
    """By Trio, in another task, this one would be woken while it waits for something else, or after its end."""
    before = sys.get_asyncgen_hooks()
    keep_generators()
    keep_generators()
    task = trio.lowlevel.current_task()
    home = innermost(task)
    held: list[object] = [make()]
    if cycle:
        held.append(held)
    await anext(held[0])
    del held
    gc.collect()
    await wait_all_tasks_blocked()
    with trio.move_on_after(0.05) as scope:  # nobody wakes it early
        await trio.sleep_forever()
    assert scope.cancelled_caught
    assert task.child_nurseries
    told = await close_left(home)
    assert [each for each in told if not each.startswith("an async generator (")] == []
    assert not left_open(task, home)
    sys.set_asyncgen_hooks(*before)


@in_a_run
async def test_other_generators_are_trios():
    before = sys.get_asyncgen_hooks()
    keep_generators()
    closed = trio.Event()

    async def plain():
        try:
            yield 1
        finally:
            closed.set()

    async for _ in plain():
        break
    with trio.fail_after(10):
        await closed.wait()
    sys.set_asyncgen_hooks(*before)


@in_a_run
async def test_what_a_loop_runs():
    me, task = threading.get_ident(), trio.lowlevel.current_task()
    found = what_runs(me)
    assert found is not None
    assert found.task is task
    assert "what_runs" in found.where
    turns = found.turns
    await trio.lowlevel.checkpoint()
    again = what_runs(me)
    assert again is not None
    assert again.turns > turns

    def until_it_waits():
        while what_runs(me) is not None:
            time.sleep(0.001)

    with trio.fail_after(10):
        await trio.to_thread.run_sync(until_it_waits)
    assert runs_in_real_time()
