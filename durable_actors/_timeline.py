"""The history of an instance as a timeline: relative times, waits as gaps, attempts, errors. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

import attrs

from durable_actors._limits import uses_of
from durable_actors._wording import one_line, seconds
from durable_actors.journal import Record
from durable_actors.journal.verify import is_truncation

GAP: Final = 1.0
"""Seconds between two records from which on the timeline shows the wait between them."""
RAN: Final = "the step ran"
CLAIM: Final = "it waited to be claimed"
PAUSED: Final = "it was paused"
NEXT_RUN: Final = "it waited for its next run"
UPSTREAM: Final = "it waited for what it comes after"


@attrs.frozen
class Line:
    """One line of a timeline."""

    offset: str
    """The time since the first record; empty for a gap."""
    kind: str
    """The kind of the record; empty for a gap."""
    text: str
    style: str = ""
    record: Record | None = None
    """The record; None for a gap."""
    waited: float | None = None
    """Seconds, of a gap that is a wait."""
    ran: bool = False
    """Whether the step ran meanwhile, as far as the records tell."""


def timeline(
    records: Iterable[Record], damaged: Mapping[int, str] | None = None, *, after: int = 0
) -> Iterator[Line]:
    """Yield the lines of a history, oldest first; `damaged` says what is wrong with which revisions.

    `after`: the revision after which it begins.
    """
    first: Record | None = None
    last: Record | None = None
    doing: Record | None = None  # says what the instance does after it
    wrong = deque(sorted((damaged or {}).items()))
    for record in records:
        gap = last is not None and record.rev > last.rev + 1
        while wrong and wrong[0][0] <= record.rev:
            gap = False
            yield _damaged(*wrong.popleft())
        if is_truncation(record) and record.rev > (after if last is None else last.rev) + 1:
            gap = False
            yield Line("", "", f"┆ the records before revision {record.rev} were deleted by retention", "dim")
        first = first or record
        if last is not None and doing is not None:
            waited = (record.at - last.at).total_seconds()
            if waited >= GAP:
                what = _waits(doing, record, waited, unrecorded=gap)
                yield Line("", "", f"┆ {seconds(waited)} {what}", "dim", waited=waited, ran=what == RAN)
            if gap:
                missing = record.rev - last.rev - 1
                moves = "1 move was" if missing == 1 else f"{missing} moves were"
                yield Line("", "", f"┆ {moves} not recorded", "dim")
        since = (record.at - first.at).total_seconds()
        yield Line(f"+{seconds(since)}", record.kind, _text(record), _STYLES.get(record.kind, ""), record)
        last = record
        beside = record.kind in {"wakeup", "limited"} or is_truncation(record)
        if doing is None or not (beside or _runs_on(doing, record)):
            doing = record
    for rev, reason in wrong:
        yield _damaged(rev, reason)


def _damaged(rev: int, reason: str) -> Line:
    missing = reason.startswith("missing")
    text = f"┆ revision {rev} is missing" if missing else f"┆ revision {rev} is damaged: {one_line(reason)}"
    return Line("", "", text, "red")


_STYLES: Final = {
    "done": "green",
    "failed": "red",
    "crashed": "red",
    "unfit": "red",
    "reaped": "yellow",
    "retry": "yellow",
    "cancelled": "yellow",
}


def _runs_on(doing: Record, record: Record) -> bool:
    """Whether it is about a pause, while a step runs: that runs to its end."""
    return record.kind in {"paused", "resumed"} and _waits(doing, record, 0.0) == RAN


def _waits(before: Record, after: Record, waited: float, *, unrecorded: bool = False) -> str:
    """What the instance did between two records, in so many seconds; `unrecorded`: moves between them are missing."""
    found = _does(before, after)
    if found not in {CLAIM, PAUSED, NEXT_RUN, UPSTREAM}:
        return found
    if after.seconds is None:
        return (
            f"it ran, or {found.removeprefix('it ')}" if unrecorded and found in {CLAIM, UPSTREAM} else found
        )
    # An outcome, without the record of its claim: the run, and what was before it.
    if found == PAUSED or waited - after.seconds < GAP:
        return RAN
    return found if after.seconds < GAP else f"it ran, or {found.removeprefix('it ')}"


def _does(before: Record, after: Record) -> str:
    """What an instance does after a record, as far as that says it."""
    if after.kind == "reaped":
        return "its node ran the step, or was gone"
    if before.kind == "parked":
        names = _names(before.data.get("awaits", ()))
        return f"it awaited a signal named {names}" if names else "it awaited a signal"
    if before.kind == "snapshot":
        return _STANDS.get(before.data.get("row", {}).get("status"), CLAIM)
    if before.data.get("keeps_claim"):
        return RAN
    if before.data.get("hold", before.data.get("row", {}).get("hold")) == _WAITING:
        return UPSTREAM
    return _WAITS.get(before.kind, CLAIM)


_WAITING: Final = 5
"""The column `hold` of an instance that waits for what it comes after."""

_WAITS: Final = {
    "spawned": "it waited for its children",
    "child_ended": "it waited for its children",
    "recounted": "it waited for its children",
    "retry": NEXT_RUN,
    "claimed": RAN,
    "child_started": RAN,
    "held": "it waited for its partition key",
    "shelved": "it waited for a node that has its step",
    "throttled": "it waited for a limit",
    "paused": PAUSED,
    "asked": "it waited for a person",
    **dict.fromkeys(("done", "failed", "cancelled", "unfit"), "it had ended"),
}


_STANDS: Final = {
    "executing": RAN,
    "awaiting_signal": "it awaited a signal",
    "awaiting_children": "it waited for its children",
    **dict.fromkeys(("done", "failed", "cancelled"), "it had ended"),
}
"""What an instance does whose row a snapshot shows."""


def _names(names: Iterable[object]) -> str:
    return ", ".join(map(repr, names))


def _text(record: Record) -> str:
    parts = [_what(record), _run(record), _error(record), _command(record)]
    return " · ".join(part for part in parts if part)


def _what(record: Record) -> str:
    describe = _WHAT.get(record.kind)
    return (record.step or "") if describe is None else describe(record, record.data)


def _entered(record: Record, _data: Mapping[str, Any]) -> str:
    return f"→ {record.to_step}" if record.to_step else ""


def _parked(record: Record, data: Mapping[str, Any]) -> str:
    then = f" → {record.to_step}" if record.to_step else ""
    return f"{record.step}{then}, awaits {_names(data.get('awaits', ()))}{_by('deadline', data)}"


def _asked(record: Record, data: Mapping[str, Any]) -> str:
    boundary: Mapping[str, Any] = data.get("boundary") or {}
    title = f": {one_line(str(boundary['title']), limit=120)}" if boundary.get("title") else ""
    return f"{record.step} → {record.to_step}, {boundary.get('kind', '?')}{title}{_by('deadline', data)}"


def _decided(record: Record, data: Mapping[str, Any]) -> str:
    decision: Mapping[str, Any] = data.get("decision") or {}
    comment = str(decision.get("comment") or "")
    parts = (_entered(record, data), one_line(comment, limit=120))
    return ", ".join(part for part in parts if part)


def _woken(record: Record, data: Mapping[str, Any]) -> str:
    names = _names(each.get("name") for each in data.get("signals", ()))
    return _entered(record, data) + (f", signal {names}" if names else "")


def _started(record: Record, data: Mapping[str, Any]) -> str:
    row: Mapping[str, Any] = data.get("row", {})
    origin = "" if row.get("rerun_of") is None else f", rerun of instance {row['rerun_of']}"
    return f"in step {record.step}, queue {row.get('queue', '?')}{origin}"


def _child_started(record: Record, data: Mapping[str, Any]) -> str:
    child = data.get("child", {})
    who = f"instance {child.get('id', '?')} of {child.get('machine', '?')}"
    return f"{record.step}, {who}, key {child.get('key')!r}"


def _limited(record: Record, data: Mapping[str, Any]) -> str:
    columns: Mapping[str, Any] = data.get("columns") or {}
    text = columns.get("rate_limit")
    if not isinstance(text, str):
        return f"{record.step}, no limits"
    uses = uses_of(text)
    named = [f"{target} ({weight})" if weight > 1 else target for target, weight in uses.rates]
    slots = [] if uses.slot is None else [f"a slot of {uses.slot}"]
    return f"{record.step}, uses {one_line(', '.join([*named, *slots]), limit=120)}"


def _doomed(record: Record, data: Mapping[str, Any]) -> str:
    columns: Mapping[str, Any] = data.get("columns") or {}
    told: Mapping[str, Any] = columns.get("cancellation") or {}
    reason = one_line(str(told.get("reason") or ""), limit=120)
    return f"{record.step}, {reason}" if reason else record.step or ""


_SNAPSHOTS: Final[Mapping[str | None, str]] = {
    "accept": "the row was accepted as it is",
    "rebuild": "the row was wrong or gone, and is as its journal says",
}


def _snapshot(_record: Record, data: Mapping[str, Any]) -> str:
    command: Mapping[str, Any] = data.get("command") or {}
    whole = "the whole row, for retention" if data.get("retention") else "the whole row"
    return _SNAPSHOTS.get(command.get("type"), whole)


_WHAT: Final[Mapping[str, Callable[[Record, Mapping[str, Any]], str]]] = {
    "started": _started,
    "snapshot": _snapshot,
    "next": lambda record, _: f"{record.step} → {record.to_step}",
    "spawned": lambda record, data: (
        f"{record.step} → {record.to_step}, "
        + ("1 child" if data.get("children_total") == 1 else f"{data.get('children_total', '?')} children")
    ),
    "parked": _parked,
    "asked": _asked,
    **dict.fromkeys(("approved", "rejected", "proceeded", "timed_out"), _decided),
    "woken": _woken,
    "throttled": lambda record, data: f"{record.step}, by the limit {data.get('limited_by', '?')}",
    "limited": _limited,
    "doomed": _doomed,
    "compensating": lambda record, _: f"{record.step} → {record.to_step}",
    "expired": _entered,
    "joined": _entered,
    "child_ended": lambda _, data: f"{data.get('count', '?')} ended, {data.get('pending', '?')} to go",
    "child_started": _child_started,
    "retry": lambda record, data: f"{record.step}{_by('eligible_at', data, 'again at')}",
    "wakeup": lambda record, _: f"{record.step}, the notifier was told",
}


def _by(name: str, data: Mapping[str, Any], label: str = "until") -> str:
    return f", {label} {str(data[name])[:19].replace('T', ' ')}" if data.get(name) else ""


def _run(record: Record) -> str:
    if record.seconds is None and record.node is None:
        return ""
    parts = [] if record.attempt is None else [f"run {record.attempt + 1}"]
    if record.seconds is not None:
        took = f"{record.seconds * 1000:.0f} ms" if record.seconds < 1 else seconds(record.seconds)
        parts.append(took)
    if record.node is not None:
        parts.append(f"on {record.node}")
    return ", ".join(parts)


def _error(record: Record) -> str:
    return "" if record.error is None else one_line(record.error.text, limit=120)


def _command(record: Record) -> str:
    command: Mapping[str, Any] = record.data.get("command") or {}
    parts = [] if record.by is None else [f"by {record.by}"]
    if command.get("reason"):
        parts.append(one_line(str(command["reason"]), limit=80))
    return ", ".join(parts)
