"""Dispatcher: a step that has run makes room while it is committed; what a step sets in its context is its own."""

from __future__ import annotations

import contextvars

import attrs
import durable_actors as da
import psycopg
import pytest
import trio
from durable_actors._engine.claiming.feeder import Feeder
from durable_actors._engine.claiming.planner import Sleep
from durable_actors._engine.claims import ClaimState
from durable_actors._engine.limits import QueueLimits
from durable_actors._step_log import current_step
from durable_actors._store.commands import Request
from durable_actors._store.rows import UNRECORDED
from durable_actors.telemetry import StepCommitted
from tests.engine.dispatcher_kit import DispatcherRig, pending_of
from tests.engine.kit import (
    QUICK,
    Gate,
    active_claims,
    claim,
    dispatcher_of,
    in_flight,
    refuse_bad,
    restarts_of,
    running,
)
from tests.kit import until

pytestmark = pytest.mark.usefixtures("registry")

LIMITS = QueueLimits(2, 0, 1, 1.0, 1.0)
COMMITTING = ClaimState.COMMITTING


def test_a_buffered_claim_whose_key_went_with_the_session_wants_it_again():
    rig = DispatcherRig(LIMITS)
    _, waiting = [rig.add(key=key)[0] for key in "ab"]
    for active in rig.added:
        assert rig.keys.take(active.claim)
    assert len(rig.start()) == 1
    assert rig.dispatcher.without_key() == []
    rig.keys.owners.clear()
    rig.keys.losses += 1
    assert [rig.dispatcher.without_key() for _ in range(2)] == [[waiting], [waiting]], "until it has it"
    assert rig.keys.take(waiting.claim)
    assert rig.dispatcher.without_key() == []
    rig.exit(rig.start()[0])
    assert rig.pool.tasks[-1].slice.active is waiting


def test_so_many_run_and_three_times_as_many_wait_for_their_commit():
    rig = DispatcherRig(LIMITS)
    assert rig.demand() == 2
    rig.add(2)
    [first] = rig.start()
    rig.suspend(first)
    [_, second] = rig.pool.tasks
    assert (rig.dispatcher.running, rig.demand()) == (2, 0)
    ended = [rig.hand_over(first), rig.hand_over(second)]
    assert (rig.dispatcher.running, rig.dispatcher.count(COMMITTING), rig.demand()) == (0, 2, 2)
    rig.add()
    assert rig.demand() == 1
    ended.append(rig.hand_over(*rig.start()))
    ended += rig.commit(5)
    assert (rig.dispatcher.running, rig.dispatcher.count(COMMITTING), rig.demand()) == (0, 8, 0)
    rig.add()
    assert rig.start() == [], "two run, or six wait, but never more than eight in all"
    assert rig.dispatcher.recover(pending_of(ended[7]), rig.now)
    rig.dispatcher.recovering(ended[7])
    assert (rig.dispatcher.running, rig.dispatcher.count(COMMITTING)) == (1, 7)
    for task in list(rig.pool.tasks):
        rig.exit(task)
    for active in ended[:7]:
        rig.dispatcher.finish(active, rig.now)
    [last] = rig.pool.tasks
    rig.suspend(last)
    rig.dispatcher.finish(rig.hand_over(last), rig.now)
    assert (rig.dispatcher.running, rig.dispatcher.count(COMMITTING), rig.demand()) == (0, 0, 2)


def test_twice_as_many_run_at_most_after_refusals():
    rig = DispatcherRig(LIMITS)
    refused = rig.commit(2)
    rig.add(2)
    for task in rig.start():
        rig.suspend(task)
    assert rig.dispatcher.running == 2
    rig.dispatcher.recovering(refused[0])
    assert (rig.dispatcher.running, rig.dispatcher.may_recover) == (3, True)
    rig.dispatcher.recovering(refused[1])
    assert (rig.dispatcher.running, rig.dispatcher.may_recover) == (4, False)


def test_a_new_feeder_finds_what_the_last_one_started():
    rig = DispatcherRig(attrs.evolve(LIMITS, concurrency=1, prefetch=3))
    rig.commit(1)
    rig.add(3)
    rig.suspend(*rig.start())
    rig.dispatcher.close()
    rig.dispatcher.open()
    assert (rig.dispatcher.running, rig.dispatcher.count(COMMITTING), rig.dispatcher.buffered) == (1, 1, 0)
    assert rig.released == rig.ids(2), "their steps had not begun"
    assert rig.demand() == 2 + 1


def test_prefetch_is_beyond_the_slots():
    rig = DispatcherRig(attrs.evolve(LIMITS, prefetch=3))
    assert rig.demand() == 5
    rig.commit(8)
    assert rig.demand() == 3, "none of them could start"


def test_a_limited_claim_finds_a_full_buffer():
    """All that has no slot is given back, also what was there before it; the most urgent claim keeps its place."""
    rig = DispatcherRig(attrs.evolve(LIMITS, concurrency=2, prefetch=3))
    rig.add(1)
    [task] = rig.start()
    rig.suspend(task)
    rig.add(3, priority=1)
    limited = attrs.evolve(UNRECORDED, rate_limit="api")
    rig.dispatcher.add([claim(None, 5, awaits=None, inbox=False, recorded=limited)], rig.now)
    assert rig.dispatcher.buffered == 1
    assert len(rig.commits.released) == 3
    assert "None/5" not in rig.commits.released


def test_few_places_that_commits_leave_are_not_worth_a_pick_either():
    rig = DispatcherRig(QueueLimits(10, 0, 4, 1.0, 1.0))
    ended = rig.commit(37)
    assert rig.demand() == 0
    rig.dispatcher.finish(ended.pop(), rig.now)
    assert rig.demand() == 4


def test_a_claim_whose_key_is_being_taken_reads_its_inbox_after_steps_that_wait():
    rig = DispatcherRig(QueueLimits(1, 1, 1, 1.0, 1.0))
    rig.add()
    [task] = rig.start()
    [keyed] = rig.add(1, "k")
    rig.suspend(task)
    rig.keys.take(keyed.claim)
    rig.start()
    rig.exit(task)
    assert [(each.slice.active, keyed.claim.inbox) for each in rig.pool.tasks] == [(keyed, True)]


@pytest.mark.parametrize("answer", ["granted", "busy"])
def test_a_claim_to_be_cancelled_whose_key_is_being_taken(answer: str):
    """The feeder waits for the key: the claim stays in the buffer until it has its answer, and does not run."""
    rig = DispatcherRig(LIMITS)
    keyed, owner, plain = *rig.add(1, "k"), *rig.add(1, "other"), *rig.add()
    rig.keys.take(owner.claim)
    wanting = rig.dispatcher.without_key()
    assert wanting == [keyed]
    for active in (keyed, owner, plain):
        rig.claims.request(active.claim.claim_id, Request("cancel"))
        rig.dispatcher.give_back_between_steps(active)
    assert rig.released == [owner.claim.id, plain.claim.id], "these need not wait"
    if answer == "granted":
        rig.keys.take(keyed.claim)
    else:
        rig.dispatcher.give_back_contended(wanting)
    assert rig.start() == []
    assert sorted(rig.released) == [keyed.claim.id, owner.claim.id, plain.claim.id]
    assert (rig.dispatcher.buffered, len(rig.claims), rig.keys.owners) == (0, 0, {})


def test_a_claim_to_be_cancelled_between_two_steps():
    rig = DispatcherRig(attrs.evolve(LIMITS, concurrency=1))
    rig.add()
    active = rig.hand_over(*rig.start(), keep_slot=True)
    rig.pool.open = False
    rig.dispatcher.continue_on_claim(active, rig.now)
    assert active.state is ClaimState.READY
    rig.claims.request(active.claim.claim_id, Request("cancel"))
    rig.dispatcher.give_back_between_steps(active)
    assert (rig.released, rig.dispatcher.running, active.state) == ([active.claim.id], 0, ClaimState.GONE)


def test_a_demand_is_never_negative():
    """More wait for their commit than there are places: they ran while rows were claimed ahead."""
    rig = DispatcherRig(QueueLimits(10, 0, 4, 1.0, 1.0))
    for count in (10, 20, 15):
        rig.run_at_once(count)
        rig.demand()
    rig.add()
    rig.suspend(*rig.start())
    assert (rig.dispatcher.count(COMMITTING), rig.dispatcher.prefetch.rows) == (45, 0)
    assert rig.demand() == 0


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

    refuse_bad(db, "P0001")
    async with running(durable_dsn, queues={"default": da.Queue(1, prefetch=5)}, **QUICK) as run:
        numbers = [await run.insert(M) for _ in range(6)]
        results = [(await run.ended(number)).result for number in numbers]
        await until(lambda: in_flight(run) == (0, 0))
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
        await until(lambda: dispatcher_of(run).running == 0)
    assert most == 3


async def test_a_feeder_that_crashes_leaves_the_count_right(durable_dsn, monkeypatch):
    """One step runs, one waits for a row lock with its outcome, others are buffered: these go back, and run later."""
    gates = [Gate(), Gate()]
    act, crash = Feeder._round, False

    async def crashes(self: Feeder) -> Sleep:
        nonlocal crash
        if crash:
            crash = False
            raise RuntimeError("a bug")
        return await act(self)

    class M(da.Machine, name="M"):
        @da.step
        async def start(self, ctx):
            if ctx.state["gate"] is not None:
                await gates[ctx.state["gate"]].wait()
            return da.Done(ctx.attempt)

    monkeypatch.setattr(Feeder, "_round", crashes)
    async with running(durable_dsn, queues={"default": da.Queue(1, prefetch=5)}, **QUICK) as run:
        numbers = [await run.insert(M, state={"gate": 0})]
        await gates[0].wait_entered()
        numbers.append(await run.insert(M, state={"gate": 1}))
        numbers += [await run.insert(M, state={"gate": None}) for _ in range(3)]
        with psycopg.connect(durable_dsn) as other:
            other.execute("select 1 from durable.gen_durable where id = %s for update", [numbers[0]])
            gates[0].open()
            await gates[1].wait_entered()
            await until(lambda: dispatcher_of(run).buffered == 3)
            assert in_flight(run) == (1, 1)
            buffered = [one for one in active_claims(run) if one.state is ClaimState.BUFFERED]
            crash = True
            run.engine._node.notify("default")
            await until(lambda: restarts_of(run, "feeder default") == 1)
            assert in_flight(run) == (1, 1)
            assert {one.state for one in buffered} == {ClaimState.GONE}
            gates[1].open()
        assert [(await run.ended(number)).result for number in numbers] == [0] * 5
        await until(lambda: in_flight(run) == (0, 0))
