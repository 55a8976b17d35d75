"""Stopping: nothing new is claimed, what runs may finish, the rest goes back in order."""

from __future__ import annotations

import logging

import durable_actors as da
import pytest
import trio
from durable_actors.telemetry import DrainStarted, NodeStopped, StepStarted
from tests.engine.kit import Gate, Recorder, dispatcher_of, gated, running
from tests.kit import PATIENCE, until

pytestmark = pytest.mark.usefixtures("registry")

COLUMNS = "status::text, attempt, crashes, interruptions, locked_by, claim_id, lease_expires_at"
BACK = ("runnable", 0, 0, 0, None, None, None)
INTERRUPTED = ("runnable", 0, 0, 1, None, None, None)
CRASHED = ("runnable", 1, 0, 0, None, None, None)


async def test_stop_lets_steps_finish_and_gives_buffers_back(durable_dsn, db):
    gate = Gate()
    M = gated(gate)
    async with running(durable_dsn, queues={"default": da.Queue(1, prefetch=2)}, drain_timeout=60) as run:
        ids = [await run.insert(M) for _ in range(4)]
        await gate.wait_entered()
        await until(lambda: dispatcher_of(run).buffered == 2)
        run.engine.request_stop()
        drain = await run.events.wait(DrainStarted)
        assert (drain.running, drain.buffered) == (1, 2)
        # Buffered rows are back at once, while the step still runs.
        await db.eventually("select count(*) = 3 from durable.gen_durable where status = 'runnable'")
        assert db.row(ids[0], "status::text") == ("executing",)
        gate.open()
        await run.engine.stop()
        assert len(run.events.all(StepStarted)) == 1
    assert db.row(ids[0], "status::text, result, attempt") == ("done", "finished", 0)
    assert [db.row(number, COLUMNS) for number in ids[1:]] == [BACK] * 3


async def test_steps_that_take_too_long_are_cancelled_and_given_back(durable_dsn, db):
    """A run that a drain ended is no attempt: it is not its fault. People see it in `interruptions`."""
    gate, ended = Gate(), []

    class M(da.Machine):
        @da.step
        async def start(self, ctx):
            try:
                await gate.wait()
            finally:
                ended.append(db.row(ctx.id, "status::text"))  # not released before its task has exited
            return da.Done()

    async with running(durable_dsn, drain_timeout=0.05) as run:
        number = await run.insert(M)
        await gate.wait_entered()
        await run.engine.stop()
    assert ended == [("executing",)]
    assert db.row(number, COLUMNS) == INTERRUPTED


async def test_drains_spend_no_attempts(durable_dsn, db, caplog):
    """Three deploys in a row interrupt a job that may run once."""
    gate, attempts = Gate(), []
    caplog.set_level(logging.INFO, logger="durable_actors.engine")

    @da.job(name="once", max_attempts=1)
    async def once(args: dict, ctx: da.Context[dict]) -> str:
        attempts.append(ctx.attempt)
        if len(attempts) <= 3:
            await gate.wait()
        return "finished"

    number = 0
    for count in range(1, 4):
        async with running(durable_dsn, drain_timeout=0) as run:
            number = number or await run.insert(once)
            await gate.wait_entered(count)
        assert db.row(number, COLUMNS) == ("runnable", 0, 0, count, None, None, None)
    async with running(durable_dsn) as run:
        row = await run.ended(number)
    assert (row.status, row.result, row.attempt, row.interruptions) == ("done", "finished", 0, 3)
    assert attempts == [0, 0, 0, 0]
    said = [text for text in caplog.messages if "interrupted by the drain" in text]
    assert (
        said
        == [f"instance {number}: once, step perform was interrupted by the drain; attempts unchanged"] * 3
    )


async def test_leases_are_renewed_while_it_drains(durable_dsn, db):
    """H59: a drain may last longer than a lease."""
    gate = Gate()
    options = {"lease_ttl": 60, "heartbeat_interval": 0.03, "drain_timeout": 60}
    async with running(durable_dsn, **options) as run:
        number = await run.insert(gated(gate))
        await gate.wait_entered()
        run.engine.request_stop()
        await run.events.wait(DrainStarted)
        for _ in range(3):
            [lease] = db.row(number, "lease_expires_at")
            await db.eventually(
                "select lease_expires_at > %s from durable.gen_durable where id = %s", lease, number
            )
        gate.open()
    assert db.row(number, "status::text, attempt") == ("done", 0)


async def test_four_queues_drain_in_one_timeout(durable_dsn, db):
    """H59: all stop claiming first, and their steps are cancelled together."""
    gate = Gate()
    queues = ["a", "b", "c", "d"]
    machines = [gated(gate, f"in {queue}", queue=queue) for queue in queues]
    events = Recorder()
    seconds = 1.0
    async with running(
        durable_dsn, queues=dict.fromkeys(queues, 2), drain_timeout=seconds, observers=[events]
    ) as run:
        for each in machines:
            await run.insert(each)
        await gate.wait_entered(4)
        began = trio.current_time()
        run.engine.request_stop()
        await events.wait(DrainStarted)
        late = [await run.insert(each) for each in machines]
        await run.engine.stop()
        assert trio.current_time() - began < 4 * seconds
    assert len(events.all(StepStarted)) == 4
    assert [db.row(number, COLUMNS) for number in late] == [BACK] * 4
    assert db.execute("select count(*)::int from durable.gen_durable where status = 'executing'") == [(0,)]


async def test_a_chain_stops_between_its_steps(durable_dsn, db):
    """Run-ahead is told: the step that runs is committed, the next one is another node's."""
    gate, steps = Gate(), []

    class Chain(da.Machine):
        @da.step
        async def start(self, ctx):
            steps.append(ctx.visit)
            await gate.wait()
            return da.Next(self.start)

    async with running(durable_dsn, drain_timeout=60) as run:
        number = await run.insert(Chain)
        await gate.wait_entered()
        run.engine.request_stop()
        await run.events.wait(DrainStarted)
        gate.open()
        await run.engine.stop()
    assert steps == [1]
    assert db.row(number, "status::text, visit, attempt") == ("runnable", 2, 0)


async def test_leaving_the_block_drains(durable_dsn, db):
    gate = Gate()
    async with running(durable_dsn, drain_timeout=60) as run:
        number = await run.insert(gated(gate))
        await gate.wait_entered()
        gate.open()
    assert db.row(number, "status::text") == ("done",)
    assert run.events.all(NodeStopped)


async def test_cancellation_from_outside_drains(durable_dsn, db):
    """The steps are not cancelled with their host: they may finish, and be committed."""
    gate, events = Gate(), Recorder()
    with trio.fail_after(PATIENCE):
        async with trio.open_nursery() as nursery:
            engine = await da.start_engine(
                nursery, dsn=durable_dsn, poll_interval=0.05, drain_timeout=60, observers=[events]
            )
            number = await engine.client.insert(gated(gate))
            await gate.wait_entered()
            nursery.cancel_scope.cancel()
            with trio.CancelScope(shield=True):
                await events.wait(DrainStarted)
                gate.open()
    assert number is not None
    assert db.row(number, "status::text, result, attempt") == ("done", "finished", 0)


async def test_without_drain_on_cancel_steps_are_cancelled(durable_dsn, db):
    gate, events = Gate(), Recorder()
    with trio.fail_after(PATIENCE):
        async with trio.open_nursery() as nursery:
            engine = await da.start_engine(
                nursery,
                dsn=durable_dsn,
                poll_interval=0.05,
                drain_timeout=60,
                drain_on_cancel=False,
                observers=[events],
            )
            number = await engine.client.insert(gated(gate))
            assert number is not None
            await gate.wait_entered()
            nursery.cancel_scope.cancel()
    [(status, result)] = db.execute(
        "select status::text, result from durable.gen_durable where id = %s", number
    )
    assert (status, result) in {("executing", None), ("runnable", None)}  # nobody waited for it


async def test_cancel_steps_cancels_what_still_runs(durable_dsn, db):
    """What a second signal does."""
    gate = Gate()
    async with running(durable_dsn, drain_timeout=600) as run:
        number = await run.insert(gated(gate))
        await gate.wait_entered()
        run.engine.request_stop()
        await run.events.wait(DrainStarted)
        run.engine.cancel_steps()
        await run.engine.stop()
    assert db.row(number, COLUMNS) == INTERRUPTED


@pytest.mark.parametrize("where", ["step", "group", "thread", "handle"])
async def test_an_interrupt_in_a_step_stops_the_node(durable_dsn, db, where):
    """The row goes back, others too, and the error comes out where the engine was started."""
    gate = Gate()

    async def explode():
        raise KeyboardInterrupt("now")

    def in_thread(self, ctx):
        raise KeyboardInterrupt("now")

    async def in_step(self, ctx):
        if where == "group":
            async with trio.open_nursery() as nursery:
                nursery.start_soon(explode)
        elif where == "handle":
            raise ValueError
        await explode()

    async def handle(self, error, ctx):
        await explode()

    class M(da.Machine, name="fatal"):
        start = da.step(in_thread if where == "thread" else in_step)
        locals()["handle"] = handle

    numbers = []
    with pytest.raises(KeyboardInterrupt, match="now"):
        async with running(durable_dsn, drain_timeout=600) as run:
            numbers.append(await run.insert(gated(gate)))
            await gate.wait_entered()
            numbers.append(await run.insert(M))
            await trio.sleep_forever()
    assert [db.row(number, COLUMNS) for number in numbers] == [INTERRUPTED, CRASHED]


async def test_stop_may_be_repeated(durable_dsn):
    async with running(durable_dsn) as run:
        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(run.engine.stop)
        await run.engine.stop()
        await run.engine.wait_stopped()


async def test_a_node_says_goodbye(durable_dsn, db):
    async with running(durable_dsn) as run:
        name = run.engine.incarnation
        assert db.execute("select node, stopped_at from durable.nodes where incarnation = %s", name) == [
            ("test", None)
        ]
    assert db.execute("select stopped_at is not null from durable.nodes where incarnation = %s", name) == [
        (True,)
    ]


async def test_a_clean_up_that_fails_at_the_end_of_a_drain(durable_dsn, db):
    """Cancelled and an error, in one group: interrupted, so the row goes back at once."""
    gate = Gate()

    async def untidy():
        try:
            await gate.wait()
        finally:
            raise ValueError("in the clean-up")

    @da.job
    async def nursed(args):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(untidy)
            nursery.start_soon(trio.sleep_forever)

    async with running(durable_dsn, drain_timeout=0) as run:
        number = await run.insert(nursed, args={})
        await gate.wait_entered()
        assert len(run.events.all(StepStarted)) == 1
    status, attempt, crashes, locked = db.row(number, "status::text, attempt, crashes, locked_by")
    assert (status, crashes, locked) == ("runnable", 0, None)
    assert attempt == 0  # a drain spends none
