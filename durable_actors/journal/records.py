"""`Record`, its JSON form, and what makes a stored record invalid.

A record that cannot be read is damage of the storage. It is raised as `InvalidJournalEntry` and never skipped: a
history with a hole would fold into something that never was. A record that can be read but does not fit the history
before it is an anomaly, which `fold` reports.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any, Final

import msgspec

from durable_actors.errors import InvalidJournalEntry
from durable_actors.journal.kinds import (
    KINDS,
    Data,
    Instant,
    Level,
    RowData,
    is_gapless,
    level_of,
)
from durable_actors.journal.redaction import redact

DAMAGED: Final = "damaged"
"""The kind of what `history` returns in place of a record that is damaged or missing, if the row was accepted since.
No record is stored with it."""


class ErrorInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The error of a failed attempt: its text, the type of the exception, and the traceback."""

    text: str
    type: str | None = None
    traceback: str | None = None


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """One move of an instance.

    `step`, `visit` and `attempt` are those of the row before the move: of the attempt that ended, or of the next one
    if none ended.
    """

    instance_id: int
    rev: int
    """The row's `rev` after the move. With `instance_id` it identifies the record."""
    at: datetime
    """The time of the transaction that made the move, on the database's clock."""
    kind: str
    """The name of the move: a key of `KINDS`. In what `history` returns also "damaged": a record from before a row was
    accepted, which is damaged or missing; `error` says how."""
    step: str | None = None
    to_step: str | None = None
    """The step that the row entered or will enter after its wait."""
    visit: int | None = None
    attempt: int | None = None
    claim_id: str | None = None
    """The claim under which the move was made, or which it began or ended."""
    node: str | None = None
    """The node and incarnation that had the claim (`locked_by`)."""
    seconds: float | None = None
    """How long the step ran."""
    error: ErrorInfo | None = None
    """What failed, if an attempt or the instance did."""
    by: str | None = None
    """Who gave the command."""
    data: dict[str, Any] = {}
    """What else belongs to this kind: JSON values only."""


class Columns(msgspec.Struct, frozen=True, kw_only=True):
    """The columns that every recorded row must have, and some that it may have."""

    fsm: str
    fsm_version: int
    step: str
    queue: str
    journal: int | str
    eligible_at: Instant
    parent_id: int | None = None
    barrier: int | None = None
    unique_key: str | None = None
    round: int = 0
    hold: int = 0
    state: Any = None


class Inserted(Columns, frozen=True, kw_only=True):
    """The columns of a `started` record."""

    visit: int = 1
    attempt: int = 0


class Current(Columns, frozen=True, kw_only=True):
    """The columns of a `snapshot` record."""

    status: str
    visit: int
    attempt: int
    claim_id: str | None = None
    claim_token_hash: str | None = None
    locked_by: str | None = None
    lease_expires_at: Instant | None = None
    shelved_step: str | None = None
    limited_by: str | None = None
    crashes: int = 0
    interruptions: int = 0
    awaits: list[str] | None = None
    await_step: str | None = None
    await_deadline: Instant | None = None
    children_total: int = 0
    children_pending: int = 0
    wake_on_failure: bool = False
    result: Any = None
    last_error: str | None = None
    error_type: str | None = None
    traceback: str | None = None
    finished_at: Instant | None = None


def row_in(record: Record, data: RowData) -> Current | Inserted:
    """Return the checked columns of a `started` or `snapshot` record."""
    if record.kind == "snapshot":
        return msgspec.convert(data.row, Current)
    return msgspec.convert(data.row, Inserted)


def data_of(record: Record) -> Data:
    """Return the data of a record in the form that its kind has. Raises `InvalidJournalEntry`."""
    kind = KINDS.get(record.kind)
    if kind is None:
        raise _invalid(record, f"unknown kind {record.kind!r}")
    try:
        return msgspec.convert(record.data, kind.data)
    except msgspec.ValidationError as exc:
        raise _invalid(record, f"data of {record.kind!r}: {exc}") from None


def check_record(record: Record) -> Record:
    """Return the record if it has all that its kind needs; otherwise raise `InvalidJournalEntry`."""
    checked_data(record)
    return record


def checked_data(record: Record) -> Data:
    """As `check_record`; return its data in the form that its kind has."""
    data = data_of(record)
    needed = KINDS[record.kind].fields
    for name in needed:
        if getattr(record, name) is None:
            missing = [each for each in needed if getattr(record, each) is None]
            raise _invalid(record, f"{record.kind!r} needs {', '.join(missing)}")
    if record.at.tzinfo is None:
        raise _invalid(record, "at has no time zone")
    if isinstance(data, RowData):
        try:
            row = row_in(record, data)
            level_of(row.journal)
        except (msgspec.ValidationError, ValueError) as exc:
            raise _invalid(record, f"row of {record.kind!r}: {exc}") from None
    return data


def check_sequence(
    records: Iterable[Record], instance_id: int, *, after: int = 0, level: Level | None = None
) -> Iterator[Record]:
    """Yield the records of one instance, and raise `InvalidJournalEntry` where their revisions do not continue.

    Revisions must grow, and at a gapless level they must be dense: `level` is the level after record `after`; `started`
    and `snapshot` records change it. A snapshot may follow a gap, because it needs nothing that lies before it.
    """
    last = after
    for record in records:
        if record.instance_id != instance_id:
            raise _invalid(record, f"belongs to instance {record.instance_id}, not {instance_id}")
        if record.rev <= last:
            raise _invalid(record, f"does not come after revision {last}")
        if record.kind in {"started", "snapshot"}:
            if record.kind == "started" and record.rev != 1:
                raise _invalid(record, "started is not the first record")
            level = level_of(record.data["row"]["journal"])
        elif level is not None and is_gapless(level) and record.rev != last + 1:
            raise InvalidJournalEntry(
                instance_id, last + 1, f"missing: the record after it is revision {record.rev}"
            )
        last = record.rev
        yield record


def check_head(instance_id: int, *, last: int, row_rev: int, level: Level) -> None:
    """Raise `InvalidJournalEntry` if the last record and the row's revision contradict each other."""
    if last > row_rev:
        raise InvalidJournalEntry(instance_id, last, f"the row is at revision {row_rev}")
    if is_gapless(level) and last < row_rev:
        raise InvalidJournalEntry(instance_id, last + 1, f"missing: the row is at revision {row_rev}")


_decoder: Final = msgspec.json.Decoder(Record)
_encoder: Final = msgspec.json.Encoder()


def encode_record(record: Record) -> bytes:
    """Return the JSON of a record. Secrets in the metadata of a command are redacted."""
    if "command" in record.data:
        command: dict[str, Any] = record.data["command"] or {}
        if command.get("metadata"):
            command = {**command, "metadata": redact(command["metadata"])}
            record = msgspec.structs.replace(record, data={**record.data, "command": command})
    return _encoder.encode(record)


def decode_record(stored: bytes | str | Mapping[str, Any], *, instance_id: int, rev: int) -> Record:
    """Return a stored record, checked. `instance_id` and `rev` say under which key it is stored.

    Raises `InvalidJournalEntry` if it is no JSON, has an unknown kind, lacks something, or belongs to another key.
    """
    try:
        record = (
            _decoder.decode(stored) if isinstance(stored, bytes | str) else msgspec.convert(stored, Record)
        )
    except msgspec.DecodeError as exc:
        raise InvalidJournalEntry(instance_id, rev, str(exc)) from None
    if (record.instance_id, record.rev) != (instance_id, rev):
        raise InvalidJournalEntry(
            instance_id, rev, f"says that it is revision {record.rev} of instance {record.instance_id}"
        )
    return check_record(record)


def _invalid(record: Record, reason: str) -> InvalidJournalEntry:
    return InvalidJournalEntry(record.instance_id, record.rev, reason)
