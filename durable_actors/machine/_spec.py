"""`MachineSpec`: the form in which the engine sees machines and jobs.

A class with steps, one with `perform`, one with tasks and a decorated function all become a `MachineSpec`; a job is a
machine with the single step "perform". The engine does not know in which form the user wrote it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import cached_property
from importlib.machinery import ModuleSpec
from types import MappingProxyType
from typing import Any, Final, Literal, Protocol, TypeGuard, runtime_checkable

import attrs

from durable_actors._journal_level import JournalLevel, journal_level
from durable_actors._scheduling.schedule import Schedule
from durable_actors.machine._backoff import Backoff
from durable_actors.machine._checks import SEPARATOR, Duration
from durable_actors.machine._codec import StateCodec
from durable_actors.machine._fingerprint import fingerprint

Kind = Literal["machine", "job"]
Identity = tuple[str, str]
"""`(module, qualified name)`: identifies the source of a definition. Equal identities mean a reload."""


@attrs.frozen(eq=False)
class StepSpec:
    """One step, ready to be called."""

    name: str
    """The name as stored in the row."""
    func: Callable[..., Any]
    """The user's function."""
    call: Callable[[Any], Any] = attrs.field(repr=False)
    """Takes a context and returns an outcome (an awaitable if `is_async`). Each call creates a machine object."""
    is_async: bool
    """Whether it is an `async def`, which runs on the Trio loop; others run in a worker thread."""
    timeout: float | None = None
    """Seconds after which the run is cancelled with `StepTimeout`."""
    wants_ctx: bool = True
    """Whether it takes the context; False for a job that takes only its arguments."""
    retry: Backoff | None = None
    """When a failed run of a machine's step is repeated before `handle` is asked; None: never."""
    limits: str | None = None
    """The limits that it uses (`_limits.text_of`), unless whoever enters it says otherwise."""


@attrs.frozen(eq=False)
class HandleSpec:
    """The `handle` of a machine, ready to be called with (error, context)."""

    call: Callable[[Exception, Any], Any] = attrs.field(repr=False)
    is_async: bool
    is_default: bool
    """Whether it is the inherited `Stop(error)`, which is pure and can be called anywhere."""


@attrs.frozen(eq=False)
class TaskSpec:
    """One task of a workflow."""

    name: str
    """The key of its child."""
    machine: MachineSpec
    """The job that its child runs."""
    after: tuple[str, ...]
    """The tasks that it comes after."""
    any_end: bool
    """Whether it runs however those end (`when="ended"`)."""


NO_TASKS: Final[Mapping[str, TaskSpec]] = MappingProxyType({})


@attrs.frozen(eq=False)
class MachineSpec:
    """A machine or job as the registry holds it and the engine runs it."""

    name: str
    """The name, stored in the column `fsm`."""
    version: int
    """The version, stored in the column `fsm_version`."""
    kind: Kind
    """"machine": outcomes and `handle`. "job": values, `max_attempts` and back-off."""
    queue: str
    """The queue of new instances, unless the insert gives another."""
    initial: str
    """The initial step."""
    steps: Mapping[str, StepSpec]
    """The steps by name."""
    codec: StateCodec = attrs.field(repr=False)
    """Encodes and decodes the state (the arguments of a job)."""
    handle: HandleSpec
    """Turns an error into an outcome. It is never called for a job."""
    max_attempts: int | None
    """The number of executions of a job before it fails; None for a machine, whose retries are not limited."""
    backoff: Callable[[int], Duration] | Backoff | None
    """The job's own back-off, or function from attempt to delay; None for the default."""
    run_ahead: bool
    """Whether the next step may run on the same claim after a committed `Next`."""
    journal: JournalLevel | None
    """How much of the history of its instances is recorded; None: what the engine says."""
    keep: float | Literal["default"] | None
    """Seconds for which its ended instances are kept; None: for ever; "default": what the engine's `Retention` says."""
    definition: Any = attrs.field(repr=False)
    """The class, or the `Job`."""
    identity: Identity
    lineage: frozenset[Identity] = attrs.field(repr=False)
    """The identities of all its base classes, whose step references it accepts."""
    on_cancel: str | None = None
    """The step that a cancelled instance enters instead of ending."""
    tasks: Mapping[str, TaskSpec] = attrs.field(default=NO_TASKS, repr=False)
    """The tasks of a workflow by name, in the order of the class; none for other machines."""

    schedule: Schedule | None = attrs.field(default=None, repr=False)
    """When instances of a job are started by themselves: `@job(cron=...)`."""

    def journal_level(self, default: JournalLevel) -> int:
        """The level that its rows store; `default` is the engine's."""
        return journal_level(default if self.journal is None else self.journal, self.kind)

    @cached_property
    def fingerprint(self) -> str:
        """A hash of its structure: names, steps and the form of the state, not the code. Raises `DefinitionError`."""
        self.codec.prepare()
        timeouts = {step.name: step.timeout for step in self.steps.values()}
        return fingerprint(
            self.name,
            self.version,
            kind=self.kind,
            initial=self.initial,
            steps=timeouts,
            state_type=self.codec.type,
            on_cancel=self.on_cancel,
            tasks=[(each.name, each.after, each.any_end) for each in self.tasks.values()],
        )

    @property
    def key(self) -> tuple[str, int]:
        """The key in the registry: name and version."""
        return (self.name, self.version)

    @property
    def addresses(self) -> list[str]:
        """The addresses of its steps, which a node with this definition can run."""
        return [step_address(self.name, self.version, step) for step in self.steps]

    def __str__(self) -> str:
        return f"{self.name} v{self.version}"


def step_address(machine: str, version: int, step: str) -> str:
    """Return the address of a step, as used by the pick. Unambiguous, since names do not contain the separator."""
    return f"{machine}{SEPARATOR}{version}{SEPARATOR}{step}"


def parse_step_address(address: str) -> tuple[str, int, str] | None:
    """Return machine, version and step; None if a row written by hand has the separator in its names."""
    parts = address.split(SEPARATOR)
    return (parts[0], int(parts[1]), parts[2]) if len(parts) == 3 else None


@runtime_checkable
class Defined(Protocol):
    """A machine class or a job: an object that carries a definition."""

    @property
    def __durable__(self) -> MachineSpec | None:
        """The definition; None for an abstract base class, which cannot be started."""


MachineRef = Defined | str
"""How a caller refers to a machine: the class, the job, or the registered name."""


def spec_of(value: object) -> MachineSpec | None:
    """Return the definition that a class or job carries, or None.

    An object of a machine class or a wrapper around a job has the attribute as well, but is not the definition.
    """
    spec: object = getattr(value, "__durable__", None)
    return spec if isinstance(spec, MachineSpec) and spec.definition is value else None


def is_machine_ref(value: object) -> TypeGuard[MachineRef]:
    """Return whether `value` refers to a machine: a concrete machine class, a job, or a name."""
    return isinstance(value, str) or spec_of(value) is not None


def identity_of(definition: Any) -> Identity:
    """Return the identity of a class or function.

    A module run by `python -m shop.app` is named `__main__`, but a worker imports it as `shop.app`: machines must
    have the same name in both. A script run by its path has no other name than `__main__`.
    """
    module: str = definition.__module__
    if module in {"__main__", "__mp_main__"}:  # the second is the name in multiprocessing children
        found = getattr(sys.modules.get("__main__"), "__spec__", None)
        module = found.name if isinstance(found, ModuleSpec) else "__main__"
    return module, definition.__qualname__
