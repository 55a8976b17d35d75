"""A model of everything that can happen to a dispatcher, in any legal order, checked after each event.

Feeder, step tasks, pool, flusher, heartbeat and keeper are played by `Model`: its methods are the events, and `events`
lists those that can happen next. A source of choices (Hypothesis, or a seed) picks one after the other.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
from durable_actors._engine.claims import MOVES, ActiveClaim, ClaimState
from durable_actors._engine.committing.queue import PendingCommit
from durable_actors._engine.limits import QueueLimits
from durable_actors._engine.running.dispatcher import INBOX_FRESH, MAX_SLICE
from durable_actors._engine.running.prefetch import MAX_BATCH_SECONDS
from durable_actors.otp import PoolClosed
from hypothesis import assume, given, settings, strategies as st
from tests.engine.dispatcher_kit import DispatcherRig, FakeTask, pending_of

Choose = Callable[[Sequence[Any]], Any]
Move = tuple[ClaimState, ClaimState]

GONE, BUFFERED, RUNNING, COMMITTING, CONTINUING, READY, RECOVERING, ABANDONED = ClaimState
TABLE: set[Move] = {(old, new) for old, several in MOVES.items() for new in several}
QUEUES = [QueueLimits(1, 0, 1, 1.0, 1.0), QueueLimits(2, 3, 1, 1.0, 1.0), QueueLimits(3, 0, 2, 1.0, 1.0)]
LEASE = 10.0


class Model:
    """A dispatcher, and what is known about its claims without asking it."""

    def __init__(self, choose: Choose) -> None:
        self.choose = choose
        self.limits: QueueLimits = choose(QUEUES)
        self.rig = DispatcherRig(self.limits)
        self.dispatcher = self.rig.dispatcher
        self.phase: dict[FakeTask, str] = {}  # step, children, waiting (for a slot to recover), handle
        self.watched: set[FakeTask] = set()  # the pool has reported that they wait
        self.refused: set[ActiveClaim] = set()  # their outcome was chosen by `handle`
        self.queued: list[PendingCommit] = []
        self.committed: set[str] = set()
        self.feeder = True
        self.asked: list[ActiveClaim] = []  # the feeder waits for their keys
        self.wanted = 0

    # -- which events can happen now

    def events(self) -> list[Callable[[], None]]:
        """One kind of them: mostly of what happens all the time."""
        usual: list[Callable[[], None]] = [self.time_passes]
        rare: list[Callable[[], None]] = [self.leases_end, self.beat, self.session_lost]
        usual += [] if self.rig.keys.up else [self.session_opened]
        if not self.feeder:
            usual += [] if self.rig.draining.value else [self.feeder_begins]
        elif self.asked:
            usual.append(self.keys_answered)
            rare.append(self.feeder_ends)
        else:
            usual += [self.pick if self.wanted else self.ask, self.start, self.take_keys]
            rare.append(self.feeder_ends)
        for task in self.rig.pool.tasks:
            usual += self.task_events(task)
        for pending in self.queued:
            usual += [partial(self.answered, pending), partial(self.answered_refused, pending)]
            rare.append(partial(self.withdrawn, pending))
        for active in self.rig.claims.all():
            rare += [partial(self.lose, active), partial(self.interrupt, active)]
        if self.rig.pool.open:
            rare.append(self.pool_ends)
        elif not self.rig.pool.tasks and not self.rig.draining.value:
            usual.append(self.pool_begins)
        if len(self.rig.added) > 50:
            rare.append(self.drain)
        return self.choose([usual] * 19 + [rare])

    def task_events(self, task: FakeTask) -> list[Callable[[], None]]:
        phase = self.phase_of(task)
        if task not in self.watched and self.choose([True, False]):
            return [partial(self.suspended, task)]
        found: list[Callable[[], None]] = [partial(self.cancelled, task)]
        if phase in {"step", "handle"}:
            found += [partial(self.outcome, task)] * 3 + [partial(self.children, task)]
        elif phase == "children":
            found += [partial(self.children_committed, task), partial(self.children_refused, task)]
        elif self.dispatcher.may_recover:
            found.append(partial(self.recovering, task))
        return found

    def phase_of(self, task: FakeTask) -> str:
        return self.phase.get(task, "step" if task.refused is None else "waiting")

    # -- time, leases, keys

    def time_passes(self) -> None:
        self.rig.now += self.choose([MAX_SLICE, MAX_BATCH_SECONDS, INBOX_FRESH])

    def leases_end(self) -> None:
        self.rig.now += LEASE

    def beat(self) -> None:
        self.rig.claims.extend(self.rig.claims.live(), self.rig.now + LEASE)

    def lose(self, active: ActiveClaim) -> None:
        self.rig.claims.lose(active, "another node has it")

    def interrupt(self, active: ActiveClaim) -> None:
        self.rig.claims.interrupt(active, "its key is in doubt")

    def session_lost(self) -> None:
        self.rig.keys.up = False
        self.rig.keys.owners.clear()
        self.rig.keys.losses += 1

    def session_opened(self) -> None:
        self.rig.keys.up = True

    # -- the feeder

    def ask(self) -> None:
        self.wanted = self.rig.demand()
        assert self.wanted >= 0

    def pick(self) -> None:
        count = min(self.wanted, self.choose([1, 2, 5]))
        self.wanted = 0
        self.rig.add(
            count,
            key=self.choose([None, None, "a", "b"]),
            priority=self.choose([0, 1, 2]),
            inbox=self.choose([False, False, True]),
            trusted_until=self.rig.now + LEASE,
        )

    def start(self) -> None:
        try:
            self.rig.start()
        except PoolClosed:
            self.feeder_ends()

    def take_keys(self) -> None:
        self.asked = self.dispatcher.without_key()
        self.rig.keys.taking = {active.claim.claim_id for active in self.asked}

    def keys_answered(self) -> None:
        busy = [active for active in self.asked if not self.rig.keys.take(active.claim)]
        self.asked, self.rig.keys.taking = [], set()
        self.dispatcher.give_back_contended(busy)

    def feeder_ends(self) -> None:
        self.feeder, self.asked, self.rig.keys.taking, self.wanted = False, [], set(), 0
        self.dispatcher.close()
        assert self.dispatcher.buffered == 0

    def feeder_begins(self) -> None:
        self.feeder = True
        self.dispatcher.open()

    # -- step tasks

    def suspended(self, task: FakeTask) -> None:
        self.watched.add(task)
        self.rig.suspend(task)

    def outcome(self, task: FakeTask) -> None:
        active = task.slice.active
        keep = self.phase_of(task) == "step" and active.claim.plain
        keep = keep and self.choose([True, False]) and self.dispatcher.may_continue(active, self.rig.now)
        self.hand_over(task, keep_slot=keep)

    def hand_over(self, task: FakeTask, *, keep_slot: bool = False) -> None:
        self.queued.append(pending_of(task.slice.active))
        if task.slice.suspended:
            self.rig.hand_over(task, keep_slot=keep_slot)
        else:
            self.rig.hand_over_and_follow(task, keep_slot=keep_slot)

    def children(self, task: FakeTask) -> None:
        self.dispatcher.commit_in_task(task.slice.active, self.rig.now)
        self.phase[task] = "children"
        if task not in self.watched:
            self.suspended(task)

    def children_committed(self, task: FakeTask) -> None:
        self.committed.add(task.slice.active.claim.claim_id)
        self.rig.exit(task)

    def children_refused(self, task: FakeTask) -> None:
        if task.slice.active in self.refused:
            self.hand_over(task)
        else:
            self.phase[task] = "waiting"

    def recovering(self, task: FakeTask) -> None:
        self.refused.add(task.slice.active)
        self.phase[task] = "handle"
        self.dispatcher.recovering(task.slice.active)

    def cancelled(self, task: FakeTask) -> None:
        """Or its step crashed, or is not in this node's code."""
        self.release(task.slice.active)
        self.rig.exit(task, reusable=self.choose([True, False]))

    def abandoned(self, task: FakeTask) -> None:
        self.dispatcher.abandon(task.slice.active)
        self.rig.exit(task, reusable=False)

    def release(self, active: ActiveClaim) -> None:
        """What `Completion` does for a run without an outcome."""
        if active.lost is None:
            self.rig.commits.release(active.claim, attempts=1)

    # -- verdicts

    def answered(self, pending: PendingCommit) -> None:
        active = pending.active
        if active.state is CONTINUING and self.choose([True, True, False]):
            self.queued.remove(pending)
            active.claim.inbox = self.choose([False, False, True])
            self.dispatcher.continue_on_claim(active, self.rig.now)
        else:
            self.finished(pending)

    def finished(self, pending: PendingCommit) -> None:
        self.queued.remove(pending)
        self.committed.add(pending.active.claim.claim_id)
        self.dispatcher.finish(pending.active, self.rig.now)

    def withdrawn(self, pending: PendingCommit) -> None:
        self.queued.remove(pending)
        self.release(pending.active)
        self.dispatcher.finish(pending.active, self.rig.now)

    def answered_refused(self, pending: PendingCommit) -> None:
        if pending.active in self.refused:
            return  # a plain failure is queued in its place
        if self.dispatcher.recover(pending, self.rig.now):
            self.queued.remove(pending)
        else:
            self.withdrawn(pending)

    # -- the pool, and the end

    def pool_ends(self) -> None:
        self.rig.pool.open = False
        for task in self.rig.pool.tasks:
            task.cancel("the pool ends")

    def pool_begins(self) -> None:
        self.rig.pool.open = True

    def drain(self) -> None:
        self.rig.draining.value = True

    # -- what must hold after each event

    def check(self) -> None:
        rig, dispatcher = self.rig, self.dispatcher
        assert set(dispatcher.moves) <= TABLE
        by_state = {state: [active for active in rig.added if active.state is state] for state in ClaimState}
        for state in set(ClaimState) - {GONE}:
            assert dispatcher.count(state) == len(by_state[state]), state
        for active in rig.added:
            assert (rig.claims.find(active.claim.claim_id) is active) == (active.state is not GONE)
        holds_slot = [*by_state[RUNNING], *by_state[CONTINUING], *by_state[READY]]
        assert len(holds_slot) <= self.limits.concurrency
        assert dispatcher.running == len(holds_slot) + len(by_state[RECOVERING])
        assert dispatcher.running <= 2 * self.limits.concurrency
        assert sorted(map(id, dispatcher._buffer)) == sorted(map(id, by_state[BUFFERED]))
        assert sorted(map(id, dispatcher._ready)) == sorted(map(id, by_state[READY]))
        assert dispatcher._suspended <= set(by_state[RUNNING])
        assert dispatcher._eager == sum(not task.slice.suspended for task in rig.pool.tasks)
        owned = set(rig.keys.owners.values())
        assert owned <= {active.claim.claim_id for active in rig.added if active.state is not GONE}
        with_task = [task.slice.active for task in rig.pool.tasks]
        assert len(set(with_task)) == len(with_task)
        assert {*by_state[RUNNING], *by_state[RECOVERING]} <= set(with_task)
        assert all(task.slice.active.task is task for task in rig.pool.tasks)
        queued = [pending.active for pending in self.queued]
        assert not set(queued) & set(with_task)
        assert {*by_state[COMMITTING], *by_state[CONTINUING]} <= {*queued, *with_task}

    def run(self, events: int) -> None:
        for _ in range(events):
            self.choose(self.events())()
            self.check()

    def work_off(self) -> None:
        """From now on nothing goes wrong, and no rows come. The feeder works when it is woken, and not otherwise."""
        if not self.rig.pool.open:
            while self.rig.pool.tasks:
                self.cancelled(self.rig.pool.tasks[0])
            if self.feeder:  # it depends on the pool, and restarts with it
                self.feeder_ends()
            self.pool_begins()
        if not self.feeder:
            self.feeder_begins()
        self.session_opened()
        self.beat()
        woken = -1
        while self.rig.claims.all():
            if self.asked:
                self.keys_answered()
                self.start()
                self.ask()
            elif self.rig.woken != woken or self.rig.now >= self.dispatcher.wake_at:
                woken = self.rig.woken
                self.take_keys()
                if not self.asked:  # else the feeder waits for the keys first: it asks for no rows meanwhile
                    self.start()
                    self.ask()
            elif self.rig.pool.tasks:
                self.choose(self.steps_forward(self.choose(self.rig.pool.tasks)))()
            elif self.queued:
                self.finished(self.choose(self.queued))
            else:
                assert self.dispatcher.wake_at < self.rig.now + LEASE, "claims wait, and nothing starts them"
                self.rig.now = self.dispatcher.wake_at
            self.check()

    def steps_forward(self, task: FakeTask) -> list[Callable[[], None]]:
        match self.phase_of(task):
            case "step" | "handle":
                found = [] if task in self.watched else [partial(self.suspended, task)]
                return [*found, partial(self.hand_over, task)]
            case "children":
                return [partial(self.children_committed, task)]
            case _:
                return [partial(self.recovering, task)] if self.dispatcher.may_recover else [lambda: None]

    def end(self) -> None:
        """The engine stops: every claim is committed, released, lost or abandoned, and only one of these."""
        self.drain()
        if self.feeder:
            self.feeder_ends()
        self.pool_ends()
        while self.rig.pool.tasks:
            task = self.rig.pool.tasks[0]
            has_code = self.phase_of(task) in {"step", "handle"}
            self.choose([self.cancelled, self.abandoned] if has_code else [self.cancelled])(task)
            self.check()
        while self.queued:
            self.answered(self.queued[0])
            self.check()
        for active in self.rig.added:
            name = active.claim.claim_id
            assert active.state in {GONE, ABANDONED}
            ends = [name in self.committed, name in self.rig.commits.released, active.state is ABANDONED]
            assert sum(ends) == 1 or (active.lost is not None and not any(ends))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_claim_is_in_one_state_and_every_count_is_right_whatever_happens(data: st.DataObject):
    model = Model(lambda options: options[data.draw(st.integers(0, len(options) - 1))])
    model.run(data.draw(st.integers(0, 80)))
    model.end()


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_no_claim_waits_for_ever(data: st.DataObject):
    model = Model(lambda options: options[data.draw(st.integers(0, len(options) - 1))])
    model.run(data.draw(st.integers(0, 60)))
    assume(not model.rig.draining.value)
    model.work_off()


@pytest.mark.parametrize("seed", range(20))
def test_long_lives(seed: int):
    model = Model(random.Random(seed).choice)
    model.run(1000)
    if model.rig.draining.value:
        model.end()
    else:
        model.work_off()


BY_HAND: set[Move] = {
    (RUNNING, BUFFERED),
    (RUNNING, READY),
    (RUNNING, ABANDONED),
    (RECOVERING, ABANDONED),
}
"""Moves that need a dead pool or a thread that outlives the engine: a test makes each."""


def test_every_move_of_the_table_is_made():
    """A move that nothing makes must leave the table."""
    made: set[Move] = set()
    for seed in range(30):
        model = Model(random.Random(seed).choice)
        model.run(300)
        made.update(model.dispatcher.moves)
    assert made | BY_HAND == TABLE


def started(rig: DispatcherRig) -> FakeTask:
    rig.add()
    [task] = rig.start()
    return task


def last_move(rig: DispatcherRig) -> Move:
    return rig.dispatcher.moves[-1]


def test_a_claim_that_the_pool_does_not_take_stays_first_in_the_buffer():
    rig = DispatcherRig(QUEUES[1])
    first, _ = rig.add(2)
    rig.pool.open = False
    with pytest.raises(PoolClosed):
        rig.start()
    assert (last_move(rig), first.steps, rig.dispatcher.buffered) == ((RUNNING, BUFFERED), 0, 2)
    rig.pool.open = True
    assert [task.slice.active for task in rig.start()] == [first]


def test_a_claim_between_two_steps_that_the_pool_does_not_take_stays_ready():
    rig = DispatcherRig(QUEUES[0])
    active = rig.hand_over(started(rig), keep_slot=True)
    rig.pool.open = False
    rig.dispatcher.continue_on_claim(active, rig.now)
    with pytest.raises(PoolClosed):
        rig.start()
    assert (last_move(rig), active.steps, rig.dispatcher.running) == ((RUNNING, READY), 1, 1)
    rig.pool.open = True
    assert [task.slice.active for task in rig.start()] == [active]


def test_a_step_whose_thread_outlives_the_engine_keeps_claim_and_key():
    rig = DispatcherRig(QUEUES[0])
    [active] = rig.add(key="k")
    assert rig.keys.take(active.claim)
    [task] = rig.start()
    rig.dispatcher.abandon(active)
    rig.exit(task, reusable=False)
    assert last_move(rig) == (RUNNING, ABANDONED)
    assert rig.claims.live() == [active]
    assert rig.keys.owns(active.claim)
    assert rig.released == []


def test_so_does_a_handle_whose_thread_outlives_the_engine():
    """Its outcome was refused, so its task was started by the dispatcher."""
    rig = DispatcherRig(QUEUES[0])
    active = rig.hand_over(started(rig))
    assert rig.dispatcher.recover(pending_of(active), rig.now)
    [task] = rig.pool.tasks
    rig.dispatcher.recovering(active)
    rig.dispatcher.abandon(active)
    rig.exit(task, reusable=False)
    assert last_move(rig) == (RECOVERING, ABANDONED)
    assert (rig.claims.live(), rig.dispatcher.running, rig.released) == ([active], 0, [])


def test_children_that_are_committed_without_a_wait_before_leave_no_trace():
    """The step's code has not waited: only its commit does. Else every later pick would read its inboxes."""
    rig = DispatcherRig(QUEUES[0])
    task = started(rig)
    rig.dispatcher.commit_in_task(task.slice.active, rig.now)
    rig.suspend(task)
    rig.exit(task)
    [active] = rig.add()
    assert active.inbox_known_at == rig.now
