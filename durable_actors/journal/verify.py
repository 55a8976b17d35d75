"""Whether a row and its records agree: what `verify` finds, for one instance. Pure.

How much can be compared depends on the row's level. At "claims" and "full" every revision has a record, and the last
one gives the row, at "full" with state and result. At "outcomes", moves between two outcomes are not recorded: the
columns that they change are compared only while the last record is of the row's own revision. Below, there is nothing
to fold, and records are only checked for damage.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final, Literal

import msgspec

from durable_actors.errors import InvalidJournalEntry
from durable_actors.journal.expand import expand
from durable_actors.journal.facts import Fact
from durable_actors.journal.fold import copy_of, fold_into
from durable_actors.journal.index import fold_indexes
from durable_actors.journal.kinds import Data, Level, is_gapless, known_level, level_of
from durable_actors.journal.projection import ANOMALIES, Anomaly, Projection
from durable_actors.journal.records import Record, checked_data, decode_record
from durable_actors.journal.row import COLUMNS, NOT_IN_THE_JOURNAL, differences, whole_row

ProblemReason = Literal[
    "gap", "invalid_record", "anomaly", "divergence", "rev_mismatch", "index_mismatch", "missing_row"
]
"""What is wrong with an instance; `PROBLEMS` says what each means."""

PROBLEMS: Final[Mapping[ProblemReason, str]] = {
    "gap": "a record is missing: a revision that must be recorded, or the first record",
    "invalid_record": "a record cannot be read: an unknown kind, or a field that is missing or ill-typed",
    "anomaly": "a record does not fit the records before it",
    "divergence": "a column of the row is not what the records say",
    "rev_mismatch": "the row agrees with its last record in all but `rev`, or is behind it",
    "index_mismatch": "the row is of another machine or queue, or has another unique key, than its records say",
    "missing_row": "there are records, and no row",
}
"""Every reason of a problem."""

_INDEXED: Final = frozenset({"fsm", "queue", "unique_key"})
"""The columns by which the run index and the catalog find an instance; both are built from its first record."""
_MOVED: Final = (frozenset(COLUMNS) | frozenset(NOT_IN_THE_JOURNAL)) - _INDEXED
"""The columns that moves change."""
_BASES: Final = frozenset({"started", "snapshot"})
_MAX_SHOWN: Final = 120


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """One disagreement between the row of an instance and its journal."""

    instance_id: int
    reason: ProblemReason
    rev: int
    """The revision that it concerns: of the record that is missing, damaged or does not fit, else of the row."""
    detail: str
    """A sentence for people. Values in it are shortened."""
    column: str | None = None
    """The column that differs, for "divergence", "rev_mismatch" and "index_mismatch"."""
    anomaly: Anomaly | None = None
    """The anomaly, for "anomaly"."""

    @property
    def is_notice(self) -> bool:
        """Whether it is worth knowing, and no damage: a step ran with another definition of its machine."""
        return self.anomaly is not None and self.anomaly.is_notice


class VerifyReport(msgspec.Struct, frozen=True):
    """The result of `verify`."""

    checked: int
    """How many instances were checked."""
    problems: list[Problem]
    """By instance; none: every row is what its journal says."""

    @property
    def ok(self) -> bool:
        """Whether there is no problem but notices: every row is what its journal says."""
        return all(each.is_notice for each in self.problems)


_records: Final = msgspec.json.Decoder(list[Record])
_raws: Final = msgspec.json.Decoder(list[msgspec.Raw])


class _Key(msgspec.Struct):
    rev: int


_keys: Final = msgspec.json.Decoder(_Key)


class InstanceCheck:
    """Checks one instance: give it all records in order, in any number of pages, then ask for the problems."""

    def __init__(self, instance_id: int, row: Mapping[str, Any] | None) -> None:
        self.instance_id = instance_id
        self.problems: list[Problem] = []
        self._row = row
        self._row_level: Level | None = None if row is None else known_level(row["journal"]) or "off"
        self._projection = copy_of(None)
        self._level: Level | None = None
        """After the last record; None: no record has said it."""
        self._last = 0
        self._foldable = True
        """False after a gap or a damaged record: what follows would only repeat it."""
        self._bases = 0
        self._index_facts: list[Fact] = []

    def feed_json(self, page: bytes) -> int:
        """Check a page of records, a JSON array. Returns how many there were."""
        try:
            records = _records.decode(page)
        except msgspec.DecodeError:
            return self._feed_raw(_raws.decode(page))
        self.feed(records)
        return len(records)

    def _feed_raw(self, raws: Sequence[msgspec.Raw]) -> int:
        """A page in which at least one record cannot be decoded."""
        for raw in raws:
            rev = _keys.decode(raw).rev
            try:
                record = decode_record(bytes(raw), instance_id=self.instance_id, rev=rev)
            except InvalidJournalEntry as error:
                self._damaged(error)
            else:
                self.feed([record])
        return len(raws)

    def feed(self, records: Iterable[Record]) -> None:
        """Check the next records."""
        for record in records:
            try:
                data = checked_data(record)
            except InvalidJournalEntry as error:
                self._damaged(error)
                continue
            continues = self._continues(record)
            self._last = record.rev
            if continues and self._foldable and self._level is not None:
                self._fold(record, data)

    def _damaged(self, error: InvalidJournalEntry) -> None:
        self._found("invalid_record", error.rev, error.reason)
        self._last = error.rev
        self._foldable = False

    def _continues(self, record: Record) -> bool:
        """Whether no record is missing before this one."""
        if record.kind in _BASES:
            self._level = level_of(record.data["row"]["journal"])
            self._bases += 1
            if record.kind == "snapshot":  # it needs nothing that lies before it
                self._foldable = True
                if is_acceptance(record):
                    self._begin_anew()
                return True
            if record.rev == 1:
                return True
            self._found("invalid_record", record.rev, "started is not the first record")
        elif self._level is None:
            if self._row_level in {None, "off", "auto"} or self._last:
                return True  # nothing to fold yet; a first record that is missing was reported with the first one
            self._found("gap", 1, f"missing: the history begins with {record.kind}, revision {record.rev}")
        elif not is_gapless(self._level) or record.rev == self._last + 1 or not self._foldable:
            return True
        else:
            self._found("gap", self._last + 1, f"missing: the record after it is revision {record.rev}")
        self._foldable = False
        return False

    def _begin_anew(self) -> None:
        """Somebody has accepted the row as it is: what is wrong with the records before that is known."""
        self.problems.clear()
        self._index_facts.clear()
        self._projection, self._bases = copy_of(None), 1

    @property
    def projection(self) -> Projection:
        """What the records add up to, after all of them were given; without a run if none of them is a base."""
        return self._projection

    @property
    def last(self) -> int:
        """The revision of the last record that was given; 0: there was none."""
        return self._last

    def _fold(self, record: Record, data: Data) -> None:
        run = self._projection.run
        facts = expand(record, queue=run.queue if run else "", data=data)
        fold_into(self._projection, facts)
        if record.kind in _BASES:
            self._index_facts += facts

    def finish(self) -> list[Problem]:
        """Return every problem, after all records were given."""
        projection = self._projection
        for anomaly in projection.anomalies:
            self._anomaly(anomaly)
        if self._bases > 1:
            for index in fold_indexes(self._index_facts).values():
                for anomaly in index.anomalies:
                    self._found("index_mismatch", anomaly.rev, ANOMALIES[anomaly.reason])
        if self._row is None:
            self._found(
                "missing_row", self._last, f"the last record is revision {self._last}{_known(projection)}"
            )
        elif self._foldable:
            self._compare(self._row, projection)
        return self.problems

    def _anomaly(self, anomaly: Anomaly) -> None:
        where = f" ({anomaly.runnable_key})" if anomaly.runnable_key else ""
        meaning = ANOMALIES[anomaly.reason]
        if anomaly.reason == "malformed_entry":  # the record itself was checked: it comes at the wrong time
            meaning = "the run has not ended" if anomaly.kind == "run_revived" else "the run has not started"
        detail = f"{anomaly.kind} is {anomaly.reason}: {meaning}{where}"
        self._found("anomaly", anomaly.rev, detail, anomaly=anomaly)

    def _compare(self, row: Mapping[str, Any], projection: Projection) -> None:
        rev, last = int(row["rev"]), self._last
        if projection.run is None:
            if known_level(row["journal"]) is None:
                detail = f"journal is {_shown(row['journal'])}, which is no level"
                self._found("divergence", rev, detail, column="journal")
            elif self._row_level not in {"off", "auto"}:
                self._found("gap", 1, "missing: the history has neither a started nor a snapshot record")
            elif last > rev:
                self._rev_mismatch(rev)
            return
        expected = whole_row(projection)
        del expected["rev"]
        gapless = is_gapless(projection.run.level)
        if last != rev and not gapless:  # moves that are not recorded may have changed the others
            expected = {name: value for name, value in expected.items() if name not in _MOVED}
        found = differences(expected, row)
        if last < rev and gapless and found.keys() - _INDEXED:
            self._found("gap", last + 1, f"missing: the row is at revision {rev}")
            return
        if last > rev or (gapless and last < rev):
            self._rev_mismatch(rev)
        for column, (told, actual) in found.items():
            reason: ProblemReason = "index_mismatch" if column in _INDEXED else "divergence"
            detail = f"{column} is {_shown(actual)}, the records say {_shown(told)}"
            self._found(reason, rev, detail, column=column)

    def _rev_mismatch(self, rev: int) -> None:
        detail = f"the row is at revision {rev}, the last record is revision {self._last}"
        self._found("rev_mismatch", rev, detail, column="rev")

    def _found(
        self,
        reason: ProblemReason,
        rev: int,
        detail: str,
        *,
        column: str | None = None,
        anomaly: Anomaly | None = None,
    ) -> None:
        self.problems.append(
            Problem(
                instance_id=self.instance_id,
                reason=reason,
                rev=rev,
                detail=detail,
                column=column,
                anomaly=anomaly,
            )
        )


def check_instance(
    instance_id: int, row: Mapping[str, Any] | None, records: Iterable[Record]
) -> list[Problem]:
    """Return the problems of an instance: its row, as JSON has it (None: there is none), and all its records."""
    check = InstanceCheck(instance_id, row)
    check.feed(records)
    return check.finish()


def _known(projection: Projection) -> str:
    """Who an instance without a row was, for the user who knows only its unique key."""
    run = projection.run
    if run is None:
        return ""
    raw = run.columns.get("unique_key")
    if not isinstance(raw, str) or not raw.startswith("\\x"):
        return f"; it was of machine {run.machine!r}"
    try:
        key = bytes.fromhex(raw[2:]).decode("utf-8", "backslashreplace")
    except ValueError:
        key = raw
    return f"; it was of machine {run.machine!r}, with unique key {key!r}"


def is_acceptance(record: Record) -> bool:
    """Whether the record is a snapshot that the command `accept` has written."""
    command: Mapping[str, Any] = record.data.get("command") or {}
    return record.kind == "snapshot" and command.get("type") == "accept"


def is_truncation(record: Record) -> bool:
    """Whether the record is a snapshot that retention has written: the records before it may be deleted."""
    return record.kind == "snapshot" and record.data.get("retention") is True


def _shown(value: object) -> str:
    text = repr(value.isoformat() if isinstance(value, datetime) else value)
    return text if len(text) <= _MAX_SHOWN else text[: _MAX_SHOWN - 1] + "…"
