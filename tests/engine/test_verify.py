"""`verify`, `anomalies`, `rebuild` and `recover` on real workloads, and on rows and records that a hand has changed."""

from __future__ import annotations

import random
from typing import Any

import durable_actors as da
import psycopg
import pytest
import trio
from durable_actors._store import verify as batches
from durable_actors._store.commands import plan_command
from durable_actors._store.rebuild import rebuilding
from durable_actors.journal import NOT_IN_THE_JOURNAL, PROBLEMS, ProblemReason
from tests.engine.kit import QUIET, Db, Gate, gated, running
from tests.engine.recorded import LETTERS, Plan, define, finish, plans, work
from tests.kit import until
from tests.store.kit import connect

ROW = "select to_jsonb(g) - %s::text[] from durable.gen_durable g where id = %s"
HASHES = "select id, md5(g::text) from durable.gen_durable g order by id"


@pytest.fixture
def walk(registry: Any) -> Any:
    return define()


def row_of(db: Db, number: int, *, without: tuple[str, ...] = ()) -> dict[str, Any]:
    return db.value(ROW, [*NOT_IN_THE_JOURNAL, *without], number)


def through_the_door(db: Db, statement: str) -> None:
    with psycopg.connect(db.dsn) as conn:
        conn.execute("set local durable_actors.journal_door = 'open'")
        conn.execute(statement)


async def stopped(dsn: str, walk: Any, todo: str, **options: Any) -> int:
    """The id of one instance that has done all this."""
    async with running(dsn, **options) as run:
        return (await work(run, walk, [Plan(todo)]))[0]


# -- verify


@pytest.mark.slow
async def test_a_random_workload_has_no_problem(durable_dsn, db, walk):
    """Case 46: also while it runs, at every level."""
    async with running(durable_dsn, journal="full") as run, trio.open_nursery() as nursery:
        done = trio.Event()

        async def look() -> None:
            while not done.is_set():
                assert (await da.verify()).problems == []

        nursery.start_soon(look)
        for seed, level in enumerate(("full", "claims", "outcomes", "auto", "off", "full")):
            await work(run, walk, plans(seed, 20, LETTERS), journal=level)
        done.set()
    report = await report_of(durable_dsn)
    recorded = db.value("select count(*) from durable.gen_durable where journal > 0")
    assert (report.problems, report.checked, report.ok) == ([], recorded, True)


async def report_of(dsn: str, *args: Any, **options: Any) -> da.VerifyReport:
    async with da.open_client(dsn) as client:
        return await client.verify(*args, **options)


INVENTED = """
insert into durable.journal
select instance_id, rev + 1, at, visit, seconds, claim_id, attempt, kind, step, to_step, node, by, error, data
  from durable.journal order by rev desc limit 1"""

DAMAGE: dict[str, tuple[str, ProblemReason, str | None]] = {
    "state": ("update durable.gen_durable set state = '{\"n\": 99}'", "divergence", "state"),
    "step": ("update durable.gen_durable set step = 'joined'", "divergence", "step"),
    "result": ("update durable.gen_durable set result = '5'", "divergence", "result"),
    "priority": ("update durable.gen_durable set priority = 7", "divergence", "priority"),
    "weight": ("update durable.gen_durable set weight = 9", "divergence", "weight"),
    "limit": ("update durable.gen_durable set rate_limit = 'x'", "divergence", "rate_limit"),
    "level": ("update durable.gen_durable set journal = 2", "divergence", "journal"),
    "level off": ("update durable.gen_durable set journal = 0", "divergence", "journal"),
    "no level": ("update durable.gen_durable set journal = 7", "divergence", "journal"),
    "rev ahead": ("update durable.gen_durable set rev = rev + 1", "rev_mismatch", "rev"),
    "rev behind": ("update durable.gen_durable set rev = rev - 1", "rev_mismatch", "rev"),
    "queue": ("update durable.gen_durable set queue = 'other'", "index_mismatch", "queue"),
    "machine": ("update durable.gen_durable set fsm = 'other'", "index_mismatch", "fsm"),
    "key": ("update durable.gen_durable set unique_key = 'other'", "index_mismatch", "unique_key"),
    "deleted record": ("delete from durable.journal where rev = 3", "gap", None),
    "deleted first record": ("delete from durable.journal where rev = 1", "gap", None),
    "deleted last record": (
        "delete from durable.journal where rev = (select max(rev) from durable.journal)", "gap", None
    ),
    "no record at all": ("delete from durable.journal", "gap", None),
    "invented record": (
        INVENTED,
        "anomaly",
        None,
    ),
    "unknown kind": ("update durable.journal set kind = 'flew' where rev = 3", "invalid_record", None),
    "lost field": ("update durable.journal set claim_id = null where rev = 3", "invalid_record", None),
    "lost data": ("update durable.journal set data = null where rev = 2", "invalid_record", None),
    "data that is no object": ("update durable.journal set data = '[1]' where rev = 3", "invalid_record", None),
    "time without end": ("update durable.journal set at = 'infinity' where rev = 3", "invalid_record", None),
    "time without zone": (
        "update durable.journal set data = jsonb_set(data, '{lease_until}', '\"2026-01-01T00:00:00\"') where rev = 2",
        "invalid_record",
        None,
    ),
    "another claim": ("update durable.journal set claim_id = gen_random_uuid() where rev = 3", "anomaly", None),
    "deleted row": ("delete from durable.gen_durable", "missing_row", None),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGE)
async def test_damage_is_found_with_its_reason(durable_dsn, db, walk, name):
    """Cases 24 and 46."""
    statement, reason, column = DAMAGE[name]
    number = await stopped(durable_dsn, walk, "nn", journal="full")
    through_the_door(db, statement)
    report = await report_of(durable_dsn)
    assert (reason, column) in {(each.reason, each.column) for each in report.problems}, report
    assert {each.instance_id for each in report.problems} == {number}
    assert all(each.detail for each in report.problems)
    if reason == "divergence":
        assert len(report.problems) == 1, "no other column is blamed"
    if reason in {"gap", "invalid_record"}:
        assert [each.reason for each in report.problems] == [reason], "what follows from it is not reported"
    if reason == "invalid_record":
        async with da.open_client(durable_dsn) as client:
            with pytest.raises(da.InvalidJournalEntry) as raised:
                await client.history(number)
        assert (raised.value.instance_id, raised.value.rev) == (number, report.problems[0].rev)


@pytest.mark.parametrize("name", [name for name, damage in DAMAGE.items() if damage[1] == "invalid_record"])
async def test_every_reader_names_a_damaged_record(durable_dsn, db, walk, name):
    """C7, R20: it is never skipped, also by those who need only what lies before or after it; nothing is written."""
    number = await stopped(durable_dsn, walk, "nnn", journal="full")
    through_the_door(db, DAMAGE[name][0])
    rev = (await report_of(durable_dsn, number)).problems[0].rev
    before = db.execute(HASHES)
    async with da.open_client(durable_dsn) as client:

        async def follow() -> list[Any]:
            return [each async for each in client.iter_history(number)]

        async def export() -> list[str]:
            return [line async for line in client.export_history(number)]

        readers = {
            "history": lambda: client.history(number, after=rev - 1),
            "iter_history": follow,
            "export_history": export,
            "state_at": lambda: client.state_at(number, 5),
            "diff": lambda: client.diff(number, 1, 5),
            "rebuild": lambda: client.rebuild(number),
        }
        for reader, read in readers.items():
            with pytest.raises(da.InvalidJournalEntry) as raised:
                await read()
            assert (raised.value.instance_id, raised.value.rev) == (number, rev), reader
    assert db.execute(HASHES) == before


def test_every_reason_is_met():
    assert {reason for _, reason, _ in DAMAGE.values()} == set(PROBLEMS)


async def test_the_revision_of_a_problem(durable_dsn, db, walk):
    number = await stopped(durable_dsn, walk, "nn", journal="full")
    through_the_door(db, "delete from durable.journal where rev = 3")
    report = await report_of(durable_dsn, number)
    assert [(each.rev, each.detail) for each in report.problems] == [
        (3, "missing: the record after it is revision 4")
    ]


async def test_a_sparse_journal_is_checked_as_far_as_it_goes(durable_dsn, db, walk):
    """Between two outcomes a row may move unrecorded; what the last outcome wrote is compared while it is the last."""
    done = await stopped(durable_dsn, walk, "nn", journal="outcomes")
    assert (await report_of(durable_dsn)).problems == []
    db.execute("update durable.gen_durable set step = 'joined'")
    assert [each.column for each in (await report_of(durable_dsn, done)).problems] == ["step"]
    db.execute("update durable.gen_durable set rev = rev + 3")
    assert (await report_of(durable_dsn, done)).problems == [], "a later move may have set it"
    db.execute("update durable.gen_durable set queue = 'other'")
    assert [each.column for each in (await report_of(durable_dsn, done)).problems] == ["queue"]


async def test_what_is_checked(durable_dsn, db, walk, registry):
    @da.job(name="plain", journal="claims")
    async def plain(args: dict[str, Any]) -> None: ...

    async with running(durable_dsn, journal="full") as run:
        first, second = await work(run, walk, [Plan("n", 1), Plan("n", 2)])
        await run.run(plain, args={})
        await run.run(plain, args={}, journal="off")
        db.execute("update durable.gen_durable set state = '5' where fsm = 'walk'")
        assert (await da.verify()).checked == 3
        assert {each.instance_id for each in (await da.verify()).problems} == {first, second}
        assert (await da.verify(machine=plain)).checked == 1
        assert (await da.verify(machine="walk")).checked == 2
        assert [each.instance_id for each in (await da.verify(second)).problems] == [second]
        assert (await da.verify(sample=1.0)).checked == 3
        assert await da.anomalies() == []
        through_the_door(db, "update durable.journal set claim_id = gen_random_uuid() where rev = 3")
        found = await da.anomalies(machine="walk")
        assert {(each.instance_id, each.rev, each.anomaly.reason) for each in found if each.anomaly} >= {
            (first, 3, "stale_claim"),
            (second, 3, "stale_claim"),
        }
        for sample in (0, -1, 1.5, "half"):
            with pytest.raises(da.ConfigError, match="sample="):
                await da.verify(sample=sample)  # type: ignore[arg-type]
        with pytest.raises(da.NoTarget):
            await da.verify("nobody's")


async def test_many_instances_and_long_histories_are_read_in_pages(durable_dsn, db, walk, monkeypatch):
    for name, size in (("BATCH", 3), ("RECORDS", 4), ("PAGE", 2)):
        monkeypatch.setattr(batches, name, size)
    async with running(durable_dsn, journal="full") as run:
        ids = await work(run, walk, [Plan("n" * (number % 4)) for number in range(10)])
    report = await report_of(durable_dsn)
    assert (report.checked, report.problems) == (10, [])
    through_the_door(db, f"delete from durable.gen_durable where id in ({ids[1]}, {ids[8]})")
    through_the_door(db, f"delete from durable.journal where rev = 3 and instance_id = {ids[7]}")
    report = await report_of(durable_dsn)
    assert [(each.instance_id, each.reason) for each in report.problems] == [
        (ids[1], "missing_row"),
        (ids[7], "gap"),
        (ids[8], "missing_row"),
    ]


async def test_big_states_are_read_few_at_a_time(durable_dsn, db, walk, monkeypatch):
    """A batch and a page are bounded in bytes, too: 200 histories of states of 32 MB fit into no memory."""
    monkeypatch.setattr(batches, "RECORDS_BYTES", 3000)
    monkeypatch.setattr(batches, "BATCH_BYTES", 5000)
    monkeypatch.setattr(batches, "PAGE_BYTES", 2000)
    read, sizes = batches.read_rows, list[list[int]]()

    async def counted(*args: Any, **options: Any) -> Any:
        rows = await read(*args, **options)
        sizes.append([int(number) for number, *_ in rows])
        return rows

    monkeypatch.setattr("durable_actors._history.read_rows", counted)
    chance = random.Random(1)
    async with running(durable_dsn, journal="full") as run:
        small = await work(run, walk, [Plan("n")] * 3)
        big = await work(run, walk, [Plan("nn" + str(chance.getrandbits(8000)))] * 3)
        assert (await da.verify()).problems == []
        assert [len(each) for each in sizes] == [3, 1, 1, 1, 0]
        assert sorted(number for each in sizes for number in each) == sorted([*small, *big])
        db.execute("update durable.gen_durable set step = 'joined' where id = %s", big[1])
        through_the_door(db, f"delete from durable.journal where rev = 3 and instance_id = {big[2]}")
        found = [(each.instance_id, each.reason) for each in (await da.verify()).problems]
        assert found == [(big[1], "divergence"), (big[2], "gap")]


async def test_recording_that_begins_in_mid_life(durable_dsn, db, walk):
    """Case 49: a snapshot is the base, and what lies before it is neither needed nor missed."""
    async with running(durable_dsn) as run:
        number = await run.insert(walk, state=Plan("ann"), journal="off")
        await until(lambda: db.row(number, "status") == ("awaiting_signal",))
        assert await da.history(number) == []
        db.execute("update durable.gen_durable set journal = 4, rev = rev + 1 where id = %s", number)
        db.execute(
            "insert into durable.journal (instance_id, rev, kind, data) select id, rev, 'snapshot',"
            " jsonb_build_object('row', to_jsonb(g)) from durable.gen_durable g where id = %s",
            number,
        )
        assert (await da.verify(number)).problems == []
        await finish(run, [number])
        report = await da.verify(number)
        assert (report.checked, report.problems) == (1, [])
        kinds = [each.kind for each in await da.history(number)]
        assert (kinds[0], kinds[1], kinds[-1]) == ("snapshot", "woken", "done")
        before = row_of(db, number)
        await da.rebuild(number)
        assert row_of(db, number) == before


async def test_a_level_that_is_none_stops_nobody(durable_dsn, db, walk):
    """A hand may write any number: the row is reported, whether it has records or not, and rebuilt if it has."""
    full = await stopped(durable_dsn, walk, "n", journal="full")
    off = await stopped(durable_dsn, walk, "n", journal="off")
    db.execute("update durable.gen_durable set journal = -1 where id = %s", full)
    db.execute("update durable.gen_durable set journal = 5 where id = %s", off)
    found = [(each.instance_id, each.reason, each.column) for each in (await report_of(durable_dsn)).problems]
    assert found == [(full, "divergence", "journal"), (off, "divergence", "journal")]
    async with da.open_client(durable_dsn) as client:
        assert (await client.history(full))[-1].kind == "done"
        await client.rebuild(full)
        assert [each.instance_id for each in (await client.verify()).problems] == [off]


# -- rebuild


async def test_rebuilt_rows_are_the_same(durable_dsn, db, walk):
    """A random tenth of them, of every status."""
    async with running(durable_dsn, journal="full") as run:
        await work(run, walk, plans(7, 60, LETTERS))
        for todo in ("a", "na", "kra"):
            await run.insert(walk, state=Plan(todo), schedule_in=3600 if todo == "kra" else 0)
        parked = "select count(*) from durable.gen_durable where status = 'awaiting_signal'"
        await until(lambda: db.value(parked) == 2)
        await run.insert(
            walk, state=Plan("n"), unique_key="key", tags=["a", "b"], meta={"who": "ann"}, schedule_in=3600
        )
    ids = [number for (number,) in db.execute("select id from durable.gen_durable where finished_at is null")]
    everyone = [number for (number,) in db.execute("select id from durable.gen_durable")]
    ids += random.Random(3).sample(everyone, len(everyone) // 10)
    before = {number: row_of(db, number) for number in ids}
    async with da.open_client(durable_dsn) as client:
        for number in ids:
            assert await client.rebuild(number, by="ann") == number
        assert {number: row_of(db, number) for number in ids} == before
        db.execute(
            "update durable.gen_durable set status = 'runnable', state = '1', step = 'x', hold = 1, finished_at = null,"
            " weight = 9, rate_limit = 'x'"
        )
        for count, damage in ((1, "select 1"), (2, "delete from durable.gen_durable where id = any (%s)")):
            db.execute(damage, *[ids] * (count - 1))
            for number in ids:
                await client.rebuild(number)
            # Each repair is a move of its own: a snapshot.
            repaired = {number: row | {"rev": row["rev"] + count} for number, row in before.items()}
            assert {number: row_of(db, number) for number in ids} == repaired
            assert {(await client.history(number))[-1].kind for number in ids} == {"snapshot"}
        report = await client.verify()
    assert not {each.instance_id for each in report.problems} & set(ids)


@pytest.mark.parametrize("damage", ["state = '1', step = 'joined', rev = 1", "rev = 77", None])
async def test_a_damaged_or_deleted_row_is_rebuilt_and_finishes(durable_dsn, db, walk, damage):
    """Case 47: and whoever had a claim of it is fenced out."""
    gate = Gate()
    machine = gated(gate, runs=[], journal="full")
    async with running(durable_dsn, **QUIET) as run:
        number = await run.insert(machine)
        await gate.wait_entered()
        claim = db.value("select claim_id from durable.gen_durable where id = %s", number)
        assert claim is not None
        if damage is None:
            db.execute("delete from durable.gen_durable where id = %s", number)
        else:
            db.execute(f"update durable.gen_durable set {damage} where id = %s", number)
        assert await da.rebuild(number, by="ann", reason="damaged") == number
        status, rebuilt_claim, rev = db.row(number, "status, claim_id, rev")
        assert (rebuilt_claim != claim, rev > 2) == (True, True)
        assert status in {"runnable", "executing"}, "the same engine may have claimed it again"
        gate.open()
        assert (await run.ended(number)).result == "finished"
        kinds = [each.kind for each in await da.history(number)]
        assert kinds == ["started", "claimed", "released", "claimed", "done"]
        assert (await da.history(number))[2].by == "ann"
        assert (await da.verify()).problems == []
        [receipt] = await da.receipts(number)
        assert (receipt.command, receipt.by, receipt.reason, receipt.result) == (
            "rebuild",
            "ann",
            "damaged",
            number,
        )


async def test_what_cannot_be_rebuilt(durable_dsn, db, walk):
    sparse = await stopped(durable_dsn, walk, "n", journal="outcomes")
    off = await stopped(durable_dsn, walk, "n", journal="off")
    full = await stopped(durable_dsn, walk, "nn", journal="full")
    rows = db.execute(HASHES)
    async with da.open_client(durable_dsn) as client:
        with pytest.raises(da.Conflict, match=f"instance {sparse} is recorded at level 'outcomes'"):
            await client.rebuild(sparse)
        with pytest.raises(da.Conflict, match=f"instance {off} is recorded at level 'off'"):
            await client.rebuild(off)
        with pytest.raises(da.NoTarget):
            await client.rebuild(999)
        through_the_door(
            db,
            f"update durable.journal set claim_id = gen_random_uuid() where rev = 3 and instance_id = {full}",
        )
        with pytest.raises(da.Conflict, match="anomalies, the first at revision 3"):
            await client.rebuild(full)
        through_the_door(db, f"delete from durable.journal where rev = 3 and instance_id = {full}")
        with pytest.raises(da.InvalidJournalEntry, match="revision 3: missing"):
            await client.rebuild(full)
        db.execute("delete from durable.gen_durable where id = %s", sparse)
        with pytest.raises(da.Conflict, match="level 'outcomes'"):
            await client.rebuild(sparse)
    assert db.execute(HASHES) == [row for row in rows if row[0] != sparse]
    assert db.value("select count(*) from durable.receipts") == 0


async def test_a_rebuild_with_a_key_is_carried_out_once(durable_dsn, db, walk):
    number = await stopped(durable_dsn, walk, "n", journal="full")
    async with da.open_client(durable_dsn) as client:
        for _ in range(2):
            db.execute("update durable.gen_durable set step = 'joined'")
            assert await client.rebuild(number, idempotency_key="k") == number
        assert db.row(number, "step") == ("joined",), "the second call did nothing"
        assert len(await client.receipts(number)) == 1


async def test_a_rebuild_of_an_occupied_key(durable_dsn, db, walk):
    async with running(durable_dsn, journal="full") as run:
        number = await run.insert(walk, state=Plan("n"), unique_key="k", schedule_in=3600)
        db.execute("delete from durable.gen_durable")
        await run.insert(walk, state=Plan("n"), unique_key="k", schedule_in=3600)
        with pytest.raises(da.Duplicate):
            await da.rebuild(number)


# -- recover


async def test_recover_changes_nothing_in_a_healthy_database(durable_dsn, db, walk, registry):
    """Case 39: with waits, barriers, a kept signal, held rows and live claims."""
    gate, seen = Gate(), list[int]()

    class Keeps(da.Machine[Any], name="keeps"):
        @da.step
        async def start(self, ctx: da.Context[Any]) -> da.Outcome:
            seen.append(len(ctx.awaited))
            return da.Await("go")  # a signal that is awaited again is kept

    held = gated(gate, "held")

    class Parent(da.Machine[Any], name="parent", journal="off"):  # nothing but the row knows the quorum
        @da.step
        async def start(self, ctx: da.Context[Any]) -> da.Outcome:
            children = [da.Child(held, partition_key=f"k{number}") for number in range(3)]
            return da.ScheduleChildren(self.end, children, join=2)

        @da.step
        async def end(self, ctx: da.Context[Any]) -> da.Outcome:
            return da.Done()

    async with running(durable_dsn, **QUIET) as run:
        parent = await run.insert(Parent)
        await gate.wait_entered(3)
        behind = await run.insert(held, partition_key="k0")
        await until(lambda: db.row(behind, "hold") == (1,))
        keeps = await run.insert(Keeps, journal="full")
        await until(lambda: db.row(keeps, "status") == ("awaiting_signal",))
        await da.signal(keeps, "go")
        await until(lambda: seen == [0, 1] and db.row(keeps, "status") == ("awaiting_signal",))
        assert db.value("select count(*) from durable.signals where consumed_at is null") == 1
        rows = db.execute(HASHES)
        assert await da.recover() == da.RecoveryReport()
        assert not (await da.recover()).changed
        assert db.execute(HASHES) == rows
        gate.open()
        await run.ended(parent)
        assert (await da.verify()).problems == []


async def test_recover_repairs_once(durable_dsn, db, walk):
    """Case 39: a lost wake, a wrong count at a barrier, a row that is held behind nobody, a lease that is over."""
    async with running(durable_dsn, journal="full") as run:
        waiting = await run.insert(walk, state=Plan("a"))
        await until(lambda: db.row(waiting, "status") == ("awaiting_signal",))
    now = "durable.now()"
    db.execute(
        f"insert into durable.signals (target_id, name, inserted_at) values (%s, 'go', {now})", waiting
    )
    parent = db.insert(
        status="awaiting_children", await_step="s", visit=2, children_pending=3, children_total=2, rev=1
    )
    db.insert(parent_id=parent, barrier=2, status="done", finished_at="now()")
    db.insert(parent_id=parent, barrier=2)
    stuck = db.insert(hold=1, partition_key="k")
    lost = db.insert(
        status="executing",
        locked_by="gone",
        lease_expires_at="2020-01-01",
        claim_id="00000000-0000-4000-8000-000000000001",
    )
    async with da.open_client(durable_dsn) as client:
        rows = db.execute(HASHES)
        would = await client.recover(dry_run=True, by="ann")
        assert db.execute(HASHES) == rows, "a dry run writes nothing"
        assert db.value("select count(*) from durable.receipts") == 0
        with pytest.raises(da.ConfigError, match="dry_run"):
            await client.recover(dry_run="yes")
        report = await client.recover()
        assert would == report
        assert (report.woken, report.recounted, report.offered, report.reaped) == (
            (waiting,),
            (parent,),
            (stuck,),
            (lost,),
        )
        assert db.row(waiting, "status, step") == ("runnable", "other")
        assert db.row(parent, "status, children_pending") == ("awaiting_children", 1)
        assert (await client.history(waiting))[-1].kind == "woken"
        assert (await client.verify()).problems == []
        rows = db.execute(HASHES)
        assert not (await client.recover()).changed
        assert db.execute(HASHES) == rows


@pytest.mark.parametrize("when", ["before the write", "while the write waits"])
async def test_a_row_that_moves_while_it_is_rebuilt_is_read_again(durable_dsn, db, walk, when):
    """The fence: what the records said before the move is not written over it."""
    async with running(durable_dsn, journal="full") as run:
        number = await run.insert(walk, state=Plan("a"))
        await until(lambda: db.row(number, "status") == ("awaiting_signal",))
    calls: list[str] = []
    dialogue = rebuilding("durable", number, plan_command())
    blocked = "select count(*) from pg_stat_activity where wait_event_type = 'Lock' and datname = current_database()"
    with psycopg.connect(durable_dsn) as other:
        async with connect(durable_dsn, lock_timeout="0") as conn, trio.open_nursery() as nursery:

            async def commit() -> None:
                await until(lambda: db.value(blocked) == 1)
                other.commit()

            call, params = next(dialogue)
            with pytest.raises(StopIteration) as ended:
                while True:
                    if call.name == "rebuild_instance" and "rebuild_instance" not in calls:
                        other.execute("select durable.signal(%s::bigint, 'go')", [number])
                        if when == "before the write":
                            other.commit()
                        else:
                            nursery.start_soon(commit)
                    calls.append(call.name)
                    call, params = dialogue.send((await conn.run(call, params)).rows)
    assert calls.count("rebuild_instance") == 2
    assert ended.value.value.id == number
    assert db.row(number, "status, step") == ("runnable", "other")
    assert (await report_of(durable_dsn)).problems == []
