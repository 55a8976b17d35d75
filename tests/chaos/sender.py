"""A sender process: inserts and signals of its share of the plan, each repeated until it is acknowledged.

    python -m tests.chaos.sender --dsn ... --seed 7 --seconds 5 --number 0 --acks FILE

Every acknowledgement is written to its file before the next call. What was acknowledged must be there at the end; what
was not (a lost connection, a time-out, `CommitUnknown`) may be there or not, and is sent again: its key makes that
harmless.
"""

from __future__ import annotations

import argparse
import json
import logging
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Final

import durable_actors as da
import psycopg
import trio
from durable_actors._client import Client
from durable_actors.machine import ENDED
from tests.chaos import machines
from tests.chaos.workload import ALWAYS, Ack, Insert, Plan, Send, make_plan

CALL: Final = 3.0
"""Seconds for one call; then nobody knows, and it is repeated."""
AGAIN: Final = 0.1
"""Seconds between attempts."""
ABSENT: Final = 15.0
"""Seconds for which a target may be missing: its insert is another sender's, who may have trouble."""

MACHINES: Final[dict[str, Any]] = {
    "chaos.Chain": machines.Chain,
    "chaos.Tally": machines.Tally,
    "chaos.Pack": machines.Pack,
    "chaos.Sleeper": machines.Sleeper,
    "chaos.Family": machines.Family,
    "chaos.Courier": machines.Courier,
    "chaos.Limited": machines.Limited,
    "chaos.Graph": machines.Graph,
    "chaos.Lane": machines.Lane,
    "chaos.Hang": machines.Hang,
    "chaos.job": machines.job,
    "chaos.hopeless": machines.hopeless,
}

logger = logging.getLogger("chaos.sender")


class Sender:
    """One process's share of the plan."""

    def __init__(self, number: int, dsn: str, acks: Path) -> None:
        self._number = number
        self._dsn = dsn
        self._acks = acks.open("a", buffering=1)
        self._stack = AsyncExitStack()
        self._client: Client | None = None

    async def run(self, plan: Plan) -> None:
        """Do it all, each at its time."""
        began = trio.current_time()
        async with self._stack:
            for work in plan.of(self._number):
                await trio.sleep_until(began + work.at)
                await self._repeat(work)

    async def _repeat(self, work: Insert | Send) -> None:
        """Until it is acknowledged."""
        unknown = False
        since = trio.current_time()
        while True:
            try:
                with trio.fail_after(CALL):
                    await self._do(work)
            except (da.StoreUnavailable, trio.TooSlowError) as exc:
                unknown = True
                logger.warning("%s: %s; again", work, exc)
            except psycopg.Error as exc:  # refused, and not done: a time-out of the server's, a full disk
                logger.warning("%s: %s; again", work, exc)
            except da.NoTarget:
                # Cancelled? Ended, because an earlier attempt had done it? Or not inserted yet?
                status = await self._status(work)
                if status == "cancelled":
                    logger.warning("%s: its target was cancelled", work)
                    return
                if unknown and status in ENDED:
                    self._note(work, None)
                    return
                if trio.current_time() > since + ABSENT:
                    logger.exception("%s: no target", work)
                    return
            else:
                return
            await trio.sleep(AGAIN)

    async def _status(self, work: Insert | Send) -> str | None:
        """The status of the target; None: it is not there, or nobody can say just now."""
        assert isinstance(work, Send)
        assert self._client is not None
        try:
            with trio.fail_after(CALL):
                found = await self._client.inspect(work.target)
        except (da.NoTarget, da.StoreUnavailable, trio.TooSlowError, psycopg.Error):
            return None
        return found.status

    async def _do(self, work: Insert | Send) -> None:
        client = self._client or await self._connect()
        if isinstance(work, Send):
            await self._signal(client, work)
            self._note(work, None)
            return
        number = await client.insert(
            MACHINES[work.machine],
            state=work.state,
            unique_key=work.key,
            unique_scope=ALWAYS,
            on_duplicate="return",
            partition_key=work.partition_key,
            schedule_in=work.schedule_in,
            priority=work.priority,
            fair_key=(None, "a", "b")[len(work.key) % 3],  # the queue "jobs" is fair
            journal=work.journal,
        )
        self._note(work, number)

    async def _signal(self, client: Client, work: Send) -> None:
        if work.hold:
            # Left behind when it takes too long: its dedup key makes whatever it still does harmless.
            await trio.to_thread.run_sync(self._signal_slowly, work, abandon_on_cancel=True)
        elif work.start is not None:
            await client.signal_with_start(
                MACHINES[work.start.machine],
                key=work.target,
                name=work.name,
                payload=work.payload,
                dedup_key=work.dedup_key,
                state=work.start.state,
                unique_scope=ALWAYS,
                journal=work.start.journal,
            )
        else:
            await client.signal(work.target, work.name, work.payload, dedup_key=work.dedup_key)

    def _signal_slowly(self, work: Send) -> None:
        """In a transaction of the caller's that does something else, too: the target's row is locked meanwhile."""
        try:
            with psycopg.connect(self._dsn, connect_timeout=int(CALL)) as conn:
                da.sync.signal(conn, work.target, work.name, work.payload, dedup_key=work.dedup_key)
                time.sleep(work.hold)
        except psycopg.Error as exc:
            raise da.StoreUnavailable(str(exc)) from exc

    async def _connect(self) -> Client:
        self._client = await self._stack.enter_async_context(da.open_client(self._dsn))
        return self._client

    def _note(self, work: Insert | Send, number: int | None) -> None:
        key = work.key if isinstance(work, Insert) else work.dedup_key
        self._acks.write(json.dumps({"sender": self._number, "key": key, "id": number}) + "\n")


def read_acks(path: Path) -> list[Ack]:
    """What a sender has written."""
    return [Ack(**json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--dsn", required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--number", type=int, required=True)
    parser.add_argument("--acks", type=Path, required=True)
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    plan = make_plan(options.seed, options.seconds, scale=options.scale)
    trio.run(Sender(options.number, options.dsn, options.acks).run, plan)


if __name__ == "__main__":
    main()
