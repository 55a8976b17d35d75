"""Waiting for results and inspecting instances: one waiter polls for all, and passes that role on when it leaves."""

from __future__ import annotations

from contextlib import asynccontextmanager
from datetime import timedelta

import attrs
import durable_actors as da
import pytest
import trio
import trio.testing
from durable_actors import _results
from durable_actors._results import OUTAGE_TIMEOUT, ResultWatch
from durable_actors._store.read import Ending
from durable_actors.errors import NoTarget, StoreUnavailable
from tests.engine.kit import QUIET, Gate, running
from tests.kit import until

pytestmark = pytest.mark.usefixtures("registry")


@attrs.frozen
class Receipt:
    total: int


def echo():
    class Echo(da.Machine, name="echo"):
        @da.step
        async def start(self, ctx):
            return da.Done(ctx.state["say"])

    return Echo


async def test_by_id_and_by_key(durable_dsn):
    M = echo()
    async with running(durable_dsn) as run:
        number = await run.insert(M, state={"say": {"total": 7}}, unique_key="order:1")
        assert await da.result(number, timeout=30) == {"total": 7}
        assert await da.result("order:1", timeout=30) == {"total": 7}
        assert await da.result(b"order:1", timeout=30) == {"total": 7}
        assert await da.result(number, type=Receipt) == Receipt(7)
        with pytest.raises(da.StateError, match="total"):
            await da.result(await run.insert(M, state={"say": {"total": "x"}}), type=Receipt, timeout=30)
        assert (await da.inspect("order:1")).id == (await da.inspect(number)).id == number


async def test_nobody_there(durable_dsn):
    echo()
    async with running(durable_dsn):
        for target in (404, "nobody", b"nobody"):
            with pytest.raises(da.NoTarget, match=r"404|nobody"):
                await da.result(target, timeout=30)
            with pytest.raises(da.NoTarget, match=r"404|nobody"):
                await da.inspect(target)


@pytest.mark.parametrize("timeout", [0.02, timedelta(milliseconds=20), 0])
async def test_too_slow(durable_dsn, timeout):
    M = echo()
    async with running(durable_dsn, queues={}) as run:
        number = await run.insert(M, state={"say": 1})
        with pytest.raises(trio.TooSlowError):
            await da.result(number, timeout=timeout)
        with pytest.raises(da.ConfigError, match="timeout"):
            await da.result(number, timeout=-1)


async def test_failed(durable_dsn):
    class M(da.Machine):
        @da.step
        async def start(self, ctx):
            return da.Stop(ValueError("no stock"))

    async with running(durable_dsn) as run:
        number = await run.insert(M)
        with pytest.raises(da.InstanceFailed, match="no stock") as caught:
            await da.result(number, timeout=30)
        assert caught.value.id == number


async def test_many_waiters_of_many_instances(durable_dsn):
    """One of them looks for all; it passes the lead on when it leaves or is cancelled."""
    gate, M, found = Gate(), echo(), []

    class Slow(da.Machine):
        @da.step
        async def start(self, ctx):
            await gate.wait()
            return da.Done("slow")

    async with running(durable_dsn, **QUIET) as run:
        slow = await run.insert(Slow)
        await gate.wait_entered()

        async def wait(number: int) -> None:
            found.append(await da.result(number, timeout=30))

        async with trio.open_nursery() as nursery:
            with trio.CancelScope() as leader:
                async with trio.open_nursery() as inner:
                    inner.start_soon(wait, slow)  # it leads
                    await trio.testing.wait_all_tasks_blocked(0.02)
                    for n in range(20):
                        nursery.start_soon(wait, await run.insert(M, state={"say": n}))
                    leader.cancel()
            nursery.start_soon(wait, slow)
            nursery.start_soon(wait, slow)
            await until(lambda: len(found) >= 20)
            gate.open()
    assert sorted(each for each in found if each != "slow") == list(range(20))
    assert found.count("slow") == 2


async def test_ended_elsewhere(durable_dsn):
    """A client without an engine polls; it needs no hint."""
    M = echo()
    async with da.open_client(durable_dsn, name="web") as web, running(durable_dsn, name="worker"):
        number = await web.insert(M, state={"say": "hello"})
        assert number is not None
        assert await web.result(number, timeout=30) == "hello"


async def test_an_instance_as_it_runs(durable_dsn):
    gate = Gate()

    class M(da.Machine, queue="q"):
        @da.step
        async def start(self, ctx):
            await gate.wait()
            return da.Done()

    async with running(durable_dsn) as run:
        number = await run.insert(M, state={"a": [1]}, priority=2)
        await gate.wait_entered()
        row = await da.inspect(number)
        assert (row.status, row.locked_by, row.queue, row.priority) == (
            "executing",
            run.engine.incarnation,
            "q",
            2,
        )
        assert row.state == {"a": [1]}
        assert row.lease_expires_at is not None
        assert row.lease_expires_at > row.inserted_at
        assert row.finished_at is None
        gate.open()


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
        found = {number: Ending(number, "done", b"1", None) for number in numbers if number in self.ended}
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
        await until(lambda: answered == [2])
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
        await trio.sleep(OUTAGE_TIMEOUT / 2)
        nursery.start_soon(wait, 99)
    told.sort()
    assert OUTAGE_TIMEOUT < told[0] <= told[-2] < OUTAGE_TIMEOUT + 10
    assert OUTAGE_TIMEOUT * 1.5 < told[-1] < OUTAGE_TIMEOUT * 1.5 + 10


async def test_an_outage_in_between_is_borne(rows, autojump_clock):
    watch, rows.away = rows.watch(), True
    async with trio.open_nursery() as nursery:
        nursery.start_soon(watch.wait, 1)
        await trio.sleep(OUTAGE_TIMEOUT - 1)
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


async def test_a_missing_row_of_a_claim_here_is_waited_for(rows, autojump_clock):
    """The commit has deleted it (keep=0), and its verdict, with the result, is on the way."""
    watch, here, found = rows.watch(), {7}, []
    watch.runs_here = here.__contains__
    rows.missing = {7}

    async def wait() -> None:
        found.append((await watch.wait(7)).result)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait)
        nursery.start_soon(wait)
        await trio.sleep(5)
        assert found == []
        rows.hold = trio.Event()  # a look is under way, and has found no row
        looks = len(rows.looks)
        await until(lambda: len(rows.looks) > looks)
        watch.hint(7, Ending(7, "done", b"1", None))
        here.clear()
        rows.hold.set()
    assert found == [b"1", b"1"]
    with pytest.raises(NoTarget):
        await watch.wait(7)
