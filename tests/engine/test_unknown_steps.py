"""A rolling deploy: rows at a step which this node's code does not have wait for a node whose code has it."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from typing import Any

import durable_actors as da
import pytest
import trio
from click.testing import CliRunner
from durable_actors.cli import cli
from durable_actors.machine import isolated_registry
from durable_actors.telemetry import Picked, StepCommitted
from tests.engine.kit import Gate, failing_log, running
from tests.kit import until

pytestmark = pytest.mark.usefixtures("registry")


def old_order():
    """The release that runs already."""

    class Order(da.Machine, name="order"):
        @da.step
        async def start(self, ctx):
            return da.Done("old")

    return Order


def new_order():
    """The release that is rolled out: it has more steps."""

    class Order(da.Machine, name="order"):
        @da.step
        async def start(self, ctx):
            return da.Next(self.ship)

        @da.step
        async def wait(self, ctx):
            return da.Await("paid", then=self.ship)

        @da.step
        async def split(self, ctx):
            return da.ScheduleChildren(self.ship, [da.Child(small)])

        @da.step
        async def ship(self, ctx):
            return da.Done(
                [signal.payload for signal in ctx.awaited] + [each.result for each in ctx.children]
            )

    @da.job(name="small", queue="small")
    async def small(args: dict[str, Any]) -> int:
        return 7

    return Order, small


@asynccontextmanager
async def release(dsn: str, define: Any, **options: Any):
    """An engine with that code alone, whatever the rest of this process defines."""
    with isolated_registry():
        defined = define()
        async with AsyncExitStack() as stack:
            run = await stack.enter_async_context(running(dsn, **options))
            yield run, defined


@contextmanager
def code(define: Any):
    with isolated_registry():
        yield define()


async def shelved(db, count: int) -> None:
    await db.eventually(
        "select count(*) = %s from durable.gen_durable where status = 'runnable' and hold = 2", count
    )


def fates(db, where: str = "true") -> set[tuple[Any, ...]]:
    return set(
        db.execute(
            f"select status::text, step, attempt, crashes, hold, last_error from durable.gen_durable where {where}"
        )
    )


async def test_a_step_that_is_missing_here_is_neither_run_nor_failed_and_is_run_where_it_exists(
    durable_dsn, db
):
    with code(new_order) as (Order, _):
        async with running(durable_dsn, queues={}) as client:
            strange = [await client.insert(Order, step="ship", priority=-9) for _ in range(10)]
    async with release(durable_dsn, old_order, queues={"default": 2}) as (run, Order):
        assert [(await run.run(Order)).result for _ in range(3)] == ["old"] * 3  # nobody is held up
        await shelved(db, 10)
        assert sum(event.shelved for event in run.events.all(Picked)) == 10  # once each
    assert fates(db, "step = 'ship'") == {("runnable", "ship", 0, 0, 2, None)}
    async with release(durable_dsn, new_order) as (run, _):
        ended = [await run.ended(number) for number in strange]
    assert {(each.status, each.attempt) for each in ended} == {("done", 0)}


async def test_both_releases_side_by_side(durable_dsn, db):
    """The new one sends its instances on to steps of which the old one knows nothing; the old one meets them, too."""
    async with (
        release(durable_dsn, old_order, name="old"),
        release(durable_dsn, new_order, name="new") as (new, defined),
    ):
        ids = [await new.insert(defined[0]) for _ in range(20)]
        ended = [await new.ended(number) for number in ids]
    assert {each.status for each in ended} == {"done"}


@pytest.mark.parametrize("how", ["signal", "children"])
async def test_an_instance_that_is_woken_into_a_missing_step_keeps_what_it_was_woken_with(
    durable_dsn, db, how
):
    async with release(durable_dsn, new_order, queues={"default": 1}) as (run, (Order, _)):
        number = await run.insert(Order, step={"signal": "wait", "children": "split"}[how])
        await run.events.wait(StepCommitted, id=number)

    def old():
        @da.job(name="small", queue="small")
        async def small(args: dict[str, Any]) -> int:
            return 7

        return old_order()

    async with release(durable_dsn, old, queues={"default": 1, "small": 1}) as (run, _):
        if how == "signal":
            await run.engine.client.signal(number, "paid", 5)
        await shelved(db, 1)
    assert fates(db, f"id = {number}") == {("runnable", "ship", 0, 0, 2, None)}
    async with release(durable_dsn, new_order) as (run, _):
        assert (await run.ended(number)).result == ([5] if how == "signal" else [7])


def reloadable(gate: Gate, *, ships: bool, ahead: bool = True, reload: Callable[[], None] | None = None):
    """One class that is defined again, as a reload does: the same module and name."""

    class Reloaded(da.Machine, name="reloaded", run_ahead=ahead):
        @da.step
        async def start(self, ctx):
            await gate.wait()
            if reload is not None:
                reload()
                return da.Next("ship")
            return da.Done()

        if ships:

            @da.step
            async def ship(self, ctx):
                return da.Done("shipped")

    return Reloaded


async def test_a_step_that_a_reload_removes_while_its_claim_waits_for_a_slot(durable_dsn, db):
    gate = Gate()
    M = reloadable(gate, ships=True)
    async with running(durable_dsn, queues={"default": da.Queue(1, prefetch=5)}) as run:
        await run.insert(M)
        await gate.wait_entered()
        number = await run.insert(M, step="ship", partition_key="k")
        await db.eventually("select status = 'executing' from durable.gen_durable where id = %s", number)
        reloadable(gate, ships=False)
        sibling = await run.insert(M, partition_key="k")
        # A pick has taken the new definition in, and held the sibling behind the claim.
        await db.eventually("select hold = 1 from durable.gen_durable where id = %s", sibling)
        gate.open()
        assert (await run.ended(sibling)).status == "done"  # it does not wait behind what is shelved
        await shelved(db, 1)
        assert fates(db, f"id = {number}") == {("runnable", "ship", 0, 0, 2, None)}
        reloadable(gate, ships=True)
        assert (await run.ended(number)).result == "shipped"


async def test_a_log_handler_that_fails_keeps_no_removed_step_claimed(durable_dsn, db):
    gate = Gate()
    async with running(durable_dsn, lease_ttl=60) as run:

        def reload() -> None:
            reloadable(gate, ships=False)
            run.engine._node.catalog.refresh()  # as the next pick does

        number = await run.insert(reloadable(gate, ships=True, reload=reload))
        await gate.wait_entered()
        with failing_log():
            gate.open()
            await shelved(db, 1)
        assert fates(db, f"id = {number}") == {("runnable", "ship", 0, 0, 2, None)}


async def test_a_step_that_a_reload_removes_before_an_instance_goes_on_to_it(durable_dsn, db, ahead):
    gate = Gate()
    async with running(durable_dsn) as run:

        def reload() -> None:
            reloadable(gate, ships=False)
            run.engine._node.catalog.refresh()  # as the next pick does

        number = await run.insert(reloadable(gate, ships=True, ahead=ahead, reload=reload))
        await gate.wait_entered()
        gate.open()
        await shelved(db, 1)
        assert fates(db, f"id = {number}") == {("runnable", "ship", 0, 0, 2, None)}
        reloadable(gate, ships=True)
        assert (await run.ended(number)).result == "shipped"


async def test_what_nobody_here_can_run_is_warned_of_once_and_explained(durable_dsn, db, caplog):
    caplog.set_level(logging.WARNING, "durable_actors")
    for step in ("ship", "ship", "pack"):
        db.insert(fsm="order", step=step)
    db.insert(fsm="__main__:Order", step="start")
    runner = CliRunner()
    async with release(durable_dsn, old_order, queues={"default": 2}) as (run, Order):
        await shelved(db, 4)
        await until(lambda: len(texts(caplog)) >= 3)
        for _ in range(3):  # further looks say nothing new
            await run.run(Order)
        shown = await trio.to_thread.run_sync(
            lambda: runner.invoke(cli, ["show", "1", "--json"], env={"DURABLE_DSN": durable_dsn})
        )
    assert (
        "no live node that serves queue 'default' knows step 'ship' of order/1"
        in json.loads(shown.stdout)["why"]
    )
    found = sorted(texts(caplog))
    assert len(found) == 3, found
    assert "machine '__main__:Order' version 1" in found[0]
    assert "a module that this worker imports" in found[0]
    assert "step 'pack' of machine 'order' version 1" in found[1]
    assert "step 'ship' of machine 'order' version 1" in found[2]


def texts(caplog) -> list[str]:
    return [each.getMessage() for each in caplog.records if "cannot run" in each.getMessage()]
