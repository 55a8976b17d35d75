"""Facts: the vocabulary of the dispatch protocol, and the threads that facts belong to.

A record says that a row moved; the facts in it say what that means to the protocol. `FACTS` is the whole vocabulary.
Facts that the original protocol does not have, because only a row engine needs them, are marked as extensions.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final, Literal, get_args

import msgspec

from durable_actors.journal.records import ErrorInfo

ThreadKind = Literal["run", "dispatch", "run_index", "key_index", "catalog"]


class Thread(msgspec.Struct, frozen=True, order=True):
    """The identity of an ordered list of facts: a function of the kind of thread and its key."""

    kind: ThreadKind
    key: str
    """The instance id · the queue · the machine · the unique key · "all"."""

    @property
    def name(self) -> str:
        """The identity as one text. Kinds contain no colon, so no two threads have the same name."""
        return f"{self.kind}:{self.key}"

    @classmethod
    def parse(cls, name: str) -> Thread:
        """Return the thread with this name. Raises ValueError."""
        kind, colon, key = name.partition(":")
        if not colon or kind not in get_args(ThreadKind):
            raise ValueError(f"{name!r} is not the name of a thread")
        return msgspec.convert({"kind": kind, "key": key}, cls)

    @property
    def instance_id(self) -> int:
        """The instance of a run thread. Raises ValueError for other threads."""
        if self.kind != "run":
            raise ValueError(f"{self.name} is not the thread of an instance")
        return int(self.key)


CATALOG: Final = Thread("catalog", "all")
"""The thread of all runs."""


def run_thread(instance_id: int) -> Thread:
    """The thread of one instance. It is the only kind that is stored; the others are views of many of them."""
    return Thread("run", str(instance_id))


def idempotency_key(run: int, visit: int, step: str) -> str:
    """The key of one visit of a step: the same in all its attempts. Steps know it as `ctx.idempotency_key`."""
    return f"{run}/{visit}/{step}"


def runnable_key(run: int, visit: int, step: str, round: int, attempt: int) -> str:  # noqa: A002 - the column's name
    """The key of one attempt.

    The round tells runs of one attempt number apart: an `Await` without `then` runs the same step of the same visit
    again and changes no attempt number.
    """
    return f"{run}/{visit}/{step}#{round}.{attempt}"


def place_of(key: str) -> tuple[int, int, int]:
    """Visit, round and attempt in the key of an attempt, in the order of time; a key of another form comes last."""
    place, _, count = key.rpartition("#")
    _, visit, *_ = [*place.split("/", 2), ""]
    round_, _, attempt = count.partition(".")
    try:
        return int(visit), int(round_), int(attempt)
    except ValueError:
        return 2**63, 0, 0


class Fact(msgspec.Struct, frozen=True):
    """One fact of the protocol."""

    kind: str
    """A key of `FACTS`."""
    run: int
    """The instance."""
    queue: str
    """The queue of the instance; empty if it is not known."""
    at: datetime
    rev: int
    """The revision of the record that it comes from."""
    data: Mapping[str, Any]

    @property
    def thread(self) -> Thread:
        """The thread that it belongs to."""
        kind = FACTS[self.kind].thread
        if kind == "run":
            return run_thread(self.run)
        if kind == "dispatch":
            return Thread("dispatch", self.queue)
        if kind == "catalog":
            return CATALOG
        return Thread("run_index" if self.data["index"] == "machine" else "key_index", self.data["key"])


class FactKind(msgspec.Struct, frozen=True):
    """What is to be known of one kind of fact."""

    thread: Literal["run", "dispatch", "index", "catalog"]
    meaning: str
    needs: dict[str, type] = {}
    """The keys that its data must have, with their types."""
    may: dict[str, type] = {}
    """Keys that it may have. None counts as absent."""
    extension: bool = False
    """The original protocol does not have it."""


_RUNNABLE: Final[dict[str, type]] = {"runnable_key": str}
_FENCED: Final[dict[str, type]] = {"runnable_key": str, "claim_id": str}
_FENCE: Final[dict[str, type]] = {"token_hash": str, "late": bool}
_PLACE: Final[dict[str, type]] = {"step": str, "visit": int, "round": int, "attempt": int}
_INTENT: Final[dict[str, type]] = {**_RUNNABLE, **_PLACE, "idempotency_key": str, "visible_at": datetime}

FACTS: Final[dict[str, FactKind]] = {
    # The run thread.
    "run_signal_received": FactKind(
        "run",
        "a command reached the run: its receipt",
        {"type": str},
        {"by": str, "key": str, "reason": str, "payload": object, "metadata": dict},
    ),
    "run_started": FactKind(
        "run",
        "the run exists",
        {"machine": str, "version": int, "queue": str, "level": str, **_PLACE},
        {"parent": dict, "hold": int, "eligible_at": datetime, "row": dict},
    ),
    "runnables_planned": FactKind("run", "these runnables are to be dispatched", {"runnables": list}),
    "runnable_applied": FactKind(
        "run",
        "the result of a runnable changed the run",
        {**_RUNNABLE, "result": dict},
        {"transition": str, "advance": bool, "state": object},
    ),
    "child_run_started": FactKind(
        "run",
        "the run has a child",
        {"child": int, "machine": str, "trigger": str, "child_key": str, "origin": dict},
        {"metadata": dict},
    ),
    "manual_step_paused": FactKind(
        "run",
        "the run waits for somebody's decision",
        {"step": str, "manual": str, "boundary": int, "next": dict},
        {"deadline": datetime, "metadata": dict},
    ),
    "manual_step_resolved": FactKind(
        "run",
        "that decision was made",
        {"step": str, "boundary": int, "action": str},
        {"decision": dict},
    ),
    "run_terminal": FactKind(
        "run",
        "the run has ended",
        {"status": str, **_PLACE},
        {
            "error": ErrorInfo,
            "eligible_at": datetime,
            "result": object,
            "ended_by": str,
            "crashes": int,
            "interruptions": int,
            "children_pending": int,
        },
    ),
    "wait_opened": FactKind(
        "run",
        "the run waits for a signal",
        {"names": list, "next": dict},
        {"deadline": datetime},
        extension=True,
    ),
    "wait_resolved": FactKind("run", "the wait has ended", {"why": str, **_PLACE}, extension=True),
    "barrier_opened": FactKind(
        "run",
        "the run waits for children",
        {"total": int, "pending": int, "next": dict},
        {"wake_on_failure": bool, "deadline": datetime},
        extension=True,
    ),
    "barrier_counted": FactKind(
        "run",
        "children were counted at the barrier",
        {"count": int, "pending": int},
        {"failed": bool},
        extension=True,
    ),
    "barrier_resolved": FactKind("run", "the barrier has opened", {"why": str, **_PLACE}, extension=True),
    "run_suspended": FactKind(
        "run", "an operator paused the run", {}, {"by": str, "reason": str}, extension=True
    ),
    "run_resumed": FactKind(
        "run", "the operator's pause has ended", {}, {"by": str, "hold": int}, extension=True
    ),
    "run_redirected": FactKind(
        "run", "whatever the run did or waited for is over: it goes on elsewhere", extension=True
    ),
    "run_revived": FactKind("run", "a failed or cancelled run goes on", extension=True),
    "run_hastened": FactKind(
        "run",
        "an operator let a runnable that was to run later run at once",
        {**_PLACE, **_RUNNABLE, "visible_at": datetime},
        extension=True,
    ),
    "upstream_ended": FactKind(
        "run",
        "what the run comes after has ended: its runnable may run, or is claimed to end the run",
        {**_RUNNABLE, "visible_at": datetime},
        extension=True,
    ),
    "run_caught_up": FactKind(
        "run",
        "moves that were not recorded brought the run to this runnable",
        _PLACE,
        _RUNNABLE,
        extension=True,
    ),
    "definition_differs": FactKind(
        "run",
        "a step ran with another definition than the run was started with",
        {"fingerprint": str, "step": str},
        _RUNNABLE,
        extension=True,
    ),
    "run_snapshot": FactKind("run", "the whole run as it is now", {"row": dict}, extension=True),
    # The dispatch thread of a queue.
    "run_queued": FactKind("dispatch", "the run is dispatched through this queue", {"queue": str}),
    "attempt_scheduled": FactKind(
        "dispatch",
        "intent: this attempt may run from visible_at on",
        _INTENT,
        {"input": object, "ahead": bool},
    ),
    "attempt_claimed": FactKind(
        "dispatch",
        "an owner has the attempt until lease_until",
        {**_FENCED, "owner": str},
        {"lease_until": datetime, "token_hash": str, "since": datetime, "kept": bool},
    ),
    "attempt_heartbeat": FactKind(
        "dispatch", "the owner extended its lease", {**_FENCED, "lease_until": datetime}, _FENCE
    ),
    "attempt_completed": FactKind("dispatch", "the owner has a result", {**_FENCED, "result": dict}, _FENCE),
    "attempt_failed": FactKind(
        "dispatch",
        "the attempt failed; with `retry`, another one follows",
        {**_FENCED, "ended_by": str},
        {**_FENCE, "error": ErrorInfo, "retry": dict, "state": object},
    ),
    "claim_released": FactKind(
        "dispatch",
        "the owner gave the attempt back",
        _FENCED,
        {**_FENCE, "interrupted": bool, "eligible_at": datetime},
        extension=True,
    ),
    "claim_expired": FactKind(
        "dispatch", "the claim was taken from its owner", {**_FENCED, "proof": str}, _FENCE, extension=True
    ),
    "hold_changed": FactKind(
        "dispatch",
        "the row is offered to picks (0), held (1), shelved (2), throttled (3), or waits for what it comes after (5)",
        {"hold": int},
        {**_PLACE, **_RUNNABLE, "limited_by": str},
        extension=True,
    ),
    "live_wakeup_emitted": FactKind("dispatch", "a notifier was told of the attempt", _RUNNABLE),
    # The index of a machine or unique key, and the catalog of all runs.
    "run_indexed": FactKind(
        "index", "the run belongs to this index", {"index": str, "key": str, "machine": str, "queue": str}
    ),
    "run_cataloged": FactKind("catalog", "the run belongs to the catalog", {"machine": str, "queue": str}),
}
"""The whole vocabulary. Each fact may also have `columns`, which other columns its record wrote."""

_NEEDS: Final = {kind: frozenset(about.needs) for kind, about in FACTS.items()}
_TYPES: Final = {kind: {**about.needs, **about.may, "columns": dict} for kind, about in FACTS.items()}


def is_well_formed(fact: Fact) -> bool:
    """Return whether the kind is known and the data has what the kind needs, in the right types."""
    return fact.kind in _NEEDS and _fits(fact.data, fact.kind)


def is_intent(data: Mapping[str, Any]) -> bool:
    """Return whether this describes an attempt that is to run."""
    return _fits(data, "attempt_scheduled")


def _fits(data: Mapping[str, Any], kind: str) -> bool:
    needs, types = _NEEDS[kind], _TYPES[kind]
    if not needs <= data.keys():
        return False
    for name, value in data.items():
        expected = types.get(name)
        if expected is None or value.__class__ is expected:  # mostly: cheaper than isinstance
            continue
        if not isinstance(value, expected) and (value is not None or name in needs):
            return False
    return True


def dispatch_order(fact: Fact) -> tuple[datetime, int, int]:
    """Sort key of the facts of many runs in the thread of a queue; sorting keeps the order inside a record."""
    return (fact.at, fact.run, fact.rev)
