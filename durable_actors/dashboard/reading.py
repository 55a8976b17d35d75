"""Reads one instance for its page: the row, why it waits, its history, inbox, family and drawing. Redacted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import attrs
import msgspec

from durable_actors._postgres.driver.connection import PgConn
from durable_actors._store.commands import Receipt
from durable_actors._store.dialogues import listing_receipts, observing, run_dialogue
from durable_actors._store.explanation import Blocker, Explanation
from durable_actors._store.observe import NEWEST, InstanceDetails
from durable_actors._store.read import Instance
from durable_actors._store.signal import read_signals
from durable_actors._store.tree import Tree, TreeNode
from durable_actors._store.why import explain_observed
from durable_actors._timeline import Line, timeline
from durable_actors.dashboard.desk import Desk
from durable_actors.diagrams import Diagram
from durable_actors.errors import DurableError
from durable_actors.journal import Record
from durable_actors.journal.redaction import REDACTED
from durable_actors.machine import ENDED, Signal

RECORDS: Final = 300
"""Records that the page shows: the last ones."""
SIGNALS: Final = 50
RECEIPTS: Final = 20
CHILDREN: Final = 30
_ERRORS: Final = {"last_error": "error", "traceback": "error"}
"""Columns that the hook for what is hidden knows by another name."""


@attrs.frozen(kw_only=True)
class InstanceRead:
    """What the database says about one instance."""

    instance: Instance
    details: InstanceDetails
    why: Explanation
    inbox: list[Signal]
    """The signals that have not been read yet: the first fifty."""
    receipts: list[Receipt]


async def read_one(desk: Desk, number: int) -> InstanceRead:
    """Read an instance and what is around it. Raises `NoTarget`."""

    async def read(conn: PgConn, schema: str) -> InstanceRead:
        found, _, nodes = await run_dialogue(conn, observing(schema, number, full=True, parent=True))
        observed = found[number]
        signals = await read_signals(conn, schema, number, after=0, limit=SIGNALS)
        newest = listing_receipts(schema, number, command=None, before=NEWEST, limit=RECEIPTS)
        return InstanceRead(
            instance=observed.instance,
            details=observed.details,
            why=explain_observed(observed, nodes, found),
            inbox=signals,
            receipts=await run_dialogue(conn, newest),
        )

    return _redacted(desk, await desk.read(read))


def _redacted(desk: Desk, found: InstanceRead) -> InstanceRead:
    machine, redactor = found.instance.machine, desk.redactor
    details = found.details
    return attrs.evolve(
        found,
        instance=redactor.instance(found.instance),
        details=attrs.evolve(
            details,
            receipts=tuple(redactor.shown(machine, "receipt", dict(each)) for each in details.receipts),
        ),
        why=_why(desk, machine, found.why),
        inbox=[
            attrs.evolve(each, payload=redactor.shown(machine, "signal", each.payload))
            for each in found.inbox
        ],
        receipts=[redactor.receipt(each, machine) for each in found.receipts],
    )


def _why(desk: Desk, machine: str, why: Explanation) -> Explanation:
    """An explanation as it may be shown, with those of the children and dependencies that it names."""
    shown = desk.redactor.shown
    error = why.evidence.get("last_error")
    told = shown(machine, "error", error)
    facts: dict[str, Any] = {**why.evidence, "last_error": told}
    for name in ("boundary", "decision"):
        if facts.get(name) is not None:
            facts[name] = {**facts[name], "data": shown(machine, name, facts[name]["data"])}
    evidence = shown(machine, "evidence", facts)
    hidden = error if error != told else None
    blockers: list[Blocker] = []
    for each in why.blockers:
        because, text = each.because, _without(each.text, hidden)
        if because is not None:
            inner = str(because.evidence["machine"]).rpartition("/")[0]
            cause = because.evidence.get("last_error")
            if cause != shown(inner, "error", cause):
                text = _without(text, cause)
            because = _why(desk, inner, because)
        blockers.append(attrs.evolve(each, text=text, because=because))
    summary = _without(why.summary, hidden)
    return attrs.evolve(why, summary=summary, blockers=tuple(blockers), evidence=evidence)


def _without(sentence: str, error: str | None) -> str:
    """A sentence without the error that it ends with, whole or cut."""
    begin = " ".join((error or "").split())[:12]
    at = sentence.find(begin) if begin else -1
    return sentence if at < 0 else f"{sentence[:at]}{REDACTED}"


def _records(desk: Desk, machine: str, records: Sequence[Record]) -> list[Record]:
    """The records with their errors as they may be shown."""
    found: list[Record] = []
    for record in records:
        error = record.error
        if error is not None:
            text, trace = (
                desk.redactor.shown(machine, "error", each) for each in (error.text, error.traceback)
            )
            error = msgspec.structs.replace(
                error, text=str(text), traceback=None if trace is None else str(trace)
            )
        found.append(record if error is record.error else msgspec.structs.replace(record, error=error))
    return found


async def read_lines(desk: Desk, machine: str, number: int, rev: int) -> tuple[list[Line], dict[int, str]]:
    """The last records of its history as a timeline, and what is damaged in it."""
    after = max(rev - RECORDS, 0)
    _, page = await desk.client.damaged_history(number, after=after, limit=RECORDS)
    records = _records(desk, machine, page.records)
    return [*timeline(records, page.damaged, after=after)], dict(page.damaged)


async def read_family(desk: Desk, number: int) -> Tree:
    """Its ancestors, and what is below them, up to a hundred."""
    found = await desk.client.tree(number, depth=3, children=CHILDREN, limit=100)
    return attrs.evolve(found, root=_member(desk, found.root)) if desk.redactor.has_hook else found


def _member(desk: Desk, node: TreeNode) -> TreeNode:
    """An instance of the family with its error as it may be shown."""
    told = node.waits_for
    if node.status in ENDED and told:
        told = str(desk.redactor.shown(node.machine, "error", told))
    children = tuple(_member(desk, child) for child in node.children)
    return attrs.evolve(node, waits_for=told, children=children)


async def read_drawing(desk: Desk, machine: str, number: int) -> Diagram:
    """Its drawing, with errors as they may be shown. Raises `DurableError` if it cannot be drawn."""
    found = await desk.client.graph(number, limit=60)
    if not desk.redactor.has_hook:
        return found
    nodes = tuple(
        attrs.evolve(
            node, detail=str(desk.redactor.shown(machine, "error", node.detail)), facts={"redacted": True}
        )
        if node.state in {"failed", "cancelled"} and node.detail
        else node
        for node in found.nodes
    )
    return attrs.evolve(found, nodes=nodes)


async def read_change(
    desk: Desk, machine: str, number: int, lines: list[Line], rev: int
) -> Mapping[str, tuple[Any, Any]] | str:
    """What a record changed in the row, from the recorded revision before it; or why that is not known."""
    revs = [line.record.rev for line in lines if line.record is not None]
    before = max((each for each in revs if each < rev), default=None)
    if rev not in revs:
        return "there is no record of this revision"
    try:
        if before is None:
            state = await desk.client.state_at(number, rev)
            return {"state": (None, desk.redactor.shown(machine, "state", state))}
        found = await desk.client.diff(number, before, rev)
    except DurableError as exc:  # not recorded, or damaged
        return str(exc)
    return {
        column: tuple(desk.redactor.shown(machine, _ERRORS.get(column, column), each) for each in (old, new))
        for column, (old, new) in found.items()
    }


def shown_record(record: Record) -> dict[str, Any]:
    """A record for the JSON twin: without the row itself, which only `history` gives."""
    kept = ("rev", "at", "kind", "step", "to_step", "visit", "attempt", "node", "seconds", "error", "by")
    return {name: getattr(record, name) for name in kept}
