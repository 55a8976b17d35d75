"""Histories: pages, the row at a revision, export and import; and the index behind the first page."""

from __future__ import annotations

from typing import Any

import durable_actors as da
import msgspec
import psycopg
import pytest
from durable_actors._store.sql import statement
from tests.engine.kit import running
from tests.engine.recorded import Plan, define, work
from tests.support.sql import explain


@pytest.fixture
def walk(registry: Any) -> Any:
    return define()


async def lived(dsn: str, walk: Any, todo: str, **options: Any) -> int:
    async with running(dsn, **{"journal": "full", **options}) as run:
        return (await work(run, walk, [Plan(todo)]))[0]


async def test_a_history(durable_dsn, walk):
    async with running(durable_dsn, journal="full") as run:
        [number] = await work(run, walk, [Plan("nef")], unique_key="k")
        found = await da.history("k")
        assert [each.kind for each in found] == [
            "started",
            "claimed",
            "next",
            "retry",
            "claimed",
            "next",
            "failed",
        ]
        assert [each.rev for each in found] == list(range(1, 8))
        assert (found[3].step, found[3].attempt, found[3].visit) == ("other", 0, 2)
        assert found[3].error is not None
        assert (found[3].error.type, found[3].error.text) == ("ValueError", "ValueError: once")
        assert "raise ValueError" in (found[3].error.traceback or "")
        assert (found[3].seconds or 0) > 0
        assert (found[3].node or "").startswith("test")
        assert await da.history(number, after=2, limit=3) == found[2:5]
        assert await da.history(number, after=7) == await da.history(number, after=900) == []
        assert [each async for each in da.iter_history(number)] == found
        assert [each async for each in run.engine.client.iter_history("k")] == found


async def test_a_history_of_nobody(durable_dsn, walk):
    off = await lived(durable_dsn, walk, "n", journal="off")
    async with da.open_client(durable_dsn) as client:
        assert await client.history(off) == []
        for target in (999, "nobody's"):
            with pytest.raises(da.NoTarget):
                await client.history(target)
            with pytest.raises(da.NoTarget):
                _ = [each async for each in client.iter_history(target)]
        for options in ({"after": -1}, {"limit": 0}, {"limit": 10_001}):
            with pytest.raises(da.ConfigError):
                await client.history(off, **options)


async def test_a_missing_last_record_is_an_error(durable_dsn, walk, db: psycopg.Connection):
    number = await lived(durable_dsn, walk, "n")
    db.execute("begin")
    db.execute("set local durable_actors.journal_door = 'open'")
    db.execute("delete from durable.journal where rev = (select max(rev) from durable.journal)")
    db.execute("commit")
    async with da.open_client(durable_dsn) as client:
        with pytest.raises(da.InvalidJournalEntry, match="missing: the row is at revision 4"):
            await client.history(number)
        assert len(await client.history(number, limit=2)) == 2, "not the last page"


async def test_states_and_differences(durable_dsn, walk):
    number = await lived(durable_dsn, walk, "nn")
    async with da.open_client(durable_dsn) as client:
        states = [await client.state_at(number, rev) for rev in range(1, 6)]
        assert [state["todo"] for state in states] == ["nn", "nn", "n", "", ""]
        changed = await client.diff(number, 2, 3)
        assert changed["state"] == ({"n": 0, "todo": "nn"}, {"n": 1, "todo": "n"})
        assert changed["step"] == ("start", "other")
        assert changed["visit"] == (1, 2)
        assert "fsm" not in changed
        assert (await client.diff(number, 3, 2))["visit"] == (2, 1)
        assert await client.diff(number, 4, 4) == {}
        with pytest.raises(da.Conflict, match=f"instance {number} has no record of revision 9"):
            await client.state_at(number, 9)
        with pytest.raises(da.ConfigError):
            await client.state_at(number, 0)


async def test_states_that_are_not_recorded(durable_dsn, walk):
    number = await lived(durable_dsn, walk, "nn", journal="outcomes")
    async with da.open_client(durable_dsn) as client:
        for ask in (lambda: client.state_at(number, 1), lambda: client.diff(number, 1, 3)):
            with pytest.raises(da.Conflict, match="recorded at level 'outcomes' at revision 1; only 'full'"):
                await ask()
        with pytest.raises(da.Conflict, match="has no record of revision 2: its level is 'outcomes'"):
            await client.state_at(number, 2)


async def test_export_and_import(durable_dsn, walk, db: psycopg.Connection):
    numbers = [await lived(durable_dsn, walk, "nen", journal=level) for level in ("full", "outcomes")]
    columns = "to_jsonb(g) - '{updated_at,inbox}'::text[]"
    for number in numbers:
        [row] = db.execute(f"select {columns} from durable.gen_durable g where id = %s", [number]).fetchall()
        async with da.open_client(durable_dsn) as client:
            before = await client.history(number)
            lines = [line async for line in client.export_history(number)]
            assert [msgspec.json.decode(line)["rev"] for line in lines] == [each.rev for each in before]
            with pytest.raises(da.Conflict, match=f"instance {number} exists in this database"):
                await client.import_history(lines)
            db.execute("delete from durable.gen_durable where id = %s", [number])
            with pytest.raises(da.Conflict, match=f"instance {number} exists in this database"):
                await client.import_history(lines)
            db.execute("select durable.forget_journal(array[%s::bigint])", [number])
            assert await client.import_history([*lines, "\n"]) == number
            assert await client.history(number) == before
            if number == numbers[0]:
                await client.rebuild(number)
                [again] = db.execute(
                    f"select {columns} from durable.gen_durable g where id = %s", [number]
                ).fetchall()
                assert again[0] == row[0] | {"rev": row[0]["rev"] + 1}, "its return is recorded"
                assert (await client.verify()).problems == []


async def test_ids_go_on_after_an_import(durable_dsn, walk, db: psycopg.Connection):
    number = await lived(durable_dsn, walk, "n")
    async with running(durable_dsn) as run:
        lines = [
            line.replace(f'"instance_id":{number},', '"instance_id":5000,')
            async for line in da.export_history(number)
        ]
        assert await da.import_history(lines) == 5000
        await da.rebuild(5000)
        assert await run.insert(walk, state=Plan("")) == 5001


@pytest.mark.parametrize(
    ("change", "error", "named"),
    [
        (lambda lines: [], da.ConfigError, "no record"),
        (lambda lines: ["{", *lines[1:]], da.ConfigError, "line 1 is not a record"),
        (lambda lines: lines[1:], da.InvalidJournalEntry, "begins with claimed"),
        (lambda lines: [lines[0], *lines[2:]], da.InvalidJournalEntry, "revision 2: missing"),
        (lambda lines: [lines[0], lines[0]], da.InvalidJournalEntry, "does not come after"),
        (lambda lines: [lines[0], lines[1].replace('_id":', '_id":9', 1)], da.InvalidJournalEntry, "belongs"),
        (lambda lines: [each.replace("done", "flown") for each in lines], da.InvalidJournalEntry, "unknown kind"),
    ],
)  # fmt: skip
async def test_what_cannot_be_imported(durable_dsn, walk, db: psycopg.Connection, change, error, named):
    number = await lived(durable_dsn, walk, "n")
    async with da.open_client(durable_dsn) as client:
        lines = [line async for line in client.export_history(number)]
        db.execute("delete from durable.gen_durable")
        db.execute("select durable.forget_journal(array[%s::bigint])", [number])
        with pytest.raises(error, match=named):
            await client.import_history(change(lines))
    assert db.execute("select count(*) from durable.journal").fetchone() == (0,)


async def test_the_first_page_of_a_long_history_reads_no_more_than_a_page(
    durable_dsn, db: psycopg.Connection
):
    """10⁵ records: an index range, whichever page it is."""
    db.execute("insert into durable.gen_durable (fsm, step, journal, rev) values ('m', 's', 2, 100000)")
    db.execute(
        "insert into durable.journal (instance_id, rev, kind, step, visit, attempt)"
        " select 1, n, 'held', 's', 1, 0 from generate_series(1, 100000) n"
    )
    db.execute("vacuum analyze durable.journal")
    async with da.open_client(durable_dsn) as client:
        page = await client.history(1, after=50_000, limit=100)
        assert [each.rev for each in page] == list(range(50_001, 50_101))
    for after in (0, 50_000, 99_000):
        plan = explain(db, statement("read_records", "durable").sql, [1, after, 100])  # type: ignore[arg-type]
        plan.assert_no_seq_scan()
        plan.assert_uses("journal_pkey")
        read = [node.rows for node in plan.nodes if node.index == "journal_pkey"]
        assert (read, plan.buffers < 30) == ([100], True), plan.text
