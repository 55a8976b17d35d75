"""What a `JournalStorage` must do, as tests that any adapter can run.

Subclass `JournalConformance` in a test module, and say how your storage is opened::

    class TestMyStorage(JournalConformance):
        @asynccontextmanager
        async def open_store(self):
            async with my_database() as db:
                yield StoreUnderTest(MyStorage(db), reopen=..., overwrite=...)

The tests are `async def` methods that take no fixtures; pytest-trio runs them, or call them yourself. Every test opens
a store of its own, which must be empty.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from datetime import UTC, datetime, timedelta
from typing import Any

import attrs
import msgspec
import trio

from durable_actors.errors import InvalidJournalEntry, RevConflict
from durable_actors.journal import (
    CHECKPOINT_FORMAT,
    ErrorInfo,
    Journal,
    JournalStorage,
    Projection,
    Record,
    Thread,
    encode_record,
    make_checkpoint,
    run_thread,
)

_START = datetime(2026, 1, 1, tzinfo=UTC)
_RUN = run_thread(7)
_STEPS = ("begin", "pack", "ship", "bill", "thank")


@attrs.frozen
class StoreUnderTest:
    """A storage, and what the tests need beside its interface."""

    storage: JournalStorage
    reopen: Callable[[], Awaitable[JournalStorage]]
    """Return a storage on the same data with nothing kept in memory, as after a restart of the process."""
    overwrite: Callable[[Thread, int, bytes | None], Awaitable[bool]]
    """Damage the stored record of a revision behind the storage's back: replace its JSON, or remove it if None.

    Return False if the store cannot contain such a record: a jsonb column, for example, contains nothing but JSON.
    """


class JournalConformance:
    """The tests. R and case numbers are those of the dispatch protocol."""

    appenders = 20
    """Tasks that append at the same time."""
    appends = 50
    """Records that each of them appends."""

    def open_store(self) -> AbstractAsyncContextManager[StoreUnderTest]:
        """Open an empty store. Subclasses define it."""
        raise TypeError(f"{type(self).__name__} must define open_store()")

    # Appending.

    async def test_records_come_back_as_they_were_appended(self) -> None:
        """R8: kind, data and every other field, so that a fresh process can rebuild everything from the records."""
        async with self.open_store() as store:
            given = _lives()
            assert await store.storage.append(_RUN, given, expected_rev=0) == len(given)
            read = await store.storage.read(_RUN)
            assert [_bare(one) for one in read] == [_bare(one) for one in given]
            assert [one.rev for one in read] == list(range(1, len(given) + 1))

    async def test_an_append_that_expects_another_revision_writes_nothing(self) -> None:
        """Case 20: R10, R47."""
        async with self.open_store() as store:
            first, second, *_ = _lives()
            for expected in (1, 7, -1):
                await _refused(store.storage, _RUN, [first], expected, actual=0)
            await store.storage.append(_RUN, [first], expected_rev=0)
            for expected in (0, 2):
                await _refused(store.storage, _RUN, [second], expected, actual=1)
            assert await store.storage.append(_RUN, [second], expected_rev=1) == 2

    async def test_an_append_of_nothing_checks_the_revision_all_the_same(self) -> None:
        """R10."""
        async with self.open_store() as store:
            assert await store.storage.append(_RUN, [], expected_rev=0) == 0
            await _refused(store.storage, _RUN, [], 1, actual=0)

    async def test_of_two_concurrent_appends_exactly_one_wins(self) -> None:
        """Case 21: R14, R19."""
        async with self.open_store() as store:
            won: list[str] = []

            async def append(name: str) -> None:
                try:
                    await store.storage.append(_RUN, [_wakeup(name)], expected_rev=0)
                except RevConflict:
                    return
                won.append(name)

            async with trio.open_nursery() as nursery:
                for name in ("one", "other"):
                    nursery.start_soon(append, name)
            [record] = await store.storage.read(_RUN)
            assert [record.by] == won

    async def test_revisions_stay_dense_under_many_appenders(self) -> None:
        """Case 21: R14. Whoever loses reads the head again."""
        async with self.open_store() as store:

            async def append(name: str) -> None:
                for _ in range(self.appends):
                    while True:
                        head = await store.storage.head(_RUN)
                        try:
                            await store.storage.append(_RUN, [_wakeup(name)], expected_rev=head)
                        except RevConflict:
                            await trio.lowlevel.checkpoint()
                            continue
                        break

            async with trio.open_nursery() as nursery:
                for number in range(self.appenders):
                    nursery.start_soon(append, f"task {number}")
            total = self.appenders * self.appends
            read = await store.storage.read(_RUN, limit=total + 1)
            assert [one.rev for one in read] == list(range(1, total + 1))
            counted = Counter(one.by for one in read)
            assert counted == {f"task {number}": self.appends for number in range(self.appenders)}

    async def test_threads_are_independent(self) -> None:
        """R14: order and revisions are those of one thread."""
        async with self.open_store() as store:
            other = run_thread(8)
            await store.storage.append(_RUN, [_wakeup("a")], expected_rev=0)
            await store.storage.append(other, [_wakeup("b", run=8)], expected_rev=0)
            assert (await store.storage.head(_RUN), await store.storage.head(other)) == (1, 1)
            assert [one.by for one in await store.storage.read(other)] == ["b"]

    async def test_what_a_caller_changes_later_is_not_stored(self) -> None:
        """R1: a record that was appended never changes."""
        async with self.open_store() as store:
            record = _wakeup("a")
            await store.storage.append(_RUN, [record], expected_rev=0)
            record.data["new"] = True
            [read] = await store.storage.read(_RUN)
            read.data["new"] = True
            assert [one.data for one in await store.storage.read(_RUN)] == [{}]

    async def test_secrets_are_redacted_before_they_are_stored(self) -> None:
        """C9."""
        async with self.open_store() as store:
            secret = {"api_key": "s3cret", "inner": {"Password": "s3cret"}, "ticket": 5}
            command = {"type": "retry", "metadata": secret}
            record = _replace(_wakeup("ann"), kind="revived", data={"command": command})
            await store.storage.append(_RUN, [record], expected_rev=0)
            [read] = await store.storage.read(_RUN)
            assert "s3cret" not in str(read)
            assert read.data["command"]["metadata"]["ticket"] == 5

    # Reading.

    async def test_pages_are_in_order_and_complete(self) -> None:
        """R15."""
        async with self.open_store() as store:
            await store.storage.append(_RUN, [_wakeup(str(i)) for i in range(10)], expected_rev=0)
            assert [one.rev for one in await store.storage.read(_RUN, limit=3)] == [1, 2, 3]
            assert [one.rev for one in await store.storage.read(_RUN, after=3, limit=3)] == [4, 5, 6]
            assert [one.rev for one in await store.storage.read(_RUN, after=8)] == [9, 10]
            assert await store.storage.read(_RUN, after=10) == []

    async def test_an_unknown_thread_is_empty(self) -> None:
        """A thread begins with its first record."""
        async with self.open_store() as store:
            assert await store.storage.head(_RUN) == 0
            assert await store.storage.read(_RUN) == []
            assert await store.storage.get_checkpoint(_RUN) is None
            assert await Journal(store.storage).load(_RUN) == Projection()

    async def test_everything_is_there_after_a_restart(self) -> None:
        """Case 26: R15."""
        async with self.open_store() as store:
            await store.storage.append(_RUN, _lives(), expected_rev=0)
            checkpoint = make_checkpoint(await Journal(store.storage).load(_RUN))
            await store.storage.put_checkpoint(_RUN, checkpoint)
            before = await store.storage.read(_RUN)
            again = await store.reopen()
            assert await again.read(_RUN) == before
            assert await again.head(_RUN) == len(before)
            assert await again.get_checkpoint(_RUN) == checkpoint
            assert await Journal(again).load(_RUN) == await Journal(store.storage).load(_RUN)

    # Damage.

    async def test_a_damaged_record_is_an_error_that_names_it(self) -> None:
        """Case 24: R20, C7. Neither a read nor a replay skips it."""
        good = _replace(_lives()[2], rev=3)
        fine: dict[str, Any] = msgspec.json.decode(encode_record(good))
        damage: dict[str, bytes] = {
            "no JSON": b'"cut',
            "unknown kind": msgspec.json.encode({**fine, "kind": "teleported"}),
            "data is no object": msgspec.json.encode({**fine, "data": [1]}),
            "missing field": msgspec.json.encode({k: v for k, v in fine.items() if k != "claim_id"}),
            "missing data": msgspec.json.encode({**fine, "kind": "parked"}),
            "another key": msgspec.json.encode({**fine, "rev": 4}),
        }
        for name, stored in damage.items():
            async with self.open_store() as store:
                await store.storage.append(_RUN, _lives(), expected_rev=0)
                if not await store.overwrite(_RUN, 3, stored):
                    continue
                for attempt in (store.storage.read(_RUN), Journal(store.storage).load(_RUN)):
                    assert await _invalid(attempt) == 3, name

    async def test_a_missing_record_is_an_error_that_names_it(self) -> None:
        """Case 24: C7. In the middle, and at the end, where only the head tells."""
        for missing in (3, len(_lives())):
            async with self.open_store() as store:
                await store.storage.append(_RUN, _lives(), expected_rev=0)
                assert await store.overwrite(_RUN, missing, None)
                assert await _invalid(Journal(store.storage).load(_RUN)) == missing

    # Checkpoints.

    async def test_a_checkpoint_is_stored_with_its_revision_and_overwritten(self) -> None:
        """R11."""
        async with self.open_store() as store:
            journal = Journal(store.storage)
            await store.storage.append(_RUN, _lives()[:3], expected_rev=0)
            assert (await journal.save_checkpoint(_RUN)).rev == 3
            stored = await store.storage.get_checkpoint(_RUN)
            assert stored is not None
            assert (stored.rev, stored.format) == (3, CHECKPOINT_FORMAT)
            await store.storage.append(_RUN, _lives()[3:5], expected_rev=3)
            await journal.save_checkpoint(_RUN)
            stored = await store.storage.get_checkpoint(_RUN)
            assert stored is not None
            assert stored.rev == 5
            await store.storage.drop_checkpoint(_RUN)
            await store.storage.drop_checkpoint(_RUN)
            assert await store.storage.get_checkpoint(_RUN) is None

    async def test_no_checkpoint_changes_the_projection(self) -> None:
        """Case 22: R12. Absent, older, current, future, of another format, unreadable, or not what it says."""
        async with self.open_store() as store:
            journal = Journal(store.storage)
            await store.storage.append(_RUN, _lives()[:4], expected_rev=0)
            old = make_checkpoint(await journal.load(_RUN))
            await store.storage.append(_RUN, _lives()[4:], expected_rev=4)
            whole = await journal.load(_RUN)
            current = make_checkpoint(whole)
            for checkpoint in (
                old,
                current,
                _replace(current, rev=whole.rev + 1),
                make_checkpoint(_replace(whole, rev=whole.rev + 1, terminal="failed")),
                _replace(current, rev=0),
                _replace(current, rev=3),
                _replace(current, format=CHECKPOINT_FORMAT + 1, body=b"{}"),
                _replace(current, body=b'{"run": 5}'),
                _replace(current, body=b"\xff not JSON"),
            ):
                await store.storage.put_checkpoint(_RUN, checkpoint)
                assert await journal.load(_RUN) == whole

    async def test_a_usable_checkpoint_shortens_the_replay(self) -> None:
        """R12: records before it are not read, so damage in them is not seen."""
        async with self.open_store() as store:
            journal = Journal(store.storage)
            await store.storage.append(_RUN, _lives()[:4], expected_rev=0)
            await journal.save_checkpoint(_RUN)
            await store.storage.append(_RUN, _lives()[4:], expected_rev=4)
            whole = await journal.load(_RUN)
            assert await store.overwrite(_RUN, 2, None)
            assert await journal.load(_RUN) == whole

    async def test_a_run_is_driven_to_its_end_from_records_alone(self) -> None:
        """Case 23: R18. Every checkpoint is lost midway; the run is inspected and goes on."""
        async with self.open_store() as store:
            journal = Journal(store.storage)
            lives = _lives()
            for rev, record in enumerate(lives):
                await journal.append(_RUN, [record], expected_rev=rev)
                kept = await journal.save_checkpoint(_RUN)
                if rev == len(lives) // 2:
                    await store.storage.drop_checkpoint(_RUN)
                    assert await Journal(await store.reopen()).load(_RUN) == kept
            done = await journal.load(_RUN)
            assert (done.status, done.anomalies, done.rev) == ("done", [], len(lives))


_replace = msgspec.structs.replace


def _bare(record: Record) -> Record:
    return _replace(record, rev=0)


def _lives() -> list[Record]:
    """The records of a run of five steps, at level "full", unnumbered."""
    row = {
        "fsm": "shop:Checkout",
        "fsm_version": 1,
        "step": _STEPS[0],
        "queue": "checkout",
        "journal": "full",
        "eligible_at": "2026-01-01T00:00:00Z",
        "state": {"n": 0},
    }
    found = [_record("started", 0, by="ann", data={"row": row})]
    for number, step in enumerate(_STEPS):
        visit, begun = number + 1, 10.0 * number
        place: dict[str, Any] = {
            "step": step,
            "visit": visit,
            "attempt": 0,
            "claim_id": f"00000000-0000-4000-8000-{visit:012}",
            "node": "n1",
        }
        lease = msgspec.to_builtins(_START + timedelta(seconds=begun + 60))
        found.append(_record("claimed", begun, **place, data={"lease_until": lease}))
        if step == _STEPS[-1]:
            found.append(_record("done", begun + 5, **place, seconds=4.5, data={"result": "ok"}))
        else:
            error = ErrorInfo(text="ValueError: once", type="ValueError") if step == "pack" else None
            to_step, data = _STEPS[number + 1], {"state": {"n": visit}}
            found.append(_record("next", begun + 5, **place, to_step=to_step, error=error, data=data))
    return found


def _record(kind: str, after: float, **fields: Any) -> Record:
    at = _START + timedelta(seconds=after)
    return Record(instance_id=_RUN.instance_id, rev=0, at=at, kind=kind, **fields)


def _wakeup(by: str, *, run: int = 7) -> Record:
    record = _record("wakeup", 0, step="begin", visit=1, attempt=0, by=by, data={})
    return _replace(record, instance_id=run)


async def _refused(
    storage: JournalStorage, thread: Thread, records: list[Record], expected: int, *, actual: int
) -> None:
    before = await storage.read(thread)
    found: RevConflict | None = None
    try:
        await storage.append(thread, records, expected_rev=expected)
    except RevConflict as conflict:
        found = conflict
    assert found is not None, f"an append that expects revision {expected} was accepted at {actual}"
    assert (found.thread, found.expected_rev, found.actual_rev) == (thread.name, expected, actual)
    assert (await storage.head(thread), await storage.read(thread)) == (actual, before)


async def _invalid(attempt: Awaitable[object]) -> int:
    """The revision that the error names."""
    found: InvalidJournalEntry | None = None
    try:
        await attempt
    except InvalidJournalEntry as error:
        found = error
    assert found is not None, "a damaged journal was read without an error"
    assert found.instance_id == _RUN.instance_id
    assert found.reason
    return found.rev
