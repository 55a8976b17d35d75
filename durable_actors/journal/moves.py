"""`Move`: a record while it is expanded into facts, with the places of its attempt before and after the move. Pure."""

from __future__ import annotations

import hashlib
from typing import Any, Final, cast

import msgspec
from msgspec import UNSET

from durable_actors.journal.facts import Fact, runnable_key
from durable_actors.journal.kinds import (
    Data,
    DoneData,
    FailedData,
    OutcomeData,
    ReturnedData,
    RowData,
    UnderClaim,
)
from durable_actors.journal.records import Current, Inserted, Record, data_of, row_in

MAX_ATTEMPT: Final = 2**31 - 1
"""The column `attempt` stops there."""


class Move:
    """A record while it is expanded: its data, and the places of the attempt before and after the move."""

    __slots__ = (
        "_intent",
        "_result",
        "data",
        "facts",
        "key",
        "next_key",
        "place",
        "queue",
        "record",
        "row",
        "to",
    )

    def __init__(self, record: Record, queue: str, data: Data | None = None) -> None:
        self.record = record
        self.data: Data = data_of(record) if data is None else data
        self.queue = queue
        self.facts: list[Fact] = []
        self._intent: dict[str, Any] | None = None
        self._result: dict[str, Any] | None = None
        self.place: dict[str, Any] = {}
        self.to: dict[str, Any] = {}
        self.key = self.next_key = ""
        self.row: Inserted | Current | None = None
        if isinstance(self.data, RowData):
            self.row = row = row_in(record, self.data)
            self.queue = row.queue
            self._enter(row.step, row.visit, row.round, row.attempt)
        if record.step is not None:
            run, step, visit, attempt = (
                record.instance_id,
                record.step,
                record.visit or 0,
                record.attempt or 0,
            )
            self.place = {"step": step, "visit": visit, "round": self.data.round, "attempt": attempt}
            self.key = runnable_key(run, visit, step, self.data.round, attempt)
            self._enter(*_next_place(record, self.data))

    def _enter(self, step: str, visit: int, round: int, attempt: int) -> None:  # noqa: A002 - the column's name
        self.to = {"step": step, "visit": visit, "round": round, "attempt": attempt}
        self.next_key = runnable_key(self.record.instance_id, visit, step, round, attempt)

    def add(self, kind: str, data: dict[str, Any]) -> None:
        """Add a fact."""
        record = self.record
        self.facts.append(Fact(kind, record.instance_id, self.queue, record.at, record.rev, data))

    @property
    def fence(self) -> dict[str, Any]:
        """The attempt and the claim that a fact of a claim's owner names."""
        fence: dict[str, Any] = {"runnable_key": self.key, "claim_id": self.record.claim_id}
        if isinstance(self.data, UnderClaim) and self.data.late:
            fence["late"] = True
        return fence

    @property
    def result(self) -> dict[str, Any]:
        """What the attempt came to. A state stands for itself by its digest: it is part of the application."""
        if self._result is None:
            found: dict[str, Any] = {"outcome": self.record.kind, "step": self.record.to_step}
            if isinstance(self.data, OutcomeData) and self.data.state is not UNSET:
                found["state"] = digest(self.data.state)
            if isinstance(self.data, DoneData) and self.data.result is not UNSET:
                found["value"] = self.data.result
            self._result = found
        return self._result

    @property
    def intent(self) -> dict[str, Any]:
        """The attempt that the move makes runnable."""
        if self._intent is None:
            at = getattr(self.row or self.data, "eligible_at", None) or self.record.at
            key = self.next_key
            idempotency = key.rpartition("#")[0]
            self._intent = {"runnable_key": key, "idempotency_key": idempotency, **self.to, "visible_at": at}
        return self._intent


def _next_place(record: Record, data: Data) -> tuple[str, int, int, int]:  # noqa: PLR0911 - a table
    """Step, visit, round and attempt of the row after the move, or after the wait that the move begins."""
    step, visit, attempt = record.step or "", record.visit or 0, record.attempt or 0
    match record.kind:
        case "next" | "spawned" | "compensating":
            return record.to_step or step, visit + 1, 0, 0
        case "parked" | "asked" if record.to_step is not None:
            # After an outcome of `handle`, a failing step must not start again at attempt 0.
            return record.to_step, visit + 1, 0, 0 if record.error is None else attempt
        case "parked":
            return step, visit, data.round + 1, attempt
        case "retry":
            return step, visit, data.round + 1, min(attempt + 1, MAX_ATTEMPT)
        case "released" | "crashed" | "reaped":
            return step, visit, data.round, cast("ReturnedData", data).to_attempt
        case "revived":
            return step, visit, data.round, 0
        case "done":
            return step, visit, data.round + 1, attempt
        case "failed":
            given = cast("FailedData", data).to_attempt
            return step, visit, data.round + 1, attempt if given is None else given
        case "cancelled" if record.claim_id is not None:
            return step, visit, data.round + 1, attempt
        case _:
            return record.to_step or step, visit, data.round, attempt


def digest(value: object) -> str:
    """A short digest of a JSON value, equal for equal values whatever the order of their keys."""
    raw = msgspec.json.encode(value, order="deterministic")
    return hashlib.blake2b(raw, digest_size=12).hexdigest()
