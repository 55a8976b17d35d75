"""The conservation sums: what there must be at the end, by the plan and by the commands that were carried out. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Final

import attrs
from durable_actors.machine import ENDED
from tests.chaos.graphs import UPSTREAM, from_state, may_come_to
from tests.chaos.workload import NOBODY, SENDERS, Ack, Insert, Plan

TREES: Final = frozenset({"chaos.Tree", "chaos.Rest", "chaos.Leaf", "chaos.Undo"})
"""Machines of families that commanders start: nobody knows how many children they have."""
_PARENTS: Final = frozenset({"chaos.Family", "chaos.Graph"})
"""Machines that schedule children."""


@attrs.frozen(kw_only=True)
class Row:
    """An instance as it was found at the end."""

    id: int
    machine: str
    key: str | None
    status: str
    result: object
    parent_id: int | None
    last_error: str | None
    barrier: int | None = None
    gone: bool = False
    """Retention has deleted it; its result is not known."""
    cascaded: bool = False
    """It was cancelled, or asked to end, with its parent."""
    rerun_of: int | None = None


@attrs.frozen
class Commands:
    """The instances on which commands were carried out, by what was answered."""

    cancelled: frozenset[int] = frozenset()
    """Cancelled at least once, or asked to end."""
    retried: frozenset[int] = frozenset()
    decided: Mapping[str, frozenset[int]] = attrs.field(factory=dict[str, frozenset[int]])
    """By what people decided: `proceed`, `approve`, `reject`."""
    reruns: Mapping[int, int] = attrs.field(factory=dict[int, int])
    """How many commands to run an instance once more were carried out."""

    def touched(self, row: Row | None) -> bool:
        return row is not None and (row.id in self.cancelled or row.id in self.retried)


@attrs.frozen
class Found:
    """All that was found."""

    plan: Plan
    rows: Sequence[Row]
    commands: Commands
    by_key: Mapping[str, Row]
    children: Mapping[int, Sequence[Row]]

    @cached_property
    def graphs(self) -> frozenset[int | None]:
        """The instances that have tasks."""
        return frozenset(row.id for row in self.rows if row.machine == "chaos.Graph")

    def influenced(self, insert: Insert) -> bool:
        """Whether a command may have kept signals from it, or it was given a command itself."""
        row, courier = self.by_key.get(insert.key), self.by_key.get(_courier_of(insert.key))
        return self.commands.touched(row) or self.commands.touched(courier)


def _courier_of(key: str) -> str:
    """Who sends to a receiver; a courier that is cancelled sends no more."""
    return key.replace("receiver:", "courier:")


def check_sums(
    plan: Plan, rows: Sequence[Row], acks: Iterable[Ack], unread: int, commands: Commands | None = None
) -> list[str]:
    """Compare what is with what must be; each sentence is a failure."""
    children: dict[int, list[Row]] = {}
    for row in rows:
        if row.parent_id is not None:
            children.setdefault(row.parent_id, []).append(row)
    by_key = {row.key: row for row in rows if row.key is not None}
    found = Found(plan, rows, commands or Commands(), by_key, children)
    return [
        *_check_ends(found),
        *_check_acks(found, list(acks)),
        *_check_children(found),
        *_check_reruns(found),
        *([f"{unread} signals are unread, but nobody is left to read them"] if unread else []),
    ]


def _check_ends(found: Found) -> Iterator[str]:
    count = Counter(row.key for row in found.rows if row.key is not None)
    for insert in found.plan.inserts:
        if count[insert.key] != 1:
            yield f"{insert.key}: {count[insert.key]} instances, not one"
            continue
        row = found.by_key[insert.key]
        if not _may_end_so(found, insert, row):
            yield (
                f"{insert.key} (instance {row.id}): {row.status} with {row.result!r}, error {row.last_error!r},"
                f" but must be {insert.status} with {insert.result!r}"
            )
    for row in found.rows:
        if row.status not in ENDED:
            yield f"instance {row.id} ({row.machine}, key {row.key}): still {row.status}"
        if row.status == "cancelled" and not (row.cascaded or _was_cancelled(found, row)):
            yield f"instance {row.id} ({row.machine}, key {row.key}) is cancelled, and nobody has cancelled it"
        if row.machine in {"chaos.Hang", "chaos.Undo", "chaos.Loop"} and row.status != "cancelled":
            yield f"instance {row.id} hangs until it is cancelled, and is {row.status}"
        if row.machine == "chaos.Desk" and not _was_decided(found.commands, row):
            yield (
                f"instance {row.id} (key {row.key}) is {row.status} with {row.result!r}, error {row.last_error!r},"
                " and nobody has decided that"
            )


def _was_cancelled(found: Found, row: Row) -> bool:
    """Whether a command has cancelled it, or it is a task that comes after one which did not succeed."""
    if row.id in found.commands.cancelled:
        return True
    return row.parent_id in found.graphs and (row.last_error or "").startswith(UPSTREAM)


def _was_decided(commands: Commands, row: Row) -> bool:
    """Whether a desk has ended as people decided; its key tells which way it went."""
    way = (row.key or "").split(":")[1]

    def by(command: str) -> bool:
        return row.id in commands.decided.get(command, ())

    if row.status == "cancelled":
        return True
    if way == "pause" and not by("proceed"):
        return False
    if row.gone:
        return True
    if row.status == "failed":
        return way == "strict" and by("reject") and (row.last_error or "").startswith("rejected by chaos")
    match row.result:
        case "approved":
            return by("approve")
        case "rejected":
            return by("reject") and way != "strict"
        case _:
            return row.result == "timed_out" and way == "timeout"


def _may_end_so(found: Found, insert: Insert, row: Row) -> bool:
    """Whether it came to what it must, or was cancelled. Who was cancelled and retried comes to the same."""
    if row.status == "cancelled":
        return row.id in found.commands.cancelled or row.cascaded
    if (row.status, row.result) == (insert.status, insert.result):
        return True
    children = found.children.get(row.id, ())
    told = any(map(found.commands.touched, children)) or row.id in found.commands.retried
    if insert.machine == "chaos.Graph" and row.status == insert.status and told:
        return isinstance(row.result, dict) and not may_come_to(from_state(insert.state["tasks"]), row.result)
    if insert.machine != "chaos.Family" or row.status != insert.status or not told:
        return False
    return _family_may(found, insert, row, children)


def _family_may(found: Found, insert: Insert, row: Row, children: Sequence[Row]) -> bool:
    """Whether commands on its children, or its own retry, explain the result of a family."""
    good, bad = insert.state["good"], insert.state["bad"]
    retried = any(child.id in found.commands.retried for child in children)
    if "quorum" in insert.state:
        return row.result is False and retried  # one that had ended was live again when the parent looked
    if "deadline" in insert.state or not isinstance(row.result, list):
        return False
    result: list[Any] = row.result
    if retried or row.id in found.commands.retried or any(child.gone for child in children):
        # Which children it saw, and in what state, is not known from what is left.
        return all(0 <= total <= sum(range(good)) and 0 <= n <= good + bad for total, n in result)
    barriers = sorted({child.barrier or 0 for child in children})
    return result == [
        [
            sum(int(str(child.result)) for child in children if child.barrier == barrier and child.status == "done"),
            good + bad,
        ]
        for barrier in barriers
    ]  # fmt: skip


def _check_acks(found: Found, acks: Sequence[Ack]) -> Iterator[str]:
    ids = {key: row.id for key, row in found.by_key.items()}
    inserts = {insert.key: insert for insert in found.plan.inserts}
    for ack in acks:
        if ack.id is not None and ids.get(ack.key) != ack.id:
            yield f"{ack.key}: acknowledged as instance {ack.id}, but found is {ids.get(ack.key)}"
    told = Counter(ack.key for ack in acks)
    for insert in found.plan.inserts:
        must = {SENDERS: SENDERS, NOBODY: 0}.get(insert.sender, 1)
        if told[insert.key] != must:
            yield f"{insert.key}: its insert was acknowledged {told[insert.key]} times, not {must}"
    for send in found.plan.sends:
        refused = found.influenced(inserts[send.target])  # whoever is cancelled takes no signals
        if told[send.dedup_key] != 1 and not (refused and told[send.dedup_key] == 0):
            yield f"signal {send.dedup_key} to {send.target}: acknowledged {told[send.dedup_key]} times"


def _check_reruns(found: Found) -> Iterator[str]:
    """Each accepted key has made one instance: as many as there are receipts."""
    made = Counter(row.rerun_of for row in found.rows if row.rerun_of is not None)
    for number in made.keys() | found.commands.reruns.keys():
        if made[number] != found.commands.reruns.get(number, 0):
            told = found.commands.reruns.get(number, 0)
            yield f"instance {number} was run once more {made[number]} times, and {told} commands say so"


def _check_children(found: Found) -> Iterator[str]:
    plan, commands = found.plan, found.commands
    extra = [
        row for row in found.rows if row.key is None and row.machine not in TREES and row.rerun_of is None
    ]
    # What is cancelled may have made fewer; a family that is retried schedules its children again.
    least = most = 0
    for insert in plan.inserts:
        row = found.by_key.get(insert.key)
        exact = not commands.touched(row)
        least += insert.children if exact or (row is not None and row.status != "cancelled") else 0
        most += insert.children if exact or insert.machine not in _PARENTS else 10**6
    if not least <= len(extra) <= most:
        yield f"{len(extra)} children and further instances, but must be {least} to {most}"
    families = {insert.key: insert.children for insert in plan.inserts if insert.machine in _PARENTS}
    for row in found.rows:
        if row.key not in families or commands.touched(row):
            continue
        of = len(found.children.get(row.id, ()))
        if of != families[row.key]:
            yield f"{row.key} (instance {row.id}): {of} children, but must be {families[row.key]}"
