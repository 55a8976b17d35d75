"""Machines, steps, jobs, outcomes and contexts: what users write. Pure: no I/O, no clock, no Trio.

Layout, in reading order::

    _outcome, _outcome_parts        what a step returns, and the checks of its parts
    _child                          children, and which of them come after which
    _step_ref, _step                @step and references to steps
    _context                        what a step receives; ContextPort is the engine's side of it
    _machine, _job                  Machine and @job: what users write
    _workflow, _task, _task_ref     Workflow and @task: a graph of jobs
    _workflow_definition,           its steps and tasks as MachineSpecs; running it again from a task
    _workflow_rerun
    _definition, _step_collection,  from a class or function to a MachineSpec; all DefinitionErrors
    _declared_state, _job_form
    _spec                           MachineSpec: the form in which the engine sees a machine or job
    _registry                       {(name, version): MachineSpec}
    _codec, _state_type, _diagnosis state to JSON and back; which types can be stored; which part of a value cannot
    _foreign_class                  objects whose class differs from the declared type
    _normalize, _reason, _backoff   returned value or error to outcome; text of a failure; delay of a retry
    _insert_options, _insert_plan,  the options of a new instance, and the row made from them
    _labels
    _flow, _flow_source,            which step leads to which, from the source; the diagram of a machine
    _flow_diagram
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
from durable_actors.machine._backoff import Backoff, default_backoff
from durable_actors.machine._checks import Duration, seconds
from durable_actors.machine._child import Child
from durable_actors.machine._codec import StateCodec, canonical_json, decode_json, decode_or_text, encode_json
from durable_actors.machine._context import (
    MOST_CHILDREN,
    NO_DEPENDENCIES,
    Cancellation,
    ChildView,
    Context,
    ContextPort,
    Decision,
    ScheduledRun,
    Signal,
)
from durable_actors.machine._flow import End
from durable_actors.machine._flow_diagram import (
    Passage,
    Standing,
    draw_machine,
    draw_observed,
    draw_workflow,
    machine_graph,
)
from durable_actors.machine._insert_options import (
    ENDED,
    InsertOptions,
    InsertRows,
    OnDuplicate,
    RowOptions,
    Status,
)
from durable_actors.machine._insert_plan import InsertPlan, check_step, plan_insert
from durable_actors.machine._job import Job, job
from durable_actors.machine._labels import Labels
from durable_actors.machine._machine import Machine
from durable_actors.machine._normalize import (
    exhausted,
    job_failure,
    most_attempts,
    normalize_outcome,
    step_failure,
)
from durable_actors.machine._outcome import (
    KEEP,
    Approval,
    Await,
    Cancel,
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
    Defined,
    HandleSpec,
    MachineRef,
    MachineSpec,
    StepSpec,
    TaskSpec,
    parse_step_address,
    spec_of,
    step_address,
)
from durable_actors.machine._step import BoundStep, Step, step
from durable_actors.machine._step_ref import StepRef
from durable_actors.machine._task import BoundTask, Task, task
from durable_actors.machine._task_ref import TaskRef
from durable_actors.machine._workflow import Workflow
from durable_actors.machine._workflow_definition import CARRIED, failed_task, owns_task
from durable_actors.machine._workflow_rerun import RERUN, START, first_state, run_again, split_state

__all__ = [
    "CARRIED",
    "CLAIMS",
    "ENDED",
    "FAILURES",
    "FULL",
    "KEEP",
    "MOST_CHILDREN",
    "NO_DEPENDENCIES",
    "OFF",
    "OUTCOMES",
    "RERUN",
    "START",
    "Approval",
    "Await",
    "Backoff",
    "BoundStep",
    "BoundTask",
    "Cancel",
    "Cancellation",
    "Child",
    "ChildView",
    "Context",
    "ContextPort",
    "Decision",
    "Defined",
    "Done",
    "Duration",
    "End",
    "Error",
    "HandleSpec",
    "InsertOptions",
    "InsertPlan",
    "InsertRows",
    "Job",
    "JournalLevel",
    "Keep",
    "Labels",
    "Machine",
    "MachineRef",
    "MachineSpec",
    "Next",
    "OnDuplicate",
    "Outcome",
    "Passage",
    "Pause",
    "Registry",
    "Replay",
    "Retry",
    "RowOptions",
    "ScheduleChildren",
    "ScheduledRun",
    "Signal",
    "Standing",
    "StateCodec",
    "Status",
    "Step",
    "StepRef",
    "StepSpec",
    "Stop",
    "Task",
    "TaskRef",
    "TaskSpec",
    "Workflow",
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
    "draw_machine",
    "draw_observed",
    "draw_workflow",
    "encode_json",
    "error_type",
    "exhausted",
    "failed_task",
    "first_state",
    "isolated_registry",
    "job",
    "job_failure",
    "machine_graph",
    "most_attempts",
    "normalize_outcome",
    "owns_task",
    "parse_step_address",
    "plan_insert",
    "reason_text",
    "run_again",
    "seconds",
    "shown_error",
    "spec_of",
    "split_state",
    "step",
    "step_address",
    "step_failure",
    "task",
    "traceback_text",
]

# Tracebacks, reprs and help() show the public import path.
for _public in (
    Approval, Await, Backoff, Cancel, Cancellation, Child, ChildView, Context, Decision, Done, Error, InsertOptions,
    Machine, Next, Pause, Retry, ScheduleChildren, ScheduledRun, Signal, Stop, Workflow, job, machine_graph, step, task,
):  # fmt: skip
    _public.__module__ = "durable_actors"
