"""Commands on what runners claim: a pause holds them as it holds engines, and a request meets their outcome."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import durable_actors as da
import pytest
from tests.engine.kit import Db

pytestmark = pytest.mark.usefixtures("registry")
QUEUE = "q"


@pytest.fixture
async def client(db: Db) -> AsyncIterator[da.Client]:
    @da.job(name="one", queue=QUEUE)
    async def one(args: int) -> None: ...

    class Two(da.Machine[dict[str, Any]], name="two", queue=QUEUE):
        @da.step
        async def start(self, ctx: da.Context[dict[str, Any]]) -> da.Outcome:
            return da.Next(self.end)

        @da.step
        async def end(self, ctx: da.Context[dict[str, Any]]) -> da.Outcome:
            return da.Done()

    async with da.open_client(db.dsn) as found:
        yield found


async def taken(client: da.Client) -> Any:
    claimed = await client.claim_next(QUEUE)
    return None if claimed is None else claimed.id


async def test_what_is_paused_is_not_claimed(client: da.Client):
    one, two = await client.insert("one", args=1), await client.insert("two", state={})
    await client.pause_queue(QUEUE, by="ada")
    assert await taken(client) is None
    await client.pause_queue(QUEUE, "one", by="ada")
    await client.resume_queue(QUEUE)
    assert await taken(client) == two
    assert await taken(client) is None
    assert await client.pause(one) == "paused"
    await client.resume_queue(QUEUE, "one")
    assert await taken(client) is None
    await client.resume(one)
    assert await taken(client) == one


async def test_the_pause_of_what_a_runner_holds_begins_with_its_outcome(client: da.Client):
    number = await client.insert("two", state={})
    claimed = await client.claim_next(QUEUE)
    assert claimed is not None
    assert await client.pause(number, reason="odd") == "requested"
    moved = await client.complete(claimed, da.Next("end"))
    assert (moved.status, moved.paused is None) == ("runnable", False)
    assert await taken(client) is None
    await client.resume(number)
    assert await taken(client) == number


@pytest.mark.parametrize(
    ("ends", "status"),
    [(da.Next("end"), "cancelled"), (da.Retry(), "cancelled"), ("fail", "cancelled"), (da.Done(1), "done")],
    ids=["Next", "Retry", "fail", "Done"],
)
async def test_what_a_runner_holds_is_asked_and_ends_with_its_outcome(
    client: da.Client, ends: Any, status: str
):
    number = await client.insert("two", state={})
    claimed = await client.claim_next(QUEUE)
    assert claimed is not None
    assert await client.cancel(number, reason="wrong order") == "requested"
    ended = await (
        client.fail(claimed, ValueError("no")) if ends == "fail" else client.complete(claimed, ends)
    )
    assert ended.status == status
    if status == "cancelled":
        with pytest.raises(da.InstanceCancelled, match="wrong order"):
            await client.result(number)
    assert await taken(client) is None


async def test_force_takes_the_claim_of_a_runner(client: da.Client):
    number = await client.insert("two", state={})
    claimed = await client.claim_next(QUEUE)
    assert claimed is not None
    assert await client.cancel(number, force=True) == "cancelled"
    with pytest.raises(da.LeaseLost):
        await client.complete(claimed, da.Done())
    assert (await client.inspect(number)).status == "cancelled"
    assert await client.retry(number) == number
    assert await taken(client) == number
