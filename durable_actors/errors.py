"""Every exception of this package, with who has to act.

::

    DurableError
    ├── ConfigError             the operator: an option has an invalid value
    ├── DefinitionError         the author: the definition of a machine, step or job is invalid
    │   └── NotADependency      the author: a task asked for the result of one that it does not come after
    ├── StateError              the author or the data: a state, result or payload does not match its type
    ├── InvalidOutcome          the author: a step returned something that is not a valid outcome
    ├── RateLimited             the author raises it: what the step calls has told it to wait
    ├── StepTimeout             the author: a step ran longer than its timeout (also a TimeoutError)
    ├── UnknownMachine          the caller: no such machine or version is registered here
    ├── Duplicate               the caller: the unique key is occupied
    ├── Conflict                the caller: the call contradicts the current state of the instance
    │   └── RevConflict         the caller: another append to the journal came first; nothing was written
    ├── NoTarget                the caller: the instance has ended or does not exist
    ├── InstanceFailed          the caller: the instance whose result was awaited failed
    │   └── InstanceCancelled   the same: it was cancelled
    ├── TooManyChildren         the author: a step has more children than `ctx.children` holds
    ├── InvalidJournalEntry     the operator: a record of the journal is damaged or missing
    ├── ProtocolAnomaly         the operator: a fact of the journal does not fit the facts before it
    ├── LeaseLost               the engine: this worker no longer owns the claim
    ├── SchemaError             the operator: the schema of the database does not match this version
    └── StoreUnavailable        the operator: Postgres is unavailable; nothing was done
        ├── PoolTimeout         no connection became free in time; nothing was done
        └── CommitUnknown       the connection was lost during the commit: it may or may not be done
"""

from __future__ import annotations

from datetime import timedelta


class DurableError(Exception):
    """Base class of all errors of this package."""


class ConfigError(DurableError, ValueError):
    """An option has an invalid value. The message names the option and the value.

    Raised before anything is written.
    """

    def __init__(self, text: str, *, option: str | None = None, value: object = None) -> None:
        super().__init__(text)
        self.option = option
        """The name of the option, if the error concerns a single one."""
        self.value = value
        """The invalid value."""


class DefinitionError(DurableError, TypeError):
    """The definition of a machine, step or job is invalid. Raised when it is defined or registered."""


class RateLimited(DurableError):  # noqa: N818 - the contract's name
    """Raised by a step that uses a limit when what it calls has told it to wait: `RateLimited(retry_after=30)`.

    Nothing that uses the same limits and keys begins before that time is over; the step runs again then, and that is no
    attempt. In a step that uses no limit it is an error like any other.
    """

    def __init__(self, text: str = "told to wait", *, retry_after: float | timedelta) -> None:
        super().__init__(text)
        seconds = retry_after.total_seconds() if isinstance(retry_after, timedelta) else float(retry_after)
        self.retry_after = seconds if seconds > 0 else 0.0  # and NaN is none, too
        """Seconds."""


class NotADependency(DefinitionError):  # noqa: N818 - as most of its siblings
    """A task asked `ctx.result_of` for a task that it does not come after. It fails at once: a retry has it neither."""


class StateError(DurableError, ValueError):
    """A state, result, argument or payload cannot be encoded to, or decoded from, its type."""

    def __init__(
        self,
        text: str,
        *,
        machine: str | None = None,
        version: int | None = None,
        step: str | None = None,
        path: str | None = None,
    ) -> None:
        super().__init__(text)
        self.machine = machine
        """The name of the machine, if one is involved."""
        self.version = version
        """The version of the machine."""
        self.step = step
        """The step that wrote or reads the value."""
        self.path = path
        """The path inside the value, for example `$.items[3].price`."""


class InvalidOutcome(DurableError, TypeError):  # noqa: N818 - the contract's name
    """A step or `handle` returned something that is not a valid outcome."""


class StepTimeout(DurableError, TimeoutError):  # noqa: N818 - the contract's name
    """A step ran longer than its `timeout`. It is passed to `handle` like any other exception."""


class UnknownMachine(DurableError, LookupError):  # noqa: N818 - the contract's name
    """No machine with this name and version is registered in this process."""


class Duplicate(DurableError):  # noqa: N818 - the contract's name
    """The unique key is occupied by another instance."""

    def __init__(self, key: str | bytes, existing_id: int | None) -> None:
        super().__init__(key, existing_id)
        self.key = key
        """The unique key."""
        self.existing_id = existing_id
        """The instance that occupies it; None if it is not visible (row security, a trigger that drops inserts)."""

    def __str__(self) -> str:
        owner = "an instance not visible here" if self.existing_id is None else f"instance {self.existing_id}"
        return f"unique key {self.key!r} is occupied by {owner}"


class Conflict(DurableError):  # noqa: N818 - the contract's name
    """The call contradicts the current state; the message says how. Nothing was written.

    Raised by `ctx.start_child` if this step has already started a child with the same identity and other arguments, and
    by `retry` if the instance has neither failed nor been cancelled.
    """


class RevConflict(Conflict):
    """An append to a journal expected another revision than the thread has. Nothing was written: read it again."""

    def __init__(self, thread: str, expected_rev: int, actual_rev: int) -> None:
        super().__init__(thread, expected_rev, actual_rev)
        self.thread = thread
        """The name of the thread."""
        self.expected_rev = expected_rev
        """The revision that the append expected."""
        self.actual_rev = actual_rev
        """The revision of the thread."""

    def __str__(self) -> str:
        return f"{self.thread} is at revision {self.actual_rev}, the append expected {self.expected_rev}"


class NoTarget(DurableError, LookupError):  # noqa: N818 - the contract's name
    """The instance does not exist or has ended. Nothing was written."""


class InstanceFailed(DurableError):  # noqa: N818 - the contract's name
    """The instance whose result was awaited failed."""

    def __init__(self, id: int, reason: str) -> None:  # noqa: A002 - the contract's name
        super().__init__(id, reason)
        self.id = id
        """The id of the failed instance."""
        self.reason = reason
        """Its `last_error`."""

    def __str__(self) -> str:
        return f"instance {self.id} failed: {self.reason}"


class InstanceCancelled(InstanceFailed):
    """The instance whose result was awaited was cancelled."""

    def __str__(self) -> str:
        return f"instance {self.id} was cancelled: {self.reason}"


class TooManyChildren(DurableError):  # noqa: N818 - the contract's name
    """A step read `ctx.children`, but its barrier has more children than the list may hold.

    Use `ctx.iter_children()` or `ctx.children_counts` instead.
    """

    def __init__(self, id: int, count: int, most: int) -> None:  # noqa: A002 - as in `InstanceFailed`
        super().__init__(id, count, most)
        self.id = id
        """The id of the parent."""
        self.count = count
        """The number of children at this barrier."""
        self.most = most
        """The largest number of children that `ctx.children` holds."""

    def __str__(self) -> str:
        return (
            f"instance {self.id} has {self.count:,} children at this barrier, and ctx.children holds up to "
            f"{self.most:,}: use `async for child in ctx.iter_children()`, or ctx.children_counts"
        )


class InvalidJournalEntry(DurableError):  # noqa: N818 - the contract's name
    """A record of the journal is damaged or missing, so the history of its instance cannot be trusted from there on."""

    def __init__(self, instance_id: int, rev: int, reason: str) -> None:
        super().__init__(instance_id, rev, reason)
        self.instance_id = instance_id
        """The instance whose journal it is."""
        self.rev = rev
        """The revision of the record."""
        self.reason = reason
        """What is wrong with it."""

    def __str__(self) -> str:
        return f"journal of instance {self.instance_id}, revision {self.rev}: {self.reason}"


class ProtocolAnomaly(DurableError):  # noqa: N818 - the protocol's word
    """A fact of the journal does not fit the facts before it. Raised only where `on_anomaly="raise"` asks for it."""

    def __init__(self, instance_id: int, rev: int, reason: str, kind: str) -> None:
        super().__init__(instance_id, rev, reason, kind)
        self.instance_id = instance_id
        """The instance."""
        self.rev = rev
        """The revision of the record that the fact comes from."""
        self.reason = reason
        """One of `durable_actors.journal.ANOMALIES`."""
        self.kind = kind
        """The kind of the fact."""

    def __str__(self) -> str:
        return f"journal of instance {self.instance_id}, revision {self.rev}: {self.kind} is {self.reason}"


class LeaseLost(DurableError):  # noqa: N818 - the contract's name
    """This worker no longer owns the claim. Nothing of the step was committed."""


class SchemaError(DurableError):
    """The schema of the database does not match this version of the package. The message says what to do."""


class StoreUnavailable(DurableError):  # noqa: N818 - the contract's name
    """Postgres cannot be reached or refused the connection. The call was *not* done; try again."""


class PoolTimeout(StoreUnavailable):
    """No connection became free in time, or too many callers are already waiting. The call was not done."""


class CommitUnknown(StoreUnavailable):
    """The connection was lost after the commit was sent: the commit may or may not have happened.

    Read the data before you try again, or make the call idempotent with a `unique_key` or `dedup_key`.
    """
