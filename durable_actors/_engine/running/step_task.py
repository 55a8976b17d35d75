"""Step task: runs a step of one claim, then, if that did not wait for anything, a step of the next claim.

Owns       one claim at a time, in a slot of its queue.
Receives   nothing; it is cancelled when its claim is lost, its lease can no longer be trusted, a drain's time is up, or
           a command asks for it.
Sends      outcomes to the flusher (`Commits.enqueue`), and does not wait for the verdict. An instance that keeps its
           claim continues after the commit, in whichever task is free. An outcome with children is committed here.
Writes     nothing itself, but for children (`spawn.py`).
If it dies (cancelled) its claim is released, attempt + 1 (unchanged when a drain cancels it), and the step runs again
from its beginning; if a command asked for it, the instance has ended. After a bug of ours its lease ends the claim. A
queued outcome does not die with it. User code that raises SystemExit or the like does not kill it: that is a crash of
its step, which is counted and backed off.
"""

from __future__ import annotations

import contextlib
import contextvars
from datetime import UTC, datetime
from typing import Any, Final

import trio

from durable_actors._engine.claims import ActiveClaim
from durable_actors._engine.committing.completion import Completion, after_refusal, facts
from durable_actors._engine.committing.queue import Commits, PendingCommit
from durable_actors._engine.committing.spawn import spawn_children
from durable_actors._engine.committing.transition import unrun
from durable_actors._engine.committing.verdicts import Overruled, Refused
from durable_actors._engine.node import Node, logger
from durable_actors._engine.outage import TRANSIENT_ERRORS, Outage
from durable_actors._engine.running.dispatcher import Dispatcher, TaskSlice
from durable_actors._engine.running.step_inputs import InputLoader, StepInputs
from durable_actors._engine.running.step_run import StepRun
from durable_actors._engine.running.user_code import (
    Crashed,
    Postponed,
    cancelled_in,
    interrupt_in,
    only_cancelled,
)
from durable_actors._limits import names_of
from durable_actors._step_log import current_step
from durable_actors._store.holds import SHELVED
from durable_actors._store.links import NEEDS
from durable_actors._store.rows import Claim, RecordedClaim
from durable_actors._trio_inside import LOCKS, innermost
from durable_actors.errors import StateError
from durable_actors.machine import FAILURES, MachineSpec, shown_error
from durable_actors.otp import ContextReset
from durable_actors.telemetry import StepInterrupted, StepStarted, StepStopped, TraceContext

LOAD_AGAIN: Final = 0.25
"""Seconds between attempts to read an inbox while Postgres is unavailable."""
RECOVER_AGAIN: Final = 0.02
"""Seconds between looks for a slot for `handle`, while too many steps run already. Releasing the claim instead would
cause an immediate re-run."""


class StepTasks:
    """The body of the step tasks of all queues of an engine."""

    def __init__(
        self,
        node: Node,
        *,
        inputs: InputLoader,
        commits: Commits,
        completion: Completion,
        context: contextvars.Context,
    ) -> None:
        self._node = node
        self._inputs = inputs
        self._commits = commits
        self._completion = completion
        self._context = context
        self._variables = tuple(context.items())
        self._now = trio.lowlevel.current_clock().current_time
        self._outage = Outage(node, "step inputs")
        self._unread = 0  # steps whose inputs could not be read yet

    @staticmethod
    def context() -> contextvars.Context:
        """The context in which a task begins, and which it must leave as it was: the engine's, and no step."""
        context = contextvars.copy_context()
        context.run(current_step.set, None)
        return context

    async def run(self, task_slice: TaskSlice, refused: PendingCommit | None) -> object:
        """Run steps, one claim after the other, until one has waited or there is no other claim.

        `refused`: Postgres refused this outcome; let `handle` choose another one. Returns what the pool must know about
        the context of this task.
        """
        dispatcher = task_slice.dispatcher
        task = trio.lowlevel.current_task()
        home = innermost(task)
        began = task_slice.since
        while True:
            active = task_slice.active
            leaked = False
            raised: BaseException | None = None
            try:
                if refused is None:
                    leaked = await self._run_step(task_slice, task, home, began)
                else:
                    leaked = await self._run_handle(task_slice, refused, home)
            except (Crashed, Postponed) as exc:
                leaked = self._ended_early(active, exc)
            except BaseException as exc:
                raised = self._no_outcome(active, exc)
                if raised is exc:
                    raise
                if raised is None:
                    return None
            if raised is not None:
                raise raised  # outside the handler, so that the group does not become its context
            if leaked and task_slice.task is not None:
                task_slice.task.spend()
                return None
            stays = not task_slice.suspended and active.task is None
            if not (stays and dispatcher.follow(task_slice, began := self._now())):
                return ContextReset

    def _ended_early(self, active: ActiveClaim, how: Crashed | Postponed) -> bool:
        """A run has ended without an outcome. True: it may have damaged this task."""
        if isinstance(how, Crashed):
            self._completion.crashed(active, how.error)
            return True
        self._completion.postponed(active)
        return False

    def _no_outcome(self, active: ActiveClaim, error: BaseException) -> BaseException | None:
        """A run was cancelled, or failed in our code. Returns the error that leaves the task, if any does."""
        fatal = interrupt_in(error)
        if fatal is not None:
            self._commits.release(active.claim, attempts=1)
            # The node stops, and the row is released. Raised here, it would end the tree before that.
            self._node.on_fatal(fatal)
            return None
        cancelled = cancelled_in(error)
        if cancelled is None:
            return error  # a bug of ours: a release would cause an immediate re-run; the reaper backs off
        self._completion.interrupted(active, trio.current_time())
        if not only_cancelled(error):
            _log_beside(active.claim, error)
        return cancelled  # and nothing else: a SystemExit of the step's clean-up would end the pool

    async def _run_step(self, task_slice: TaskSlice, task: Any, home: object, began: float) -> bool:
        """Run the claim's step and queue its outcome. True: user code left something open in this task."""
        node, dispatcher, active = self._node, task_slice.dispatcher, task_slice.active
        claim = active.claim
        spec = node.catalog.find(claim.fsm, claim.version)
        if spec is None or claim.step not in spec.steps:
            self._shelve(claim)
            return False
        links = claim.recorded.links
        if claim.cancellation is not None and (ended := unrun(claim, spec)) is not None:
            self._enqueue(task_slice, PendingCommit(active, None, ended, "Cancel"))
            return False
        run = StepRun(node, dispatcher, active, spec, home)
        needs = bool(links & NEEDS) and spec.steps[claim.step].wants_ctx
        inputs = None if claim.plain and not needs else await self._load(claim, needs=needs)
        if isinstance(inputs, StateError):
            pending = await run.recover(inputs)
        else:
            if inputs is not None:
                run.inputs = inputs
            # Timed in place: a coroutine more would cost a job 4 %, a look at the clock 1 %.
            if claim.journal > FAILURES:
                if claim.recorded.fingerprint is not None:
                    self._compare_definitions(claim.id, claim.recorded, spec)
                began = self._now()
            pending = await (self._observed(run, claim) if node.telemetry.active else run.run())
            if claim.journal > FAILURES or (claim.journal and pending.transition.status != "done"):
                pending.transition.seconds = self._now() - began
        # Read in place, 20 ns instead of 70: see `_trio_inside`.
        if task._cancel_status is not home or task._child_nurseries or (LOCKS and task in LOCKS):  # noqa: SLF001
            await run.tidy()
        if pending.spawn is not None or not self._is_reset():
            return await self._commit(task_slice, pending)
        self._enqueue(task_slice, pending)  # most end here: without a coroutine more
        return run.leaked

    async def _run_handle(self, task_slice: TaskSlice, refused: PendingCommit, home: object) -> bool:
        """Postgres refused an outcome: let `handle` choose another one, and queue that."""
        assert refused.run is not None
        refused.run.home = home
        return await self._commit(task_slice, await self._recover(task_slice.dispatcher, refused))

    async def _observed(self, run: StepRun, claim: Claim) -> PendingCommit:
        emit = self._node.telemetry.emit
        trace = claim.recorded.trace
        emit(
            StepStarted(
                **facts(claim),
                waited=_waited(claim.due_at),
                trace=None if trace is None else TraceContext.decode(trace),
                limits=names_of(claim.recorded.rate_limit),
            )
        )
        began = self._now()
        try:
            pending = await run.run()
        except BaseException as exc:
            cause = exc.error if isinstance(exc, Crashed) else exc
            emit(StepInterrupted(**facts(claim), seconds=self._now() - began, error=cause))
            raise
        seconds, outcome, error = self._now() - began, pending.outcome, pending.error
        emit(StepStopped(**facts(claim), outcome=outcome, seconds=seconds, error=error))
        return pending

    def _compare_definitions(self, number: int, recorded: RecordedClaim, spec: MachineSpec) -> None:
        """Report another definition than the instance was started with, in its records and once in the log."""
        same = recorded.fingerprint == spec.fingerprint
        recorded.definition = None if same else spec.fingerprint
        if not same and self._node.catalog.is_news(spec, recorded.fingerprint or ""):
            logger.warning(
                "instance %d was started with another definition of %s (%.40s, here it is %s): other steps, options or "
                "another form of state under the same version. It goes on. A change of meaning needs a new version=",
                number,
                spec,
                recorded.fingerprint,
                spec.fingerprint,
            )

    def _shelve(self, claim: Claim) -> None:
        """A reload has removed its step since it was claimed, and nothing of it has run: release it for other nodes."""
        self._commits.release(claim, attempts=0, hold=SHELVED)  # first: a user's log handler may raise
        text = "instance %d: step %r of %s/%d is not in this node's code any more; it waits for a node that has it"
        logger.warning(text, claim.id, claim.step, claim.fsm, claim.version)

    async def _load(self, claim: Claim, *, needs: bool = False) -> StepInputs | StateError:
        """Read the step's inputs; while Postgres is unavailable, wait: the lease decides for how long.

        All steps report one outage, which is over when none of them waits: one may fail while others succeed.

        A child's result that does not decode is for `handle`: raised here, it would end the task again and again.
        """
        waits = False
        try:
            while True:
                try:
                    inputs = await self._inputs.load(claim, needs=needs)
                except StateError as exc:
                    return exc
                except TRANSIENT_ERRORS as exc:
                    if not waits:
                        waits = True
                        self._unread += 1
                    self._outage.failed(exc)
                    await trio.sleep(LOAD_AGAIN)
                else:
                    # With nothing unread its outcome needs only the short statement, and it may run ahead. A signal
                    # that comes now is for the next step: the commit reports it.
                    claim.inbox = bool(inputs.signals)
                    if self._unread == waits:  # no other step waits
                        self._outage.ok()
                    return inputs
        finally:
            if waits:
                self._unread -= 1
                if not self._unread:
                    self._outage.close()

    # -- the outcome

    async def _commit(self, task_slice: TaskSlice, pending: PendingCommit) -> bool:
        """Queue the outcome; one with children is committed here. True: user code left something open in this task."""
        leaked = _leaked(pending)
        while pending.spawn is not None:
            again = await self._commit_children(task_slice.dispatcher, pending)
            leaked = leaked or _leaked(pending)
            if again is None:
                return leaked
            pending = again
        if not self._is_reset():
            await self._reset_context()
        self._enqueue(task_slice, pending)
        return leaked

    def _enqueue(self, task_slice: TaskSlice, pending: PendingCommit) -> None:
        """Queue the outcome. This task must be clean by then: another one may run the claim from now on."""
        task_slice.dispatcher.hand_over(task_slice, keep_slot=pending.transition.keep_claim)
        self._commits.enqueue(pending)

    async def _commit_children(self, dispatcher: Dispatcher, pending: PendingCommit) -> PendingCommit | None:
        """Insert the children and park the parent. Returns the outcome to commit instead if Postgres refuses that."""
        assert pending.spawn is not None
        # No other step may see the context variables of this one. Takes effect when this task has waited.
        trio.lowlevel.current_task().context = self._context.copy()
        dispatcher.commit_in_task(pending.active, trio.current_time())
        try:
            verdict = await spawn_children(self._node, pending.transition, pending.spawn)
        except trio.Cancelled:
            # The server may have committed already: then nothing else hints at the children.
            self._completion.spawned(pending.active.claim, pending.spawn)
            raise
        if isinstance(verdict, Overruled):
            self._completion.overruled(pending.active, verdict, trio.current_time())
            return None
        if not isinstance(verdict, Refused):
            self._completion.report(pending, verdict, trio.current_time())
            return None
        return after_refusal(pending, verdict) or await self._recover(dispatcher, pending)

    async def _recover(self, dispatcher: Dispatcher, refused: PendingCommit) -> PendingCommit:
        """Let `handle` choose another outcome than the one that Postgres refused."""
        assert refused.run is not None
        assert refused.refusal is not None
        while not dispatcher.may_recover:  # noqa: ASYNC110 - rare: not worth an event per slot
            await trio.sleep(RECOVER_AGAIN)
        dispatcher.recovering(refused.active)
        pending = await refused.run.recover(refused.refusal)
        pending.refusal = refused.refusal
        return pending

    async def _reset_context(self) -> None:
        """Give this task the context variables that it had at its beginning."""
        trio.lowlevel.current_task().context = self._context.copy()
        await trio.lowlevel.cancel_shielded_checkpoint()  # takes effect here

    def _is_reset(self) -> bool:
        """Forget the step, and tell whether all other context variables are as they were. Usually: steps set none.

        Compares by identity: an equal value may be another step's, and comparing it would run users' code.
        """
        current_step.set(None)
        if len(contextvars.copy_context()) != len(self._variables):
            return False
        for variable, value in self._variables:  # noqa: SIM110 - a generator would cost as much again
            if variable.get(self) is not value:
                return False
        return True


def _waited(due_at: str | None) -> float | None:
    """Seconds since a row became due; None if that is not known, as of an instant that Python cannot represent."""
    with contextlib.suppress(ValueError):
        if due_at is not None:
            return max((datetime.now(UTC) - datetime.fromisoformat(due_at)).total_seconds(), 0.0)
    return None


def _log_beside(claim: Claim, error: BaseException) -> None:
    """Log what a cancelled step raised beside Cancelled. A user's log handler that raises changes nothing."""
    with contextlib.suppress(Exception):
        text = "instance %d: %s v%d, step %s raised more than Cancelled when it was cancelled"
        logger.error(text, claim.id, claim.fsm, claim.version, claim.step, exc_info=shown_error(error))


def _leaked(pending: PendingCommit) -> bool:
    return pending.run is not None and pending.run.leaked
