"""`execute_next` that is cancelled: its row is released or its commit finished, and nothing is left."""

from __future__ import annotations

from contextlib import ExitStack, suppress
from typing import Any

import durable_actors as da
import pytest
import trio
from durable_actors._engine.claiming import pick_one
from tests.engine.kit import Db, Gate, client_of, gated, locked, simple
from tests.kit import until

pytestmark = pytest.mark.usefixtures("registry")


async def test_a_cancelled_call_releases_its_row(db: Db) -> None:
    gate = Gate()
    machine = gated(gate)
    async with client_of(db) as client:
        number = await client.insert(machine)
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(client.execute_next)
                await gate.wait_entered()
                scope.cancel()
        assert db.row(number, "status, attempt, interruptions") == ("runnable", 0, 1)


async def test_a_call_cancelled_while_its_thread_runs_ends_with_the_thread(db: Db) -> None:
    gate = Gate()

    class Thread(da.Machine, name="thread"):
        @da.step
        def start(self, ctx: da.Context) -> da.Outcome:
            gate.wait_in_thread()
            return da.Done()

    async with client_of(db) as client:
        number = await client.insert(Thread)
        ended = trio.Event()

        async def call() -> None:
            try:
                with scope:
                    await client.execute_next(lease_ttl=0.3)
            finally:
                ended.set()

        scope = trio.CancelScope()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(call)
            await gate.wait_entered()
            scope.cancel()
            await db.eventually(
                "select lease_expires_at > updated_at + interval '0.6 s' from durable.gen_durable where id = %s",
                number,
            )
            assert not ended.is_set()
            gate.open()
        assert db.row(number, "status, attempt, interruptions") == ("runnable", 0, 1)


async def test_a_commit_under_way_is_finished_when_the_call_is_cancelled(db: Db) -> None:
    machine = simple()
    async with client_of(db) as client:
        number = await client.insert(machine, state={"n": 1})
        scope = trio.CancelScope()
        other = None

        def commits(claim: object) -> None:
            nonlocal other
            other = locked(db.dsn, number)
            other.__enter__()
            nursery.start_soon(cancel)

        async def cancel() -> None:
            await db.eventually("select exists (select from pg_stat_activity where wait_event_type = 'Lock')")
            scope.cancel()
            await trio.sleep(0.05)
            other.__exit__(None, None, None)

        client.executor.on_outcome = commits
        async with trio.open_nursery() as nursery:
            with scope:
                await client.execute_next()
        assert scope.cancelled_caught
        assert db.row(number, "status") == ("done",)


class CancelAt(trio.abc.Instrument):
    """Cancels a scope at the n-th step of any task."""

    def __init__(self, scope: trio.CancelScope, n: int) -> None:
        self.scope, self.left = scope, n

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        self.left -= 1
        if not self.left:
            self.scope.cancel()


@pytest.mark.parametrize("key", [None, "k"], ids=["plain", "keyed"])
async def test_cancelled_anywhere_a_call_leaves_nothing(db: Db, key: str | None) -> None:
    """No claim, no lock, no task: at each step of the scheduler, until the calls are no longer caught."""

    class Two(da.Machine, name="two"):
        @da.step(initial=True)
        async def first(self, ctx: da.Context) -> da.Outcome:
            return da.Next(self.second)

        @da.step
        async def second(self, ctx: da.Context) -> da.Outcome:
            return da.Done()

    async with client_of(db) as client:
        tasks = trio.lowlevel.current_statistics().tasks_living
        caught = 0
        for n in [*range(1, 60), *range(60, 1000, 7)]:
            number = await client.insert(Two, partition_key=key)
            with trio.CancelScope() as scope:
                instrument = CancelAt(scope, n)
                trio.lowlevel.add_instrument(instrument)
                try:
                    await client.execute_next()
                finally:
                    trio.lowlevel.remove_instrument(instrument)
            status, step, attempt, hold = db.row(number, "status, step, attempt, hold")
            assert (status, attempt, hold) == ("runnable", 0, 0), n
            assert trio.lowlevel.current_statistics().tasks_living == tasks
            await until(lambda: db.locks() == 0)
            db.execute("delete from durable.gen_durable")
            caught += scope.cancelled_caught
            if step == "second" and not scope.cancel_called:
                break
        assert caught > 30
        assert step == "second"


async def test_a_pick_is_not_cancelled_halfway(db: Db, monkeypatch: pytest.MonkeyPatch) -> None:
    real = pick_one.pick_instances

    async def cancelled_on_the_way(*args: Any, **options: Any) -> Any:
        picked = await real(*args, **options)
        scope.cancel()
        await trio.lowlevel.checkpoint()
        return picked

    monkeypatch.setattr(pick_one, "pick_instances", cancelled_on_the_way)
    machine = simple()
    async with client_of(db) as client:
        number = await client.insert(machine, state={"n": 1})
        with trio.CancelScope() as scope:
            await client.execute_next()
        assert scope.cancelled_caught
        assert db.row(number, "status, attempt, locked_by") == ("runnable", 0, None)


@pytest.mark.parametrize("how", ["cancelled", "of unknown fate"])
async def test_a_row_that_is_locked_when_its_pick_is_undone_is_released_a_moment_later(
    db: Db, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """A pick of its key's siblings locks an executing row, and a release passes by what is locked."""
    pick, release = pick_one.pick_instances, pick_one.release_claims
    released: list[int] = []

    async def picked_and_locked(*args: Any, **options: Any) -> Any:
        picked = await pick(*args, **options)
        others.enter_context(locked(db.dsn, number))
        if how == "of unknown fate":
            raise da.CommitUnknown("the connection was lost")
        scope.cancel()
        return picked

    async def unlocked_after_it(*args: Any, **options: Any) -> Any:
        found = await release(*args, **options)
        released.append(len(found.ids))
        others.close()
        return found

    monkeypatch.setattr(pick_one, "pick_instances", picked_and_locked)
    monkeypatch.setattr(pick_one, "release_claims", unlocked_after_it)
    with ExitStack() as others:
        async with client_of(db) as client:
            number = await client.insert(simple(), state={"n": 1}, partition_key="k")
            with trio.CancelScope() as scope, suppress(da.CommitUnknown):
                await client.execute_next()
    assert released == [0, 1]
    assert db.row(number, "status, attempt, locked_by") == ("runnable", 0, None)
