"""The first page: counters, what needs attention, rates, queues. Read from the newest sample: no query per viewer."""

from __future__ import annotations

from typing import Any, Final

from durable_actors._store.samples import CAP, Sample
from durable_actors.dashboard.attention import attention
from durable_actors.dashboard.desk import Desk, Nav, Page, View
from durable_actors.dashboard.drawing import bar, sparkline
from durable_actors.dashboard.web import Request


def counters(sample: Sample | None) -> list[dict[str, Any]]:
    """The numbers at the top. Each says whether it is capped or estimated. Pure."""
    if sample is None:
        return []
    more = any(each.capped for each in sample.queues)
    known = sample.statuses
    waiting = known.get("awaiting_signal", 0) + known.get("awaiting_children", 0) if known else None
    counted = (
        ("running", sample.total("executing"), "executing" in sample.partly, "status:executing"),
        ("ready", sample.total("due"), more, "status:runnable"),
        ("scheduled", sample.total("scheduled"), more, "status:runnable"),
        ("failed", sample.failed, sample.failed >= CAP, "status:failed"),
    )
    found: list[dict[str, Any]] = [
        {
            "name": name,
            "value": min(value, CAP) if capped else value,
            "capped": capped,
            "estimated": False,
            "q": q,
        }
        for name, value, capped, q in counted
    ]
    for name, value, q in (
        ("waiting", waiting, "status:awaiting_signal"),
        ("done", known.get("done", 0) if known else None, "status:done"),
    ):
        found.append({"name": name, "value": value, "capped": False, "estimated": sample.estimated, "q": q})
    return found


async def overview(desk: Desk, request: Request) -> View:
    """Show the newest sample."""
    sampler = desk.sampler
    sample = sampler.latest
    rates = sampler.rates(120)
    last = rates[-1] if rates else None
    queues = () if sample is None else sample.queues
    data = {
        "at": None if sample is None else sample.at,
        "counters": counters(sample),
        "attention": attention(sample),
        "starts_per_second": None if last is None else last[1],
        "updates_per_second": None if last is None else last[2],
        "starts_peak": max((each[1] for each in rates), default=None),
        "updates_peak": max((each[2] for each in rates), default=None),
        "queues": queues,
        "partly": () if sample is None else sample.partly,
        "nodes": () if sample is None else sample.nodes,
        "interval": sampler.interval,
        "rates_seconds": (rates[-1][0] - rates[0][0]).total_seconds() if len(rates) > 1 else None,
    }
    extra = {
        "starts": sparkline(
            [each[1] for each in rates], width=600, height=80, label="started instances per second"
        ),
        "updates": sparkline(
            [each[2] for each in rates], width=600, height=80, label="row updates per second"
        ),
        "bars": {
            each.queue: bar(
                each.executing / each.slots if each.slots else 0.0,
                label=f"{each.executing} of {each.slots} slots",
            )
            for each in queues
        },
    }
    return View(template="overview.html", title="Overview", data=data, extra=extra)


PAGES: Final = (Page(path="/", view=overview, nav=Nav("Overview", "/", "o")),)
