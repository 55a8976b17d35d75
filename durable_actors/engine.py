"""Run an engine: `serve`, `start_engine` and `open_engine`, and the start-up and shutdown behind them."""

from __future__ import annotations

import importlib
import os
import signal
import threading
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any, Final, cast

import psycopg
import trio

from durable_actors import client as clients
from durable_actors._client import Client
from durable_actors._engine.executor import Executor
from durable_actors._engine.lanes import call_sessions, lanes
from durable_actors._engine.limits import QueueLimits
from durable_actors._engine.maintenance.gauges import Gauges, tree_observer
from durable_actors._engine.maintenance.loop_watch import watch_loop
from durable_actors._engine.node import Node, engine_state, logger
from durable_actors._engine.running.context_port import EnginePort
from durable_actors._engine.setup import (
    config_error_in,
    load_machines,
    make_node,
    plan_queues,
    plan_schedules,
)
from durable_actors._engine.tree import Parts, build_tree
from durable_actors._engine.wakeups import Wakeups
from durable_actors._postgres.embedded.server import keep_up
from durable_actors._postgres.pool.pool import ConnectionPool, ConnectionStatistics, open_pool
from durable_actors._postgres.starting import when_ready
from durable_actors._postgres.target import Target, open_target
from durable_actors._store.cascade import write_compensations
from durable_actors._store.limits import declare_limits
from durable_actors._store.migrate import migrate, require_schema, schema_version
from durable_actors._store.node import read_live_nodes, register_node, stop_node
from durable_actors._store.releases import older_nodes
from durable_actors._trio_run import require_trio
from durable_actors._version import __version__
from durable_actors.config import Config
from durable_actors.dashboard_options import Dashboard
from durable_actors.errors import ConfigError, StoreUnavailable
from durable_actors.machine import builtin_queues
from durable_actors.otp import ChildSpec, Node as TreeNode, StartFailed, TaskChild, Tree, run_tree
from durable_actors.telemetry import NodeStarted, NodeStopped

STOP_RECORD_TIMEOUT: Final = 1.0
"""Seconds for recording the stop of the node in the database."""


class Engine:
    """A running engine. `start_engine`, `open_engine` and `serve` (through `nursery.start`) return one."""

    def __init__(self, config: Config, node: Node, client: Client, *, dsn: str) -> None:
        self.config: Final = config
        """The settings of the engine."""
        self.dsn: Final = dsn
        """The DSN of its database, for your own connections; `config.dsn` may be "embedded"."""
        self.client: Final = client
        """The client of this engine: inserts instances, sends signals and waits for results."""
        self.telemetry: Final = node.telemetry
        """The events of this engine; see `durable_actors.telemetry`."""
        self.state: Final = node.state
        """"starting", "running", "draining" or "stopped"; `await engine.state.wait_value("draining")` waits for it."""
        self._node = node
        self._tree: Tree | None = None
        self._parts: Parts | None = None
        self._fatal: BaseException | None = None

    @property
    def name(self) -> str:
        """The name for `engine=`."""
        return self.config.name

    @property
    def incarnation(self) -> str:
        """The name of the node with the suffix of this start, as in the column `locked_by` of its claims."""
        return self._node.owner.name

    def request_stop(self) -> None:
        """Begin to drain without waiting. Can be called from any thread; during start-up it takes effect after it."""
        self.client.home.soon(self._request_stop)

    def _request_stop(self) -> None:
        self._node.drain()
        if self._tree is not None:
            self._tree.request_stop("asked to stop")

    async def stop(self) -> None:
        """Drain and stop the engine; return when it has stopped.

        It claims no more rows, releases claimed rows that have not started, and lets running steps continue for up to
        `drain_timeout` seconds. If this raises Cancelled, the stop continues. The thread of a `def` step that runs
        longer is abandoned: it continues in this process without its partition key, and its row is released when other
        nodes have seen this engine dead for `dead_after`.
        """
        self.client.home.check()
        self.request_stop()
        await self.wait_stopped()

    def cancel_steps(self) -> None:
        """Cancel all running steps now. While the engine drains, threads of `def` steps are abandoned."""
        for active in self._node.claims.all():
            if active.task is not None:
                active.task.cancel("the engine cancels its steps")
        if self._node.draining.value:
            self._node.threads.leave()

    async def wait_stopped(self) -> None:
        """Wait until the engine has stopped for any reason: its connections are closed and its name is free."""
        self.client.home.check()
        await self.state.wait_value("stopped")

    def snapshot(self, *, tasks: int = 0) -> TreeNode:
        """Return its supervision tree; `.render()` formats it as text. At most `tasks` step tasks are listed."""
        if self._tree is None:
            raise ConfigError("the engine has not started yet")
        return self._tree.snapshot(tasks=tasks)

    def connections(self) -> ConnectionStatistics:
        """Return statistics of its connections, per lane."""
        return self._node.pool.statistics()

    def _attach(self, tree: Tree) -> None:
        self._tree = tree
        if self._node.draining.value:  # a stop was requested during start-up
            self.request_stop()
        else:
            self.state.value = "running"

    def _fail(self, error: BaseException) -> None:
        """Stop because a step raised KeyboardInterrupt; `run_engine` raises it at the end."""
        self._fatal = self._fatal or error
        self.request_stop()
        self.cancel_steps()


# -- how an engine is started


async def serve(
    config: Config | None = None,
    *,
    task_status: trio.TaskStatus[Engine] = trio.TASK_STATUS_IGNORED,
    **options: Any,
) -> None:
    """Run an engine until SIGINT or SIGTERM, then drain: `trio.run(da.serve, da.Config(...))`.

    A second signal cancels running steps. Inside a Trio program, use `engine = await nursery.start(da.serve, config)`.
    Raises `ConfigError` for an invalid option, `SchemaError` if the schema does not match, and `StoreUnavailable` if
    Postgres is not ready within `start_timeout`. Cancelling it drains the engine, unless `drain_on_cancel=False`.
    """
    main = threading.current_thread() is threading.main_thread()
    await run_engine(_make_config(config, options), signals=main, task_status=task_status)


async def start_engine(nursery: trio.Nursery, config: Config | None = None, **options: Any) -> Engine:
    """Start an engine in your nursery: `engine = await da.start_engine(nursery, queues={"mail": 5})`.

    Returns when the engine is ready. Stop it with `await engine.stop()`; cancelling the nursery drains it, too. Raises
    the same errors as `serve`.
    """
    checked = _make_config(config, options)
    engine: Engine = await nursery.start(partial(run_engine, checked))
    return engine


@asynccontextmanager
async def open_engine(config: Config | None = None, **options: Any) -> AsyncGenerator[Engine, None]:
    """Run an engine while a block runs: `async with da.open_engine(config) as engine`. It drains when the block ends.

    An exception of the block is raised unchanged, after the drain. If the engine fails, the block is cancelled and the
    engine's error is raised; if both fail, an ExceptionGroup of both is raised.
    """
    require_trio("open_engine")
    checked = _make_config(config, options)
    body: BaseException | None = None
    failure: BaseException | None = None
    try:
        async with trio.open_nursery() as nursery:
            engine: Engine = await nursery.start(partial(run_engine, checked))
            try:
                yield engine
            except BaseException as exc:
                if _is_cancelled(exc):
                    raise
                body = exc
            await _stop_after(engine, body)
    except BaseExceptionGroup as group:
        failure = group.exceptions[0] if len(group.exceptions) == 1 else group
    if failure is not None and (body is None or failure is body or _is_cancelled(failure)):
        raise failure  # Cancelled propagates to its scope, together with the block's error
    if body is not None and failure is not None:
        raise BaseExceptionGroup("both the block and the engine failed", [body, failure])
    if body is not None:
        raise body


async def _stop_after(engine: Engine, body: BaseException | None) -> None:
    """Stop the engine. If this is cancelled, raise the block's error, which would be lost otherwise."""
    stopped = False
    try:
        await engine.stop()
        stopped = True
    finally:
        if not stopped and body is not None:
            raise body


def _is_cancelled(error: BaseException) -> bool:
    if isinstance(error, BaseExceptionGroup):
        return any(map(_is_cancelled, cast("BaseExceptionGroup[BaseException]", error).exceptions))
    return isinstance(error, trio.Cancelled)


def _make_config(config: Config | None, options: Mapping[str, Any]) -> Config:
    if config is None:
        return Config(**options)
    if options:
        raise ConfigError(
            f"give either a config or options, not both: {', '.join(options)}", option=next(iter(options))
        )
    if not isinstance(config, Config):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(
            f"config must be a durable_actors.Config, not {config!r}", option="config", value=config
        )
    return config


# -- start-up, run and shutdown


async def run_engine(
    config: Config, *, signals: bool = False, task_status: trio.TaskStatus[Engine] = trio.TASK_STATUS_IGNORED
) -> None:
    """Run an engine until it is asked to stop. `task_status` receives it when it is ready.

    All public ways to start an engine call this function.
    """
    require_trio("an engine")
    specs = load_machines(config)
    queues = plan_queues(config, specs)
    schedules = plan_schedules(config, specs)
    roles = lanes(config.pool_size, session_dsn=config.session_dsn, keepalive=config.lease_ttl)
    state = engine_state()
    async with AsyncExitStack() as stack:
        stack.callback(setattr, state, "value", "stopped")  # after everything else is closed
        target = await stack.enter_async_context(open_target(config.dsn))
        sessions = call_sessions(session_dsn=config.session_dsn, keepalive=config.lease_ttl)
        distinct = {lane.name: lane for lane in (*roles.values(), sessions)}
        pool = await stack.enter_async_context(open_pool(target.dsn, lanes=distinct.values()))
        node = make_node(config, pool, roles, specs)
        node.state = state
        node.schedules = schedules if queues else {}  # a client-only node fires none
        node.wakeups = None if config.notifier is None else Wakeups(config.notifier, node.telemetry)
        client = Client(config.name, pool, node.lane("client"), config.schema, journal=config.journal)
        client.late_commit, client.telemetry = config.late_commit, node.telemetry
        client.executor = Executor(
            config,
            pool,
            {**roles, "session": sessions},
            telemetry=node.telemetry,
            queues=lambda: node.queues,
            on_final=client.results.hint,
            wakeups=node.wakeups,
        )
        stack.enter_context(clients.opened(client))
        dsns = {target.dsn, config.session_dsn or target.dsn}
        ready = partial(when_ready, dsns=dsns, start_timeout=config.start_timeout)
        await ready(partial(_prepare_schema, config, target, pool, node.lane("client")))
        engine = Engine(config, node, client, dsn=target.dsn)
        _connect(engine, node, client)
        await ready(partial(_register, node, queues))
        await _run_tree(engine, node, queues, target, signals=signals, task_status=task_status)
        if engine._fatal is not None:  # noqa: SLF001 - same module
            raise engine._fatal  # noqa: SLF001


async def _prepare_schema(config: Config, target: Target, pool: ConnectionPool, lane: str) -> None:
    if config.migrate:
        # This lane has a lock timeout, so a locked table raises an error soon; the migration would wait for it.
        async with pool.acquire(lane) as conn:
            await schema_version(conn, schema=config.schema)
        # Not through a pooler: the lock of the migration belongs to a session.
        await migrate(config.session_dsn or target.dsn, schema=config.schema)
    async with pool.acquire(lane) as conn:
        await require_schema(conn, schema=config.schema)


def _connect(engine: Engine, node: Node, client: Client) -> None:
    """Connect the callbacks of engine, node and client."""
    client.notify, client.wakeups = node.notify, node.wakeups
    client.pauses_changed = node.pauses_changed
    if isinstance(node.port, EnginePort):
        node.port.notify, node.port.wakeups = node.notify, node.wakeups
        node.port.telemetry = node.telemetry
    node.on_final = client.results.hint
    client.results.runs_here = node.claims.has_instance
    node.on_fatal = engine._fail  # noqa: SLF001 - same module
    client.use()


def _cascade_of(node: Node, parts: Parts) -> Callable[[], object] | None:
    """Who is told that children are to be cancelled; None on a client-only node, whose calls do it themselves."""
    return None if parts.pool is None else node.cascade


async def _run_tree(
    engine: Engine,
    node: Node,
    queues: dict[str, QueueLimits],
    target: Target,
    *,
    signals: bool,
    task_status: trio.TaskStatus[Engine],
) -> None:
    extra = _children_beside(engine, target, signals=signals)
    parts = engine._parts = build_tree(node, queues, *extra)  # noqa: SLF001 - same module
    engine.client.cascade, engine.client.at_once = _cascade_of(node, parts), node.at_once
    engine.client.schedules.changed = node.schedules_changed
    hidden = builtin_queues() - (node.config.queues or {}).keys()  # they are served anyway
    served = tuple(name for name in queues if name not in hidden)

    class Started:
        def started(self, value: Tree | None = None) -> None:
            assert value is not None
            engine._attach(value)  # noqa: SLF001 - same module
            logger.info(
                "engine %s: %s serves %s", engine.name, node.owner.name, ", ".join(served) or "no queue"
            )
            if queues:
                logger.info("retention: %s", node.config.retention or "this node deletes no ended instance")
            if node.telemetry.active:
                node.telemetry.emit(NodeStarted(node=node.owner.name, queues=served))
            task_status.started(engine)

    failed = False
    try:
        with watch_loop(node, Gauges(node, engine.snapshot).emit):
            await run_tree(
                parts.root,
                drain_on_cancel=node.config.drain_on_cancel,
                observe=tree_observer(node),
                task_status=Started(),
            )
    except BaseException as exc:
        failed = not _is_cancelled(exc)
        if not isinstance(exc, StartFailed):
            raise
        cause = config_error_in(exc)
        if cause is None:
            raise
        raise cause from cause.__cause__
    finally:
        await _record_stop(node, failed=failed)
        if not failed:
            logger.info("engine %s: %s stopped", engine.name, node.owner.name)


def _children_beside(engine: Engine, target: Target, *, signals: bool) -> list[ChildSpec]:
    """What starts before the work and stops after it."""
    found: list[ChildSpec] = []
    if target.server is not None:
        found.append(TaskChild("embedded Postgres", partial(keep_up, target.server)))
    if signals:
        found.append(TaskChild("signals", partial(_handle_signals, engine), handshake=True))
    if engine.config.dashboard is not None:
        found.append(_dashboard_child(engine, engine.config.dashboard))
    return found


def _dashboard_child(engine: Engine, settings: Dashboard) -> ChildSpec:
    """The dashboard: with connections of its own, and cancelled at once at a stop. Raises `ConfigError`."""
    try:
        child = importlib.import_module("durable_actors.dashboard.child")
    except ImportError as exc:
        raise ConfigError(
            f"dashboard= needs packages that are not installed ({exc.name}): pip install 'durable-actors[dashboard]'",
            option="dashboard",
        ) from exc
    run = partial(
        child.keep_serving,
        engine.dsn,
        settings,
        schema=engine.config.schema,
        engine=engine,
        client=engine.client,
    )
    return TaskChild("dashboard", run, shutdown="brutal")


async def _register(node: Node, queues: Mapping[str, QueueLimits]) -> None:
    """Insert the row of this node, for tools, and warn of older nodes. A locked table must not prevent the start."""
    steps = node.catalog.steps
    about: dict[str, object] = {
        "queues": {name: limits.concurrency for name, limits in queues.items()},
        "machines": sorted(steps),
        "steps": steps,
        "attempts": node.catalog.attempts,
        "pid": os.getpid(),
        "version": __version__,
    }
    if fair := [name for name, limits in queues.items() if limits.weights is not None]:
        about["fair"] = fair
    if node.schedules:
        about["schedules"] = {name: plan.revision for name, plan in node.schedules.items()}
    node.about, owner = about, node.owner
    try:
        async with node.pool.acquire(node.lane("client")) as conn:
            await register_node(
                conn, owner.schema, incarnation=owner.name, node=node.config.node, about=node.about
            )
            # Before it runs a step: whoever cancels an instance from then on must know.
            told = node.catalog.generation
            await write_compensations(conn, owner.schema, node.catalog.specs)
            node.told = told
            await declare_limits(conn, owner.schema, node.config.limits, node=owner.name)
            for line in older_nodes(await read_live_nodes(conn, owner.schema)):
                logger.warning("%s", line)
    except psycopg.errors.LockNotAvailable as exc:
        node.registered = False
        logger.info(
            "node %s is not listed yet, because the table is locked; it tries again later: %s",
            owner.name,
            exc,
        )


async def _record_stop(node: Node, *, failed: bool) -> None:
    """Record an orderly stop: claims not yet released (threads, locked rows) then count as interrupted, not crashed."""
    with trio.move_on_after(0 if failed else STOP_RECORD_TIMEOUT, shield=True):
        try:
            async with node.pool.acquire(node.lane("client")) as conn:
                await stop_node(conn, node.owner.schema, node.owner.name)
        except (StoreUnavailable, psycopg.Error) as exc:
            logger.debug("node %s: could not record its stop: %s", node.owner.name, exc)
    if node.telemetry.active:
        node.telemetry.emit(NodeStopped(node=node.owner.name))


async def _handle_signals(engine: Engine, *, task_status: trio.TaskStatus[None]) -> None:
    """Drain on the first SIGINT or SIGTERM, cancel running steps on the second, restore the default on the third."""
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as received:
        task_status.started()
        count = 0
        async for number in received:
            count += 1
            name = signal.Signals(number).name
            if count == 1:
                logger.info(
                    "engine %s: received %s, draining for up to %g s",
                    engine.name,
                    name,
                    engine.config.drain_timeout,
                )
                engine.request_stop()
            elif count == 2:
                logger.warning("engine %s: received %s again, cancelling running steps", engine.name, name)
                engine.cancel_steps()
            else:
                signal.signal(number, signal.SIG_DFL)
                signal.raise_signal(number)
