"""Pools: slots, reuse of workers, cancel with a reason, drain, and what becomes of failures."""

from __future__ import annotations

import contextvars
import math

import pytest
import trio
from durable_actors import otp
from tests.kit import until
from tests.otp.kit import Kit
from trio.testing import wait_all_tasks_blocked


@pytest.fixture
def exits() -> list[tuple[object, str]]:
    return []


@pytest.fixture
def pool(exits) -> otp.Pool:
    return otp.Pool("pool", slots=3, on_exit=lambda task, reason: exits.append((task.key, str(reason))))


def root(pool: otp.Pool, **options) -> otp.Supervisor:
    return otp.Supervisor("root", [otp.PoolChild(pool, **options)], intensity=0)


async def fail(error: BaseException) -> None:
    await trio.lowlevel.checkpoint()
    raise error


async def test_slots(pool, exits, autojump_clock):
    with pytest.raises(otp.PoolClosed):
        pool.start_nowait(trio.sleep, 1)
    async with otp.open_tree(root(pool)):
        for i in range(3):
            pool.start_nowait(trio.sleep, i + 1, key=i)
        assert (len(pool), pool.free) == (3, 0)
        with pytest.raises(otp.PoolFull) as info:
            pool.start_nowait(trio.sleep, 1)
        assert isinstance(info.value, trio.WouldBlock)
        begin = trio.current_time()
        await pool.wait_free()
        assert trio.current_time() - begin == 1
        assert exits == [(0, "normal")]
        with pytest.raises(otp.SpecError, match="key 1"):
            pool.start_nowait(trio.sleep, 1, key=1)
        stats = pool.statistics()
        assert (stats.active, stats.slots, stats.started, stats.finished) == (2, 3, 3, 1)
        assert stats.oldest_age == 1
    assert exits == [(i, "normal") for i in range(3)]
    with pytest.raises(otp.PoolClosed):
        await pool.wait_free()


async def test_cancel_with_a_reason(pool, exits, autojump_clock):
    async with otp.open_tree(root(pool)):
        task = pool.start_nowait(trio.sleep_forever, key="a")
        pool.start_nowait(trio.sleep_forever, key="b")
        assert pool.get("a") is task
        assert task.cancel("lease lost")
        assert task.cancel("too late")
        await wait_all_tasks_blocked()
        assert exits == [("a", "shutdown: lease lost")]
        assert not task.running
        assert pool.get("a") is None
        other = pool.start_nowait(trio.sleep_forever, key="a")
        assert not task.cancel("must not hit the next task")
        await wait_all_tasks_blocked()
        assert other.running
        other.cancel("end")
        pool.start_nowait(trio.sleep, 0, key="c").cancel("before it ran")
        await wait_all_tasks_blocked()
        assert exits[1:] in (
            [("a", "shutdown: end"), ("c", "shutdown: before it ran")],
            [("c", "shutdown: before it ran"), ("a", "shutdown: end")],
        )
        pool.get("b").cancel("end")
    assert pool.statistics().cancelled == 4


async def test_a_finished_handle_never_hits_the_worker_s_next_task(pool, exits, autojump_clock):
    async with otp.open_tree(root(pool, shutdown=60)):
        first = pool.start_nowait(trio.sleep, 0, key=1)
        await wait_all_tasks_blocked()
        second = pool.start_nowait(trio.sleep, 5, key=2)  # in the same worker
        first.deadline = -math.inf
        assert not first.cancel("x")
        assert first.deadline == math.inf
        await wait_all_tasks_blocked()
        assert second.running
    assert exits == [(1, "normal"), (2, "normal")]


async def test_a_lease_is_a_deadline(pool, exits, autojump_clock):
    async with otp.open_tree(root(pool, shutdown=60)):
        task = pool.start_nowait(trio.sleep_forever, key=1)
        task.deadline = trio.current_time() + 5
        await trio.sleep(4)
        task.deadline += 5
        await trio.sleep(5)
        assert task.running
        await trio.sleep(2)
        assert exits == [(1, "shutdown: cancelled")]
        # A worker whose deadline was moved, and not reached, is clean for the next task.
        short = pool.start_nowait(trio.sleep, 0, key=2)
        short.deadline = trio.current_time() + 1
        await wait_all_tasks_blocked()
        pool.start_nowait(trio.sleep, 10, key=3)
    assert exits[1:] == [(2, "normal"), (3, "normal")]


async def test_failures_go_to_on_exit_and_free_their_slot(pool, exits, autojump_clock):
    async with otp.open_tree(root(pool)):
        for i in range(5):
            pool.start_nowait(fail, ValueError(i), key=i)
            await pool.wait_free()
            await wait_all_tasks_blocked()
        assert pool.free == 3
    assert exits == [(i, f"error: ValueError({i})") for i in range(5)]
    assert pool.statistics().failed == 5


async def test_without_on_exit_a_failure_fails_the_pool(autojump_clock):
    pool, kit = otp.Pool("pool", slots=2), Kit()
    with pytest.raises(otp.RestartLimitReached) as info:
        async with otp.open_tree(root(pool), observe=kit.observe):
            pool.start_nowait(trio.sleep_forever)
            pool.start_nowait(fail, ValueError("x"))
            await trio.sleep_forever()
    assert repr(info.value.exceptions[0]) == "ValueError('x')"
    assert len(pool) == 0
    assert pool.statistics().cancelled == 1


async def test_an_on_exit_that_fails_fails_the_pool(autojump_clock):
    def bad(task, reason):
        raise LookupError("on_exit")

    pool = otp.Pool("pool", slots=2, on_exit=bad)
    with pytest.raises(otp.RestartLimitReached) as info:
        async with otp.open_tree(root(pool)):
            pool.start_nowait(trio.sleep, 0)
            await trio.sleep_forever()
    assert repr(info.value.exceptions[0]) == "LookupError('on_exit')"


async def test_on_exit_may_use_the_freed_slot(autojump_clock):
    order = []

    def again(task, reason):
        order.append(task.key)
        if task.key < 5:
            pool.start_nowait(trio.sleep, 0, key=task.key + 1)

    pool = otp.Pool("pool", slots=1, on_exit=again)
    async with otp.open_tree(root(pool)):
        pool.start_nowait(trio.sleep, 0, key=0)
        await until(lambda: len(pool) == 0)
    assert order == [0, 1, 2, 3, 4, 5]


async def test_drain_and_resume(pool, exits, autojump_clock):
    async with otp.open_tree(root(pool)):
        pool.start_nowait(trio.sleep, 2, key="short")
        pool.start_nowait(trio.sleep, 20, key="long")

        async def waiter():
            with pytest.raises(otp.PoolClosed):
                await pool.wait_free()

        async with trio.open_nursery() as nursery:
            pool.start_nowait(trio.sleep, 3, key="third")
            nursery.start_soon(waiter)
            await wait_all_tasks_blocked()
            begin = trio.current_time()
            nursery.start_soon(waiter)
            await pool.drain(timeout=5)
        assert trio.current_time() - begin == 5
        assert exits == [("short", "normal"), ("third", "normal"), ("long", "shutdown: drain deadline")]
        with pytest.raises(otp.PoolClosed):
            pool.start_nowait(trio.sleep, 1)
        pool.resume()
        pool.start_nowait(trio.sleep, 1, key="after")
        await pool.drain()
    assert exits[-1] == ("after", "normal")


async def test_stop_drains_for_the_shutdown_time(pool, exits, autojump_clock):
    async with otp.open_tree(root(pool, shutdown=5)) as tree:
        pool.start_nowait(trio.sleep, 2, key="short")
        pool.start_nowait(trio.sleep, 20, key="long")
        tree.request_stop()
        await wait_all_tasks_blocked()
        with pytest.raises(otp.PoolClosed):
            pool.start_nowait(trio.sleep, 1)
        begin = trio.current_time()
    assert trio.current_time() - begin == 5
    assert exits == [("short", "normal"), ("long", "shutdown: cancelled")]


async def test_it_says_when_its_shutdown_time_is_over(pool, autojump_clock):
    """Only then, and only when it stops for good: what waits in a shield may be told."""
    kills = []
    for seconds, killed in ((2, 0), (20, 1)):
        async with otp.open_tree(
            root(pool, shutdown=5, on_kill=lambda: kills.append(trio.current_time()))
        ) as tree:
            pool.start_nowait(trio.sleep, seconds)
            begin = trio.current_time()
            await tree.stop()
        assert kills == [begin + 5] * killed


async def test_a_restart_is_no_kill(pool, autojump_clock):
    kills, starts, crash = [], [], trio.Event()

    async def fragile(*, task_status):
        task_status.started()
        await crash.wait()
        if not starts:
            starts.append(1)
            raise ValueError
        await trio.sleep_forever()

    tree = otp.Supervisor(
        "root",
        [
            otp.TaskChild("fragile", fragile, handshake=True),
            otp.PoolChild(pool, shutdown=1, on_kill=lambda: kills.append(1)),
        ],
        strategy="rest_for_one",
        intensity=1,
    )
    async with otp.open_tree(tree, observe=lambda _: None):
        pool.start_nowait(trio.sleep, 20)
        crash.set()
        await wait_all_tasks_blocked()
        while not pool.free:
            await trio.sleep(0.1)
        assert kills == []


async def shielded(until: trio.Event) -> None:
    with trio.CancelScope(shield=True):
        await until.wait()


def crashing(kills: list[int]) -> tuple[otp.Pool, otp.Supervisor]:
    """A pool that fails when its first task ends, and notes when it is killed."""
    exited = list[object]()

    def on_exit(task: otp.PoolTask, reason: otp.ExitReason) -> None:
        exited.append(task.key)
        if len(exited) == 1:
            raise ValueError("a bug")

    pool = otp.Pool("pool", slots=3, on_exit=on_exit)
    child = otp.PoolChild(pool, shutdown=1, on_kill=lambda: kills.append(1))
    return pool, otp.Supervisor("root", [child], intensity=1)


async def test_a_crash_is_no_kill(autojump_clock):
    """The pool starts again, once the tasks that cannot be cancelled have ended."""
    kills, release = list[int](), trio.Event()
    pool, tree = crashing(kills)
    async with otp.open_tree(tree, observe=lambda _: None):
        pool.start_nowait(shielded, release, key="stays")
        pool.start_nowait(trio.sleep, 0, key="ends")
        await trio.sleep(5)
        free = pool.free
        release.set()
        assert not free
        while not pool.free:
            await trio.sleep(0.1)
        assert kills == []


async def test_a_pool_that_is_stopped_after_its_crash_is_killed(autojump_clock):
    kills, release = list[int](), trio.Event()
    pool, tree = crashing(kills)
    with pytest.raises(otp.StopFailed):
        async with otp.open_tree(tree, observe=lambda _: None) as running:
            pool.start_nowait(shielded, release, key="stays")
            pool.start_nowait(trio.sleep, 0, key="ends")
            await trio.sleep(5)
            running.request_stop()
            await trio.sleep(0.9)
            before = len(kills)
            await trio.sleep(0.2)
            release.set()
            assert (before, len(kills)) == (0, 1)


@pytest.mark.parametrize("waited", [0.5, 5])
async def test_a_restart_that_becomes_a_stop_is_a_kill(autojump_clock, waited):
    """Before its shutdown time is over, and after."""
    kills, release, crash = list[int](), trio.Event(), trio.Event()

    async def fragile() -> None:
        await crash.wait()
        raise ValueError

    pool = otp.Pool("pool", slots=3, on_exit=lambda *_: None)
    child = otp.PoolChild(pool, shutdown=1, on_kill=lambda: kills.append(1))
    tree = otp.Supervisor("root", [otp.TaskChild("fragile", fragile), child], strategy="rest_for_one")
    async with otp.open_tree(otp.Supervisor("above", [tree]), observe=lambda _: None) as running:
        pool.start_nowait(shielded, release)
        crash.set()
        await trio.sleep(waited)
        before = len(kills)
        running.request_stop()
        await trio.sleep(1)
        release.set()
        assert (before, len(kills)) == (0, 1)


async def test_each_task_has_its_starters_context(autojump_clock):
    var = contextvars.ContextVar("var", default="none")
    seen = []

    async def show():
        seen.append(var.get())
        var.set("leaked")

    pool = otp.Pool("pool", slots=1)
    async with otp.open_tree(root(pool)):
        for value in "abc":
            var.set(value)
            pool.start_nowait(show)
            await pool.wait_free()
    assert seen == ["a", "b", "c"]
    assert var.get() == "c"


async def test_workers_are_reused_and_bounded(autojump_clock):
    tasks = set()

    async def note():
        tasks.add(trio.lowlevel.current_task())
        await trio.lowlevel.checkpoint()

    pool = otp.Pool("pool", slots=1500)
    async with otp.open_tree(root(pool)):
        for _ in range(50):
            pool.start_nowait(note)
            await wait_all_tasks_blocked()
        assert len(tasks) == 1
        for _ in range(1500):
            pool.start_nowait(note)
        await until(lambda: len(pool) == 0)
        assert len(pool._idle) == 1000


async def test_a_parked_worker_keeps_its_deadline_and_goes_with_it(autojump_clock):
    pool = otp.Pool("pool", slots=2)
    async with otp.open_tree(root(pool)):
        pool.start_nowait(trio.lowlevel.checkpoint, deadline=trio.current_time() + 5)
        await until(lambda: len(pool) == 0)
        assert len(pool._idle) == 1
        long = pool.start_nowait(trio.sleep, 20)  # the same worker: without a deadline now
        assert not pool._idle
        assert long.deadline == math.inf
        await trio.sleep(10)
        assert long.running
        await until(lambda: len(pool) == 0)
        brief = pool.start_nowait(trio.sleep_forever, deadline=trio.current_time() + 1)
        await until(lambda: not brief.running)
        pool.start_nowait(trio.lowlevel.checkpoint, deadline=trio.current_time() + 3)
        await until(lambda: len(pool) == 0)
        assert len(pool._idle) == 1
        await trio.sleep(4)
        assert not pool._idle
        assert pool.statistics().cancelled == 1


async def test_a_pool_restarts_empty(autojump_clock):
    pool = otp.Pool("pool", slots=2)
    tree = otp.Supervisor("root", [otp.PoolChild(pool)])
    async with otp.open_tree(tree, observe=Kit().observe):
        pool.start_nowait(trio.sleep_forever)
        pool.start_nowait(fail, ValueError("x"))
        await until(lambda: pool.statistics().failed == 1 and pool.free == 2)
        pool.start_nowait(trio.sleep, 1)


async def test_snapshot_lists_tasks_on_demand(pool, autojump_clock):
    async with otp.open_tree(root(pool, shutdown="brutal")) as tree:
        for i in range(3):
            pool.start_nowait(trio.sleep_forever, key=f"step {i}")
        await wait_all_tasks_blocked()
        assert tree.snapshot().children[0].children == ()
        nodes = tree.snapshot(tasks=2).children[0].children
        assert [(n.name, n.kind, n.state) for n in nodes] == [
            ("step 0", "pool task", "running"),
            ("step 1", "pool task", "running"),
        ]
        assert "3/3 busy" in tree.snapshot().render()


def test_slots_are_checked():
    with pytest.raises(otp.SpecError, match="slots"):
        otp.Pool("pool", slots=0)


async def test_an_error_during_a_cancellation_is_reported_and_spares_the_pool(pool, exits, autojump_clock):
    async def messy():
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.sleep_forever)
            try:
                await trio.sleep_forever()
            finally:
                raise LookupError("clean-up")

    async with otp.open_tree(root(pool, shutdown=60)):
        pool.start_nowait(trio.sleep, 5, key="other")
        pool.start_nowait(messy, key="messy").cancel("enough")
        await until(lambda: len(pool) == 1)
        assert pool.statistics().failed == 1
        assert "LookupError" in exits[0][1]
    assert exits[1] == ("other", "normal")


async def test_a_stopping_pool_cannot_be_resumed(pool, autojump_clock):
    async with otp.open_tree(root(pool)) as tree:
        pool.start_nowait(trio.sleep, 1)
        tree.request_stop()
        await wait_all_tasks_blocked()
        pool.resume()
        assert pool.free == 0


async def test_a_worker_that_was_cancelled_in_vain_takes_no_other_task(pool, exits, autojump_clock):
    async def deaf():
        pass  # no checkpoint: it never learns that it was cancelled

    async with otp.open_tree(root(pool)):
        pool.start_nowait(deaf, key=1).cancel("in vain")
        await wait_all_tasks_blocked()
        pool.start_nowait(trio.sleep, 1, key=2)
    assert exits == [(1, "normal"), (2, "normal")]


async def test_a_task_that_leaves_a_scope_open_hits_no_other(pool, exits, caplog):
    """Its worker is replaced; its scope would cancel what follows, and its shield keep it from being cancelled."""
    tasks = []

    async def leaves_open(*scopes: trio.CancelScope) -> None:
        tasks.append(trio.lowlevel.current_task())
        for scope in scopes:
            scope.__enter__()
        await trio.lowlevel.cancel_shielded_checkpoint()

    async def innocent() -> None:
        tasks.append(trio.lowlevel.current_task())
        await trio.sleep_forever()

    async with otp.open_tree(root(pool)):
        pool.start_nowait(
            leaves_open, trio.CancelScope(shield=True), trio.CancelScope(deadline=-1), key="leaves"
        )
        await until(lambda: exits)
        task = pool.start_nowait(innocent, key="innocent")
        await wait_all_tasks_blocked()
        assert task.running
        task.cancel("asked to")
        await until(lambda: len(exits) == 2)
    assert exits == [("leaves", "normal"), ("innocent", "shutdown: asked to")]
    assert tasks[0] is not tasks[1]
    assert [
        record.levelname for record in caplog.records if "left a cancel scope open" in record.message
    ] == ["WARNING"] * 2


@pytest.mark.parametrize("group", [False, True])
async def test_a_cancelled_that_no_scope_takes_is_an_error_of_its_task(pool, exits, group):
    found = []
    with trio.CancelScope() as scope:
        scope.cancel()
        try:
            await trio.sleep(0)
        except trio.Cancelled as exc:
            found.append(exc)
    error = BaseExceptionGroup("kept", [found.pop(), ValueError()]) if group else found.pop()
    async with otp.open_tree(root(pool)):
        pool.start_nowait(trio.sleep_forever, key="innocent")
        pool.start_nowait(fail, error, key="stray")
        await until(lambda: exits)
        assert len(pool) == 1
        pool.get("innocent").cancel("end")
    assert exits[0][0] == "stray"
    assert "it was not cancelled" in exits[0][1]
