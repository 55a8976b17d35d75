"""Before an engine runs: which machines it knows, which queues it serves, and its identity."""

from __future__ import annotations

import hashlib
import importlib
import os
import secrets
import sys
from collections.abc import Mapping
from typing import Final

from durable_actors._engine.catalog import MachineCatalog
from durable_actors._engine.claims import ActiveClaims
from durable_actors._engine.lanes import answer_patience
from durable_actors._engine.limits import QueueLimits
from durable_actors._engine.node import Node, logger
from durable_actors._engine.running.context_port import EnginePort
from durable_actors._postgres.pool.lane import Lane
from durable_actors._postgres.pool.pool import ConnectionPool
from durable_actors._store.claim import Owner
from durable_actors._store.schedules import ScheduledPlan, plan_schedule
from durable_actors._wording import counted
from durable_actors.config import Config, Queue
from durable_actors.errors import ConfigError, StateError, UnknownMachine
from durable_actors.machine import MachineSpec, builtin_queues, current_registry
from durable_actors.telemetry import Telemetry

LONG_POLL_SHARE: Final = 0.7
"""Where `max_poll_interval` is shorter than `long_poll`, the server looks after this share of it: picking and starting
what it finds takes time, too."""


BUILTIN_POLL: Final = 10.0
"""Seconds between two looks at the queues of our own machines. A hint, or the long poll, is faster."""

MAX_NAMED_MACHINES: Final = 5
"""Machines that one log line names."""


def load_machines(config: Config) -> dict[tuple[str, int], MachineSpec]:
    """Import the configured modules; return every machine that this node knows."""
    if os.getcwd() not in sys.path and config.modules:  # noqa: PTH109 - as `python -m` does
        sys.path.insert(0, os.getcwd())  # noqa: PTH109
    for name in config.modules:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as exc:
            raise ConfigError(
                f"modules: cannot import {name!r}: {exc}", option="modules", value=name
            ) from exc
    registry = current_registry()
    specs = dict(registry.specs)
    for machine in config.machines:
        try:
            spec = registry.find(machine)
        except UnknownMachine as exc:
            raise ConfigError(f"machines: {exc}", option="machines", value=machine) from exc
        specs[spec.key] = spec
    for spec in specs.values():
        spec.codec.prepare()
    return specs


def plan_queues(config: Config, specs: Mapping[tuple[str, int], MachineSpec]) -> dict[str, QueueLimits]:
    """Which queues to serve, with all their settings. Logs a warning about machines whose queue is not served here."""
    wanted = config.queues
    if wanted is None:
        wanted = {name: Queue() for name in sorted({"default", *(spec.queue for spec in specs.values())})}
    elsewhere = [spec for spec in specs.values() if wanted and spec.queue not in wanted]
    if elsewhere:
        queues = ", ".join(sorted({repr(spec.queue) for spec in elsewhere}))
        named = ", ".join(
            [str(spec) for spec in elsewhere[:MAX_NAMED_MACHINES]]
            + ["…"] * (len(elsewhere) > MAX_NAMED_MACHINES)
        )
        logger.warning(
            "%s to queues that this node does not serve: %s (%s)",
            counted(len(elsewhere), "machine goes", "machines go"),
            queues,
            named,
        )
    found: dict[str, QueueLimits] = {}
    for name, queue in [*wanted.items(), *(_builtin_queues(wanted) if wanted else {}).items()]:
        poll = config.poll_interval if queue.poll_interval is None else queue.poll_interval
        most = config.max_poll_interval if queue.max_poll_interval is None else queue.max_poll_interval
        long_poll = config.long_poll if queue.long_poll is None else queue.long_poll
        found[name] = QueueLimits(
            concurrency=queue.concurrency,
            prefetch=config.prefetch if queue.prefetch is None else queue.prefetch,
            min_demand=config.min_demand if queue.min_demand is None else queue.min_demand,
            poll_interval=poll,
            max_poll_interval=max(most, poll),
            long_poll=min(long_poll, max(most, poll) * LONG_POLL_SHARE),
            weights=queue.weights if queue.fair else None,
        )
    return found


def _builtin_queues(wanted: Mapping[str, Queue]) -> dict[str, Queue]:
    """The queues of our own machines: one instance at a time, looked for seldom unless the long poll watches."""
    slow = Queue(1, prefetch=0, poll_interval=BUILTIN_POLL, max_poll_interval=BUILTIN_POLL)
    names = sorted(builtin_queues() - wanted.keys())
    return dict.fromkeys(names, slow)


def plan_schedules(config: Config, specs: Mapping[tuple[str, int], MachineSpec]) -> dict[str, ScheduledPlan]:
    """What this node's code says of schedules: the configured ones, and those of its jobs. Raises `ConfigError`."""
    found: dict[str, ScheduledPlan] = {}
    # Of several versions of a job the last one counts.
    own = {name: spec.schedule for (name, _), spec in sorted(specs.items()) if spec.schedule is not None}
    for schedule in (*config.schedules, *own.values()):
        if schedule.name in found:
            raise ConfigError(
                f"schedules: {schedule.name!r} is there twice, in Config and as a job with cron= or every=",
                option="schedules",
                value=schedule.name,
            )
        try:
            plan = plan_schedule(schedule, journal=config.journal)
        except (ConfigError, StateError, UnknownMachine) as error:
            raise ConfigError(
                f"schedule {schedule.name!r}: {error}", option="schedules", value=schedule.name
            ) from error
        found[schedule.name] = plan
    return found


def config_error_in(error: BaseException) -> ConfigError | None:
    """The `ConfigError` behind a `StartFailed`: some invalid options show only in use (a pooler, for example)."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, ConfigError):
        cause = cause.__cause__
    return cause


def make_node(
    config: Config,
    pool: ConnectionPool,
    roles: Mapping[str, Lane],
    specs: Mapping[tuple[str, int], MachineSpec],
    *,
    catalog: MachineCatalog | None = None,
) -> Node:
    """Make what the actors of this engine share. Each start is a new incarnation. `catalog` replaces `specs`."""
    token = secrets.token_bytes(32)  # not stored: the database gets its hash
    owner = Owner(
        schema=config.schema,
        name=f"{config.node}:{secrets.token_hex(6)}",
        token_hash=hashlib.sha256(token).digest()[:16],
        lease_ttl=config.lease_ttl,
    )
    patience = answer_patience(config.lease_ttl)
    claims = ActiveClaims()
    port = EnginePort(
        pool, roles["client"].name, config.schema, claims, patience=patience, journal=config.journal
    )
    return Node(
        config,
        owner,
        pool,
        roles,
        MachineCatalog(current_registry(), specs) if catalog is None else catalog,
        Telemetry(config.observers),
        port,
        claims,
    )
