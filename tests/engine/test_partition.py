"""Partition keys in running engines: one step at a time, in order, whoever runs it."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import Any

import durable_actors as da
import pytest
import trio
from durable_actors.engine import open_engine
from durable_actors.telemetry import ClaimLost, Picked, StepStarted
from tests.engine.kit import QUIET, Db, Gate, running
from tests.kit import until

pytestmark = pytest.mark.usefixtures("registry")


class Probe:
    """Who runs when, per key."""

    def __init__(self) -> None:
        self.now: dict[str, int] = {}
        self.most = 0
        self.order: list[tuple[str, int]] = []

    async def run(self, key: str, n: int, pause: float = 0.0) -> None:
        self.now[key] = self.now.get(key, 0) + 1
        self.most = max(self.most, self.now[key])
        self.order.append((key, n))
        try:
            await trio.sleep(pause)
        finally:
            self.now[key] -= 1

    def of(self, key: str) -> list[int]:
        return [n for each, n in self.order if each == key]


def keyed(probe: Probe, ahead: bool, steps: int = 1, **options):
    class M(da.Machine, name="keyed", run_ahead=ahead, **options):
        @da.step
        async def start(self, ctx):
            await probe.run(ctx.state["key"], ctx.state["n"])
            return da.Next(self.start) if ctx.visit < steps else da.Done(ctx.attempt)

    return M


def rows(keys: int, each: int) -> list:
    return [
        {"state": {"key": f"k{key}", "n": n}, "partition_key": f"k{key}"}
        for n in range(each)
        for key in range(keys)
    ]


@pytest.mark.parametrize("engines", [1, 2])
async def test_one_at_a_time_in_order(durable_dsn, ahead, engines):
    """Two engines on one database, as two nodes."""
    probe = Probe()
    M = keyed(probe, ahead)
    async with AsyncExitStack() as stack:
        runs = [
            await stack.enter_async_context(
                running(durable_dsn, name=f"n{i}", node=f"n{i}", queues={"default": da.Queue(4, prefetch=2)})
            )
            for i in range(engines)
        ]
        # More keys than one engine has places: a key mostly stays with the engine that has it.
        keys = 3 if engines == 1 else 28
        ids = await runs[0].engine.client.insert_many(M, rows(keys, 12))
        for number in ids:
            assert number is not None
            assert (await runs[0].ended(number)).attempt == 0
        if engines == 2:
            assert all(run.events.all(StepStarted) for run in runs)  # they share the work
    assert probe.most == 1
    for key in range(keys):
        assert probe.of(f"k{key}") == list(range(12))


async def test_across_queues(durable_dsn, ahead):
    """The key is one, whatever queue its rows are in."""
    probe, gate = Probe(), Gate()

    class M(da.Machine, name="m", run_ahead=ahead):
        @da.step
        async def start(self, ctx):
            if ctx.state["n"] == 0:
                await gate.wait()
            await probe.run("k", ctx.state["n"])
            return da.Done()

    async with running(durable_dsn, queues={"a": 5, "b": 5}) as run:
        first = await run.insert(M, state={"n": 0}, queue="a", partition_key="k")
        await gate.wait_entered()
        others = [
            await run.insert(M, state={"n": n}, queue=queue, partition_key="k")
            for n, queue in enumerate(["b", "a", "b"], start=1)
        ]
        free = await run.insert(M, state={"n": 9}, queue="b")
        await run.ended(free)  # who has no key is not held up
        gate.open()
        for number in (first, *others):
            await run.ended(number)
    assert probe.of("k") == [9, 0, 1, 2, 3]


async def test_the_first_by_priority_goes_next(durable_dsn):
    probe, gate = Probe(), Gate()

    class M(da.Machine, name="m"):
        @da.step
        async def start(self, ctx):
            if ctx.state["n"] == 0:
                await gate.wait()
            await probe.run("k", ctx.state["n"])
            return da.Done()

    async with running(durable_dsn) as run:
        ids = [await run.insert(M, state={"n": 0}, partition_key="k")]
        await gate.wait_entered()
        for n, priority in [(1, 5), (2, 0), (3, -5), (4, 5)]:
            ids.append(await run.insert(M, state={"n": n}, partition_key="k", priority=priority))
        gate.open()
        for number in ids:
            await run.ended(number)
    assert probe.of("k") == [0, 3, 2, 1, 4]


async def test_a_delayed_row_gives_up_its_place(durable_dsn, ahead):
    """So does one that retries later, and one that another node must run."""
    probe = Probe()

    class M(da.Machine, name="m", run_ahead=ahead):
        @da.step
        async def start(self, ctx):
            await probe.run("k", ctx.state["n"])
            if ctx.state["n"] == 1 and not ctx.attempt:
                return da.Retry(delay=600)
            return da.Done()

    async with running(durable_dsn) as run:
        delayed = await run.insert(M, state={"n": 0}, partition_key="k", schedule_in=600, priority=-9)
        retried = await run.insert(M, state={"n": 1}, partition_key="k", priority=-8)
        last = await run.insert(M, state={"n": 2}, partition_key="k")
        await run.ended(last)
        for number in (delayed, retried):
            assert (await da.inspect(number)).status == "runnable"
    assert probe.of("k") == [1, 2]


async def test_an_unknown_machine_gives_up_its_place(durable_dsn, db):
    probe = Probe()
    M = keyed(probe, True)
    db.execute(
        "insert into durable.gen_durable (fsm, step, partition_key, priority) values ('strange', 's', 'k0', -5)"
    )
    async with running(durable_dsn) as run:
        ids = await run.engine.client.insert_many(M, rows(1, 3))
        for number in ids:
            assert number is not None
            await run.ended(number)
    assert probe.of("k0") == [0, 1, 2]


async def test_run_ahead_yields_to_a_due_sibling(durable_dsn, ahead):
    """The unit is the step: a chain with a key lets its siblings in between its steps."""
    probe, gate = Probe(), Gate()

    class M(da.Machine, name="m", run_ahead=ahead):
        @da.step
        async def start(self, ctx):
            if ctx.state["n"] == 0 and ctx.visit == 1:
                await gate.wait()
            await probe.run("k", ctx.state["n"])
            return da.Next(self.start) if ctx.visit < 3 else da.Done()

    async with running(durable_dsn) as run:
        chain = await run.insert(M, state={"n": 0}, partition_key="k")
        await gate.wait_entered()
        sibling = await run.insert(M, state={"n": 1}, partition_key="k")
        gate.open()
        await run.ended(chain)
        await run.ended(sibling)
    assert probe.most == 1
    assert probe.of("k")[:2] == [0, 1]  # it did not run ahead past the one that waited
    assert sorted(probe.of("k")) == [0, 0, 0, 1, 1, 1]


@pytest.mark.parametrize("to", ["other", None])
async def test_next_changes_the_key(durable_dsn, db, ahead, to):
    """The next step runs under the new key only: what held the old one is free, what holds the new one is obeyed."""
    gate, keys = Gate(), []

    class M(da.Machine, name="m", run_ahead=ahead):
        @da.step
        async def start(self, ctx):
            if "hold" in ctx.state:
                await gate.wait()
                return da.Done("held")
            return da.Next(self.second, partition_key=to)

        @da.step
        async def second(self, ctx):
            keys.append(db.row(ctx.id, "partition_key"))
            return da.Done("second")

    async with running(durable_dsn, **QUIET) as run:
        holder = await run.insert(M, state={"hold": 1}, partition_key="other")
        await gate.wait_entered()
        number = await run.insert(M, partition_key="k")
        if to is None:
            row = await run.ended(number)
        else:
            await db.eventually(
                "select visit = 2 and status = 'runnable' from durable.gen_durable where id = %s", number
            )
            picks = len(run.events.all(Picked))
            await run.insert(M, schedule_in=600)  # makes the feeder look again
            await run.events.wait(Picked, count=picks + 1)
            assert not keys
            gate.open()
            row = await run.ended(number)
        gate.open()
        await run.ended(holder)
    assert (row.result, row.partition_key, row.visit) == ("second", to, 2)
    assert keys == [(to,)]


async def test_a_hot_key_blocks_nobody_else(durable_dsn):
    gate = Gate()

    class M(da.Machine, name="m"):
        @da.step
        async def start(self, ctx):
            if ctx.state.get("hold"):
                await gate.wait()
            return da.Done()

    async with running(durable_dsn, queues={"default": 3}) as run:
        hot = [{"state": {"hold": True}, "partition_key": "hot"}] * 50
        ids = await run.engine.client.insert_many(M, hot)
        await gate.wait_entered()
        for n in range(5):
            assert (await run.run(M, partition_key=f"cold {n}")).status == "done"
        assert gate.entered == 1
        gate.open()
        for number in ids:
            assert number is not None
            await run.ended(number)


# Whoever has an advisory lock: the keepers, and now and then a pick that is deciding about keys.
CUT = (
    "select pg_terminate_backend(pid, 5000) from pg_locks where locktype = 'advisory' and objsubid = 1"
    " and database = (select oid from pg_database where datname = current_database())"
)


def waits(started: list[int]) -> type[da.Machine[dict[str, Any]]]:
    class Waits(da.Machine[dict[str, Any]], queue="waits", name="test.Waits"):
        @da.step(initial=True)
        async def start(self, ctx: da.Context[dict[str, Any]]) -> da.Outcome:
            started.append(ctx.attempt)
            if ctx.attempt == 0:
                await trio.sleep_forever()
            return da.Done(ctx.attempt)

    return Waits


async def test_two_engines_never_run_two_steps_of_a_key_and_keep_its_order(db: Db):
    probe = Probe()
    machine = keyed(probe, True, queue="keyed")
    options: dict[str, Any] = {
        "dsn": db.dsn,
        "queues": {"keyed": 8},
        "machines": [machine],
        "poll_interval": 0.02,
    }
    async with open_engine(**options, name="a", node="a") as a, open_engine(**options, name="b", node="b"):
        rows = [{"state": {"key": f"k{n % 5}", "n": n}, "partition_key": f"k{n % 5}"} for n in range(100)]
        ids = await da.insert_many(machine, rows, engine="a")
        with trio.fail_after(30):
            for number in ids:
                assert number is not None
                assert await da.result(number, engine="a") == 0, "no attempt was spent"
        assert probe.most == 1
        for key in {key for key, _ in probe.order}:
            assert probe.of(key) == sorted(probe.of(key))
        assert a.name == "a"
    await until(lambda: db.locks() == 0)


async def test_a_lost_session_runs_the_step_again_at_once(db: Db):
    """Cancelled, released with attempt + 1, crashes unchanged, and not after a lease but now."""
    started: list[int] = []
    machine = waits(started)
    async with open_engine(dsn=db.dsn, queues={"waits": 2}, machines=[machine], node="n") as engine:
        lost: list[ClaimLost] = []
        engine.telemetry.subscribe(lambda event: lost.append(event) if isinstance(event, ClaimLost) else None)
        number = await da.insert(machine, state={}, partition_key="k")
        assert number is not None
        await until(lambda: started)
        db.execute(CUT)
        with trio.fail_after(10):
            assert await da.result(number) == 1
        assert db.row(number, "attempt, crashes, status") == (1, 0, "done")
        assert [event.attempt for event in lost] == [0]
        assert "session" in lost[0].reason


async def test_keys_hold_while_sessions_are_cut_again_and_again(db: Db):
    """A cut session ends its steps, but their rows stay executing until they have exited: nobody else gets the key."""
    probe = Probe()
    machine = keyed(probe, True, queue="keyed")
    options: dict[str, Any] = {
        "dsn": db.dsn,
        "queues": {"keyed": 8},
        "machines": [machine],
        "poll_interval": 0.02,
    }
    async with open_engine(**options, name="a", node="a"), open_engine(**options, name="b", node="b"):
        rows = [{"state": {"key": f"k{n % 7}", "n": n}, "partition_key": f"k{n % 7}"} for n in range(150)]
        ids = await da.insert_many(machine, rows, engine="a")
        cuts = 0
        with trio.fail_after(40):
            while not db.execute("select bool_and(status = 'done') from durable.gen_durable")[0][0]:
                if cuts < 10:
                    cuts += 1
                    db.execute(CUT)
                await trio.sleep(0.02)
        assert cuts > 2
        assert probe.most == 1
        assert {n for _, n in probe.order} == set(range(150))
        assert len(ids) == 150
        assert db.execute("select max(crashes) from durable.gen_durable") == [(0,)]
    await until(lambda: db.locks() == 0)
