"""One run of one step: from a claim to the outcome to commit. Runs user code; commits nothing.

What user code may do, and what follows:

returns an outcome                     its transition
raises an Exception (also a group)     the retry of a job or of the step's `Backoff`, else `handle`
runs longer than its timeout           `StepTimeout`, the same way
returns no outcome, or a value that    `InvalidOutcome` or `StateError`, the same way
cannot be stored; its stored state
does not decode
is cancelled                           no outcome; `handle` is not called
raises KeyboardInterrupt               no outcome, and the node stops
raises SystemExit, a Cancelled that    no outcome: `Crashed`, which is counted and backed off
is not from a scope of ours, another
BaseException (also in a group)
leaves a scope or a nursery open       it is closed and logged; the returned outcome counts
"""

from __future__ import annotations

import contextlib
from typing import Any, Final, NoReturn, cast

import attrs
import psycopg
import trio

from durable_actors._engine.claims import ActiveClaim
from durable_actors._engine.committing.completion import facts
from durable_actors._engine.committing.queue import PendingCommit
from durable_actors._engine.committing.transition import (
    failure,
    keep_handled,
    plan_some,
    spawn_of,
    transition,
)
from durable_actors._engine.node import Node, logger
from durable_actors._engine.outage import TRANSIENT_ERRORS
from durable_actors._engine.running.dispatcher import Dispatcher
from durable_actors._engine.running.step_inputs import NO_INPUTS
from durable_actors._engine.running.user_code import (
    Crashed,
    Postponed,
    close_leftovers,
    fate_of,
    told_to_wait,
)
from durable_actors._limits import names_of, uses_of
from durable_actors._step_log import current_step
from durable_actors._store.limits import block_limits
from durable_actors._trio_inside import innermost, is_cancelled
from durable_actors.errors import StateError, StepTimeout
from durable_actors.machine import (
    Context,
    Error,
    InsertPlan,
    JournalLevel,
    MachineSpec,
    Next,
    Outcome,
    ScheduleChildren,
    StepSpec,
    decode_or_text,
    exhausted,
    job_failure,
    normalize_outcome,
    reason_text,
    step_failure,
)
from durable_actors.telemetry import LimitBlocked

PLAN_AT_ONCE: Final = 2000
"""Children that are planned before other tasks run: 5 to 10 ms."""


class StepRun:
    """Runs the current step of a claim, and `handle` if the step or its commit fails."""

    __slots__ = ("_active", "_dispatcher", "_node", "_spec", "home", "inputs", "leaked")

    def __init__(
        self, node: Node, dispatcher: Dispatcher, active: ActiveClaim, spec: MachineSpec, home: object
    ) -> None:
        self._node = node
        self._dispatcher = dispatcher
        self._active = active
        self._spec = spec
        self.home = home
        """`innermost` of the task that runs it, before user code has run."""
        self.leaked = False
        """User code left something open in that task; it was closed."""
        self.inputs = NO_INPUTS
        """What the step gets beside its state."""

    async def run(self) -> PendingCommit:
        """Run the step."""
        claim, spec = self._active.claim, self._spec
        over = exhausted(spec, claim.attempt, claim.max_attempts) if claim.attempt else None
        if over is not None:
            # No run is left, so the last one was the one before this: store its attempt.
            ended = attrs.evolve(transition(claim, spec, over), attempt=claim.attempt - 1)
            return PendingCommit(self._active, self, ended, "Stop")
        try:
            ctx = self._context(spec.codec.decode(claim.state, step=claim.step))
        except StateError as exc:
            return await self.recover(exc, self._context(decode_or_text(claim.state)))
        except BaseException as exc:  # a converter or validator of the user's class
            await self._judge(exc)
            raise  # an Exception would be a bug of ours
        try:
            step = spec.steps[claim.step]
            if step.is_async and step.timeout is None:  # most are
                value = await step.call(ctx)
            else:
                value = await self._call(step, ctx)
            outcome = normalize_outcome(
                value,
                spec,
                step=claim.step,
                attempt=claim.attempt,
                random=self._node.random,
                max_attempts=claim.max_attempts,
            )
            if isinstance(outcome, Next):  # first: most steps of machines end so
                return self._pending(outcome, keep_claim=self._may_run_ahead())
            pending = self._pending(outcome)
            if isinstance(value, Error):  # a failed run, as if it had raised: a retry stores the reason, too
                pending.transition.last_error = reason_text(value.reason)
            if not isinstance(outcome, ScheduleChildren):
                return pending
            await self.tidy()  # a scope that user code has left open could cancel this
            return await _with_children(pending, outcome, self._node.config.journal)
        except BaseException as exc:  # noqa: BLE001 - user code may raise anything
            return await self.recover(await self._judge(exc), ctx)

    def _may_run_ahead(self) -> bool:
        """Whether the next step may run on this claim, once the outcome is committed."""
        spec, active = self._spec, self._active
        return (
            spec.run_ahead
            and spec.kind == "machine"
            and active.claim.plain
            and self._dispatcher.may_continue(active, trio.current_time())
        )

    async def recover(self, error: Exception, ctx: Context[Any] | None = None) -> PendingCommit:
        """Turn an error into an outcome, by the rules of job or step or by `handle`; if that raises, it fails."""
        claim, spec = self._active.claim, self._spec
        if claim.recorded.rate_limit is not None and (seconds := told_to_wait(error)) is not None:
            await self._block(seconds)
        if ctx is None:
            try:
                ctx = self._context(spec.codec.decode(claim.state, step=claim.step))
            except StateError:
                ctx = self._context(decode_or_text(claim.state))
            except BaseException as exc:  # as in `run`
                await self._judge(exc)
                raise
        # The log record at the right level follows the commit (`failures.log_failure`).
        with contextlib.suppress(Exception):  # a user's log handler
            logger.debug("instance %d: %s, step %s raised", claim.id, spec, claim.step, exc_info=error)
        try:
            outcome = await self._outcome_of(error, ctx)
            pending = self._pending(outcome, error=error)
            if not isinstance(outcome, ScheduleChildren):
                return pending
            await self.tidy()  # a scope that user code has left open could cancel this
            return await _with_children(pending, outcome, self._node.config.journal)
        except BaseException as exc:  # noqa: BLE001 - a handle that raises: failed, by contract
            raised = await self._judge(exc)
            raised.__context__ = error
            return PendingCommit(self._active, self, failure(claim, raised), "Stop", raised)

    async def _block(self, seconds: float) -> NoReturn:
        """What the step calls has told it to wait: nothing of its limits begins until then, and this runs again."""
        claim, node = self._active.claim, self._node
        uses = uses_of(claim.recorded.rate_limit or "")
        targets = [target for target, _ in uses.rates] or [uses.slot or ""]
        with contextlib.suppress(*TRANSIENT_ERRORS, psycopg.Error):
            async with node.pool.acquire(node.lane("client")) as conn:
                await block_limits(conn, node.owner.schema, targets, seconds)
        if node.telemetry.active:
            names = names_of(claim.recorded.rate_limit)
            node.telemetry.emit(LimitBlocked(**facts(claim), limits=names, retry_after=seconds))
        raise Postponed

    async def _judge(self, error: BaseException) -> Exception:
        """The error that `handle` gets. Raises if the error is not for `handle`."""
        await self.tidy()
        fate = fate_of(error, cancelled=is_cancelled())
        if fate == "crash":
            raise Crashed(error) from error
        if fate == "ends":
            raise error
        return cast("Exception", error)

    async def tidy(self) -> None:
        """Close what user code left open in this task: it would affect the code that runs next."""
        self.leaked = await close_leftovers(self._node, self._active.claim, self.home) or self.leaked

    def _pending(
        self, outcome: Outcome, *, keep_claim: bool = False, error: Exception | None = None
    ) -> PendingCommit:
        """The outcome as it will be stored. Raises if it cannot be stored."""
        active, inputs = self._active, self.inputs
        after = transition(
            active.claim,
            self._spec,
            outcome,
            handed=inputs.awaited,
            unseen=inputs.unseen,
            keep_claim=keep_claim,
            error=error,
        )
        if error is not None:
            keep_handled(after, error)
        return PendingCommit(active, self, after, type(outcome).__name__, error)

    async def _outcome_of(self, error: Exception, ctx: Context[Any]) -> Outcome:
        claim, spec, random = self._active.claim, self._spec, self._node.random
        if spec.kind == "job":
            return job_failure(
                error, spec, attempt=claim.attempt, random=random, max_attempts=claim.max_attempts
            )
        again = step_failure(
            error,
            spec.steps[claim.step],
            attempt=claim.attempt,
            random=random,
            max_attempts=claim.max_attempts,
        )
        if again is not None:
            return again
        handle = spec.handle
        value: object
        if handle.is_async:
            value = await handle.call(error, ctx.for_handle())
        elif handle.is_default:
            value = handle.call(error, ctx)
        else:
            value = await self._in_thread(handle.call, error, ctx.for_handle())
        await self.tidy()
        return normalize_outcome(
            value, spec, step=claim.step, attempt=claim.attempt, random=random, source="handle"
        )

    async def _call(self, step: StepSpec, ctx: Context[Any]) -> object:
        if step.timeout is None:
            return await self._run_step(step, ctx)
        return await self._run_timed(step, ctx, step.timeout)

    async def _run_step(self, step: StepSpec, ctx: Context[Any]) -> object:
        if step.is_async:
            return await step.call(ctx)
        return await self._in_thread(step.call, ctx)

    async def _run_timed(self, step: StepSpec, ctx: Context[Any], timeout: float) -> object:
        began = trio.current_time()
        value: object = None
        with trio.move_on_after(timeout) as scope:
            outside, self.home = self.home, innermost(trio.lowlevel.current_task())
            try:
                value = await self._run_step(step, ctx)
            finally:
                await self.tidy()  # before the scope around it is closed
                self.home = outside
        # A thread cannot be cancelled, so it may return too late.
        if scope.cancelled_caught or (not step.is_async and trio.current_time() - began > timeout):
            raise StepTimeout(
                f"{self._spec}, step {step.name!r} ran longer than its timeout of {timeout:g} s"
            )
        return value

    async def _in_thread(self, call: Any, *args: object) -> object:
        """Run synchronous code in a thread. It cannot be cancelled: it keeps slot and lease until it returns."""
        return await self._node.threads.run(self._active.claim, call, *args)

    def _context(self, state: Any) -> Context[Any]:
        claim, inputs = self._active.claim, self.inputs
        # Up to ten fields: a larger dict would take twice as long. The others are seldom anything but the default.
        fields = {
            "state": state,
            "id": claim.id,
            "machine": claim.fsm,
            "version": claim.version,
            "step": claim.step,
            "attempt": claim.attempt,
            "visit": claim.visit,
            "parent_id": claim.parent_id,
            "claim_id": claim.claim_id,
            "port": self._node.port,
        }
        if inputs is not NO_INPUTS:
            fields["signals"] = inputs.signals
            fields["awaited"] = inputs.awaited
            fields["decision"] = inputs.decision
            fields["more_signals"] = inputs.more_signals
            fields["_children"] = inputs.children
            fields["_children_counts"] = inputs.children_counts
            fields["dependencies"] = inputs.dependencies
            fields["scheduled"] = inputs.scheduled
        if claim.cancellation is not None:
            fields["cancellation"] = claim.cancellation
        ctx = Context.of(fields)
        current_step.set(ctx)  # for log records, in the context of this task only
        return ctx


async def _with_children(
    pending: PendingCommit, outcome: ScheduleChildren, journal: JournalLevel
) -> PendingCommit:
    """Plan the children in parts: a hundred thousand take 0.4 s, and heartbeats and other steps must run between."""
    plans: list[InsertPlan] = []
    for first in range(0, len(outcome.children), PLAN_AT_ONCE):
        plans += plan_some(outcome, first, first + PLAN_AT_ONCE, journal=journal)
        await trio.lowlevel.checkpoint()
    pending.spawn = spawn_of(outcome, plans)
    return pending
