"""Running: `serve`, `start_engine`, `open_engine`. Wires config, connections and the tree together."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any, Final, cast

import psycopg
import trio

from durable_actors import client as clients
from durable_actors._client import Client
from durable_actors._engine.lanes import lanes
from durable_actors._engine.limits import QueueLimits
from durable_actors._engine.maintenance.loop_watch import watch_loop
from durable_actors._engine.node import Node, logger
from durable_actors._engine.running.context_port import EnginePort
from durable_actors._engine.setup import load_machines, make_node, plan_queues
from durable_actors._engine.tree import Parts, build_tree
from durable_actors._postgres.embedded.server import keep_up
from durable_actors._postgres.pool.pool import ConnectionPool, ConnectionStatistics, open_pool
from durable_actors._postgres.starting import when_ready
from durable_actors._postgres.target import Target, open_target
from durable_actors._store.migrate import migrate, require_schema, schema_version
from durable_actors._store.node import register_node, stop_node
from durable_actors._trio_run import require_trio
from durable_actors._version import __version__
from durable_actors.config import Config
from durable_actors.errors import ConfigError, StoreUnavailable
from durable_actors.otp import ChildSpec, Node as TreeNode, StartFailed, TaskChild, Tree, run_tree
from durable_actors.telemetry import NodeStarted, NodeStopped

FAREWELL: Final = 1.0
"""Seconds to note the stop in the database."""


class Engine:
    """A running engine."""

    def __init__(self, config: Config, node: Node, client: Client, *, dsn: str, ended: trio.Event) -> None:
        self.config: Final = config
        """Its settings."""
        self.dsn: Final = dsn
        """Its database, for connections of your own; `config.dsn` may be the word "embedded"."""
        self.client: Final = client
        """Inserts, signals and waits through this engine."""
        self.telemetry: Final = node.telemetry
        """Its events."""
        self._node = node
        self._ended = ended
        self._tree: Tree | None = None
        self._parts: Parts | None = None
        self._fatal: BaseException | None = None

    @property
    def name(self) -> str:
        """What `engine=` calls it."""
        return self.config.name

    @property
    def incarnation(self) -> str:
        """`locked_by` of its claims: the node's name and what this start added to it."""
        return self._node.owner.name

    def request_stop(self) -> None:
        """Begin to drain; `stop` does so and waits. While it still starts: as soon as it has. From any thread."""
        self.client.home.soon(self._request_stop)

    def _request_stop(self) -> None:
        self._node.draining.value = True
        if self._tree is not None:
            self._tree.request_stop("asked to stop")

    async def stop(self) -> None:
        """Drain and stop: nothing new is claimed, buffered rows go back, running steps have `drain_timeout` seconds.

        Returns when all is done. Cancelled: the stop goes on. A thread of a `def` step that runs longer is left behind:
        it goes on in this process, without its partition key, and its row comes back when other nodes have seen this
        engine gone for `dead_after`.
        """
        self.client.home.check()
        self.request_stop()
        await self.wait_stopped()

    def hurry(self) -> None:
        """While it drains: cancel what still runs now. Threads of `def` steps are left behind."""
        for active in self._node.claims.all():
            if active.task is not None:
                active.task.cancel("told to stop at once")
        if self._node.draining.value:
            self._node.threads.leave()

    async def wait_stopped(self) -> None:
        """Wait until the engine has stopped, for whatever reason: its connections are closed, its name is free."""
        self.client.home.check()
        await self._ended.wait()

    def snapshot(self, *, tasks: int = 0) -> TreeNode:
        """Its live tree; `.render()` gives a text. Of the step tasks at most `tasks` are listed."""
        if self._tree is None:
            raise ConfigError("the engine has not started")
        return self._tree.snapshot(tasks=tasks)

    def connections(self) -> ConnectionStatistics:
        """Its connections, per lane."""
        return self._node.pool.statistics()

    def _attach(self, tree: Tree) -> None:
        self._tree = tree
        if self._node.draining.value:  # a signal came meanwhile, and will not come again
            self.request_stop()

    def _fail(self, error: BaseException) -> None:
        """A step raised KeyboardInterrupt: stop, then raise it where the engine was started."""
        self._fatal = self._fatal or error
        self.request_stop()
        self.hurry()


def _make_config(config: Config | None, options: Mapping[str, Any]) -> Config:
    if config is None:
        try:
            return Config(**options)
        except TypeError as exc:  # an unknown option: say so in our words
            raise ConfigError(f"{exc}; see durable_actors.Config for the options") from None
    if options:
        raise ConfigError(
            f"give a config or options, not both: {', '.join(options)}", option=next(iter(options))
        )
    if not isinstance(config, Config):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(
            f"config must be a durable_actors.Config, not {config!r}", option="config", value=config
        )
    return config


async def _prepare_schema(config: Config, target: Target, pool: ConnectionPool, lane: str) -> None:
    if config.migrate:
        # On this lane a table that somebody has locked is refused after a moment; a migrator would wait for it.
        async with pool.acquire(lane) as conn:
            await schema_version(conn, schema=config.schema)
        # Past a pooler where there is one: the migrators' lock belongs to a session.
        await migrate(config.session_dsn or target.dsn, schema=config.schema)
    async with pool.acquire(lane) as conn:
        await require_schema(conn, schema=config.schema)


async def run_engine(
    config: Config, *, signals: bool = False, task_status: trio.TaskStatus[Engine] = trio.TASK_STATUS_IGNORED
) -> None:
    """Run an engine until it is asked to stop. `task_status` gets it when it is ready.

    The body of `serve` and of the other ways to start one.
    """
    require_trio("an engine")
    specs = load_machines(config)
    queues = plan_queues(config, specs)
    roles = lanes(config.pool_size, session_dsn=config.session_dsn, keepalive=config.lease_ttl)
    ended = trio.Event()
    async with AsyncExitStack() as stack:
        stack.callback(ended.set)  # the last of all
        target = await stack.enter_async_context(open_target(config.dsn))
        distinct = {lane.name: lane for lane in roles.values()}
        pool = await stack.enter_async_context(open_pool(target.dsn, lanes=distinct.values()))
        node = make_node(config, pool, roles, specs)
        client = Client(config.name, pool, node.lane("client"), config.schema)
        stack.enter_context(clients.opened(client))
        dsns = {target.dsn, config.session_dsn or target.dsn}
        ready = partial(when_ready, dsns=dsns, start_timeout=config.start_timeout)
        await ready(partial(_prepare_schema, config, target, pool, node.lane("client")))
        engine = Engine(config, node, client, dsn=target.dsn, ended=ended)
        _connect(engine, node, client)
        await ready(partial(_register, node, queues))
        await _run_tree(engine, node, queues, target, signals=signals, task_status=task_status)
        if engine._fatal is not None:  # noqa: SLF001 - same module
            raise engine._fatal  # noqa: SLF001


def _connect(engine: Engine, node: Node, client: Client) -> None:
    """Let the parts find each other."""
    client.notify = node.notify
    if isinstance(node.port, EnginePort):
        node.port.notify = node.notify
    node.on_final = client.results.hint
    node.on_fatal = engine._fail  # noqa: SLF001 - same module
    clients.use(client)


async def _run_tree(
    engine: Engine,
    node: Node,
    queues: dict[str, QueueLimits],
    target: Target,
    *,
    signals: bool,
    task_status: trio.TaskStatus[Engine],
) -> None:
    extra: list[ChildSpec] = []
    if target.server is not None:
        extra.append(TaskChild("embedded Postgres", partial(keep_up, target.server)))
    if signals:
        extra.append(TaskChild("signals", partial(_obey_signals, engine), handshake=True))
    parts = engine._parts = build_tree(node, queues, *extra)  # noqa: SLF001 - same module

    class Started:
        def started(self, value: Tree | None = None) -> None:
            assert value is not None
            engine._attach(value)  # noqa: SLF001 - same module
            logger.info(
                "engine %s: %s serves %s", engine.name, node.owner.name, ", ".join(queues) or "no queue"
            )
            if node.telemetry.active:
                node.telemetry.emit(NodeStarted(node=node.owner.name, queues=tuple(queues)))
            task_status.started(engine)

    failed = False
    try:
        with watch_loop(node):
            await run_tree(parts.root, drain_on_cancel=node.config.drain_on_cancel, task_status=Started())
    except BaseException as exc:
        failed = not _is_cancelled(exc)
        if not isinstance(exc, StartFailed):
            raise
        # A mistake in the options that shows in use only, e.g. a pooler: told as it is, not as a failed tree.
        cause: BaseException | None = exc
        while cause is not None and not isinstance(cause, ConfigError):
            cause = cause.__cause__
        if cause is None:
            raise
        raise cause from cause.__cause__
    finally:
        await _farewell(node, failed=failed)
        if not failed:
            logger.info("engine %s: %s stopped", engine.name, node.owner.name)


async def _register(node: Node, queues: Mapping[str, QueueLimits]) -> None:
    """Tell people that this node is there. Somebody's lock must not keep it from working."""
    steps = node.catalog.steps
    node.about = {
        "queues": {name: limits.concurrency for name, limits in queues.items()},
        "machines": sorted(steps),
        "steps": steps,
        "pid": os.getpid(),
        "version": __version__,
    }
    owner = node.owner
    try:
        async with node.pool.acquire(node.lane("client")) as conn:
            await register_node(
                conn, owner.schema, incarnation=owner.name, node=node.config.node, about=node.about
            )
    except psycopg.errors.LockNotAvailable as exc:
        node.registered = False
        logger.info("%s will be listed among the nodes later: %s", owner.name, exc)


async def _farewell(node: Node, *, failed: bool) -> None:
    """Note a stop in good order: claims that are not back (threads, locked rows) were interrupted, not crashed."""
    with trio.move_on_after(0 if failed else FAREWELL, shield=True):
        try:
            async with node.pool.acquire(node.lane("client")) as conn:
                await stop_node(conn, node.owner.schema, node.owner.name)
        except (StoreUnavailable, psycopg.Error) as exc:
            logger.debug("the stop of %s could not be noted: %s", node.owner.name, exc)
    if node.telemetry.active:
        node.telemetry.emit(NodeStopped(node=node.owner.name))


async def _obey_signals(engine: Engine, *, task_status: trio.TaskStatus[None]) -> None:
    """First SIGINT or SIGTERM: drain. Second: cancel what runs. Third: as if nobody caught it."""
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as received:
        task_status.started()
        count = 0
        async for number in received:
            count += 1
            name = signal.Signals(number).name
            if count == 1:
                logger.info("%s: draining, for at most %g s", name, engine.config.drain_timeout)
                engine.request_stop()
            elif count == 2:
                logger.warning("%s again: cancelling the steps that still run", name)
                engine.hurry()
            else:
                signal.signal(number, signal.SIG_DFL)
                signal.raise_signal(number)


async def serve(
    config: Config | None = None,
    *,
    task_status: trio.TaskStatus[Engine] = trio.TASK_STATUS_IGNORED,
    **options: Any,
) -> None:
    """Run an engine until SIGINT or SIGTERM, then drain: `trio.run(da.serve, da.Config(...))`.

    Inside a Trio program: `engine = await nursery.start(da.serve, config)`. A second signal cancels what still runs.
    """
    main = threading.current_thread() is threading.main_thread()
    await run_engine(_make_config(config, options), signals=main, task_status=task_status)


async def start_engine(nursery: trio.Nursery, config: Config | None = None, **options: Any) -> Engine:
    """Start an engine in a nursery of yours: `engine = await da.start_engine(nursery, queues={"mail": 5})`.

    Stop it with `await engine.stop()`; cancelling the nursery drains it, too.
    """
    checked = _make_config(config, options)
    engine: Engine = await nursery.start(partial(run_engine, checked))
    return engine


@asynccontextmanager
async def open_engine(config: Config | None = None, **options: Any) -> AsyncGenerator[Engine, None]:
    """Run an engine around a block; it drains when the block ends.

    An error raised in the block leaves it as it is. If the engine fails, the block is cancelled and the engine's error
    raised; if both fail, an ExceptionGroup of both.
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
        raise failure  # with Cancelled in it: on its way to its scope, the block's error with it
    if body is not None and failure is not None:
        raise BaseExceptionGroup("the block failed, and so did the engine", [body, failure])
    if body is not None:
        raise body


async def _stop_after(engine: Engine, body: BaseException | None) -> None:
    """Stop the engine; if cancelled meanwhile, raise the block's error, or it would be lost."""
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
