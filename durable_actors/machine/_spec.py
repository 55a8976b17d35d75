"""The one shape in which the engine sees machines and jobs.

A class with steps, a class with `perform` and a decorated function all become a `MachineSpec`; a job is a
machine with the one step "perform". Nothing below this module knows how the user wrote it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib.machinery import ModuleSpec
from typing import Any, Literal, Protocol, TypeGuard, runtime_checkable

import attrs

from durable_actors.machine._checks import SEPARATOR, Duration
from durable_actors.machine._codec import StateCodec

Kind = Literal["machine", "job"]
Identity = tuple[str, str]
"""`(module, qualified name)`: which source text made a definition. Equal identities are a reload."""


@attrs.frozen(eq=False)
class StepSpec:
    """One step, ready to be called."""

    name: str
    """As stored in the row."""
    func: Callable[..., Any]
    """The user's function."""
    call: Callable[[Any], Any] = attrs.field(repr=False)
    """Context in, outcome out (an awaitable of it when `is_async`). Each call gets its own machine object."""
    is_async: bool
    """`async def`: runs on the Trio loop. Otherwise in a worker thread."""
    timeout: float | None = None
    """Seconds after which the run is cancelled with `StepTimeout`."""
    wants_ctx: bool = True
    """False for a job that takes only its arguments."""


@attrs.frozen(eq=False)
class HandleSpec:
    """A machine's `handle`, ready to be called with (error, context)."""

    call: Callable[[Exception, Any], Any] = attrs.field(repr=False)
    is_async: bool
    is_default: bool
    """The inherited `Stop(error)`: pure, may be called anywhere."""


@attrs.frozen(eq=False)
class MachineSpec:
    """A machine or job as the registry holds it and the engine runs it."""

    name: str
    """The row's `fsm`."""
    version: int
    """The row's `fsm_version`."""
    kind: Kind
    """"machine": outcomes and `handle`. "job": values, `max_attempts` and back-off."""
    queue: str
    """Where instances go unless the insert says otherwise."""
    initial: str
    """The step in which an instance begins."""
    steps: Mapping[str, StepSpec]
    """By name."""
    codec: StateCodec = attrs.field(repr=False)
    """State (a job's arguments) to bytes and back."""
    handle: HandleSpec
    """What turns an error into an outcome. Never called for a job."""
    max_attempts: int | None
    """Executions of a job before it fails; None for a machine, whose retries are uncapped."""
    backoff: Callable[[int], Duration] | None
    """A job's own delay by attempt; None for the default."""
    run_ahead: bool
    """Whether a committed `Next` may run at once on the same claim."""
    definition: Any = attrs.field(repr=False)
    """The class, or the `Job`."""
    identity: Identity
    lineage: frozenset[Identity] = attrs.field(repr=False)
    """The identities of all classes it inherits from: whose step references it accepts."""

    @property
    def key(self) -> tuple[str, int]:
        """The registry's key: name and version."""
        return (self.name, self.version)

    @property
    def addresses(self) -> list[str]:
        """The addresses of its steps: what a node that has this definition can run."""
        return [step_address(self.name, self.version, step) for step in self.steps]

    def __str__(self) -> str:
        return f"{self.name} v{self.version}"


def step_address(machine: str, version: int, step: str) -> str:
    """A step of a machine as the pick knows it. Unambiguous: names of definitions do not contain the separator."""
    return f"{machine}{SEPARATOR}{version}{SEPARATOR}{step}"


def parse_step_address(address: str) -> tuple[str, int, str] | None:
    """Machine, version and step; None when a row that a hand wrote has the separator in its names."""
    parts = address.split(SEPARATOR)
    return (parts[0], int(parts[1]), parts[2]) if len(parts) == 3 else None


@runtime_checkable
class Defined(Protocol):
    """A machine class or a job function: something that carries a definition."""

    @property
    def __durable__(self) -> MachineSpec | None:
        """The definition; None for an abstract base, which cannot be started."""


MachineRef = Defined | str
"""How a caller names a machine: the class, the job, or the registered name."""


def spec_of(value: object) -> MachineSpec | None:
    """Return the definition that a class or job carries itself, or None.

    An object of a machine, or a wrapper around a job, shows the attribute too, but is not what was defined.
    """
    spec: object = getattr(value, "__durable__", None)
    return spec if isinstance(spec, MachineSpec) and spec.definition is value else None


def is_machine_ref(value: object) -> TypeGuard[MachineRef]:
    """Whether `value` can name a machine: a concrete machine class, a job, or a name."""
    return isinstance(value, str) or spec_of(value) is not None


def identity_of(definition: Any) -> Identity:
    """Tell which source text made a class or function.

    A module run by `python -m shop.app` is called `__main__`, yet a worker imports it as `shop.app`: both
    must give their machines the same name. A script run by its path has no other name than `__main__`.
    """
    module: str = definition.__module__
    if module in {"__main__", "__mp_main__"}:  # the second is a multiprocessing child's name for the first
        found = getattr(sys.modules.get("__main__"), "__spec__", None)
        module = found.name if isinstance(found, ModuleSpec) else "__main__"
    return module, definition.__qualname__
