"""The store's own SQL against a model in plain Python, driven by Hypothesis.

More examples: DURABLE_MODEL_EXAMPLES=500 pytest tests/model
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import durable_actors as da
import psycopg
import pytest
from durable_actors._engine.committing.transition import plan_children, transition
from durable_actors._store.children import schedule_children
from durable_actors._store.claim import release_claims
from durable_actors._store.commit import commit_outcomes
from durable_actors._store.insert import insert_instances
from durable_actors._store.lease import reap_claims
from durable_actors._store.rows import Claim
from durable_actors._store.signal import expire_awaits, read_inboxes, send_signals
from durable_actors.machine import Outcome, ScheduleChildren, Signal, current_registry, plan_insert
from hypothesis import HealthCheck, settings, strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)
from tests.model.portal import Portal, open_portal
from tests.model.world import Hold, Letter, Row, World
from tests.store.kit import SCHEMA, pick
from tests.store.stepping import deliver

NAMES = ("x", "y")
STEPS = ("start", "a", "b")
EXAMPLES = int(os.environ.get("DURABLE_MODEL_EXAMPLES", "15"))
ROWS = (
    "select id, status::text, step, visit, attempt, crashes, eligible_at <= now(), awaits, await_step,"
    " await_deadline is not null, children_pending, children_total, claim_id::text, parent_id, barrier, rev, round"
    " from durable.gen_durable order by id"
)
EXPIRE = "update durable.gen_durable set lease_expires_at = now() - interval '1 s' where id = any (%s)"
PASS_DEADLINE = "update durable.gen_durable set await_deadline = now() - interval '1 s' where id = any (%s)"

names = st.lists(st.sampled_from(NAMES), min_size=1, max_size=2, unique=True)
OUTCOMES = ("next", "retry", "await", "await", "await", "done", "stop")
WEIGHTS = {
    "insert": 1,
    "signal": 4,
    "claim": 4,
    "begin": 2,
    "commit": 6,
    "commit_again": 1,
    "schedule": 2,
    "deadlines_pass": 1,
    "release": 1,
    "crash": 1,
}
KINDS = [kind for kind, weight in WEIGHTS.items() for _ in range(weight)]

Draw = Callable[[st.SearchStrategy[Any]], Any]


def subsets(values: list[int]) -> st.SearchStrategy[list[int]]:
    return st.lists(st.sampled_from(values), max_size=3, unique=True) if values else st.just([])


class Model(da.Machine[dict[str, Any]], name="m"):
    """Its steps are never run: the test says what they would have returned."""

    @da.step
    async def start(self, ctx: da.Context[dict[str, Any]]) -> da.Outcome:
        return da.Done()

    @da.step
    async def a(self, ctx: da.Context[dict[str, Any]]) -> da.Outcome:
        return da.Done()

    @da.step
    async def b(self, ctx: da.Context[dict[str, Any]]) -> da.Outcome:
        return da.Done()


@attrs.define(eq=False)
class Held:
    """A claim as the store gave it, beside what the model knows of it."""

    hold: Hold
    claim: Claim
    handed: list[Signal] | None = None


class StoreMachine(RuleBasedStateMachine):
    portal: Portal
    db: psycopg.Connection

    def __init__(self) -> None:
        super().__init__()
        self.db.execute("delete from durable.gen_durable")  # quicker than truncate for a handful
        self.world = World()
        self.held: list[Held] = []
        self.claims: dict[int, str] = {}
        self.last: list[tuple[Held, Outcome]] = []
        self.finals: dict[int, tuple] = {}
        self.spec = current_registry().find(Model)

    @initialize(count=st.integers(1, 3))
    def begin_with_some(self, count: int) -> None:
        self.add([None] * count)
        self.take(count)

    @rule(kind=st.sampled_from(KINDS), data=st.data())
    def act(self, kind: str, data: st.DataObject) -> None:
        """One rule, weighted: Hypothesis switches rules off per example; hardly anything was ever committed."""
        if self.held or kind in {"insert", "signal", "claim", "crash", "deadlines_pass"}:
            getattr(self, kind)(data.draw)

    # -- rows and signals

    def insert(self, draw: Draw) -> None:
        self.add(draw(st.lists(st.sampled_from([None, None, "k", "l"]), min_size=1, max_size=3)))

    def add(self, keys: list[str | None]) -> None:
        plans = [
            plan_insert(self.spec, {} if key is None else {"unique_key": key}, on_duplicate="skip")
            for key in keys
        ]
        ids = self.portal.call(insert_instances, SCHEMA, plans)
        for key, number in zip(keys, ids, strict=True):
            assert (number is None) == (self.world.occupant(key) is not None)
            if number is not None:
                self.world.rows[number] = Row(number, key=key)

    def signal(self, draw: Draw) -> None:
        alive = [row.id for row in self.world.rows.values() if not row.ended]
        targets = [*alive * 4, *self.world.rows, 10**9]
        one = st.tuples(
            st.sampled_from(targets), st.sampled_from(NAMES), st.sampled_from([None, None, "d", "e"])
        )
        batch = draw(st.lists(one, min_size=1, max_size=3))
        sent = self.portal.call(send_signals, SCHEMA, [deliver(t, n, key=d) for t, n, d in batch])
        known = set(self.world.letters) | self.world.consumed
        fresh = [row for row in self.letters_now() if row[0] not in known]
        for (target, name, dedup), found in zip(batch, sent, strict=True):
            assert found.outcome == self.world.expect_signal(target, name, dedup)
            if found.outcome == "sent":
                number, *_ = fresh.pop(0)
                self.world.deliver(Letter(number, target, name, dedup))

    def deadlines_pass(self, draw: Draw) -> None:
        passed = draw(subsets([row.id for row in self.world.rows.values() if row.deadline]))
        self.db.execute(PASS_DEADLINE, [passed])
        assert self.portal.call(expire_awaits, SCHEMA, "default", limit=100) == len(passed)
        self.world.expire(passed)

    # -- claims

    def claim(self, draw: Draw) -> None:
        self.take(draw(st.integers(1, 4)))

    def take(self, limit: int) -> None:
        due = [row.id for row in self.world.rows.values() if row.status == "runnable" and row.due]
        picked = self.portal.call(pick, limit=limit, known=[f"m/1/{step}" for step in STEPS])
        assert len(picked.claims) == min(limit, len(due))
        for claim in picked.claims:
            assert claim.id in due
            row = self.world.rows[claim.id]
            hold = Hold(len(self.claims), claim.id, claim.visit, claim.awaits)
            self.claims[hold.number] = claim.claim_id
            assert (claim.step, claim.attempt, claim.visit, claim.round) == (
                row.step, row.attempt, row.visit, row.round,
            )  # fmt: skip
            self.world.pick(hold)
            self.held.append(Held(hold, claim))

    def choose(self, draw: Draw) -> Held:
        """Mostly one whose claim is current, sometimes any."""
        current = [held for held in self.held if self.world.is_current(held.hold)]
        return draw(st.sampled_from([*current * 5, *self.held]))

    def started(self, draw: Draw) -> Held:
        held = self.choose(draw)
        if held.handed is None:
            self.start(held)
        return held

    def start(self, held: Held) -> None:
        """The step begins: it is handed what it awaited, as it is now."""
        found = self.portal.call(read_inboxes, SCHEMA, [held.claim.id])[held.claim.id]
        held.handed = [signal for signal in found if signal.name in (held.claim.awaits or ())]
        held.hold.handed = frozenset(signal.id for signal in held.handed)
        if self.world.is_current(held.hold):
            assert held.hold.handed == self.world.unread(held.claim.id, held.claim.awaits or ())

    def begin(self, draw: Draw) -> None:
        self.start(self.choose(draw))

    def release(self, draw: Draw) -> None:
        held, attempts = self.choose(draw), draw(st.integers(0, 1))
        released, _ = self.portal.call(release_claims, SCHEMA, [held.claim], attempts=attempts)
        expected = self.world.give_back(held.hold, attempts=attempts)
        assert released == ({held.claim.id} if expected else set())

    def crash(self, draw: Draw) -> None:
        over = draw(subsets([row.id for row in self.world.rows.values() if row.status == "executing"]))
        max_crashes = draw(st.sampled_from([None, None, 2]))
        self.db.execute(EXPIRE, [over])
        reaped, _ = self.portal.call(reap_claims, SCHEMA, limit=100, max_crashes=max_crashes)
        assert sorted(each.id for each in reaped) == sorted(over)
        self.world.crash(over, max_crashes=max_crashes)
        # Time passes: crashed rows are due again.
        self.db.execute("update durable.gen_durable set eligible_at = now() where id = any (%s)", [over])

    # -- outcomes

    def outcome(self, held: Held, draw: Draw) -> Outcome:
        consume = draw(subsets(sorted(self.world.unread(held.claim.id)))) if draw(st.booleans()) else []
        step = draw(st.sampled_from(STEPS))
        match draw(st.sampled_from(OUTCOMES)):
            case "next":
                return da.Next(step, consume=consume)
            case "retry":
                return da.Retry(delay=draw(st.sampled_from([0, 0, 0, 3600])))
            case "await":
                then, timeout = draw(st.sampled_from([step, None])), draw(st.sampled_from([60, None]))
                again = st.just(held.claim.awaits) if held.claim.awaits else names
                return da.Await(draw(names | again | again), then=then, timeout=timeout, consume=consume)
            case "done":
                return da.Done(1)
            case _:
                return da.Stop("no")

    def commit(self, draw: Draw) -> None:
        chosen: dict[int, tuple[Held, Outcome]] = {}
        for _ in range(draw(st.integers(1, 3))):
            held = self.started(draw)
            chosen[held.claim.id] = (held, self.outcome(held, draw))
        self.last = list(chosen.values())
        assert self.flush(self.last) == self.world.commit([(h.hold, o) for h, o in self.last])

    def commit_again(self, draw: Draw) -> None:
        """After a commit of unknown fate: it must not happen twice."""
        assert not self.last or self.flush(self.last) == set()

    def flush(self, group: Sequence[tuple[Held, Outcome]]) -> set[int]:
        after = [
            transition(held.claim, self.spec, outcome, handed=held.handed or ()) for held, outcome in group
        ]
        return set(self.portal.call(commit_outcomes, SCHEMA, after, accept_late=True).committed)

    def schedule(self, draw: Draw) -> None:
        count = draw(st.integers(0, 3))
        join = draw(st.sampled_from(["all", "any_failed", *range(1, count + 1)]))
        held = self.started(draw)
        outcome = ScheduleChildren("a", [Model] * count, join=join, timeout=draw(st.sampled_from([None, 60])))
        after = transition(held.claim, self.spec, outcome, handed=held.handed or ())
        done = self.portal.call(schedule_children, SCHEMA, after, plan_children(outcome), accept_late=True)
        assert (done is not None) == self.world.is_current(held.hold)
        if done is not None:
            new = [row[0] for row in self.db.execute(ROWS) if row[0] not in self.world.rows]
            self.world.schedule(held.hold, outcome, new)

    # -- always

    def letters_now(self) -> list[tuple]:
        query = "select id, target_id, name, dedup_key, consumed_at is null from durable.signals order by id"
        return self.db.execute(query).fetchall()

    @invariant()
    def the_store_is_as_the_model_says(self) -> None:
        found = self.db.execute(ROWS).fetchall()
        letters = self.letters_now()
        self.rows_agree(found)
        self.inboxes_agree(letters)
        self.no_wake_up_is_lost(found, letters)
        self.barriers_wait_for_living_children(found)
        now = {row[0]: row for row in found if row[1] in {"done", "failed"}}
        assert {number: now.get(number) for number in self.finals} == self.finals, (
            "terminal rows never change"
        )
        self.finals = now

    def rows_agree(self, found: list[tuple]) -> None:
        assert [row[0] for row in found] == sorted(self.world.rows)
        for row in found:
            (
                number,
                status,
                step,
                visit,
                attempt,
                crashes,
                due,
                awaits,
                then,
                timed,
                pending,
                total,
                claim,
                *kin,
            ) = row
            model = self.world.rows[number]
            expected = (model.status, model.step, model.visit, model.attempt, model.crashes)
            assert (status, step, visit, attempt, crashes) == expected, number
            assert kin[:2] == [model.parent, model.barrier]
            assert kin[3] == model.round
            assert claim == (None if model.claim is None else self.claims[model.claim])
            if status == "runnable":
                assert due == model.due
            if not model.ended:
                assert (awaits and tuple(awaits), then, timed) == (
                    model.awaits,
                    model.await_step,
                    model.deadline,
                )
                assert total == model.total
            if status == "awaiting_children":
                assert pending == model.pending

    def inboxes_agree(self, letters: list[tuple]) -> None:
        expected = [
            (each.id, each.target, each.name, each.dedup, each.unread)
            for each in sorted(self.world.letters.values(), key=lambda each: each.id)
        ]
        assert letters == expected

    def no_wake_up_is_lost(self, found: list[tuple], letters: list[tuple]) -> None:
        """A matching unread signal at a parked row is one that its park was told to ignore."""
        awaits = {row[0]: row[7] for row in found if row[1] == "awaiting_signal"}
        for signal, target, name, _, unread in letters:
            if unread and name in awaits.get(target, ()):
                assert signal in self.world.rows[target].kept

    def barriers_wait_for_living_children(self, found: list[tuple]) -> None:
        for number, status, _, visit, *_, pending, total, _claim, _parent, _barrier, _rev, _round in found:
            if status == "awaiting_children":
                mine = [row for row in found if row[13] == number and row[14] == visit]
                alive = sum(row[1] not in {"done", "failed"} for row in mine)
                assert len(mine) == total
                assert 0 < pending <= alive


@pytest.mark.slow
def test_the_store_does_what_the_model_says(durable_dsn: str):
    with (
        psycopg.connect(durable_dsn, autocommit=True) as db,
        open_portal(durable_dsn) as portal,
    ):
        case = type("Case", (StoreMachine,), {"portal": portal, "db": db})
        run_state_machine_as_test(
            case,
            settings=settings(
                max_examples=EXAMPLES,
                stateful_step_count=50,
                deadline=None,
                database=None,
                suppress_health_check=list(HealthCheck),
            ),
        )
