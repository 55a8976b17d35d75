"""Where the names of `durable_actors` are defined: each is imported when it is first used.

To import everything takes half a second, most of it for classes that a program may never need: a web application that
inserts jobs has no engine, and `durable-actors --help` needs nothing. So `import durable_actors` reads this table, and
`durable_actors.job` imports the language of machines alone. tests/test_exports.py compares the table with
`__init__.py`, which has the same imports for type checkers, and pins what the first names import.
"""

from __future__ import annotations

from importlib import import_module
from types import FunctionType
from typing import Final

_PACKAGE: Final = "durable_actors"
NAMES: Final = {
    "_bulk": "Bulk",
    "_client": "Client",
    "_limits": "Limit Use",
    "_postgres.embedded.server": "embedded_dsn",
    "_postgres.trio.connection": "TrioConnection",
    "_store.boundaries": "Boundary",
    "_store.commands": "Receipt",
    "_store.explanation": "Blocker Explanation NextAction",
    "_store.journal": "PostgresJournal",
    "_store.migrate": "migrate",
    "_store.observe": "Filter",
    "_store.pauses": "QueuePause",
    "_store.read": "Instance ParentRun",
    "_store.recover": "RecoveryReport",
    "_store.runner": "Claimed",
    "_store.tree": "Tree TreeNode",
    "client": (
        "anomalies diff execute_next explain export_history graph history import_history insert "
        "insert_many inspect iter_history list_instances open_client receipts result signal signal_many "
        "signal_with_start state_at tree verify"
    ),
    "config": "Config Queue Wakeup",
    "control": "cancel rerun retry run_now",
    "dashboard_options": "Dashboard",
    "decisions": "approve proceed reject",
    "diagrams": "Diagram",
    "engine": "Engine open_engine serve start_engine",
    "errors": (
        "CommitUnknown ConfigError Conflict DefinitionError Duplicate DurableError InstanceCancelled "
        "InstanceFailed InvalidJournalEntry InvalidOutcome LeaseLost NotADependency NoTarget PoolTimeout "
        "ProtocolAnomaly RateLimited RevConflict SchemaError StateError StepTimeout StoreUnavailable TooManyChildren "
        "UnknownMachine"
    ),
    "journal": "Problem Record VerifyReport",
    "machine": (
        "KEEP Approval Await Backoff Cancel Cancellation Child ChildView Context Decision Done Error "
        "InsertOptions Machine Next Outcome Pause Replay Retry ScheduleChildren ScheduledRun Signal Stop "
        "Workflow job machine_graph step task"
    ),
    "pausing": "pause pause_queue pauses resume resume_queue",
    "repair": "accept rebuild recover",
    "retention": "Retention",
    "runner": "claim_next complete fail heartbeat",
    "schedules": "Schedule",
}
"""Modules, and the names that the package has from them."""
MODULES: Final = frozenset(
    {
        "aio", "diagrams", "journal", "logs", "otp", "schedules", "sync", "telemetry", "client", "config",
        "control", "decisions", "engine", "errors", "machine", "pausing", "repair", "retention", "runner", "testing",
    }
)  # fmt: skip
"""Modules that are attributes of the package."""
_HOMES: Final = {name: module for module, names in NAMES.items() for name in names.split()}


def load(name: str) -> object:
    """Import what the package calls by this name."""
    if name in MODULES:
        return import_module(f"{_PACKAGE}.{name}")
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {_PACKAGE!r} has no attribute {name!r}", name=name)
    value: object = getattr(import_module(f"{_PACKAGE}.{home}"), name)
    if isinstance(value, type | FunctionType) and "._" in value.__module__:
        value.__module__ = _PACKAGE  # show the public import path, not the module that defines it
    return value
