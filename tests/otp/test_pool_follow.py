"""A task that has renewed its context hands its worker on."""

from __future__ import annotations

import contextvars

import trio
from durable_actors import otp


async def test_what_on_exit_starts_follows_in_the_same_worker():
    ran: list[tuple[int, object]] = []
    follows: list[bool] = []
    done = trio.Event()

    async def work(number: int, returns: object) -> object:
        ran.append((number, trio.lowlevel.current_task()))
        if number == 9:
            done.set()
        await trio.lowlevel.checkpoint()
        return returns

    def on_exit(task: otp.PoolTask, reason: otp.ExitReason) -> None:
        assert isinstance(reason, otp.Normal)
        follows.append(pool.can_follow)
        number = len(ran)
        if number < 10:
            pool.start_nowait(
                work, number, otp.ContextReset if number < 5 else None, key=number, deadline=1e9 + number
            )
            assert not pool.can_follow, "one worker, one task"
            assert pool.get(number).deadline == 1e9 + number

    pool = otp.Pool("p", slots=1, on_exit=on_exit)
    async with otp.open_tree(otp.Supervisor("root", [otp.PoolChild(pool)])):
        pool.start_nowait(work, 0, otp.ContextReset, key=0)
        with trio.fail_after(10):
            await done.wait()
            await pool.drain()
    assert [number for number, _ in ran] == list(range(10))
    assert len({task for _, task in ran[:6]}) == 1
    assert follows == [True] * 5 + [False] * 5
    assert pool.statistics().finished == 10


async def test_a_cancelled_worker_is_not_handed_on():
    follows: list[bool] = []

    async def work() -> object:
        with trio.CancelScope(shield=True):
            task = pool.get("a")
            assert task is not None
            task.cancel("why")
            await trio.lowlevel.checkpoint()
        return otp.ContextReset

    pool = otp.Pool("p", slots=1, on_exit=lambda _, __: follows.append(pool.can_follow))
    async with otp.open_tree(otp.Supervisor("root", [otp.PoolChild(pool)])):
        pool.start_nowait(work, key="a")
        with trio.fail_after(10):
            await pool.drain()
    assert follows == [False]


async def test_nothing_follows_a_pool_that_drains():
    follows: list[bool] = []
    var: contextvars.ContextVar[int] = contextvars.ContextVar("var", default=0)

    async def work() -> object:
        var.set(1)
        await trio.testing.wait_all_tasks_blocked()
        return otp.ContextReset

    pool = otp.Pool("p", slots=1, on_exit=lambda _, __: follows.append(pool.can_follow))
    async with otp.open_tree(otp.Supervisor("root", [otp.PoolChild(pool)])):
        pool.start_nowait(work)
        with trio.fail_after(10):
            await pool.drain()
    assert follows == [False]
    assert var.get() == 0
