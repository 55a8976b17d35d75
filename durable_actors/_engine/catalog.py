"""The machines and steps that this node can run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from durable_actors._option_checks import shown
from durable_actors._postgres.driver import encode
from durable_actors.machine import (
    MachineSpec,
    Registry,
    builtin_machines,
    most_attempts,
    parse_step_address,
    step_address,
)

MAX_WARNINGS: Final = 100
"""Unknown steps that a node logs, at most; rows written by hand could fill the log otherwise."""


class MachineCatalog:
    """The machines and steps that this node can run, as definitions and as a parameter of the pick.

    A class that is defined while the engine runs is known from the next pick on.
    """

    __slots__ = ("_generation", "_own", "_registry", "_specs", "_warned", "array", "names")

    def __init__(self, registry: Registry, own: Mapping[tuple[str, int], MachineSpec]) -> None:
        self._registry = registry
        self._own = dict(own)
        self._generation = -1
        self._specs: dict[tuple[str, int], MachineSpec] = {}
        self._warned: set[str] = set()
        self.names: frozenset[str] = frozenset()
        """The addresses of their steps (`step_address`): the pick claims only rows at one of these."""
        self.array = b"{}"
        """The same, as a parameter of the pick."""
        self.refresh()

    def refresh(self) -> None:
        """Add what was defined since the last call. Costs one comparison if there is nothing new."""
        if self._generation == self._registry.generation:
            return
        self._generation = self._registry.generation
        self._specs = {**builtin_machines(), **self._own, **self._registry.specs}
        steps = [address for spec in self._specs.values() for address in spec.addresses]
        self.array = encode.text_array(sorted(steps))
        # Also machines without a step: the address of a shelved row may name only its machine.
        self.names = frozenset([*steps, *(step_address(*key, "") for key in self._specs)])

    def find(self, fsm: str, version: int) -> MachineSpec | None:
        """The definition of a claimed row; None if it was removed from the registry after the pick."""
        return self._specs.get((fsm, version))

    def is_news(self, spec: MachineSpec, other: str) -> bool:
        """Whether nobody in this process has reported yet that instances were started with this other definition."""
        return self._registry.is_news((*spec.key, other, spec.fingerprint))

    @property
    def specs(self) -> tuple[MachineSpec, ...]:
        """The definitions that this node knows."""
        return tuple(self._specs.values())

    @property
    def generation(self) -> int:
        """Another number whenever there are other definitions."""
        return self._generation

    @property
    def steps(self) -> dict[str, list[str]]:
        """For people: the steps of each machine, by "name/version"."""
        return {f"{spec.name}/{spec.version}": list(spec.steps) for spec in self._specs.values()}

    @property
    def attempts(self) -> dict[str, dict[str, int]]:
        """For people: how often jobs, and steps with a retry policy, may run, by "name/version" and step."""
        found: dict[str, dict[str, int]] = {}
        for spec in self._specs.values():
            limits = {step: most_attempts(spec, step, None) for step in spec.steps}
            known = {step: most for step, most in limits.items() if most is not None}
            if known:
                found[f"{spec.name}/{spec.version}"] = known
        return found

    def explain_unknown(self, shelved: Sequence[str]) -> list[str]:
        """A sentence for each of these step addresses that this node cannot run, once per address."""
        fresh = [each for each in shelved if each not in self.names and each not in self._warned]
        del fresh[max(MAX_WARNINGS - len(self._warned), 0) :]
        self._warned.update(fresh)
        return [_unknown_text(each, self._specs) for each in fresh]


def _unknown_text(address: str, specs: Mapping[tuple[str, int], MachineSpec]) -> str:
    """Which part of an address is unknown here. Pure."""
    parsed = parse_step_address(address)
    if parsed is None:
        return f"this node does not know {shown(address)}"
    name, version, step = parsed
    spec = specs.get((name, version))
    if spec is not None:
        return (
            f"this node's code does not have step {shown(step)} of machine {shown(name)} version {version} "
            f"(it has {', '.join(spec.steps)})"
        )
    versions = sorted(each for known, each in specs if known == name)
    have = f" (it has version {', '.join(map(str, versions))})" if versions else ""
    text = f"this node does not know machine {shown(name)} version {version}{have}"
    if name.startswith("__main__:"):
        text += (
            "; it was defined in a script that was run by its path: define it in a module that this worker imports, "
            "too, or give it a name="
        )
    return text
