"""`PostgresJournal` under the public conformance suite, and what only Postgres can be asked."""

from __future__ import annotations

from contextlib import asynccontextmanager

import msgspec
import psycopg
import pytest
from durable_actors._postgres.pool.lane import Lane
from durable_actors._postgres.pool.lock_retry import CLIENT_SETTINGS
from durable_actors._postgres.pool.pool import open_pool
from durable_actors._store.journal import PostgresJournal
from durable_actors.errors import InvalidJournalEntry
from durable_actors.journal import Journal, JournalStorage, Record, run_thread
from durable_actors.testing.journal_conformance import JournalConformance, StoreUnderTest
from tests.journal.row_model import RUN, RowModel
from tests.store.kit import insert

THREAD = run_thread(RUN)


@asynccontextmanager
async def storage(dsn: str):
    lane = Lane("client", 4, settings=CLIENT_SETTINGS, max_waiting=1000)
    async with open_pool(dsn, lanes=[lane]) as pool:
        yield PostgresJournal(pool, "client", "durable")


def damage(dsn: str, number: int, rev: int, stored: bytes | None) -> None:
    """What `StoreUnderTest.overwrite` means for a table: through the door, since the journal is append-only."""
    with psycopg.connect(dsn) as db:
        db.execute("set local durable_actors.journal_door = 'open'")
        key = [number, rev]
        if stored is None:
            db.execute("delete from durable.journal where instance_id = %s and rev = %s", key)
            return
        try:
            fields = msgspec.json.decode(stored)
        except msgspec.DecodeError:
            fields = {"data": "cut"}
        if fields.get("rev", rev) != rev:
            # The key is the place: a record that says that it is another one is in another place.
            query = "update durable.journal set rev = rev + 1000 where instance_id = %s and rev = %s"
            db.execute(query, key)
            return
        query = """
            update durable.journal j
               set kind = coalesce(n.kind, ''), step = n.step, to_step = n.to_step, claim_id = n.claim_id, data = n.data
              from jsonb_populate_record(null::durable.journal, %s::jsonb) n
             where j.instance_id = %s and j.rev = %s"""
        db.execute(query, [msgspec.json.encode(fields).decode(), *key])


class TestPostgresJournal(JournalConformance):
    """R9: the same suite runs on every adapter."""

    @pytest.fixture(autouse=True)
    def _databases(self, take_database, durable_server):
        self.take, taken = take_database, []
        self.taken: list[str] = taken
        yield
        for dsn in taken:
            durable_server.drop(dsn)

    @asynccontextmanager
    async def open_store(self):
        dsn = self.take()
        self.taken.append(dsn)

        async def overwrite(thread, rev, stored) -> bool:
            damage(dsn, thread.instance_id, rev, stored)
            return True

        async with storage(dsn) as first, storage(dsn) as second:

            async def reopen() -> JournalStorage:
                return second

            yield StoreUnderTest(first, reopen, overwrite)


def two_moves() -> list[Record]:
    model = RowModel("full")
    model.claim()
    model.next()
    uuid = "00000000-0000-4000-8000-000000000001"
    return [msgspec.structs.replace(each, claim_id=each.claim_id and uuid) for each in model.records]


async def test_a_claim_id_that_is_no_uuid_is_refused(durable_dsn):
    async with storage(durable_dsn) as journal:
        records = [msgspec.structs.replace(two_moves()[1], claim_id="mine")]
        with pytest.raises(
            InvalidJournalEntry, match="does not fit the table: invalid input syntax for type uuid"
        ):
            await journal.append(THREAD, records, expected_rev=0)
        assert await journal.head(THREAD) == 0


async def test_a_row_that_records_every_move_is_the_head(durable_dsn, db: psycopg.Connection):
    """Below that level a row may be ahead of its records, and nothing is missing."""
    [sparse] = insert(db, journal=2, rev=7)
    [gapless] = insert(db, journal=3, rev=7)
    async with storage(durable_dsn) as journal:
        assert await journal.head(run_thread(sparse)) == 0
        assert await journal.head(run_thread(gapless)) == 7
        with pytest.raises(InvalidJournalEntry, match="revision 1: missing"):
            await Journal(journal).load(run_thread(gapless))


async def test_a_checkpoint_that_somebody_wrote_by_hand_is_not_used(durable_dsn, db: psycopg.Connection):
    """Case 22."""
    async with storage(durable_dsn) as storage_:
        journal = Journal(storage_)
        await journal.append(THREAD, two_moves(), expected_rev=0)
        whole = await journal.load(THREAD)
        for projection in ('{"rev": 2}', "5", '"no base 64!"', '"e30="', "null"):
            db.execute(
                "insert into durable.checkpoints (thread, rev, format, projection) values (%s, 2, 1, %s)"
                " on conflict (thread) do update set projection = excluded.projection",
                [THREAD.name, projection],
            )
            assert await journal.load(THREAD) == whole


def test_records_are_neither_changed_nor_deleted_but_through_the_door(db: psycopg.Connection):
    """Case 25: R1."""
    db.execute("insert into durable.journal (instance_id, rev, kind) values (7, 1, 'held'), (7, 2, 'held')")
    for statement in (
        "update durable.journal set kind = 'offered'",
        "delete from durable.journal",
        "truncate durable.journal",
    ):
        with pytest.raises(psycopg.errors.RestrictViolation, match="append-only"):
            db.execute(statement)
    assert db.execute("select durable.forget_journal('{7}', 1)").fetchone() == (1,)
    assert db.execute("select rev from durable.journal").fetchall() == [(2,)]
