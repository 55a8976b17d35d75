"""`rebuild` and `accept`: the row as its journal says, or the journal as the row says. Sans-I/O.

Both are commands: the effect and its receipt are one statement.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import attrs
import msgspec
import psycopg

from durable_actors._postgres.driver import encode
from durable_actors._postgres.driver.statement import Params, Statement
from durable_actors._store.commands import Command
from durable_actors._store.dialogues import earlier_receipt, resolving, resolving_lost
from durable_actors._store.foreign import Dialogue
from durable_actors._store.holds import OFFERED, PAUSED, THROTTLED
from durable_actors._store.journal import page_of
from durable_actors._store.sql import statement
from durable_actors._store.verify import PAGE
from durable_actors.errors import Conflict, Duplicate, InvalidJournalEntry, NoTarget
from durable_actors.journal import Projection, differences, level_of
from durable_actors.journal.row import whole_row
from durable_actors.journal.verify import InstanceCheck

NAME: Final = "rebuild"
ACCEPT: Final = "accept"

_decode_row: Final = msgspec.json.Decoder(dict[str, Any]).decode


@attrs.frozen
class Rebuilt:
    """A row that was rebuilt, now or by an earlier call with the same idempotency key."""

    id: int
    queue: str | None
    """None if an earlier call did it."""
    changed: tuple[str, ...] = ()
    """The columns that were wrong."""
    restored: bool = False
    """The row was gone."""


@attrs.frozen
class _Read:
    """An instance as it was read: its row (None: it is gone), and all its records."""

    row: Mapping[str, Any] | None
    check: InstanceCheck

    @property
    def row_rev(self) -> int | None:
        return None if self.row is None else int(self.row["rev"])


def rebuilding(
    schema: str, target: int | str | bytes, command: Command, *, at_last_record: bool = False
) -> Dialogue[Rebuilt]:
    """Rebuild the row of an instance from its records.

    Raises `NoTarget` without row and record, `InvalidJournalEntry` if a record is damaged or missing, `Conflict` if the
    records do not tell the whole row or do not fit together, `Duplicate` if another instance has its unique key.
    `at_last_record`: records that are missing at the end are given up; the row goes back to the last one.
    """
    number = yield from resolving_lost(schema, target)
    while True:
        earlier = yield from earlier_receipt(schema, NAME, number, command)
        if earlier is not None:
            return Rebuilt(number, None)
        found = yield from _reading(schema, number)
        _check_records(number, found)
        projection = found.check.projection
        row = row_to_write(number, projection)
        changed = _changed(found, projection)
        if not at_last_record:
            _check_head(number, found, changed)
        if projection.status != "executing" and (changed or found.row is None):
            row["rev"] = projection.rev + 1  # the repair is recorded
            if row["hold"] == THROTTLED:  # nobody may know that it waits: the pick decides anew
                row["hold"] = OFFERED
        try:
            done = yield _write(schema, command, found, row, record=bool(changed))
        except psycopg.errors.UniqueViolation as refused:
            if refused.diag.constraint_name == "gen_durable_unique":
                key: str = row["unique_key"]
                raise Duplicate(bytes.fromhex(key[2:]).decode("utf-8", "backslashreplace"), None) from None
            if refused.diag.constraint_name not in {"receipts_once", "gen_durable_pkey"}:
                raise
            continue  # another call came first, or somebody has inserted the row
        if done:
            return Rebuilt(number, row["queue"], tuple(changed), found.row is None)
        # It has moved since it was read: read it again.


def _reading(schema: str, number: int) -> Dialogue[_Read]:
    """Read the row, then all records, page by page. Begins again if the row moves meanwhile. Raises `NoTarget`."""
    while True:
        rows = yield statement("read_row", schema, read_only=True), [encode.number(number)]
        row = _decode_row(rows[0][0] or b"{}") if rows else None
        found = _Read(row, InstanceCheck(number, row))
        after: int | None = 0
        while after is not None:
            params = [encode.number(number), encode.number(after), encode.number(PAGE)]
            rows = yield statement("read_records", schema, read_only=True), params
            page = page_of(number, rows)
            if page.row_rev != found.row_rev:
                break
            if row is None and not page.records and not after:
                raise NoTarget(f"there is no instance {number}, and no record of one")
            found.check.feed_json(b"[" + b",".join(raw for _, raw in page.records) + b"]")
            after = page.records[-1][0] if len(page.records) == PAGE else None
        else:
            return found


def _check_records(number: int, found: _Read) -> None:
    """Raise `InvalidJournalEntry` if a record is damaged or missing, `Conflict` if nothing is recorded."""
    for problem in found.check.problems:
        raise InvalidJournalEntry(number, problem.rev, problem.detail)
    if found.check.projection.run is not None:
        return
    level = "full" if found.row is None else _level(found.row["journal"])
    if level in {"off", "auto"}:
        raise Conflict(
            f"instance {number} is recorded at level {level!r}: only a 'full' journal has all columns of its row"
        )
    raise InvalidJournalEntry(number, 1, "missing: the history has neither a started nor a snapshot record")


def _level(stored: object) -> str:
    try:
        return level_of(stored)
    except ValueError:
        return "off"


def _changed(found: _Read, projection: Projection) -> dict[str, tuple[Any, Any]]:
    """The columns of the row that are not what the records say."""
    return {} if found.row is None else differences(whole_row(projection), found.row)


def _check_head(number: int, found: _Read, changed: Mapping[str, Any]) -> None:
    """Raise `InvalidJournalEntry` if the row has moved on since its last record.

    A row that differs from the last record in nothing but `rev` has not: a hand has changed its `rev`.
    """
    last, rev = found.check.last, found.row_rev
    if rev is not None and rev > last and changed.keys() - {"rev"}:
        raise InvalidJournalEntry(
            number,
            last + 1,
            f"missing: the row is at revision {rev}, and differs from the last record in "
            f"{', '.join(sorted(changed.keys() - {'rev'}))}; to keep the row, accept it; to go back to its last record "
            "and run again what ran since, rebuild it with at_last_record (--at-last-record)",
        )


def row_to_write(number: int, projection: Projection) -> dict[str, Any]:
    """Return the columns of the row, without its claim. Raises `Conflict`."""
    run = projection.run
    if run is None or run.level != "full":
        level = "off" if run is None else run.level
        raise Conflict(
            f"instance {number} is recorded at level {level!r}: only a 'full' journal has all columns of its row"
        )
    anomalies = [each for each in projection.anomalies if not each.is_notice]
    if anomalies:
        first = anomalies[0]
        raise Conflict(
            f"the journal of instance {number} has {len(anomalies)} anomalies, the first at revision "
            f"{first.rev}: {first.kind} is {first.reason}; it does not tell what the row is"
        )
    row = whole_row(projection)
    if projection.status == "executing":
        released = {
            "status": "runnable",
            "claim_id": None,
            "claim_token_hash": None,
            "locked_by": None,
            "hold": OFFERED if projection.suspended is None else PAUSED,
        }
        row |= {**released, "rev": projection.rev + 1}
    return row


def _write(
    schema: str, command: Command, found: _Read, row: dict[str, Any], *, record: bool
) -> tuple[Statement, Params]:
    projection = found.check.projection
    current = projection.current
    claim = current.claim if projection.status == "executing" and current is not None else None
    ended = [None, None] if claim is None else [claim.id.encode(), encode.text(claim.owner)]
    given = [encode.number(found.check.instance_id), *command.params(), msgspec.json.encode(row)]
    last = encode.number(found.check.last)
    if found.row_rev is None:
        return statement("restore_instance", schema), [*given, last, *ended]
    params = [*given, encode.number(found.row_rev), last, *ended, b"t" if record else b"f"]
    return statement("rebuild_instance", schema), params


# -- accept


def accepting(schema: str, target: int | str | bytes, command: Command) -> Dialogue[int]:
    """Record the row of an instance as it is. Raises `NoTarget`, and `Conflict` if its outcomes are not recorded."""
    number = yield from resolving(schema, target)
    while True:
        rows = yield statement("read_row", schema, read_only=True), [encode.number(number)]
        earlier = yield from earlier_receipt(schema, ACCEPT, number, command)
        if earlier is not None:
            return number
        if not rows:
            raise NoTarget(f"there is no instance {number}")
        level = _level(_decode_row(rows[0][0] or b"{}")["journal"])
        if level in {"off", "auto"}:
            raise Conflict(f"instance {number} has no journal (level {level!r}): there is nothing to accept")
        try:
            done = yield statement("accept_instance", schema), [encode.number(number), *command.params()]
        except psycopg.errors.UniqueViolation as refused:
            if refused.diag.constraint_name != "receipts_once":
                raise
            continue  # another call came first
        if not done:
            raise Conflict(
                f"a time of instance {number} is infinite, and no record can have that: correct the row"
            )
        return number
