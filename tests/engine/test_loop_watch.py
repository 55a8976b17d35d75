"""A step that blocks the event loop is named, while it does and afterwards."""

from __future__ import annotations

import logging
import time
from typing import Any

import durable_actors as da
import pytest
import trio
from durable_actors.telemetry import LoopBlocked
from tests.engine.kit import QUIET, running
from tests.kit import PATIENCE

pytestmark = pytest.mark.usefixtures("registry")


class Told(logging.Handler):
    """The lines about blocked loops; called in the thread that looks."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[str, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        if "event loop" in record.getMessage():
            self.lines.append((record.levelname, record.getMessage()))

    def block_until_told(self) -> None:
        end = time.monotonic() + PATIENCE
        while not self.lines and time.monotonic() < end:
            time.sleep(0.01)


@pytest.fixture
def told():
    handler = Told()
    logger = logging.getLogger("durable_actors.engine")
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)


@pytest.mark.parametrize("where", ["step", "child"])
async def test_a_step_that_blocks_the_loop_is_named(durable_dsn, told, where):
    """Also when it is a task of its own that blocks."""

    async def child() -> None:
        told.block_until_told()

    @da.job(name="blocks", version=2)
    async def blocks(args: dict[str, Any]) -> None:
        if where == "step":
            told.block_until_told()
            return
        async with trio.open_nursery() as nursery:
            nursery.start_soon(child)

    async with running(durable_dsn, **QUIET) as run:
        row = await run.run(blocks, args={})
        event = await run.events.wait(LoopBlocked)
    name = f"instance {row.id}: blocks, step perform"
    assert told.lines[0][1].startswith(f"{name} has blocked the event loop for ")
    assert "in Told.block_until_told" in told.lines[0][1]
    assert told.lines[1][1].startswith(f"{name} blocked the event loop for ")
    assert {level for level, _ in told.lines} == {"WARNING"}
    assert (event.id, event.machine, event.step) == (row.id, "blocks", "perform")
    assert event.seconds > 0


async def test_other_tasks_that_block_it_are_named_by_their_task(durable_dsn, told):
    async def of_the_application() -> None:
        told.block_until_told()

    async with running(durable_dsn, **QUIET) as run, trio.open_nursery() as nursery:
        nursery.start_soon(of_the_application)
        event = await run.events.wait(LoopBlocked)
    assert event.id is None
    assert event.task.endswith("of_the_application")
    assert "of_the_application has blocked the event loop" in told.lines[0][1]
