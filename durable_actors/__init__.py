"""Durable state machines and jobs on Trio and Postgres.

Layout, top to bottom; imports go down only (ARCHITECTURE.md has the map)::

    cli, testing                leaves: nothing imports them
    engine                      serve, start_engine, open_engine: start-up of config, connections and tree
    client, repair, runner, sync, aio  callers on Trio, plain psycopg, asyncio
    _engine                     the actors
    _store                      every SQL statement, one function each; migrations
    otp, machine, _postgres     independent of each other: actors · the state-machine language · psycopg on Trio
    journal                     the dispatch protocol in pure form: records, facts, fold; journal storage
    config, telemetry, errors   values
"""

from durable_actors import aio, journal, otp, sync, telemetry
from durable_actors._bulk import Bulk
from durable_actors._client import Client
from durable_actors._postgres.embedded.server import embedded_dsn
from durable_actors._postgres.trio.connection import TrioConnection
from durable_actors._store.boundaries import Boundary
from durable_actors._store.commands import Receipt
from durable_actors._store.explanation import Blocker, Explanation, NextAction
from durable_actors._store.journal import PostgresJournal
from durable_actors._store.migrate import migrate
from durable_actors._store.observe import Filter
from durable_actors._store.pauses import QueuePause
from durable_actors._store.read import Instance, ParentRun
from durable_actors._store.recover import RecoveryReport
from durable_actors._store.runner import Claimed
from durable_actors._store.tree import Tree, TreeNode
from durable_actors._version import __version__
from durable_actors.client import (
    anomalies,
    diff,
    execute_next,
    explain,
    export_history,
    history,
    import_history,
    insert,
    insert_many,
    inspect,
    iter_history,
    list_instances,
    open_client,
    receipts,
    result,
    signal,
    signal_many,
    signal_with_start,
    state_at,
    tree,
    verify,
)
from durable_actors.config import Config, Queue, Wakeup
from durable_actors.control import cancel, rerun, retry, run_now
from durable_actors.decisions import approve, proceed, reject
from durable_actors.engine import Engine, open_engine, serve, start_engine
from durable_actors.errors import (
    CommitUnknown,
    ConfigError,
    Conflict,
    DefinitionError,
    Duplicate,
    DurableError,
    InstanceCancelled,
    InstanceFailed,
    InvalidJournalEntry,
    InvalidOutcome,
    LeaseLost,
    NoTarget,
    PoolTimeout,
    ProtocolAnomaly,
    RevConflict,
    SchemaError,
    StateError,
    StepTimeout,
    StoreUnavailable,
    TooManyChildren,
    UnknownMachine,
)
from durable_actors.journal import Problem, Record, VerifyReport
from durable_actors.machine import (
    KEEP,
    Approval,
    Await,
    Cancel,
    Cancellation,
    Child,
    ChildView,
    Context,
    Decision,
    Done,
    Error,
    InsertOptions,
    Machine,
    Next,
    Outcome,
    Pause,
    Replay,
    Retry,
    ScheduleChildren,
    Signal,
    Stop,
    job,
    step,
)
from durable_actors.pausing import pause, pause_queue, pauses, resume, resume_queue
from durable_actors.repair import accept, rebuild, recover
from durable_actors.retention import Retention
from durable_actors.runner import claim_next, complete, fail, heartbeat

__all__ = [
    "KEEP",
    "Approval",
    "Await",
    "Blocker",
    "Boundary",
    "Bulk",
    "Cancel",
    "Cancellation",
    "Child",
    "ChildView",
    "Claimed",
    "Client",
    "CommitUnknown",
    "Config",
    "ConfigError",
    "Conflict",
    "Context",
    "Decision",
    "DefinitionError",
    "Done",
    "Duplicate",
    "DurableError",
    "Engine",
    "Error",
    "Explanation",
    "Filter",
    "InsertOptions",
    "Instance",
    "InstanceCancelled",
    "InstanceFailed",
    "InvalidJournalEntry",
    "InvalidOutcome",
    "LeaseLost",
    "Machine",
    "Next",
    "NextAction",
    "NoTarget",
    "Outcome",
    "ParentRun",
    "Pause",
    "PoolTimeout",
    "PostgresJournal",
    "Problem",
    "ProtocolAnomaly",
    "Queue",
    "QueuePause",
    "Receipt",
    "Record",
    "RecoveryReport",
    "Replay",
    "Retention",
    "Retry",
    "RevConflict",
    "ScheduleChildren",
    "SchemaError",
    "Signal",
    "StateError",
    "StepTimeout",
    "Stop",
    "StoreUnavailable",
    "TooManyChildren",
    "Tree",
    "TreeNode",
    "TrioConnection",
    "UnknownMachine",
    "VerifyReport",
    "Wakeup",
    "__version__",
    "accept",
    "aio",
    "anomalies",
    "approve",
    "cancel",
    "claim_next",
    "complete",
    "diff",
    "embedded_dsn",
    "execute_next",
    "explain",
    "export_history",
    "fail",
    "heartbeat",
    "history",
    "import_history",
    "insert",
    "insert_many",
    "inspect",
    "iter_history",
    "job",
    "journal",
    "list_instances",
    "migrate",
    "open_client",
    "open_engine",
    "otp",
    "pause",
    "pause_queue",
    "pauses",
    "proceed",
    "rebuild",
    "receipts",
    "recover",
    "reject",
    "rerun",
    "result",
    "resume",
    "resume_queue",
    "retry",
    "run_now",
    "serve",
    "signal",
    "signal_many",
    "signal_with_start",
    "start_engine",
    "state_at",
    "step",
    "sync",
    "telemetry",
    "tree",
    "verify",
]

# Show the public import path, not the module that defines them.
for _public in (
    Blocker,
    Boundary,
    Bulk,
    Claimed,
    Client,
    Explanation,
    Filter,
    Instance,
    NextAction,
    ParentRun,
    PostgresJournal,
    QueuePause,
    Receipt,
    RecoveryReport,
    Tree,
    TreeNode,
    TrioConnection,
    embedded_dsn,
    migrate,
):
    _public.__module__ = __name__
del _public
