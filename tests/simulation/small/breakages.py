"""Rules broken on purpose, one at a time: the small simulation must notice each.

Of the store's rules, what a statement leaves out (`tests.simulation.statements`); of the nodes', patches: of the
product's pure parts, and of the loops around them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import attrs
import trio
from durable_actors._engine import claims as leases
from durable_actors._engine.claiming import cursor, demand
from durable_actors._engine.committing import transition
from durable_actors._engine.committing.verdicts import Refused
from durable_actors._engine.maintenance.failure_detector import judge_owners
from durable_actors._engine.running import slots, step_task
from durable_actors._store.rows import Committed
from durable_actors.otp._restart import Leave
from tests.simulation import breakages as large
from tests.simulation.driver import Rates
from tests.simulation.plan import Plan
from tests.simulation.small import feeder, host, loops
from tests.simulation.small.plan import make_plan
from tests.simulation.small.run import simulate

STORE = large.STORE
_patch = large._patch


def _trust_from_reply(self: loops.Heartbeat, sent: float) -> float:
    return self.host.now() + self.host.node.owner.lease_ttl


async def _nothing(self: Any) -> float:
    await trio.lowlevel.checkpoint()
    return 1.0


async def _fails(self: loops.Flusher, batch: list[Any], error: Exception) -> None:
    await trio.lowlevel.checkpoint()
    for entry in batch:
        entry.answer(Refused(error))  # type: ignore[arg-type]


async def _done(self: loops.Flusher, batch: list[Any], error: Exception) -> None:
    await trio.lowlevel.checkpoint()
    for entry in batch:
        change = entry.transition
        status = "executing" if change.keep_claim else change.status
        entry.answer(
            Committed(change.claim.visit + change.advance, status, change.state or change.claim.state)
        )


def _dead_at_once(*args: Any, **options: Any) -> Any:
    return judge_owners(*args, **{**options, "dead_after": -1.0})


def _restart_proves(watch: Any, owners: Any, **options: Any) -> Any:
    owners = [attrs.evolve(each, server_up=1e9) for each in owners]
    return judge_owners(watch, owners, **{**options, "session": None, "dead_after": 0.0})


def _wrong_clock(self: host.Ticket) -> None:
    """The deadline taken for one of the server's clock."""
    self.scope.deadline = float("inf") if self.host.paused else self._deadline


def _no_kept(original: Callable[..., Any], *args: Any, **options: Any) -> Any:
    change = original(*args, **options)
    change.kept = ()
    return change


def _no_reset(original: Callable[..., None], self: Any, *args: Any, **options: Any) -> None:
    original(self, *args, **options)
    self._reset_at = float("inf")


async def _no_deadlines(original: Callable[..., Any], self: feeder.Feeder, conn: object) -> None:
    await original(self, conn)
    self.deadline = float("inf")


def _method(wrapper: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, *args, **options: wrapper(original, self, *args, **options)


def _greedy(limits: demand.QueueLimits, *, running: int, buffered: int) -> int:
    return limits.concurrency + limits.prefetch


NODE: dict[str, tuple[str, Callable[[], Any]]] = {
    "proceed": (
        "an instance goes on before its outcome is committed",
        _patch(step_task.StepTasks, "_leave", large._around(large._leave_early, step_task.StepTasks._leave)),
    ),
    "trust": (
        "the trust in a lease counts from the reply",
        _patch(loops.Heartbeat, "trusted_until", _trust_from_reply),
    ),
    "no renewal": ("leases are not renewed", _patch(loops.Heartbeat, "beat", _nothing)),
    "no deadline": (
        "a step's scope has no deadline: it runs on when its lease cannot be renewed",
        _patch(host.Ticket, "apply", lambda self: None),
    ),
    "wrong clock": (
        "the end of the trust is read on another clock than the node's",
        _patch(host.Ticket, "apply", _wrong_clock),
    ),
    "keyed steps": (
        "steps with a key go on when the session with its lock is lost",
        _patch(leases.ActiveClaims, "interrupt", lambda self, held, why: False),
    ),
    "no reaper": ("nobody takes back what the dead have left", _patch(loops.Reaper, "round", _nothing)),
    "dead at once": ("a node is dead when its lock is seen free once", _patch(loops, "judge_owners", _dead_at_once)),
    "restart proves": ("locks that a restart has freed prove death", _patch(loops, "judge_owners", _restart_proves)),
    "unknown failed": ("a commit of unknown fate counts as refused", _patch(loops.Flusher, "_away", _fails)),
    "unknown done": ("a commit of unknown fate counts as done", _patch(loops.Flusher, "_away", _done)),
    "no awaits": (
        "deadlines of awaits are never looked at",
        _patch(feeder.Feeder, "_learn", _method(_no_deadlines, feeder.Feeder._learn)),
    ),
    "consume all": (
        "a park consumes what it should keep",
        _patch(transition, "_park", partial(large._park_all, transition._park)),
    ),
    "no kept": (
        "a park is woken by what its step has seen and kept",
        _patch(transition, "_park", partial(_no_kept, transition._park)),
    ),
    "no reset": (
        "a pick never begins at the head again",
        _patch(cursor.PickCursor, "advance", _method(_no_reset, cursor.PickCursor.advance)),
    ),
    "no free slot": ("a step takes a slot that is not there", _patch(slots.Slots, "free", property(lambda self: True))),
    "greedy": ("a feeder claims more than it may hold", _patch(slots, "demand", _greedy)),
    "no restart": ("an actor that died stays dead", _patch(host, "decide", lambda *args, **options: Leave())),
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


FOCUS = {
    "trust": _slow_beats,
    "moved": _back_again,
    "consume": large.FOCUS["consume"],
    "keyed steps": large.FOCUS["keyed steps"],
}
"""Rules that few schedules lean on: plans that do."""


@attrs.frozen
class Breakage:
    """One broken rule."""

    name: str
    text: str

    def plan(self, seed: int) -> Plan:
        """A schedule in which it can show."""
        return FOCUS.get(self.name, lambda plan: plan)(make_plan(seed))

    @contextmanager
    def applied(self) -> Iterator[frozenset[str]]:
        """Break it; yields what the store must leave out."""
        if self.name in STORE:
            yield frozenset({self.name})
        else:
            with NODE[self.name][1]():
                yield frozenset()

    def simulate(self, plan: Plan) -> Any:
        with self.applied() as broken:
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
