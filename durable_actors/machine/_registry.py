"""Which machines this process knows: `{(name, version): MachineSpec}`.

Definitions register themselves when Python executes them. A row's machine is only ever *looked up* here;
nothing is imported or evaluated because of a name. The module-level registry is one of the two pieces of
global state that the package has: a class statement has nobody to whom it could hand itself.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from threading import Lock
from types import MappingProxyType

from durable_actors._option_checks import shown
from durable_actors.errors import DefinitionError, UnknownMachine
from durable_actors.machine._spec import MachineRef, MachineSpec, spec_of


class Registry:
    """Machines by name and version. Each change is one assignment: readers in other threads are safe."""

    def __init__(self, specs: Mapping[tuple[str, int], MachineSpec] | None = None) -> None:
        self._specs: dict[tuple[str, int], MachineSpec] = dict(specs or {})
        self._lock = Lock()  # several threads may import modules; readers need no lock
        self.generation: int = 0
        """Counts up on every change, so that a reader notices one without comparing."""

    def register(self, spec: MachineSpec) -> None:
        """Add a definition. The same source text may come again (a reload replaces); another one may not."""
        with self._lock:
            known = self._specs.get(spec.key)
            if known is not None and known.identity != spec.identity:
                theirs, ours = (":".join(each.identity) for each in (known, spec))
                raise DefinitionError(
                    f"{spec} is defined twice, by {theirs} and by {ours}; "
                    "give one of them another name= or version= (old versions stay, each with its own number)"
                )
            # A new dict: a reader that iterates over the old one in another thread is not disturbed.
            self._specs = {**self._specs, spec.key: spec}
            self.generation += 1

    def unregister(self, machine: MachineRef, version: int | None = None) -> None:
        """Forget a definition, for tests. One that is not there is no error."""
        spec = spec_of(machine)
        name = spec.name if spec is not None else machine
        number = spec.version if spec is not None else version
        with self._lock:
            kept = {k: v for k, v in self._specs.items() if k[0] != name or number not in {None, k[1]}}
            self._specs = kept
            self.generation += 1

    def get(self, name: str, version: int) -> MachineSpec | None:
        """Look a row's machine up."""
        return self._specs.get((name, version))

    def find(self, machine: MachineRef, version: int | None = None) -> MachineSpec:
        """Return the definition that a caller means: by class, job, or name (newest version unless given).

        A class or job brings its own definition along, also when it is not registered here. Raises
        `UnknownMachine`, with the names that are near.
        """
        spec = spec_of(machine)
        if spec is not None:
            return spec
        if not isinstance(machine, str):
            raise UnknownMachine(_not_a_machine(machine))
        versions = [each for each in self._specs.values() if each.name == machine]
        if version is not None:
            versions = [each for each in versions if each.version == version]
        if versions:
            return max(versions, key=lambda each: each.version)
        raise UnknownMachine(self._unknown(machine, version))

    @property
    def specs(self) -> Mapping[tuple[str, int], MachineSpec]:
        """All definitions, as they are now."""
        return MappingProxyType(self._specs)

    def __len__(self) -> int:
        return len(self._specs)

    def __contains__(self, key: object) -> bool:
        return key in self._specs

    def _unknown(self, name: str, version: int | None) -> str:
        have = sorted(each.version for each in self._specs.values() if each.name == name)
        if have:
            return f"machine {shown(name)} has no version {version} here; registered are {', '.join(map(str, have))}"
        names = sorted({each.name for each in self._specs.values()})
        if near := _near(name, names):
            hint = f"did you mean {' or '.join(map(repr, near))}?"
        elif names:
            hint = f"registered are {', '.join(names[:10])}{', …' if len(names) > 10 else ''}"
        else:
            hint = "none is registered; import the module that defines it"
        return f"no machine is named {shown(name)} here: {hint}"


def _near(name: str, names: list[str]) -> list[str]:
    """The names that somebody who typed `name` may have meant, the likeliest first.

    Only the parts behind the module are compared: those of one module have that in common with any mistake.
    """
    typed = name.rpartition(":")[2]
    by_last: dict[str, list[str]] = {}
    for each in names:
        by_last.setdefault(each.rpartition(":")[2], []).append(each)
    close = get_close_matches(typed, by_last, n=3, cutoff=0.7)
    return [each for last in close for each in by_last[last]][:3]


def _not_a_machine(value: object) -> str:
    kind = type(value)
    if spec_of(kind) is not None:
        return f"pass the class {kind.__qualname__}, not an object of it"
    if isinstance(value, type):
        if hasattr(value, "__durable__"):
            return f"{value.__qualname__} is an abstract base: start one of its subclasses"
        return f"{value.__qualname__} is not a machine: inherit from da.Machine"
    if callable(value):
        return f"{shown(value)} is not a job: decorate it with @da.job"
    return f"a machine is named by its class, its job function or a str, not by {shown(value)}"


_current = Registry()


def current_registry() -> Registry:
    """Return the registry to which definitions add themselves now."""
    return _current


@contextmanager
def isolated_registry(*, empty: bool = True) -> Generator[Registry]:
    """For tests: what is defined inside is forgotten afterwards. `empty=False` begins with the known ones.

    Process-wide, not per task: definitions made by another thread meanwhile land here as well.
    """
    global _current  # noqa: PLW0603 - the one place where it changes
    outer = _current
    _current = Registry(None if empty else outer.specs)
    try:
        yield _current
    finally:
        _current = outer
