"""Step task: runs the steps of one claimed instance, each committed before the next begins.

Owns       one claim, in a slot of its queue's pool.
Receives   nothing; it is cancelled when its claim is lost, its lease can no longer be trusted, or a drain is over.
Sends      transitions to the flusher, and waits for the verdict of each.
Writes     nothing itself.
If it dies (cancelled) its claim goes back, attempt + 1; the step runs again from its beginning. After a bug of ours its
lease ends it.
"""

from __future__ import annotations

import contextvars
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Final, cast

import trio

from durable_actors._engine.commits import Commits
from durable_actors._engine.keeper import Keys
from durable_actors._engine.leases import Held
from durable_actors._engine.node import Node, logger
from durable_actors._engine.outage import TROUBLE
from durable_actors._engine.spawn import spawn_children
from durable_actors._engine.step_run import Ran, StepRun, ends_run
from durable_actors._engine.surroundings import NOTHING, Surroundings
from durable_actors._engine.transition import failure
from durable_actors._engine.verdicts import Refused, Verdict
from durable_actors._store.rows import Claim, Committed
from durable_actors.errors import StateError
from durable_actors.otp import Renewed
from durable_actors.telemetry import (
    ClaimLost,
    OutcomeLate,
    OutcomeStale,
    StepCommitted,
    StepStarted,
    StepStopped,
)

AHEAD_STEPS: Final = 50
"""Steps that an instance may run on one claim before others get its slot."""
AHEAD_SECONDS: Final = 0.5
"""Seconds that it may do so."""
LOOK_AGAIN: Final = 0.25
"""Seconds between attempts to read an inbox while the store is away."""


class StepTasks:
    """What all step tasks of an engine have in common."""

    def __init__(self, node: Node, commits: Commits, keys: Keys) -> None:
        self._node = node
        self._commits = commits
        self._keys = keys
        self._context = contextvars.copy_context()  # the engine's

    async def run(self, held: Held) -> object:
        """Run the claim's steps until it is given up, committed away, or lost."""
        claim = held.claim
        try:
            return await self._run_steps(held)
        except trio.Cancelled:
            self._interrupted(held)
            raise
        except BaseException as exc:
            fatal = _asked_to_exit(exc)
            if fatal is None and not ends_run(exc):
                raise  # a bug of ours. Given back it would run into it again at once; the reaper counts and backs off
            self._commits.release(claim, attempts=1)
            if fatal is None:
                raise  # cancelled, and the step's own clean-up failed beside that
            # The node stops, and the row goes back. Raised here it would tear the tree down before that.
            self._node.on_fatal(fatal)
            return None
        finally:
            # Not before: a thread that outlives its claim keeps its key until it has really returned.
            if claim.partition_key is not None:
                self._keys.free(claim)
            self._node.leases.drop(held)

    async def _run_steps(self, held: Held) -> object:
        """Step after step; return what the pool is told about this task's context."""
        node, claim = self._node, held.claim
        spec = node.known.find(claim.fsm, claim.version)
        run = StepRun(node, claim, spec)
        ahead = _no
        if spec.run_ahead and spec.kind == "machine":
            ahead = partial(self._may_go_on, claim, trio.current_time() + AHEAD_SECONDS)
        steps = 0
        while True:
            steps += 1
            if steps == AHEAD_STEPS:
                ahead = _no
            around = NOTHING if claim.plain else await self._survey(claim)
            if isinstance(around, StateError):
                run.around = NOTHING
                ran = await run.recover(around)
            else:
                run.around = around
                ran = await (self._observed(run, claim, ahead) if node.telemetry.active else run.run(ahead))
            verdict = await self._send(ran, held)
            if isinstance(verdict, Refused):
                ran, verdict = await self._refused(run, ran, held, verdict)
            if not isinstance(verdict, Committed):
                self._not_committed(held, verdict)
                return Renewed
            self._committed(ran, held, verdict)
            if verdict.status != "executing":
                return Renewed
            # The next step sees what is stored: jsonb gives back other bytes than it was given.
            claim.visit, claim.step, claim.attempt, claim.crashes = verdict.visit, ran.transition.step, 0, 0
            assert verdict.state is not None
            claim.state = verdict.state
            claim.inbox = verdict.inbox  # a signal may have come while the step ran

    async def _survey(self, claim: Claim) -> Surroundings | StateError:
        """Read what the step is shown; while the store is away, wait: the lease decides for how long.

        A child's result that does not decode is for `handle`: raised here, it would end the task again and again.
        """
        while True:
            try:
                return await self._node.surveyor.look(claim)
            except StateError as exc:
                return exc
            except TROUBLE:
                await trio.sleep(LOOK_AGAIN)

    def _may_go_on(self, claim: Claim, until: float) -> bool:
        """Whether this instance may keep its slot for its next step.

        Asked when the outcome is there: a drain, or more urgent work, may have come while the step ran.
        """
        if self._node.draining or trio.current_time() >= until:
            return False
        feeder = self._node.feeders.get(claim.queue)
        return feeder is None or not feeder.has_more_urgent(claim.priority)

    def _send(self, ran: Ran, held: Held) -> Awaitable[Verdict]:
        """Queue the outcome; await what comes back for its verdict.

        No coroutine of its own: a task is woken through every frame that waits, tens of thousands of times a second.
        """
        # What a step has set in its context is for nobody else, also not for the next one of its instance, which may
        # run elsewhere. Takes effect when this task has waited.
        task = trio.lowlevel.current_task()
        task.context = self._context.copy()
        if not ran.transition.ahead:
            self._ended(held)
        if ran.spawn is None:
            return self._commits.commit(ran.transition, held, task)
        return spawn_children(self._node, ran.transition, ran.spawn)

    async def _refused(self, run: StepRun, ran: Ran, held: Held, verdict: Refused) -> tuple[Ran, Verdict]:
        """Data that Postgres refuses goes through `handle` once, then fails."""
        refused = verdict.error
        again: Verdict = verdict
        logger.warning("instance %d: Postgres refused its outcome: %s", held.claim.id, refused)
        if ran.error is None:
            self._resumed(held)
            ran = await run.recover(refused)
            again = await self._send(ran, held)
        if isinstance(again, Refused):
            ran = Ran(failure(held.claim, refused), "Stop", refused)
            again = await self._send(ran, held)
        return ran, again

    def _not_committed(self, held: Held, verdict: Verdict) -> None:
        if isinstance(verdict, Refused):
            # Not even a plain failure can be stored: the row itself is broken. Its lease ends the claim.
            logger.error("instance %d cannot be written: %s", held.claim.id, verdict.error)
        else:
            self._stale(held)

    def _ended(self, held: Held) -> None:
        feeder = self._node.feeders.get(held.claim.queue)
        if feeder is not None and not held.ending:
            feeder.ended(held)

    def _resumed(self, held: Held) -> None:
        feeder = self._node.feeders.get(held.claim.queue)
        if feeder is not None and held.ending:
            feeder.slots.resumed(held)

    # -- telling

    async def _observed(self, run: StepRun, claim: Claim, ahead: Callable[[], bool]) -> Ran:
        emit = self._node.telemetry.emit
        emit(StepStarted(**_facts(claim)))
        began = trio.current_time()
        ran = await run.run(ahead)
        seconds = trio.current_time() - began
        emit(StepStopped(**_facts(claim), outcome=ran.outcome, seconds=seconds, error=ran.error))
        return ran

    def _committed(self, ran: Ran, held: Held, verdict: Committed) -> None:
        node, claim = self._node, held.claim
        status = verdict.status
        if status == "executing":  # it runs ahead
            pass
        elif status in {"done", "failed"}:
            node.on_final(claim.id)
        elif status == "runnable":
            if not ran.transition.delay:
                node.poke(claim.queue, number=claim.id)
        elif ran.transition.timeout is not None or (ran.spawn is not None and ran.spawn.timeout is not None):
            node.expect_deadline(claim.queue)
        if ran.spawn is not None:
            for queue, priority in {(plan.queue, plan.priority) for plan in ran.spawn.plans}:
                node.poke(queue, priority=priority)
        if node.telemetry.active:
            node.telemetry.emit(StepCommitted(**_facts(claim), status=verdict.status))
            if trio.current_time() > claim.trusted_until:
                node.telemetry.emit(OutcomeLate(**_facts(claim)))

    def _stale(self, held: Held) -> None:
        claim = held.claim
        logger.warning(
            "instance %d: the outcome of step %s was refused, another claim owns the instance",
            claim.id,
            claim.step,
        )
        if self._node.telemetry.active:
            self._node.telemetry.emit(OutcomeStale(**_facts(claim)))

    def _interrupted(self, held: Held) -> None:
        """Cancelled: lost, without its key, no longer trusted, or drained. What is ours still goes back, fenced."""
        node, claim = self._node, held.claim
        reason = held.lost or held.interrupted
        if reason is None and trio.current_time() >= claim.trusted_until:
            reason = "its lease could not be renewed in time"
        if held.lost is None:
            self._commits.release(claim, attempts=1)
        if reason is not None:
            logger.warning("instance %d: step %s was cancelled: %s", claim.id, claim.step, reason)
            if node.telemetry.active:
                node.telemetry.emit(ClaimLost(**_facts(claim), reason=reason))


def _no() -> bool:
    return False


def _asked_to_exit(error: BaseException) -> BaseException | None:
    """The KeyboardInterrupt or SystemExit in what a step raised; a nursery of the step's may have wrapped it."""
    if isinstance(error, BaseExceptionGroup):
        inner = map(_asked_to_exit, cast("BaseExceptionGroup[BaseException]", error).exceptions)
        return next((each for each in inner if each is not None), None)
    return error if isinstance(error, KeyboardInterrupt | SystemExit) else None


def _facts(claim: Claim) -> dict[str, Any]:
    return {
        "id": claim.id,
        "machine": claim.fsm,
        "version": claim.version,
        "step": claim.step,
        "attempt": claim.attempt,
        "visit": claim.visit,
        "queue": claim.queue,
    }
