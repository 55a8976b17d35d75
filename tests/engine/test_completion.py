"""`Completion.settle` as a table: a verdict, and what follows for the claim, the queue and the node."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import attrs
import psycopg
import pytest
from durable_actors._engine.claims import ActiveClaim
from durable_actors._engine.committing.completion import Completion
from durable_actors._engine.committing.queue import Commits, PendingCommit, Release
from durable_actors._engine.committing.verdicts import STALE, Refused, Verdict
from durable_actors._store.children import Spawn
from durable_actors._store.holds import OFFERED
from durable_actors._store.rows import Committed, Transition
from durable_actors.otp import Address
from durable_actors.telemetry import ClaimLost, OutcomeLate, OutcomeStale, StepCommitted
from tests.engine.kit import claim

NOW = 100.0
REFUSED = Refused(psycopg.errors.RaiseException("not on a Monday"))
AHEAD = Committed(visit=2, status="executing", state=b'{"n": 1}', inbox=False)


def committed(status: Any) -> Committed:
    return Committed(visit=1, status=status)


class Owner:
    """Notes what `Completion` asks of a dispatcher."""

    def __init__(self, *, can_recover: bool = True) -> None:
        self.calls: list[str] = []
        self.can_recover = can_recover

    def continue_on_claim(self, active: ActiveClaim, now: float) -> None:
        assert now == NOW
        self.calls.append("continue")

    def finish(self, active: ActiveClaim, now: float) -> None:
        assert now == NOW
        self.calls.append("finish")

    def recover(self, pending: PendingCommit, now: float) -> bool:
        assert now == NOW
        assert pending.refusal is REFUSED.error
        self.calls.append("recover")
        return self.can_recover

    def abandon(self, active: ActiveClaim) -> None:
        self.calls.append("abandon")


class World:
    """A `Completion` whose node, queue and owner note what they are asked for."""

    def __init__(
        self, *, can_recover: bool = True, draining: bool = False, thread_left: bool = False
    ) -> None:
        self.owner = Owner(can_recover=can_recover)
        self.events: list[Any] = []
        self.hints: list[Any] = []
        self.told: list[int] = []
        self.node: Any = SimpleNamespace(
            telemetry=SimpleNamespace(active=True, emit=self.events.append),
            threads=SimpleNamespace(is_left=lambda claim: thread_left),
            draining=SimpleNamespace(value=draining),
            catalog=SimpleNamespace(find=lambda name, version: None),
            on_final=lambda number: self.hints.append(("final", number)),
            notify=lambda queue, **options: self.hints.append((queue, options)),
            expect_deadline=lambda queue: self.hints.append(("deadline", queue)),
            wakeups=SimpleNamespace(add=self.told.extend),
        )
        self.commits = Commits(Address("flusher", capacity=1))
        self.completion = Completion(self.node, self.commits, {"default": self.owner})
        self.commits.settle_with(self.completion.settle)

    def settle(self, pending: PendingCommit, verdict: Verdict | None) -> None:
        self.completion.settle(pending, verdict, NOW)

    @property
    def emitted(self) -> list[type]:
        return [type(event) for event in self.events]


def pending(
    *,
    status: Any = "done",
    error: Exception | None = None,
    final: bool = False,
    lost: str | None = None,
    interrupted: str | None = None,
    trusted_until: float = 1e9,
    **change: Any,
) -> PendingCommit:
    active = ActiveClaim(claim(None, 7, trusted_until=trusted_until))
    active.lost, active.interrupted = lost, interrupted
    made = PendingCommit(active, None, Transition(active.claim, status, "next", 0, **change), "Done", error)
    made.final = final
    return made


ATTEMPT, UNCHANGED, NONE = Release(1, OFFERED), Release(0, OFFERED, 1), None
ERROR = ValueError("went through handle")


@attrs.frozen(kw_only=True)
class Case:
    """What is settled, and what follows."""

    verdict: Verdict | None
    given: dict[str, Any] = attrs.Factory(dict)
    world: dict[str, Any] = attrs.Factory(dict)
    calls: list[str]
    emitted: list[type] = attrs.Factory(list)
    released: Release | None = None
    queued: int = 0


CASES = {
    "committed: done": Case(verdict=committed("done"), calls=["finish"], emitted=[StepCommitted]),
    "committed: runnable": Case(verdict=committed("runnable"), calls=["finish"], emitted=[StepCommitted]),
    "committed: parked": Case(
        verdict=committed("awaiting_signal"), calls=["finish"], emitted=[StepCommitted]
    ),
    "committed: runs ahead": Case(verdict=AHEAD, calls=["continue"], emitted=[StepCommitted]),
    # The row is read back after an unknown commit: its state is not known here.
    "committed: executing, state unknown": Case(
        verdict=committed("executing"), calls=["finish"], emitted=[StepCommitted]
    ),
    "committed: after its lease": Case(
        verdict=committed("done"),
        given={"trusted_until": NOW - 1},
        calls=["finish"],
        emitted=[StepCommitted, OutcomeLate],
    ),
    "committed: its claim seemed lost": Case(
        verdict=committed("done"), given={"lost": "x"}, calls=["finish"], emitted=[StepCommitted]
    ),
    "committed: the plain failure": Case(
        verdict=committed("failed"),
        given={"final": True, "error": ERROR},
        calls=["finish"],
        emitted=[StepCommitted],
    ),
    "stale": Case(verdict=STALE, calls=["finish"], emitted=[OutcomeStale]),
    "stale: the plain failure": Case(
        verdict=STALE, given={"final": True, "error": ERROR}, calls=["finish"], emitted=[OutcomeStale]
    ),
    "refused": Case(verdict=REFUSED, calls=["recover"]),
    "refused: handle cannot run": Case(
        verdict=REFUSED, world={"can_recover": False}, calls=["recover", "finish"], released=ATTEMPT
    ),
    "refused: handle cannot run, in a drain": Case(
        verdict=REFUSED,
        world={"can_recover": False, "draining": True},
        calls=["recover", "finish"],
        released=UNCHANGED,
    ),
    "refused: handle cannot run, for the claim is lost": Case(
        verdict=REFUSED,
        given={"lost": "x"},
        world={"can_recover": False},
        calls=["recover", "finish"],
        emitted=[ClaimLost],
    ),
    "refused twice": Case(verdict=REFUSED, given={"error": ERROR}, calls=[], queued=1),
    "refused twice, in a drain": Case(
        verdict=REFUSED, given={"error": ERROR}, world={"draining": True}, calls=[], queued=1
    ),
    "refused: the plain failure, too": Case(
        verdict=REFUSED, given={"final": True, "error": ERROR}, calls=["finish"]
    ),
    "withdrawn: lost": Case(verdict=None, given={"lost": "x"}, calls=["finish"], emitted=[ClaimLost]),
    "withdrawn: lost, in a drain": Case(
        verdict=None, given={"lost": "x"}, world={"draining": True}, calls=["finish"], emitted=[ClaimLost]
    ),
    "withdrawn: by a drain": Case(
        verdict=None, world={"draining": True}, calls=["finish"], released=UNCHANGED
    ),
    "withdrawn: interrupted, in a drain": Case(
        verdict=None,
        given={"interrupted": "x"},
        world={"draining": True},
        calls=["finish"],
        emitted=[ClaimLost],
        released=ATTEMPT,
    ),
    "withdrawn: by a drain, after its lease": Case(
        verdict=None,
        given={"trusted_until": NOW},
        world={"draining": True},
        calls=["finish"],
        emitted=[ClaimLost],
        released=ATTEMPT,
    ),
    "withdrawn: the plain failure, by a drain": Case(
        verdict=None,
        given={"final": True, "error": ERROR},
        world={"draining": True},
        calls=["finish"],
        released=UNCHANGED,
    ),
    "withdrawn: a thread outlives the engine": Case(
        verdict=None, world={"draining": True, "thread_left": True}, calls=["abandon", "finish"]
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
async def test_what_follows_a_verdict(case: Case):
    world = World(**case.world)
    outcome = pending(**case.given)
    world.settle(outcome, case.verdict)
    assert world.owner.calls == case.calls
    assert world.emitted == case.emitted
    assert dict(world.commits.releases) == (
        {} if case.released is None else {case.released: [outcome.active.claim]}
    )
    assert len(world.commits.entries) == case.queued


async def test_a_step_that_runs_ahead_sees_what_is_stored():
    world, outcome = World(), pending(status="runnable", keep_claim=True)
    world.settle(outcome, AHEAD)
    entered = outcome.active.claim
    assert (entered.step, entered.visit, entered.state, entered.inbox) == ("next", 2, b'{"n": 1}', False)


@pytest.mark.parametrize("refusal", [None, psycopg.errors.CheckViolation("the first one")])
async def test_the_plain_failure_is_the_last_attempt_and_names_the_first_refusal(refusal):
    world, outcome = World(), pending(error=ERROR)
    outcome.refusal = refusal
    world.settle(outcome, REFUSED)
    [plain] = world.commits.entries
    assert (plain.active, plain.final, plain.run, plain.outcome) == (outcome.active, True, None, "Stop")
    assert plain.transition.status == "failed"
    assert plain.error is (refusal or REFUSED.error)
    assert str(refusal or "not on a Monday") in plain.transition.last_error
    assert plain.open
    assert not plain.unknown


PLANS = [SimpleNamespace(machine="m", queue="a", priority=p) for p in (1, 1, 2)]


@pytest.mark.parametrize(
    ("status", "change", "hints", "told"),
    [
        ("done", {}, [("final", 7)], []),
        ("failed", {}, [("final", 7)], []),
        ("runnable", {}, [("default", {"instance_id": 7})], [7]),
        ("runnable", {"delay": 1.0}, [], [7]),
        ("awaiting_signal", {}, [], []),
        ("awaiting_signal", {"timeout": 1.0}, [("deadline", "default")], []),
        ("executing", {}, [], []),
    ],
)
async def test_who_is_notified(status, change, hints, told):
    world = World()
    world.settle(pending(**change), committed(status))
    assert (world.hints, world.told) == (hints, told)


@pytest.mark.parametrize("timeout", [None, 1.0])
async def test_each_queue_and_priority_of_children_is_notified_once(timeout):
    world, outcome = World(), pending(status="awaiting_children")
    outcome.spawn = Spawn(PLANS, then="end", quorum=None, wake_on_failure=False, timeout=timeout)  # type: ignore[arg-type]
    world.completion.report(outcome, Committed(2, "awaiting_children", children=[8, 9, 10]), NOW)
    deadline = [] if timeout is None else [("deadline", "default")]
    children = [("a", {"priority": 1}), ("a", {"priority": 2})]
    assert sorted(world.hints, key=str) == sorted(deadline + children, key=str)
    assert world.told == [8, 9, 10]
    assert world.owner.calls == [], "the task that committed them ends the claim"


class Away(logging.Handler):
    """A user's handler of log records that fails."""

    def __init__(self, calls: list[str]) -> None:
        super().__init__()
        self.calls = calls

    def emit(self, record: logging.LogRecord) -> None:
        self.calls.append(record.levelname)
        raise OSError("the log server is away")


@pytest.mark.parametrize(
    "name", [name for name, case in CASES.items() if case.verdict is not None or case.emitted]
)
async def test_a_log_handler_that_raises_changes_nothing_for_the_claim(name):
    """Nothing escapes to the flusher, the owner is asked for the same, and what is released or queued is, too."""
    case = CASES[name]
    world = World(**case.world)
    outcome = pending(**case.given)
    log, handler = logging.getLogger("durable_actors.engine"), Away([])
    log.addHandler(handler)
    try:
        world.settle(outcome, case.verdict)
    finally:
        log.removeHandler(handler)
    assert handler.calls or isinstance(case.verdict, Committed)
    assert world.owner.calls == case.calls
    assert list(world.commits.releases) == ([] if case.released is None else [case.released])
    assert len(world.commits.entries) == case.queued


@pytest.mark.parametrize("verdict", [REFUSED, STALE, None, committed("done"), AHEAD], ids=str)
async def test_a_bug_of_ours_does_not_keep_the_claim(verdict, monkeypatch, caplog):
    def bug(*args, **options):
        raise RuntimeError("a bug")

    world, outcome = World(), pending()
    monkeypatch.setattr(world.owner, "recover", bug)
    for name in ("_committed", "report", "interrupted"):
        monkeypatch.setattr(world.completion, name, bug)
    world.settle(outcome, verdict)
    assert world.owner.calls == ["continue" if verdict is AHEAD else "finish"]
    assert caplog.text.count("the follow-up of its outcome failed") == 1
