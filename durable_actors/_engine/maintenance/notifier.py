"""Notifier: tells the user's notifier of instances that this process made runnable.

Owns       nothing: what is to be told is in `Wakeups`, which outlives it.
Receives   that something waits there.
Sends      nothing; it calls user code, `Config.notifier`, for several instances at a time.
Reads      read_intents.sql, a page of instances at a time: so what is told is committed, and still to run.
Writes     record_wakeup.sql, after a call that succeeded; on the client lane, one at a time.
If it dies it is restarted; calls that were under way are not repeated.
Never      makes anybody wait, or lets an error of user code out. A call that takes too long is cancelled.

At a stop it ends after everything that commits: what a drain gives back is told, too. It then goes on for at most
`STOP_TIME`, and the rest is dropped. A client without an engine runs it in a tree of its own (`open_notifier`).
"""

from __future__ import annotations

import inspect
import math
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Final

import psycopg
import trio

from durable_actors._engine.outage import FIRST_PAUSE, LONGEST_PAUSE, TRANSIENT_ERRORS
from durable_actors._engine.running.user_code import fate_of
from durable_actors._engine.wakeups import Wakeups, logger
from durable_actors._postgres.driver.failures import RETRYABLE
from durable_actors._postgres.pool.pool import ConnectionPool
from durable_actors._store.wakeup import Intent, read_intents, record_wakeup
from durable_actors.config import Notifier as NotifierCall
from durable_actors.otp import (
    Actor,
    ActorChild,
    ExitReason,
    MailboxClosed,
    Shutdown,
    Supervisor,
    open_tree,
)

TIMEOUT: Final = 5.0
"""Seconds for one call of the notifier, and as many for recording it."""
CALLS: Final = 10
"""Calls at the same time."""
PAGE: Final = 100
"""Instances that are read at a time."""
STOP_TIME: Final = 1.0
"""Seconds for what is still to be told when the engine or client stops."""


class Notifier(Actor[object]):
    """The actor."""

    def __init__(self, wakeups: Wakeups, *, pool: ConnectionPool, lane: str, schema: str) -> None:
        self._wakeups = wakeups
        self._pool = pool
        self._lane = lane
        self._schema = schema
        self._slots = trio.Semaphore(CALLS, max_value=CALLS)
        self._recording = trio.Lock()

    async def run(self) -> None:
        """Tell what waits. After a request to stop, wait for the calls that are under way."""
        try:
            await self._tell_waiting()  # of an earlier incarnation
            while True:
                await self.mailbox.receive()
                await self._tell_waiting()
        except MailboxClosed:
            await self._tell_waiting()
            for _ in range(CALLS):
                await self._slots.acquire()
            raise

    async def terminate(self, reason: ExitReason) -> None:
        """Count what is left, unless the next incarnation tells it."""
        if isinstance(reason, Shutdown):
            self._wakeups.close()

    async def _tell_waiting(self) -> None:
        pause = FIRST_PAUSE
        while page := self._wakeups.take(PAGE):
            try:
                async with self._pool.acquire(self._lane, within=TIMEOUT) as conn:
                    intents = await read_intents(conn, self._schema, page)
            except BaseException as exc:
                self._wakeups.put_back(page)
                if not isinstance(exc, TRANSIENT_ERRORS):
                    raise
                logger.debug("the notifier cannot read what it has to tell: %s", exc)
                await trio.sleep(pause)
                pause = min(pause * 2, LONGEST_PAUSE)
                continue
            pause = FIRST_PAUSE
            await self._begin(intents)

    async def _begin(self, intents: list[Intent]) -> None:
        """Begin to tell them, as slots become free. Cancelled: those that have not begun wait again."""
        begun = 0
        try:
            for intent in intents:
                await self._slots.acquire()
                self.nursery.start_soon(self._tell, intent)
                begun += 1
        finally:
            self._wakeups.put_back([intent.id for intent in intents[begun:]])

    async def _tell(self, intent: Intent) -> None:
        """Call the notifier, and record it. Cancelled: it may have been told, but counts as dropped."""
        try:
            try:
                error = await _called(self._wakeups.notifier, intent)
            except trio.Cancelled:
                self._wakeups.drop(1, "the engine or client was closed")
                raise
            if error is not None:
                self._wakeups.failed(intent.id, intent.queue, error)
                return
            self._wakeups.told()
            if intent.recorded:
                await self._record(intent)
        finally:
            self._slots.release()

    async def _record(self, intent: Intent) -> None:
        """Record it; one statement at a time, so that callers do not wait behind all of these for a connection."""
        with trio.move_on_after(TIMEOUT):
            while True:
                try:
                    async with self._recording, self._pool.acquire(self._lane) as conn:
                        await record_wakeup(conn, self._schema, intent)
                except TRANSIENT_ERRORS as exc:
                    if not (isinstance(exc, psycopg.Error) and exc.sqlstate in RETRYABLE):
                        logger.debug("instance %d: its wake-up is not recorded: %s", intent.id, exc)
                        return
                else:
                    return
                await trio.sleep(FIRST_PAUSE)  # its row is locked
        logger.debug("instance %d: its wake-up is not recorded, because its row is locked", intent.id)


async def _called(call: NotifierCall, intent: Intent) -> BaseException | None:
    """Call user code; return what went wrong."""
    try:
        with trio.move_on_after(TIMEOUT):
            answer: Any = call(intent.wakeup())
            if not inspect.isawaitable(answer):
                return TypeError(
                    f"the notifier must be an async function; it returned {type(answer).__name__}"
                )
            await answer
            return None
        return trio.TooSlowError(f"the notifier took more than {TIMEOUT:g} s")
    except BaseException as exc:  # user code may raise anything
        if fate_of(exc, cancelled=trio.current_effective_deadline() == -math.inf) == "ends":
            raise
        return exc


def notifier_child(wakeups: Wakeups, *, pool: ConnectionPool, lane: str, schema: str) -> ActorChild[object]:
    """The actor as a child of a supervisor."""
    make = partial(Notifier, wakeups, pool=pool, lane=lane, schema=schema)
    return ActorChild(wakeups.address, make, shutdown=STOP_TIME)


@asynccontextmanager
async def open_notifier(
    wakeups: Wakeups | None, *, pool: ConnectionPool, lane: str, schema: str
) -> AsyncGenerator[None, None]:
    """Run the notifier of a client without an engine, if it has one, while a block runs."""
    if wakeups is None:
        yield
        return
    child = notifier_child(wakeups, pool=pool, lane=lane, schema=schema)
    async with open_tree(Supervisor("notifier", [child], intensity=10, period=10.0)):
        yield
