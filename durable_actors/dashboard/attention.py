"""The attention list: what somebody should look at now, from a sample. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Final, Literal

import attrs

from durable_actors._store.releases import LiveNode, older_nodes
from durable_actors._store.samples import CAP, NodeSample, QueueSample, Sample
from durable_actors._wording import counted, seconds
from durable_actors.dashboard.web import segment

Level = Literal["bad", "warn", "info"]

LATE: Final = 60.0
"""Seconds from which on a due row that waits is worth a look."""
SKEW: Final = 5.0
"""Seconds by which the clocks of this process and of the database may differ."""
STALE: Final = 60.0
"""Seconds after which a sample is old."""


@attrs.frozen(kw_only=True)
class Attention:
    """One thing to look at."""

    level: Level
    text: str
    to: str
    """The page that shows more: its path."""
    query: Mapping[str, str] = attrs.field(factory=dict[str, str])


def attention(sample: Sample | None, now: datetime | None = None) -> list[Attention]:
    """What somebody should look at, the worst first."""
    if sample is None:
        return []
    order: dict[Level, int] = {"bad": 0, "warn": 1, "info": 2}
    found = [*_clock(sample, now or datetime.now(UTC)), *_nodes(sample)]
    for queue in sample.queues:
        found += _queue(queue)
    found += _limits(sample)
    found += _people(sample)
    return sorted(found, key=lambda each: order[each.level])


def _clock(sample: Sample, now: datetime) -> Iterator[Attention]:
    behind = (now - sample.at).total_seconds()
    if behind > STALE:
        text = f"The newest sample is {seconds(behind)} old: no dashboard can read the database, or clocks differ"
        yield Attention(level="bad", text=text, to="/nodes")
    elif behind < -SKEW:
        text = f"The clock of this computer is {seconds(-behind)} behind that of the database"
        yield Attention(level="warn", text=text, to="/nodes")


def _nodes(sample: Sample) -> Iterator[Attention]:
    lost = [each for each in sample.nodes if each.state == "lost" and each.claims]
    for each in lost:
        claims = counted(each.claims, "claim")
        text = f"Node {each.incarnation} is lost and holds {claims}, which another node takes over"
        yield Attention(level="warn", text=text, to="/nodes")
    if not any(each.state in {"alive", "runner"} for each in sample.nodes):
        due = sample.total("due")
        text = f"No node is alive{f', and {_many(due)} wait' if due else ''}"
        yield Attention(level="bad" if due else "info", text=text, to="/nodes")
    for line in older_nodes(_live(sample.nodes)):
        yield Attention(level="info", text=line[:1].upper() + line[1:], to="/nodes")


def _live(nodes: tuple[NodeSample, ...]) -> list[LiveNode]:
    return [LiveNode(each.incarnation, each.version) for each in nodes if each.state == "alive"]


def _queue(queue: QueueSample) -> Iterator[Attention]:
    to, name = f"/queues/{segment(queue.queue)}", queue.queue
    pause = queue.paused_whole
    waiting = _many(queue.due, capped=queue.capped)
    if pause is not None and queue.due:
        by = f" by {pause.by}" if pause.by else ""
        text = f"Queue {name} is paused{by}, and {waiting} wait"
        yield Attention(level="warn", text=text, to=to)
    elif (queue.due or queue.throttled) and not queue.nodes:
        text = f"No live node serves queue {name}: {waiting if queue.due else _many(queue.throttled)} wait"
        yield Attention(level="bad", text=text, to=to)
    elif queue.oldest_due is not None and queue.oldest_due > LATE:
        text = f"Queue {name}: the oldest due instance has waited for {seconds(queue.oldest_due)}"
        yield Attention(level="warn", text=text, to=to)
    for each in queue.pauses:
        if each.machine is not None:
            text = f"Machine {each.machine} is paused in queue {name}"
            yield Attention(level="info", text=text, to=to)
    if queue.shelved and not queue.pauses:  # the rows of a paused machine are shelved, too
        text = f"Queue {name}: {_many(queue.shelved)} wait for a node that has their machine, version or step"
        yield Attention(level="warn", text=text, to=to)


def _limits(sample: Sample) -> Iterator[Attention]:
    for name in sample.undeclared:
        text = f"Instances wait for limit {name}, which nobody has declared"
        yield Attention(level="bad", text=text, to=f"/limits/{segment(name)}")


def _people(sample: Sample) -> Iterator[Attention]:
    asks = sample.total("asks")
    if asks:
        verb = "waits" if asks == 1 else "wait"
        yield Attention(
            level="info",
            text=f"{_many(asks)} {verb} for a person",
            to="/approvals",
        )
    if sample.failed:
        text = f"{_many(sample.failed)} failed and are kept"
        yield Attention(level="info", text=text, to="/triage")


def _many(count: int, *, capped: bool = False) -> str:
    return f"more than {CAP - 1:,} instances" if capped or count >= CAP else counted(count, "instance")
