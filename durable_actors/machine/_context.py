"""What a step is given: the instance as it was claimed, and a small door to the engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, Protocol, Unpack, overload

import attrs

from durable_actors.errors import DurableError, TooManyChildren
from durable_actors.machine._insert_options import InsertOptions, OnDuplicate, RowOptions, Status
from durable_actors.machine._spec import MachineRef

if TYPE_CHECKING:
    # A bare `da.Context` means Context[Any]. Defaults of type variables (PEP 696) reach `typing` in 3.13
    # only, and checkers know typing_extensions without its being installed.
    from typing_extensions import TypeVar

    S_co = TypeVar("S_co", covariant=True, default=Any)
else:
    from typing import TypeVar

    S_co = TypeVar("S_co", covariant=True)


MOST_CHILDREN: Final = 10_000
"""Children that `ctx.children` holds at most."""


@attrs.frozen
class Signal:
    """A durable message in an instance's inbox."""

    id: int
    """Grows with arrival; give it to `consume=`."""
    name: str
    """What `Await` matches."""
    payload: Any = None
    """The JSON value that was sent."""
    dedup_key: str | None = None
    """The sender's key, if any."""
    inserted_at: datetime | None = None
    """When it arrived, by the database's clock."""


@attrs.frozen
class ChildView:
    """A child of this instance, as its barrier sees it."""

    id: int
    """The child's instance id."""
    machine: str
    """Its machine's name."""
    status: Status
    """`done` and `failed` are final."""
    result: Any = None
    """What `Done(result)` gave, when it is done."""
    last_error: str | None = None
    """Why it failed, when it failed."""


class ContextPort(Protocol):
    """The engine's side of `Context`: one object per engine, shared by all contexts, so a step costs none."""

    def insert(
        self, ctx: Context[Any], machine: MachineRef, options: InsertOptions, /
    ) -> Coroutine[Any, Any, int | None]:
        """Insert an instance; None when its key is occupied and `on_duplicate` is "skip"."""
        ...

    def signal(
        self, ctx: Context[Any], target: int | str, name: str, payload: object, dedup_key: str | None, /
    ) -> Coroutine[Any, Any, None]:
        """Send a signal to an instance, by id or unique key."""
        ...

    def start_child(
        self, ctx: Context[Any], machine: MachineRef, key: str, options: RowOptions, /
    ) -> Coroutine[Any, Any, int]:
        """Start a child, or find the one that an earlier run of this step started."""
        ...

    def iter_signals(self, ctx: Context[Any], /) -> AsyncIterator[Signal]:
        """The whole inbox, oldest first."""
        ...

    def iter_children(self, ctx: Context[Any], /) -> AsyncIterator[ChildView]:
        """All children of the barrier, in spawn order."""
        ...


# Without slots: one is made per step, see `of`.
@attrs.frozen(eq=False, kw_only=True, slots=False)
class Context(Generic[S_co]):
    """One run of one step: what the instance looked like when the step began. Read-only.

    In your tests, make one by hand: `Context(state=Order(42), step="ship")`.
    """

    state: S_co
    """The state, decoded. In `handle`, after a state that does not decode: the raw JSON value."""
    id: int = 0
    """The instance."""
    machine: str = ""
    """The machine's name."""
    version: int = 1
    """The version that this instance runs."""
    step: str = ""
    """The step's name."""
    attempt: int = 0
    """How often this visit of the step was run before: 0 on the first run."""
    visit: int = 1
    """Counts up on every transition into a step."""
    signals: tuple[Signal, ...] = ()
    """The inbox when the step began, oldest first: all of it up to 1,000, see `more_signals`.

    Every signal that was acknowledged before the step began is in it, also when its claim waited for a slot. One that
    comes in the moment (mostly milliseconds, 0.25 s at most) between the claim of a row that nobody had signalled and a
    step that begins at once may be seen by the next step only.
    """
    awaited: tuple[Signal, ...] = ()
    """The signals that matched the await which led to this run: all up to 1,000, see `more_signals`. Empty on a first
    run and after a timeout."""
    more_signals: bool = False
    """Whether the inbox has more than 1,000 signals, so that `signals` and perhaps `awaited` are its beginning only:
    `iter_signals()` gives all."""
    _children: tuple[ChildView, ...] | None = attrs.field(default=(), alias="children")
    _children_counts: Mapping[Status, int] | None = attrs.field(default=None, alias="children_counts")
    parent_id: int | None = None
    """The instance that started this one as a child."""
    claim_id: object = None
    """The claim under which this run happens; for logs. It is not the secret that fences the commit."""
    in_handle: bool = False
    """Whether this is the context that `handle` was given."""
    port: ContextPort | None = attrs.field(default=None, repr=False)
    """The engine's door; None outside of an engine."""

    @property
    def children(self) -> tuple[ChildView, ...]:
        """This barrier's children in spawn order: all of them, up to 10,000.

        Beyond that it raises `TooManyChildren`; `iter_children()` gives all, `children_counts` counts them.
        """
        if self._children is None:
            raise TooManyChildren(self.id, sum(self.children_counts.values()), MOST_CHILDREN)
        return self._children

    @property
    def children_counts(self) -> Mapping[Status, int]:
        """How many of this barrier's children have which status, however many they are; 0 for all others."""
        if self._children_counts is not None:
            return self._children_counts
        return Counter(child.status for child in self._children or ())

    @property
    def idempotency_key(self) -> str:
        """The same text in every run of this visit (retry, same-step await, crash), and in no other.

        Hand it to whatever the step calls, so that a second run is recognised there.
        """
        return f"{self.id}/{self.visit}/{self.step}"

    @overload
    async def insert(
        self,
        machine: MachineRef,
        *,
        on_duplicate: Literal["raise", "return"] = "raise",
        **options: Unpack[RowOptions],
    ) -> int: ...
    @overload
    async def insert(
        self, machine: MachineRef, *, on_duplicate: OnDuplicate = "raise", **options: Unpack[RowOptions]
    ) -> int | None: ...
    async def insert(self, machine: MachineRef, **options: Unpack[InsertOptions]) -> int | None:
        """Insert another instance, fenced by this claim; raises `Duplicate` when its unique key is occupied.

        `on_duplicate="return"` gives the existing id instead, `"skip"` None.
        It is committed at once, not with the step's outcome. A crash re-run finds what it inserted; the run after a
        committed `Retry` or same-step `Await` inserts anew, unless its `unique_key` is occupied.
        """
        return await self._door("insert").insert(self, machine, options)

    async def signal(
        self, target: int | str, name: str, payload: object = None, *, dedup_key: str | None = None
    ) -> None:
        """Send a signal to an instance, by id or unique key.

        It is committed at once, not with the step's outcome. A crash re-run does not send it twice; the run after a
        committed `Retry` or same-step `Await` sends anew, unless a `dedup_key` says that it is the same.
        """
        await self._door("signal").signal(self, target, name, payload, dedup_key)

    async def start_child(self, machine: MachineRef, *, key: str, **options: Unpack[RowOptions]) -> int:
        """Start a child, identified by (this instance, step, machine, its first step, `key`); a re-run finds it.

        A call of the same identity with other arguments (`state` or `args`, `partition_key`, `unique_key`) raises
        `Conflict`: it would neither start what it asks for nor find it.
        Raises `Duplicate` when another instance occupies its `unique_key`.
        """
        return await self._door("start_child").start_child(self, machine, key, options)

    def iter_signals(self) -> AsyncIterator[Signal]:
        """All signals of the inbox, oldest first, also beyond the first 1,000."""
        return self._door("iter_signals").iter_signals(self)

    def iter_children(self) -> AsyncIterator[ChildView]:
        """All children of this barrier in spawn order, however many, read in pages."""
        return self._door("iter_children").iter_children(self)

    @classmethod
    def of(cls, fields: dict[str, Any]) -> Context[Any]:
        """Make one of all its fields, which it keeps. For the engine: the usual way takes 3 µs, this one 1."""
        ctx = cls.__new__(cls)
        object.__setattr__(ctx, "__dict__", fields)
        return ctx

    def for_handle(self) -> Context[S_co]:
        """Return the context that `handle` gets: the same, without signals, awaited and children."""
        if self.in_handle:
            return self
        return attrs.evolve(
            self,
            signals=(),
            awaited=(),
            more_signals=False,
            children=(),
            children_counts=None,
            in_handle=True,
        )

    def _door(self, method: str) -> ContextPort:
        if self.port is None:
            raise DurableError(
                f"ctx.{method}() needs a running engine, and this context was made without one. "
                "In a unit test pass Context(port=...) with your own stand-in."
            )
        return self.port
