"""Machines, steps, jobs, outcomes and contexts: what users write. Pure: no I/O, no clock, no Trio.

Layout, in reading order::

    _outcome, _outcome_parts        what a step returns, and the checks of its parts
    _step_ref, _step                @step and references to steps
    _context                        what a step receives; ContextPort is the engine's side of it
    _machine, _job                  Machine and @job: what users write
    _definition, _step_collection,  from a class or function to a MachineSpec; all DefinitionErrors
    _declared_state, _job_form
    _spec                           MachineSpec: the form in which the engine sees a machine or job
    _registry                       {(name, version): MachineSpec}
    _codec, _state_type, _diagnosis state to JSON and back; which types can be stored; which part of a value cannot
    _foreign_class                  objects whose class differs from the declared type
    _normalize, _reason, _backoff   returned value or error to outcome; text of a failure; delay of a retry
    _insert_options, _insert_plan,  the options of a new instance, and the row made from them
    _labels
    _checks                         checks of durations, names and numbers given by users

The first group of names below is public as `durable_actors.X`; the second is for the engine and the client.
"""

from durable_actors._journal_level import (
    CLAIMS,
    FAILURES,
    FULL,
    OFF,
    OUTCOMES,
    JournalLevel,
    check_journal,
)
from durable_actors.machine._backoff import default_backoff
from durable_actors.machine._checks import Duration, seconds
from durable_actors.machine._codec import StateCodec, canonical_json, decode_json, decode_or_text, encode_json
from durable_actors.machine._context import (
    MOST_CHILDREN,
    Cancellation,
    ChildView,
    Context,
    ContextPort,
    Decision,
    Signal,
)
from durable_actors.machine._insert_options import ENDED, InsertOptions, OnDuplicate, RowOptions, Status
from durable_actors.machine._insert_plan import InsertPlan, check_step, plan_insert
from durable_actors.machine._job import Job, job
from durable_actors.machine._machine import Machine
from durable_actors.machine._normalize import exhausted, job_failure, normalize_outcome
from durable_actors.machine._outcome import (
    KEEP,
    Approval,
    Await,
    Cancel,
    Child,
    Done,
    Error,
    Keep,
    Next,
    Outcome,
    Pause,
    Replay,
    Retry,
    ScheduleChildren,
    Stop,
)
from durable_actors.machine._reason import error_type, reason_text, shown_error, traceback_text
from durable_actors.machine._registry import (
    Registry,
    add_builtin,
    builtin_machines,
    builtin_queues,
    current_registry,
    isolated_registry,
)
from durable_actors.machine._spec import (
    HandleSpec,
    MachineRef,
    MachineSpec,
    StepSpec,
    parse_step_address,
    spec_of,
    step_address,
)
from durable_actors.machine._step import BoundStep, Step, step
from durable_actors.machine._step_ref import StepRef

__all__ = [
    "CLAIMS",
    "ENDED",
    "FAILURES",
    "FULL",
    "KEEP",
    "MOST_CHILDREN",
    "OFF",
    "OUTCOMES",
    "Approval",
    "Await",
    "BoundStep",
    "Cancel",
    "Cancellation",
    "Child",
    "ChildView",
    "Context",
    "ContextPort",
    "Decision",
    "Done",
    "Duration",
    "Error",
    "HandleSpec",
    "InsertOptions",
    "InsertPlan",
    "Job",
    "JournalLevel",
    "Keep",
    "Machine",
    "MachineRef",
    "MachineSpec",
    "Next",
    "OnDuplicate",
    "Outcome",
    "Pause",
    "Registry",
    "Replay",
    "Retry",
    "RowOptions",
    "ScheduleChildren",
    "Signal",
    "StateCodec",
    "Status",
    "Step",
    "StepRef",
    "StepSpec",
    "Stop",
    "add_builtin",
    "builtin_machines",
    "builtin_queues",
    "canonical_json",
    "check_journal",
    "check_step",
    "current_registry",
    "decode_json",
    "decode_or_text",
    "default_backoff",
    "encode_json",
    "error_type",
    "exhausted",
    "isolated_registry",
    "job",
    "job_failure",
    "normalize_outcome",
    "parse_step_address",
    "plan_insert",
    "reason_text",
    "seconds",
    "shown_error",
    "spec_of",
    "step",
    "step_address",
    "traceback_text",
]

# Tracebacks, reprs and help() show the public import path.
for _public in (
    Approval, Await, Cancel, Cancellation, Child, ChildView, Context, Decision, Done, Error, InsertOptions, Machine,
    Next, Pause, Retry, ScheduleChildren, Signal, Stop, job, step,
):  # fmt: skip
    _public.__module__ = "durable_actors"
