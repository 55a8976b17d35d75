"""What a process is told from outside. Frozen, validated once, passed down.

Only this module and the command line read the environment. Every error names the option and the value, and is
raised before anything is written.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, Final, Literal, cast

import attrs

from durable_actors import _option_checks as check
from durable_actors._option_checks import Duration
from durable_actors.errors import ConfigError

EMBEDDED: Final = "embedded"
"""The DSN that asks for the embedded Postgres by name."""

MAX_SLOTS: Final = 100_000
"""Steps of one queue at a time."""

_LIBPQ: Final = ("PGHOST", "PGHOSTADDR", "PGSERVICE")
_OFF: Final = frozenset({"0", "false", "no", "off"})

_set = object.__setattr__  # the classes are frozen, and their constructors are written by hand


def resolve_dsn(dsn: Any = None, environ: Mapping[str, str] | None = None) -> str:
    """Decide which Postgres to use: a DSN for libpq, or `EMBEDDED`.

    The first of: `dsn`, `$DURABLE_DSN`, libpq's own environment (PGHOST, PGHOSTADDR, PGSERVICE), the embedded
    server. `DURABLE_EMBEDDED=0` forbids the last one, also by name. Pure but for reading the environment.
    """
    environ = os.environ if environ is None else environ
    if dsn is not None and not isinstance(dsn, str):
        raise ConfigError(f"dsn={check.shown(dsn)} is not a string", option="dsn", value=dsn)
    found: str | None = dsn if dsn is not None else environ.get("DURABLE_DSN") or None
    if found is None:
        found = "" if any(environ.get(name) for name in _LIBPQ) else EMBEDDED
    if found == EMBEDDED and environ.get("DURABLE_EMBEDDED", "").lower() in _OFF:
        asked = "dsn='embedded'" if dsn == EMBEDDED else "no DSN is set"
        raise ConfigError(
            f"{asked}, and DURABLE_EMBEDDED={environ['DURABLE_EMBEDDED']} forbids the embedded Postgres. "
            "Set DURABLE_DSN (postgresql://user@host/database), PGHOST or PGSERVICE.",
            option="dsn",
            value=dsn,
        )
    return found


@attrs.frozen(init=False)
class Queue:
    """Options of one queue: `Queue(20, prefetch=10)`. What is None comes from the engine's."""

    concurrency: int
    """Steps that run at a time."""
    prefetch: int | None
    """Rows claimed beyond that, so that the next step is there when a slot is free."""
    min_demand: int | None
    """Pick only when so many places are free; an idle queue always picks."""
    poll_interval: float | None
    """Seconds between looks at an idle queue, at first."""
    max_poll_interval: float | None
    """Seconds between looks at an idle queue, at most."""
    long_poll: float | None
    """Seconds between looks of the server's at an idle queue; 0: none."""

    def __init__(
        self,
        concurrency: int = 10,
        *,
        prefetch: int | None = None,
        min_demand: int | None = None,
        poll_interval: Duration | None = None,
        max_poll_interval: Duration | None = None,
        long_poll: Duration | None = None,
    ) -> None:
        _set(self, "concurrency", check.count("concurrency", concurrency, least=1, most=MAX_SLOTS))
        _set(self, "prefetch", None if prefetch is None else check.count("prefetch", prefetch))
        _set(
            self, "min_demand", None if min_demand is None else check.count("min_demand", min_demand, least=1)
        )
        for option, value in (("poll_interval", poll_interval), ("max_poll_interval", max_poll_interval)):
            _set(self, option, None if value is None else check.duration(option, value))
        _set(self, "long_poll", None if long_poll is None else check.long_poll("long_poll", long_poll))


def _without_password(dsn: str | None) -> str:
    """A config is shown in logs and tracebacks."""
    return "'…'" if dsn is not None and ("password" in dsn or "@" in dsn) else repr(dsn)


@attrs.frozen(init=False)
class Config:
    """Settings of an engine or client. Durations are seconds or `timedelta`."""

    dsn: str = attrs.field(repr=_without_password)
    """Connection string or URI. Default: `$DURABLE_DSN`, else libpq's environment, else embedded."""
    session_dsn: str | None = attrs.field(repr=_without_password)
    """A direct way to the server for session locks, when `dsn` goes through a transaction pooler."""
    schema: str
    """Where the tables live."""
    migrate: bool
    """Create and migrate the schema on start; otherwise only check it."""
    name: str
    """Engines of one process coexist by name."""
    node: str
    """Shown as the owner of claims; each start adds an incarnation of its own. Default: the host's name."""
    machines: tuple[Any, ...]
    """Machines and jobs to serve, beside all that are registered."""
    modules: tuple[str, ...]
    """Modules to import at start; their machines register themselves."""
    queues: Mapping[str, Queue] | None
    """Name to concurrency or `Queue`. None: those of the registered machines and "default". {}: a client only."""
    lease_ttl: float
    """Seconds that a claim is trusted without being renewed."""
    heartbeat_interval: float
    """Seconds between renewals; default a third of `lease_ttl`, and at most that."""
    poll_interval: float
    """Seconds between looks at an idle queue, at first; doubles up to `max_poll_interval`."""
    max_poll_interval: float
    """Seconds between looks at an idle queue, at most; default 5, or `poll_interval` when that is more."""
    long_poll: float
    """Seconds between looks of the server's at idle queues: one statement a second watches all queues of the node, so
    that what another process inserts starts within 0.2 s. 0 or None: off, the node's own polls only. It uses a client
    connection while one is free: below `pool_size=6`, and through a pooler, queues are polled."""
    reap_interval: float
    """Seconds between looks for dead claims, at most."""
    dead_after: float
    """Seconds that a node must be seen dead before its claims are taken early."""
    prefetch: int
    """Per queue: see `Queue`."""
    min_demand: int
    """Per queue: see `Queue`."""
    drain_timeout: float
    """Seconds that running steps may go on when the engine stops."""
    drain_on_cancel: bool
    """Drain also when the engine is cancelled from outside."""
    start_timeout: float
    """Seconds that a start waits for a Postgres that is starting, recovering or locked; then `StoreUnavailable`."""
    pool_size: int
    """The node's connections: session, heartbeat, claim and commit first, the rest for clients."""
    thread_limit: int
    """Threads for `def` steps."""
    max_crashes: int | None
    """Quarantine (fail, with the reason) a step that ended so often without an outcome."""
    late_commit: Literal["accept", "reject"]
    """Whether an outcome may be committed after its lease ended, while its claim is still current."""
    observers: tuple[Callable[[Any], object], ...]
    """Called with every telemetry event from the first one on; `engine.telemetry.subscribe` comes after the start."""

    def __init__(
        self,
        *,
        dsn: str | None = None,
        session_dsn: str | None = None,
        schema: str = "durable",
        migrate: bool = True,
        name: str = "default",
        node: str | None = None,
        machines: Iterable[Any] = (),
        modules: str | Iterable[str] = (),
        queues: Mapping[str, int | Queue] | None = None,
        lease_ttl: Duration = 60,
        heartbeat_interval: Duration | None = None,
        poll_interval: Duration = 1,
        max_poll_interval: Duration | None = None,
        long_poll: Duration | None = 0.1,
        reap_interval: Duration = 30,
        dead_after: Duration = 10,
        prefetch: int = 0,
        min_demand: int = 1,
        drain_timeout: Duration = 5,
        drain_on_cancel: bool = True,
        start_timeout: Duration = 30,
        pool_size: int = 6,
        thread_limit: int = 40,
        max_crashes: int | None = None,
        late_commit: Literal["accept", "reject"] = "accept",
        observers: Iterable[Callable[[Any], object]] = (),
    ) -> None:
        _set(self, "dsn", resolve_dsn(dsn))
        _set(self, "session_dsn", None if session_dsn is None else _session_dsn(session_dsn))
        _set(self, "schema", check.check_schema_name(schema))
        _set(self, "migrate", check.flag("migrate", migrate))
        _set(self, "name", check.name("name", name))
        _set(self, "node", check.name("node", socket.gethostname() if node is None else node))
        _set(self, "machines", check.several("machines", machines))
        names = (modules,) if isinstance(modules, str) else check.several("modules", modules)
        _set(self, "modules", tuple(check.name("modules", each) for each in names))
        _set(self, "queues", None if queues is None else _queues(queues))
        self._set_times(lease_ttl, heartbeat_interval, poll_interval, max_poll_interval)
        _set(self, "long_poll", check.long_poll("long_poll", long_poll))
        _set(self, "reap_interval", check.duration("reap_interval", reap_interval))
        _set(self, "dead_after", check.duration("dead_after", dead_after))
        _set(self, "prefetch", check.count("prefetch", prefetch))
        _set(self, "min_demand", check.count("min_demand", min_demand, least=1))
        _set(self, "drain_timeout", check.duration("drain_timeout", drain_timeout, positive=False))
        _set(self, "drain_on_cancel", check.flag("drain_on_cancel", drain_on_cancel))
        _set(self, "start_timeout", check.duration("start_timeout", start_timeout, positive=False))
        _set(self, "pool_size", check.count("pool_size", pool_size, least=3, most=1000))
        _set(self, "thread_limit", check.count("thread_limit", thread_limit, least=1, most=10_000))
        crashes = None if max_crashes is None else check.count("max_crashes", max_crashes, least=1)
        _set(self, "max_crashes", crashes)
        _set(self, "late_commit", check.choice("late_commit", late_commit, "accept", "reject"))
        _set(self, "observers", check.callables("observers", observers))

    def _set_times(
        self,
        lease_ttl: Duration,
        heartbeat_interval: Duration | None,
        poll_interval: Duration,
        max_poll_interval: Duration | None,
    ) -> None:
        """The options that depend on each other."""
        lease = check.duration("lease_ttl", lease_ttl)
        beat = (
            lease / 3
            if heartbeat_interval is None
            else check.duration("heartbeat_interval", heartbeat_interval)
        )
        if beat * 3 > lease * 1.000001:
            raise ConfigError(
                f"heartbeat_interval={beat:g} is too slow for lease_ttl={lease:g}: three heartbeats must fit into a "
                "lease",
                option="heartbeat_interval",
                value=heartbeat_interval,
            )
        poll = check.duration("poll_interval", poll_interval)
        most = (
            max(5.0, poll)
            if max_poll_interval is None
            else check.duration("max_poll_interval", max_poll_interval)
        )
        if most < poll:
            raise ConfigError(
                f"max_poll_interval={most:g} is below poll_interval={poll:g}",
                option="max_poll_interval",
                value=max_poll_interval,
            )
        _set(self, "lease_ttl", lease)
        _set(self, "heartbeat_interval", beat)
        _set(self, "poll_interval", poll)
        _set(self, "max_poll_interval", most)


def _session_dsn(value: Any) -> str:
    if not isinstance(value, str) or value == EMBEDDED:
        text = f"session_dsn={check.shown(value)} must be a connection string or URI"
        raise ConfigError(text, option="session_dsn", value=value)
    return value


def _slots(name: str, concurrency: Any) -> Queue:
    return Queue(check.count(f"queues[{name!r}] concurrency", concurrency, least=1, most=MAX_SLOTS))


def _queues(value: Any) -> Mapping[str, Queue]:
    if not isinstance(value, Mapping):
        text = f"queues={check.shown(value)} must map names to a concurrency or a Queue"
        raise ConfigError(text, option="queues", value=value)
    pairs = cast("Mapping[str, Any]", value).items()
    return MappingProxyType(
        {
            check.queue_name("queues", key): each if isinstance(each, Queue) else _slots(key, each)
            for key, each in pairs
        }
    )
