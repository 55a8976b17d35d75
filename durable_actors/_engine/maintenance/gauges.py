"""Gauges: the sizes of mailboxes and lanes, for observers. Only built while somebody listens."""

from __future__ import annotations

from collections.abc import Callable

import trio

from durable_actors._engine.node import Node, logger
from durable_actors.otp import ChildRestarting, Event as TreeEvent, Node as TreeNode, log_event
from durable_actors.telemetry import ActorRestarted, EngineMeasured, LaneMeasured


def kind_of(name: str) -> str:
    """What an actor of the tree is, without the queue that it serves: labels must be few. Pure."""
    return "feeder" if name.startswith("feeder ") else name


class Gauges:
    """Measures one engine."""

    def __init__(self, node: Node, snapshot: Callable[[], TreeNode]) -> None:
        self._node = node
        self._snapshot = snapshot
        self._timeouts: dict[str, int] = {}

    def emit(self) -> None:
        """Tell the observers, if there are any. Called in the loop, by the scheduler: it must not raise."""
        if not self._node.telemetry.active:
            return
        try:
            event = self.measure()
        except Exception:  # noqa: BLE001 - of the scheduler's own callbacks, an error would end the program
            logger.exception("could not measure the engine")
        else:
            self._node.telemetry.emit(event)

    def measure(self) -> EngineMeasured:
        """How full mailboxes and lanes are now."""
        mailboxes: dict[str, int] = {}
        for each in self._snapshot().walk():
            if each.mailbox is not None:
                kind = kind_of(each.name)
                mailboxes[kind] = max(mailboxes.get(kind, 0), each.mailbox.depth)
        swept_at = self._node.swept_at
        return EngineMeasured(
            mailboxes=mailboxes,
            lanes=self._lanes(),
            janitor_lag=None if swept_at is None else max(trio.current_time() - swept_at, 0.0),
        )

    def _lanes(self) -> tuple[LaneMeasured, ...]:
        found: list[LaneMeasured] = []
        for lane in self._node.pool.statistics().lanes:
            found.append(
                LaneMeasured(
                    lane=lane.name,
                    size=lane.size,
                    in_use=lane.in_use,
                    idle=lane.idle,
                    waiting=lane.waiting,
                    timeouts=lane.timeouts - self._timeouts.get(lane.name, 0),
                )
            )
            self._timeouts[lane.name] = lane.timeouts
        return tuple(found)


def tree_observer(node: Node) -> Callable[[TreeEvent], None]:
    """What supervisors tell: logged, and restarts passed on to the engine's observers."""

    def observe(event: TreeEvent) -> None:
        log_event(event)
        if isinstance(event, ChildRestarting) and node.telemetry.active:
            actor = kind_of(event.path.rpartition("/")[2])
            node.telemetry.emit(ActorRestarted(actor=actor, path=event.path, delay=event.delay))

    return observe
