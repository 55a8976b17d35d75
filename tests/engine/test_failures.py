"""Failures are visible: in the log, at the level that an operator expects, and in the row, with type and traceback."""

from __future__ import annotations

import logging
import re

import durable_actors as da
import pytest
from durable_actors.telemetry import StepLogFilter
from tests.engine.kit import running

pytestmark = pytest.mark.usefixtures("registry")


class Declined(Exception):
    """An error of the user's."""


@pytest.fixture
def records(caplog):
    caplog.set_level(logging.DEBUG, logger="durable_actors.engine")
    caplog.handler.addFilter(StepLogFilter())

    def about(number: int, least: int = logging.INFO) -> list[logging.LogRecord]:
        return [
            record
            for record in caplog.records
            if record.levelno >= least and re.match(rf"instance {number}\b", record.getMessage())
        ]

    return about


def charge(amount: int) -> None:
    raise Declined(f"no cover for {amount}")


async def test_a_job_that_fails_for_good(durable_dsn, records):
    """Each retry is one line; the end is an error with the traceback. The row has all three parts of it."""

    @da.job(name="pay", max_attempts=3, backoff=lambda attempt: 0.01)
    async def pay(args: dict) -> None:
        charge(7)

    async with running(durable_dsn) as run:
        row = await run.run(pay, args={})
    first, second, last = records(row.id)
    assert [each.levelname for each in (first, second, last)] == ["WARNING", "WARNING", "ERROR"]
    failed = f"instance {row.id}: pay v1, step perform failed"
    text = f"{__name__}.Declined: no cover for 7"
    assert first.getMessage() == f"{failed} (run 1 of 3), next run in 0.01 s: {text}"
    assert second.getMessage() == f"{failed} (run 2 of 3), next run in 0.01 s: {text}"
    assert first.exc_info is None
    assert last.getMessage() == f"instance {row.id} failed: pay v1, step perform (run 3 of 3): {text}"
    assert last.exc_info is not None
    assert isinstance(last.exc_info[1], Declined)
    assert (last.instance, last.machine, last.step, last.attempt) == (row.id, "pay", "perform", 2)
    debug = [
        each for each in records(row.id, logging.DEBUG) if each.levelno == logging.DEBUG and each.exc_info
    ]
    assert len(debug) == 3
    assert (row.status, row.last_error, row.error_type) == ("failed", text, f"{__name__}.Declined")
    assert row.traceback is not None
    assert row.traceback.startswith("Traceback (most recent call last):\n")
    assert "charge(7)" in row.traceback
    assert row.traceback.endswith(f"{text}\n")
    assert "durable_actors/_engine" not in row.traceback  # it begins where the user's code does
    assert row.attempt == 2


async def test_a_success_clears_the_error(durable_dsn, db):
    class M(da.Machine, name="m"):
        @da.step
        def start(self, ctx):
            if not ctx.attempt:
                charge(1)
            return da.Next(self.second)

        @da.step
        async def second(self, ctx):
            [kept] = db.execute("select error_type, traceback, last_error from durable.gen_durable")
            return da.Done(list(kept))

        async def handle(self, error, ctx):
            [now] = db.execute("select error_type from durable.gen_durable")
            assert now == (None,)
            return da.Retry()

    async with running(durable_dsn) as run:
        row = await run.run(M)
    assert row.result == [None, None, None]
    assert (row.error_type, row.traceback, row.last_error) == (None, None, None)


async def test_a_retry_keeps_the_error_in_the_row(durable_dsn, db):
    class M(da.Machine, name="m"):
        @da.step
        def start(self, ctx):
            if not ctx.attempt:
                charge(1)
            return da.Done(list(db.execute("select error_type, traceback from durable.gen_durable")[0]))

        async def handle(self, error, ctx):
            return da.Retry()

    async with running(durable_dsn) as run:
        kind, trace = (await run.run(M)).result
    assert kind == f"{__name__}.Declined"
    assert "charge(1)" in trace
    assert "trio/_threads.py" not in trace


@pytest.mark.parametrize("how", ["stop", "cancel", "raised"])
async def test_an_end_that_the_code_chose_is_no_error(durable_dsn, records, how):
    if how == "stop":

        class M(da.Machine, name="m"):
            @da.step
            async def start(self, ctx):
                return da.Stop("the card was declined")
    else:

        @da.job(name="m", max_attempts=1)
        async def M(args: dict):
            if how == "raised":
                raise da.Cancel("the card was declined")
            return da.Cancel("the card was declined")

    async with running(durable_dsn) as run:
        row = await run.run(M)
    [said] = records(row.id)
    assert (said.levelname, said.exc_info) == ("WARNING", None)
    assert said.getMessage().endswith("the card was declined")
    assert row.last_error == "the card was declined"


async def test_a_handle_that_fails_is_told_once(durable_dsn, records):
    class M(da.Machine, name="m"):
        @da.step
        async def start(self, ctx):
            charge(1)

        async def handle(self, error, ctx):
            raise KeyError("in handle")

    async with running(durable_dsn) as run:
        row = await run.run(M)
    [said] = records(row.id)
    assert said.levelname == "ERROR"
    assert said.exc_info is not None
    assert isinstance(said.exc_info[1], KeyError)
    assert row.error_type == "KeyError"
    assert row.traceback is not None
    assert "no cover for 1" in row.traceback  # what handle was given, and what it raised
    assert "in handle" in row.traceback


async def test_an_error_that_handle_deals_with_is_told_quietly(durable_dsn, records):
    class M(da.Machine, name="m"):
        @da.step
        async def start(self, ctx):
            charge(1)

        async def handle(self, error, ctx):
            return da.Done("refunded")

    async with running(durable_dsn) as run:
        row = await run.run(M)
    [said] = records(row.id)
    assert said.levelname == "INFO"
    assert "and handle returned Done" in said.getMessage()


async def test_a_job_that_kills_its_worker_ends_with_an_error(durable_dsn, db, records):
    """Claimed once too often: it was executed once, which is one run for people, too."""

    @da.job(name="m", max_attempts=1)
    async def m(args: dict) -> None: ...

    async with running(durable_dsn, queues={}) as run:
        number = await run.insert(m, args={})
    db.execute("update durable.gen_durable set attempt = 1, crashes = 1")
    async with running(durable_dsn) as run:
        row = await run.ended(number)
    [said] = records(number)
    assert said.levelname == "ERROR"
    assert said.getMessage().endswith(
        "(run 1 of 1): m v1 was executed 1 time (max_attempts=1) and never finished"
    )
    assert (row.status, row.attempt) == ("failed", 0)


async def test_quarantine_is_an_error(durable_dsn, db, records):
    @da.job(name="m")
    async def m(args: dict) -> None: ...

    async with running(durable_dsn, queues={}) as run:
        number = await run.insert(m, args={})
    db.execute(
        "update durable.gen_durable set status = 'executing', locked_by = 'gone', claim_id = gen_random_uuid(),"
        " lease_expires_at = now(), crashes = 1, attempt = 1, error_type = 'T', traceback = 'old'"
    )
    async with running(durable_dsn, max_crashes=2) as run:
        row = await run.ended(number)
    [said] = records(number)
    assert said.levelname == "ERROR"
    assert said.getMessage() == (
        f"instance {number} failed: m, step perform: quarantined: step perform ended 2 times without an outcome "
        "(its worker died or lost it)"
    )
    assert (row.status, row.attempt, row.crashes) == ("failed", 1, 2)
    assert (row.error_type, row.traceback) == (None, None)  # of an older error
