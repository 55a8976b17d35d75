"""Keeper: partition keys are exclusive across nodes and within one, and cost few statements."""

from __future__ import annotations

import itertools

import pytest
import trio
from durable_actors._engine.keys import keeper as keeper_module, locks as keys_module
from durable_actors._store.rows import Claim
from tests.engine.kit import Db, claim, keep, pick
from tests.kit import until
from tests.support.sql import count_statements


async def test_one_key_has_one_owner_across_nodes(db: Db):
    async with keep(db.dsn) as a, keep(db.dsn) as b:
        mine, theirs, other = claim("k", 1), claim("k", 2), claim("l", 3)
        assert await a.keys.take([mine]) == {mine.claim_id}
        assert await b.keys.take([theirs, other]) == {other.claim_id}
        assert a.keys.owns(mine)
        assert b.keys.owns(other)
        assert not b.keys.owns(theirs)
        a.keys.free(mine)
        await until(lambda: not a.keys.statistics().locked)
        assert await b.keys.take([theirs]) == {theirs.claim_id}


async def test_a_key_is_refused_here_until_its_owner_has_exited(db: Db):
    """The session would give the lock a second time: session locks are re-entrant."""
    async with keep(db.dsn) as a:
        old, new = claim("k", 1), claim("k", 2)
        assert await a.keys.take([old]) == {old.claim_id}
        assert await a.keys.take([new]) == set()
        a.keys.free(new)  # of a claim that never got it: nothing happens
        assert a.keys.owns(old)
        a.keys.free(old)
        a.keys.free(old)
        assert await a.keys.take([new]) == {new.claim_id}
        a.keys.free(old)  # late and repeated: it is no longer its
        assert a.keys.owns(new)


async def test_a_key_is_nobodys_before_its_take_is_over(db: Db, monkeypatch: pytest.MonkeyPatch):
    """Cancelled, a take frees what it was granted: a step that had begun meanwhile would run without its key."""
    monkeypatch.setattr(keys_module, "BUSY_KEY_PAUSES", (3600.0,))
    async with keep(db.dsn) as a, keep(db.dsn) as b:
        mine, busy = claim("k", 1), claim("l", 2)
        await b.keys.take([claim("l", 3)])
        async with trio.open_nursery() as nursery:
            nursery.start_soon(a.keys.take, [mine, busy])
            await until(lambda: a.keys.table.owns("k", mine.claim_id))
            assert not a.keys.owns(mine)
            nursery.cancel_scope.cancel()
        assert not a.keys.table.owns("k", mine.claim_id)
        assert await a.keys.take([mine]) == {mine.claim_id}
        assert a.keys.owns(mine)


async def test_a_key_changes_hands_here_without_a_statement(db: Db, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(keeper_module, "LINGER", 60.0)
    async with keep(db.dsn) as a:
        claims = [claim("k", number) for number in range(50)]
        await a.keys.take([claims[0]])
        with count_statements(db.dsn) as count:
            for before, after in itertools.pairwise(claims):
                a.keys.free(before)
                assert await a.keys.take([after]) == {after.claim_id}
        assert count.calls("pg_try_advisory_lock") == 0
        assert count.calls("pg_advisory_unlock") == 0


async def test_a_thousand_keys_are_one_statement(db: Db, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(keeper_module, "LINGER", 0.05)
    async with keep(db.dsn) as a:
        await a.keys.take([claim("warm")])
        claims = [claim(f"key {number}", number) for number in range(1000)]
        with count_statements(db.dsn) as count:
            assert len(await a.keys.take(claims)) == 1000
            assert db.locks() == 1002
            for each in claims:
                a.keys.free(each)
            await until(lambda: a.keys.statistics().locked == 1)
        assert count.calls("pg_try_advisory_lock") == 1
        assert count.calls("pg_advisory_unlock") == 1
        assert db.locks() == 2


async def test_a_short_hand_over_between_nodes_is_waited_for(db: Db, monkeypatch: pytest.MonkeyPatch):
    """The holder commits first and unlocks a moment later: the next node meets the lock in that moment."""
    monkeypatch.setattr(
        keys_module, "BUSY_KEY_PAUSES", (0.005,) * 1000
    )  # a slow machine is no reason to fail
    async with keep(db.dsn) as a, keep(db.dsn) as b:
        mine, theirs = claim("k", 1), claim("k", 2)
        await a.keys.take([mine])
        async with trio.open_nursery() as nursery:
            got: list[set[str]] = []

            async def take() -> None:
                got.append(await b.keys.take([theirs]))

            nursery.start_soon(take)
            await until(lambda: b.keys.statistics().waiting)
            a.keys.free(mine)
        assert got == [{theirs.claim_id}]
        assert b.keys.statistics().contended == 0


async def test_a_contended_row_is_offered_again_when_its_key_is_free(db: Db):
    """Held rows wait for nothing that happens by itself: the keeper that met the busy key offers them."""
    number = db.insert(partition_key="k")
    async with keep(db.dsn) as a, keep(db.dsn) as b:
        mine = claim("k")
        await a.keys.take([mine])  # a paused node: its row was reaped, its session lives
        [picked] = await pick(b.node)
        assert await b.keys.take([picked]) == set()
        assert b.keys.statistics().contended == 1
        db.execute(
            "update durable.gen_durable set status = 'runnable', hold = 1, locked_by = null, claim_id = null,"
            " lease_expires_at = null where id = %s",
            number,
        )
        a.keys.free(mine)
        await db.eventually("select hold = 0 from durable.gen_durable where id = %s", number)
        [again] = await pick(b.node)
        assert await b.keys.take([again]) == {again.claim_id}
        assert b.keys.statistics().contended == 0


async def test_a_key_known_to_be_busy_is_tried_once(db: Db):
    async with keep(db.dsn) as a, keep(db.dsn) as b:
        mine, theirs = claim("k", 1), claim("k", 2)
        await a.keys.take([mine])
        await b.keys.take([theirs])
        with count_statements(db.dsn) as count:
            assert await b.keys.take([theirs]) == set()
        assert count.calls("pg_try_advisory_lock") == 1


async def test_a_holder_that_never_frees_keeps_its_key(db: Db):
    """A thread cannot be cancelled: whatever happens to its claim, no other step of its key runs."""
    async with keep(db.dsn) as a, keep(db.dsn) as b:
        thread = claim("k", 1)
        await a.keys.take([thread])
        for number in range(2, 5):
            assert await a.keys.take([claim("k", number)]) == set()
            assert await b.keys.take([claim("k", number)]) == set()
        assert a.keys.owns(thread)


@pytest.mark.parametrize("key", ["k", "Ünïcode ☃", "with\nlines", '"quoted" \\ {a,b}', "NULL", "x" * 1000])
async def test_any_text_is_a_key(db: Db, key: str):
    async with keep(db.dsn) as a, keep(db.dsn) as b:
        assert await a.keys.take([claim(key, 1)]) == {claim(key, 1).claim_id}
        assert await b.keys.take([claim(key, 2)]) == set()


async def test_nothing_is_left_locked_after_a_stop(db: Db):
    async with keep(db.dsn, name="n") as a:
        await a.keys.take([claim("k", 1), claim("l", 2)])
        assert db.locks() == 3
        await a.stop()
        assert a.node.pool.statistics().lanes[0].in_use == 0
        await db.eventually(
            "select count(*) = 0 from pg_locks where locktype = 'advisory' and pid <> pg_backend_pid()"
            " and database = (select oid from pg_database where datname = current_database())"
        )
        assert await a.keys.take([claim("k", 1)]) == set()


async def test_the_node_lock_is_the_one_that_reapers_look_for(db: Db):
    async with keep(db.dsn, name="n"):
        query = "select pg_try_advisory_lock(hashtextextended('durable' || chr(2) || 'n', 0))"
        assert db.execute(query) == [(False,)]


async def test_take_cancelled_anywhere_leaves_no_owner(db: Db):
    """Cut off after each scheduling step in turn: whatever was under way, nothing stays owned or locked."""
    async with keep(db.dsn) as blocker, keep(db.dsn) as a:
        await blocker.keys.take([claim("busy", 1)])
        for ticks in range(40):
            claims = [claim(f"k{number}", number) for number in range(3)] + [claim("busy", 9)]
            done: list[object] = []
            with trio.CancelScope() as scope:
                async with trio.open_nursery() as nursery:

                    async def take(claims: list[Claim] = claims, done: list[object] = done) -> None:
                        done.append(await a.keys.take(claims))

                    nursery.start_soon(take)
                    for _ in range(ticks):
                        await trio.lowlevel.checkpoint()
                    scope.cancel()
            for each in claims if done else []:
                a.keys.free(each)
            assert a.keys.statistics().owned == 0
            await until(lambda: not a.keys.statistics().locked and not a.keys.statistics().waiting)
        assert db.locks() == 3
