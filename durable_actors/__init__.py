"""Durable state machines and jobs on Trio and Postgres.

Layout, top to bottom; imports go down only (ARCHITECTURE.md has the map)::

    cli, testing                leaves: nothing imports them
    engine                      serve, start_engine, open_engine: start-up of config, connections and tree
    _engine, client, sync, aio  the actors · callers on Trio, plain psycopg, asyncio
    _store                      every SQL statement, one function each; migrations
    otp, machine, _postgres     independent of each other: actors · the state-machine language · psycopg on Trio
    config, telemetry, errors   values
"""

from durable_actors import aio, otp, sync, telemetry
from durable_actors._client import Client
from durable_actors._postgres.embedded.server import embedded_dsn
from durable_actors._postgres.trio.connection import TrioConnection
from durable_actors._store.migrate import migrate
from durable_actors._store.observe import Filter
from durable_actors._store.read import Instance
from durable_actors._version import __version__
from durable_actors.client import (
    insert,
    insert_many,
    inspect,
    list_instances,
    open_client,
    result,
    retry,
    signal,
    signal_many,
    signal_with_start,
)
from durable_actors.config import Config, Queue
from durable_actors.engine import Engine, open_engine, serve, start_engine
from durable_actors.errors import (
    CommitUnknown,
    ConfigError,
    Conflict,
    DefinitionError,
    Duplicate,
    DurableError,
    InstanceFailed,
    InvalidOutcome,
    LeaseLost,
    NoTarget,
    PoolTimeout,
    SchemaError,
    StateError,
    StepTimeout,
    StoreUnavailable,
    TooManyChildren,
    UnknownMachine,
)
from durable_actors.machine import (
    KEEP,
    Await,
    Cancel,
    Child,
    ChildView,
    Context,
    Done,
    Error,
    InsertOptions,
    Machine,
    Next,
    Outcome,
    Replay,
    Retry,
    ScheduleChildren,
    Signal,
    Stop,
    job,
    step,
)

__all__ = [
    "KEEP",
    "Await",
    "Cancel",
    "Child",
    "ChildView",
    "Client",
    "CommitUnknown",
    "Config",
    "ConfigError",
    "Conflict",
    "Context",
    "DefinitionError",
    "Done",
    "Duplicate",
    "DurableError",
    "Engine",
    "Error",
    "Filter",
    "InsertOptions",
    "Instance",
    "InstanceFailed",
    "InvalidOutcome",
    "LeaseLost",
    "Machine",
    "Next",
    "NoTarget",
    "Outcome",
    "PoolTimeout",
    "Queue",
    "Replay",
    "Retry",
    "ScheduleChildren",
    "SchemaError",
    "Signal",
    "StateError",
    "StepTimeout",
    "Stop",
    "StoreUnavailable",
    "TooManyChildren",
    "TrioConnection",
    "UnknownMachine",
    "__version__",
    "aio",
    "embedded_dsn",
    "insert",
    "insert_many",
    "inspect",
    "job",
    "list_instances",
    "migrate",
    "open_client",
    "open_engine",
    "otp",
    "result",
    "retry",
    "serve",
    "signal",
    "signal_many",
    "signal_with_start",
    "start_engine",
    "step",
    "sync",
    "telemetry",
]

# Show the public import path, not the module that defines them.
for _public in (Client, Filter, Instance, TrioConnection, embedded_dsn, migrate):
    _public.__module__ = __name__
del _public
