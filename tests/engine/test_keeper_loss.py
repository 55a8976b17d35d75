"""Keeper: what happens when its session is cut, silent, refused or not its own."""

from __future__ import annotations

import logging
import time
from contextlib import asynccontextmanager
from typing import Any

import psycopg
import pytest
import trio
import trio.testing
from durable_actors._engine.claims import ActiveClaim, ClaimState
from durable_actors._engine.keys import locks as keys, session as key_session
from durable_actors._engine.keys.locks import KEEPER_TIMEOUT
from durable_actors._engine.keys.session import SHORTEST_TRUST, KeySession, trust_window
from durable_actors._engine.node import Node
from durable_actors._postgres.driver.connection import PgConn
from durable_actors.errors import ConfigError, StoreUnavailable
from durable_actors.otp import Address
from tests.engine.kit import Db, Kept, claim, keep, make_node
from tests.kit import until
from tests.support.faults import open_proxy


class Task:
    """Stands for a step task: notes that it was cancelled."""

    def __init__(self) -> None:
        self.why: str | None = None

    def cancel(self, why: str) -> bool:
        self.why = why
        return True


def buffered(kept: Kept, key: str | None, number: int = 1) -> ActiveClaim:
    """A claim of this node that waits for its slot and its key."""
    active = ActiveClaim(claim(key, number))
    active.state = ClaimState.BUFFERED
    kept.node.claims.add(active)
    return active


async def running(kept: Kept, key: str | None, number: int = 1) -> ActiveClaim:
    """A claim whose step runs, under its key if it has one."""
    active = buffered(kept, key, number)
    if key is not None:
        assert await kept.keys.take([active.claim]) == {active.claim.claim_id}
    active.task = Task()  # type: ignore[assignment]
    active.state = ClaimState.RUNNING
    return active


def session_pid(db: Db, owner: str) -> int:
    query = (
        "select pid from pg_locks where locktype = 'advisory' and objsubid = 1 and granted"
        " and (classid::bigint << 32 | objid::bigint) = hashtextextended('durable' || chr(2) || %s, 0)"
        " and database = (select oid from pg_database where datname = current_database())"
    )
    found = db.execute(query, owner)
    return found[0][0] if found else 0


async def cut(db: Db, owner: str) -> None:
    """End the node's session; return when it has another one."""
    first = session_pid(db, owner)
    db.execute("select pg_terminate_backend(%s, 5000)", first)
    await until(lambda: session_pid(db, owner) not in {0, first})


async def test_a_terminated_session_cancels_its_keyed_steps_and_comes_back(db: Db):
    async with keep(db.dsn, name="a") as a, keep(db.dsn, name="b") as b:
        active = await running(a, "k")
        plain = await running(a, None, 2)
        await cut(db, "a")
        await until(lambda: active.interrupted)
        assert active.task.why == active.interrupted  # type: ignore[union-attr]
        assert "session" in active.interrupted  # type: ignore[operator]
        assert active.lost is None, "the row is still ours: it goes back at once, attempt + 1"
        assert plain.task.why is None, "a step without a key goes on"
        assert not a.keys.owns(active.claim)

        await until(lambda: a.keys.up)
        assert session_pid(db, "a"), "the new session shows that the node lives"
        new = claim("k", 3)
        assert await a.keys.take([new]) == set(), "its task has not exited"
        assert await b.keys.take([claim("k", 4)]) == {"k/4"}, "the fence, not the key, keeps the old step out"
        b.keys.free(claim("k", 4))
        a.keys.free(active.claim)
        await until(lambda: not b.keys.statistics().locked)
        assert await a.keys.take([new]) == {new.claim_id}


async def test_a_thread_that_outlives_the_session_keeps_its_key_here(db: Db):
    async with keep(db.dsn, name="a") as a:
        active = await running(a, "k")
        for _ in range(2):
            await cut(db, "a")
            await until(lambda: a.keys.up)
            assert await a.keys.take([claim("k", 2)]) == set()
            assert a.keys.statistics().owned == 1
            assert db.locks() == 1, "nothing is locked for it any more"
        a.keys.free(active.claim)
        assert await a.keys.take([claim("k", 2)]) == {"k/2"}


async def test_a_buffered_claim_loses_its_key_and_may_take_it_again(db: Db):
    """It never ran: nothing to cancel, nothing that could be still running."""
    async with keep(db.dsn, name="a") as a:
        active = buffered(a, "k")
        await a.keys.take([active.claim])
        losses = a.keys.losses
        await cut(db, "a")
        assert not a.keys.owns(active.claim)
        assert a.keys.losses > losses, "feeders look for claims that have lost their keys"
        assert a.keys.statistics().owned == 0
        await until(lambda: a.keys.up)
        assert await a.keys.take([active.claim]) == {active.claim.claim_id}


async def test_an_outage_is_borne_and_told_once(db: Db, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.WARNING, "durable_actors")
    async with open_proxy(db.dsn) as proxy, keep(proxy.dsn, name="a") as a:
        active = await running(a, "k")
        proxy.refuse()
        proxy.reset()
        await until(lambda: active.interrupted)
        assert await a.keys.take([claim("x", 9)]) == set()
        await until(lambda: a.node.pool.statistics().connect_failures > 2)
        proxy.heal()
        await until(lambda: a.keys.up, timeout=20)
        assert await a.keys.take([claim("x", 9)]) == {"x/9"}
    told = [record.message for record in caplog.records if record.message.startswith("keeper:")]
    assert len([text for text in told if "the store cannot be reached" in text]) == 1
    assert len([text for text in told if "works again" in text]) == 1
    assert len([text for text in told if "1 step with a partition key cancelled" in text]) == 1


@pytest.mark.slow
async def test_silence_ends_the_trust(db: Db):
    """No error, no answer: the server may have freed the locks of a host that it takes for gone."""
    async with open_proxy(db.dsn) as proxy, keep(proxy.dsn, name="a", lease_ttl=1.2) as a:
        active = await running(a, "k")
        began = trio.current_time()
        proxy.blackhole()
        await until(lambda: active.interrupted)
        waited = trio.current_time() - began
        assert "could not be confirmed" in active.interrupted  # type: ignore[operator]
        window = trust_window(1.2, a.node.config.dead_after)
        assert window - 0.3 < waited < window + 2
        assert await a.keys.take([claim("l", 2)]) == set()
        await until(lambda: a.keys.statistics().locked == 0)
        proxy.heal()
        await until(lambda: a.keys.up, timeout=20)


@pytest.mark.slow
async def test_a_node_that_cannot_learn_that_its_session_ended_stops_before_its_claims_are_reaped(db: Db):
    """The server restarts, or an operator ends the session, while the node is cut off. Its leases are long."""
    async with (
        open_proxy(db.dsn) as proxy,
        keep(proxy.dsn, name="a", lease_ttl=60, dead_after=2) as a,
        keep(db.dsn, name="b") as b,
    ):
        active = await running(a, "k")
        proxy.blackhole()
        began = trio.current_time()
        db.execute("select pg_terminate_backend(%s, 5000)", session_pid(db, "a"))
        assert session_pid(db, "a") == 0
        assert not active.interrupted, "it does not know"
        await until(lambda: active.interrupted)
        assert trio.current_time() - began < 2, "no reaper has seen its lock free for dead_after"
        assert "could not be confirmed" in active.interrupted  # type: ignore[operator]
        assert await b.keys.take([claim("k", 2)]) == {"k/2"}


async def test_a_node_that_was_late_itself_keeps_its_session_and_the_keys_of_its_threads(db: Db):
    """Stopped, or blocked by user code, past the trust window: closing the session would give the keys away."""
    async with keep(db.dsn, name="a", lease_ttl=0.9) as a, keep(db.dsn, name="b") as b:
        active = await running(a, "k")
        first = session_pid(db, "a")
        time.sleep(trust_window(0.9, a.node.config.dead_after) + 0.1)  # nothing of this process moves
        await until(lambda: active.interrupted)
        assert "could not be confirmed" in active.interrupted  # type: ignore[operator]
        await until(lambda: a.keys.up)
        assert session_pid(db, "a") == first, "the session is there, and so are its locks"
        assert await b.keys.take([claim("k", 2)]) == set(), "the thread has not returned"
        a.keys.free(active.claim)
        await until(lambda: not a.keys.statistics().locked)
        assert await b.keys.take([claim("k", 2)]) == {"k/2"}


async def test_a_refused_check_does_not_end_the_session(db: Db, monkeypatch: pytest.MonkeyPatch):
    """A statement_timeout, say: the session is there, and so are its locks."""
    refused = 0
    check = key_session.check_session

    async def refuse(conn: PgConn, schema: str, owner: str) -> Any:
        nonlocal refused
        if refused < 3 and owner == "a" and active:
            refused += 1
            raise psycopg.errors.QueryCanceled("canceling statement due to statement timeout")
        return await check(conn, schema, owner)

    monkeypatch.setattr(key_session, "check_session", refuse)
    active: ActiveClaim | None = None
    async with keep(db.dsn, name="a", lease_ttl=0.9) as a:
        active = await running(a, "k")
        first = session_pid(db, "a")
        await until(lambda: refused == 3 and a.keys.up)
        assert session_pid(db, "a") == first
        assert a.keys.owns(active.claim)


async def test_a_confirmed_session_stays_trusted(db: Db, monkeypatch: pytest.MonkeyPatch):
    """Confirmed every third of a trust window: after seven of these its first trust is long over."""
    checks = 0
    check = key_session.check_session

    async def count(*args: Any) -> Any:
        nonlocal checks
        checks += 1
        return await check(*args)

    monkeypatch.setattr(key_session, "check_session", count)
    async with keep(db.dsn, name="a", lease_ttl=0.9) as a:
        active = await running(a, "k")
        first = session_pid(db, "a")
        await until(lambda: checks > 7)
        assert active.interrupted is None
        assert session_pid(db, "a") == first


async def test_take_does_not_wait_for_a_session_that_is_silent(db: Db):
    async with open_proxy(db.dsn) as proxy, keep(proxy.dsn) as a:
        proxy.blackhole()
        with trio.fail_after(2 * KEEPER_TIMEOUT):
            assert await a.keys.take([claim("k")]) == set()
        with trio.fail_after(KEEPER_TIMEOUT / 2):
            assert await a.keys.take([claim("l")]) == set(), "nobody waits twice for one silence"
        assert a.keys.statistics().owned == 0
        proxy.heal()
        with trio.fail_after(10):  # until the late answer has come: it finds no owner, the key is anybody's
            while await a.keys.take([claim("k", 2)]) != {"k/2"}:
                await trio.sleep(0.002)


async def test_keys_are_taken_again_when_the_keeper_was_busy_with_something_else(
    db: Db, monkeypatch: pytest.MonkeyPatch
):
    """It confirmed its session, slowly. What was wanted was withdrawn: no answer would tell that it is back."""
    real, entered, goes_on = key_session.check_session, trio.Event(), trio.Event()
    monkeypatch.setattr(keys, "KEEPER_TIMEOUT", 0.05)

    async def slow(*args: Any) -> Any:
        entered.set()
        await goes_on.wait()
        return await real(*args)

    async with keep(db.dsn, lease_ttl=6.0) as a:
        monkeypatch.setattr(key_session, "check_session", slow)
        await entered.wait()
        assert await a.keys.take([claim("k")]) == set()
        goes_on.set()
        with trio.fail_after(10):
            while await a.keys.take([claim("k", 2)]) != {"k/2"}:
                await trio.sleep(0.002)


@pytest.mark.parametrize("sent", [True, False], ids=["answered", "dropped"])
async def test_an_answer_in_the_turn_in_which_it_is_given_up_ends_the_silence(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: object, *, sent: bool
):
    """The key is there, and the next attempt of the same call finds it; nor is it silence to be too late to ask."""
    asked = keys.Keys(Address("keeper", capacity=1))
    asked.opened()
    free = keys.KeyTable.free

    def meanwhile(table: keys.KeyTable, key: str, owner: str, now: float) -> bool:
        had = free(table, key, owner, now)
        if asked.collect():
            asked.answer({key})
        return had

    monkeypatch.setattr(keys.KeyTable, "free", meanwhile)
    got: list[set[str]] = []

    async def take() -> None:
        got.append(await asked.take([claim("k")]))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(take)
        await trio.testing.wait_all_tasks_blocked()
        assert not sent or len(asked.collect()) == 1
    assert got == [{"k/1"} if sent else set()]
    assert not asked._silent


async def test_without_postgres_it_starts_and_goes_on_trying(db: Db):
    async with open_proxy(db.dsn) as proxy:
        proxy.refuse()
        async with keep(proxy.dsn) as a:
            assert not a.keys.up
            assert await a.keys.take([claim("k")]) == set()
            proxy.heal()
            await until(lambda: a.keys.up, timeout=20)
            assert await a.keys.take([claim("k", 2)]) == {"k/2"}


async def test_a_refused_statement_is_settled_by_the_lock_table(db: Db, monkeypatch: pytest.MonkeyPatch):
    """ "Out of shared memory" comes half-way through, and a rollback unlocks nothing."""
    exchange = key_session.exchange_keys

    async def half_way(conn: PgConn, schema: str, *, free: Any, take: Any):
        taken, unknown = await exchange(conn, schema, free=free, take=take[:1])
        if len(take) > 1:
            raise StoreUnavailable("out of shared memory")
        return taken, unknown

    monkeypatch.setattr(key_session, "exchange_keys", half_way)
    async with keep(db.dsn, name="a") as a:
        first = session_pid(db, "a")
        claims = [claim("k", 1), claim("l", 2)]
        got = await a.keys.take(claims)
        assert got == {"k/1", "l/2"}, "the second key came with the retry"
        assert session_pid(db, "a") == first, "nothing was lost"
        for each in claims:
            a.keys.free(each)
        await until(lambda: not a.keys.statistics().locked)
        assert db.locks() == 1


async def test_a_key_that_is_wanted_while_its_unlock_is_refused_is_locked_once(
    db: Db, monkeypatch: pytest.MonkeyPatch
):
    """The session has it still: locked again it would need two unlocks, and no other node would ever get it."""
    exchange = key_session.exchange_keys
    takes: list[str] = []
    async with keep(db.dsn, name="a") as a, keep(db.dsn, name="b") as b, trio.open_nursery() as nursery:
        granted: list[set[str]] = []

        async def take() -> None:
            granted.append(await a.keys.take([claim("k", 2)]))

        async def refused(conn: PgConn, schema: str, *, free: Any, take: Any):
            takes.extend(take)
            if free and not granted and not a.keys.statistics().waiting:
                nursery.start_soon(take_again)
                await until(lambda: a.keys.statistics().waiting)
                raise psycopg.errors.QueryCanceled("canceling statement due to statement timeout")
            return await exchange(conn, schema, free=free, take=take)

        take_again = take
        monkeypatch.setattr(key_session, "exchange_keys", refused)
        first = claim("k", 1)
        assert await a.keys.take([first]) == {"k/1"}
        a.keys.free(first)
        await until(lambda: granted)
        assert granted == [{"k/2"}]
        a.keys.free(claim("k", 2))
        await until(lambda: not a.keys.statistics().locked)
        assert await b.keys.take([claim("k", 3)]) == {"k/3"}
    assert takes == ["k", "k"], "once by each node"


class Pooler:
    """Two server processes behind one connection, as a transaction pooler may serve it."""

    def __init__(self, conns: list[PgConn], pid: int, change: int) -> None:
        self._conns = conns
        self._change = change
        self._calls = 0
        self.pid = pid
        self.pooled = pid != conns[0].pid
        self.closed = False

    def _next(self) -> PgConn:
        self._calls += 1
        return self._conns[self._calls > self._change]

    async def run(self, *args: Any) -> Any:
        return await self._next().run(*args)

    async def batch(self, *args: Any) -> Any:
        return await self._next().batch(*args)

    def alive(self) -> bool:
        return True

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize("change", [1, 3], ids=["when another client asks", "between two statements"])
async def test_a_transaction_pooler_is_noticed_at_the_start(db: Db, change: int, monkeypatch):
    async with make_node(db.dsn) as node:
        conns = [await PgConn.open(db.dsn) for _ in range(2)]
        pooler = Pooler(conns, pid=1, change=change)
        with_pooler(monkeypatch, node, pooler)
        with pytest.raises(ConfigError, match="session_dsn") as caught:
            await KeySession.open(node)
        assert caught.value.option == "session_dsn"
        assert pooler.closed
        for conn in conns:
            conn.close()


async def test_a_session_pooler_does_no_harm(db: Db, monkeypatch):
    """Another pid than we connected to, but always the same one."""
    async with make_node(db.dsn) as node:
        conn = await PgConn.open(db.dsn)
        with_pooler(monkeypatch, node, Pooler([conn, conn], pid=1, change=1))
        session = await KeySession.open(node)
        assert session.backend == conn.pid
        await session.end()
        conn.close()


async def test_a_lock_that_was_not_ours_is_a_pooler_too(db: Db, monkeypatch):
    async with make_node(db.dsn) as node:
        conns = [await PgConn.open(db.dsn) for _ in range(2)]
        with_pooler(monkeypatch, node, Pooler(conns, pid=conns[0].pid, change=3))
        session = await KeySession.open(node)
        await session.exchange(free=[], take=["k"])
        with pytest.raises(ConfigError, match="session_dsn"):
            await session.exchange(free=["k"], take=[])
        await session.end()
        for conn in conns:
            conn.close()


def with_pooler(monkeypatch: pytest.MonkeyPatch, node: Node, pooler: Pooler) -> None:
    acquire = node.pool.acquire

    @asynccontextmanager
    async def lend():
        yield pooler

    monkeypatch.setattr(node.pool, "acquire", lambda lane: lend() if lane == "session" else acquire(lane))


async def test_the_old_sessions_lock_is_taken_over_when_the_server_has_noticed(db: Db):
    """Cut off but not yet noticed: the old session still holds our lock, and we must not wait for it."""
    async with make_node(db.dsn, name="a", lease_ttl=0.6) as node:
        old = await PgConn.open(db.dsn)
        db_lock = "select pg_advisory_lock(hashtextextended('durable' || chr(2) || 'a', 0))"
        await old.script(db_lock)
        session = await KeySession.open(node)
        assert session_pid(db, "a") == old.pid
        old.close()
        await db.eventually("select not exists (select 1 from pg_stat_activity where pid = %s)", old.pid)
        await session.check()
        assert session_pid(db, "a") == session.backend
        await session.end()


@pytest.mark.parametrize("lease", [0.3, 1, 3, 4, 6, 7.9, 8, 60, 3600])
def test_trust_ends_before_the_server_can_take_us_for_gone(lease: float):
    keepalive = max(1, int(lease / 4))
    assert 0 < trust_window(lease, 3600) <= lease / 2
    assert trust_window(lease, 3600) < 3 * keepalive


@pytest.mark.parametrize("dead_after", [0.5, 1, 10, 60])
def test_trust_ends_before_another_node_can_prove_us_dead(dead_after: float):
    """Counted from the question whose answer was the last: the lock was there later than that."""
    assert trust_window(3600, dead_after) < dead_after
    assert trust_window(3600, 0.001) == SHORTEST_TRUST
