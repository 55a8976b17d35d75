"""Queues: what waits and runs in each, who serves it, its pauses; pause and resume."""

from __future__ import annotations

from functools import partial
from typing import Final

from durable_actors._option_checks import queue_name
from durable_actors._postgres.driver.connection import PgConn
from durable_actors._store.commands import read_receipts_of
from durable_actors._store.fair import FairShare, read_fair_shares
from durable_actors._store.samples import QueueSample
from durable_actors.dashboard.desk import Action, Desk, Done, Form, Nav, Page, View, said
from durable_actors.dashboard.drawing import bar
from durable_actors.dashboard.forms import duration
from durable_actors.dashboard.web import Request, segment

FAIR_KEYS: Final = 100
"""Fair keys of a queue that are counted."""
SHARES: Final = 50
"""Those that the page shows: what runs most comes first."""


async def queues(desk: Desk, request: Request) -> View:
    """Show all queues, from the newest sample; `q` shows those whose name contains it."""
    sample = desk.sampler.latest
    part = request.query.get("q", "").strip()
    found = () if sample is None else tuple(each for each in sample.queues if part in each.queue)
    data = {
        "at": None if sample is None else sample.at,
        "queues": found,
        "partly": () if sample is None else sample.partly,
        "q": part,
    }
    return View(template="queues.html", title="Queues", data=data, extra={"bars": _bars(found)})


def _bars(found: tuple[QueueSample, ...]) -> dict[str, object]:
    return {
        each.queue: bar(
            each.executing / each.slots if each.slots else 0.0, label=f"{each.executing} of {each.slots}"
        )
        for each in found
    }


async def queue(desk: Desk, request: Request, name: str) -> View:
    """Show one queue. A name that has neither work nor nodes is shown, too: it may be paused."""
    queue_name("queue", name)
    sample = desk.sampler.latest
    found = (None if sample is None else sample.queue(name)) or QueueSample(queue=name)
    serving = () if sample is None else tuple(each for each in sample.nodes if name in each.queues)
    # A pause of this moment, not of the last sample: who has just paused it must see so.
    pauses = [each for each in await desk.client.pauses() if each.queue == name]
    receipts = await desk.read(partial(read_receipts_of, scope="queue", target=name, limit=20))
    fair = await _shares(desk, name) if found.fair else None
    data = {
        "at": None if sample is None else sample.at,
        "queue": found,
        "partly": () if sample is None else sample.partly,
        "nodes": serving,
        "pauses": pauses,
        "fair": None if fair is None else fair[:SHARES],
        "fair_left_out": max(len(fair or ()) - SHARES, 0),
        "receipts": [desk.redactor.receipt(each) for each in receipts],
    }
    shares = {each.key: bar(each.share, label=f"{each.share:.0%} of what runs") for each in fair or ()}
    extra = {"bars": _bars((found,)), "shares": shares, "most_keys": FAIR_KEYS}
    return View(template="queue.html", title=f"Queue {name}", data=data, extra=extra)


async def _shares(desk: Desk, name: str) -> list[FairShare]:
    """What the fair keys of the queue have: read once per sample, for all viewers."""

    async def read(conn: PgConn, schema: str) -> list[FairShare]:
        return (await read_fair_shares(conn, schema, [name], keys=FAIR_KEYS))[name]

    return await desk.sampler.shared(f"fair {name}", read)


async def pause_queue(desk: Desk, request: Request, form: Form, name: str) -> Done:
    """Pause a queue, or one machine in it, perhaps for a while."""
    text = form.get("until")
    until = None if not text else duration(text)
    machine = form.get("machine") or None
    pause = await desk.client.pause_queue(name, machine, until, **said(desk, request, form))
    return Done(to=f"/queues/{segment(name)}", query={"done": "pause_queue"}, data={"pause": pause})


async def resume_queue(desk: Desk, request: Request, form: Form, name: str) -> Done:
    """End the pause of a queue, or of one machine in it."""
    machine = form.get("machine") or None
    pause = await desk.client.resume_queue(name, machine, **said(desk, request, form))
    return Done(to=f"/queues/{segment(name)}", query={"done": "resume_queue"}, data={"pause": pause})


PAGES: Final = (
    Page(path="/queues", view=queues, nav=Nav("Queues", "/queues", "q")),
    Page(path="/queues/{name}", view=queue),
)
ACTIONS: Final = (
    Action(path="/queues/{name}/pause", name="pause_queue", act=pause_queue),
    Action(path="/queues/{name}/resume", name="resume_queue", act=resume_queue),
)
