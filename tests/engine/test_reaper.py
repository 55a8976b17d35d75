"""Reaper: expired claims come back, those of dead nodes sooner, healthy ones never."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import trio
from durable_actors._engine.maintenance import reaper as reaper_module
from durable_actors._postgres.driver.connection import PgConn
from durable_actors._store.lease import OwnerState, read_owners
from durable_actors.telemetry import ClaimsReaped
from tests.engine.kit import Db, events_of, expire, keep, make_node, pick, reap
from tests.kit import until
from tests.support.faults import open_proxy
from tests.support.interleave import open_sessions
from tests.support.sql import count_statements

COLUMNS = "status, attempt, crashes, claim_id, locked_by, claim_token_hash, lease_expires_at, hold"
BACK = ("runnable", 1, 1, None, None, None, None, 0)


class Looks:
    """Counts the looks of all reapers, and tells them what a test wants."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **change: Any) -> None:
        self.count = 0
        self.change = change
        monkeypatch.setattr(reaper_module, "read_owners", self.read)

    async def read(self, conn: PgConn, schema: str) -> list[OwnerState]:
        owners = await read_owners(conn, schema)
        self.count += 1
        return [attrs.evolve(each, **self.change) for each in owners]

    async def wait(self, more: int) -> None:
        goal = self.count + more
        await until(lambda: self.count >= goal)


async def test_an_expired_claim_comes_back(db: Db):
    number = db.insert()
    async with make_node(db.dsn, name="silent") as silent, make_node(db.dsn) as node:
        await pick(silent)
        fresh = db.insert()
        await pick(silent)
        expire(db, number)
        events = events_of(node)
        async with reap(node):
            await until(lambda: events)
        assert db.row(number, COLUMNS) == BACK
        assert db.row(fresh, "status, attempt") == ("executing", 0)
        assert events == [ClaimsReaped(count=1, failed=0, dead_nodes=())]


async def test_it_sleeps_no_longer_than_to_the_next_lease_end(db: Db):
    number = db.insert()
    async with (
        make_node(db.dsn, lease_ttl=0.3) as silent,
        make_node(db.dsn, reap_interval=3600) as node,
    ):
        await pick(silent)
        async with reap(node):
            await db.eventually("select status = 'runnable' from durable.gen_durable where id = %s", number)
        assert db.row(number, "attempt, crashes") == (1, 1)


async def test_the_second_crash_waits_longer_than_the_first(db: Db):
    async with make_node(db.dsn, name="silent") as silent, make_node(db.dsn) as node:
        delays = []
        number = db.insert()
        for crashes in range(4):
            db.execute("update durable.gen_durable set eligible_at = now() where id = %s", number)
            [claimed] = await pick(silent)
            assert (claimed.attempt, claimed.crashes) == (crashes, crashes)
            expire(db, number)
            async with reap(node):
                await db.eventually(
                    "select status = 'runnable' from durable.gen_durable where id = %s", number
                )
            delays += db.row(number, "extract(epoch from eligible_at - updated_at)::float8")
        assert delays == [0, 1, 2, 4]


async def test_too_many_crashes_quarantine_the_instance(db: Db):
    number = db.insert()
    async with make_node(db.dsn, name="silent") as silent, make_node(db.dsn, max_crashes=2) as node:
        finals: list[int] = []
        node.on_final = finals.append
        events = events_of(node)
        for _ in range(2):
            await pick(silent)
            expire(db, number)
            seen = len(events)
            async with reap(node):
                await until(lambda seen=seen: len(events) > seen)
        status, finished, error = db.row(number, "status, finished_at is not null, last_error")
        assert (status, finished) == ("failed", True)
        assert "step s ended 2 times without an outcome" in error
        assert finals == [number]
        assert events[-1] == ClaimsReaped(count=1, failed=1, dead_nodes=())


async def test_a_dead_nodes_claims_come_back_after_dead_after_and_not_before(db: Db):
    number = db.insert()
    async with make_node(db.dsn, dead_after=0.5) as node, keep(db.dsn, name="dead") as dead:
        await pick(dead.node)
        events = events_of(node)
        async with reap(node) as reaper:
            await dead.stop()  # only the keeper: the lock is free, the lease is not over
            stopped = trio.current_time()
            reaper.look()
            await until(lambda: events)
        assert trio.current_time() - stopped >= 0.5
        assert db.row(number, COLUMNS) == BACK
        assert events == [ClaimsReaped(count=1, failed=0, dead_nodes=("dead",))]


async def test_a_living_nodes_claims_stay(db: Db, monkeypatch: pytest.MonkeyPatch):
    number = db.insert()
    looks = Looks(monkeypatch)
    async with make_node(db.dsn, dead_after=0.01, reap_interval=0.01) as node, keep(db.dsn) as other:
        await pick(other.node)
        async with reap(node) as reaper:
            await looks.wait(5)
            assert reaper.suspects() == {}
        assert db.row(number, "status") == ("executing",)


async def test_a_server_that_has_just_started_makes_nobody_dead(db: Db, monkeypatch: pytest.MonkeyPatch):
    """It freed all locks at once: everybody gets dead_after to come back."""
    number = db.insert()
    looks = Looks(monkeypatch, server_up=0.05)
    async with make_node(db.dsn, name="dead") as dead, make_node(db.dsn, dead_after=0.1) as node:
        await pick(dead)
        async with reap(node):
            await looks.wait(6)  # by itself every 60 ms: when the server might be up for long enough
            assert db.row(number, "status") == ("executing",)
            looks.change = {}
            await db.eventually("select status = 'runnable' from durable.gen_durable where id = %s", number)


async def test_a_cut_connection_of_the_reaper_begins_the_watch_anew(db: Db, monkeypatch: pytest.MonkeyPatch):
    """A server that crashes or fails over ends every session, frees every lock, and may look old."""
    db.insert()
    looks = Looks(monkeypatch)
    async with make_node(db.dsn, name="dead") as dead, make_node(db.dsn) as node:
        await pick(dead)
        async with reap(node) as reaper:
            await until(reaper.suspects)
            first = reaper.suspects()["dead"]
            reaper.look()
            await looks.wait(1)
            assert reaper.suspects()["dead"] == first, "one session: the watch goes on"
            db.execute(
                "select pg_terminate_backend(pid, 5000) from pg_stat_activity"
                " where datname = current_database() and pid <> pg_backend_pid()"
            )
            reaper.look()
            await looks.wait(1)
            await until(lambda: reaper.suspects()["dead"].since > first.since)


async def test_looks_of_one_reaper_share_a_session(db: Db, monkeypatch: pytest.MonkeyPatch):
    """Also while clients use all their connections: a lane with several would give it another one each time."""
    db.insert()
    looks = Looks(monkeypatch)
    async with make_node(db.dsn, name="dead") as dead, make_node(db.dsn) as node:
        await pick(dead)
        async with reap(node) as reaper:
            await until(reaper.suspects)
            first = reaper.suspects()
            for _ in range(3):
                async with node.pool.acquire("client"):
                    reaper.look()
                    await looks.wait(1)
            assert reaper.suspects() == first


async def test_never_its_own_claims_by_proof_of_death(db: Db, monkeypatch: pytest.MonkeyPatch):
    """Without its keeper its own lock is free; it knows better."""
    number = db.insert()
    looks = Looks(monkeypatch)
    async with make_node(db.dsn, dead_after=0.05, reap_interval=0.05) as node:
        await pick(node)
        async with reap(node):
            await looks.wait(5)
        assert db.row(number, "status") == ("executing",)


async def test_a_node_that_still_claims_is_not_dead(db: Db, monkeypatch: pytest.MonkeyPatch):
    """Its way to the server for session locks is cut, but it works: taking its claims would only run steps twice."""
    db.insert()
    looks = Looks(monkeypatch)
    async with make_node(db.dsn, name="cut") as cut, make_node(db.dsn) as node:
        await pick(cut)
        async with reap(node) as reaper:
            await until(reaper.suspects)
            first = reaper.suspects()["cut"]
            db.insert()
            await pick(cut)
            reaper.look()
            await looks.wait(1)
            await until(lambda: reaper.suspects()["cut"].since > first.since)


async def test_two_reapers_never_reap_a_claim_twice(db: Db):
    db.execute("insert into durable.gen_durable (fsm, step) select 'm', 's' from generate_series(1, 1500)")
    async with make_node(db.dsn, name="silent") as silent, make_node(db.dsn) as one, make_node(db.dsn) as two:
        while await pick(silent, limit=1000):
            pass
        db.execute("update durable.gen_durable set lease_expires_at = now() - interval '1 s'")
        events = events_of(one)
        two.telemetry.subscribe(events.append)
        async with reap(one), reap(two):
            await until(lambda: sum(event.count for event in events) >= 1500)  # type: ignore[union-attr]
        assert db.execute(
            "select min(attempt), max(attempt), min(crashes), max(crashes) from durable.gen_durable"
        ) == [(1, 1, 1, 1)]
        assert sum(event.count for event in events) == 1500  # type: ignore[union-attr]
        assert max(event.count for event in events) <= 500, "bounded batches"  # type: ignore[union-attr]


async def test_a_reaped_key_lets_its_next_row_go(db: Db):
    first, second = db.insert(partition_key="k"), db.insert(partition_key="k")
    async with make_node(db.dsn, name="silent") as silent, make_node(db.dsn) as node:
        assert [claimed.id for claimed in await pick(silent)] == [first]
        assert db.row(second, "hold") == (1,)
        db.execute("update durable.gen_durable set crashes = 5 where id = %s", first)  # it will wait
        expire(db, first)
        async with reap(node):
            await db.eventually("select hold = 0 from durable.gen_durable where id = %s", second)
        assert [claimed.id for claimed in await pick(node)] == [second]


async def test_the_sweep_finds_a_key_that_nothing_would_free(db: Db):
    stuck = db.insert(partition_key="k", hold=1)
    async with make_node(db.dsn) as node, reap(node):
        await db.eventually("select hold = 0 from durable.gen_durable where id = %s", stuck)


async def test_the_sweep_leaves_keys_in_use_alone(db: Db):
    running, behind = db.insert(partition_key="k"), db.insert(partition_key="k")
    offered, behind_it = db.insert(partition_key="l", queue="q"), db.insert(partition_key="l", hold=1)
    stuck = db.insert(partition_key="z", hold=1)
    async with make_node(db.dsn) as node:
        assert [claimed.id for claimed in await pick(node)] == [running]
        async with reap(node):
            await db.eventually("select hold = 0 from durable.gen_durable where id = %s", stuck)
        assert db.row(behind, "hold") == (1,)
        assert db.row(offered, "hold") == (0,)
        assert db.row(behind_it, "hold") == (1,)


async def test_the_sweep_goes_through_all_keys_in_bounded_statements(db: Db, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(reaper_module, "SWEEP", 10)
    db.execute(
        "insert into durable.gen_durable (fsm, step, partition_key, hold)"
        " select 'm', 's', 'key ' || mod(n, 25), 1 from generate_series(1, 50) n"
    )
    async with make_node(db.dsn) as node, reap(node):
        await db.eventually("select count(*) = 25 from durable.gen_durable where hold = 0")


async def test_between_two_statements_of_a_sweep_it_looks_for_dead_nodes(
    db: Db, monkeypatch: pytest.MonkeyPatch
):
    """Neither the looks nor the picks wait until all keys are swept."""
    monkeypatch.setattr(reaper_module, "SWEEP", 1)
    monkeypatch.setattr(reaper_module, "SWEEP_REST", 0.0)
    looks, done = Looks(monkeypatch), list[str]()
    sweep_some = reaper_module.sweep_some

    async def sweep(*args: Any, **options: Any) -> tuple[int, str | None]:
        done.append("sweep")
        return await sweep_some(*args, **options)

    monkeypatch.setattr(reaper_module, "sweep_some", sweep)
    for n in range(3):
        db.insert(partition_key=f"k{n}", hold=1)
    async with make_node(db.dsn) as node, reap(node):
        await db.eventually("select count(*) = 3 from durable.gen_durable where hold = 0")
        await until(lambda: len(done) == 4)  # the fourth finds no more keys
    assert looks.count >= 4


async def test_an_idle_look_is_one_statement(db: Db, monkeypatch: pytest.MonkeyPatch):
    looks = Looks(monkeypatch)
    async with make_node(db.dsn) as node, reap(node) as reaper:
        await looks.wait(1)
        reaper.look()
        await looks.wait(1)  # the first round is over, with its sweep
        with count_statements(db.dsn) as count:
            for _ in range(5):
                reaper.look()
                await looks.wait(1)
        assert count.total == 5, str(count)


async def test_an_outage_is_borne(db: Db):
    number = db.insert()
    async with (
        open_proxy(db.dsn) as proxy,
        make_node(db.dsn, name="silent") as silent,
        make_node(proxy.dsn) as node,
    ):
        await pick(silent)
        proxy.refuse()
        async with reap(node):
            await until(lambda: node.pool.statistics().connect_failures > 1)
            expire(db, number)
            proxy.heal()
            await db.eventually(
                "select status = 'runnable' from durable.gen_durable where id = %s", number, timeout=20
            )


# -- the list of nodes

GONE = """
    insert into durable.nodes (incarnation, node, seen_at, stopped_at) values
        ('stopped long ago', 'n', now() - interval '25 hours', now() - interval '25 hours'),
        ('stopped', 'n', now() - interval '23 hours', now() - interval '23 hours'),
        ('lost long ago', 'n', now() - interval '8 days', null),
        ('lost', 'n', now() - interval '6 days', null),
        ('holds a claim', 'n', now() - interval '8 days', null),
        ('lives', 'n', now() - interval '8 days', null),
        ('locked', 'n', now() - interval '8 days', null)
"""
BLOCKED = """
    select exists (select from pg_stat_activity
                    where wait_event_type = 'Lock' and datname = current_database() and query like '%%forget_nodes%%')
"""
STAY = {"stopped", "lost", "holds a claim", "lives", "locked"}


def nodes(db: Db) -> set[str]:
    return {name for (name,) in db.execute("select incarnation from durable.nodes")}


async def test_nodes_that_are_long_gone_are_forgotten_although_nobody_starts(db: Db, monkeypatch):
    """Not one that holds claims or lives; one whose row somebody has locked is passed over, and its turn comes."""
    monkeypatch.setattr(reaper_module, "FORGET_FIRST", 0.0)
    monkeypatch.setattr(reaper_module, "FORGET_EVERY", 0.0)
    number = db.insert()
    async with make_node(db.dsn, name="holds a claim") as holder:
        await pick(holder)
    db.execute(GONE)
    db.execute("select pg_advisory_lock(hashtextextended('durable' || chr(2) || 'lives', 0))")
    async with make_node(db.dsn, reap_interval=0.05) as node:
        with open_sessions(db.dsn, 1) as (other,):
            other.run("begin")
            other.run("select 1 from durable.nodes where incarnation = 'locked' for share")
            async with reap(node):
                await until(lambda: nodes(db) == STAY)
                assert db.row(number, "locked_by") == ("holds a claim",)
                other.run("commit")
                await until(lambda: nodes(db) == STAY - {"locked"})
    assert nodes(db) == STAY - {"locked"}


async def test_a_list_of_nodes_that_is_locked_delays_no_reaping(db: Db, monkeypatch):
    """Somebody makes an index on the table: the reaper's work goes on beside it."""
    monkeypatch.setattr(reaper_module, "FORGET_FIRST", 0.0)
    monkeypatch.setattr(reaper_module, "FORGET_EVERY", 0.0)
    number = db.insert()
    async with make_node(db.dsn) as silent, make_node(db.dsn, reap_interval=0.05) as node:
        await pick(silent)
        with open_sessions(db.dsn, 1) as (other,):
            other.run("begin")
            other.run("lock table durable.nodes in share mode")
            async with reap(node):
                await db.eventually(BLOCKED)
                expire(db, number)
                await db.eventually(
                    "select status = 'runnable' from durable.gen_durable where id = %s", number
                )
            other.run("commit")
