"""The reasons to hold a row: the table in `_store/holds.py` says what the schema and the statements do."""

from __future__ import annotations

from collections import defaultdict

import attrs
import psycopg
import pytest
from durable_actors._store.claim import PickFrom, promote_siblings, wait_for_work
from durable_actors._store.holds import HELD, HOLDS, OFFERED, REASONS, SHELVED, THROTTLED, HoldReason
from durable_actors._store.lease import sweep_keys
from durable_actors.machine import ENDED
from tests.store import moving_cancel, moving_fair, moving_graphs, moving_keys, moving_pauses, moving_runners  # noqa: F401 - their scenarios
from tests.store.kit import HEAD, SCHEMA, address, claims, connect, empty, insert, outcome, pick, rows
from tests.store.moving import SCENARIOS, Recorder, World
from tests.store.stepping import commit

BY_NAME = pytest.mark.parametrize("hold", HOLDS, ids=lambda hold: hold.name)
NOT_SET_YET = [hold for hold in HOLDS if not hold.released_by]


def test_the_constraint_allows_the_numbers_of_the_table(db: psycopg.Connection):
    allowed = set[int]()
    for number in range(-1, 9):
        try:
            insert(db, hold=number)
        except psycopg.errors.CheckViolation:
            continue
        allowed.add(number)
    assert allowed == {OFFERED, *(hold.number for hold in HOLDS)}
    assert [hold.number for hold in HOLDS] == sorted(REASONS)


def test_the_schema_agrees_who_keeps_its_place(db: psycopg.Connection):
    query = "select n, durable.keeps_place(n::smallint) from generate_series(0, %s) n"
    found = dict(db.execute(query, [HOLDS[-1].number]).fetchall())
    assert found == {OFFERED: True} | {hold.number: hold.keeps_place for hold in HOLDS}


@BY_NAME
def test_its_index_finds_its_rows(db: psycopg.Connection, hold: HoldReason):
    query = "select pg_get_expr(indpred, indrelid) from pg_index where indexrelid = to_regclass(%s)"
    found = db.execute(query, [f"durable.{hold.index}"]).fetchall()
    assert bool(found) == (bool(hold.released_by) and hold.name != "waiting"), (
        "whoever releases it must find it"
    )
    for (predicate,) in found:
        assert predicate == f"((status = 'runnable'::durable.durable_status) AND (hold = {hold.number}))"


async def test_nobody_but_its_releasers_offers_or_claims_it(db: psycopg.Connection, durable_dsn: str):
    """Every statement of the store runs beside rows that nobody releases yet."""
    recorder = Recorder(db)
    async with connect(durable_dsn) as conn:
        for scenario in SCENARIOS:
            empty(db)
            for hold in NOT_SET_YET:
                for key in (None, "key"):
                    insert(db, hold=hold.number, partition_key=key, priority=9)
            await scenario(World(conn, db))
    assert recorder.faults() == []
    found = defaultdict[int, set[str | None]](set)
    for each in recorder.by_statements():
        old, new = each.old, each.new
        if old is None or new is None or old["status"] != "runnable" or new["status"] in ENDED:
            continue
        if old["hold"] != OFFERED and new["hold"] == OFFERED:
            found[old["hold"]].add(each.statement)
    assert found == {hold.number: set(hold.released_by) for hold in HOLDS if hold.released_by}


@BY_NAME
@pytest.mark.parametrize("key", [None, "k"])
async def test_it_is_not_picked(db: psycopg.Connection, durable_dsn: str, hold: HoldReason, key: str | None):
    [number] = insert(db, hold=hold.number, partition_key=key)
    async with connect(durable_dsn) as conn:
        before = rows(db, "gen_durable.*")
        every = attrs.evolve(
            HEAD, extras=[] if hold.number == THROTTLED else [number]
        )  # read_thawed gives those
        for begin in (every, PickFrom((), (), (), by_id=[number])):
            picked = await pick(conn, begin=begin)
            assert (picked.claims, picked.seen) == ([], [])
        assert (await wait_for_work(conn, SCHEMA, ["default"], every=0.0, patience=0.0)).due == {}
        assert rows(db, "gen_durable.*") == before
        shelf = attrs.evolve(HEAD, shelved=[address("m/1")])
        db.execute("update durable.gen_durable set shelved_step = step")
        assert len((await pick(conn, begin=shelf)).claims) == (hold.number == SHELVED)


@BY_NAME
async def test_the_next_of_its_key_waits_for_it_or_does_not(
    db: psycopg.Connection, durable_dsn: str, hold: HoldReason
):
    elder, younger = insert(db, 2, partition_key="k", eligible_at="=now() - interval '1 h'")
    db.execute("update durable.gen_durable set hold = %s where id = %s", [hold.number, elder])
    async with connect(durable_dsn) as conn:
        picked = await claims(conn)
        assert [claim.id for claim in picked] == ([] if hold.keeps_place else [younger])
        if not hold.keeps_place:
            await commit(conn, outcome(picked[0], "runnable", step="t", advance=1, keep_claim=True))
            assert rows(db, "status, step, hold", f"id = {younger}") == [("executing", "t", 0)]
        offered = OFFERED if hold.number == HELD else hold.number
        assert rows(db, "hold", f"id = {elder}") == [(offered,)], (
            "a held elder that nobody releases is offered"
        )


@BY_NAME
async def test_a_step_runs_ahead_of_it_or_does_not(
    db: psycopg.Connection, durable_dsn: str, hold: HoldReason
):
    insert(db, partition_key="k")
    async with connect(durable_dsn) as conn:
        [claim] = await claims(conn)
        insert(db, partition_key="k", hold=hold.number)
        await commit(conn, outcome(claim, "runnable", step="t", advance=1, keep_claim=True))
    status = "runnable" if hold.keeps_place else "executing"
    assert rows(db, "status, step", f"id = {claim.id}") == [(status, "t")]


@BY_NAME
async def test_the_sweep_of_its_key(db: psycopg.Connection, durable_dsn: str, hold: HoldReason):
    """Rows behind it are offered once if it has given up its place, and not at all if it keeps it."""
    elder, younger = insert(db, 2, partition_key="k", hold=HELD, eligible_at="=now() - interval '1 h'")
    db.execute("update durable.gen_durable set hold = %s where id = %s", [hold.number, elder])
    gives_up = hold.number in {HELD, SHELVED} or not hold.keeps_place
    async with connect(durable_dsn) as conn:
        stuck, _ = await sweep_keys(conn, SCHEMA, after="", limit=10)
        assert stuck == (["k"] if gives_up else [])
        promoted = await promote_siblings(conn, SCHEMA, stuck)
        first = elder if hold.number == HELD else younger
        assert [each.id for each in promoted] == ([first] if gives_up else [])
        assert (await sweep_keys(conn, SCHEMA, after="", limit=10))[0] == [], "not again and again"
        claimed = [] if hold.keeps_place and hold.number != HELD else [first]
        assert [claim.id for claim in await claims(conn)] == claimed


async def test_a_key_whose_rows_are_all_paused_is_not_swept(db: psycopg.Connection, durable_dsn: str):
    for hold in NOT_SET_YET:
        insert(db, 2, partition_key=hold.name, hold=hold.number)
    async with connect(durable_dsn) as conn:
        assert await sweep_keys(conn, SCHEMA, after="", limit=10) == ([], None)
        assert await promote_siblings(conn, SCHEMA, [hold.name for hold in NOT_SET_YET]) == []
