import psycopg
import pytest
import trio
from tests.support.interleave import open_sessions, wait_backend_blocked


@pytest.fixture
def table(empty_dsn):
    with psycopg.connect(empty_dsn, autocommit=True) as connection:
        connection.execute("create table t (id int primary key, n int); insert into t values (1, 0), (2, 0)")
    return empty_dsn


def test_a_lost_update_made_to_order(table):
    with open_sessions(table) as (a, b):
        a.run("begin")
        a.run("update t set n = n + 1 where id = 1")
        waiting = b.start("update t set n = n * 10 where id = 1 returning n")
        waiting.wait_blocked(by=a)
        assert not waiting.done
        a.run("commit")
        assert waiting.result() == [(10,)]


def test_three_sessions_in_a_queue(table):
    with open_sessions(table, 3) as (a, b, c):
        a.run("begin")
        a.run("select from t where id = 1 for update")
        second = b.start("update t set n = 2 where id = 1")
        second.wait_blocked(by=a)
        third = c.start("update t set n = 3 where id = 1")
        third.wait_blocked(by=b)
        a.run("rollback")
        second.result()
        third.result()
        assert a.run("select n from t where id = 1") == [(3,)]


def test_a_statement_that_does_not_block_is_a_failure(table):
    with open_sessions(table) as (a, b):
        a.run("begin")
        a.run("update t set n = 1 where id = 1")
        free = b.start("update t set n = 1 where id = 2")
        with pytest.raises(AssertionError, match="was not blocked"):
            free.wait_blocked()
        skipping = b.start("select id from t for update skip locked")
        assert skipping.result() == [(2,)]


def test_an_error_is_the_statements_own(table):
    with open_sessions(table) as (a, _):
        with pytest.raises(psycopg.errors.UndefinedTable):
            a.run("select * from nowhere")
        with pytest.raises(psycopg.errors.UndefinedTable):
            a.start("select * from nowhere").wait_blocked()


def test_what_still_waits_at_the_end_is_cancelled(table):
    with open_sessions(table) as (a, b):
        a.run("begin")
        a.run("lock table t")
        waiting = b.start("select * from t")
        waiting.wait_blocked(by=a)
    with pytest.raises(psycopg.errors.QueryCanceled):
        waiting.result()


def test_deadlocks_can_be_built(table):
    with open_sessions(table) as (a, b):
        for session, number in ((a, 1), (b, 2)):
            session.run("set deadlock_timeout = '10ms'")
            session.run("begin")
            session.run("update t set n = 1 where id = %s", [number])
        first = a.start("update t set n = 1 where id = 2")
        first.wait_blocked(by=b)
        with pytest.raises(psycopg.errors.DeadlockDetected):
            b.start("update t set n = 1 where id = 1").result() and first.result()
            first.result()


async def test_backends_that_trio_drives_are_watched_too(table):
    with open_sessions(table) as (a, b):
        a.run("begin")
        a.run("lock table t")
        waiting = b.start("select n from t where id = 1")
        await wait_backend_blocked(table, b.pid, by=a.pid)
        a.run("commit")
        assert await trio.to_thread.run_sync(waiting.result) == [(0,)]
        with pytest.raises(trio.TooSlowError):
            await wait_backend_blocked(table, b.pid, timeout=0.05)
