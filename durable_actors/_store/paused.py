"""What an explanation says about pauses: of the instance, of its queue, of its machine there. Texts only; pure."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from datetime import datetime

from durable_actors._store.holds import PAUSED, REASONS
from durable_actors._store.observe import InstanceDetails
from durable_actors._store.pauses import QueuePause
from durable_actors._store.read import Instance
from durable_actors._wording import seconds


def is_paused(instance: Instance) -> bool:
    """Whether a command has paused the instance; also one that a hand has held like that."""
    return instance.paused is not None or (instance.status == "runnable" and instance.hold == PAUSED)


def _by(by: str | None, reason: str | None) -> str:
    said = f" by {by}" if by else ""
    return f"{said}: {reason}" if reason else said


def held_text(instance: Instance, around: InstanceDetails) -> str:
    """Why a row is held; if it is paused: since when, by whom and why."""
    request = instance.paused
    if request is None or instance.hold != PAUSED:
        return REASONS[instance.hold].explanation
    since = "" if around.requested_ago is None else f" {seconds(around.requested_ago)} ago"
    return f"it was paused{since}{_by(request.by, request.reason)}"


def also_text(instance: Instance, around: InstanceDetails) -> str:
    """Of an instance that runs, or waits for something else: what its pause means for it."""
    request = instance.paused
    if request is None or (instance.status == "runnable" and instance.hold == PAUSED):
        return ""
    since = "" if around.requested_ago is None else f" {seconds(around.requested_ago)} ago"
    by = f" by {request.by}" if request.by else ""
    then = "when its step has ended" if instance.status == "executing" else "when it would run"
    return f"; pause requested{by}{since}: it is paused {then}"


def queue_text(pause: QueuePause) -> str:
    """What is paused, until when, by whom and why."""
    until = "" if pause.until is None else f" until {pause.until.isoformat(timespec='seconds')}"
    return f"{pause.what} is paused{until}{_by(pause.by, pause.reason)}"


def pauses_end(pauses: tuple[QueuePause, ...]) -> datetime | None:
    """When all of them have ended by themselves; None: never."""
    ends = [each.until for each in pauses]
    return None if not ends or None in ends else max(end for end in ends if end is not None)


def resumes(instance: Instance, around: InstanceDetails) -> Iterator[tuple[str, str, str]]:
    """What to do about pauses: what it does, on the command line, in Python."""
    if is_paused(instance):
        yield "let it run again", f"resume {instance.id}", f"resume({instance.id})"
    if instance.status != "runnable":
        return
    for each in around.pauses:
        machine = "" if each.machine is None else f" --machine {shlex.quote(each.machine)}"
        given = repr(each.queue) if each.machine is None else f"{each.queue!r}, {each.machine!r}"
        verb = f"queue resume {shlex.quote(each.queue)}{machine}"
        yield f"resume {each.what}", verb, f"resume_queue({given})"
