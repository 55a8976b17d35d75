"""How exactly limits are kept: in any window, by eight pickers, under changes, and after levels are lost."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from itertools import pairwise
from random import Random

import attrs
import psycopg
import pytest
import trio
from durable_actors._limits import Limit
from durable_actors._store.claim import release_claims
from durable_actors._store.commands import Command
from durable_actors._store.limits import charge_limits, forget_limit_keys, refunds_of, set_limit
from durable_actors._store.rows import Claim, PickResult
from tests.store.kit import HEAD, OWNER, SCHEMA, connect, insert, outcome, pick, rows
from tests.store.stepping import commit
from tests.store.test_limits import age, declare, taken, thaw


@pytest.mark.parametrize("seed", range(4))
async def test_no_window_has_more_than_the_burst_and_what_came_since(
    db: psycopg.Connection, durable_dsn: str, seed: int
):
    """Waits of any length, picks of any size, rows that are given back: of those that began, burst + R·t."""
    draw = Random(seed)
    burst, interval = draw.randint(1, 6), draw.choice((0.5, 1.0, 3.0))
    insert(db, 120, rate_limit="api")
    began: list[tuple[float, int]] = []
    now = 0.0
    async with connect(durable_dsn) as conn:
        await declare(conn, api=Limit(1, per=interval, burst=burst))
        for _ in range(40):
            found = [*(await thaw(conn, limit=draw.randint(1, 9))).claims]
            found += (await pick(conn, limit=draw.randint(1, 9))).claims
            unstarted = [claim for claim in found if draw.random() < 0.3]
            if unstarted:
                await release_claims(conn, SCHEMA, unstarted, attempts=0)
                await charge_limits(conn, SCHEMA, refunds_of(unstarted))
            began.append((now, len(found) - len(unstarted)))
            waited = draw.choice((0.0, 0.1, interval, interval * draw.random() * 10))
            age(db, waited)
            now += waited
    slack = 0.5 / interval  # the statements take time, too, by which the server's clock goes on
    for first, (start, _) in enumerate(began):
        total = 0
        for at, count in began[first:]:
            total += count
            assert total <= burst + (at - start) / interval + slack, (seed, start, at)
    assert sum(count for _, count in began) > burst


async def test_eight_pickers_never_exceed_the_slots(db: psycopg.Connection, durable_dsn: str):
    """They claim, end, release and throttle as they come; who holds a slot is counted from outside all the time."""
    insert(db, 150, rate_limit="!gpu")
    most = 0
    async with connect(durable_dsn) as conn:
        await declare(conn, gpu=Limit(slots=3))

    async def picker(n: int) -> None:
        draw, later = Random(n), list[int]()  # another picker was deciding about those just then
        owner = attrs.evolve(OWNER, name=f"node-{n}")
        async with connect(durable_dsn) as conn:
            while await left():
                begin = attrs.evolve(HEAD, extras=later)
                picks = [await unless_locked(partial(pick, conn, owner=owner, limit=5, begin=begin))]
                picks.append(await unless_locked(partial(thaw, conn, limit=5)))
                mine: list[Claim] = [claim for picked in picks for claim in picked.claims]
                later = [row.id for picked in picks for row in picked.seen if row.postponed]
                await trio.sleep(draw.random() * 0.005)
                for claim in mine:
                    # A pick that throttles others locks the row of a holder for a moment: try again.
                    if draw.random() < 0.2:
                        while not (await release_claims(conn, SCHEMA, [claim], attempts=0)).ids:
                            pass
                    else:
                        while claim.id not in await commit(conn, outcome(claim, "done", result=b"1")):
                            pass

    async def unless_locked(call: Callable[[], Awaitable[PickResult]]) -> PickResult:
        """On a busy machine an end may hold its line of `limit_waits` for 100 ms. A feeder picks again, too."""
        while True:
            try:
                return await call()
            except psycopg.errors.LockNotAvailable:
                pass

    async def left() -> bool:
        nonlocal most
        query = (
            "select count(*) filter (where status = 'executing'), count(*) from durable.gen_durable"
            " where status <> 'done'"
        )
        found = await trio.to_thread.run_sync(lambda: db.execute(query).fetchone())
        assert found is not None
        most = max(most, found[0])
        return found[1] > 0

    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            for n in range(8):
                nursery.start_soon(picker, n)
    assert 0 < most <= 3


async def test_a_key_that_is_deleted_is_a_full_bucket(db: psycopg.Connection, durable_dsn: str):
    """A missing level stops nobody for ever: not one who sleeps, nor one who is throttled."""
    ids = insert(db, 3, rate_limit="api")
    async with connect(durable_dsn) as conn:
        await declare(conn, api=Limit(1, per=60))
        await pick(conn)
        db.execute("delete from durable.limit_keys")
        db.execute("update durable.limit_waits set next_at = now()")
        assert taken(await thaw(conn)) == ids[1:2]


async def test_keys_that_are_at_rest_for_long_are_forgotten(db: psycopg.Connection, durable_dsn: str):
    """Each tenant would leave one for ever. What is charged, blocked, or locked just now stays."""
    db.execute(
        "insert into durable.limit_keys (key, tat, at, blocked) values"
        " ('api:old', now() - interval '2 days', now() - interval '2 days', null),"
        " ('api:older', now() - interval '9 days', now() - interval '9 days', now() - interval '3 days'),"
        " ('api:locked', now() - interval '9 days', now() - interval '9 days', null),"
        " ('api:charged', now() + interval '1 s', now(), null),"
        " ('api:blocked', now() - interval '2 days', now() - interval '2 days', now() + interval '1 s'),"
        " ('api:today', now() - interval '1 hour', now() - interval '1 hour', null)"
    )
    async with connect(durable_dsn) as conn:
        with psycopg.connect(durable_dsn) as other:
            other.execute("select 1 from durable.limit_keys where key = 'api:locked' for update")
            assert await forget_limit_keys(conn, SCHEMA, after=86_400.0, limit=1) == 1
            assert await forget_limit_keys(conn, SCHEMA, after=86_400.0, limit=100) == 1
        left = db.execute("select key from durable.limit_keys order by key").fetchall()
        assert [key for (key,) in left] == ["api:blocked", "api:charged", "api:locked", "api:today"]
        assert await forget_limit_keys(conn, SCHEMA, after=86_400.0, limit=100) == 1


async def test_a_limit_that_changes_acts_with_the_next_pick(db: psycopg.Connection, durable_dsn: str):
    ids = insert(db, 6, rate_limit="!gpu")
    async with connect(durable_dsn) as conn:
        await declare(conn, gpu=Limit(slots=2))
        first = (await pick(conn)).claims
        assert [claim.id for claim in first] == ids[:2]
        await set_limit(conn, SCHEMA, "gpu", Limit(slots=4), Command())
        assert taken(await thaw(conn)) == ids[2:4]
        await set_limit(conn, SCHEMA, "gpu", Limit(slots=1), Command())
        await commit(conn, *[outcome(claim, "done", result=b"1") for claim in first])
        assert taken(await thaw(conn)) == [], "two of them run on, and nobody else begins"


async def test_a_rate_that_changes_acts_with_the_next_pick(db: psycopg.Connection, durable_dsn: str):
    insert(db, 9, rate_limit="api")
    async with connect(durable_dsn) as conn:
        await declare(conn, api=Limit(1, per=3600, burst=2))
        assert len((await pick(conn)).claims) == 2
        await set_limit(conn, SCHEMA, "api", Limit(1, per=1, burst=5), Command())
        age(db, 4.0)
        assert len((await thaw(conn)).claims) in {0, 3, 4}
        await set_limit(conn, SCHEMA, "api", None, Command())
        age(db, 7200)
        assert len((await thaw(conn)).claims) == 2


async def test_a_pause_and_a_resume_make_no_burst(db: psycopg.Connection, durable_dsn: str):
    """Ten minutes without a pick: then the burst, and one in an interval again."""
    insert(db, 100, rate_limit="api")
    counts: list[int] = []
    async with connect(durable_dsn) as conn:
        await declare(conn, api=Limit(10, per=60, burst=4))
        await pick(conn)
        age(db, 600)
        for _ in range(5):
            counts.append(len((await thaw(conn)).claims))
            age(db, 6.05)
    assert counts == [4, 1, 1, 1, 1]


async def test_a_refund_never_fills_a_bucket_over_its_brim(db: psycopg.Connection, durable_dsn: str):
    insert(db, 30, rate_limit="api")
    async with connect(durable_dsn) as conn:
        await declare(conn, api=Limit(1, per=60, burst=3))
        mine = (await pick(conn)).claims
        await release_claims(conn, SCHEMA, mine, attempts=0)
        for _ in range(3):  # as if several nodes had given the same back
            await charge_limits(conn, SCHEMA, refunds_of(mine))
        assert len((await pick(conn)).claims) + len((await thaw(conn)).claims) == 3


async def test_throttled_rows_go_in_order(db: psycopg.Connection, durable_dsn: str):
    """The most urgent first, then the eldest; among keys each for itself."""
    late = insert(db, 3, rate_limit="api", priority=5)
    async with connect(durable_dsn) as conn:
        await declare(conn, api=Limit(1, per=60))
        await charge_limits(conn, SCHEMA, [("api", 1)])
        await pick(conn, begin=attrs.evolve(HEAD, priorities=[5]))
        early = insert(db, 3, rate_limit="api", priority=0)
        await pick(conn)
        order: list[int] = []
        for _ in range(6):
            age(db, 60.01)
            order += taken(await thaw(conn))
    assert order == [*early, *late]
    assert all(one < other for one, other in pairwise(early))


async def test_a_backlog_of_one_key_holds_nobody_up_for_long(db: psycopg.Connection, durable_dsn: str):
    """A pick looks at ten rows: what is behind two thousand is claimed by the fifth one, not by the two-hundredth."""
    flood = insert(db, 2000, rate_limit="api")
    other = insert(db, 3, rate_limit="api:other")
    [free] = insert(db)
    async with connect(durable_dsn) as conn:
        await declare(conn, api=Limit(1, per=3600))
        got: list[int] = []
        picks = 0
        while free not in got and picks < 20:
            got += taken(await pick(conn, limit=10))
            picks += 1
        assert picks <= 6
        assert got == [flood[0], other[0], free]
        assert set(rows(db, "limited_by", "hold = 3")) == {("api",), ("api:other",)}
        age(db, 3600)
        assert taken(await thaw(conn)) == [flood[1], other[1]]
