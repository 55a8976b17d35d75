"""What a limit does when it is full (`on_full`), how long a slot is held (`held`), and the commands on its keys."""

from __future__ import annotations

import psycopg
import pytest
from durable_actors._limits import Limit
from durable_actors._store.claim import PickFrom
from durable_actors._store.commands import Command
from durable_actors._store.limits import (
    block_limits,
    charge_limits,
    read_limits,
    refunds_of,
    release_limit,
)
from tests.store.kit import SCHEMA, connect, insert, outcome, pick, rows
from tests.store.stepping import commit
from tests.store.test_limits import age, declare, taken, thaw
from tests.support.commands import cancel_instance, retry_instance

KEPT = Limit(slots=1, held="instance")
DROPS = Limit(1, per=60, on_full="drop")
HEADS = PickFrom([0, 5], ["-infinity"] * 2, [0] * 2)


def level(db: psycopg.Connection, key: str) -> float:
    """Seconds of tokens that are spent."""
    found = db.execute(
        "select extract(epoch from tat - at)::float8 from durable.limit_keys where key = %s", [key]
    ).fetchone()
    return 0.0 if found is None else round(found[0])


async def test_what_finds_a_limit_full_is_cancelled_by_whoever_claims_it(
    db: psycopg.Connection, durable_dsn: str
):
    ids = insert(db, 3, rate_limit="api:acme", journal=3)
    async with connect(durable_dsn) as conn:
        await declare(conn, api=DROPS)
        picked = await pick(conn)
        assert taken(picked) == ids[:1]
        assert {row.id: row.what for row in picked.seen} == dict.fromkeys(ids[1:], "l")
        dropped = (await pick(conn)).claims
        assert [claim.id for claim in dropped] == ids[1:]
        assert [claim.cancellation and claim.cancellation.limit for claim in dropped] == ["api:acme"] * 2
        assert all(claim.cancellation and claim.cancellation.ends(claim.visit) for claim in dropped)
        assert refunds_of(dropped) == [], "they were charged nothing"
    assert level(db, "api:acme") == 60
    kinds = db.execute("select kind from durable.journal where instance_id = %s order by rev", [ids[1]])
    assert [kind for (kind,) in kinds] == ["dropped", "claimed"]
    assert db.execute("select count(*) from durable.limit_waits").fetchone() == (0,), "nobody waits"


async def test_what_has_begun_is_not_dropped_but_waits(db: psycopg.Connection, durable_dsn: str):
    [first] = insert(db, rate_limit="api")
    [again] = insert(db, rate_limit="api", attempt=1)
    async with connect(durable_dsn) as conn:
        await declare(conn, api=DROPS)
        assert taken(await pick(conn)) == [first]
        assert rows(db, "hold, cancellation", f"id = {again}") == [(3, None)]
        age(db, 60)
        assert taken(await thaw(conn)) == [again]


async def test_what_meets_a_key_that_was_told_to_wait_is_not_dropped(
    db: psycopg.Connection, durable_dsn: str
):
    ids = insert(db, 2, rate_limit="api")
    async with connect(durable_dsn) as conn:
        await declare(conn, api=DROPS)
        await block_limits(conn, SCHEMA, ["api"], 30)
        assert taken(await pick(conn)) == []
        assert rows(db, "hold, cancellation") == [(3, None)] * 2
        age(db, 31)
        assert taken(await thaw(conn)) == ids[:1]


async def test_a_fat_row_that_is_dropped_holds_nobody_up(db: psycopg.Connection, durable_dsn: str):
    insert(db, rate_limit="api\x1e5")
    [thin] = insert(db, rate_limit="api")
    async with connect(durable_dsn) as conn:
        await declare(conn, api=Limit(1, per=60, burst=5, on_full="drop"))
        await charge_limits(conn, SCHEMA, [("api", 1)])
        assert taken(await pick(conn)) == [thin]


async def test_a_full_slot_drops(db: psycopg.Connection, durable_dsn: str):
    ids = insert(db, 2, rate_limit="!gpu")
    async with connect(durable_dsn) as conn:
        await declare(conn, gpu=Limit(slots=1, on_full="drop"))
        assert taken(await pick(conn)) == ids[:1]
        assert [claim.cancellation is not None for claim in (await pick(conn)).claims] == [True]


async def test_a_dropped_one_that_is_retried_asks_the_limit_anew(db: psycopg.Connection, durable_dsn: str):
    ids = insert(db, 2, rate_limit="api")
    async with connect(durable_dsn) as conn:
        await declare(conn, api=DROPS)
        await pick(conn)
        [dropped] = (await pick(conn)).claims
        await commit(conn, outcome(dropped, "cancelled", last_error="full"))
        age(db, 60)
        await retry_instance(conn, SCHEMA, ids[1])
        [again] = (await pick(conn)).claims
    assert (again.id, again.cancellation, again.recorded.rate_limit) == (ids[1], None, "api")


async def test_a_slot_is_kept_until_the_instance_ends(db: psycopg.Connection, durable_dsn: str):
    ids = insert(db, 2, rate_limit="!gpu")
    async with connect(durable_dsn) as conn:
        await declare(conn, gpu=KEPT)
        [mine] = (await pick(conn)).claims
        await commit(conn, outcome(mine, "runnable", step="t", advance=1, attempt=0, relimits=True))
        assert rows(db, "rate_limit") == [("!gpu",)] * 2, "it uses its slot in every step"
        db.execute("update durable.limit_waits set next_at = now()")
        assert taken(await thaw(conn)) == []
        [again] = (await pick(conn)).claims
        assert again.id == ids[0], "it needs no other slot, although somebody waits for one"
        [(holders,)] = [each.keys[0].holders for each in await read_limits(conn, SCHEMA)]
        assert holders == ids[0]
        await commit(conn, outcome(again, "done", result=b"1"))
        assert taken(await thaw(conn)) == ids[1:]
    assert db.execute("select instance_id from durable.kept_slots").fetchall() == [(ids[1],)]


@pytest.mark.parametrize("end", ["cancel", "delete", "fail"])
async def test_a_kept_slot_is_free_when_a_waiting_instance_ends(
    db: psycopg.Connection, durable_dsn: str, end: str
):
    ids = insert(db, 2, rate_limit="!gpu")
    async with connect(durable_dsn) as conn:
        await declare(conn, gpu=KEPT)
        [mine] = (await pick(conn)).claims
        await commit(conn, outcome(mine, "runnable", step="t", advance=1, attempt=0, delay=3600.0))
        if end == "cancel":
            await cancel_instance(conn, SCHEMA, ids[0])
        elif end == "delete":
            db.execute("delete from durable.gen_durable where id = %s", [ids[0]])
        else:
            db.execute(
                "update durable.gen_durable set status = 'failed', finished_at = now() where id = %s",
                [ids[0]],
            )
        assert db.execute("select count(*) from durable.kept_slots").fetchone() == (0,)
        assert taken(await thaw(conn)) == ids[1:]


async def test_a_step_with_another_slot_gives_up_the_kept_one(db: psycopg.Connection, durable_dsn: str):
    """So nobody waits for a slot while it keeps one: two instances that do so the other way round would never end."""
    ids = insert(db, 2, rate_limit="!gpu")
    async with connect(durable_dsn) as conn:
        await declare(conn, gpu=KEPT, tpu=KEPT)
        [mine] = (await pick(conn)).claims
        enters = outcome(mine, "runnable", step="t", advance=1, attempt=0, relimits=True, limits="!tpu")
        await commit(conn, enters)
        assert taken(await thaw(conn)) == ids[1:]
        assert taken(await pick(conn)) == ids[:1]
    kept = db.execute("select key from durable.kept_slots order by instance_id").fetchall()
    assert kept == [("tpu",), ("gpu",)]


async def test_who_keeps_a_slot_and_was_told_to_wait_is_found_behind_others(
    db: psycopg.Connection, durable_dsn: str
):
    [elder] = insert(db, rate_limit="!gpu", priority=5)
    async with connect(durable_dsn) as conn:
        await declare(conn, gpu=KEPT)
        [mine] = (await pick(conn, begin=HEADS)).claims
        waiting = insert(db, 3, rate_limit="!gpu")
        await pick(conn)
        await block_limits(conn, SCHEMA, ["gpu"], 30)
        await commit(conn, outcome(mine, "runnable", attempt=0))
        assert taken(await pick(conn, begin=HEADS)) == []
        assert rows(db, "hold", f"id = {elder}") == [(3,)]
        age(db, 31)
        assert taken(await thaw(conn)) == [elder]
    assert len(waiting) == 3


async def test_a_step_that_was_told_to_wait_with_a_slot_alone_waits(db: psycopg.Connection, durable_dsn: str):
    insert(db, rate_limit="!gpu")
    async with connect(durable_dsn) as conn:
        await declare(conn, gpu=Limit(slots=5))
        await block_limits(conn, SCHEMA, ["gpu"], 30)
        assert taken(await pick(conn)) == []
        age(db, 31)
        assert len(taken(await thaw(conn))) == 1


@pytest.mark.parametrize("limits", [None, "!gpu"])
async def test_what_compensates_has_the_limits_of_that_step(
    db: psycopg.Connection, durable_dsn: str, limits: str | None
):
    """Not those of the step that it leaves; and it takes no slot that is not free."""
    db.execute("insert into durable.compensations values ('m', 1, 'u', %s)", [limits])
    ids = insert(db, 2, rate_limit="!gpu", journal=3)
    async with connect(durable_dsn) as conn:
        await declare(conn, gpu=Limit(slots=1))
        [holder] = (await pick(conn)).claims
        await cancel_instance(conn, SCHEMA, ids[1])
        assert rows(db, "step, rate_limit", f"id = {ids[1]}") == [("u", limits)]
        assert taken(await pick(conn)) == ([] if limits else ids[1:])
        await commit(conn, outcome(holder, "done", result=b"1"))
        assert taken(await thaw(conn)) == (ids[1:] if limits else [])


async def test_a_key_can_be_let_begin_anew(db: psycopg.Connection, durable_dsn: str):
    ids = insert(db, 2, rate_limit="api:acme")
    async with connect(durable_dsn) as conn:
        await declare(conn, api=Limit(1, per=60))
        await pick(conn)
        await block_limits(conn, SCHEMA, ["api:acme"], 600)
        assert await release_limit(conn, SCHEMA, "api:acme", Command())
        assert taken(await thaw(conn)) == ids[1:]
        assert not await release_limit(conn, SCHEMA, "api:globex", Command())


async def test_a_kept_slot_can_be_taken(db: psycopg.Connection, durable_dsn: str):
    ids = insert(db, 2, rate_limit="!gpu")
    async with connect(durable_dsn) as conn:
        await declare(conn, gpu=KEPT)
        [mine] = (await pick(conn)).claims
        assert await release_limit(conn, SCHEMA, "gpu", Command(), instance=ids[0])
        assert taken(await thaw(conn)) == [], "its step runs: the slot is free when that ends"
        await commit(conn, outcome(mine, "runnable", step="t", advance=1, attempt=0, relimits=True))
        assert taken(await thaw(conn)) == ids[1:]
        assert not await release_limit(conn, SCHEMA, "gpu", Command(), instance=ids[0])
