"""Every exception this package raises, split by who must act.

::

    DurableError
    ├── ConfigError             the operator: an option or its value is wrong
    ├── DefinitionError         the author: a machine, step or job is defined wrongly
    ├── StateError              the author or the data: a state, result or payload does not fit its type
    ├── InvalidOutcome          the author: a step returned something that is not an outcome
    ├── StepTimeout             (also TimeoutError) the step ran longer than its timeout
    ├── UnknownMachine          the caller: no such machine or version is registered here
    ├── Duplicate               the caller: the unique key is occupied
    ├── Conflict                the caller: what is there already does not allow it
    ├── NoTarget                the caller: the instance is terminal or does not exist
    ├── InstanceFailed          the caller: the awaited instance ended as failed
    ├── TooManyChildren         the author: a step has more children than `ctx.children` holds
    ├── LeaseLost               the engine: this worker no longer owns the claim
    ├── SchemaError             the operator: the database's schema does not fit this version
    └── StoreUnavailable        nobody: Postgres cannot be reached now; nothing was done
        ├── PoolTimeout         no connection became free in time; nothing was done
        └── CommitUnknown       the connection was lost after the commit was sent: done or not, unknown
"""

from __future__ import annotations


class DurableError(Exception):
    """Base of all errors of this package."""


class ConfigError(DurableError, ValueError):
    """An option has a value that cannot work. The text names the option and the value.

    Raised before anything is written. Fix the configuration.
    """

    def __init__(self, text: str, *, option: str | None = None, value: object = None) -> None:
        super().__init__(text)
        self.option = option
        """The option's name, where one option is to blame."""
        self.value = value
        """The value that was refused."""


class DefinitionError(DurableError, TypeError):
    """A machine, step or job is defined wrongly. Raised when the class is made or registered."""


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
        """The machine's name, where one is involved."""
        self.version = version
        """Its version."""
        self.step = step
        """The step that made, or should read, the value."""
        self.path = path
        """Where in the value, e.g. `$.items[3].price`."""


class InvalidOutcome(DurableError, TypeError):  # noqa: N818 - the contract's name
    """A step or `handle` returned something that is not a valid outcome."""


class StepTimeout(DurableError, TimeoutError):  # noqa: N818 - the contract's name
    """A step ran longer than its own `timeout`. It goes through `handle` like any exception."""


class UnknownMachine(DurableError, LookupError):  # noqa: N818 - the contract's name
    """No machine of that name and version is registered in this process."""


class Duplicate(DurableError):  # noqa: N818 - the contract's name
    """The unique key is occupied by another instance."""

    def __init__(self, key: str | bytes, existing_id: int | None) -> None:
        super().__init__(key, existing_id)
        self.key = key
        """The unique key as the caller gave it."""
        self.existing_id = existing_id
        """The instance that occupies it; None when it cannot be seen (row security, a trigger that drops inserts)."""

    def __str__(self) -> str:
        owner = "an instance not visible here" if self.existing_id is None else f"instance {self.existing_id}"
        return f"unique key {self.key!r} is occupied by {owner}"


class Conflict(DurableError):  # noqa: N818 - the contract's name
    """What is there already does not allow this call; the text says what it is. Nothing was written.

    Raised by `ctx.start_child` when this step has started a child of the same identity with other arguments.
    """


class NoTarget(DurableError, LookupError):  # noqa: N818 - the contract's name
    """The addressed instance does not exist or is terminal. Nothing was written."""


class InstanceFailed(DurableError):  # noqa: N818 - the contract's name
    """The instance whose result was awaited ended as failed."""

    def __init__(self, id: int, reason: str) -> None:  # noqa: A002 - the contract's name
        super().__init__(id, reason)
        self.id = id
        """The failed instance."""
        self.reason = reason
        """Its `last_error`."""

    def __str__(self) -> str:
        return f"instance {self.id} failed: {self.reason}"


class TooManyChildren(DurableError):  # noqa: N818 - the contract's name
    """A step read `ctx.children`, and its barrier has more children than that holds: a short list would mislead."""

    def __init__(self, id: int, count: int, most: int) -> None:  # noqa: A002 - as in `InstanceFailed`
        super().__init__(id, count, most)
        self.id = id
        """The parent."""
        self.count = count
        """Its children at this barrier."""
        self.most = most
        """So many `ctx.children` holds at most."""

    def __str__(self) -> str:
        return (
            f"instance {self.id} has {self.count:,} children at this barrier, and ctx.children holds up to "
            f"{self.most:,}: use `async for child in ctx.iter_children()`, or ctx.children_counts"
        )


class LeaseLost(DurableError):  # noqa: N818 - the contract's name
    """This worker no longer owns the claim; nothing of the step was committed."""


class SchemaError(DurableError):
    """The schema in the database does not fit this version of the package. The text tells the remedy."""


class StoreUnavailable(DurableError):  # noqa: N818 - the contract's name
    """Postgres cannot be reached or refused the connection. What was asked was *not* done; try again."""


class PoolTimeout(StoreUnavailable):
    """No connection of the lane became free in time, or too many callers wait already."""


class CommitUnknown(StoreUnavailable):
    """The connection was lost after the commit was sent: it may have happened or not.

    Read back before repeating, or make the operation idempotent (`unique_key`, `dedup_key`).
    """
