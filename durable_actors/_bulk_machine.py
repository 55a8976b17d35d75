"""The machine that runs a bulk command in the background: one step per batch, so that it survives its worker."""

from __future__ import annotations

from contextlib import suppress
from typing import Final

import msgspec
import psycopg
import trio

from durable_actors._bulk import QUEUE, BulkWork
from durable_actors._client import current_client
from durable_actors._store.bulk_receipts import MACHINE
from durable_actors.errors import DurableError
from durable_actors.machine import Context, Done, Machine, Next, Outcome, Retry, Stop, step

PATIENCE: Final = 100
"""Runs of one batch that may fail in a row: hours, with their pauses."""
LAST_WORDS: Final = 2.0
"""Seconds in which one that is interrupted may write its end into its receipt."""


class BulkMachine(Machine[BulkWork], name=MACHINE, queue=QUEUE):
    """Its state is the frozen filter, the cursor and the counts. A batch that runs again does nothing twice."""

    @step(initial=True)
    async def batch(self, ctx: Context[BulkWork]) -> Outcome:
        """Carry out one batch."""
        client = current_client.get()
        assert client is not None
        work = ctx.state
        try:
            ended = await client.bulk_batch(work.job, work.progress)
        except trio.Cancelled:
            # A drain, a lost lease, or somebody cancels it: only then does nothing follow.
            with trio.move_on_after(LAST_WORDS, shield=True), suppress(DurableError, psycopg.Error):
                await client.bulk_interrupted(ctx.id)
            raise
        if not ended:
            return Next(self.batch, work)
        await client.bulk_ended(work.job.id, work.job.count, work.progress, aborted=False)
        return Done(msgspec.to_builtins(work.progress))

    async def handle(self, error: Exception, ctx: Context[BulkWork]) -> Outcome:
        """Try again: the database may be away for long."""
        return Retry(delay=min(2**ctx.attempt, 300)) if ctx.attempt < PATIENCE else Stop(error)
