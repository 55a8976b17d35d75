"""Waiting for results: the lead is never lost, waiting costs no more for being many, bad news come to all."""

from __future__ import annotations

from contextlib import asynccontextmanager

import pytest
import trio
import trio.testing
from durable_actors import _results
from durable_actors._results import PATIENCE, ResultWatch
from durable_actors._store.read import Final
from durable_actors.errors import NoTarget, StoreUnavailable


class Rows:
    """A pool and a table, as far as the watch can tell."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ended: set[int] = set()
        self.missing: set[int] = set()
        self.away = False
        self.closed = False
        self.looks: list[list[int]] = []
        self.hold = trio.Event()
        self.hold.set()
        monkeypatch.setattr(_results, "read_finals", self.read)

    @asynccontextmanager
    async def acquire(self, lane: str, *, within: float | None = None):
        await trio.lowlevel.checkpoint()
        if self.away or self.closed:
            raise StoreUnavailable("away")
        yield None

    async def read(self, conn: object, schema: str, numbers: list[int]):
        self.looks.append(numbers)
        found = {number: Final(number, "done", b"1", None) for number in numbers if number in self.ended}
        missing = self.missing & set(numbers)
        await self.hold.wait()
        return found, missing

    def watch(self) -> ResultWatch:
        return ResultWatch(self, "client", "durable")  # type: ignore[arg-type]


@pytest.fixture
def rows(monkeypatch):
    return Rows(monkeypatch)


async def test_who_is_woken_to_lead_and_cancelled_passes_it_on(rows, autojump_clock):
    watch, scopes, answered = rows.watch(), [trio.CancelScope() for _ in range(3)], []

    async def wait(index):
        with scopes[index]:
            answered.append((await watch.wait(index)).id)

    async with trio.open_nursery() as nursery:
        for index in range(3):
            nursery.start_soon(wait, index)
            await trio.testing.wait_all_tasks_blocked(0.001)
        # All but the last are cancelled in one tick: the leader hands the lead to somebody who is leaving.
        scopes[1].cancel()
        scopes[0].cancel()
        await trio.testing.wait_all_tasks_blocked(0.001)
        rows.ended = {2}
        with trio.fail_after(10):
            while answered != [2]:
                await trio.sleep(0.1)
    assert watch._waiters == {}


async def test_every_order_of_leaving(rows, autojump_clock):
    """Leader, next in line and bystanders leave in any order, some answered, some cancelled: nobody waits for ever."""
    for seed in range(60):
        watch, scopes, left = rows.watch(), [trio.CancelScope() for _ in range(5)], set()
        rows.ended.clear()

        async def wait(index, scopes=scopes, watch=watch, left=left):
            with scopes[index]:
                await watch.wait(index)
            left.add(index)

        with trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                for index in range(5):
                    nursery.start_soon(wait, index)
                await trio.sleep(0.001 * (seed % 7))
                for step in range(4):
                    index = (seed // (step + 1) + step) % 5
                    scopes[index].cancel() if (seed >> step) & 1 else rows.ended.add(index)
                    if seed % 3:
                        await trio.sleep(0.003 * (seed % 5))
                rows.ended.update(range(5))
        assert left == set(range(5))


async def test_a_hint_looks_for_one(rows, autojump_clock):
    watch, waiters = rows.watch(), 500
    async with trio.open_nursery() as nursery:
        for number in range(waiters):
            nursery.start_soon(watch.wait, number)
        await trio.sleep(5)  # polling is slow by now
        rows.looks.clear()
        rows.ended.add(77)
        watch.hint(77)
        await trio.testing.wait_all_tasks_blocked(0.001)
        assert rows.looks == [[77]]
        watch.hint(1234)  # nobody's
        await trio.testing.wait_all_tasks_blocked(0.001)
        assert rows.looks == [[77]]
        rows.ended.update(range(waiters))


async def test_all_are_told_when_the_store_stays_away(rows, autojump_clock):
    """Each after its own patience, not one after the other."""
    watch, told = rows.watch(), []

    async def wait(number):
        with pytest.raises(StoreUnavailable):
            await watch.wait(number)
        told.append(trio.current_time() - began)

    rows.away = True
    began = trio.current_time()
    async with trio.open_nursery() as nursery:
        for number in range(20):
            nursery.start_soon(wait, number)
        await trio.sleep(PATIENCE / 2)
        nursery.start_soon(wait, 99)
    told.sort()
    assert PATIENCE < told[0] <= told[-2] < PATIENCE + 10
    assert PATIENCE * 1.5 < told[-1] < PATIENCE * 1.5 + 10


async def test_an_outage_in_between_is_borne(rows, autojump_clock):
    watch, rows.away = rows.watch(), True
    async with trio.open_nursery() as nursery:
        nursery.start_soon(watch.wait, 1)
        await trio.sleep(PATIENCE - 1)
        rows.away, rows.ended = False, {1}


async def test_a_closed_client_tells_at_once(rows, autojump_clock):
    watch = rows.watch()
    began = trio.current_time()
    async with trio.open_nursery() as nursery:

        @nursery.start_soon
        async def _() -> None:
            with pytest.raises(StoreUnavailable):
                await watch.wait(1)

        await trio.sleep(1)
        rows.closed = True
    assert trio.current_time() - began < 2


async def test_who_comes_while_it_is_read_is_not_told_an_old_truth(rows, autojump_clock):
    """The row was missing when it was read; whoever asks after the insert must not hear that."""
    watch, rows.missing, rows.hold = rows.watch(), {1}, trio.Event()
    async with trio.open_nursery() as nursery:

        @nursery.start_soon
        async def _() -> None:
            with pytest.raises(NoTarget):
                await watch.wait(1)

        await trio.testing.wait_all_tasks_blocked(0.001)
        rows.missing, rows.ended = set(), {1}
        nursery.start_soon(watch.wait, 1)
        await trio.testing.wait_all_tasks_blocked(0.001)
        rows.hold.set()
