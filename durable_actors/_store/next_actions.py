"""What one can do about an instance that waits, runs or has ended. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence

from durable_actors._store import paused as paused_texts
from durable_actors._store.explanation import Blocker, NextAction, Reason
from durable_actors._store.observe import InstanceDetails
from durable_actors._store.parked import repairs_of, ways_of
from durable_actors._store.read import Instance
from durable_actors.machine import ENDED, failed_task


def next_actions(
    instance: Instance, around: InstanceDetails, reason: Reason, blockers: Sequence[Blocker]
) -> Iterator[NextAction]:
    """What one can do, the most useful first."""
    yield from _again(instance, reason)
    for text, verb, call in paused_texts.resumes(instance, around):
        yield NextAction(text=text, command=f"durable-actors {verb}", call=f"durable_actors.{call}")
    for text, verb in repairs_of(around, parked=reason in {"awaiting_signal", "awaiting_children"}):
        yield NextAction(text=text, command=f"durable-actors {verb}", call=f"durable_actors.{verb}()")
    yield from _waking(instance, around, reason)
    if reason == "ready":
        yield NextAction(
            text=f"see what is ahead of it in queue {instance.queue!r}",
            command="durable-actors queues",
        )
    if reason in {"executing", "owner_lost", "lease_expired"}:
        yield NextAction(text="see which nodes are alive", command="durable-actors nodes")
    yield from _hurry(instance, around)
    for blocker in blockers:
        yield from _about(blocker)


def _again(instance: Instance, reason: Reason) -> Iterator[NextAction]:
    """Run it once more, or sooner."""
    if (task := failed_task(instance.step, instance.last_error)) is not None and reason == "failed":
        yield NextAction(
            text=f"run it again from task {task}, with the results of the others",
            command=f"durable-actors rerun {instance.id} --step {task}",
            call=f"durable_actors.rerun({instance.id}, step={task!r})",
        )
    if reason in {"failed", "cancelled"}:
        yield NextAction(
            text="run it again from the step in which it ended",
            command=f"durable-actors retry {instance.id}",
            call=f"durable_actors.retry({instance.id})",
        )
    if reason == "scheduled":
        yield NextAction(
            text="let it run now",
            command=f"durable-actors run-now {instance.id}",
            call=f"durable_actors.run_now({instance.id})",
        )


def _waking(instance: Instance, around: InstanceDetails, reason: Reason) -> Iterator[NextAction]:
    """Give it what it waits for: a signal, a decision."""
    if reason == "awaiting_signal" and not around.lost:
        for name in around.awaits:
            yield NextAction(
                text=f"send it a signal named {name!r}",
                command=f"durable-actors signal {instance.id} {shlex.quote(name)}",
                call=f"durable_actors.signal({instance.id}, {name!r})",
            )
    if instance.boundary is not None:
        for text, verb in ways_of(instance.boundary):
            yield NextAction(
                text=text,
                command=f"durable-actors {verb} {instance.id}",
                call=f"durable_actors.{verb}({instance.id})",
            )


def _about(blocker: Blocker) -> Iterator[NextAction]:
    if blocker.kind == "dependency" and blocker.text.endswith(": retry it"):
        yield NextAction(
            text=f"run instance {blocker.id} again, which did not succeed",
            command=f"durable-actors retry {blocker.id}",
            call=f"durable_actors.retry({blocker.id})",
        )
    elif blocker.id is not None:
        yield NextAction(
            text=f"see why instance {blocker.id} has not ended",
            command=f"durable-actors why {blocker.id}",
            call=f"durable_actors.explain({blocker.id})",
        )
    elif blocker.kind == "limit":
        yield NextAction(text="see its level, and who has its slots", command="durable-actors limits")
    elif blocker.kind == "queue":
        yield NextAction(
            text=f"start a worker that serves queue {blocker.name!r}",
            command=f"durable-actors serve MODULE --queue {shlex.quote(blocker.name)}",
            call=f"durable_actors.Config(queues={{{blocker.name!r}: 10}})",
        )
    elif blocker.kind in {"machine", "step"}:
        yield NextAction(
            text=f"deploy a worker whose code has {blocker.kind} {blocker.name!r}",
            command="durable-actors nodes",
        )


def _hurry(instance: Instance, around: InstanceDetails) -> Iterator[NextAction]:
    """A cancel by force, if somebody has asked for one that is not, or it compensates."""
    asked = instance.status == "executing" and around.request is not None and around.request.cancels
    told = instance.cancellation
    compensates = told is not None and not told.ends(instance.visit) and instance.status not in ENDED
    if asked or compensates:
        yield NextAction(
            text="end it without its compensation"
            if compensates
            else "cancel it now, without waiting for its step",
            command=f"durable-actors cancel {instance.id} --force",
            call=f"durable_actors.cancel({instance.id}, force=True)",
        )
