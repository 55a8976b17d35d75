"""Calls that try again while a lock refuses them."""

import psycopg
import pytest
from durable_actors._postgres.driver.statement import Statement
from durable_actors._postgres.pool import lock_retry
from durable_actors._postgres.pool.lock_retry import MAX_CANCELED, retry_while_locked
from durable_actors._postgres.pool.pool import Lane, open_pool

ONE = Statement("one", "select 1", read_only=True)
CANCELED = psycopg.errors.QueryCanceled("canceling statement due to user request")
LOCKED = psycopg.errors.LockNotAvailable("canceling statement due to lock timeout")


@pytest.fixture(autouse=True)
def no_pause(monkeypatch):
    monkeypatch.setattr(lock_retry, "FIRST_PAUSE", 0.0)


def refusals(*errors):
    """A call that is refused by these, one after another, and then succeeds."""
    left = list(errors)

    async def call(conn):
        if left:
            raise left.pop(0)
        return (await conn.run(ONE)).rows

    return call


async def test_a_lock_timeout_that_postgres_reports_as_a_cancelled_statement_is_tried_again(server):
    async with open_pool(server.dsn, lanes=[Lane("a", 1)]) as pool:
        assert await retry_while_locked(pool, "a", refusals(LOCKED, CANCELED, LOCKED)) == [[b"1"]]


async def test_cancelled_now_and_then_among_lock_timeouts_is_not_counted_together(server):
    async with open_pool(server.dsn, lanes=[Lane("a", 1)]) as pool:
        call = refusals(*[CANCELED, LOCKED] * (MAX_CANCELED * 2))
        assert await retry_while_locked(pool, "a", call) == [[b"1"]]


async def test_a_statement_that_is_cancelled_again_and_again_is_reported(server):
    """As a role's statement_timeout does."""
    async with open_pool(server.dsn, lanes=[Lane("a", 1)]) as pool:
        assert await retry_while_locked(pool, "a", refusals(*[CANCELED] * MAX_CANCELED)) == [[b"1"]]
        with pytest.raises(psycopg.errors.QueryCanceled):
            await retry_while_locked(pool, "a", refusals(*[CANCELED] * (MAX_CANCELED + 1)))


async def test_other_errors_are_reported_at_once(server):
    async with open_pool(server.dsn, lanes=[Lane("a", 1)]) as pool:
        with pytest.raises(psycopg.errors.UniqueViolation):
            await retry_while_locked(pool, "a", refusals(psycopg.errors.UniqueViolation("again")))
