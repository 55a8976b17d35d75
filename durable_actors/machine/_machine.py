"""`Machine`: the base class of every state machine. Subclassing it defines and registers one."""

from __future__ import annotations

import abc
from collections.abc import Awaitable
from typing import TYPE_CHECKING, Any, ClassVar, Generic

from durable_actors._journal_level import JournalLevel
from durable_actors.machine._checks import Keep
from durable_actors.machine._context import Context
from durable_actors.machine._definition import ClassKeywords, define
from durable_actors.machine._outcome import Outcome, Stop
from durable_actors.machine._registry import current_registry
from durable_actors.machine._spec import MachineSpec
from durable_actors.machine._step_ref import StepRef

if TYPE_CHECKING:
    from typing_extensions import TypeVar  # see _context.py

    StateT = TypeVar("StateT", default=dict[str, Any])
else:
    from typing import TypeVar

    StateT = TypeVar("StateT")


class Machine(Generic[StateT]):
    """A durable state machine: a class with steps. Each step returns an outcome that says what follows.

    ::

        class Checkout(da.Machine[Order], queue="checkout", version=1):
            @da.step(initial=True)
            async def begin(self, ctx: da.Context[Order]) -> da.Outcome:
                return da.Next(self.ship, attrs.evolve(ctx.state, n=1))

            @da.step
            async def ship(self, ctx: da.Context[Order]) -> da.Outcome:
                return da.Done({"order": ctx.state.order})

    Class keywords: `name` (default `module:QualName`), `version` (1), `queue` ("default"), `initial`
    ("start"), `state` (instead of the brackets), `run_ahead` (True), `journal` (how much of the history is
    recorded; default: what the engine says), `keep` (how long an ended instance is kept; None: for ever; 0: `Done`
    deletes it; default: what the engine's `Retention` says). Without a state type, a nested class
    `State` is used if there is one, otherwise the state is a dict. A class with a method `perform(self, args)` or
    `perform(self, args, ctx)` instead of steps is a job with up to `max_attempts` (20) executions; an optional
    method `backoff(self, attempt)` returns the delay between them.

    Every run of a step gets a new object, so `self` carries nothing from one step to the next; keep data in the
    state. A base class that is not a machine itself must also inherit from `abc.ABC`, or stay generic in its
    state type. Defining a class registers it; `DefinitionError` is raised if it is invalid.
    """

    __durable__: ClassVar[MachineSpec | None] = None
    __durable_keywords__: ClassVar[ClassKeywords] = ClassKeywords()

    def __init_subclass__(
        cls,
        *,
        name: str | None = None,
        version: int | None = None,
        queue: str | None = None,
        initial: str | StepRef[Any] | None = None,
        state: Any = None,
        run_ahead: bool | None = None,
        journal: JournalLevel | None = None,
        max_attempts: int | None = None,
        keep: Keep = "default",
    ) -> None:
        """Define the machine and register it; raise `DefinitionError` if the definition is invalid."""
        super().__init_subclass__()
        cls.__durable__ = None
        own = ClassKeywords(name, version, queue, initial, state, run_ahead, journal, max_attempts, keep)
        # A decorator that creates the class again (attrs, a dataclass with slots) drops the keywords.
        own = cls.__dict__.get("__durable_keywords__", own)
        bases = (each.__durable_keywords__ for each in cls.__mro__[1:] if issubclass(each, Machine))
        given = own.over(bases)
        cls.__durable_keywords__ = given
        if abc.ABC in cls.__bases__ or cls.__dict__.get("__parameters__"):
            return
        spec = cls.__durable_define__(given)
        cls.__durable__ = spec
        current_registry().register(spec)

    @classmethod
    def __durable_define__(cls, given: ClassKeywords) -> MachineSpec:
        return define(cls, Machine, given)

    def handle(self, error: Exception, ctx: Context[Any]) -> Outcome | Awaitable[Outcome]:
        """Turn an error of a step into an outcome. Override it (`async def` or `def`); the default is `Stop(error)`.

        It receives exceptions that the step raised, `StepTimeout`, `InvalidOutcome` for an invalid outcome, and
        `StateError` for a state that cannot be stored or decoded. It is not called after a crash: the step runs
        again. If `handle` raises, the instance fails.
        """
        del ctx
        return Stop(error)
