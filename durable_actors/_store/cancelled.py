"""What `explain` says of an instance that somebody wants to cancel, that compensates, or that was cancelled. Pure."""

from __future__ import annotations

from durable_actors._store.observe import InstanceDetails
from durable_actors._store.paused import also_text
from durable_actors._store.read import Instance
from durable_actors._wording import seconds


def underway(instance: Instance, around: InstanceDetails) -> str:
    """Of a live instance: what a command asks of its node, that it compensates, that its children are cancelled."""
    text = ""
    if (request := around.request) is not None and request.pauses:
        text = also_text(instance, around)
    elif request is not None:
        since = "" if around.requested_ago is None else f" {seconds(around.requested_ago)} ago"
        text = f"; {request.kind} requested{_by(request.by)}{since}"
        if request.cancels and instance.status == "executing":
            text += " (a step in a thread runs to its end first)"
        if request.cancels and request.on_cancel is not None:
            text += f", then step {request.on_cancel!r} compensates"
    if (told := instance.cancellation) is not None and told.upstream is not None:
        text += (
            f"; instance {told.upstream}, which it comes after, did not succeed: whoever claims it cancels it"
        )
    elif told is not None and told.ends(instance.visit):
        text += f"; the limit {told.limit!r} was full: whoever claims it cancels it"
    elif told is not None:
        text += f"; it compensates: cancelled{_by(told.by)}" + (f": {told.reason}" if told.reason else "")
    return text + _cascade(around)


def ended_by(instance: Instance, around: InstanceDetails) -> str:
    """Of a cancelled instance: by which command, if it was one, and whether its children follow."""
    request, told = around.request, instance.cancellation
    text = ""
    if request is not None and request.cancels:
        text = _by(request.by) + (f": {request.reason}" if request.reason else "")
    elif told is not None and told.upstream is not None:
        text = f": instance {told.upstream}, which it came after, did not succeed"
    elif told is not None and told.ends(instance.visit):
        text = f": the limit {told.limit!r} was full"
    elif told is not None:
        text = _by(told.by) + (f": {told.reason}" if told.reason else "") + ", after its compensation"
    return text + _cascade(around)


def _by(name: str | None) -> str:
    return f" by {name}" if name else ""


def _cascade(around: InstanceDetails) -> str:
    return "; its children are being cancelled" if around.cascade else ""
