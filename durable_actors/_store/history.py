"""Histories: pages of records, the row at a revision, export and import. One page is one statement, so one snapshot."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

import msgspec
import psycopg

from durable_actors._postgres.driver import encode
from durable_actors._postgres.driver.connection import PgConn
from durable_actors._postgres.driver.statement import Params, Row, Statement
from durable_actors._store.journal import HistoryPage, page_of
from durable_actors._store.sql import statement
from durable_actors.errors import ConfigError, Conflict, InvalidJournalEntry, NoTarget
from durable_actors.journal import (
    ErrorInfo,
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
from durable_actors.journal.kinds import known_level
from durable_actors.journal.records import DAMAGED
from durable_actors.journal.row import whole_row
from durable_actors.journal.verify import is_acceptance, is_truncation

PAGE: Final = 1000
"""Records per statement."""
BASES: Final = frozenset({"started", "snapshot"})
"""Records that say at which level the instance is recorded."""


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
        self.accepted = 0
        """Somebody has accepted the row with this record: damage before it is told, and not raised."""
        self._level: Level | None = None
        self._began = after
        self._against_row = against_row

    def call(self, schema: str, *, limit: int = PAGE) -> tuple[Statement, Params]:
        """The statement that reads the next page."""
        params = [encode.number(self.number), encode.number(self.after), encode.number(limit)]
        return statement("read_records", schema, read_only=True), params

    def page(self, rows: Sequence[Row], *, limit: int = PAGE) -> list[Record]:
        """The records that it returned. Damage that lies before `accepted` is a record of kind "damaged".

        Raises `InvalidJournalEntry`, after which the reader is where it was, and `NoTarget` if there is neither row nor
        record.
        """
        page = page_of(self.number, rows)
        if page.row_rev is None and not page.records and not self.after:
            raise NoTarget(f"there is no instance {self.number}, and no record of one")
        row_level = known_level(page.row_level) or "off"
        split = sum(rev < self.accepted for rev, _ in page.records)
        before, since = page.records[:split], page.records[split:]
        found = _scan(self.number, before, last=self.after, level=self._level, row_level=row_level)
        found += self._checked(since, before[-1][0] if before else self.after, row_level)
        ended = len(page.records) < limit
        self._check_end(page, ended=ended, row_level=row_level)
        self.after = page.records[-1][0] if page.records else self.after
        self.row_rev, self.row_level, self.ended = page.row_rev, row_level, ended
        for record in found:
            if record.kind in BASES:
                self._level = level_of(record.data["row"]["journal"])
        return found

    def _checked(self, raws: Sequence[tuple[int, bytes]], last: int, row_level: Level) -> list[Record]:
        decoded = [decode_record(raw, instance_id=self.number, rev=rev) for rev, raw in raws]
        found = list(check_sequence(decoded, self.number, after=last, level=self._level))
        if found and not last:
            check_first(found[0], row_level)
        return found

    def _check_end(self, page: HistoryPage, *, ended: bool, row_level: Level) -> None:
        rev, last = page.row_rev, page.records[-1][0] if page.records else self.after
        # Nothing is known of a revision that the caller begins after, unless the row is ahead of it.
        known = bool(page.records) or not self._began or (rev is not None and rev > last)
        if ended and self._against_row and rev is not None and known:
            check_head(self.number, last=last, row_rev=rev, level=row_level)


def check_first(record: Record, level: Level) -> None:
    """Raise `InvalidJournalEntry` if the first record of a row of this level is not the beginning of its history."""
    if record.kind not in BASES and level not in {"off", "auto"}:
        reason = f"missing: the history begins with {record.kind}, revision {record.rev}"
        raise InvalidJournalEntry(record.instance_id, 1, reason)


class DamagedPage(msgspec.Struct, frozen=True):
    """A page of a history as far as it can be read, for people."""

    records: list[Record]
    damaged: dict[int, str]
    """What is wrong with the others: the revision → why."""
    accepted: dict[int, str]
    """The same, for what lies before a row that was accepted: known, and no failure."""
    level: Level
    """Of the row; "off" if there is none."""

    def check(self, number: int) -> None:
        """Raise `InvalidJournalEntry` for the first of them that is not accepted."""
        for rev, reason in self.damaged.items():
            raise InvalidJournalEntry(number, rev, reason)


def read_damaged(
    number: int, rows: Sequence[Row], *, after: int, limit: int, accepted: int = 0
) -> DamagedPage:
    """Read the rows of read_records.sql, and go on after a record that is damaged or missing. Raises `NoTarget`.

    `accepted`: the revision of a record on a later page by which the row was accepted.
    """
    page = page_of(number, rows)
    if page.row_rev is None and not page.records and not after:
        raise NoTarget(f"there is no instance {number}, and no record of one")
    row_level = known_level(page.row_level) or "off"
    found = _scan(number, page.records, last=after, level=None, row_level=row_level)
    records = [each for each in found if each.kind != DAMAGED]
    accepted = max([accepted, *(each.rev for each in records if is_acceptance(each))])
    wrong = {each.rev: each.error.text for each in found if each.kind == DAMAGED and each.error is not None}
    if len(page.records) < limit and page.row_rev is not None and (page.records or not after):
        last = page.records[-1][0] if page.records else after
        try:
            check_head(number, last=last, row_rev=page.row_rev, level=row_level)
        except InvalidJournalEntry as error:
            wrong.setdefault(error.rev, error.reason)
    return DamagedPage(
        records,
        {rev: reason for rev, reason in wrong.items() if rev >= accepted},
        {rev: reason for rev, reason in wrong.items() if rev < accepted},
        row_level,
    )


class _Time(msgspec.Struct):
    at: datetime


def _scan(
    number: int, raws: Sequence[tuple[int, bytes]], *, last: int, level: Level | None, row_level: Level
) -> list[Record]:
    """The records, with one of kind "damaged" in place of what cannot be read, or before what lacks its predecessor."""
    found: list[Record] = []
    for rev, raw in raws:
        try:
            record = decode_record(raw, instance_id=number, rev=rev)
        except InvalidJournalEntry as error:
            found.append(_marker(error, _time_of(raw, found)))
            level = None  # what follows a record that cannot be read is not measured by it
        else:
            wrong = _out_of_place(record, last=last, level=level, row_level=row_level)
            found += [record] if wrong is None else [_marker(wrong, record.at), record]
            level = level_of(record.data["row"]["journal"]) if record.kind in BASES else level
        last = rev
    return found


def _marker(error: InvalidJournalEntry, at: datetime) -> Record:
    told = ErrorInfo(text=error.reason, type=InvalidJournalEntry.__name__)
    return Record(instance_id=error.instance_id, rev=error.rev, at=at, kind=DAMAGED, error=told)


def _time_of(raw: bytes, before: Sequence[Record]) -> datetime:
    """The time of a record that cannot be read; else that of the one before."""
    try:
        return msgspec.json.decode(raw, type=_Time).at
    except msgspec.DecodeError:
        return before[-1].at if before else datetime.fromtimestamp(0, UTC)


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


async def read_history(
    conn: PgConn, schema: str, reader: HistoryReader, *, limit: int = PAGE
) -> list[Record]:
    """Read the next page. Damage is raised, unless the row was accepted since: then it is told.

    Raises `NoTarget`, `InvalidJournalEntry`.
    """
    rows = (await conn.run(*reader.call(schema, limit=limit))).rows
    try:
        return reader.page(rows, limit=limit)
    except InvalidJournalEntry as damage:
        accepted = await find_acceptance(conn, schema, reader.number, after=damage.rev)
        if accepted is None:
            raise
        reader.accepted = accepted
        return reader.page(rows, limit=limit)


async def find_acceptance(conn: PgConn, schema: str, number: int, *, after: int) -> int | None:
    """The last revision, after this one, at which somebody has accepted the row."""
    params = [encode.number(number), encode.number(after)]
    rows = (await conn.run(statement("find_acceptance", schema, read_only=True), params)).rows
    return int(rows[0][0] or 0) if rows else None


async def project(conn: PgConn, schema: str, number: int, *, revs: Iterable[int]) -> dict[int, Projection]:
    """Fold the history of an instance; return what it gives at each of these revisions.

    Raises `NoTarget`, `InvalidJournalEntry`, and `Conflict` for a revision that has no record.
    """
    wanted = sorted(set(revs))
    found: dict[int, Projection] = {}
    reader = HistoryReader(number)
    folding = _Folding()
    while not reader.ended and len(found) < len(wanted):
        for record in await read_history(conn, schema, reader):
            if folding.add(record) and record.rev in wanted:
                found[record.rev] = copy_of(folding.projection)
    for rev in wanted:
        if rev not in found:
            raise Conflict(f"instance {number} has no record of revision {rev}: {folding.why(rev, reader)}")
    return found


class _Folding:
    """A history as it is folded, and from which revision on it tells something. Pure."""

    def __init__(self) -> None:
        self.projection = copy_of(None)
        self._last = 0
        self._broken = False
        self._accepted = 0
        """Somebody has accepted the row here, because of damage that lies before."""
        self._kept = 0
        """Retention may have deleted what lies before this revision."""

    def add(self, record: Record) -> bool:
        """Fold a record. Returns whether the projection is that of its revision: it is none after damage."""
        if self._broken and is_acceptance(record):
            self._broken, self._accepted, self.projection = False, record.rev, copy_of(None)
        if record.kind == DAMAGED or self._broken:
            self._broken = True
            return False
        if is_truncation(record) and record.rev > self._last + 1:
            self._kept = record.rev
        self._last = record.rev
        replay_into(self.projection, [record])
        return True

    def why(self, rev: int, reader: HistoryReader) -> str:
        """Why nothing is known of a revision."""
        if rev < self._accepted:
            wrong = f"a record before revision {self._accepted} is damaged or missing"
            return f"{wrong}; there the row was accepted as it is"
        if rev < self._kept:
            begins = f"its history begins with revision {self._kept}, a snapshot"
            return f"{begins}; retention has deleted what lies before"
        return f"its level is {reader.row_level!r}, and its last record is revision {reader.after}"


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


class Exported:
    """Which records of a history are exported: after damage only those from where the row was accepted on. Pure."""

    def __init__(self) -> None:
        self._broken = False

    def line(self, record: Record) -> str | None:
        """A record as one line of JSON, without its line end; None: it cannot be imported."""
        self._broken = record.kind == DAMAGED or (self._broken and not is_acceptance(record))
        return None if self._broken else encode_record(record).decode()


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
    if first.kind not in BASES:
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
