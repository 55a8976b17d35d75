"""Why an instance is waiting or running: the last line of `durable-actors show`. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from durable_actors._store.observe import InstanceDetails, NodeView
from durable_actors._store.read import Instance
from durable_actors.cli.output import seconds


def runs(instance: Instance) -> int:
    """Return how often the step has run in this visit, including a current run. `attempt` counts from 0."""
    return instance.attempt + (instance.status in {"executing", "done", "failed"})


def why(instance: Instance, around: InstanceDetails, nodes: Sequence[NodeView]) -> str:
    """Return a sentence that says what the instance waits for, from its row, its siblings and the nodes."""
    match instance.status:
        case "done":
            return "it has ended: done"
        case "failed":
            return f"it has ended: failed in step {instance.step!r}; `durable-actors retry {instance.id}` runs it again"
        case "executing":
            return _running(instance, around, nodes)
        case "awaiting_signal":
            names = ", ".join(map(repr, around.awaits))
            return (
                f"it awaits a signal named {names}{_until(around)}, then runs step {_then(instance, around)}"
            )
        case "awaiting_children":
            return (
                f"it waits for {around.children_pending} more of {around.children_total} children{_until(around)}, "
                f"then runs step {_then(instance, around)}"
            )
        case "runnable":
            return _waiting(instance, around, nodes)


def _then(instance: Instance, around: InstanceDetails) -> str:
    return repr(around.await_step or instance.step)


def _until(around: InstanceDetails) -> str:
    if around.deadline_in is None:
        return ""
    if around.deadline_in <= 0:
        return f", its deadline passed {seconds(-around.deadline_in)} ago (a node that serves its queue wakes it)"
    return f" until its deadline in {seconds(around.deadline_in)}"


def _running(instance: Instance, around: InstanceDetails, nodes: Sequence[NodeView]) -> str:
    owner = instance.locked_by or "?"
    left = around.lease_left or 0.0
    state = next((each.state for each in nodes if each.incarnation == owner), "unknown")
    if state == "alive" and left > 0:
        return f"it is running step {instance.step!r} on {owner}"
    if left > 0:
        return (
            f"its node {owner} is {state}: its claim is released when other nodes have seen the node dead for "
            f"dead_after, at the latest when the lease expires in {seconds(left)}"
        )
    return (
        f"the lease of {owner} expired {seconds(-left)} ago: the reaper of a live node releases the claim"
        + ("" if any(each.alive for each in nodes) else ", but no node is alive")
    )


def _waiting(instance: Instance, around: InstanceDetails, nodes: Sequence[NodeView]) -> str:
    serving = [each for each in nodes if each.alive and instance.queue in each.queues]
    machine = f"{instance.machine}/{instance.version}"
    knowing = [each for each in serving if each.knows(machine, instance.step)]
    nobody = ""
    if not serving:
        nobody = f"no live node serves queue {instance.queue!r}"
    elif not knowing:
        named = ", ".join(each.incarnation for each in serving)
        verb = "does" if len(serving) == 1 else "do"
        what = (
            f"step {instance.step!r} of {machine}"
            if any(machine in each.machines for each in serving)
            else machine
        )
        nobody = f"no live node that serves queue {instance.queue!r} knows {what} ({named} {verb} not)"
    if around.eligible_in > 0:
        after = f" (run {instance.attempt + 1})" if instance.attempt else ""
        text = f"it is scheduled: due in {seconds(around.eligible_in)}{after}"
        return f"{text}; and {nobody}" if nobody else text
    if nobody:
        shelved = "it is shelved: " if instance.hold == 2 else "it waits: "
        return shelved + nobody
    key = instance.partition_key
    if key is not None and around.key_holder is not None:
        sibling, owner = around.key_holder
        return f"it waits for partition key {key!r}, which instance {sibling} holds on {owner}"
    if key is not None and around.first_of_key not in {None, instance.id}:
        return f"it waits for partition key {key!r}: instance {around.first_of_key} runs first"
    nodes_text = "1 live node serves" if len(knowing) == 1 else f"{len(knowing)} live nodes serve"
    return f"it is due and waits for a free slot: {nodes_text} queue {instance.queue!r}"
