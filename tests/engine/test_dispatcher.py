"""Slots: a step that has run makes room while it is committed; what a step leaves behind reaches nobody."""

from __future__ import annotations

import contextvars

import attrs
import durable_actors as da
import psycopg
import pytest
import trio
from durable_actors._engine.claiming.feeder import Feeder
from durable_actors._engine.claims import ActiveClaim
from durable_actors._engine.limits import QueueLimits
from durable_actors._engine.running.slots import Slots
from durable_actors.telemetry import StepCommitted, current_step
from tests.engine.kit import QUICK, Gate, claim, running
from tests.engine.test_refusals import TRIGGER
from tests.kit import until

pytestmark = pytest.mark.usefixtures("registry")

LIMITS = QueueLimits(2, 0, 1, 1.0, 1.0)


def test_so_many_run_and_three_times_as_many_wait():
    slots = Slots(LIMITS)
    held = [ActiveClaim(claim(None, number)) for number in range(1, 9)]
    assert slots.demand(0) == 2
    slots.running = 2
    assert not slots.free
    assert slots.demand(0) == 0
    slots.ended(held[0])
    slots.ended(held[1])
    assert slots.free
    assert (slots.running, slots.ending, slots.demand(0), slots.demand(1)) == (0, 2, 2, 1)
    slots.running = 6
    for each in held[2:]:
        slots.ended(each)
    assert not slots.free, "two run, or six wait, but never more than eight in all"
    assert slots.demand(0) == 0
    slots.resumed(held[7])
    assert (slots.running, slots.ending) == (1, 7)
    for each in held:
        slots.exited(each)
    assert (slots.running, slots.ending, slots.demand(0)) == (0, 0, 2)


def test_twice_as_many_run_at_most_after_refusals():
    slots = Slots(LIMITS)
    slots.running = 3
    assert slots.may_resume
    slots.running = 4
    assert not slots.may_resume


def test_a_new_feeder_counts_what_the_last_one_started():
    slots, ended = Slots(LIMITS), ActiveClaim(claim(None))
    ended.ending = True
    slots.recount([ActiveClaim(claim(None, 2)), ended])
    assert (slots.running, slots.ending) == (1, 1)


def test_prefetch_is_beyond_the_slots():
    slots = Slots(attrs.evolve(LIMITS, prefetch=3))
    assert slots.demand(0) == 5
    slots.ending = 8
    assert slots.demand(0) == 3, "none of them could start"


def test_few_places_that_commits_leave_are_not_worth_a_pick_either():
    slots = Slots(QueueLimits(10, 0, 4, 1.0, 1.0))
    slots.ending = 37
    assert slots.demand(0) == 0
    slots.ending = 36
    assert slots.demand(0) == 4
    slots.ending = 45  # more than there are places
    assert slots.demand(0) == 0


async def test_the_next_step_runs_while_the_last_one_is_committed(durable_dsn):
    """A commit that waits for a row lock holds its own instance up, and nobody's slot."""
    gate = Gate()

    class Slow(da.Machine, name="Slow"):
        @da.step
        async def start(self, ctx):
            await gate.wait()
            return da.Done()

    class M(da.Machine, name="M"):
        @da.step
        async def start(self, ctx):
            return da.Done()

    async with running(durable_dsn, queues={"default": 1}, **QUICK) as run:
        first = await run.insert(Slow)
        await gate.wait_entered()
        with psycopg.connect(durable_dsn) as other:
            other.execute("select 1 from durable.gen_durable where id = %s for update", [first])
            gate.open()
            await run.ended(await run.insert(M))
            assert not run.events.all(StepCommitted, id=first)
        await run.ended(first)


VAR: contextvars.ContextVar[str] = contextvars.ContextVar("var", default="none")


@pytest.mark.parametrize("prefetch", [0, 5])
async def test_what_a_step_sets_in_its_context_is_its_own(durable_dsn, prefetch):
    """Steps run one after the other in one worker task, and see nothing of each other."""
    seen: list[str] = []
    workers: set[object] = set()

    class M(da.Machine, name="M"):
        @da.step
        async def start(self, ctx):
            workers.add(trio.lowlevel.current_task())
            seen.append(VAR.get())
            VAR.set(f"of {ctx.id}")
            await trio.lowlevel.checkpoint()
            return da.Done(None) if ctx.id % 2 else da.Next(self.then)

        @da.step
        async def then(self, ctx):
            VAR.set(f"then of {ctx.id}")
            return da.Stop("over")

    async with running(durable_dsn, queues={"default": da.Queue(1, prefetch=prefetch)}, **QUICK) as run:
        numbers = [await run.insert(M) for _ in range(12)]
        for number in numbers:
            await run.ended(number)
    assert seen == ["none"] * 12
    assert len(workers) < 12, "workers are used again"


@pytest.mark.parametrize("ahead", [True, False])
async def test_nor_does_the_next_step_of_its_instance_see_it(durable_dsn, ahead):
    """Running ahead is invisible: without it the next step may run anywhere."""
    seen: list[str] = []

    class M(da.Machine, name="M", run_ahead=ahead):
        @da.step
        async def start(self, ctx):
            VAR.set("of start")
            return da.Next(self.then)

        @da.step
        async def then(self, ctx):
            seen.append(VAR.get())
            return da.Done()

    async with running(durable_dsn, **QUICK) as run:
        await run.run(M)
    assert seen == ["none"]


async def test_nor_what_handle_sets_after_a_refusal(durable_dsn, db):
    """Its code runs in a context that is renewed already, and must be renewed again; its log records tell its step."""
    seen: list[tuple[str, int | None]] = []

    class M(da.Machine, name="M"):
        @da.step
        async def start(self, ctx):
            self.note()
            VAR.set(f"of {ctx.id}")
            return da.Done("bad")

        async def handle(self, error, ctx):
            self.note()
            VAR.set(f"handle of {ctx.id}")
            return da.Done(ctx.id)

        def note(self):
            running = current_step.get()
            seen.append((VAR.get(), None if running is None else running.id))

    db.execute(TRIGGER)
    db.execute("insert into rule values ('P0001')")
    async with running(durable_dsn, queues={"default": da.Queue(1, prefetch=5)}, **QUICK) as run:
        numbers = [await run.insert(M) for _ in range(6)]
        results = [(await run.ended(number)).result for number in numbers]
        slots = run.engine._node.feeders["default"].claimed.slots
        await until(lambda: (slots.running, slots.ending) == (0, 0))
    assert results == numbers
    assert {value for value, _ in seen} == {"none"}
    assert sorted(number or 0 for _, number in seen) == sorted(numbers * 2)


async def test_never_more_steps_at_a_time_than_the_queue_allows(durable_dsn):
    running_now, most = 0, 0

    class M(da.Machine, name="M"):
        @da.step
        async def start(self, ctx):
            nonlocal running_now, most
            running_now += 1
            most = max(most, running_now)
            await trio.sleep(0.001 * (ctx.id % 3))
            running_now -= 1
            if ctx.id % 4 == 0 and ctx.attempt == 0:
                raise ValueError("once")
            return da.Done()

        async def handle(self, error, ctx):
            return da.Retry(delay=0)

    async with running(durable_dsn, queues={"default": da.Queue(3, prefetch=4)}, **QUICK) as run:
        numbers = [await run.insert(M) for _ in range(40)]
        for number in numbers:
            await run.ended(number)
        node = run.engine._node
        await until(lambda: node.feeders["default"].claimed.slots.running == 0)
    assert most == 3


async def test_a_feeder_that_crashes_leaves_the_count_right(durable_dsn, monkeypatch):
    """One step runs, one waits for a row lock with its outcome, others are buffered: these go back, and run later."""
    gates = [Gate(), Gate()]
    refill, crash = Feeder._refill, False

    async def crashes(self, wanted):
        nonlocal crash
        if crash:
            crash = False
            raise RuntimeError("a bug")
        return await refill(self, wanted)

    class M(da.Machine, name="M"):
        @da.step
        async def start(self, ctx):
            if ctx.state["gate"] is not None:
                await gates[ctx.state["gate"]].wait()
            return da.Done(ctx.attempt)

    monkeypatch.setattr(Feeder, "_refill", crashes)
    async with running(durable_dsn, queues={"default": da.Queue(1, prefetch=5)}, **QUICK) as run:
        node = run.engine._node
        numbers = [await run.insert(M, state={"gate": 0})]
        await gates[0].wait_entered()
        numbers.append(await run.insert(M, state={"gate": 1}))
        numbers += [await run.insert(M, state={"gate": None}) for _ in range(3)]
        with psycopg.connect(durable_dsn) as other:
            other.execute("select 1 from durable.gen_durable where id = %s for update", [numbers[0]])
            gates[0].open()
            await gates[1].wait_entered()
            old = node.feeders["default"]
            await until(lambda: len(old.claimed) == 3)
            assert (old.claimed.slots.running, old.claimed.slots.ending) == (1, 1)
            crash = True
            node.wakes["default"].cast(None)
            await until(lambda: node.feeders["default"] is not old)
            slots = node.feeders["default"].claimed.slots
            assert (slots.running, slots.ending, len(old.claimed)) == (1, 1, 0)
            gates[1].open()
        assert [(await run.ended(number)).result for number in numbers] == [0] * 5
        await until(lambda: (slots.running, slots.ending) == (0, 0))
        assert node.feeders["default"].claimed.slots is slots
