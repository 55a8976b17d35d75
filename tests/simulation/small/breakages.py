"""Rules broken on purpose, one at a time: the small simulation must notice each.

Rules of the store are left out of a statement (`tests.simulation.statements`); rules of the nodes are patched away.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import attrs
import psycopg
import trio
from durable_actors._engine.claiming import cursor
from durable_actors._engine.committing import flusher, transition
from durable_actors._engine.keys import keeper, session as key_session
from durable_actors._engine.limits import QueueLimits, demand
from durable_actors._engine.maintenance import heartbeat, reaper
from durable_actors._engine.maintenance.failure_detector import judge_owners
from durable_actors._engine.running import dispatcher
from durable_actors.errors import CommitUnknown
from durable_actors.otp import _pool, _pool_task, _supervisor
from durable_actors.otp._restart import Leave
from tests.simulation import breakages as large
from tests.simulation.driver import Rates
from tests.simulation.plan import Item, Plan, Strike
from tests.simulation.small.plan import make_plan
from tests.simulation.small.run import simulate

NOT_HERE = {"pauses", "paused ahead", "slots", "charge", "thaw", "turned twice", "unrecorded slot"}
"""Nobody pauses anything here; small nodes have neither limits nor schedules."""
STORE = {name: text for name, text in large.STORE.items() if name not in NOT_HERE}
_patch = large._patch


@contextmanager
def _patches(*patches: Callable[[], Any]) -> Iterator[None]:
    with ExitStack() as stack:
        for each in patches:
            stack.enter_context(each())
        yield


async def _nothing(self: Any) -> None:
    await trio.lowlevel.checkpoint()


async def _unknown_fails(original: Any, self: flusher.Flusher, batch: list[Any], *role: str) -> Any:
    try:
        return await original(self, batch, *role)
    except CommitUnknown as exc:
        raise psycopg.errors.NumericValueOutOfRange(str(exc)) from exc


async def _unknown_is_done(original: Any, self: flusher.Flusher, batch: list[Any], *role: str) -> Any:
    try:
        return await original(self, batch, *role)
    except CommitUnknown:
        return {each.claim.id: large.as_committed(each) for each in (entry.transition for entry in batch)}, []


def _with_deadline(change: Callable[[float], float]) -> Callable[[], Any]:
    """Give steps another deadline than the end of the trust in their lease."""
    start, deadline = _pool.Pool.start_nowait, _pool_task.PoolTask.deadline

    def start_nowait(self: Any, *args: Any, deadline: float, **options: Any) -> Any:
        return start(self, *args, deadline=change(deadline), **options)

    assert deadline.fset is not None
    moved = deadline.setter(lambda self, at, move=deadline.fset: move(self, change(at)))  # type: ignore[misc]
    return partial(
        _patches,
        _patch(_pool.Pool, "start_nowait", start_nowait),
        _patch(_pool_task.PoolTask, "deadline", moved),
    )


def _restart_proves(watch: Any, owners: Any, **options: Any) -> Any:
    owners = [attrs.evolve(each, server_up=1e9) for each in owners]
    return judge_owners(watch, owners, **{**options, "session": None, "dead_after": 0.0})


def _half_a_lease(lease_ttl: float, dead_after: float) -> float:
    return lease_ttl / 2


def _no_kept(original: Callable[..., Any], *args: Any, **options: Any) -> Any:
    change = original(*args, **options)
    change.kept = ()
    return change


def _no_reset(original: Callable[..., None], self: Any, *args: Any, **options: Any) -> None:
    original(self, *args, **options)
    self._reset_at = float("inf")


def _late(original: Callable[..., Any], self: Any, now: float) -> Any:
    return original(self, now - 1e6)


def _greedy(limits: QueueLimits, *, running: int, buffered: int) -> int:
    return demand(limits, running=0, buffered=buffered)


NODE: dict[str, tuple[str, Callable[[], Any]]] = {
    "proceed": large.ENGINE["proceed"],
    "trust": large.ENGINE["trust"],
    "no renewal": (
        "leases are not renewed",
        partial(
            _patches, _patch(heartbeat.Heartbeat, "_beat", _nothing), _patch(heartbeat.Heartbeat, "_pulse", _nothing)
        ),
    ),
    "no deadline": (
        "a step's scope has no deadline: it runs on when its lease cannot be renewed",
        _with_deadline(lambda at: math.inf),
    ),
    "wrong clock": (
        "the end of the trust is read on the server's clock",
        _with_deadline(lambda at: at + large.options["skew"]),
    ),
    "late start": (
        "a step begins although its lease can no longer be trusted",
        _patch(dispatcher.Dispatcher, "_take_next", large._around(_late, dispatcher.Dispatcher._take_next)),
    ),
    "keyed steps": large.ENGINE["keyed steps"],
    "long trust": (
        "a keeper trusts its session for longer than it takes to prove its node dead",
        partial(
            _patches, _patch(key_session, "trust_window", _half_a_lease), _patch(keeper, "trust_window", _half_a_lease)
        ),
    ),
    "no reaper": large.ENGINE["no reaper"],
    "no control": large.ENGINE["no control"],
    "dead at once": large.ENGINE["dead at once"],
    "restart proves": ("locks that a restart has freed prove death", _patch(reaper, "judge_owners", _restart_proves)),
    "unknown failed": (
        "a commit of unknown fate counts as refused",
        _patch(flusher.Flusher, "_commit", large._around(_unknown_fails, flusher.Flusher._commit)),
    ),
    "unknown done": (
        "a commit of unknown fate counts as done",
        _patch(flusher.Flusher, "_commit", large._around(_unknown_is_done, flusher.Flusher._commit)),
    ),
    "no awaits": large.ENGINE["no awaits"],
    "consume all": large.ENGINE["consume all"],
    "no kept": (
        "a park is woken by what its step has seen and kept",
        _patch(transition, "_park", partial(_no_kept, transition._park)),
    ),
    "no reset": (
        "a pick never begins at the head again",
        _patch(cursor.PickCursor, "advance", large._around(_no_reset, cursor.PickCursor.advance)),
    ),
    "no free slot": (
        "a step takes a slot that is not there",
        _patch(dispatcher.Dispatcher, "_has_free_slot", lambda self: True),
    ),
    "greedy": ("a feeder claims more than it may hold", _patch(dispatcher, "demand", _greedy)),
    "no restart": ("an actor that died stays dead", _patch(_supervisor, "decide", lambda *args, **options: Leave())),
}  # fmt: skip


def _back_again(plan: Plan) -> Plan:
    """Servers that restart, again and again, and slow messages: a node is back when its reaper is on the way."""
    plan = large._back_again(plan)
    return attrs.evolve(plan, rates=Rates(slow=0.5, lag=0.04, delay=0.8))


def _slow_beats(plan: Plan) -> Plan:
    """Long steps, renewals that are slow, nodes that are cut off."""
    return attrs.evolve(
        large._long_steps(plan), rates=Rates(slow=0.3, lag=0.04, delay=plan.options["lease_ttl"])
    )


def _cut_and_restarted(plan: Plan) -> Plan:
    """Long keyed steps on long leases; a node is cut off, and the server restarts meanwhile."""
    at = plan.lasts / 2
    return attrs.evolve(
        plan, nodes=2, lasts=at + 4.0, rates=Rates(lag=0.04), prefetch=0,
        items=tuple(Item(f"chain-{number}", "chain", 0.1, 1, 12.0, key="red") for number in range(2)),
        strikes=(Strike(at, "cut", plan.seed % 2, 3.0), Strike(at + 0.05, "restart", 0, 0.2)),
        options=plan.options | {"lease_ttl": 4.0, "dead_after": 0.9, "reap_interval": 0.5},
    )  # fmt: skip


FOCUS = {
    "trust": _slow_beats,
    "moved": _back_again,
    "consume": large.FOCUS["consume"],
    "keyed steps": large.FOCUS["keyed steps"],
    "long trust": _cut_and_restarted,
    "no control": large.FOCUS["no control"],
    **{name: plan for name, plan in large.FOCUS.items() if plan is large._commanded or plan is large.graphs},
}
"""Rules that few schedules lean on: plans that do."""


@attrs.frozen
class Breakage:
    """One broken rule."""

    name: str
    text: str

    def plan(self, seed: int) -> Plan:
        """A schedule in which it can show."""
        plan = make_plan(seed)
        return FOCUS[self.name](attrs.evolve(plan, orders=())) if self.name in FOCUS else plan

    @contextmanager
    def applied(self, plan: Plan) -> Iterator[frozenset[str]]:
        """Break it; yields what the store must leave out."""
        large.options.clear()
        large.options.update(plan.options)
        if self.name in STORE:
            yield frozenset({self.name})
        else:
            with NODE[self.name][1]():
                yield frozenset()

    def simulate(self, plan: Plan) -> Any:
        with self.applied(plan) as broken:
            return simulate(plan, broken, patience=150.0 if self.name in FOCUS else 60.0)


BREAKAGES = [Breakage(name, text) for name, text in STORE.items()] + [
    Breakage(name, text) for name, (text, _) in NODE.items()
]


def first_noticed(breakage: Breakage, most: int, first: int = 0) -> Any:
    """The first schedule that notices it, of so many; None: nobody did."""
    for seed in range(first, first + most):
        report = breakage.simulate(breakage.plan(seed))
        if report.violation is not None:
            return report
    return None
