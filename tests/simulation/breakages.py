"""Rules of the engine and of the store, broken on purpose one at a time: the checks must notice each.

`STORE` are rules that a statement leaves out (see `statements`); `ENGINE` are patches of the engine's own code.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import attrs
import trio
from durable_actors._engine import claims
from durable_actors._engine.claiming import planner, stats_refresh
from durable_actors._engine.committing import transition
from durable_actors._engine.committing.queue import Commits, PendingCommit
from durable_actors._engine.maintenance import control, failure_detector as dead_nodes, reaper, schedules
from durable_actors._store.rows import Committed, Transition
from tests.simulation.driver import Rates
from tests.simulation.plan import Clockwork, Item, Order, Plan, Strike, make_plan

STORE: dict[str, str] = {
    "fence": "a commit compares neither claim nor visit",
    "visit": "a commit compares the claim alone: what is repeated after an unknown fate is written twice",
    "lease": "a commit that was to be refused after its lease is not",
    "double claim": "a pick takes rows that are executing",
    "rev": "a claim does not count as a move",
    "renewals": "a renewal is confirmed but not written: the reaper ignores it",
    "moved": "a node that was found dead loses its claims, though it has renewed them since",
    "strays": "the release of unknown claims takes the known ones, too",
    "recheck": "a park does not look again for signals that came while the step ran",
    "wake": "a signal is stored, but does not wake who awaits it",
    "consume": "signals are consumed by outcomes that were stale",
    "consume more": "a commit consumes signals that its step never saw",
    "dedup": "a signal that is sent again is stored again",
    "join": "the end of the last child does not wake its parent",
    "deletes live rows": "retention deletes what it looks at",
    "deletes children": "retention deletes children that their parent has not read",
    "overrule": "a step that was asked to end commits what it likes",
    "release asked": "who gives back an instance that was asked to end lets it run again",
    "reap asked": "the same, when its node is dead",
    "uncounted cancel": "the end of a cancelled child is not counted at the barrier",
    "counts requests": "a child that is asked to end is counted before it has ended",
    "receipt": "a command leaves no receipt: what is repeated is done again",
    "pauses": "a pick does not look whether its queue is paused",
    "paused ahead": "a step that was asked to pause runs ahead",
    "cuts too far": "retention deletes the snapshot, too, behind which it deletes records",
    "unrecorded wake": "the wake by a signal that was there before the park leaves no record",
    "early": "a dependent runs when the first of those that it comes after has ended",
    "told again": "what is repeated after an unknown fate is told twice, and counted twice",
    "untold": "the end of an instance is not told to those that come after it",
    "forgets failures": "what comes after a failure runs",
    "slots": "a pick does not count who has the slots of a limit",
    "charge": "a pick charges nothing for what it claims",
    "thaw": "throttled rows whose token has come are not found again",
    "turned twice": "who turns a schedule does not compare its revision",
    "unrecorded slot": "a slot that fires leaves no record",
    "unsaid": "the record of an outcome that was accepted after its lease does not say so",
}


options: dict[str, Any] = {}
"""Those of the plan that is broken right now."""


def as_committed(change: Transition) -> Committed:
    """What the commit of this outcome would answer."""
    status = "executing" if change.keep_claim else change.status
    return Committed(change.claim.visit + change.advance, status, change.state or change.claim.state)


_settled: set[int] = set()


def _settle_early(original: Any, self: Commits, pending: PendingCommit) -> None:
    """Let the instance continue as if its outcome were committed, then commit it."""
    change = pending.transition
    if change.keep_claim:
        pending.transition = attrs.evolve(change, claim=attrs.evolve(change.claim))
        assert self._settle is not None
        self._settle(pending, as_committed(change), trio.current_time())
        _settled.add(id(pending))
    original(self, pending)


def _answer_once(original: Any, self: Commits, pending: PendingCommit, *args: Any) -> None:
    if id(pending) in _settled:
        _settled.remove(id(pending))
        pending.open = False
    original(self, pending, *args)


@contextmanager
def _proceed() -> Iterator[None]:
    _settled.clear()
    with (
        patch.object(Commits, "enqueue", _around(_settle_early, Commits.enqueue)),
        patch.object(Commits, "answer", _around(_answer_once, Commits.answer)),
    ):
        yield


def _trust_from_reply(original: Any, self: claims.ActiveClaims, renewed: Any, trusted_until: float) -> None:
    original(self, renewed, trio.current_time() + options["lease_ttl"])


def _around(wrapper: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """`wrapper(original, self, ...)` as a method."""
    return lambda self, *args, **options: wrapper(original, self, *args, **options)


def _patch(target: Any, name: str, value: Any) -> Callable[[], Any]:
    return partial(patch.object, target, name, value)


async def _no_reaping(self: reaper.Reaper) -> float:
    await trio.lowlevel.checkpoint()
    return 1.0


async def _no_look(self: control.Control) -> None:
    await trio.lowlevel.checkpoint()


async def _no_turn(self: schedules.Schedules, conn: Any, found: Any) -> None:
    await trio.lowlevel.checkpoint()


def _dead_at_once(*args: Any, **options: Any) -> dead_nodes.Judgement:
    return dead_nodes.judge_owners(*args, **{**options, "dead_after": -1.0})


def _stays_postponed(original: Any, self: stats_refresh.StatsRefresh, begun: int, now: float) -> None:
    postponed = self.postponed
    original(self, begun, now)
    self.postponed = postponed


def _no_deadlines(original: Any, self: planner.ClaimPlanner, shape: Any, now: float) -> None:
    original(self, shape, now)
    self._deadline = math.inf


def _endless(renewed: Any) -> None:
    for active in renewed:
        active.claim.trusted_until = math.inf
        if active.task is not None:
            active.task.deadline = math.inf


def _park_all(original: Callable[..., Transition], *args: Any, **options: Any) -> Transition:
    change = original(*args, **options)
    change.consumed, change.kept = (*change.consumed, *change.kept), ()
    return change


ENGINE: dict[str, tuple[str, Callable[[], Any]]] = {
    "refunds": (
        "tokens of steps that have begun are given back, too",
        _patch(
            Commits,
            "release",
            lambda self, claim, original=Commits.release, **how: original(self, claim, **{**how, "began": False}),
        ),
    ),
    "no turn": ("no node fires the slots of a schedule", _patch(schedules.Schedules, "_turn", _no_turn)),
    "proceed": (
        "an instance goes on before its outcome is committed",
        _proceed,
    ),
    "trust": (
        "the trust in a lease counts from the reply",
        _patch(claims.ActiveClaims, "extend", _around(_trust_from_reply, claims.ActiveClaims.extend)),
    ),
    "no deadline": (
        "a step's scope has no deadline: it runs on when its lease cannot be renewed",
        _patch(claims.ActiveClaims, "extend", lambda self, renewed, until: _endless(renewed)),
    ),
    "keyed steps": (
        "steps with a partition key go on when the session with its lock is lost",
        _patch(claims.ActiveClaims, "interrupt", lambda self, active, why: False),
    ),
    "no reaper": ("nobody takes back what the dead have left", _patch(reaper.Reaper, "_round", _no_reaping)),
    "dead at once": (
        "a node is dead when its lock is seen free once",
        _patch(reaper, "judge_owners", _dead_at_once),
    ),
    "old statistics": (
        "an idle feeder sleeps until a refresh of its statistics that is over: it asks without a pause",
        _patch(stats_refresh.StatsRefresh, "done", _around(_stays_postponed, stats_refresh.StatsRefresh.done)),
    ),
    "no control": ("a node never learns what is asked of it", _patch(control.Control, "_look", _no_look)),
    "no awaits": (
        "deadlines of awaits are never looked at",
        _patch(planner.ClaimPlanner, "refreshed", _around(_no_deadlines, planner.ClaimPlanner.refreshed)),
    ),
    "consume all": (
        "a park consumes what it should keep",
        _patch(transition, "_park", partial(_park_all, transition._park)),
    ),
}  # fmt: skip


def limited(plan: Plan) -> Plan:
    """Instances that share a rate and a slot; nodes that die, and whose claims have more than they can start."""
    items = tuple(
        Item(f"meter-{n}", "meter", 0.05 * n, 5, 0.3, journal="full" if n % 2 else "off", tenant="a")
        for n in range(7)
    )
    strikes = tuple(Strike(0.8 + 0.6 * n, ("crash", "drain")[n % 2], n % 2, 0.5) for n in range(4))
    return attrs.evolve(plan, nodes=2, concurrency=2, items=items, strikes=strikes, rates=Rates(), lasts=4.0)


def clocked(plan: Plan) -> Plan:
    """A schedule, and three nodes whose messages are slow, so that they decide about the same slots."""
    work = Clockwork(1.0, 6, "allow", "all", 0.1)
    items = (Item("chain-0", "chain", 0.1, 2, 0.1),)
    rates = Rates(lag=0.3, lost_reply=0.05)
    return attrs.evolve(plan, nodes=3, items=items, strikes=(), rates=rates, clockwork=work, lasts=4.0)


def _long_steps(plan: Plan) -> Plan:
    """Steps that outlast their leases, nodes that are cut off."""
    lease = plan.options["lease_ttl"]
    items = [Item(f"chain-{n}", "chain", 0.1 * n, 2, lease * 8) for n in range(3)]
    strikes = [Strike(1.0 + n, "cut", n % plan.nodes, lease * 1.5) for n in range(3)]
    return attrs.evolve(plan, items=tuple(items), strikes=tuple(strikes), rates=Rates(lag=0.05))


def _keyed(plan: Plan) -> Plan:
    """Siblings of one key, leases longer than the server's patience with a silent host."""
    plan = _long_steps(
        attrs.evolve(plan, nodes=3, options={**plan.options, "lease_ttl": 8.0, "dead_after": 0.5})
    )
    strikes = tuple(Strike(1.0 + n, "cut", n, 12.0) for n in range(2))
    items = tuple(attrs.evolve(item, key="red", nap=20.0) for item in plan.items)
    return attrs.evolve(plan, items=items, strikes=strikes, lasts=20.0)


def _late(plan: Plan) -> Plan:
    """Messages that are slower than leases, and reapers that are slower still."""
    plan = _long_steps(plan)
    options = {**plan.options, "late_commit": "reject", "reap_interval": 5.0}
    rates = Rates(slow=0.3, delay=plan.options["lease_ttl"] * 2)
    items = tuple(attrs.evolve(item, nap=0.5, size=4) for item in plan.items)
    return attrs.evolve(plan, items=items, strikes=(), options=options, rates=rates)


def _accepted_late(plan: Plan) -> Plan:
    """The same, but late outcomes are accepted; and every move is recorded."""
    plan = _late(plan)
    return attrs.evolve(plan, options={**plan.options, "late_commit": "accept", "journal": "full"})


def _stale(plan: Plan) -> Plan:
    """Outcomes that arrive when their claim is somebody else's, with signals in their hands."""
    parcels = [tuple(range(n * 100, n * 100 + 20)) for n in range(4)]
    items = tuple(
        Item(f"collector-{n}", "collector", 0.1 * n, 20, 0.1, parcels=each, sent=each)
        for n, each in enumerate(parcels)
    )  # fmt: skip
    options = {**plan.options, "lease_ttl": 1.0, "reap_interval": 0.5}
    rates = Rates(slow=0.2, delay=3.0)
    return attrs.evolve(plan, nodes=2, items=items, strikes=(), rates=rates, options=options, lasts=10.0)


def _unknown(plan: Plan) -> Plan:
    """Commits whose replies are lost, of instances that run ahead."""
    items = tuple(Item(f"chain-{n}", "chain", 0.1 * n, 6, 0.01) for n in range(4))
    return attrs.evolve(plan, items=items, strikes=(), rates=Rates(lost_reply=0.2))


def _back_again(plan: Plan) -> Plan:
    """Servers that restart, again and again, under leases that are long; a node that comes back late."""
    plan = _long_steps(attrs.evolve(plan, nodes=3, concurrency=2, lasts=9.0))
    options = {**plan.options, "lease_ttl": 8.0, "dead_after": 0.5, "reap_interval": 0.5}
    restarts = [Strike(1.0 + 2.0 * n, "restart", 0, 0.2) for n in range(4)]
    cuts = [Strike(1.0 + 2.0 * n, "cut", n % 3, 0.8 + plan.seed % 10 * 0.1) for n in range(4)]
    rates = Rates(lag=0.15)
    return attrs.evolve(plan, options=options, strikes=(*restarts, *cuts), rates=rates)


def _idle(plan: Plan) -> Plan:
    """Slow answers, and next to nothing to do."""
    items = (Item("chain-0", "chain", 0.1, 3, 10.0), Item("sleeper-1", "sleeper", 0.5, 1, 0.1))
    return attrs.evolve(plan, nodes=2, items=items, strikes=(), rates=Rates(lag=0.05), lasts=3.0)


def _killed(plan: Plan) -> Plan:
    """Nodes that die with work in their hands, and families."""
    items = tuple(Item(f"family-{n}", "family", 0.1 * n, 2, 0.5) for n in range(3))
    strikes = tuple(Strike(0.5 + 0.3 * n, "crash", n % 2, 1.0) for n in range(4))
    return attrs.evolve(plan, nodes=2, items=items, strikes=strikes, rates=Rates(), lasts=3.0)


def _commanded(plan: Plan) -> Plan:
    """Steps that take their time, a family, nodes that die; an operator who cancels and retries all of it."""
    items = [
        *(Item(f"chain-{n}", "chain", 0.1 * n, 3, 1.5) for n in range(2)),
        *(Item(f"family-{n}", "family", 0.0, 2, 0.5) for n in range(2)),
        Item("stuck-0", "stuck", 0.1, 1, 0.1),
    ]
    orders = [
        *(Order(0.3 + 0.3 * n, "cancel", "chain-0", again=True) for n in range(3)),
        *(Order(0.4 + 0.3 * n, "retry", "chain-0", again=True) for n in range(3)),
        Order(0.5, "cancel", "chain-1"),
        *(Order(0.2 + 0.2 * n, "cancel", f"family-{m}", child=True) for n in range(4) for m in range(2)),
        Order(0.4, "cancel", "stuck-0"),
    ]
    strikes = tuple(Strike(0.5 + 0.25 * n, "crash", n % 2, 0.5) for n in range(4))
    plan = attrs.evolve(plan, nodes=2, items=tuple(items), orders=tuple(orders), strikes=strikes, lasts=3.0)
    return attrs.evolve(plan, rates=Rates(lost_reply=0.1))


def _paused(plan: Plan) -> Plan:
    """Chains, whose steps follow each other; an operator who pauses them, and their queue."""
    items = tuple(Item(f"chain-{n}", "chain", 0.1 * n, 6, 0.5) for n in range(4))
    orders = [Order(0.2 + 0.2 * n, "pause", f"chain-{n % 4}", rest=1.0) for n in range(8)]
    orders.append(Order(0.3, "pause_queue", "chain-0", rest=2.0))
    return attrs.evolve(plan, items=items, orders=tuple(orders), strikes=(), rates=Rates(), lasts=3.0)


def _asked(plan: Plan) -> Plan:
    """A step that does not end, until it is asked to."""
    items, orders = (Item("stuck-0", "stuck", 0.1, 1, 0.1),), (Order(3.0, "cancel", "stuck-0"),)
    return attrs.evolve(plan, items=items, orders=orders, strikes=(), rates=Rates(), lasts=3.0)


def graphs(plan: Plan) -> Plan:
    """Graphs, of which each second one fails; nodes that die, and replies that are lost."""
    items = tuple(
        Item(f"graph-{n}", "graph", 0.1 * n, 7 + n, 0.2, journal="off" if n % 3 else "full") for n in range(6)
    )
    strikes = tuple(Strike(0.5 + 0.4 * n, "crash", n % 2, 1.0) for n in range(3))
    return attrs.evolve(plan, nodes=2, items=items, strikes=strikes, rates=Rates(lost_reply=0.1), lasts=4.0)


FOCUS: dict[str, Callable[[Plan], Plan]] = {
    "fence": _unknown, "visit": _unknown, "lease": _late, "renewals": _long_steps, "moved": _back_again,
    "consume": _stale, "consume more": _stale, "join": _killed, "trust": _long_steps, "no deadline": _long_steps,
    "keyed steps": _keyed, "no reaper": _killed, "dead at once": _back_again, "old statistics": _idle,
    "overrule": _commanded, "release asked": _commanded, "reap asked": _commanded, "uncounted cancel": _commanded,
    "counts requests": _commanded, "receipt": _commanded, "no control": _asked,
    "pauses": _paused, "paused ahead": _paused, "no awaits": _idle, "unrecorded wake": _stale, "unsaid": _accepted_late,
    "slots": limited, "charge": limited, "thaw": limited, "refunds": limited,
    "turned twice": clocked, "unrecorded slot": clocked, "no turn": clocked,
    "early": graphs, "told again": graphs, "untold": graphs, "forgets failures": graphs,
}  # fmt: skip
"""Rules that few schedules lean on: plans that do."""


@attrs.frozen
class Breakage:
    """One broken rule."""

    name: str
    text: str

    @property
    def patience(self) -> float:
        """Virtual seconds after which something is called lost; the plans that lean on it have steps that are long."""
        return 150.0 if self.name in FOCUS else 40.0

    def plan(self, seed: int) -> Plan:
        """A schedule in which it can show."""
        plan = make_plan(seed)
        return FOCUS[self.name](attrs.evolve(plan, orders=(), clockwork=None)) if self.name in FOCUS else plan

    @contextmanager
    def applied(self, plan: Plan) -> Iterator[frozenset[str]]:
        """Break it; yields what the store must leave out."""
        options.clear()
        options.update(plan.options)
        if self.name in STORE:
            yield frozenset({self.name})
        else:
            with ENGINE[self.name][1]():
                yield frozenset()


BREAKAGES = [Breakage(name, text) for name, text in STORE.items()] + [
    Breakage(name, text) for name, (text, _) in ENGINE.items()
]
