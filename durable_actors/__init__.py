"""Durable state machines and jobs on Trio and Postgres.

Layout, top to bottom; imports go down only (ARCHITECTURE.md has the map)::

    cli, testing                leaves: nothing imports them
    otel, prometheus            bridges of the events; extras
    engine                      serve, start_engine, open_engine: start-up of config, connections and tree
    client, repair, runner, sync, aio  callers on Trio, plain psycopg, asyncio
    _engine                     the actors
    _store                      every SQL statement, one function each; migrations
    otp, machine, _postgres     independent of each other: actors · the state-machine language · psycopg on Trio
    journal                     the dispatch protocol in pure form: records, facts, fold; journal storage
    diagrams                    graphs as text, Mermaid, DOT, SVG: pure
    config, telemetry, logs, errors  values
"""

import typing

from durable_actors._exports import load as _load
from durable_actors._version import __version__

if typing.TYPE_CHECKING:
    from durable_actors import aio, diagrams, journal, logs, otp, schedules, sync, telemetry
    from durable_actors._bulk import Bulk
    from durable_actors._client import Client
    from durable_actors._limits import Limit, Use
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
    from durable_actors.client import (
        anomalies,
        diff,
        execute_next,
        explain,
        export_history,
        graph,
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
    from durable_actors.dashboard_options import Dashboard
    from durable_actors.decisions import approve, proceed, reject
    from durable_actors.diagrams import Diagram
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
        NotADependency,
        NoTarget,
        PoolTimeout,
        ProtocolAnomaly,
        RateLimited,
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
        Backoff,
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
        ScheduledRun,
        Signal,
        Stop,
        Workflow,
        job,
        machine_graph,
        step,
        task,
    )
    from durable_actors.pausing import pause, pause_queue, pauses, resume, resume_queue
    from durable_actors.repair import accept, rebuild, recover
    from durable_actors.retention import Retention
    from durable_actors.runner import claim_next, complete, fail, heartbeat
    from durable_actors.schedules import Schedule
else:

    def __getattr__(name: str) -> object:
        """Import what has this name, when it is first asked for: `_exports` says why, and where it is."""
        value = globals()[name] = _load(name)
        return value


__all__ = [
    "KEEP",
    "Approval",
    "Await",
    "Backoff",
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
    "Dashboard",
    "Decision",
    "DefinitionError",
    "Diagram",
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
    "Limit",
    "Machine",
    "Next",
    "NextAction",
    "NoTarget",
    "NotADependency",
    "Outcome",
    "ParentRun",
    "Pause",
    "PoolTimeout",
    "PostgresJournal",
    "Problem",
    "ProtocolAnomaly",
    "Queue",
    "QueuePause",
    "RateLimited",
    "Receipt",
    "Record",
    "RecoveryReport",
    "Replay",
    "Retention",
    "Retry",
    "RevConflict",
    "Schedule",
    "ScheduleChildren",
    "ScheduledRun",
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
    "Use",
    "VerifyReport",
    "Wakeup",
    "Workflow",
    "__version__",
    "accept",
    "aio",
    "anomalies",
    "approve",
    "cancel",
    "claim_next",
    "complete",
    "diagrams",
    "diff",
    "embedded_dsn",
    "execute_next",
    "explain",
    "export_history",
    "fail",
    "graph",
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
    "logs",
    "machine_graph",
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
    "schedules",
    "serve",
    "signal",
    "signal_many",
    "signal_with_start",
    "start_engine",
    "state_at",
    "step",
    "sync",
    "task",
    "telemetry",
    "tree",
    "verify",
]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
