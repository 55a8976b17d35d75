"""The settings of an engine, a client and a queue: frozen, validated once, passed down.

An option is declared once, as a field: name, type, default, check, meaning and its flag of `durable-actors serve`. The
command line and the tables of docs/reference are generated from the fields, so a new option is a new field.

Only `_dsn` and the command line read the environment. Every error names the option and the value, and is raised
before anything is written.
"""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable, Iterable, Mapping
from datetime import datetime
from types import MappingProxyType
from typing import Any, Final, Literal

import attrs

from durable_actors import _option_checks as check
from durable_actors._dsn import check_session_dsn, resolve_dsn, without_password
from durable_actors._journal_level import LEVELS, JournalLevel
from durable_actors._limits import Limit, limits_of
from durable_actors._option_fields import (
    CALLABLE,
    FLAG,
    INTERVAL,
    LONG_POLL,
    NAME,
    SCHEMA,
    TIMEOUT,
    about,
    one_of,
    optional,
    optional_seconds,
    seconds,
    seconds_or_off,
    weights,
    whole,
)
from durable_actors._scheduling.schedule import Schedule, check_schedules
from durable_actors.dashboard_options import Dashboard
from durable_actors.errors import ConfigError
from durable_actors.retention import Retention

MAX_SLOTS: Final = 100_000
"""The largest concurrency of a queue."""

_MAX_POLL: Final = 5.0
"""Seconds: the default of `max_poll_interval`, unless `poll_interval` is longer."""

_ENGINES: Final = "the engine's"
_NO_WEIGHTS: Final[Mapping[str, float]] = MappingProxyType({})


@check.refuse_unknown_options
@attrs.frozen
class Queue:
    """Options of one queue: `Queue(20, prefetch=10)`. None means the option of the engine."""

    concurrency: int = attrs.field(
        default=10,
        validator=whole(1, MAX_SLOTS),
        metadata=about("The number of steps that run at the same time."),
    )
    prefetch: int | None = attrs.field(
        default=None,
        kw_only=True,
        validator=optional(whole()),
        metadata=about("As `prefetch` of `Config`.", default=_ENGINES),
    )
    min_demand: int | None = attrs.field(
        default=None,
        kw_only=True,
        validator=optional(whole(1)),
        metadata=about("As `min_demand` of `Config`.", default=_ENGINES),
    )
    poll_interval: float | None = attrs.field(
        default=None,
        kw_only=True,
        converter=optional_seconds,
        validator=optional(INTERVAL),
        metadata=about("As `poll_interval` of `Config`.", default=_ENGINES),
    )
    max_poll_interval: float | None = attrs.field(
        default=None,
        kw_only=True,
        converter=optional_seconds,
        validator=optional(INTERVAL),
        metadata=about("As `max_poll_interval` of `Config`.", default=_ENGINES),
    )
    long_poll: float | None = attrs.field(
        default=None,
        kw_only=True,
        converter=optional_seconds,
        validator=optional(LONG_POLL),
        metadata=about("As `long_poll` of `Config`.", default=_ENGINES),
    )
    fair: bool = attrs.field(
        default=False,
        kw_only=True,
        validator=FLAG,
        metadata=about(
            "Whether the values of `fair_key` share the queue: the one that has used least goes first."
        ),
    )
    weights: Mapping[str, float] = attrs.field(
        default=_NO_WEIGHTS,
        kw_only=True,
        converter=weights,
        hash=False,
        metadata=about(
            "With `fair`: how much of the queue a `fair_key` gets, compared with others.",
            default="1 for each",
            values="`fair_key` to a number, 0.001 to 1000",
        ),
    )

    def __attrs_post_init__(self) -> None:
        if self.weights and not self.fair:
            raise ConfigError("weights are those of a fair queue: set fair=True", option="weights")


@attrs.frozen(kw_only=True)
class Wakeup:
    """What a notifier is told: an instance has something to run. That is committed."""

    instance_id: int
    """The instance."""
    queue: str
    """Its queue."""
    runnable_key: str
    """The attempt, as in the facts of the journal: instance/visit/step#round.attempt. It may be told more than once."""
    visible_at: datetime
    """When it is due, on the clock of the database; perhaps later than now."""


Notifier = Callable[[Wakeup], Awaitable[object]]
"""What `Config(notifier=...)` takes."""


# Converters of single options. They know the name of their option and raise ConfigError themselves.


def _dsn(value: str | None) -> str:
    return resolve_dsn(value)


def _node(value: str | None) -> str:
    return socket.gethostname() if value is None else value


def _machines(value: Iterable[Any]) -> tuple[Any, ...]:
    return check.several("machines", value)


def _modules(value: str | Iterable[str]) -> tuple[str, ...]:
    names = (value,) if isinstance(value, str) else check.several("modules", value)
    return tuple(check.name("modules", each) for each in names)


def _queues(value: Mapping[str, int | Queue] | None) -> Mapping[str, Queue] | None:
    if value is None:
        return None
    given: Any = value  # untyped callers pass anything
    if not isinstance(given, Mapping):
        text = f"queues={check.shown(value)} must map names to a concurrency or a Queue"
        raise ConfigError(text, option="queues", value=value)
    return MappingProxyType(
        {
            check.queue_name("queues", key): each if isinstance(each, Queue) else _slots(key, each)
            for key, each in value.items()
        }
    )


def _slots(name: str, concurrency: Any) -> Queue:
    return Queue(check.count(f"queues[{name!r}] concurrency", concurrency, least=1, most=MAX_SLOTS))


def _observers(value: Iterable[Callable[[Any], object]]) -> tuple[Callable[[Any], object], ...]:
    return check.callables("observers", value)


def _retention(value: Retention | None) -> Retention | None:
    given: Any = value  # untyped callers pass anything
    if given is not None and not isinstance(given, Retention):
        text = f"retention={check.shown(value)} must be a Retention, or None to delete nothing"
        raise ConfigError(text, option="retention", value=value)
    return value


def _dashboard(value: Dashboard | None) -> Dashboard | None:
    given: Any = value  # untyped callers pass anything
    if given is not None and not isinstance(given, Dashboard):
        text = f"dashboard={check.shown(value)} must be a Dashboard, or None for none"
        raise ConfigError(text, option="dashboard", value=value)
    return value


def _schedules(value: Iterable[Schedule]) -> tuple[Schedule, ...]:
    return check_schedules(value)


@check.refuse_unknown_options
@attrs.frozen(kw_only=True)
class Config:
    """Settings of an engine or client. Durations are seconds or `timedelta`."""

    dsn: str = attrs.field(
        default=None,
        converter=_dsn,
        repr=without_password,
        metadata=about(
            "The Postgres server: a libpq connection string or URI, or `embedded`.",
            flag="--dsn",
            default="`$DURABLE_DSN`, else libpq's environment, else `embedded`",
            values="a string",
        ),
    )
    session_dsn: str | None = attrs.field(
        default=None,
        converter=check_session_dsn,
        repr=without_password,
        metadata=about(
            "A direct connection for session locks, if `dsn` goes through a transaction pooler.",
            flag="--session-dsn",
            default="`dsn`",
            values="a string",
        ),
    )
    schema: str = attrs.field(
        default="durable", validator=SCHEMA, metadata=about("The schema of the tables.", flag="--schema")
    )
    migrate: bool = attrs.field(
        default=True,
        validator=FLAG,
        metadata=about(
            "Create or update the schema on start. If off, an outdated schema is an error.",
            flag="--migrate/--no-migrate",
        ),
    )
    name: str = attrs.field(
        default="default",
        validator=NAME,
        metadata=about("The name of the engine. Engines in one process need different names."),
    )
    node: str = attrs.field(
        default=None,
        converter=_node,
        validator=NAME,
        metadata=about(
            "The name of the node, shown as the owner of its claims. Each start adds a unique suffix.",
            flag="--node",
            default="the host name",
        ),
    )
    machines: tuple[Any, ...] = attrs.field(
        default=(),
        converter=_machines,
        metadata=about(
            "Machines and jobs to serve, in addition to all registered ones.", values="machines and jobs"
        ),
    )
    modules: tuple[str, ...] = attrs.field(
        default=(),
        converter=_modules,
        metadata=about(
            "Modules to import on start, which registers their machines.", values="names of modules"
        ),
    )
    queues: Mapping[str, Queue] | None = attrs.field(
        default=None,
        converter=_queues,
        metadata=about(
            "The queues to serve, beside `durable.ops`, which runs commands in the background. With `{}` the engine "
            "serves none and is only a client.",
            default='the queues of all machines and "default"',
            values="name to concurrency or `Queue`",
        ),
    )
    lease_ttl: float = attrs.field(
        default=60,
        converter=seconds,
        validator=INTERVAL,
        metadata=about("How long a claim stays valid without a heartbeat.", flag="--lease"),
    )
    heartbeat_interval: float = attrs.field(
        default=None,
        converter=optional_seconds,
        validator=optional(INTERVAL),
        metadata=about(
            "The time between heartbeats, which renew the leases of a node; at most `lease_ttl` / 3.",
            default="`lease_ttl` / 3",
        ),
    )
    poll_interval: float = attrs.field(
        default=1,
        converter=seconds,
        validator=INTERVAL,
        metadata=about(
            "The first pause between polls of an idle queue. It doubles up to `max_poll_interval`.",
            flag="--poll",
        ),
    )
    max_poll_interval: float = attrs.field(
        default=None,
        converter=optional_seconds,
        validator=optional(INTERVAL),
        metadata=about(
            "The longest pause between polls of an idle queue.",
            flag="--max-poll",
            default=f"{_MAX_POLL:g}, or `poll_interval` if that is longer",
        ),
    )
    long_poll: float = attrs.field(
        default=0.1,
        converter=seconds_or_off,
        validator=LONG_POLL,
        metadata=about(
            "The interval at which the server checks idle queues for rows that other processes inserted; 0 turns it "
            "off. Needs `pool_size` 6 or more, and no pooler.",
            flag="--long-poll",
        ),
    )
    reap_interval: float = attrs.field(
        default=30,
        converter=seconds,
        validator=INTERVAL,
        metadata=about("The longest pause between searches for expired leases.", flag="--reap"),
    )
    dead_after: float = attrs.field(
        default=10,
        converter=seconds,
        validator=INTERVAL,
        metadata=about(
            "How long a node must be seen dead before its claims are released, even if their leases have not expired.",
            flag="--dead-after",
        ),
    )
    prefetch: int = attrs.field(
        default=0,
        validator=whole(),
        metadata=about(
            "The number of rows that a queue claims beyond its concurrency, so that a free slot has work at once."
        ),
    )
    min_demand: int = attrs.field(
        default=1,
        validator=whole(1),
        metadata=about(
            "The number of rows that a queue must have room for before it claims again. An idle queue always claims."
        ),
    )
    drain_timeout: float = attrs.field(
        default=5,
        converter=seconds,
        validator=TIMEOUT,
        metadata=about("How long running steps may continue when the engine stops.", flag="--drain"),
    )
    drain_on_cancel: bool = attrs.field(
        default=True,
        validator=FLAG,
        metadata=about("Drain when the engine is cancelled from outside, too."),
    )
    start_timeout: float = attrs.field(
        default=30,
        converter=seconds,
        validator=TIMEOUT,
        metadata=about(
            "How long to wait on start while Postgres is starting, recovering or locked.",
            flag="--start-timeout",
        ),
    )
    pool_size: int = attrs.field(
        default=6,
        validator=whole(3, 1000),
        metadata=about(
            "The connections of the node: first for session, heartbeat, claim and commit, the rest for clients.",
            flag="--pool-size",
        ),
    )
    thread_limit: int = attrs.field(
        default=40,
        validator=whole(1, 10_000),
        metadata=about("The number of threads for `def` steps.", flag="--threads"),
    )
    max_crashes: int | None = attrs.field(
        default=None,
        validator=optional(whole(1)),
        metadata=about(
            "Fail an instance whose step ended this often without an outcome.",
            flag="--max-crashes",
            default="never",
        ),
    )
    late_commit: Literal["accept", "reject"] = attrs.field(
        default="accept",
        validator=one_of("accept", "reject"),
        metadata=about(
            "Whether an outcome may be committed after its lease expired, while its claim is still current."
        ),
    )
    journal: JournalLevel = attrs.field(
        default="auto",
        validator=one_of(*LEVELS),
        metadata=about(
            "How much of the history of new instances is recorded, unless their machine or insert says otherwise. "
            '"auto": every outcome of machines, failed attempts of jobs.',
            flag="--journal",
        ),
    )
    retention: Retention | None = attrs.field(
        default=Retention(),
        converter=_retention,
        metadata=about(
            "How long ended instances are kept. With None this node deletes none.",
            default="`Retention()`: done and cancelled ones 7 days, failed ones 30 days",
            values="a `Retention`",
        ),
    )
    limits: Mapping[str, Limit] = attrs.field(
        default=MappingProxyType({}),
        converter=limits_of,
        metadata=about(
            "Rates and slots that steps share over all nodes, by name. Written to the database at start where they "
            "differ from what is declared there.",
            default="none",
            values="name → `Limit`",
        ),
    )
    schedules: tuple[Schedule, ...] = attrs.field(
        default=(),
        converter=_schedules,
        metadata=about(
            "What to start when, in addition to jobs with `cron=` or `every=`.", values="`Schedule` objects"
        ),
    )
    observers: tuple[Callable[[Any], object], ...] = attrs.field(
        default=(),
        converter=_observers,
        metadata=about(
            "Called with every telemetry event from the start on. `engine.telemetry.subscribe` adds observers later.",
            values="functions of one argument",
        ),
    )
    dashboard: Dashboard | None = attrs.field(
        default=None,
        converter=_dashboard,
        metadata=about(
            "Serve the dashboard in this process, with the live tree of this engine. Needs the extra `dashboard`.",
            default="none",
            values="a `Dashboard`",
        ),
    )
    notifier: Notifier | None = attrs.field(
        default=None,
        validator=optional(CALLABLE),
        metadata=about(
            "Called with a `Wakeup` after each commit of this process that gave an instance something to run.",
            default="nobody is told",
        ),
    )

    def __attrs_post_init__(self) -> None:
        """Derive and check the options that depend on each other."""
        self._derive("heartbeat_interval", self.lease_ttl / 3)
        self._derive("max_poll_interval", max(_MAX_POLL, self.poll_interval))
        if self.heartbeat_interval * 3 > self.lease_ttl * 1.000001:
            raise ConfigError(
                f"heartbeat_interval={self.heartbeat_interval:g} is too long for lease_ttl={self.lease_ttl:g}: three "
                "heartbeats must fit into a lease",
                option="heartbeat_interval",
                value=self.heartbeat_interval,
            )
        if self.max_poll_interval < self.poll_interval:
            raise ConfigError(
                f"max_poll_interval={self.max_poll_interval:g} is less than poll_interval={self.poll_interval:g}",
                option="max_poll_interval",
                value=self.max_poll_interval,
            )

    def _derive(self, option: str, value: float) -> None:
        """Set an option that was not given to the derived value."""
        if getattr(self, option) is None:
            object.__setattr__(self, option, value)  # the class is frozen
