"""Which versions and steps live instances need, and whether some code has them. Reads, and a pure judgement."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Literal

import attrs

from durable_actors._postgres.driver import encode
from durable_actors._postgres.driver.connection import PgConn
from durable_actors._postgres.driver.decode import decode_instant
from durable_actors._store.observe import NodeView
from durable_actors._store.sql import statement
from durable_actors._wording import counted
from durable_actors.errors import StateError
from durable_actors.machine import MachineSpec

Specs = Mapping[tuple[str, int], MachineSpec]
"""Definitions by name and version."""


@attrs.frozen(kw_only=True)
class StepUse:
    """A step that instances need."""

    machine: str
    version: int
    step: str
    live: int
    """Live instances that stand there, or go there next."""
    failed: int
    """Instances that failed there: a retry would run the step."""
    oldest: datetime | None
    """When the oldest live one was inserted."""
    firsts: int = 0
    """Of how many it is the first such step: the sum over all steps counts every instance once."""


@attrs.frozen(kw_only=True)
class VersionUse:
    """A version of a machine: who needs it, and who has it."""

    machine: str
    version: int
    live: int
    failed: int
    oldest: datetime | None
    steps: tuple[StepUse, ...]
    nodes: int
    """Live nodes that have it in their code."""
    in_code: bool | None
    """Whether the given modules define it; None if none were given."""
    newest: bool = True
    """Whether no higher version of the machine is known: new instances begin with it."""

    @property
    def removable(self) -> bool:
        """Whether its code can be removed: no live instance needs it. Failed ones could not be retried then."""
        return self.live == 0


@attrs.frozen(kw_only=True)
class Finding:
    """Something that a deploy of this code would break."""

    kind: Literal["machine", "step", "state"]
    machine: str
    version: int
    step: str | None
    instances: int
    """How many live instances it concerns; of states, how many of the sample."""
    text: str


async def read_step_uses(conn: PgConn, schema: str) -> list[StepUse]:
    """Read which steps instances need. Reads the whole table."""
    rows = (await conn.run(statement("count_versions", schema, read_only=True), [])).rows
    return [
        StepUse(
            machine=(machine or b"").decode(),
            version=int(version or 0),
            step=(step or b"").decode(),
            live=int(live or 0),
            firsts=int(firsts or 0),
            failed=int(failed or 0),
            oldest=decode_instant(oldest),
        )
        for machine, version, step, live, firsts, failed, oldest in rows
    ]


async def read_states(
    conn: PgConn, schema: str, machine: str, version: int, *, limit: int
) -> list[tuple[int, str, bytes]]:
    """Read id, step and state of some live instances of a version: of each step the newest ones."""
    params = [machine.encode(), encode.number(version), encode.number(limit)]
    rows = (await conn.run(statement("sample_states", schema, read_only=True), params)).rows
    return [(int(number or 0), (step or b"").decode(), state or b"null") for number, step, state in rows]


def versions_of(uses: Sequence[StepUse], nodes: Sequence[NodeView], specs: Specs | None) -> list[VersionUse]:
    """Return every version that an instance needs, or that the code has. Pure."""
    by_version: dict[tuple[str, int], list[StepUse]] = {key: [] for key in specs or {}}
    for use in uses:
        by_version.setdefault((use.machine, use.version), []).append(use)
    return [
        VersionUse(
            machine=machine,
            version=version,
            live=sum(use.firsts for use in found),
            failed=sum(use.failed for use in found),
            oldest=min((use.oldest for use in found if use.oldest is not None), default=None),
            steps=tuple(found),
            nodes=sum(each.alive and f"{machine}/{version}" in each.machines for each in nodes),
            in_code=None if specs is None else (machine, version) in specs,
            newest=not any(name == machine and other > version for name, other in by_version),
        )
        for (machine, version), found in sorted(by_version.items())
    ]


def missing_code(uses: Sequence[StepUse], specs: Specs) -> list[Finding]:
    """Return the versions and steps that live instances need and this code does not have. Pure."""
    found: list[Finding] = []
    for each in versions_of(uses, (), specs):
        spec = specs.get((each.machine, each.version))
        name = f"{each.machine} v{each.version}"
        if spec is None:
            others = sorted(version for machine, version in specs if machine == each.machine)
            noun = "version" if len(others) == 1 else "versions"
            has = f"has {noun} {', '.join(map(str, others))}" if others else "does not have the machine"
            text = f"{counted(each.live, 'live instance')} of {name}, and this code {has}: keep version {each.version}"
            found += [_finding("machine", each, None, each.live, text)] if each.live else []
            continue
        for use in each.steps:
            if use.live and use.step not in spec.steps:
                text = (
                    f"{counted(use.live, 'live instance')} of {name} in step {use.step!r}, or on the way there, and "
                    f"this code does not have that step (it has {', '.join(spec.steps)}): keep it until they have left"
                )
                found.append(_finding("step", each, use.step, use.live, text))
    return found


def unreadable_states(
    spec: MachineSpec, states: Sequence[tuple[int, str, bytes]], use: VersionUse
) -> list[Finding]:
    """Return one finding per step whose states this code cannot read. Pure, but for the user's own validators."""
    errors: dict[str, list[tuple[int, str]]] = {}
    looked: dict[str, int] = {}
    for number, step, state in states:
        looked[step] = looked.get(step, 0) + 1
        try:
            spec.codec.decode(state, step=step)
        except StateError as error:
            errors.setdefault(step, []).append((number, str(error)))
    return [
        _finding(
            "state",
            use,
            step,
            len(found),
            f"{len(found)} of {looked[step]} states that were tried do not fit this code: instance {found[0][0]}: "
            f"{found[0][1]}",
        )
        for step, found in errors.items()
    ]


def _finding(
    kind: Literal["machine", "step", "state"], use: VersionUse, step: str | None, instances: int, text: str
) -> Finding:
    return Finding(
        kind=kind, machine=use.machine, version=use.version, step=step, instances=instances, text=text
    )
