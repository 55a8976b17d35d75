"""Limits: what a pick claims, throttles and charges, and how throttled rows are found again."""

from __future__ import annotations

from collections import Counter

import attrs
import psycopg
import pytest
import trio
from durable_actors._limits import Limit
from durable_actors._postgres.driver.connection import PgConn
from durable_actors._store.claim import release_claims
from durable_actors._store.commands import Command
from durable_actors._store.insert import insert_instances
from durable_actors._store.limits import charge_limits, declare_limits, read_thawed, refunds_of
from durable_actors._store.rerun import rerun_call
from durable_actors._store.rows import PickResult
from durable_actors.machine import OUTCOMES
from tests.store.kit import HEAD, OWNER, SCHEMA, connect, insert, outcome, pick, plan, rows
from tests.store.stepping import commit


async def declare(conn: PgConn, **limits: Limit) -> None:
    await declare_limits(conn, SCHEMA, limits, node="test")


async def thaw(conn: PgConn, queue: str = "default", limit: int = 100) -> PickResult:
    """Pick what `read_thawed` finds, and nothing else."""
    found = await read_thawed(conn, SCHEMA, queue, limit=limit)
    begin = attrs.evolve(HEAD, priorities=[], eligible_ats=[], ids=[], extras=found.ids)
    return await pick(conn, queue=queue, begin=begin)


def taken(picked: PickResult) -> list[int]:
    return sorted(claim.id for claim in picked.claims)


def age(db: psycopg.Connection, seconds: float) -> None:
    """As if so much time had passed since every level was written."""
    db.execute(
        "update durable.limit_keys set tat = tat - make_interval(secs => %s), at = at - make_interval(secs => %s),"
        " blocked = blocked - make_interval(secs => %s)",
        [seconds] * 3,
    )
    db.execute("update durable.limit_waits set next_at = next_at - make_interval(secs => %s)", [seconds])


async def test_a_pick_claims_the_burst_and_throttles_the_rest(db: psycopg.Connection, durable_dsn: str):
    ids = insert(db, 5, rate_limit="api")
    async with connect(durable_dsn) as conn:
        await declare(conn, api=Limit(1, per=60, burst=2))
        picked = await pick(conn)
    assert taken(picked) == ids[:2]
    assert [(row.id, row.what) for row in picked.seen] == [(number, "t") for number in ids[2:]]
    assert rows(db, "status::text, hold, limited_by", "hold <> 0") == [("runnable", 3, "api")] * 3
    [(wait,)] = db.execute("select extract(epoch from next_at - now()) from durable.limit_waits").fetchall()
    assert 55 < wait <= 60
    assert [claim.recorded.rate_limit for claim in picked.claims] == ["api", "api"]


async def test_throttled_rows_are_claimed_when_their_token_comes(db: psycopg.Connection, durable_dsn: str):
    ids = insert(db, 5, rate_limit="api")
    async with connect(durable_dsn) as conn:
        await declare(conn, api=Limit(1, per=60, burst=2))
        await pick(conn)
        none = await read_thawed(conn, SCHEMA, "default", limit=100)
        assert (none.ids, 55 < (none.next_in or 0) <= 60) == ([], True)
        age(db, 60)
        picked = await thaw(conn)
        assert taken(picked) == [ids[2]]
        assert picked.positions == {}, "it has read nothing before that row: no cursor may move"
        age(db, 600)
        assert taken(await thaw(conn)) == ids[3:], "as many as the bucket holds"
        assert db.execute("select count(*) from durable.limit_waits").fetchone() == (0,)


async def test_nobody_overtakes_a_throttled_row(db: psycopg.Connection, durable_dsn: str):
    [fat] = insert(db, rate_limit="api\x1e5")
    async with connect(durable_dsn) as conn:
        await declare(conn, api=Limit(1, per=60, burst=5))
        await charge_limits(conn, SCHEMA, [("api", 1)])
        assert taken(await pick(conn)) == []
        [thin] = insert(db, rate_limit="api")
        assert taken(await pick(conn)) == [], "four tokens are there, and the fat one waits for five"
        age(db, 60)
        assert taken(await thaw(conn)) == [fat]
        age(db, 60)
        assert taken(await thaw(conn)) == [thin]


async def test_a_weight_above_the_burst_is_slow_and_never_stuck(db: psycopg.Connection, durable_dsn: str):
    ids = insert(db, 2, rate_limit="api\x1e10")
    async with connect(durable_dsn) as conn:
        await declare(conn, api=Limit(1, per=1, burst=2))
        assert taken(await pick(conn)) == ids[:1]
        age(db, 9)
        assert taken(await thaw(conn)) == [], "it has paid for ten"
        age(db, 1.1)
        assert taken(await thaw(conn)) == ids[1:]


async def test_several_limits_are_charged_together_or_not_at_all(db: psycopg.Connection, durable_dsn: str):
    ids = insert(db, 3, rate_limit="rpm\x1ftpm\x1e50")
    async with connect(durable_dsn) as conn:
        await declare(conn, rpm=Limit(10, per=60), tpm=Limit(100, per=60, burst=100))
        assert taken(await pick(conn)) == ids[:2]
        assert rows(db, "limited_by", "hold = 3") == [("tpm",)]
        [(spent,)] = db.execute(
            "select round(extract(epoch from tat - at) / 6) from durable.limit_keys where key = 'rpm'"
        ).fetchall()
        assert spent == 2, "the third one is not charged for the limit that would have let it go"
        age(db, 30.1)
        assert taken(await thaw(conn)) == ids[2:]


async def test_keys_have_a_level_each(db: psycopg.Connection, durable_dsn: str):
    insert(db, 3, rate_limit="api:a")
    insert(db, 3, rate_limit="api:b")
    async with connect(durable_dsn) as conn:
        await declare(conn, api=Limit(1, per=60))
        assert len((await pick(conn)).claims) == 2
    assert {key for (key,) in db.execute("select key from durable.limit_waits")} == {"api:a", "api:b"}


@pytest.mark.parametrize("aside", ["unknown", "paused"])
async def test_what_is_like_a_throttled_row_may_be_shelved_by_the_same_pick(
    db: psycopg.Connection, durable_dsn: str, aside: str
):
    ids = insert(db, 3, rate_limit="api")
    [(other,)] = db.execute(
        "insert into durable.gen_durable (fsm, step, rate_limit) values ('other', 's', 'api') returning id"
    )
    if aside == "paused":
        db.execute("insert into durable.pauses (queue, fsm) values ('default', 'other')")
    async with connect(durable_dsn) as conn:
        await declare(conn, api=Limit(1, per=60, burst=1))
        picked = await pick(conn, known=("m/1",) if aside == "unknown" else ("m/1", "other/1"))
    assert taken(picked) == ids[:1]
    assert sorted((row.id, row.what) for row in picked.seen) == [(ids[1], "t"), (ids[2], "t"), (other, "s")]
    assert rows(db, "hold, limited_by", "hold <> 0") == [(3, "api")] * 2 + [(2, None)]


async def test_an_unknown_limit_holds_its_rows_until_it_is_declared(db: psycopg.Connection, durable_dsn: str):
    ids = insert(db, 2, rate_limit="nobody")
    async with connect(durable_dsn) as conn:
        assert taken(await pick(conn)) == []
        assert rows(db, "hold, limited_by") == [(3, "nobody")] * 2
        await declare(conn, nobody=Limit(100, per=1))
        assert taken(await thaw(conn)) == ids


async def test_a_clock_that_goes_back_an_hour_heals(db: psycopg.Connection, durable_dsn: str):
    ids = insert(db, 2, rate_limit="api")
    async with connect(durable_dsn) as conn:
        await declare(conn, api=Limit(1, per=60, burst=1))
        assert taken(await pick(conn)) == ids[:1]
        db.execute("update durable.limit_keys set tat = tat + interval '1 hour', at = at + interval '1 hour'")
        db.execute("update durable.limit_waits set next_at = now()")
        assert taken(await thaw(conn)) == []
        [(wait,)] = db.execute(
            "select extract(epoch from next_at - now()) from durable.limit_waits"
        ).fetchall()
        assert wait <= 60, "not an hour"


async def test_after_an_outage_no_more_than_the_burst_goes_at_once(db: psycopg.Connection, durable_dsn: str):
    insert(db, 50, rate_limit="api")
    async with connect(durable_dsn) as conn:
        await declare(conn, api=Limit(1, per=1, burst=5))
        assert len((await pick(conn)).claims) == 5
        age(db, 600)
        assert len((await thaw(conn)).claims) == 5
        assert (await thaw(conn)).claims == []


async def test_what_never_began_is_refunded(db: psycopg.Connection, durable_dsn: str):
    insert(db, 4, rate_limit="api", weight=2)
    async with connect(durable_dsn) as conn:
        await declare(conn, api=Limit(1, per=60, burst=4))
        claimed = (await pick(conn)).claims
        assert len(claimed) == 2
        await release_claims(conn, SCHEMA, claimed, attempts=0)
        await charge_limits(conn, SCHEMA, refunds_of(claimed))
        assert len((await thaw(conn)).claims + (await pick(conn)).claims) == 2


async def test_slots_are_counted_from_what_executes(db: psycopg.Connection, durable_dsn: str):
    ids = insert(db, 5, rate_limit="!gpu")
    async with connect(durable_dsn) as conn:
        await declare(conn, gpu=Limit(slots=2))
        picked = await pick(conn)
        assert taken(picked) == ids[:2]
        assert rows(db, "hold", "status = 'runnable'") == [(3,)] * 3
        assert (await thaw(conn)).claims == []
        await commit(conn, outcome(picked.claims[0], "done", result=b"1"))
        third = await thaw(conn)
        assert taken(third) == [ids[2]]
        await release_claims(conn, SCHEMA, [picked.claims[1]], attempts=0)
        assert taken(await thaw(conn)) == [ids[3]], (
            "a release frees the slot; what it gave back comes after this"
        )


async def test_two_slots_that_ended_at_once_are_filled_at_once(db: psycopg.Connection, durable_dsn: str):
    ids = insert(db, 5, rate_limit="!gpu")
    async with connect(durable_dsn) as conn:
        await declare(conn, gpu=Limit(slots=2))
        picked = await pick(conn)
        await commit(conn, *[outcome(claim, "done", result=b"1") for claim in picked.claims])
        assert taken(await thaw(conn)) == ids[2:4]


async def test_an_end_that_a_pick_did_not_see_is_found_by_its_node(db: psycopg.Connection, durable_dsn: str):
    """The pick has the line of `limit_waits`, and its snapshot is older than the end: the trigger skips the line."""
    ids = insert(db, 6, rate_limit="!gpu")
    async with connect(durable_dsn) as conn:
        await declare(conn, gpu=Limit(slots=3))
        first, *others = (await pick(conn)).claims
        await commit(conn, outcome(first, "done", result=b"1"))
        with psycopg.connect(durable_dsn) as picking:  # it has claimed, and its commit is under way
            picking.execute("update durable.limit_waits set next_at = now() + interval '2 seconds'")
            await commit(conn, *[outcome(claim, "done", result=b"1") for claim in others])
        assert (await read_thawed(conn, SCHEMA, "default", limit=100)).ids == []
        found = await read_thawed(conn, SCHEMA, "default", limit=100, ended=["gpu"])
        assert found.ids == ids[3:], "as many as have a slot"
        assert len((await pick(conn, begin=attrs.evolve(HEAD, extras=found.ids))).claims) == 3
        insert(db, 2, rate_limit="!gpu")
        assert (await pick(conn)).claims == []
        assert (await read_thawed(conn, SCHEMA, "default", limit=100, ended=["gpu"])).ids == []


async def test_a_pick_waits_for_no_line_that_an_end_is_writing(db: psycopg.Connection, durable_dsn: str):
    """The commit has a line of `limit_waits`, and wants a row that the pick has locked: none of them may wait."""
    [first] = insert(db, rate_limit="!gpu")
    async with connect(durable_dsn) as conn:
        await declare(conn, gpu=Limit(slots=1))
        await pick(conn)
        [second] = insert(db, rate_limit="!gpu")
        await pick(conn)
        insert(db, rate_limit="!gpu")
        with psycopg.connect(durable_dsn) as ending:
            ending.execute("update durable.limit_waits set next_at = now()")
            with trio.fail_after(5):
                assert [row.what for row in (await pick(conn)).seen] == ["t"]
                begin = attrs.evolve(HEAD, priorities=[], eligible_ats=[], ids=[], extras=[second])
                assert (await pick(conn, begin=begin)).claims == []
        [(due,)] = db.execute("select next_at <= now() from durable.limit_waits").fetchall()
        assert due, "what the commit has written stays"
        assert rows(db, "hold", f"id <> {first}") == [(3,), (3,)]


async def test_a_holder_that_its_commit_deletes_frees_its_slot(db: psycopg.Connection, durable_dsn: str):
    """`keep=0`: what waits is looked at at once, not two seconds later."""
    ids = insert(db, 2, rate_limit="!gpu")
    async with connect(durable_dsn) as conn:
        await declare(conn, gpu=Limit(slots=1))
        [holder] = (await pick(conn)).claims
        await commit(conn, outcome(holder, "done", result=b"1", deletes=True))
        assert rows(db, "id") == [(ids[1],)]
        assert taken(await thaw(conn)) == ids[1:]


@pytest.mark.parametrize(
    "text",
    [
        "\x01; drop",
        "!",
        "",
        "\x1f\x1f",
        "a\x1ex",
        "a" * 20000,
        "!" + "é" * 5000,
        "\x1e",
        "a:\x1e99999999999",
        "x\x1d\x1d",
    ],
)
async def test_a_text_that_a_hand_wrote_refuses_no_pick(db: psycopg.Connection, durable_dsn: str, text: str):
    insert(db, rate_limit=text, weight=-(2**31))
    [good] = insert(db)
    async with connect(durable_dsn) as conn:
        assert good in taken(await pick(conn))
        await thaw(conn)


async def test_a_key_that_somebody_decides_about_is_left(db: psycopg.Connection, durable_dsn: str):
    ids = insert(db, 2, rate_limit="api")
    insert(db, 1, rate_limit="other")
    async with connect(durable_dsn) as conn:
        await declare(conn, api=Limit(1, per=60), other=Limit(1, per=60))
        with psycopg.connect(durable_dsn) as elsewhere:
            elsewhere.execute(
                "select pg_advisory_xact_lock(hashtextextended('durable' || chr(1) || 'api', 2))"
            )
            picked = await pick(conn)
        assert [claim.recorded.rate_limit for claim in picked.claims] == ["other"]
        assert {row.id: row.what for row in picked.seen} == dict.fromkeys(ids, "l")


async def test_a_pick_that_can_claim_nothing_else_tries_for_a_busy_key_again(
    db: psycopg.Connection, durable_dsn: str
):
    """For 20 ms. Beside other work it does not: that would begin later."""
    [limited] = insert(db, rate_limit="api")
    took: list[float] = []
    async with connect(durable_dsn) as conn:
        await declare(conn, api=Limit(1, per=60))
        with psycopg.connect(durable_dsn) as elsewhere:
            elsewhere.execute(
                "select pg_advisory_xact_lock(hashtextextended('durable' || chr(1) || 'api', 2))"
            )
            began = trio.current_time()
            assert [row.what for row in (await pick(conn)).seen] == ["l"]
            assert trio.current_time() - began >= 0.02
            for _ in range(30):
                [free] = insert(db)
                began = trio.current_time()
                picked = await pick(conn)
                took.append(trio.current_time() - began)
                assert (taken(picked), [row.id for row in picked.seen]) == ([free], [limited])
    assert min(took) < 0.02


async def test_a_pick_that_may_have_locked_an_executing_row_does_not_wait(
    db: psycopg.Connection, durable_dsn: str
):
    """A commit of that row would wait for the pick."""
    insert(db, rate_limit="other", partition_key="k")
    took: list[float] = []
    async with connect(durable_dsn) as conn:
        await declare(conn, api=Limit(1, per=60), other=Limit(1, per=60))
        assert len((await pick(conn)).claims) == 1
        [limited] = insert(db, rate_limit="api")
        with psycopg.connect(durable_dsn) as elsewhere:
            elsewhere.execute(
                "select pg_advisory_xact_lock(hashtextextended('durable' || chr(1) || 'api', 2))"
            )
            for _ in range(30):
                [behind] = insert(db, rate_limit="api", partition_key="k")
                began = trio.current_time()
                picked = await pick(conn)
                took.append(trio.current_time() - began)
                assert {row.id: row.what for row in picked.seen} == {behind: "h", limited: "l"}
    assert min(took) < 0.02


async def test_a_runner_does_not_try_for_a_busy_key_row_by_row(db: psycopg.Connection, durable_dsn: str):
    """It looks at one row after another: 40 times 20 ms would be 0.8 s, with more and more rows locked."""
    insert(db, 40, rate_limit="api")
    async with connect(durable_dsn) as conn:
        await declare(conn, api=Limit(1, per=60))
    with psycopg.connect(durable_dsn) as elsewhere:
        elsewhere.execute("select pg_advisory_xact_lock(hashtextextended('durable' || chr(1) || 'api', 2))")
        began = trio.current_time()
        assert not db.execute(
            "select id from durable.claim_next('default', array['m/s'], 'runner')"
        ).fetchall()
        assert trio.current_time() - began < 0.8


async def test_who_decides_later_and_began_earlier_makes_no_tokens(db: psycopg.Connection, durable_dsn: str):
    """The level was written by a transaction that began 0.5 s after this one: it does not fall by as much."""
    [one, two] = (insert(db, rate_limit=text)[0] for text in ("api", "api\x1f!gpu"))
    level = (
        "select extract(epoch from tat - at)::float8, at > now() from durable.limit_keys where key = 'api'"
    )
    async with connect(durable_dsn) as conn:
        await declare(conn, api=Limit(1, per=1, burst=10), gpu=Limit(slots=1))
        await charge_limits(conn, SCHEMA, [("api", 5)])
        later = "update durable.limit_keys set at = now() + interval '0.5 s', tat = now() + interval '5.5 s'"
        for act, spent in ((one, 6), (two, 6), (None, 6)):
            db.execute(later)
            if act is None:
                await charge_limits(conn, SCHEMA, [("api", 1)])
            else:
                begin = attrs.evolve(HEAD, priorities=[], eligible_ats=[], ids=[], extras=[act])
                assert taken(await pick(conn, begin=begin)) == [act]
            [(now, ahead)] = db.execute(level).fetchall()
            assert (round(now, 3), ahead) == (spent, True)


async def test_a_throttled_row_keeps_its_place_in_its_key(db: psycopg.Connection, durable_dsn: str):
    [first] = insert(db, rate_limit="api", partition_key="k")
    [second] = insert(db, partition_key="k")
    async with connect(durable_dsn) as conn:
        await declare(conn, api=Limit(1, per=60, burst=1))
        await charge_limits(conn, SCHEMA, [("api", 1)])
        assert taken(await pick(conn)) == []
        assert rows(db, "hold") == [(3,), (1,)]
        age(db, 60)
        assert taken(await thaw(conn)) == [first]
    assert rows(db, "status::text, hold", f"id = {second}") == [("runnable", 1)]


async def test_pickers_grant_exactly_the_burst(db: psycopg.Connection, durable_dsn: str):
    """Eight pickers on forty cold keys: each key grants its burst, once."""
    for key in range(40):
        insert(db, 5, rate_limit=f"api:{key}")
    granted: list[str | None] = []
    async with connect(durable_dsn) as conn:
        await declare(conn, api=Limit(1, per=3600, burst=3))

    async def picker(n: int) -> None:
        async with connect(durable_dsn) as conn:
            for _ in range(12):
                found = await pick(conn, owner=attrs.evolve(OWNER, name=f"node-{n}"), limit=20)
                granted.extend(claim.recorded.rate_limit for claim in found.claims)

    async with trio.open_nursery() as nursery:
        for n in range(8):
            nursery.start_soon(picker, n)
    async with connect(durable_dsn) as conn:  # what was left to somebody else
        while found := (await pick(conn)).claims:
            granted.extend(claim.recorded.rate_limit for claim in found)
    assert Counter(granted) == {f"api:{key}": 3 for key in range(40)}


async def test_a_slot_is_not_lost_when_its_holder_ends_meanwhile(db: psycopg.Connection, durable_dsn: str):
    """The holder's commit comes before or after the pick that throttles: the next one gets the slot in both orders."""
    async with connect(durable_dsn) as conn, connect(durable_dsn) as other:
        await declare(conn, gpu=Limit(slots=1))
        [first] = insert(db, rate_limit="!gpu")
        [mine] = (await pick(conn)).claims
        [second] = insert(db, rate_limit="!gpu")
        with psycopg.connect(
            durable_dsn
        ) as locking:  # the holder's row is being written: nobody can be throttled
            locking.execute("select 1 from durable.gen_durable where id = %s for update", [first])
            picked = await pick(other)
            assert [(row.id, row.what) for row in picked.seen] == [(second, "l")]
        await pick(other)
        assert rows(db, "hold", f"id = {second}") == [(3,)]
        await commit(conn, outcome(mine, "done", result=b"1"))
        assert taken(await thaw(conn)) == [second]


async def test_what_is_not_under_a_limit_sees_nothing_of_it(db: psycopg.Connection, durable_dsn: str):
    insert(db, 50, rate_limit="api")
    free = insert(db, 5)
    async with connect(durable_dsn) as conn:
        await declare(conn, api=Limit(1, per=3600))
        assert set(free) < set(taken(await pick(conn)))
        assert (await pick(conn)).window == 0, "throttled rows are out of the index of the pick"


async def test_only_its_own_transaction_writes_limits(db: psycopg.Connection, durable_dsn: str):
    async with connect(durable_dsn) as conn:
        [number] = insert(db)
        [mine] = (await pick(conn)).claims
        done = outcome(mine, "runnable", step="t", advance=1, attempt=0, relimits=True, limits="api")
        await release_claims(conn, SCHEMA, [mine], attempts=0)
        await commit(conn, done)
    assert rows(db, "rate_limit", f"id = {number}") == [(None,)], "a stale outcome changes no limits"


async def test_a_rerun_has_the_limits_of_the_step_in_which_it_begins(
    db: psycopg.Connection, durable_dsn: str
):
    """Not those of the step that the old one has reached."""
    async with connect(durable_dsn) as conn:
        await declare(conn, api=Limit(100, per=1))
        [number] = await insert_instances(conn, SCHEMA, [plan(limits="api", journal=OUTCOMES)])
        [mine] = (await pick(conn)).claims
        await commit(conn, outcome(mine, "runnable", step="t", advance=1, attempt=0, relimits=True))
        await conn.run(*rerun_call(SCHEMA, number or 0, Command(), step=None, state=b"{}", key=None))
        for known in (None, ("gpu",)):
            for step in ("t", "u", mine.step):
                call = rerun_call(
                    SCHEMA, number or 0, Command(), step=step, state=b"{}", key=None, limits=known
                )
                await conn.run(*call)
    first = mine.step
    assert rows(db, "step, rate_limit") == [
        *(("t", None), (first, "api")),
        *(("t", None), ("u", None), (first, "api")),
        *(("t", None), ("u", "gpu"), (first, "api")),
    ], "what the code says counts only where neither the record nor the row says it"
