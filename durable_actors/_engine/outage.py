"""How an actor bears a Postgres that is away: one log line per change, a growing pause between attempts."""

from __future__ import annotations

from typing import Final

import psycopg
import trio

from durable_actors._engine.node import Node, logger
from durable_actors.errors import StoreUnavailable
from durable_actors.telemetry import StoreDown, StoreUp

TROUBLE: Final = (StoreUnavailable, psycopg.Error)
"""What actors bear. Also a refused statement (a timeout of the role's, a deadlock, a table locked or renamed for a
minute): an actor that died of it would take every step that runs with it, and after a few seconds the engine."""

FIRST_PAUSE: Final = 0.05
LONGEST_PAUSE: Final = 2.0


class Outage:
    """One actor's view of the store: up, or down since when."""

    __slots__ = ("_actor", "_failures", "_node", "_since")

    def __init__(self, node: Node, actor: str) -> None:
        self._node = node
        self._actor = actor
        self._since = 0.0
        self._failures = 0

    def failed(self, error: Exception) -> float:
        """Note a failure; return the seconds to wait before the next attempt."""
        if not self._failures:
            self._since = trio.current_time()
            logger.warning("%s: the store fails, trying again until it works: %s", self._actor, error)
            if self._node.telemetry.active:
                self._node.telemetry.emit(StoreDown(actor=self._actor, error=error))
        pause = min(FIRST_PAUSE * 2.0 ** min(self._failures, 10), LONGEST_PAUSE)
        self._failures += 1
        return pause * (0.5 + 0.5 * self._node.random())

    def over(self) -> None:
        """Note a success. Costs one test when there was no failure."""
        if self._failures:
            away = trio.current_time() - self._since
            self._failures = 0
            logger.warning("%s: the store works again after %.1f s", self._actor, away)
            if self._node.telemetry.active:
                self._node.telemetry.emit(StoreUp(actor=self._actor, seconds=away))
