"""Retry with back-off while Postgres is unavailable: one log line per outage, a growing pause between attempts."""

from __future__ import annotations

from typing import Final

import psycopg
import trio

from durable_actors._engine.node import Node, logger
from durable_actors.errors import StoreUnavailable
from durable_actors.telemetry import StoreDown, StoreUp

TRANSIENT_ERRORS: Final = (StoreUnavailable, psycopg.Error)
"""Errors after which an actor tries again. Refused statements (a timeout set for the role, a deadlock, a table that is
locked or renamed for a minute) are among them: if an actor died of one, its restart would cancel every running step,
and after a few seconds the engine would stop."""

FIRST_PAUSE: Final = 0.05
LONGEST_PAUSE: Final = 2.0


class Outage:
    """One actor's view of the store, and when it tries again.

    The first actor that cannot reach the store logs the outage for the whole node (`StoreHealth`). A refused statement
    concerns only the actor that sent it, which logs it.
    """

    __slots__ = ("_actor", "_failures", "_health", "_node", "_refused", "_since")

    def __init__(self, node: Node, actor: str) -> None:
        self._node = node
        self._health = node.health
        self._actor = actor
        self._since = 0.0
        self._failures = 0
        self._refused = False
        self._health.forget(actor)

    def failed(self, error: Exception) -> float:
        """Note a failure; return the seconds to wait before the next attempt."""
        now = trio.current_time()
        if not self._failures:
            self._since = now
        if isinstance(error, StoreUnavailable):
            if self._health.failed(self._actor, now):
                logger.warning(
                    "%s: the store cannot be reached, trying again until it can: %s", self._actor, error
                )
                self._emit_down(error)
            elif not self._failures:
                logger.debug("%s: the store cannot be reached: %s", self._actor, error)
        elif not self._refused:
            self._refused = True
            logger.warning("%s: the store fails, trying again until it works: %s", self._actor, error)
            self._emit_down(error)
        pause = min(FIRST_PAUSE * 2.0 ** min(self._failures, 10), LONGEST_PAUSE)
        self._failures += 1
        return pause * (0.5 + 0.5 * self._node.random())

    def ok(self) -> None:
        """Note a success. Costs two tests when there was no failure."""
        if self._failures:
            self._failures = 0
            if self._refused:
                self._refused = False
                self._report_up(trio.current_time() - self._since)
        if self._health.away:
            seconds = self._health.works(self._actor, trio.current_time())
            if seconds is not None:
                self._report_up(seconds)

    def close(self) -> None:
        """The actor ends, perhaps before the outage does."""
        self._health.forget(self._actor)

    def _emit_down(self, error: Exception) -> None:
        if self._node.telemetry.active:
            self._node.telemetry.emit(StoreDown(actor=self._actor, error=error))

    def _report_up(self, seconds: float) -> None:
        logger.warning("%s: the store works again after %.1f s", self._actor, seconds)
        if self._node.telemetry.active:
            self._node.telemetry.emit(StoreUp(actor=self._actor, seconds=seconds))
