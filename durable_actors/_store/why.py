"""Why an instance waits, runs or has ended: `Explanation`, as a function of what was read. Pure.

`explain_observed` says "ready" for exactly the rows that the pick takes if nothing is ahead of them, nothing is locked
and a slot is free. Whether a row is on offer, is due and keeps its place in its key is decided by the pick's own SQL
functions (`durable.offered`, `durable.due`, `durable.keeps_place`); which node can run it is decided node by node, as
the pick does. tests/store/test_explain_property.py compares the two on random tables.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Final

import attrs

from durable_actors._store import paused as paused_texts
from durable_actors._store.cancelled import ended_by, underway
from durable_actors._store.evidence import evidence_of
from durable_actors._store.explanation import Blocker, Explanation, Reason
from durable_actors._store.holds import HELD, PAUSED, REASONS, SHELVED, THROTTLED, WAITING
from durable_actors._store.limit_texts import throttled
from durable_actors._store.next_actions import next_actions
from durable_actors._store.observe import LEVELS, InstanceDetails, NodeView, Observed, Sibling
from durable_actors._store.parked import asked, awaited, barrier_of
from durable_actors._store.pauses import pause_target
from durable_actors._store.read import Instance
from durable_actors._store.releases import COMMANDS, LiveNode
from durable_actors._wording import seconds
from durable_actors.machine import ENDED, current_registry, failed_task, most_attempts

_HOLDS: Final[dict[int, Reason]] = {
    PAUSED: "paused",
    WAITING: "awaiting_dependencies",
    THROTTLED: "throttled",
}


def why(instance: Instance, around: InstanceDetails, nodes: Sequence[NodeView]) -> str:
    """Return a sentence that says what the instance waits for, from its row, its siblings and the nodes."""
    return explain_observed(Observed(instance, around), nodes).summary


def runs(instance: Instance) -> int:
    """Return how often the step has run in this visit, including a current run. `attempt` counts from 0."""
    return instance.attempt + (instance.status == "executing" or instance.status in ENDED)


def explain_observed(
    observed: Observed,
    nodes: Sequence[NodeView],
    others: Mapping[int, Observed] | None = None,
    *,
    levels: int = LEVELS,
) -> Explanation:
    """Explain an instance. `others` has its missing children, and theirs, which are explained so many levels deep."""
    instance, around = observed.instance, observed.details
    found = _find(observed, nodes)
    blockers = tuple(found.blockers)
    if found.reason == "awaiting_children":
        children = (_child(each, nodes, others or {}, levels) for each in around.missing)
        blockers = (*children, *blockers)
    elif found.reason == "awaiting_dependencies":
        needed = (_dependency(each, nodes, others or {}, levels) for each in around.upstream)
        blockers = (*needed, *blockers)
    return Explanation(
        id=instance.id,
        reason=found.reason,
        summary=found.summary if instance.status in ENDED else found.summary + underway(instance, around),
        since=_since(instance, around, found.reason),
        until=_until(observed, found.reason),
        blockers=blockers,
        next_actions=tuple(next_actions(instance, around, found.reason, blockers)),
        evidence=evidence_of(instance, around, _machine(instance)),
    )


@attrs.frozen
class _Found:
    reason: Reason
    summary: str
    blockers: Sequence[Blocker] = ()


def _find(observed: Observed, nodes: Sequence[NodeView]) -> _Found:  # noqa: PLR0911 - one per case
    instance, around = observed.instance, observed.details
    match instance.status:
        case "done":
            return _Found("done", "it has ended: done")
        case "failed" | "cancelled":
            task = failed_task(instance.step, instance.last_error)
            again = f"`durable-actors retry {instance.id}` runs it again"
            if task is not None:
                again = f"`durable-actors rerun {instance.id} --step {task}` runs it again from there"
            by = ended_by(instance, around) if instance.status == "cancelled" else ""
            ended = f"it has ended: {instance.status} in step {instance.step!r}{by}"
            return _Found(instance.status, f"{ended}; {again}")
        case "executing":
            return _running(instance, around, nodes)
        case "awaiting_signal" if instance.boundary is not None:
            kind: Reason = "awaiting_approval" if instance.boundary.kind == "approval" else "awaiting_proceed"
            person = Blocker(kind="person", name="", text="a person has to decide")
            summary = asked(instance.boundary, _deadline(around))
            return _Found(kind, summary, [person, *_overdue(instance, around, nodes)])
        case "awaiting_signal":
            names = ", ".join(map(repr, around.awaits))
            text = f"it awaits a signal named {names}{_deadline(around)}, then runs step {_then(instance, around)}"
            if around.lost:
                text += "; one is in its inbox and did not wake it: `durable-actors recover` does"
            signals = [
                Blocker(kind="signal", name=name, text=awaited(name, around)) for name in around.awaits
            ]
            return _Found("awaiting_signal", text, [*signals, *_overdue(instance, around, nodes)])
        case "awaiting_children":
            text = (
                f"it waits for {around.children_pending} more of {around.children_total} children"
                f"{_deadline(around)}, then runs step {_then(instance, around)}{barrier_of(around).text}"
            )
            return _Found("awaiting_children", text, _overdue(instance, around, nodes))
        case "runnable":
            return _waiting(instance, around, nodes)


# -- parked


def _then(instance: Instance, around: InstanceDetails) -> str:
    return repr(around.await_step or instance.step)


def _deadline(around: InstanceDetails) -> str:
    if around.deadline_in is None:
        return ""
    if around.deadline_in <= 0:
        return f", its deadline passed {seconds(-around.deadline_in)} ago (a node that serves its queue wakes it)"
    return f" until its deadline in {seconds(around.deadline_in)}"


def _overdue(instance: Instance, around: InstanceDetails, nodes: Sequence[NodeView]) -> list[Blocker]:
    """The queue, if the deadline has passed and no live node serves it: such a node would wake the instance."""
    passed = around.deadline_in is not None and around.deadline_in <= 0
    return [_unserved(instance)] if passed and not _serving(instance, nodes) else []


def _child(number: int, nodes: Sequence[NodeView], others: Mapping[int, Observed], levels: int) -> Blocker:
    found = others.get(number) if levels > 0 else None
    if found is None:
        return Blocker(kind="child", name=str(number), id=number, text=f"child {number} has not ended")
    because = explain_observed(found, nodes, others, levels=levels - 1)
    text = f"child {number} ({_machine(found.instance)}) has not ended: {because.summary}"
    return Blocker(kind="child", name=str(number), id=number, text=text, because=because)


def _dependency(
    upstream: tuple[int, str | None, str],
    nodes: Sequence[NodeView],
    others: Mapping[int, Observed],
    levels: int,
) -> Blocker:
    """One that it comes after: has not ended, or did not succeed and must be retried."""
    number, key, status = upstream
    name = f"instance {number}" if key is None else f"{key} (instance {number})"
    if status in ENDED:
        ended = "was cancelled" if status == "cancelled" else "has failed"
        return Blocker(
            kind="dependency", name=key or str(number), id=number, text=f"{name} {ended}: retry it"
        )
    found = others.get(number) if levels > 0 else None
    because = None if found is None else explain_observed(found, nodes, others, levels=levels - 1)
    text = f"{name} has not ended" + ("" if because is None else f": {because.summary}")
    return Blocker(kind="dependency", name=key or str(number), id=number, text=text, because=because)


def _upstream_text(around: InstanceDetails) -> str:
    named = [f"instance {number}" if key is None else key for number, key, _ in around.upstream]
    more = around.waits - len(named)
    also = [f"{more} more"] if more > 0 and named else []
    ended = [number for number, _, status in around.upstream if status in ENDED]
    retry = (
        ""
        if not ended
        else f"; `durable-actors retry {ended[0]}` runs one of them again, which did not succeed"
    )
    return f"it waits for {', '.join([*named, *also])}, which it comes after{retry}"


# -- executing


def _running(instance: Instance, around: InstanceDetails, nodes: Sequence[NodeView]) -> _Found:
    owner, left = instance.locked_by or "?", around.lease_left or 0.0
    node = next((each for each in nodes if each.incarnation == owner), None)
    state = "unknown" if node is None else node.state
    if left <= 0:
        text = (
            f"the lease of {owner} expired {seconds(-left)} ago: the reaper of a live node releases the claim"
        )
        blocker = Blocker(kind="node", name=owner, text=f"node {owner} has not renewed its claim")
        alive = any(each.alive for each in nodes)
        return _Found("lease_expired", text if alive else f"{text}, but no node is alive", [blocker])
    if state == "alive":
        again = f" ({_run(instance, nodes)})" if instance.attempt else ""
        return _Found(
            "executing", f"it is running step {instance.step!r} on {owner}{again}", _deaf(around, node)
        )
    if state in {"unknown", "runner"}:
        what = "a runner" if state == "runner" else "a call of execute_next or a node that is not listed"
        text = (
            f"it is running step {instance.step!r} on {owner}, {what}: "
            f"its claim is released unless its lease is renewed, in {seconds(left)}"
        )
        return _Found("executing", text)
    text = (
        f"its node {owner} is {state}: its claim is released when other nodes have seen the node dead for "
        f"dead_after, at the latest when the lease expires in {seconds(left)}"
    )
    return _Found("owner_lost", text, [Blocker(kind="node", name=owner, text=f"node {owner} is {state}")])


def _deaf(around: InstanceDetails, node: NodeView | None) -> list[Blocker]:
    """The node that runs it, if a command asks something of it and its release is too old to notice."""
    if around.request is None or node is None:
        return []
    if not LiveNode(node.incarnation, node.version).ignores(COMMANDS):
        return []
    text = f"node {node.incarnation} runs durable_actors {node.version}, which ignores {COMMANDS.name}"
    return [Blocker(kind="node", name=node.incarnation, text=text)]


# -- runnable: what the pick would do with it


def _waiting(instance: Instance, around: InstanceDetails, nodes: Sequence[NodeView]) -> _Found:
    held = _HOLDS.get(instance.hold)
    if held is not None and not (held == "throttled" and _freed(around)):
        text, limit = (
            throttled(around.limit) if held == "throttled" else (paused_texts.held_text(instance, around), [])
        )
        if held == "awaiting_dependencies" and around.upstream:
            text = _upstream_text(around)
        return _Found(held, _with(text, stops := _pauses(around)), [*limit, *stops])
    serving = _serving(instance, nodes)
    knowing = [each for each in serving if each.knows(_machine(instance), instance.step)]
    nobody = [] if knowing else [_nobody(instance, serving)]
    if not around.due:
        after = f" ({_run(instance, nodes)})" if instance.attempt else ""
        when = "never, until its eligible_at is changed"
        if math.isfinite(around.eligible_in):
            when = f"in {seconds(max(around.eligible_in, 0.0))}"
        also = [*_pauses(around), *nobody]
        return _Found("scheduled", _with(f"it is scheduled: due {when}{after}", also), also)
    if stops := _pauses(around):
        return _Found("queue_paused", _with(f"it is due, but {stops[0].text}", nobody), [*stops, *nobody])
    if takers := _takers(instance, around, knowing):
        return _met(instance, around, takers)
    behind = [*_behind(instance, around, knowing)]
    if behind or instance.hold == HELD:
        return _Found(
            "waiting_for_key", _with(_for_its_key(instance, around, behind), nobody), [*behind, *nobody]
        )
    blocker = nobody[0] if nobody else _off_its_shelf(instance, around)
    so = f"{REASONS[SHELVED].explanation}; " if instance.hold == SHELVED else "it waits: "
    return _Found("unknown_step" if serving else "unserved", so + blocker.text, [blocker])


def _met(instance: Instance, around: InstanceDetails, takers: Sequence[NodeView]) -> _Found:
    """What a pick that meets it does: claim it, or throttle it."""
    if around.limit is not None and not around.limit.free:
        return _Found("throttled", *throttled(around.limit))
    return _Found("ready", _ready(instance, len(takers)) + _in_its_fair_key(instance, around, takers))


def _takers(instance: Instance, around: InstanceDetails, knowing: Sequence[NodeView]) -> list[NodeView]:
    """The nodes whose pick takes it, if nothing is ahead of it: as pick_instances.sql and judge_siblings decide it.

    Each node passes by the siblings whose step it does not have: the key may be free for one node and not for another.
    """
    if not around.due or around.key_holder is not None or around.pauses:
        return []
    if not around.offered and instance.hold not in {SHELVED, THROTTLED}:
        return []
    free = [each for each in knowing if _first_known(around, each) is None]
    return [each for each in free if _on_its_shelf(instance, around, each)]


def _freed(around: InstanceDetails) -> bool:
    """Whether the limits of a throttled row let it go: whoever looks next gives it to the pick."""
    return around.limit is not None and around.limit.free


def _serving(instance: Instance, nodes: Sequence[NodeView]) -> list[NodeView]:
    return [each for each in nodes if each.alive and instance.queue in each.queues]


def _machine(instance: Instance) -> str:
    return f"{instance.machine}/{instance.version}"


def _first_known(around: InstanceDetails, node: NodeView) -> Sibling | None:
    """The sibling that this node runs first; None if it would pass all of them by."""
    return next((each for each in around.elders if node.knows(each.machine, each.step)), None)


def _on_its_shelf(instance: Instance, around: InstanceDetails, node: NodeView) -> bool:
    """Whether the node finds it if it is shelved: by the step that it was shelved under, else by its machine."""
    if instance.hold != SHELVED or not around.shelved_step:
        return True
    return node.knows(_machine(instance), around.shelved_step)


def _ready(instance: Instance, nodes: int) -> str:
    if instance.hold == SHELVED:
        can = "1 live node" if nodes == 1 else f"{nodes} live nodes"
        return f"{REASONS[SHELVED].explanation}; {can} of queue {instance.queue!r} can run it, with the next pick"
    serve = "1 live node serves" if nodes == 1 else f"{nodes} live nodes serve"
    return f"it is due and waits for a free slot: {serve} queue {instance.queue!r}"


def _run(instance: Instance, nodes: Sequence[NodeView]) -> str:
    """Which run of the step it is, and of how many: as the insert said, else as the code of a live node says."""
    machine, most = _machine(instance), instance.max_attempts
    if most is None:
        told = (each.attempts.get(machine, {}).get(instance.step) for each in nodes if each.alive)
        most = next((each for each in told if each is not None), None)
    spec = current_registry().get(instance.machine, instance.version) if most is None else None
    if spec is not None:
        most = most_attempts(spec, instance.step, None)
    return f"run {instance.attempt + 1}" + ("" if most is None else f" of {most}")


def _in_its_fair_key(instance: Instance, around: InstanceDetails, takers: Sequence[NodeView]) -> str:
    """Its place in a fair queue: what goes first, and that the keys take turns."""
    if instance.hold == SHELVED or not any(instance.queue in each.fair for each in takers):
        return ""
    if around.fair is None:
        return ", which is fair: rows without a fair_key share one place"
    key, first = around.fair
    if not first:
        return f", which is fair: it is the next one of fair key {key!r}"
    if first == 1:
        return f", which is fair: 1 row of fair key {key!r} goes first"
    rows = f"{first} rows" if first < 1000 else "1,000 rows or more"
    return f", which is fair: {rows} of fair key {key!r} go first"


def _with(text: str, also: Sequence[Blocker]) -> str:
    return f"{text}; and {also[0].text}" if also else text


def _unserved(instance: Instance) -> Blocker:
    return Blocker(kind="queue", name=instance.queue, text=f"no live node serves queue {instance.queue!r}")


def _nobody(instance: Instance, serving: Sequence[NodeView]) -> Blocker:
    """Why no live node can run it: none serves its queue, or none of those has its machine or step."""
    if not serving:
        return _unserved(instance)
    named = ", ".join(each.incarnation for each in serving)
    verb = "does" if len(serving) == 1 else "do"
    machine = _machine(instance)
    known = any(machine in each.machines for each in serving)
    what = f"step {instance.step!r} of {machine}" if known else machine
    return Blocker(
        kind="step" if known else "machine",
        name=instance.step if known else machine,
        text=f"no live node that serves queue {instance.queue!r} knows {what} ({named} {verb} not)",
    )


def _off_its_shelf(instance: Instance, around: InstanceDetails) -> Blocker:
    step = around.shelved_step or ""
    text = f"it is shelved under step {step!r} of {_machine(instance)}, which no live node that serves its queue knows"
    return Blocker(kind="step", name=step, text=text)


def _behind(instance: Instance, around: InstanceDetails, knowing: Sequence[NodeView]) -> Iterator[Blocker]:
    """The siblings that go first: the one that runs, then those that are due."""
    key = instance.partition_key
    if around.key_holder is not None:
        number, owner = around.key_holder
        text = f"instance {number} holds partition key {key!r} on {owner}"
        yield Blocker(kind="instance", name=str(number), id=number, text=text)
    first = [_first_known(around, each) for each in knowing]
    if not knowing:  # whoever comes passes by at most those on the shelf
        first = [next((each for each in around.elders if each.hold != SHELVED), None)]
    for number in dict.fromkeys(each.id for each in first if each is not None):
        text = f"instance {number} goes first in partition key {key!r}"
        yield Blocker(kind="instance", name=str(number), id=number, text=text)


def _for_its_key(instance: Instance, around: InstanceDetails, behind: Sequence[Blocker]) -> str:
    key = instance.partition_key
    if around.key_holder is not None:
        number, owner = around.key_holder
        return f"it waits for partition key {key!r}, which instance {number} holds on {owner}"
    if behind:
        return f"it waits for partition key {key!r}: instance {behind[0].name} runs first"
    return f"{REASONS[HELD].explanation}; none is due now, so the sweep of a live node offers it again"


# -- the rest


def _pauses(around: InstanceDetails) -> list[Blocker]:
    """The pauses of its queue, and of its machine there: no pick takes it while one of them lasts."""
    return [
        Blocker(kind="pause", name=pause_target(each.queue, each.machine), text=paused_texts.queue_text(each))
        for each in around.pauses
    ]


def _since(instance: Instance, around: InstanceDetails, reason: Reason) -> datetime | None:
    if reason == "queue_paused":
        return max(instance.eligible_at, min(each.at for each in around.pauses))
    if reason == "paused" and instance.paused is not None:
        return instance.paused.at
    if reason in ENDED:
        return instance.finished_at
    judged = reason == "throttled" and instance.hold != THROTTLED  # no pick has met it yet
    if judged or reason in {"ready", "waiting_for_key", "unknown_step", "unserved"}:
        return max(instance.eligible_at, instance.inserted_at)
    return instance.updated_at


def _until(observed: Observed, reason: Reason) -> datetime | None:
    match reason:
        case "scheduled":
            return observed.instance.eligible_at
        case "awaiting_signal" | "awaiting_children" | "awaiting_approval" | "awaiting_proceed":
            return observed.details.deadline
        case "throttled":
            return None if observed.details.limit is None else observed.details.limit.until
        case "queue_paused":
            return paused_texts.pauses_end(observed.details.pauses)
        case "owner_lost":
            return observed.instance.lease_expires_at
        case _:
            return None
