"""A dispatcher without Trio and Postgres: fakes around it, and `DispatcherRig`, which plays feeder and pool."""

from __future__ import annotations

from typing import Any

from durable_actors._engine.claims import ActiveClaim, ActiveClaims, ClaimState
from durable_actors._engine.committing.queue import PendingCommit
from durable_actors._engine.limits import QueueLimits, max_inflight_burst
from durable_actors._engine.running.dispatcher import Dispatcher, TaskSlice
from durable_actors._store.holds import OFFERED
from durable_actors._store.rows import Claim
from durable_actors.otp import PoolClosed, PoolFull
from tests.engine.kit import claim
from trio_util import AsyncBool


class FakeTask:
    """A task of `FakePool`. Nothing runs in it: the test says when its step waits or ends."""

    def __init__(self, task_slice: TaskSlice, refused: PendingCommit | None, deadline: float) -> None:
        self.slice = task_slice
        self.refused = refused
        self.deadline = deadline
        self.cancelling = False
        self.running = True

    def cancel(self, why: str) -> bool:
        self.cancelling = self.cancelling or self.running
        return self.running


class FakePool:
    """Takes tasks while it is open and has a free slot."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.open = True
        self.can_follow = False
        self.tasks: list[FakeTask] = []

    @property
    def free(self) -> int:
        return self.slots - len(self.tasks) if self.open else 0

    def start_nowait(
        self,
        fn: Any,
        task_slice: TaskSlice,
        refused: PendingCommit | None,
        *,
        key: TaskSlice,
        deadline: float,
    ) -> Any:
        assert key is task_slice
        if not self.open:
            raise PoolClosed("fake")
        if not self.free:
            raise PoolFull("fake")
        self.can_follow = False
        task = FakeTask(task_slice, refused, deadline)
        self.tasks.append(task)
        return task


class FakeKeys:
    """Partition keys: `owners` says which claim has which."""

    def __init__(self) -> None:
        self.up = True
        self.losses = 0
        self.owners: dict[str, str] = {}
        self.taking: set[str] = set()

    def take(self, claim: Claim) -> bool:
        key = claim.partition_key
        assert key is not None
        return self.up and self.owners.setdefault(key, claim.claim_id) == claim.claim_id

    def owns(self, claim: Claim) -> bool:
        key = claim.partition_key
        assert key is not None
        return claim.claim_id not in self.taking and self.owners.get(key) == claim.claim_id

    def holds(self, claim: Claim) -> bool:
        return claim.partition_key is None or (self.up and self.owns(claim))

    def hand_on(self, claim: Claim, to: Claim) -> bool:
        key = claim.partition_key
        assert key is not None
        if not self.holds(claim):
            return False
        self.owners[key] = to.claim_id
        return True

    def free(self, claim: Claim) -> None:
        key = claim.partition_key
        assert key is not None
        if self.owners.get(key) == claim.claim_id:
            del self.owners[key]


class FakeCommits:
    """Remembers which claims were released, and with which hold; none may be released twice."""

    def __init__(self) -> None:
        self.released: dict[str, int] = {}

    def release(
        self, claim: Claim, *, attempts: int, interruptions: int = 0, hold: int = OFFERED, began: bool = True
    ) -> None:
        assert claim.claim_id not in self.released, "released twice"
        self.released[claim.claim_id] = hold


class RecordingDispatcher(Dispatcher):
    """Remembers every move of a claim."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.moves: list[tuple[ClaimState, ClaimState]] = []

    def _move(self, active: ActiveClaim, state: ClaimState) -> None:
        self.moves.append((active.state, state))
        super()._move(active, state)


class DispatcherRig:
    """A dispatcher with fakes around it. `now` is its clock."""

    def __init__(self, limits: QueueLimits) -> None:
        self.now = 0.0
        self.pool = FakePool(max_inflight_burst(limits))
        self.keys = FakeKeys()
        self.commits = FakeCommits()
        self.claims = ActiveClaims()
        self.draining = AsyncBool()
        self.woken = 0
        self.added: list[ActiveClaim] = []
        fakes: dict[str, Any] = {"pool": self.pool, "keys": self.keys, "commits": self.commits}
        self.dispatcher = RecordingDispatcher(
            limits,
            claims=self.claims,
            draining=self.draining,
            wake_feeder=self._wake,
            on_contended=lambda claim: None,
            **fakes,
        )
        nothing_runs: Any = None
        self.dispatcher.run_slice = nothing_runs

    def _wake(self) -> bool:
        self.woken += 1
        return True

    @property
    def released(self) -> list[int]:
        """The instances that were released."""
        return [active.claim.id for active in self.added if active.claim.claim_id in self.commits.released]

    def ids(self, last: int) -> list[int]:
        """The instances that were added last."""
        return [active.claim.id for active in self.added[len(self.added) - last :]]

    def add(self, count: int = 1, key: str | None = None, **columns: Any) -> list[ActiveClaim]:
        """A pick returned so many rows."""
        first = len(self.added) + 1
        columns = {"awaits": None, "inbox": False} | columns
        claims = [claim(key, number, **columns) for number in range(first, first + count)]
        self.dispatcher.add(claims, self.now)
        found = [self.claims.find(each.claim_id) for each in claims]
        self.added += [active for active in found if active is not None]
        return self.added[first - 1 :]

    def start(self) -> list[FakeTask]:
        """The feeder starts what may start; returns the tasks that run."""
        self.dispatcher.start(self.now)
        return list(self.pool.tasks)

    def demand(self) -> int:
        return self.dispatcher.demand(self.now)

    def suspend(self, task: FakeTask) -> None:
        """The task waits for something."""
        self.dispatcher.on_suspended(task.slice, self.now)

    def exit(self, task: FakeTask, *, reusable: bool = True) -> None:
        """The task has ended; `reusable`: the next one may run in its worker."""
        self.pool.tasks.remove(task)
        task.running = False
        self.pool.can_follow = reusable and self.pool.open and not task.cancelling
        try:
            self.dispatcher.on_exited(task.slice, self.now)
        finally:
            self.pool.can_follow = False

    def hand_over(self, task: FakeTask, *, keep_slot: bool = False) -> ActiveClaim:
        """The step of the task has an outcome, and the task ends."""
        active = task.slice.active
        self.dispatcher.hand_over(task.slice, keep_slot=keep_slot)
        self.exit(task)
        return active

    def hand_over_and_follow(self, task: FakeTask, *, keep_slot: bool = False) -> bool:
        """The step of the task has an outcome. False: no other claim follows in it, and the task ends."""
        self.dispatcher.hand_over(task.slice, keep_slot=keep_slot)
        if self.dispatcher.follow(task.slice, self.now):
            return True
        self.exit(task)
        return False

    def run_at_once(self, count: int) -> list[ActiveClaim]:
        """So many claims run without waiting; they are COMMITTING now."""
        found = self.add(count)
        for task in self.start():
            while self.hand_over_and_follow(task):
                pass
        return found

    def commit(self, count: int) -> list[ActiveClaim]:
        """So many claims have run, one after the other, and each has waited; they are COMMITTING now."""
        found = []
        for _ in range(count):
            self.add()
            task = self.start()[-1]
            self.suspend(task)
            found.append(self.hand_over(task))
        return found


def pending_of(active: ActiveClaim) -> PendingCommit:
    """An outcome of this claim; nobody looks at what it writes."""
    nothing: Any = None
    return PendingCommit(active, None, nothing, "Done")
