"""The dispatch protocol in pure form, and the boundary to journal storages.

::

    Record ── expand ──> Fact ── fold ──> Projection ── row_of ──> the columns of the row
      │                                       │
      └── JournalStorage: append, read        └── checkpoint

A record is written for each move of an instance, in the transaction of the move. Execution never reads it. The package
has no database in it: `fold` gives the same for the same records on every store.
"""

from durable_actors.errors import InvalidJournalEntry, ProtocolAnomaly, RevConflict
from durable_actors.journal.expand import expand, expand_all
from durable_actors.journal.facts import (
    CATALOG,
    FACTS,
    Fact,
    FactKind,
    Thread,
    dispatch_order,
    idempotency_key,
    run_thread,
    runnable_key,
)
from durable_actors.journal.fold import fold, replay
from durable_actors.journal.index import RunEntry, RunIndex, fold_indexes
from durable_actors.journal.journal import Journal
from durable_actors.journal.kinds import KINDS, LEVELS, Kind, Level, is_gapless, is_recorded, level_of
from durable_actors.journal.memory import MemoryJournal
from durable_actors.journal.projection import (
    ANOMALIES,
    NOTICES,
    REASONS,
    Anomaly,
    Attempt,
    ChildRun,
    Claim,
    Manual,
    Place,
    Projection,
    Reason,
    Receipt,
    Run,
    Wait,
)
from durable_actors.journal.records import (
    ErrorInfo,
    Record,
    check_head,
    check_record,
    check_sequence,
    decode_record,
    encode_record,
)
from durable_actors.journal.redaction import redact
from durable_actors.journal.row import COLUMNS, NOT_IN_THE_JOURNAL, differences, row_of
from durable_actors.journal.storage import (
    CHECKPOINT_FORMAT,
    Checkpoint,
    JournalStorage,
    make_checkpoint,
    usable,
)
from durable_actors.journal.verify import (
    PROBLEMS,
    InstanceCheck,
    Problem,
    ProblemReason,
    VerifyReport,
    check_instance,
)

__all__ = [
    "ANOMALIES",
    "CATALOG",
    "CHECKPOINT_FORMAT",
    "COLUMNS",
    "FACTS",
    "KINDS",
    "LEVELS",
    "NOTICES",
    "NOT_IN_THE_JOURNAL",
    "PROBLEMS",
    "REASONS",
    "Anomaly",
    "Attempt",
    "Checkpoint",
    "ChildRun",
    "Claim",
    "ErrorInfo",
    "Fact",
    "FactKind",
    "InstanceCheck",
    "InvalidJournalEntry",
    "Journal",
    "JournalStorage",
    "Kind",
    "Level",
    "Manual",
    "MemoryJournal",
    "Place",
    "Problem",
    "ProblemReason",
    "Projection",
    "ProtocolAnomaly",
    "Reason",
    "Receipt",
    "Record",
    "RevConflict",
    "Run",
    "RunEntry",
    "RunIndex",
    "Thread",
    "VerifyReport",
    "Wait",
    "check_head",
    "check_instance",
    "check_record",
    "check_sequence",
    "decode_record",
    "differences",
    "dispatch_order",
    "encode_record",
    "expand",
    "expand_all",
    "fold",
    "fold_indexes",
    "idempotency_key",
    "is_gapless",
    "is_recorded",
    "level_of",
    "make_checkpoint",
    "redact",
    "replay",
    "row_of",
    "run_thread",
    "runnable_key",
    "usable",
]
