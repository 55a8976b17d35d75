"""The machines that this process knows: `{(name, version): MachineSpec}`.

Definitions register themselves when Python executes them. The machine of a row is only *looked up* here; nothing
is imported or evaluated because of a name. The module-level registry is one of the two pieces of global state in the
package: a class statement has no other way to register its class.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from threading import Lock
from types import MappingProxyType
from typing import Final

from durable_actors._option_checks import shown
from durable_actors.errors import DefinitionError, UnknownMachine
from durable_actors.machine._spec import MachineRef, MachineSpec, spec_of

MAX_REPORTS: Final = 100
"""Things that are logged once, at most: rows written by hand could fill the log otherwise."""


class Registry:
    """Machines by name and version. Each change is a single assignment, so readers in other threads need no lock."""

    def __init__(self, specs: Mapping[tuple[str, int], MachineSpec] | None = None) -> None:
        self._specs: dict[tuple[str, int], MachineSpec] = dict(specs or {})
        self._lock = Lock()  # several threads may import modules at the same time
        self.generation: int = 0
        """Increases with every change, so that readers can detect one."""
        self._reported: set[tuple[object, ...]] = set()

    def register(self, spec: MachineSpec) -> None:
        """Add a definition. A reload of the same source replaces it; another definition raises `DefinitionError`."""
        with self._lock:
            known = self._specs.get(spec.key)
            if known is not None and known.identity != spec.identity:
                theirs, ours = (":".join(each.identity) for each in (known, spec))
                raise DefinitionError(
                    f"{spec} is defined twice, by {theirs} and by {ours}; "
                    "give one of them another name= or version= (old versions stay registered beside new ones)"
                )
            # A new dict, so that another thread can keep iterating over the old one.
            self._specs = {**self._specs, spec.key: spec}
            self.generation += 1

    def unregister(self, machine: MachineRef, version: int | None = None) -> None:
        """Remove a definition, for tests. A missing one is not an error."""
        spec = spec_of(machine)
        name = spec.name if spec is not None else machine
        number = spec.version if spec is not None else version
        with self._lock:
            kept = {k: v for k, v in self._specs.items() if k[0] != name or number not in {None, k[1]}}
            self._specs = kept
            self.generation += 1

    def is_news(self, found: tuple[object, ...]) -> bool:
        """Whether this is asked for the first time: what it stands for is to be logged once per process."""
        with self._lock:
            if found in self._reported or len(self._reported) >= MAX_REPORTS:
                return False
            self._reported.add(found)
            return True

    def get(self, name: str, version: int) -> MachineSpec | None:
        """Return the machine of a row, or None."""
        return self._specs.get((name, version))

    def find(self, machine: MachineRef, version: int | None = None) -> MachineSpec:
        """Return the definition of a class, a job, or a name (the newest version, unless given).

        A class or job carries its own definition, even if it is not registered here. Raises `UnknownMachine`, with
        similar names in the message.
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
        """All current definitions."""
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
    """Return names similar to `name`, the most similar first.

    Only the part after the module is compared: names of one module share the rest anyway.
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
    return f"a machine is given as its class, its job function or its name (a str), not as {shown(value)}"


_current = Registry()
_builtin: dict[tuple[str, int], MachineSpec] = {}


def add_builtin(machine: MachineRef) -> None:
    """Make a machine of this package one that every node knows, in no registry: no list of users' machines shows it."""
    spec = _current.find(machine)
    _builtin[spec.key] = spec
    _current.unregister(machine)


def builtin_queues() -> frozenset[str]:
    """Return the queues of the machines of this package. Lists for people leave them out while they are empty."""
    return frozenset(spec.queue for spec in _builtin.values())


def builtin_machines() -> Mapping[tuple[str, int], MachineSpec]:
    """Return the machines of this package."""
    return MappingProxyType(_builtin)


def current_registry() -> Registry:
    """Return the registry to which new definitions are added."""
    return _current


@contextmanager
def isolated_registry(*, empty: bool = True) -> Generator[Registry]:
    """Use another registry inside the block, for tests; `empty=False` starts with the current definitions.

    It applies to the whole process: definitions made by other threads in the meantime go here as well.
    """
    global _current  # noqa: PLW0603 - the one place where it changes
    outer = _current
    _current = Registry(None if empty else outer.specs)
    try:
        yield _current
    finally:
        _current = outer
