"""One run of one step: from a claim to the transition to commit. Runs user code; commits nothing.

What the user's code may do, and what becomes of it:

returns an outcome                     its transition
raises an Exception (also a group)     `handle`, or a job's retry
runs longer than its timeout           `StepTimeout`, the same way
returns nonsense, or what cannot be    `InvalidOutcome` or `StateError`, the same way
stored; a state that does not decode
is cancelled                           nothing: no outcome, `handle` is not called
raises KeyboardInterrupt               nothing, and the node stops
raises SystemExit, a Cancelled that    nothing: `Crashed`, which is counted and backed off
no scope of ours has sent, or another
BaseException (also in a group)
leaves a scope or a nursery open       closed, and told; what it returned counts
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, cast

import attrs
import trio

from durable_actors._engine.committing.transition import failure, plan_some, spawn_of, transition
from durable_actors._engine.node import Node, logger
from durable_actors._engine.running.step_inputs import NOTHING
from durable_actors._engine.running.user_code import Crashed, close_leftovers, fate_of
from durable_actors._store.children import Spawn
from durable_actors._store.rows import Claim, Transition
from durable_actors._trio_inside import innermost, is_cancelled
from durable_actors.errors import StateError, StepTimeout
from durable_actors.machine import (
    Context,
    Error,
    InsertPlan,
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
)
from durable_actors.telemetry import current_step

PLAN_AT_ONCE: Final = 2000
"""Children planned without letting others run: 5 to 10 ms."""


@attrs.define(eq=False)
class Ran:
    """What a run came to."""

    transition: Transition
    outcome: str
    """Its class, for telemetry."""
    error: Exception | None
    """What went through `handle`."""
    spawn: Spawn | None = None
    """Children to insert with it."""


class StepRun:
    """Runs the current step of a claim; the claim moves on, this stays."""

    __slots__ = ("_claim", "_node", "_spec", "around", "home", "leaked")

    def __init__(self, node: Node, claim: Claim, spec: MachineSpec, home: object) -> None:
        self._node = node
        self._claim = claim
        self._spec = spec
        self.home = home
        """`innermost` of the task that runs it, before user code has run."""
        self.leaked = False
        """User code has left something open in that task; it is closed."""
        self.around = NOTHING
        """What the step is shown beside its state."""

    async def run(self, ahead: Callable[[], bool]) -> Ran:
        """Run the step; `ahead`, asked when its outcome is there, tells whether a `Next` may stay on this claim."""
        claim, spec = self._claim, self._spec
        over = exhausted(spec, claim.attempt) if claim.attempt else None
        if over is not None:
            # Its last run is the one before this: `attempt` of what has ended counts as if that had failed.
            return Ran(attrs.evolve(transition(claim, spec, over), attempt=claim.attempt - 1), "Stop", None)
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
                value, spec, step=claim.step, attempt=claim.attempt, random=self._node.random
            )
            ran = self._ran(outcome, ahead=isinstance(outcome, Next) and ahead())
            if isinstance(value, Error):  # a failed run, as if it had raised; a retry remembers that, too
                ran.transition.last_error = reason_text(value.reason)
            if not isinstance(outcome, ScheduleChildren):
                return ran
            await self.tidy()  # what it has left open could cancel this
            return await _with_children(ran, outcome)
        except BaseException as exc:  # noqa: BLE001 - user code may raise anything
            return await self.recover(await self._judge(exc), ctx)

    async def recover(self, error: Exception, ctx: Context[Any] | None = None) -> Ran:
        """Let `handle` (or a job's rules) turn an error into an outcome; if that fails, so does the instance."""
        claim, spec = self._claim, self._spec
        if ctx is None:
            try:
                ctx = self._context(spec.codec.decode(claim.state, step=claim.step))
            except StateError:
                ctx = self._context(decode_or_text(claim.state))
        # What becomes of it is told when it is committed (`failures.tell_failure`).
        logger.debug("instance %d: %s, step %s raised", claim.id, spec, claim.step, exc_info=error)
        try:
            outcome = await self._outcome_of(error, ctx)
            ran = self._ran(outcome, error=error)
            if not isinstance(outcome, ScheduleChildren):
                return ran
            await self.tidy()  # what it has left open could cancel this
            return await _with_children(ran, outcome)
        except BaseException as exc:  # noqa: BLE001 - a handle that raises: failed, by contract
            raised = await self._judge(exc)
            raised.__context__ = error
            return Ran(failure(claim, raised), "Stop", raised)

    async def _judge(self, error: BaseException) -> Exception:
        """The error as `handle` gets it; raises what is not for `handle`."""
        await self.tidy()
        fate = fate_of(error, cancelled=is_cancelled())
        if fate == "crash":
            raise Crashed(error) from error
        if fate == "ends":
            raise error
        return cast("Exception", error)

    async def tidy(self) -> None:
        """Close what user code has left open in this task: it would hit what comes next, the engine's code first."""
        self.leaked = await close_leftovers(self._node, self._claim, self.home) or self.leaked

    def _ran(self, outcome: Outcome, *, ahead: bool = False, error: Exception | None = None) -> Ran:
        """What an outcome comes to; raises when it cannot be stored."""
        stays = ahead and self._claim.plain
        after = transition(
            self._claim,
            self._spec,
            outcome,
            handed=self.around.awaited,
            unseen=self.around.unseen,
            keep_claim=stays,
            error=error,
        )
        return Ran(after, type(outcome).__name__, error)

    async def _outcome_of(self, error: Exception, ctx: Context[Any]) -> Outcome:
        claim, spec, random = self._claim, self._spec, self._node.random
        if spec.kind == "job":
            return job_failure(error, spec, attempt=claim.attempt, random=random)
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
        # A thread cannot be cancelled: it has returned too late.
        if scope.cancelled_caught or (not step.is_async and trio.current_time() - began > timeout):
            raise StepTimeout(
                f"{self._spec}, step {step.name!r} ran longer than its timeout of {timeout:g} s"
            )
        return value

    async def _in_thread(self, call: Any, *args: object) -> object:
        """Run plain code in a thread. It cannot be cancelled: its slot and its lease stay until it returns."""
        return await self._node.threads.run(self._claim, call, *args)

    def _context(self, state: Any) -> Context[Any]:
        claim, around = self._claim, self.around
        ctx = Context.of({
            "state": state,
            "id": claim.id,
            "machine": claim.fsm,
            "version": claim.version,
            "step": claim.step,
            "attempt": claim.attempt,
            "visit": claim.visit,
            "signals": around.signals,
            "awaited": around.awaited,
            "more_signals": around.more_signals,
            "_children": around.children,
            "_children_counts": around.children_counts,
            "parent_id": claim.parent_id,
            "claim_id": claim.claim_id,
            "in_handle": False,
            "port": self._node.port,
        })  # fmt: skip
        current_step.set(ctx)  # for log records; this task's context is its own
        return ctx


async def _with_children(ran: Ran, outcome: ScheduleChildren) -> Ran:
    """Plan its children; a hundred thousand take 0.4 s, in which heartbeats and other steps want to run."""
    plans: list[InsertPlan] = []
    for first in range(0, len(outcome.children), PLAN_AT_ONCE):
        plans += plan_some(outcome, first, first + PLAN_AT_ONCE)
        await trio.lowlevel.checkpoint()
    ran.spawn = spawn_of(outcome, plans)
    return ran
