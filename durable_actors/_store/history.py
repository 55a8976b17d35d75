"""Histories: pages of records, the row at a revision, export and import. One page is one statement, so one snapshot."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec
import psycopg

from durable_actors._postgres.driver import encode
from durable_actors._postgres.driver.connection import PgConn
from durable_actors._postgres.driver.statement import Params, Row, Statement
from durable_actors._store.journal import page_of
from durable_actors._store.sql import statement
from durable_actors.errors import ConfigError, Conflict, InvalidJournalEntry, NoTarget
from durable_actors.journal import (
    Level,
    Projection,
    Record,
    check_head,
    check_record,
    check_sequence,
    decode_record,
    differences,
    encode_record,
    level_of,
)
from durable_actors.journal.fold import copy_of, replay_into
from durable_actors.journal.kinds import LEVELS, known_level
from durable_actors.journal.row import whole_row
from durable_actors.journal.verify import is_acceptance, is_truncation

PAGE: Final = 1000
"""Records per statement."""


class HistoryReader:
    """Reads the history of one instance page by page, and checks that no record is damaged or missing. Sans-I/O."""

    def __init__(self, number: int, *, after: int = 0, against_row: bool = True) -> None:
        self.number = number
        self.after = after
        """The revision of the last record that was read."""
        self.row_rev: int | None = None
        """None: there is no row."""
        self.row_level: Level = "off"
        self.ended = False
        """Whether the last page was read."""
        self._level: Level | None = None
        self._began = after
        self._against_row = against_row

    def call(self, schema: str, *, limit: int = PAGE) -> tuple[Statement, Params]:
        """The statement that reads the next page."""
        params = [encode.number(self.number), encode.number(self.after), encode.number(limit)]
        return statement("read_records", schema, read_only=True), params

    def page(self, rows: Sequence[Row], *, limit: int = PAGE) -> list[Record]:
        """The records that it returned.

        Raises `InvalidJournalEntry`, and `NoTarget` if neither row nor record exists.
        """
        page = page_of(self.number, rows)
        if page.row_rev is None and not page.records and not self.after:
            raise NoTarget(f"there is no instance {self.number}, and no record of one")
        before = self.after
        found = list(check_sequence(page.decoded(), self.number, after=before, level=self._level))
        for record in found:
            if record.kind in {"started", "snapshot"}:
                self._level = level_of(record.data["row"]["journal"])
            self.after = record.rev
        self.ended = len(found) < limit
        self.row_rev = page.row_rev
        self.row_level = known_level(page.row_level) or "off"
        if found and not before:
            check_first(found[0], self.row_level)
        rev = page.row_rev
        # Nothing is known of a revision that the caller begins after, unless the row is ahead of it.
        known = bool(found) or not self._began or (rev is not None and rev > self.after)
        if self.ended and self._against_row and rev is not None and known:
            check_head(self.number, last=self.after, row_rev=rev, level=self.row_level)
        return found


def check_first(record: Record, level: Level) -> None:
    """Raise `InvalidJournalEntry` if the first record of a row of this level is not the beginning of its history."""
    if record.kind not in {"started", "snapshot"} and level not in {"off", "auto"}:
        reason = f"missing: the history begins with {record.kind}, revision {record.rev}"
        raise InvalidJournalEntry(record.instance_id, 1, reason)


class DamagedPage(msgspec.Struct, frozen=True):
    """A page of a history as far as it can be read, for people."""

    records: list[Record]
    damaged: dict[int, str]
    """What is wrong with the others: the revision → why. Without what lies before a row that was accepted."""
    level: Level
    """Of the row; "off" if there is none."""

    def check(self, number: int) -> None:
        """Raise `InvalidJournalEntry` for the first of them."""
        for rev, reason in self.damaged.items():
            raise InvalidJournalEntry(number, rev, reason)


def read_damaged(number: int, rows: Sequence[Row], *, after: int, limit: int) -> DamagedPage:
    """Read the rows of read_records.sql, and go on after a record that is damaged or missing. Raises `NoTarget`."""
    page = page_of(number, rows)
    if page.row_rev is None and not page.records and not after:
        raise NoTarget(f"there is no instance {number}, and no record of one")
    row_level = "off" if page.row_level not in range(len(LEVELS)) else level_of(page.row_level)
    found: list[Record] = []
    damaged: dict[int, str] = {}
    last, level = after, None
    for rev, raw in page.records:
        record, error = _readable(number, rev, raw)
        if record is not None:
            error = _out_of_place(record, last=last, level=level, row_level=row_level)
            found.append(record)
            damaged = {} if is_acceptance(record) else damaged
            if record.kind in {"started", "snapshot"}:
                level = level_of(record.data["row"]["journal"])
        else:
            level = None  # what follows a record that cannot be read is not measured by it
        if error is not None:
            damaged[error.rev] = error.reason
        last = rev
    if len(page.records) < limit and page.row_rev is not None and (page.records or not after):
        try:
            check_head(number, last=last, row_rev=page.row_rev, level=row_level)
        except InvalidJournalEntry as error:
            damaged.setdefault(error.rev, error.reason)
    return DamagedPage(found, damaged, row_level)


def _readable(number: int, rev: int, raw: bytes) -> tuple[Record | None, InvalidJournalEntry | None]:
    try:
        return decode_record(raw, instance_id=number, rev=rev), None
    except InvalidJournalEntry as error:
        return None, error


def _out_of_place(
    record: Record, *, last: int, level: Level | None, row_level: Level
) -> InvalidJournalEntry | None:
    try:
        if not last:
            check_first(record, row_level)
        list(check_sequence([record], record.instance_id, after=last, level=level))
    except InvalidJournalEntry as error:
        return error
    return None


async def project(conn: PgConn, schema: str, number: int, *, revs: Iterable[int]) -> dict[int, Projection]:
    """Fold the history of an instance; return what it gives at each of these revisions.

    Raises `NoTarget`, `InvalidJournalEntry`, and `Conflict` for a revision that has no record.
    """
    wanted = sorted(set(revs))
    found: dict[int, Projection] = {}
    reader = HistoryReader(number)
    projection = copy_of(None)
    kept = 0  # retention may have deleted what lies before this revision
    while not reader.ended and len(found) < len(wanted):
        before = reader.after
        for record in reader.page((await conn.run(*reader.call(schema))).rows):
            replay_into(projection, [record])
            if record.rev in wanted:
                found[record.rev] = copy_of(projection)
            kept = record.rev if is_truncation(record) and record.rev > before + 1 else kept
            before = record.rev
    for rev in wanted:
        if rev not in found:
            if rev < kept:
                raise Conflict(
                    f"instance {number} has no record of revision {rev}: its history begins with revision {kept}, a "
                    "snapshot; retention has deleted what lies before"
                )
            raise Conflict(
                f"instance {number} has no record of revision {rev}: its level is {reader.row_level!r}, and its last "
                f"record is revision {reader.after}"
            )
    return found


def full_row(number: int, rev: int, projection: Projection) -> dict[str, Any]:
    """All columns of the row at a revision. Raises `Conflict` if the records do not tell them."""
    run = projection.run
    if run is None or run.level != "full":
        level = "off" if run is None else run.level
        raise Conflict(
            f"instance {number} is recorded at level {level!r} at revision {rev}; only 'full' records state and result"
        )
    return whole_row(projection)


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """The columns in which a row differs at two revisions: name → (before, after)."""
    missing = dict.fromkeys(before.keys() ^ after.keys())
    return differences({**missing, **before}, {**missing, **after})


# -- export and import

_decode: Final = msgspec.json.Decoder(Record).decode


def lines_of(records: Iterable[Record]) -> Iterator[str]:
    """Each record as one line of JSON, without its line end."""
    return (encode_record(record).decode() for record in records)


def read_lines(lines: Iterable[str | bytes]) -> list[Record]:
    """The records of an exported history, checked: of one instance, in order, none missing.

    Raises `InvalidJournalEntry`, and `ConfigError` for a line that is no record.
    """
    records: list[Record] = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                records.append(check_record(_decode(line)))
            except msgspec.DecodeError as exc:
                raise ConfigError(f"line {number} is not a record: {exc}", option="lines") from None
    if not records:
        raise ConfigError("lines has no record", option="lines")
    first = records[0]
    if first.kind not in {"started", "snapshot"}:
        reason = f"the history begins with {first.kind}: the records before it are missing"
        raise InvalidJournalEntry(first.instance_id, first.rev, reason)
    return list(check_sequence(records, first.instance_id))


async def import_records(conn: PgConn, schema: str, records: list[Record]) -> None:
    """Write the history of an instance that this database has neither a row nor a record of. Raises `Conflict`."""
    number = records[0].instance_id
    body = b"[" + b",".join([encode_record(record) for record in records]) + b"]"
    try:
        rows = (await conn.run(statement("import_records", schema), [encode.number(number), body])).rows
    except psycopg.errors.UniqueViolation:
        rows = []
    except psycopg.DataError as exc:
        reason = f"a record does not fit the table: {str(exc).splitlines()[0]}"
        raise InvalidJournalEntry(number, records[0].rev, reason) from exc
    if not rows or int(rows[0][0] or 0) < len(records):
        raise Conflict(
            f"instance {number} exists in this database, or records of it do; nothing was imported"
        )
