"""Batched reads: the turn never passes to somebody who has left."""

from __future__ import annotations

import trio
import trio.testing
from durable_actors._engine.running.batched import Batched


async def test_a_batch_that_comes_back_leaves_out_who_has_gone(autojump_clock):
    """Cancelled in this order: one of the batch that is being read, then its reader. The others go on."""
    hold, answered, batches = trio.Event(), [], []
    scopes = [trio.CancelScope() for _ in range(4)]

    async def fetch(keys):
        batches.append(keys)
        if keys in ([0], [1, 2]):
            await hold.wait()
        return {key: key for key in keys}

    batched = Batched(fetch, limit=2)

    async def ask(key):
        with scopes[key]:
            answered.append(await batched.get(key))

    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            for key in range(4):
                nursery.start_soon(ask, key)
                await trio.testing.wait_all_tasks_blocked()
            for key in (0, 2, 1):
                scopes[key].cancel()
                await trio.testing.wait_all_tasks_blocked()
    assert batches == [[0], [1, 2], [3]]
    assert answered == [3]
