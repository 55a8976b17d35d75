"""Renew, release, reap, sweep: each one statement, fenced, never waiting, by index."""

from __future__ import annotations

import math

import psycopg
import pytest
import trio
from durable_actors._store.claim import (
    Owner,
    PickFrom,
    Released,
    pick_instances,
    promote_siblings,
    release_claims,
)
from durable_actors._store.holds import HELD
from durable_actors._store.key import lock_node
from durable_actors._store.lease import read_owners, reap_claims, renew_leases, sweep_keys
from durable_actors._store.rows import Claim
from durable_actors._store.sql import statement
from tests.kit import until
from tests.store.kit import EXPIRE, OWNER, PLANS, connect, known_steps, pick, rows
from tests.support.interleave import open_sessions
from tests.support.sql import count_statements, explain


def fill(db: psycopg.Connection, count: int = 1, columns: str = "", values: str = "") -> None:
    db.execute(
        f"insert into durable.gen_durable (fsm, step{columns})"
        f" select 'm', 's'{values} from generate_series(1, {count}) n"
    )


async def test_renew_extends_what_is_ours_and_says_what(db: psycopg.Connection):
    fill(db, 3)
    async with connect(db.info.dsn) as conn:
        a, b, c = (await pick(conn)).claims
        await release_claims(conn, "durable", [b], attempts=0)
        await pick(conn, owner=Owner("durable", "other", b"", 60.0))
        db.execute(EXPIRE)
        assert await renew_leases(conn, "durable", [a, b, c], lease_ttl=30) == {a.claim_id, c.claim_id}
        assert rows(db, "lease_expires_at > now() + interval '20 s'") == [(True,), (False,), (True,)]


async def test_renew_skips_a_locked_row_and_does_not_wait(db: psycopg.Connection):
    fill(db, 2)
    async with connect(db.info.dsn) as conn:
        a, b = (await pick(conn)).claims
        with open_sessions(db.info.dsn, 1) as (holder,):
            holder.run("begin")
            holder.run("select 1 from durable.gen_durable where id = %s for update", [a.id])
            with trio.fail_after(5):
                assert await renew_leases(conn, "durable", [a, b], lease_ttl=30) == {b.claim_id}


async def test_renewing_is_hot(db: psycopg.Connection):
    """No index entry is written for a heartbeat: else every running row would bloat six indexes."""
    fill(db, 5)
    async with connect(db.info.dsn) as conn:
        claims = (await pick(conn)).claims
    arguments = [[claim.id for claim in claims], [claim.claim_id for claim in claims], 30]
    with db.transaction():
        psycopg.RawCursor(db).execute(statement("renew_leases", "durable").sql, arguments)  # type: ignore[arg-type]
        [counts] = db.execute(
            "select pg_stat_get_xact_tuples_updated(t), pg_stat_get_xact_tuples_hot_updated(t)"
            " from (select 'durable.gen_durable'::regclass::oid) r(t)"
        )
    assert counts == (5, 5)


@pytest.mark.parametrize("attempts", [0, 1])
async def test_release_gives_back_without_a_crash(db: psycopg.Connection, attempts: int):
    fill(db, 2)
    async with connect(db.info.dsn) as conn:
        a, b = (await pick(conn)).claims
        released = await release_claims(conn, "durable", [a], attempts=attempts)
        assert released == Released(frozenset({a.id}), frozenset(), ())
        columns = (
            "status, attempt, crashes, claim_id, locked_by, lease_expires_at, claim_token_hash, hold, rev"
        )
        assert rows(db, columns)[0] == ("runnable", attempts, 0, None, None, None, None, 0, 3)
        assert rows(db, "status, claim_id::text")[1] == ("executing", b.claim_id)


async def test_release_of_a_lost_claim_changes_nothing(db: psycopg.Connection):
    """The same worker has claimed it again: the fence is the claim, not the worker (an ABA otherwise)."""
    fill(db)
    async with connect(db.info.dsn) as conn:
        [old] = (await pick(conn)).claims
        db.execute(EXPIRE)
        await reap_claims(conn, "durable", limit=10)
        [new] = (await pick(conn)).claims
        before = rows(db, "*")
        assert not (await release_claims(conn, "durable", [old], attempts=1)).ids
        assert await renew_leases(conn, "durable", [old], lease_ttl=1000) == set()
        assert rows(db, "*") == before
        assert (await release_claims(conn, "durable", [new], attempts=1)).runnable == {new.id}


async def test_a_contended_row_is_held_and_offered_again(db: psycopg.Connection):
    fill(db, 1, ", partition_key", ", 'k'")
    async with connect(db.info.dsn) as conn:
        [claim] = (await pick(conn)).claims
        released = await release_claims(conn, "durable", [claim], attempts=0, hold=HELD)
        assert released == Released(frozenset({claim.id}), frozenset(), ())
        assert rows(db, "status, hold, attempt") == [("runnable", 1, 0)]
        assert (await pick(conn)).claims == []
        assert [row.id for row in await promote_siblings(conn, "durable", ["k", "other"])] == [claim.id]
        assert [row.id for row in (await pick(conn)).claims] == [claim.id]


async def test_a_released_key_offers_its_next_row(db: psycopg.Connection):
    fill(db, 2, ", partition_key", ", 'k'")
    async with connect(db.info.dsn) as conn:
        [claim] = (await pick(conn)).claims
        db.execute(
            "update durable.gen_durable set eligible_at = now() + interval '1 h' where id = %s", [claim.id]
        )
        released = await release_claims(conn, "durable", [claim], attempts=1)
        assert [row.id for row in released.offered] == [claim.id + 1]


async def test_reap_takes_the_expired_and_the_dead(db: psycopg.Connection):
    fill(db, 3)
    async with connect(db.info.dsn) as conn:
        for name in ("silent", "dead", "well"):
            await pick(conn, owner=Owner("durable", name, b"", 60.0), limit=1)
        db.execute(EXPIRE + " and locked_by = 'silent'")
        reaped, promoted = await reap_claims(
            conn, "durable", limit=10, dead={"dead": math.inf, "unknown": 0.0}
        )
        assert [(each.id, each.queue, each.status) for each in reaped] == [
            (1, "default", "runnable"),
            (2, "default", "runnable"),
        ]
        assert promoted == []
        assert rows(db, "status, attempt, crashes") == [("runnable", 1, 1)] * 2 + [("executing", 0, 0)]


async def test_a_node_that_has_its_lock_again_at_the_reap_keeps_its_claims(db: psycopg.Connection):
    """It was found dead, and came back before the reap; it has renewed nothing yet."""
    fill(db, 1)
    dead = {"node": math.inf}
    async with connect(db.info.dsn) as conn:
        await pick(conn, owner=Owner("durable", "node", b"", 60.0))
        async with connect(db.info.dsn) as session:
            await lock_node(session, "durable", "node")
            assert await reap_claims(conn, "durable", limit=10, dead=dead) == ([], [])
            await lock_node(session, "durable", "another")  # the lock of another node proves nothing
        await until(lambda: not db.execute("select 1 from pg_locks where locktype = 'advisory'").fetchall())
        assert len((await reap_claims(conn, "durable", limit=10, dead=dead))[0]) == 1


async def test_a_node_that_comes_back_between_the_look_and_the_reap_keeps_its_claims(db: psycopg.Connection):
    fill(db, 2)
    async with connect(db.info.dsn) as conn:
        first, _ = (await pick(conn, owner=Owner("durable", "node", b"", 60.0))).claims
        [seen] = await read_owners(conn, "durable")
        assert await renew_leases(conn, "durable", [first], lease_ttl=60.0) == {first.claim_id}
        dead = {"node": seen.latest_expiry}
        assert await reap_claims(conn, "durable", limit=10, dead=dead) == ([], [])
        db.execute("update durable.gen_durable set lease_expires_at = to_timestamp(%s)", [seen.latest_expiry])
        assert len((await reap_claims(conn, "durable", limit=10, dead=dead))[0]) == 2


async def test_reap_is_bounded_and_in_order(db: psycopg.Connection):
    fill(db, 7)
    async with connect(db.info.dsn) as conn:
        await pick(conn)
        db.execute(EXPIRE)
        batches = []
        while reaped := (await reap_claims(conn, "durable", limit=3))[0]:
            batches.append(sorted(each.id for each in reaped))
        assert batches == [[1, 2, 3], [4, 5, 6], [7]]


async def test_crashes_back_off_up_to_five_minutes(db: psycopg.Connection):
    delays = []
    async with connect(db.info.dsn) as conn:
        for crashes in (0, 1, 2, 3, 9, 10, 1000):
            db.execute("delete from durable.gen_durable")
            fill(db, 1, ", crashes, attempt", f", {crashes}, 7")
            await pick(conn)
            db.execute(EXPIRE)
            await reap_claims(conn, "durable", limit=1)
            delays += rows(db, "attempt, crashes, extract(epoch from eligible_at - updated_at)::int")
    assert delays == [
        (8, 1, 0),
        (8, 2, 1),
        (8, 3, 2),
        (8, 4, 4),
        (8, 10, 256),
        (8, 11, 300),
        (8, 1001, 300),
    ]


async def test_reap_skips_what_is_being_renewed(db: psycopg.Connection):
    """A late heartbeat and a reaper meet at the row: whoever has it first wins, and the other learns it."""
    fill(db)
    async with connect(db.info.dsn) as conn:
        [claim] = (await pick(conn)).claims
        db.execute(EXPIRE)
        with open_sessions(db.info.dsn, 1) as (heartbeat,):
            heartbeat.run("begin")
            heartbeat.run("update durable.gen_durable set lease_expires_at = now() + interval '1 min'")
            assert await reap_claims(conn, "durable", limit=1) == ([], [])
            heartbeat.run("commit")
        assert await reap_claims(conn, "durable", limit=1) == ([], [])
        assert rows(db, "status, claim_id::text") == [("executing", claim.claim_id)]


async def test_maintenance_never_deadlocks_and_reaps_each_claim_once(db: psycopg.Connection):
    """Heartbeat, reaper, release and pick on the same rows, each in its own order of arrival."""
    fill(db, 1000)
    reaped = released = 0

    def goes_on() -> bool:
        return reaped < 100 or released < 50

    async with (
        connect(db.info.dsn) as one,
        connect(db.info.dsn) as two,
        connect(db.info.dsn) as three,
        connect(db.info.dsn) as four,
    ):
        held: list[Claim] = []

        async def work() -> None:
            while goes_on():
                held.extend((await pick(one, limit=20)).claims)

        async def beat() -> None:
            while goes_on():  # for -1 seconds: what it renews is expired
                await renew_leases(two, "durable", held[::-1], lease_ttl=-1)

        async def take_back() -> None:
            nonlocal reaped
            while goes_on():
                reaped += len((await reap_claims(three, "durable", limit=5))[0])

        async def give_up() -> None:
            nonlocal released
            while goes_on():
                released += len((await release_claims(four, "durable", held[::-3], attempts=1)).ids)

        with trio.fail_after(30):
            async with trio.open_nursery() as nursery:
                for each in (work, beat, take_back, give_up):
                    nursery.start_soon(each)
    [(attempts, crashes)] = db.execute(
        "select sum(attempt), sum(crashes) from durable.gen_durable"
    ).fetchall()
    assert crashes == reaped, "each was told to exactly one"
    assert attempts == reaped + released


async def test_owners_show_claims_leases_and_locks(db: psycopg.Connection):
    fill(db, 3)
    async with connect(db.info.dsn) as conn:
        assert await read_owners(conn, "durable") == []
        await pick(conn, owner=Owner("durable", "alive", b"", 60.0), limit=2)
        await pick(conn, owner=Owner("durable", "dead", b"", 5.0), limit=1)
        db.execute("select pg_advisory_lock(hashtextextended('durable' || chr(2) || 'alive', 0))")
        db.execute("select pg_advisory_lock(hashtextextended('another' || chr(2) || 'dead', 0))")
        alive, dead = sorted(await read_owners(conn, "durable"), key=lambda each: each.owner)
        assert (alive.owner, alive.claims, alive.alive) == ("alive", 2, True)
        assert (dead.owner, dead.claims, dead.alive) == ("dead", 1, False)
        assert 50 < alive.soonest_expiry < 60.1
        assert 0 < dead.soonest_expiry < 5.1
        assert alive.latest_expiry - dead.latest_expiry == pytest.approx(55, abs=2)
        assert alive.server_up > 0
        assert alive.backend == conn.pid


async def test_sweep_finds_exactly_the_stuck_keys_page_by_page(db: psycopg.Connection):
    fill(db, 5, ", partition_key, hold", ", 'stuck ' || n, 1")
    fill(db, 2, ", partition_key, hold", ", 'offered', n - 1")
    fill(db, 1, ", partition_key, hold, eligible_at", ", 'later', 0, now() + interval '1 h'")
    fill(db, 1, ", partition_key, hold", ", 'later', 1")
    fill(db, 2, ", partition_key, queue", ", 'running', 'run'")
    async with connect(db.info.dsn) as conn:
        picked = await pick_instances(
            conn,
            OWNER,
            queue="run",
            limit=9,
            known=known_steps("m/1"),
            begin=PickFrom([0], ["-infinity"], [0]),
            now=0,
        )
        assert len(picked.claims) == 1
        stuck, after, pages = list[str](), "", 0
        while after is not None:
            found, after = await sweep_keys(conn, "durable", after=after, limit=3)
            stuck += found
            pages += 1
        assert sorted(stuck) == ["later", "stuck 1", "stuck 2", "stuck 3", "stuck 4", "stuck 5"]
        assert pages == 3


async def test_each_is_one_statement_whatever_the_batch(db: psycopg.Connection):
    fill(db, 300)
    async with connect(db.info.dsn) as conn:
        claims = (await pick(conn)).claims
        with count_statements(db.info.dsn) as count:
            await renew_leases(conn, "durable", claims, lease_ttl=60)
            await release_claims(conn, "durable", claims[:100], attempts=1)
            await reap_claims(conn, "durable", limit=500, dead={"node": math.inf})
        assert count.calls("gen_durable") == 3, str(count)


@pytest.fixture
def big(db: psycopg.Connection) -> psycopg.Connection:
    """20,000 finished rows, 300 executing ones scattered among them, 2,000 held ones."""
    fill(db, 20_000, ", status, finished_at", ", 'done', now()")
    db.execute(
        "update durable.gen_durable set status = 'executing', finished_at = null, locked_by = 'node ' || mod(id, 3),"
        " claim_id = gen_random_uuid(), lease_expires_at = now() + interval '1 min' where mod(id, 67) = 0"
    )
    fill(db, 2000, ", partition_key, hold", ", 'key ' || mod(n, 100), 1")
    db.execute("vacuum analyze durable.gen_durable")
    return db


@pytest.mark.parametrize(
    ("name", "arguments", "index", "most"),
    [
        ("reap_claims", [500, ["node 1"], None, [math.inf], "durable"], "gen_durable_executing", 4000),
        ("reap_claims", [500, [], None, [], "durable"], "gen_durable_executing", 700),
        ("read_owners", ["durable"], "gen_durable_executing", 700),
        ("sweep_keys", ["", 1000], "gen_durable_held", 900),
        ("promote_siblings", [["key 1", "key 2", "nothing"]], "gen_durable_held", 200),
    ],
)
def test_maintenance_reads_by_index(
    big: psycopg.Connection, name: str, arguments: list[object], index: str, most: int
):
    """Its cost is that of the executing or held rows, not of the table (about 600 pages here)."""
    plan = explain(big, statement(name, "durable").sql, arguments, settings=PLANS)  # type: ignore[arg-type]
    plan.assert_no_seq_scan("gen_durable")
    plan.assert_uses(index)
    assert plan.buffers < most, plan.text
    assert sum(node.removed for node in plan.nodes) < 2500, plan.text
