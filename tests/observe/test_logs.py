"""Log lines as JSON: fields of the record, of the step, of the trace."""

from __future__ import annotations

import io
import json
import logging
import sys

import durable_actors as da
import pytest
from durable_actors import logs
from tests.engine.kit import running
from tests.observe.kit import Sdk


@pytest.fixture
def root():
    """The root logger, as it was afterwards."""
    logger = logging.getLogger()
    before, level = logger.handlers[:], logger.level
    logger.handlers.clear()
    yield logger
    logger.handlers[:] = before
    logger.setLevel(level)


def lines(stream: io.StringIO) -> list[dict]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def formatted(**fields) -> dict:
    record = logging.makeLogRecord(
        {"msg": "said %s", "args": ("so",), "name": "n", "levelname": "INFO", **fields}
    )
    return json.loads(logs.JsonFormatter().format(record))


def test_a_line():
    line = formatted(created=0.5)
    assert line == {
        "time": "1970-01-01T00:00:00.500+00:00",
        "level": "INFO",
        "logger": "n",
        "message": "said so",
    }


def test_what_is_hostile_is_one_line_all_the_same():
    class Bad:
        def __str__(self):
            raise RuntimeError

    loop: dict = {1: "one", (2,): "skipped"}
    line = formatted(msg="a\nb\x00 \ud800", args=(), order=42, bad=Bad(), keys=loop, message_id="x")
    assert (line["message"], line["order"], line["bad"], line["keys"]) == (
        "a\nb\x00 \ud800", 42, "<Bad>", {"1": "one"},
    )  # fmt: skip
    assert "\n" not in logs.JsonFormatter().format(logging.makeLogRecord({"msg": "a\nb"}))


def test_an_error_has_its_traceback():
    try:
        int("no")
    except ValueError:
        line = formatted(exc_info=sys.exc_info())
    assert line["error"].startswith("ValueError: invalid literal")
    assert "test_logs.py" in line["traceback"]


@pytest.mark.usefixtures("registry")
async def test_a_record_names_its_step_and_its_trace(durable_dsn, otel_sdk: Sdk, root):
    stream = io.StringIO()
    logs.configure(json=True, stream=stream)

    @da.job(name="shop:pack")
    async def pack(args: dict) -> None:
        logging.getLogger("shop").info("packing", extra={"order": 7})

    @da.job(name="shop:thread")
    def thread(args: dict) -> None:
        logging.getLogger("shop").info("in a thread")

    async with running(durable_dsn, observers=[otel_sdk.bridge()]) as run:
        row = await run.run(pack)
        other = await run.run(thread)
    [line] = [each for each in lines(stream) if each["message"] == "packing"]
    span = next(
        span for span in otel_sdk.spans("process") if span.attributes["messaging.message.id"] == str(row.id)
    )
    told = {
        name: line[name]
        for name in ("instance", "machine", "step", "attempt", "order", "trace_id", "span_id")
    }
    assert told == {
        "instance": row.id,
        "machine": "shop:pack",
        "step": "perform",
        "attempt": 0,
        "order": 7,
        "trace_id": f"{span.context.trace_id:032x}",
        "span_id": f"{span.context.span_id:016x}",
    }
    [line] = [each for each in lines(stream) if each["message"] == "in a thread"]
    assert (line["instance"], len(line["trace_id"])) == (other.id, 32)
    [line] = [each for each in lines(stream) if "serves" in each["message"]]
    assert "instance" not in line


def test_text_and_levels(root):
    stream = io.StringIO()
    logs.configure(level="warning", stream=stream)
    logging.getLogger("x").info("not")
    logging.getLogger("x").warning("said")
    assert stream.getvalue().endswith(" WARNING x: said\n")
    for level in ("loud", 1.5):
        with pytest.raises(da.ConfigError):
            logs.configure(level=level)  # type: ignore[arg-type]
