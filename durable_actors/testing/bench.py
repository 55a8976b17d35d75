"""`Bench`: a client that also runs steps, moves the clock and kills workers, for tests.

Everything runs on a real Postgres with the engine's own parts: a bench claims with the pick that workers use, and
commits with their flusher. There is no model of the engine here.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, suppress
from datetime import datetime
from functools import partial
from typing import Any, Final, Protocol, TypeVar

import attrs
import trio

from durable_actors._engine.claiming.pick_one import claim_one
from durable_actors._engine.claims import ActiveClaim
from durable_actors._engine.executor import Executor
from durable_actors._engine.lanes import client_lanes
from durable_actors._engine.running.step_inputs import StepInputs
from durable_actors._limits import Limit
from durable_actors._option_checks import Duration, count, shown
from durable_actors._postgres.driver import encode
from durable_actors._postgres.driver.connection import PgConn
from durable_actors._postgres.driver.decode import decode_instant
from durable_actors._postgres.pool.pool import ConnectionPool
from durable_actors._scheduling.schedule import Schedule
from durable_actors._store.read import Instance, read_by_ids
from durable_actors._store.rows import Claim
from durable_actors._store.schedule_commands import ScheduleInfo
from durable_actors._store.signal import PAGE_SIZE, read_inboxes
from durable_actors._trio_run import at_home
from durable_actors.config import Config
from durable_actors.errors import ConfigError, LeaseLost, NoTarget
from durable_actors.machine import (
    ENDED,
    Cancellation,
    ChildView,
    Decision,
    InsertOptions,
    MachineRef,
    MachineSpec,
    Outcome,
    StepRef,
    current_registry,
    spec_of,
)
from durable_actors.retention import Retention
from durable_actors.testing.assertions import Assertions, Target
from durable_actors.testing.clock import TimeSpan, parse_span, refuse_autojump
from durable_actors.testing.crash_plan import CrashAfter, Numbered, WorkerDied
from durable_actors.testing.limits import declare as declare_limits
from durable_actors.testing.report import Drained, Ran, Runs, Waiting, last_steps
from durable_actors.testing.retention import sweep
from durable_actors.testing.schedules import declare, pass_time
from durable_actors.testing.statements import (
    BURY,
    DUE,
    FORGET,
    GO,
    HAS_QUEUE,
    LIVE,
    NOW,
    QUEUES,
    RUN_NOW,
    STOP,
    WAITING,
)
from durable_actors.testing.step_alone import (
    GivenSignal,
    cancellation_of,
    in_task,
    inputs_of,
    run_alone,
    signal_options,
    step_of,
)

T = TypeVar("T")

CONNECTIONS: Final = 4
MAX_WAITING: Final = 100
"""Instances whose reason to wait `drain` reads."""
STEP_QUEUE: Final = "durable_actors.testing"
"""The queue of the instances that `run_step` makes for as long as it runs."""
STEP_LEASE: Final = 600.0
"""Seconds that a step in `run_step` may take; nothing renews its claim."""

Only = int | bytes | MachineRef
"""What `drain` runs: an instance (its id or unique key), a machine or job, or a queue (its name)."""


class BenchMaker(Protocol):
    """Makes benches (`Benches`)."""

    def fresh(self) -> AbstractContextManager[Bench]:
        """A bench on a fresh database."""
        ...


class Bench(Assertions):
    """A client for tests, on a database of its own. The fixture `durable` is one.

    It has the calls of a client: `insert`, `insert_many`, `signal`, `inspect`, … Nothing runs by itself: `drain` runs
    what is due, and `advance` moves the clock. A bench belongs to one Trio run.
    """

    def __init__(self, dsn: str, benches: BenchMaker, *, name: str = "bench") -> None:
        config = Config(dsn=dsn, name=name, node="bench")
        roles = client_lanes(CONNECTIONS, session_dsn=None, keepalive=config.lease_ttl)
        roles |= dict.fromkeys(("heartbeat", "commit", "claim"), roles["client"])  # fewer connections to open
        pool = ConnectionPool(dsn, {lane.name: lane for lane in roles.values()}.values())
        super().__init__(name, pool, "client", config.schema)
        self.dsn: Final = dsn
        """Its database: for an engine, or for connections of your own."""
        self.benches: Final = benches
        """Makes other benches, each on a fresh database."""
        self._runs: Final = Runs()
        self.ran: list[Ran] = self._runs.ran
        self._steps: Final = Executor(config, pool, roles, on_final=self.results.hint)
        self._steps.telemetry.subscribe(self._runs.note)
        self._steps.on_outcome = partial(self._at_point, committed=False)
        self._steps.on_committed = partial(self._at_point, committed=True)
        self.executor = self._steps
        self._plans: list[CrashAfter] = []
        self._numbered: Numbered | None = None
        self._dead: list[Claim] = []  # claims that dead workers have left
        self._drains = 0

    def close(self) -> None:
        """Close its connections, also after the Trio run in which it was used."""
        if trio.lowlevel.in_trio_run():
            self._pool.close()
        else:
            trio.run(self._pool.aclose)

    async def _run(self, call: Callable[[PgConn], Awaitable[T]]) -> T:
        refuse_autojump()
        return await super()._run(call)

    # -- run what is due

    @at_home
    async def drain(self, only: Only | None = None, *, max_steps: int = 10_000) -> Drained:
        """Run everything that is due, on all queues, one step after the other, until nothing is due.

        `only` restricts it to one instance (its id or unique key), one machine or job (the class or function), or one
        queue (its name). What the steps make due (the next step, children, signals) runs, too; what is due later does
        not: see `advance`. The clock stands still meanwhile. `print(drained)` shows what ran, and why each instance
        that is left waits.

        Raises `NoTarget` for an instance, key or queue that nobody knows. Raises `AssertionError` if more is due after
        `max_steps` steps, with the last ones: a machine that never waits would run for ever. `crash_after` ends the
        drain; the next one goes on.
        """
        __tracebackhide__ = True
        count("max_steps", max_steps, least=1)
        refuse_autojump()
        first = len(self.ran)
        async with self._standing_clock():
            with suppress(WorkerDied):  # `Drained.worker_died` tells it
                while await self._pass(only, first + max_steps, max_steps):
                    pass
            return await self._drained(tuple(self.ran[first:]), only)

    async def _pass(self, only: Only | None, until: int, most: int) -> bool:
        """Run each queue until nothing of it is due. False: nothing was."""
        __tracebackhide__ = True
        ran = False
        for queue, ids in await self._work(only):
            while await self._execute(queue, ids):
                ran = True
                if len(self.ran) >= until and await self._is_due(only):
                    bound = f"drain has run max_steps={most} steps, and more is due: a machine that never waits runs"
                    lines = [
                        f"{bound} for ever; if yours does not, pass a greater max_steps. The last steps:"
                    ]
                    raise AssertionError("\n".join([*lines, *last_steps(self.ran)]))
        return ran

    async def _execute(self, queue: str, ids: list[int] | None) -> bool:
        """Run one step of the queue. False: nothing of it is due."""
        try:
            await self._bury()
            return await self._steps.execute_next(queue, self.step_context(), only=ids) is not None
        except LeaseLost:
            if self.ran and not self.ran[-1].committed:
                self._runs.change(self.ran[-1].id, "lost", committed=False)
            return True
        except WorkerDied:
            if self._numbered is None:
                raise
            return True

    async def _work(self, only: Only | None) -> list[tuple[str, list[int] | None]]:
        """The queues to run, each with the instances to run there (None: all)."""
        if only is None:
            return [((row[0] or b"").decode(), None) for row in await self._query(QUEUES)]
        if isinstance(only, str) and await self._is_queue(only):
            return [(only, None)]
        number, machine = await self._restriction(only)
        rows = await self._query(LIVE, [encode.number(number), encode.text(machine)])
        found: dict[str, list[int]] = {}
        for row in rows:
            found.setdefault((row[0] or b"").decode(), []).append(int(row[1] or 0))
        return list(found.items())

    async def _is_due(self, only: Only | None) -> bool:
        queue = only if isinstance(only, str) and await self._is_queue(only) else None
        number, machine = (None, None) if only is None or queue is not None else await self._restriction(only)
        rows = await self._query(DUE, [encode.number(number), encode.text(machine), encode.text(queue)])
        return rows[0][0] == b"t"

    async def _is_queue(self, name: str) -> bool:
        specs = current_registry().specs.values()
        return name in {spec.queue for spec in specs} or bool(await self._query(HAS_QUEUE, [name.encode()]))

    async def _restriction(self, only: object) -> tuple[int | None, str | None]:
        """The id or the machine's name that `only` means. Raises `NoTarget`, `ConfigError`."""
        if isinstance(only, str | bytes) or (isinstance(only, int) and not isinstance(only, bool)):
            try:
                return (await self.inspect(only)).id, None
            except NoTarget as error:
                if isinstance(only, int):
                    raise
                raise NoTarget(
                    f"only={only!r} is neither a queue nor a unique key that is known: {error}"
                ) from None
        spec = spec_of(only)
        if spec is not None:
            return None, spec.name
        raise ConfigError(
            f"only={shown(only)} must be an instance (its id or unique key), a machine or job, or the name of a queue",
            option="only",
            value=only,
        )

    async def _drained(self, ran: tuple[Ran, ...], only: Only | None) -> Drained:
        rows = await self._query(WAITING, [encode.number(MAX_WAITING)])
        ids = [int(row[0] or 0) for row in rows]
        async with self._pool.acquire(self._lane) as conn:
            found = await read_by_ids(conn, self._schema, ids)
        waiting = [
            Waiting(instance=found[number], why=await self._why_left(found[number], only))
            for number in ids
            if number in found
        ]
        return Drained(ran=ran, waiting=tuple(waiting), waiting_count=int(rows[0][1] or 0) if rows else 0)

    async def _why_left(self, instance: Instance, only: Only | None) -> str:
        if any(claim.id == instance.id for claim in self._dead):
            return f"its worker died in step {instance.step!r}; the next drain runs it again"
        reason = await self._why(instance)
        if only is not None and reason.startswith("it is due"):
            return f"it is due, and drain(only={_shown_only(only)}) has left it out"
        return reason

    @at_home
    async def execute_next(
        self, queue: str = "default", *, lease_ttl: Duration | None = None, node: str | None = None
    ) -> Instance | None:
        """Run the step of one due instance; see `durable_actors.execute_next`. Raises `WorkerDied` by `crash_after`."""
        await self._bury()
        return await super().execute_next(queue, lease_ttl=lease_ttl, node=node)

    @at_home
    async def result(self, target: Target, *, timeout: Duration | None = None, type: Any = Any) -> Any:
        """The result of an instance that has ended; see `durable_actors.result`.

        Without a `timeout` it does not wait: nothing runs on a bench until `drain`. Give one if an engine runs.
        """
        __tracebackhide__ = True
        if timeout is None:
            instance, reason = await self.explained(target)
            if instance.status not in ENDED:
                self._fail(f"instance {instance.id} has not ended", instance, reason)
        return await super().result(target, timeout=timeout, type=type)

    # -- the clock

    @asynccontextmanager
    async def _standing_clock(self) -> AsyncGenerator[None]:
        """While a drain runs, no time passes: a short delay must not end in one run of a test and not in another."""
        self._drains += 1
        try:
            await self._query(STOP)
            yield
        finally:
            self._drains -= 1
            if not self._drains:
                with trio.CancelScope(shield=True):
                    await self._query(GO)

    @at_home
    async def now(self) -> datetime:
        """The time of the bench: what `durable.now()` returns in its database."""
        found = decode_instant((await self._query(NOW))[0][0])
        assert found is not None
        return found

    @at_home
    async def advance(self, by: TimeSpan) -> datetime:
        """Move the clock of the bench: `await durable.advance("3d")`. Returns its new time.

        Delays, deadlines, back-offs and the times in rows move together; leases do not, so nothing that runs is taken
        from its worker. Schedules fire as time passes, each slot at its time (`declare_schedules`, `schedules.put`).
        `by` is a text ("3d", "1h30m", "90s"), seconds, or a timedelta. Time never goes back. Nothing runs until
        `drain`. An engine on this database notices it with its next poll.
        """
        seconds = parse_span(by)
        if self._dead:  # their leases end before that time has passed
            await self._bury()
            await self._steps.reap()
        async with self._standing_clock():
            await pass_time(self._pool, self._lane, self._schema, seconds)
        return await self.now()

    @at_home
    async def declare_schedules(self, *given: Schedule) -> list[ScheduleInfo]:
        """Store these schedules, and those of all jobs with `cron=` or `every=`, as an engine does at its start."""
        return await declare(self._pool, self._lane, self._schema, given)

    @at_home
    async def declare_limits(self, limits: Mapping[str, Limit]) -> None:
        """Declare these limits, as an engine does at its start. What uses one that nobody has declared is held."""
        await declare_limits(self._pool, self._lane, self._schema, limits)

    @at_home
    async def sweep(self, retention: Retention | None = None) -> int:
        """Delete the ended instances whose time has come, as the janitor of an engine would; return how many.

        `retention` says how long they are kept, default: `Retention()`; `keep=` of a machine goes before it. Nothing
        is deleted by itself: `advance("8d")`, then `sweep()`.
        """
        return await sweep(self._pool, self._lane, self._schema, retention or Retention())

    # -- one step

    @at_home
    async def run_step(
        self,
        step: StepRef[Any] | MachineRef,
        state: object = None,
        *,
        signals: Sequence[GivenSignal] = (),
        inbox: Sequence[GivenSignal] = (),
        children: Sequence[ChildView] = (),
        dependencies: Mapping[str, object] | None = None,
        decision: Decision | None = None,
        cancellation: Cancellation | None = None,
        attempt: int = 0,
        handle: bool = False,
        machine: MachineRef | None = None,
    ) -> Outcome:
        """Run the code of one step, and return its outcome instead of committing it.

        `step` is `Machine.step`, a job, or a task. `state` (a job's arguments) goes through JSON as in an engine, and
        so does the state or result in the outcome. The context is a real one: `signals` are in `ctx.awaited` and
        `ctx.signals` (a name, a name with a payload, or a `Signal`), `inbox` only in `ctx.signals`, `children` in
        `ctx.children`, `dependencies` in `ctx.dependencies` (by key: a result, or a `ChildView`); `decision` is
        `ctx.decision`, and `cancellation` is `ctx.cancellation`. Limits do not hold it.
        What the step does by `ctx.insert`, `ctx.start_child` and `ctx.signal` happens on the bench's database, where
        `assert_inserted` and `assert_sent` find it. The instance itself exists only while the step runs.

        An error of the step is raised here. With `handle=True` it goes through the machine's `handle` (or a job's rules
        for retries), whose outcome is returned. An invalid outcome raises `InvalidOutcome`, a state that cannot be
        stored `StateError`. `machine` is needed for a step that a base class defines.
        """
        spec, name = step_of(step, machine)
        count("attempt", attempt, least=0)
        given = inputs_of(children, dependencies or {}, decision)
        cancelled = cancellation_of(cancellation)
        options: InsertOptions = {"queue": STEP_QUEUE, "step": name, "rate_limit": None}
        if state is not None:
            options["state"] = state
        number = await self.insert(spec.definition, **options)
        assert number is not None
        try:
            run = partial(self._run_alone, spec, number, signals, inbox, given)
            return await run(cancellation=cancelled, attempt=attempt, handle=handle)
        finally:
            with trio.CancelScope(shield=True):
                await self._query(FORGET, [encode.number(number)])

    async def _run_alone(
        self,
        spec: MachineSpec,
        number: int,
        signals: Sequence[GivenSignal],
        inbox: Sequence[GivenSignal],
        inputs: StepInputs,
        *,
        cancellation: Cancellation | None,
        attempt: int,
        handle: bool,
    ) -> Outcome:
        for given in (*signals, *inbox):
            name, payload, dedup_key = signal_options(given)
            await self.signal(number, name, payload, dedup_key=dedup_key)
        async with self._pool.acquire(self._lane) as conn:
            found = (await read_inboxes(conn, self._schema, [number], limit=PAGE_SIZE))[number]
        node = self._steps.make_node(lease_ttl=STEP_LEASE)
        claim = await claim_one(node, STEP_QUEUE, [number])
        assert claim is not None
        claim.attempt, claim.inbox, claim.children_total = attempt, bool(found), len(inputs.children or ())
        claim.awaits = tuple({each.name for each in found[: len(signals)]}) or None
        claim.cancellation = cancellation
        active = ActiveClaim(claim)
        node.claims.add(active)
        inputs = attrs.evolve(inputs, signals=tuple(found), awaited=tuple(found[: len(signals)]))
        run = partial(run_alone, node, active, spec, inputs, handles=handle)
        return await in_task(run, self.step_context())

    # -- crashes

    def crash_after(
        self, step: StepRef[Any] | MachineRef, *, times: int = 1, committed: bool = False
    ) -> CrashAfter:
        """Let the worker die after the next run of a step: its code has ended, and its outcome is not yet committed.

        The claim stays, as after a real crash. The drain ends there; the next one takes the claim back and runs the
        step again with attempt + 1. With `committed=True` the worker dies right after the commit instead, and nothing
        runs twice. `step` is `Machine.step`, a job, or the name of a step of any machine. `times`: of so many runs.

        As a context manager (``with durable.crash_after(...):``) it ends with the block, and asserts that the worker
        has died.
        """
        count("times", times, least=1)
        if isinstance(step, StepRef):
            plan = CrashAfter(step.name, step.owner, None, committed, times, self._withdraw)
        elif isinstance(step, str):
            plan = CrashAfter(step, None, None, committed, times, self._withdraw)
        else:
            spec, name = step_of(step, None)
            plan = CrashAfter(name, None, spec.name, committed, times, self._withdraw)
        self._plans.append(plan)
        return plan

    def crash_at(self, plan: Numbered | None) -> None:
        """Let workers die at numbered points, and others go on: for `crash_anywhere`."""
        self._numbered = plan

    def _withdraw(self, plan: CrashAfter) -> None:
        if plan in self._plans:
            self._plans.remove(plan)

    def _at_point(self, claim: Claim, *, committed: bool) -> None:
        # Both are asked: each counts for itself.
        planned = [plan.wants(claim, committed=committed) for plan in self._plans]
        numbered = self._numbered is not None and self._numbered.wants(claim, committed=committed)
        if numbered or any(planned):
            if not committed:
                self._dead.append(claim)
            self._runs.change(claim.id, "worker died", committed=committed)
            raise WorkerDied(claim, committed=committed)

    async def _bury(self) -> None:
        """Let the leases of dead workers end now: the next call takes their claims back."""
        if not self._dead:
            return
        ids = encode.int_array([claim.id for claim in self._dead])
        await self._query(BURY, [ids, encode.text_array([claim.claim_id for claim in self._dead])])
        self._dead.clear()
        if self._numbered is not None:  # without the back-off after a second crash
            await self._steps.reap()
            await self._query(RUN_NOW, [ids])


def _shown_only(only: Only) -> str:
    return repr(only) if isinstance(only, int | str | bytes) else current_registry().find(only).name
