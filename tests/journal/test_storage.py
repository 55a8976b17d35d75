"""The conformance suite on `MemoryJournal`, and the boundary `Journal`."""

from __future__ import annotations

from contextlib import asynccontextmanager

import msgspec
import pytest
from durable_actors.errors import ConfigError, InvalidJournalEntry, ProtocolAnomaly, RevConflict
from durable_actors.journal import (
    CATALOG,
    Journal,
    JournalStorage,
    MemoryJournal,
    check_head,
    check_sequence,
    fold,
    run_thread,
)
from durable_actors.testing.journal_conformance import JournalConformance, StoreUnderTest
from tests.journal.golden import RECORDS
from tests.journal.kit import reasons
from tests.journal.row_model import RUN, RowModel

THREAD = run_thread(RUN)


class TestMemoryJournal(JournalConformance):
    """R9: the same suite runs on every adapter."""

    @asynccontextmanager
    async def open_store(self):
        journal = MemoryJournal()

        async def reopen() -> JournalStorage:
            return MemoryJournal.load(journal.dump())

        async def overwrite(thread, rev, stored) -> bool:
            journal.overwrite(thread, rev, stored)
            return True

        yield StoreUnderTest(journal, reopen, overwrite)


async def test_a_suite_without_a_store_says_what_is_missing():
    with pytest.raises(TypeError, match="must define open_store"):
        await JournalConformance().test_an_unknown_thread_is_empty()


async def test_a_dump_has_all_threads():
    journal = MemoryJournal()
    model = RowModel("full", [3, 1] * 40).run(10)
    await journal.append(THREAD, model.records, expected_rev=0)
    assert journal.threads() == [THREAD]
    assert MemoryJournal.load(journal.dump()).threads() == [THREAD]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"storage": object()}, "has no async method append"),
        ({"storage": "postgresql://"}, "storage='postgresql://' is no journal storage"),
        ({"storage": MemoryJournal(), "page": 0}, "page=0"),
        ({"storage": MemoryJournal(), "on_anomaly": "ignore"}, "on_anomaly='ignore'"),
    ],
)
def test_the_boundary_checks_its_configuration_before_use(options, named):
    """R9, R16."""
    with pytest.raises(ConfigError, match=named):
        Journal(**options)


async def test_the_boundary_refuses_a_record_that_could_not_be_read_again():
    storage = MemoryJournal()
    journal = Journal(storage)
    start = RECORDS["started"]
    for bad in (_broken(), _foreign()):
        with pytest.raises(InvalidJournalEntry):
            await journal.append(THREAD, [start, bad], expected_rev=0)
    assert await storage.head(THREAD) == 0
    with pytest.raises(ValueError, match="is not the thread of an instance"):
        await journal.append(CATALOG, [start], expected_rev=0)


def _broken():
    return msgspec.structs.replace(RECORDS["claimed"], data={})


def _foreign():
    return msgspec.structs.replace(RECORDS["claimed"], instance_id=8)


async def test_a_long_history_is_read_in_pages():
    storage = MemoryJournal()
    model = RowModel("full")
    for _ in range(30):
        model.claim()
        model.next()
    await storage.append(THREAD, model.records, expected_rev=0)
    journal = Journal(storage, page=7)
    assert await journal.read(THREAD, after=3, limit=4) == model.records[3:7]
    assert await journal.read(THREAD, after=61) == []
    assert (await journal.load(THREAD)).rev == len(model.records) == 61


async def test_anomalies_are_reported_or_raised():
    storage = MemoryJournal()
    await storage.append(THREAD, [RECORDS["started"], RECORDS["next"]], expected_rev=0)
    assert "stale_claim" in reasons(await Journal(storage).load(THREAD))
    with pytest.raises(ProtocolAnomaly, match="attempt_completed is stale_claim"):
        await Journal(storage, on_anomaly="raise").load(THREAD)


async def test_a_missing_first_record_is_found_if_the_level_is_known():
    """Without its first record, a thread does not say at which level it was recorded; its row does."""
    storage = MemoryJournal()
    model = RowModel("claims")
    model.claim()
    await storage.append(THREAD, model.records, expected_rev=0)
    storage.overwrite(THREAD, 1, None)
    with pytest.raises(InvalidJournalEntry, match="revision 1: missing"):
        await Journal(storage).load(THREAD, level="claims")
    assert "unknown_runnable_intent" in reasons(await Journal(storage).load(THREAD))


async def test_a_conflict_says_which_revision_the_thread_has():
    """R10, R47."""
    with pytest.raises(RevConflict, match="run:7 is at revision 0, the append expected 4"):
        await MemoryJournal().append(THREAD, [], expected_rev=4)


# Revisions.


def test_gaps_are_damage_only_where_no_gap_is_promised():
    """C7."""
    model = RowModel("claims")
    for move in (model.claim, model.next, model.claim, model.next):
        move()
    with pytest.raises(InvalidJournalEntry, match="revision 3: missing: the record after it is revision 4"):
        list(check_sequence([one for one in model.records if one.rev != 3], RUN))
    sparse = RowModel("outcomes")
    sparse.claim()
    sparse.next()
    assert [one.rev for one in check_sequence(sparse.records, RUN)] == [1, 3]


@pytest.mark.parametrize(
    ("records", "why"),
    [
        ([RECORDS["claimed"], RECORDS["claimed"]], "does not come after revision 2"),
        ([RECORDS["claimed"], RECORDS["started"]], "does not come after"),
        ([_foreign()], "belongs to instance 8, not 7"),
    ],
)
def test_revisions_must_continue(records, why):
    with pytest.raises(InvalidJournalEntry, match=why):
        list(check_sequence(records, RUN))


def test_a_start_is_the_first_record():
    late = msgspec.structs.replace(RECORDS["started"], rev=5)
    with pytest.raises(InvalidJournalEntry, match="started is not the first record"):
        list(check_sequence([late], RUN))


def test_the_last_record_and_the_row_agree():
    """Case 24: rev ≠ the row's."""
    check_head(RUN, last=4, row_rev=4, level="full")
    check_head(RUN, last=3, row_rev=4, level="outcomes")
    with pytest.raises(InvalidJournalEntry, match="revision 5: missing: the row is at revision 6"):
        check_head(RUN, last=4, row_rev=6, level="claims")
    with pytest.raises(InvalidJournalEntry, match="revision 5: the row is at revision 4"):
        check_head(RUN, last=5, row_rev=4, level="outcomes")
    assert fold([]).status == "absent"
