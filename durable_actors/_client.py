"""`Client`: insert, signal, wait for results and read instances, on one schema of one database."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from contextvars import Context, ContextVar, copy_context
from functools import partial
from time import perf_counter
from typing import Any, Final, Literal, Required, TypedDict, TypeVar, Unpack, cast, overload

import psycopg
import trio

from durable_actors._decisions import DecisionCalls
from durable_actors._engine.executor import Executor
from durable_actors._history import TrioConn
from durable_actors._option_checks import Duration, count, duration, flag, queue_name, shown
from durable_actors._postgres.driver.connection import PgConn
from durable_actors._postgres.driver.statement import Params, Result, Statement
from durable_actors._postgres.pool.pool import ConnectionPool
from durable_actors._results import ResultWatch
from durable_actors._schedule_calls import ScheduleCalls
from durable_actors._step_log import current_step
from durable_actors._store.connection_kinds import check_trio
from durable_actors._store.dialogues import (
    climbing,
    explaining,
    inspecting,
    run_dialogue,
    undelivered,
    value_of,
)
from durable_actors._store.drawing import MOST_NODES, drawing
from durable_actors._store.explanation import Explanation
from durable_actors._store.foreign import execute_async
from durable_actors._store.insert import MAX_BYTES, Insertion, insert_call, plan_rows, traced
from durable_actors._store.observe import NEWEST, Filter, list_instances
from durable_actors._store.read import Instance
from durable_actors._store.signal import (
    Delivery,
    Sent,
    plan_signal,
    read_sent,
    send_signals,
    signal_call,
    signal_params,
    start_with_signal,
)
from durable_actors._store.sql import statement
from durable_actors._store.tree import Tree
from durable_actors._tracing import sending
from durable_actors._trio_run import at_home
from durable_actors.diagrams import Diagram
from durable_actors.errors import ConfigError, DurableError, NoTarget
from durable_actors.machine import (
    ENDED,
    Defined,
    InsertOptions,
    InsertPlan,
    InsertRows,
    JournalLevel,
    MachineRef,
    OnDuplicate,
    RowOptions,
    current_registry,
    plan_insert,
)
from durable_actors.telemetry import InstancesInserted, SignalsSent, Telemetry

T = TypeVar("T")

current_client: Final[ContextVar[Client | None]] = ContextVar("durable_actors_client", default=None)
"""The client of the engine or call that runs this code."""
REASON_PATIENCE: Final = 1.0
"""Seconds that `result` takes after its timeout to say why the instance has not ended."""
MAX_HINTS: Final = 100
"""The largest number of rows per insert for which the feeder gets a hint for each row."""


class SignalOptions(TypedDict, total=False):
    """One signal of `signal_many`; target and name are required."""

    target: Required[int | str | bytes]
    """The instance's id or unique key."""
    name: Required[str]
    payload: object
    dedup_key: str | None


SignalOutcome = Literal["sent", "duplicate", "no_target"]
"""The result of sending a signal."""


class Client(DecisionCalls):
    """Inserts, signals and reads instances in one schema of one database. See `open_client`; every engine has one.

    A client belongs to the Trio run in which it was opened. Calls from another run or from asyncio raise a
    `DurableError` that says what to use instead. Calls from the thread of a `def` step work.
    """

    def __init__(
        self, name: str, pool: ConnectionPool, lane: str, schema: str, *, journal: JournalLevel = "auto"
    ) -> None:
        super().__init__(pool, lane, schema)
        self.name = name
        """The name for `engine=`."""
        self._level = journal
        self.results: Final = ResultWatch(pool, lane, schema)
        """Waits for results on behalf of all callers."""
        self.schedules: Final = ScheduleCalls(
            self._dialogue,
            schema,
            journal=journal,
            hint=self._hint,
            after_commit=partial(self._after_commit, None),
        )
        """Creates, changes and lists schedules; see `durable_actors.schedules`."""
        self.executor: Executor | None = None
        """Runs steps for `execute_next`."""
        self.telemetry = Telemetry()
        """The events of its inserts, signals and steps; an engine's client has those of its engine."""

    def use(self) -> None:
        """Make this client the default in this task and in the tasks that it starts."""
        current_client.set(self)
        self.home.adopt()

    @overload
    async def insert(
        self,
        machine: MachineRef,
        *,
        conn: TrioConn | None = None,
        on_duplicate: Literal["raise", "return"] = "raise",
        **options: Unpack[RowOptions],
    ) -> int: ...
    @overload
    async def insert(
        self,
        machine: MachineRef,
        *,
        conn: TrioConn | None = None,
        on_duplicate: OnDuplicate = "raise",
        **options: Unpack[RowOptions],
    ) -> int | None: ...
    async def insert(
        self, machine: MachineRef, *, conn: TrioConn | None = None, **options: Unpack[InsertOptions]
    ) -> int | None:
        """Insert one instance; see `durable_actors.insert`."""
        with sending() as span:
            plans = plan_rows(machine, [options], on_duplicate="raise", journal=self._level)
            ids = await self._insert(plans, conn)
            span.sent(ids)
        return ids[0]

    async def insert_many(
        self, machine: MachineRef, rows: InsertRows, *, conn: TrioConn | None = None
    ) -> list[int | None]:
        """Insert many instances in one statement; see `durable_actors.insert_many`."""
        with sending() as span:
            ids = await self._insert(plan_rows(machine, rows, journal=self._level), conn)
            span.sent(ids)
        return ids

    async def _insert(self, plans: list[InsertPlan], conn: TrioConn | None) -> list[int | None]:
        insertion = Insertion(plans)
        began, claimed = perf_counter(), False
        if conn is not None:
            check_trio(conn)
            await insert_on(conn, insertion, schema=self._schema)
        else:
            while insertion.pending:
                # One statement per call: `_run` repeats a statement that could not get a lock.
                call = insert_call(insertion.pending, self._schema)
                if len(plans) == 1 and plans[0].plain and call[0].name == "insert_plain":
                    insert = partial(self.at_once.run, call=call, queues=(plans[0].queue,))
                    answer, claimed = await self._run(insert)
                else:
                    answer = await self._run(partial(_run_call, call))
                insertion.answered(answer.rows)
        made = partial(self._notify_inserted, insertion.new(), perf_counter() - began, claimed=claimed)
        self._after_commit(conn, made)
        return insertion.ids()  # may raise Duplicate: the other rows are inserted

    def _notify_inserted(self, new: list[tuple[InsertPlan, int]], seconds: float, *, claimed: bool) -> None:
        """Notify the feeders, also for rows that are due later: a feeder sleeps until its next row is due.

        Not of a row that the engine of this process has claimed already.
        """
        if self.telemetry.active and new:
            first = new[0][0]
            self.telemetry.emit(
                InstancesInserted(machine=first.machine, queue=first.queue, count=len(new), seconds=seconds)
            )
        if self.wakeups is not None:
            self.wakeups.add(number for _, number in new)
        if claimed:
            return
        if len(new) == 1 and (plan := new[0][0]).plain:
            self.notify(plan.queue, instance_id=new[0][1], priority=plan.priority, new_unkeyed=True)
            return
        for queue, priority in {(plan.queue, plan.priority) for plan, _ in new}:
            self.notify(queue, priority=priority)
        # A row with a date in the past is behind the feeder's cursor: found at once by its id, or later by a full scan.
        for plan, number in [each for each in new if each[0].eligible_at is not None][:MAX_HINTS]:
            self.notify(plan.queue, instance_id=number)

    async def signal(
        self,
        target: int | str | bytes,
        name: str,
        payload: object = None,
        *,
        dedup_key: str | None = None,
        conn: TrioConn | None = None,
    ) -> None:
        """Send a signal; see `durable_actors.signal`."""
        [sent] = await self._deliver([plan_signal(target, name, payload, dedup_key)], conn)
        if sent.outcome == "no_target":
            raise await self.undelivered(name, target, conn)

    async def undelivered(
        self, name: str, target: int | str | bytes, conn: TrioConn | None = None
    ) -> NoTarget:
        """Return the error for a signal that found no live instance."""
        return await self._dialogue(partial(undelivered, self._schema, name, target), conn)

    async def signal_many(
        self, signals: Iterable[SignalOptions], *, conn: TrioConn | None = None
    ) -> list[SignalOutcome]:
        """Send many signals in one statement; see `durable_actors.signal_many`."""
        deliveries = [_delivery_of(options) for options in signals]
        return [sent.outcome for sent in await self._deliver(deliveries, conn)]

    async def signal_with_start(
        self,
        machine: MachineRef,
        *,
        key: str | bytes,
        name: str,
        payload: object = None,
        dedup_key: str | None = None,
        **options: Unpack[RowOptions],
    ) -> int:
        """Signal the live instance of a key, or start one; see `durable_actors.signal_with_start`."""
        spec = current_registry().find(machine)
        for option in ("unique_key", "on_duplicate"):
            if option in options:
                raise ConfigError(
                    f"signal_with_start does not take {option}: its key= is the unique key, and the instance that "
                    "occupies it receives the signal",
                    option=option,
                )
        given = cast("InsertOptions", {**options, "unique_key": key})
        plan = plan_insert(spec, given, journal=self._level)
        traced([plan])
        delivery = plan_signal(key, name, payload, dedup_key)
        sent, new = await self._run(lambda conn: start_with_signal(conn, self._schema, plan, delivery))
        if sent.target is None:
            raise NoTarget(
                f"unique key {key!r} is occupied by an instance that has ended (its unique_scope includes that status)"
            )
        if new or sent.woken:
            queue = plan.queue if new else sent.queue or plan.queue
            self.home.soon(partial(self._hint, queue, sent.target, priority=plan.priority))
        return sent.target

    async def _deliver(self, deliveries: list[Delivery], conn: TrioConn | None) -> list[Sent]:
        size = sum(len(each.payload) for each in deliveries)
        if size > MAX_BYTES:
            raise ConfigError(
                f"signal_many takes payloads of up to {MAX_BYTES} bytes in total, these have {size}: "
                "send fewer signals per call",
                option="signals",
            )
        began, claimed = perf_counter(), False
        if conn is not None:
            check_trio(conn)
            found = await signal_on(conn, deliveries, schema=self._schema)
        elif len(deliveries) == 1 and (target := deliveries[0].target) is not None:
            call = signal_call(self._schema, deliveries)
            answer, claimed = await self._run(
                partial(self.at_once.run, call=call, queues=None, ids=(target,))
            )
            found = read_sent(answer.rows)
        else:
            found = await self._run(lambda own: send_signals(own, self._schema, deliveries))
        self._after_commit(conn, partial(self._notify_woken, found, perf_counter() - began, claimed=claimed))
        return found

    def _notify_woken(self, found: list[Sent], seconds: float, *, claimed: bool) -> None:
        if self.telemetry.active and found:
            self.telemetry.emit(SignalsSent(count=len(found), seconds=seconds))
        for sent in found:
            if sent.woken and sent.queue is not None and sent.target is not None:
                if not claimed:
                    self.notify(sent.queue, instance_id=sent.target, by_signal=True)
                if self.wakeups is not None:
                    self.wakeups.add((sent.target,))

    @at_home
    async def result(
        self, target: int | str | bytes, *, timeout: Duration | None = None, type: Any = Any
    ) -> Any:
        """Wait until an instance has ended; see `durable_actors.result`."""
        patience = math.inf if timeout is None else duration("timeout", timeout, positive=False)
        try:
            with trio.fail_after(patience):
                number = await self._resolve(target)
                final = await self.results.wait(number)
        except trio.TooSlowError:
            raise trio.TooSlowError(await self._not_ended(target, patience)) from None
        return value_of(final, type)

    async def _not_ended(self, target: int | str | bytes, patience: float) -> str:
        """Why `result` has waited in vain, if the database tells it at once."""
        text = f"{_described(target)} has not ended within {patience:g} s"
        with trio.move_on_after(REASON_PATIENCE):
            try:
                return f"{text}: {(await self.explain(target)).summary}"
            except (DurableError, psycopg.Error):
                pass
        return text

    @at_home
    async def inspect(self, target: int | str | bytes) -> Instance:
        """Read an instance; see `durable_actors.inspect`."""
        return await self._run(lambda conn: run_dialogue(conn, inspecting(self._schema, target)))

    @at_home
    async def explain(self, target: int | str | bytes) -> Explanation:
        """Explain why an instance waits, runs or has ended; see `durable_actors.explain`."""
        return await self._run(lambda conn: run_dialogue(conn, explaining(self._schema, target)))

    @at_home
    async def tree(
        self, target: int | str | bytes, *, depth: int = 10, children: int = 100, limit: int = 1000
    ) -> Tree:
        """Read the family of an instance; see `durable_actors.tree`."""
        climb = partial(climbing, self._schema, target, depth=depth, children=children, limit=limit)
        return await self._run(lambda conn: run_dialogue(conn, climb()))

    @at_home
    async def graph(
        self,
        target: int | str | bytes | Defined,
        *,
        barrier: int | None = None,
        steps: bool = False,
        limit: int = MOST_NODES,
    ) -> Diagram:
        """Read the diagram of an instance or a machine; see `durable_actors.graph`."""
        async with self._pool.acquire(self._lane) as conn:
            reading = drawing(self._schema, target, barrier=barrier, steps=steps, limit=limit)
            return await run_dialogue(conn, reading)

    @at_home
    async def execute_next(
        self, queue: str = "default", *, lease_ttl: Duration | None = None, node: str | None = None
    ) -> Instance | None:
        """Execute the step of one due instance; see `durable_actors.execute_next`."""
        if self.executor is None:
            raise ConfigError("this client cannot execute steps: open one with open_client or open_engine")
        queue_name("queue", queue)
        lease = None if lease_ttl is None else duration("lease_ttl", lease_ttl)
        return await self.executor.execute_next(queue, self.step_context(), lease_ttl=lease, name=node)

    def _ended(self, instance_id: int) -> None:
        self.results.hint(instance_id)

    def _after_end(self, instance: Instance) -> None:
        if instance.status == "runnable":
            self._after_commit(None, partial(self._hint, instance.queue, instance.id))
        elif instance.status in ENDED:
            self._after_commit(None, partial(self._ended, instance.id))

    def step_context(self) -> Context:
        """The context variables of a step that this client executes: the caller's, and the helpers use this client."""
        context = copy_context()
        context.run(self.use)
        context.run(current_step.set, None)
        return context

    @at_home
    async def list_instances(
        self, where: Filter | None = None, *, limit: int = 100, after: int | None = None, full: bool = False
    ) -> list[Instance]:
        """List instances, newest first; see `durable_actors.list_instances`."""
        count("limit", limit, least=1, most=10_000)
        flag("full", full)
        before = NEWEST if after is None else count("after", after, least=1, most=NEWEST)
        if where is not None and not isinstance(where, Filter):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(f"where={shown(where)} must be a Filter", option="where", value=where)
        options: dict[str, Any] = {"limit": limit, "before": before, "depth": None, "full": full}
        found = await self._run(lambda conn: list_instances(conn, self._schema, where or Filter(), **options))
        return list(found.instances)


async def _run_call(call: tuple[Statement, Params], conn: PgConn) -> Result:
    return await conn.run(*call)


async def insert_on(conn: TrioConn, insertion: Insertion, *, schema: str) -> None:
    """Insert on the caller's connection, in the caller's transaction."""
    while insertion.pending:
        insertion.answered(await execute_async(conn, *insert_call(insertion.pending, schema), schema=schema))


async def signal_on(conn: TrioConn, deliveries: list[Delivery], *, schema: str) -> list[Sent]:
    """Send signals in the caller's transaction; the instances wake when it commits."""
    if not deliveries:
        return []
    call = statement("send_signals", schema)
    return read_sent(await execute_async(conn, call, signal_params(deliveries), schema=schema))


def _delivery_of(options: SignalOptions) -> Delivery:
    given: object = options
    names = set(options) if isinstance(given, Mapping) else set[str]()
    if not {"target", "name"} <= names <= {"target", "name", "payload", "dedup_key"}:
        raise ConfigError(
            "a signal must be a dict with target and name, and optionally payload and dedup_key; "
            f"it is {shown(given)}",
            option="signals",
            value=given,
        )
    return plan_signal(options["target"], options["name"], options.get("payload"), options.get("dedup_key"))


def _described(target: int | str | bytes) -> str:
    return f"instance {target}" if isinstance(target, int) else f"the instance with unique key {target!r}"
