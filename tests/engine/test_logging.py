"""Log records carry the step they belong to: in the task, in a thread, in `handle`, and nowhere else."""

from __future__ import annotations

import logging

import durable_actors as da
import pytest
from durable_actors.telemetry import StepLogFilter
from tests.engine.kit import running


@pytest.fixture
def records():
    found: list[logging.LogRecord] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record)

    handler = Keep()
    handler.addFilter(StepLogFilter())
    logger = logging.getLogger("test_logging")
    logger.addHandler(handler)
    logger.setLevel("INFO")
    yield found
    logger.removeHandler(handler)


async def test_records_tell_their_step(durable_dsn: str, registry, records: list[logging.LogRecord]):
    log = logging.getLogger("test_logging")

    @da.job(name="talk")
    async def talk(args: dict) -> None:
        log.info("in a task")

    @da.job(name="thread")
    def thread(args: dict) -> None:
        log.info("in a thread")

    class Fails(da.Machine, name="fails"):
        @da.step(initial=True)
        async def begin(self, ctx: da.Context[dict]) -> da.Outcome:
            raise ValueError("no")

        async def handle(self, error: Exception, ctx: da.Context[dict]) -> da.Outcome:
            log.info("in handle")
            return da.Done()

    async with running(durable_dsn):
        for machine in (talk, thread, Fails):
            number = await da.insert(machine)
            await da.result(number, timeout=30)
        log.info("outside")
    told = {
        record.message if hasattr(record, "message") else record.getMessage(): record for record in records
    }
    assert (told["in a task"].machine, told["in a task"].step, told["in a task"].attempt) == (
        "talk",
        "perform",
        0,
    )
    assert told["in a thread"].machine == "thread"
    assert (told["in handle"].machine, told["in handle"].step) == ("fails", "begin")
    assert isinstance(told["in handle"].instance, int)
    assert told["outside"].instance is None
