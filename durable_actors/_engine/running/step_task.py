"""Step task: runs a step of one claimed instance, then, if that has waited for nothing, a step of the next.

Owns       one claim at a time, in a slot of its queue.
Receives   nothing; it is cancelled when its claim is lost, its lease can no longer be trusted, or a drain is over.
Sends      transitions to the flusher. It waits for the verdict only when the instance has children; else it leaves the
           outcome. An instance that stays on its claim goes on when that is committed, in whichever task is free.
Writes     nothing itself.
If it dies (cancelled) its claim goes back, attempt + 1 (unchanged when a drain cancels it); the step runs again from
its beginning. After a bug of ours its lease ends it. An outcome that it has left does not die with it. User code that
raises SystemExit or the like does not kill it: that is a crash of its step, which is counted and backed off.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import trio

from durable_actors._engine.claims import ActiveClaim, TaskSlice
from durable_actors._engine.committing.completion import Settling, facts
from durable_actors._engine.committing.failures import tell_failure
from durable_actors._engine.committing.queue import Commits, Left
from durable_actors._engine.committing.spawn import spawn_children
from durable_actors._engine.committing.transition import failure
from durable_actors._engine.committing.verdicts import Refused, Verdict
from durable_actors._engine.keys.keeper import Keys
from durable_actors._engine.node import Node, logger
from durable_actors._engine.outage import TRANSIENT_ERRORS
from durable_actors._engine.running.step_inputs import NOTHING, StepInputs
from durable_actors._engine.running.step_run import Ran, StepRun
from durable_actors._engine.running.user_code import Crashed, cancelled_in, interrupt_in
from durable_actors._store.claim import SHELVED
from durable_actors._store.rows import Claim, Committed
from durable_actors._trio_inside import LOCKS, innermost
from durable_actors.errors import StateError
from durable_actors.otp import ContextReset, Pool, PoolClosed, PoolFull
from durable_actors.telemetry import StepStarted, StepStopped, current_step

AHEAD_STEPS: Final = 50
"""Steps that an instance may run on one claim before others get its slot."""
AHEAD_SECONDS: Final = 0.5
"""Seconds that it may do so."""
LOOK_AGAIN: Final = 0.25
"""Seconds between attempts to read an inbox while the store is away."""
RESUME_AGAIN: Final = 0.02
"""The same, of one whose outcome was refused, while too many run already. Given back it would run again at once."""


class StepTasks:
    """What all step tasks of a queue have in common."""

    def __init__(self, node: Node, commits: Commits, keys: Keys, pool: Pool) -> None:
        self._node = node
        self._commits = commits
        self._keys = keys
        self._settling = Settling(node, commits, keys)
        self._settle = self._settled
        self._pool = pool
        assert pool.context is not None
        self._context = pool.context
        self._variables = tuple(pool.context.items())

    @staticmethod
    def context() -> contextvars.Context:
        """What a task has at its beginning, and must have at its end: the engine's context, and no step."""
        context = contextvars.copy_context()
        context.run(current_step.set, None)
        return context

    async def run(self, turn: TaskSlice, left: Left | None = None, refused: Refused | None = None) -> object:
        """Run steps, one claim after the other, until one has waited or there is none to follow.

        Of an outcome that was left, and is `refused`: go on as if this task had waited for that.
        Returns what the pool is told about this task's context.
        """
        claimed = self._node.feeders[turn.held.claim.queue].claimed
        task = trio.lowlevel.current_task()
        home = innermost(task)
        while True:
            held = turn.held
            try:
                if left is None or refused is None:
                    leaked = await self._run_step(held, task, home)
                else:
                    leaked = await self._recover(left, refused, home)
            except Crashed as exc:
                self._settling.crashed(held, exc.error)
                leaked = True  # who knows what else it has done to this task
            except BaseException as exc:
                fatal = interrupt_in(exc)
                if fatal is None:
                    if cancelled_in(exc):  # also beside an error of the step's own clean-up
                        self._settling.given_up(held)
                    raise  # else a bug of ours. Given back it would run into it again at once; the reaper backs off
                self._commits.release(held.claim, attempts=1)
                # The node stops, and the row goes back. Raised here it would tear the tree down before that.
                self._node.on_fatal(fatal)
                return None
            finally:
                if not held.left:
                    self._settling.let_go(held)
            if leaked and turn.task is not None:
                turn.task.spend()
                return None
            if held.waited or not held.left or not claimed.follow(turn):
                return ContextReset

    async def _run_step(self, held: ActiveClaim, task: Any, home: object) -> bool:
        """One step: its outcome is left, or, with children, committed. True: it has left something open in its task."""
        node, claim = self._node, held.claim
        spec = node.catalog.find(claim.fsm, claim.version)
        if spec is None or claim.step not in spec.steps:
            self._shelve(claim)
            return False
        run = StepRun(node, claim, spec, home)
        held.steps += 1
        goes_on = spec.run_ahead and spec.kind == "machine" and held.steps < AHEAD_STEPS
        ahead = partial(self._may_go_on, held) if goes_on else _no
        if held.steps == 1 and ahead is not _no:
            held.ahead_until = trio.current_time() + AHEAD_SECONDS
        around = NOTHING if claim.plain else await self._survey(claim)
        if isinstance(around, StateError):
            ran = await run.recover(around)
        else:
            run.around = around
            ran = await (self._observed(run, claim, ahead) if node.telemetry.active else run.run(ahead))
        # Read in place, 20 ns instead of 70: see `_trio_inside`.
        if task._cancel_status is not home or task._child_nurseries or (LOCKS and task in LOCKS):  # noqa: SLF001
            await run.tidy()
        if ran.spawn is None:
            await self._renew()  # first: once it is left, the task must be gone
            self._leave(run, ran, held)
            return run.leaked
        verdict = await self._send(ran, held)
        if isinstance(verdict, Refused):
            ran, verdict = await self._refused(run, ran, held, verdict)
        self._tell(ran, held, verdict)
        return run.leaked

    def _shelve(self, claim: Claim) -> None:
        """A reload has removed its step since it was claimed, and nothing of it has run: for a node that has it."""
        text = "instance %d: step %r of %s/%d is not in this node's code any more; it waits for a node that has it"
        logger.warning(text, claim.id, claim.step, claim.fsm, claim.version)
        self._commits.release(claim, attempts=0, hold=SHELVED)

    async def _survey(self, claim: Claim) -> StepInputs | StateError:
        """Read what the step is shown; while the store is away, wait: the lease decides for how long.

        A child's result that does not decode is for `handle`: raised here, it would end the task again and again.
        """
        while True:
            try:
                around = await self._node.inputs.load(claim)
            except StateError as exc:
                return exc
            except TRANSIENT_ERRORS:
                await trio.sleep(LOOK_AGAIN)
            else:
                # With nothing unread its outcomes take the short way, and it may run ahead. A signal that comes now is
                # for the next step: the commit tells of it.
                claim.inbox = bool(around.signals)
                return around

    def _may_go_on(self, held: ActiveClaim) -> bool:
        """Whether this instance may keep its slot for its next step.

        Asked when the outcome is there: a drain, or more urgent work, may have come while the step ran.
        """
        if self._node.draining or held.interrupted is not None or trio.current_time() >= held.ahead_until:
            return False
        feeder = self._node.feeders.get(held.claim.queue)
        return feeder is not None and not feeder.claimed.has_more_urgent(held.claim.priority)

    async def _send(self, ran: Ran, held: ActiveClaim) -> Verdict:
        """Commit an outcome with children, or one after a refusal, and wait for the verdict."""
        # What a step has set in its context is for nobody else. Takes effect when this task has waited.
        trio.lowlevel.current_task().context = self._context.copy()
        self._ended(held, task_stays=True)
        if ran.spawn is None:
            return await self._commits.commit(ran.transition, held)
        return await spawn_children(self._node, ran.transition, ran.spawn)

    async def _observed(self, run: StepRun, claim: Claim, ahead: Callable[[], bool]) -> Ran:
        emit = self._node.telemetry.emit
        emit(StepStarted(**facts(claim)))
        began = trio.current_time()
        ran = await run.run(ahead)
        seconds = trio.current_time() - began
        emit(StepStopped(**facts(claim), outcome=ran.outcome, seconds=seconds, error=ran.error))
        return ran

    # -- outcomes that no task waits for

    def _leave(self, run: StepRun, ran: Ran, held: ActiveClaim) -> None:
        """The flusher settles the outcome, this task is free for another claim. One that stays keeps its slot."""
        if ran.transition.keep_claim:
            self._node.feeders[held.claim.queue].claimed.stays(held)
        else:
            self._ended(held, task_stays=False)
        held.left = True
        held.task = None  # it may run another claim in a moment
        self._commits.leave(Left(run, ran, held, self._settle))

    async def _renew(self) -> None:
        """Make this task's context as good as new. Mostly it is: steps set nothing, and then nothing waits."""
        current_step.set(None)
        if not self._is_new(contextvars.copy_context()):
            trio.lowlevel.current_task().context = self._context.copy()
            await trio.lowlevel.cancel_shielded_checkpoint()  # from here on

    def _is_new(self, context: contextvars.Context) -> bool:
        """By identity: what equals it may be another step's all the same, and to compare it would run users' code."""
        if len(context) != len(self._variables):
            return False
        for variable, value in self._variables:  # noqa: SIM110 - a generator would cost as much again
            if context.get(variable, context) is not value:
                return False
        return True

    def _settled(self, left: Left, verdict: Verdict | None) -> None:
        """What became of it; None: withdrawn. Called in the flusher, which has others to serve: nothing may fail it."""
        held = left.held
        if isinstance(verdict, Refused) and self._take_back(left, verdict):
            return
        try:
            if verdict is None or isinstance(verdict, Refused):
                self._settling.given_up(held)
            else:
                self._tell(left.ran, held, verdict)
        except Exception:  # noqa: BLE001 - a user's handler of log records, or a bug of ours
            with contextlib.suppress(Exception):
                logger.exception("instance %d: what became of its outcome could not be told", held.claim.id)
        claimed = self._node.feeders[held.claim.queue].claimed
        if isinstance(verdict, Committed) and verdict.status == "executing" and verdict.state is not None:
            # The next step sees what is stored: jsonb gives back other bytes than it was given.
            held.claim.enter(left.ran.transition.step, verdict.visit, verdict.state, inbox=verdict.inbox)
            claimed.goes_on(held)
        else:
            self._settling.let_go(held)
            claimed.settled(held)

    def _tell(self, ran: Ran, held: ActiveClaim, verdict: Verdict) -> None:
        if isinstance(verdict, Committed):
            self._settling.committed(ran, held, verdict)
            if ran.transition.last_error is not None or ran.error is not None:
                tell_failure(self._node, ran, held.claim, verdict.status)
        else:
            self._settling.not_committed(held, verdict)

    def _take_back(self, left: Left, refused: Refused) -> bool:
        """Run `handle` in a task again. False: the row goes back.

        The claim is lost, or its key, or no task is started now: a drain, or the steps' place in the tree restarts.
        """
        held = left.held
        if held.lost is not None or not self._keys.holds(held.claim):
            return False
        turn = TaskSlice(held, trio.current_time())
        try:
            turn.task = held.task = self._pool.start_nowait(
                self.run, turn, left, refused, key=turn, deadline=held.claim.trusted_until
            )
        except (PoolClosed, PoolFull):
            return False
        held.left = False
        held.interrupted = None
        held.waited = True  # nobody counts on this task to start what is next
        return True

    async def _recover(self, left: Left, refused: Refused, home: object) -> bool:
        held = left.held
        left.run.home = home
        ran, verdict = await self._refused(left.run, left.ran, held, refused)
        self._tell(ran, held, verdict)
        return left.run.leaked

    async def _refused(
        self, run: StepRun, ran: Ran, held: ActiveClaim, verdict: Refused
    ) -> tuple[Ran, Verdict]:
        """Data that Postgres refuses goes through `handle` once, then fails."""
        refused = verdict.error
        again: Verdict = verdict
        logger.warning("instance %d: Postgres refused its outcome: %s", held.claim.id, refused)
        if ran.error is None:
            while held.ending and not self._may_resume(held):  # noqa: ASYNC110 - rare: not worth an event per slot
                await trio.sleep(RESUME_AGAIN)
            self._resumed(held)
            ran = await run.recover(refused)
            again = await self._send(ran, held)
        if isinstance(again, Refused):
            ran = Ran(failure(held.claim, refused), "Stop", refused)
            again = await self._send(ran, held)
        return ran, again

    def _ended(self, held: ActiveClaim, *, task_stays: bool) -> None:
        feeder = self._node.feeders.get(held.claim.queue)
        if feeder is not None and not held.ending:
            feeder.claimed.ended(held, task_stays=task_stays)

    def _may_resume(self, held: ActiveClaim) -> bool:
        feeder = self._node.feeders.get(held.claim.queue)
        return feeder is None or feeder.claimed.slots.may_resume

    def _resumed(self, held: ActiveClaim) -> None:
        feeder = self._node.feeders.get(held.claim.queue)
        if feeder is not None and held.ending:
            feeder.claimed.slots.resumed(held)


def _no() -> bool:
    return False
