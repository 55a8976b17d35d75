"""Jobs in an engine: results, retries, the end of patience."""

from __future__ import annotations

import threading

import attrs
import durable_actors as da
import pytest
import trio
from durable_actors.telemetry import StepCommitted
from tests.engine.kit import running

pytestmark = pytest.mark.usefixtures("registry")


@attrs.frozen
class Mail:
    to: str
    n: int = 1


async def test_results_of_every_form(durable_dsn):
    threads = []

    @da.job
    async def bare(args: Mail):
        return {"to": args.to}

    @da.job(name="with context")
    async def with_ctx(args: Mail, ctx: da.Context[Mail]):
        return [ctx.attempt, ctx.step, ctx.state.n]

    @da.job(name="in a thread")
    def plain(args: Mail):
        threads.append(threading.current_thread())
        return args.n + 1

    @da.job(name="thread with context")
    def plain_ctx(args: Mail, ctx: da.Context[Mail]):
        return trio.from_thread.run(insert_another, args)

    async def insert_another(args: Mail):
        return await da.insert(bare, args=Mail("from a thread"))

    class Form(da.Machine[Mail], max_attempts=3):
        async def perform(self, args: Mail) -> str:
            return args.to.upper()

    assert await bare(Mail("x")) == {"to": "x"}  # an ordinary callable still
    async with running(durable_dsn) as run:
        assert (await run.run(bare, args=Mail("a"))).result == {"to": "a"}
        assert (await run.run(with_ctx, args=Mail("a", 5))).result == [0, "perform", 5]
        assert (await run.run(plain, args=Mail("a", 5))).result == 6
        assert (await run.run(Form, args=Mail("a"))).result == "A"
        another = (await run.run(plain_ctx, args=Mail("a"))).result
        assert (await run.ended(another)).result == {"to": "from a thread"}
    assert threads[0] is not threading.main_thread()


async def test_retried_until_it_works(durable_dsn):
    attempts = []

    @da.job(backoff=lambda attempt: attempts.append(attempt) or 0)
    async def flaky(args: dict, ctx: da.Context[dict]):
        if ctx.attempt == 0:
            raise OSError("down")
        if ctx.attempt == 1:
            return da.Error("not yet")
        if ctx.attempt == 2:
            return da.Retry(delay=0.01)
        return {"attempt": ctx.attempt, "visit": ctx.visit}

    async with running(durable_dsn) as run:
        row = await run.run(flaky, args={})
    assert (row.status, row.result) == ("done", {"attempt": 3, "visit": 1})
    assert attempts == [0, 1]  # Retry brings its own delay
    assert row.last_error is None


async def test_a_returned_error_is_remembered_and_told(durable_dsn, db, caplog):
    """As a raised one: the row says why it runs again, and so does the log."""

    @da.job(max_attempts=2, backoff=lambda _: 3600)
    async def fails(args: dict):
        return da.Error("no seats left")

    async with running(durable_dsn) as run:
        number = await run.insert(fails, args={})
        await run.events.wait(StepCommitted, id=number)
    assert db.row(number, "status::text, attempt, last_error") == ("runnable", 1, "no seats left")
    assert "failed (run 1 of 2), next run in 3600 s: no seats left" in caplog.text


async def test_the_default_backoff(durable_dsn, db):
    @da.job
    async def fails(args: dict):
        raise OSError("down")

    async with running(durable_dsn) as run:
        number = await run.insert(fails, args={})
        await run.events.wait(StepCommitted, id=number)
        [(attempt, delay, error)] = db.execute(
            "select attempt, extract(epoch from eligible_at - updated_at)::float8, last_error"
            " from durable.gen_durable where id = %s",
            number,
        )
    assert attempt == 1
    assert 0 < delay <= 1
    assert "down" in error


@pytest.mark.parametrize("how", ["raise", "Error", "Retry"])
async def test_max_attempts_counts_executions(durable_dsn, how):
    runs = []

    @da.job(max_attempts=3, backoff=lambda _: 0)
    async def fails(args: dict, ctx: da.Context[dict]):
        runs.append(ctx.attempt)
        if how == "raise":
            raise OSError("still down")
        return da.Error("still down") if how == "Error" else da.Retry()

    async with running(durable_dsn) as run:
        row = await run.run(fails, args={})
    assert runs == [0, 1, 2]
    assert row.status == "failed"
    assert ("still down" in (row.last_error or "")) == (how != "Retry")


@pytest.mark.parametrize("how", ["raised", "returned", "in a group"])
async def test_cancel_ends_it_at_once(durable_dsn, how):
    runs = []

    async def give_up():
        raise da.Cancel("no such address")

    @da.job
    async def hopeless(args: dict):
        runs.append(1)
        if how == "returned":
            return da.Cancel("no such address")
        if how == "raised":
            raise da.Cancel("no such address")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(give_up)
        raise AssertionError("unreachable")

    async with running(durable_dsn) as run:
        row = await run.run(hopeless, args={})
    assert (row.status, row.last_error, len(runs)) == ("failed", "no such address", 1)


async def test_one_that_kills_its_worker_ends(durable_dsn, db):
    """Claimed with attempt >= max_attempts: it is not run once more."""
    runs = []

    @da.job(max_attempts=2)
    async def killer(args: dict):
        runs.append(1)

    async with running(durable_dsn, queues={}) as client:
        number = await client.insert(killer, args={})
    db.execute("update durable.gen_durable set attempt = 2 where id = %s", number)
    async with running(durable_dsn) as run:
        row = await run.ended(number)
    assert (row.status, runs) == ("failed", [])
    assert "2" in (row.last_error or "")


async def test_an_outcome_that_no_job_has(durable_dsn):
    @da.job(max_attempts=1)
    async def confused(args: dict):
        return da.Next("other")

    async with running(durable_dsn) as run:
        row = await run.run(confused, args={})
    assert row.status == "failed"
    assert "InvalidOutcome" in (row.last_error or "")


async def test_a_backoff_that_raises_fails_the_job(durable_dsn):
    @da.job(backoff=lambda attempt: 1 / attempt)
    async def fails(args: dict):
        raise OSError("down")

    async with running(durable_dsn) as run:
        row = await run.run(fails, args={})
    assert row.status == "failed"
    assert "ZeroDivisionError" in (row.last_error or "")


async def test_a_job_that_takes_too_long(durable_dsn):
    @da.job(timeout=0.02, max_attempts=1)
    async def slow(args: dict):
        await trio.sleep_forever()

    async with running(durable_dsn) as run:
        row = await run.run(slow, args={})
    assert row.status == "failed"
    assert "StepTimeout" in (row.last_error or "")


async def test_args_that_do_not_decode_are_retried_like_an_error(durable_dsn, db):
    @da.job(max_attempts=1)
    async def mail(args: Mail):
        raise AssertionError("must not run")

    async with running(durable_dsn, queues={}) as client:
        number = await client.insert(mail, args=Mail("a"))
    db.execute("update durable.gen_durable set state = '[]' where id = %s", number)
    async with running(durable_dsn) as run:
        row = await run.ended(number)
    assert row.status == "failed"
    assert "StateError" in (row.last_error or "")
