"""The store's own SQL against a model in plain Python, driven by Hypothesis.

More examples: DURABLE_MODEL_EXAMPLES=500 pytest tests/model
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import attrs
import durable_actors as da
import psycopg
from durable_actors._engine.transition import plan_children, transition
from durable_actors._store.children import schedule_children
from durable_actors._store.claim import release_claims
from durable_actors._store.commit import commit_outcomes
from durable_actors._store.insert import insert_instances
from durable_actors._store.lease import reap_claims
from durable_actors._store.rows import Claim
from durable_actors._store.signal import expire_awaits, read_inboxes, send_signals
from durable_actors.machine import Outcome, ScheduleChildren, Signal, current_registry, plan_insert
from hypothesis import HealthCheck, assume, settings, strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from tests.model.portal import Portal, open_portal
from tests.model.world import Hold, Letter, Row, World
from tests.store.kit import SCHEMA, pick
from tests.store.stepping import deliver

NAMES = ("x", "y", "z")
STEPS = ("start", "a", "b")
EXAMPLES = int(os.environ.get("DURABLE_MODEL_EXAMPLES", "25"))
ROWS = (
    "select id, status::text, step, visit, attempt, crashes, eligible_at <= now(), awaits, await_step,"
    " await_deadline is not null, children_pending, children_total, claim_id::text, parent_id, barrier"
    " from durable.gen_durable order by id"
)
EXPIRE = "update durable.gen_durable set lease_expires_at = now() - interval '1 s' where id = any (%s)"
PASS_DEADLINE = "update durable.gen_durable set await_deadline = now() - interval '1 s' where id = any (%s)"

names = st.lists(st.sampled_from(NAMES), min_size=1, max_size=2, unique=True)
some = st.integers(0, 10**6)


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
        self.db.execute("truncate durable.gen_durable cascade")
        self.world = World()
        self.held: list[Held] = []
        self.claims: dict[int, str] = {}
        self.last: list[tuple[Held, Outcome]] = []
        self.finals: dict[int, tuple] = {}
        self.spec = current_registry().find(Model)

    # -- rows and signals

    @rule(keys=st.lists(st.sampled_from([None, None, "k", "l"]), min_size=1, max_size=3))
    def insert(self, keys: list[str | None]) -> None:
        plans = [plan_insert(self.spec, {} if key is None else {"unique_key": key}) for key in keys]
        ids = self.portal.call(insert_instances, SCHEMA, plans)
        for key, number in zip(keys, ids, strict=True):
            assert (number is None) == (self.world.occupant(key) is not None)
            if number is not None:
                self.world.rows[number] = Row(number, key=key)

    @precondition(lambda self: self.world.rows)
    @rule(
        letters=st.lists(
            st.tuples(some, st.sampled_from(NAMES), st.sampled_from([None, None, "d", "e"])),
            min_size=1,
            max_size=3,
        )
    )
    def signal(self, letters: list[tuple[int, str, str | None]]) -> None:
        targets = [*self.world.rows, 10**9]
        batch = [(targets[where % len(targets)], name, dedup) for where, name, dedup in letters]
        sent = self.portal.call(send_signals, SCHEMA, [deliver(t, n, key=d) for t, n, d in batch])
        known = set(self.world.letters) | self.world.consumed
        fresh = [row for row in self.letters_now() if row[0] not in known]
        for (target, name, dedup), found in zip(batch, sent, strict=True):
            assert found.outcome == self.world.expect_signal(target, name, dedup)
            if found.outcome == "sent":
                number, *_ = fresh.pop(0)
                self.world.deliver(Letter(number, target, name, dedup))

    @rule(chosen=st.lists(some, max_size=3))
    def deadlines_pass(self, chosen: list[int]) -> None:
        parked = [row.id for row in self.world.rows.values() if row.deadline]
        passed = sorted({parked[n % len(parked)] for n in chosen}) if parked else []
        self.db.execute(PASS_DEADLINE, [passed])
        assert self.portal.call(expire_awaits, SCHEMA, "default", limit=100) == len(passed)
        self.world.expire(passed)

    # -- claims

    @rule(limit=st.integers(1, 4))
    def claim(self, limit: int) -> None:
        due = [row.id for row in self.world.rows.values() if row.status == "runnable" and row.due]
        picked = self.portal.call(pick, limit=limit)
        assert len(picked.claims) == min(limit, len(due))
        for claim in picked.claims:
            assert claim.id in due
            row = self.world.rows[claim.id]
            hold = Hold(len(self.claims), claim.id, claim.visit, claim.awaits)
            self.claims[hold.number] = claim.claim_id
            assert (claim.step, claim.attempt, claim.visit) == (row.step, row.attempt, row.visit)
            self.world.pick(hold)
            self.held.append(Held(hold, claim))

    def start(self, held: Held) -> None:
        """The step begins: it is handed what it awaited, as it is now."""
        found = self.portal.call(read_inboxes, SCHEMA, [held.claim.id])[held.claim.id]
        held.handed = [signal for signal in found if signal.name in (held.claim.awaits or ())]
        held.hold.handed = frozenset(signal.id for signal in held.handed)
        if self.world.is_current(held.hold):
            expected = self.world.unread(held.claim.id, held.claim.awaits or ())
            assert held.hold.handed == expected

    @precondition(lambda self: self.held)
    @rule(which=some)
    def begin(self, which: int) -> None:
        self.start(self.held[which % len(self.held)])

    @precondition(lambda self: self.held)
    @rule(which=some, attempts=st.integers(0, 1))
    def release(self, which: int, attempts: int) -> None:
        held = self.held[which % len(self.held)]
        released, _ = self.portal.call(release_claims, SCHEMA, [held.claim], attempts=attempts)
        expected = self.world.give_back(held.hold, attempts=attempts)
        assert released == ({held.claim.id} if expected else set())

    @rule(chosen=st.lists(some, max_size=3), max_crashes=st.sampled_from([None, None, 2]))
    def crash(self, chosen: list[int], max_crashes: int | None) -> None:
        running = [row.id for row in self.world.rows.values() if row.status == "executing"]
        over = sorted({running[n % len(running)] for n in chosen}) if running else []
        self.db.execute(EXPIRE, [over])
        reaped, _ = self.portal.call(reap_claims, SCHEMA, limit=100, max_crashes=max_crashes)
        assert sorted(each.id for each in reaped) == over
        for number in over:
            self.world.crash(number, max_crashes=max_crashes)
        # Time passes: crashed rows are due again.
        self.db.execute("update durable.gen_durable set eligible_at = now() where id = any (%s)", [over])

    # -- outcomes

    def outcome(self, held: Held, kind: str, words: list[str], flag: bool, extra: int) -> Outcome:
        unread = sorted(self.world.unread(held.claim.id))
        consume = [unread[extra % len(unread)]] if unread and extra % 3 == 0 else []
        step = STEPS[extra % len(STEPS)]
        match kind:
            case "next":
                return da.Next(step, consume=consume)
            case "retry":
                return da.Retry(delay=3600 if extra % 7 == 0 else 0)
            case "await":
                return da.Await(
                    words, then=step if flag else None, timeout=60 if extra % 2 else None, consume=consume
                )
            case "done":
                return da.Done(extra)
            case _:
                return da.Stop("no")

    @precondition(lambda self: self.held)
    @rule(
        group=st.lists(
            st.tuples(
                some,
                st.sampled_from(["next", "retry", "await", "await", "done", "stop"]),
                names,
                st.booleans(),
                some,
            ),
            min_size=1,
            max_size=4,
        )
    )
    def commit(self, group: list[tuple[int, str, list[str], bool, int]]) -> None:
        chosen: dict[int, tuple[Held, Outcome]] = {}
        for which, kind, words, flag, extra in group:
            held = self.held[-1 - which % len(self.held)]
            if held.handed is None:
                self.start(held)
            chosen[held.claim.id] = (held, self.outcome(held, kind, words, flag, extra))
        self.last = list(chosen.values())
        assert self.flush(self.last) == self.world.commit([(h.hold, o) for h, o in self.last])

    @precondition(lambda self: self.last)
    @rule()
    def commit_again(self) -> None:
        """After a commit of unknown fate: it must not happen twice."""
        assert self.flush(self.last) == set()

    def flush(self, group: Sequence[tuple[Held, Outcome]]) -> set[int]:
        after = [
            transition(held.claim, self.spec, outcome, handed=held.handed or ()) for held, outcome in group
        ]
        return set(self.portal.call(commit_outcomes, SCHEMA, after, accept_late=True).committed)

    @precondition(lambda self: self.held)
    @rule(
        which=some,
        count=st.integers(0, 3),
        join=st.sampled_from(["all", "any_failed", 1, 2]),
        deadline=st.sampled_from([None, 60]),
    )
    def schedule(self, which: int, count: int, join: Any, deadline: float | None) -> None:
        assume(not isinstance(join, int) or not count or join <= count)
        held = self.held[-1 - which % len(self.held)]
        if held.handed is None:
            self.start(held)
        outcome = ScheduleChildren("a", [Model] * count, join=join, deadline=deadline)
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
    def rows_are_as_the_model_says(self) -> None:
        found = self.db.execute(ROWS).fetchall()
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
            assert kin == [model.parent, model.barrier]
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

    @invariant()
    def inboxes_are_as_the_model_says(self) -> None:
        expected = [
            (each.id, each.target, each.name, each.dedup, each.unread)
            for each in sorted(self.world.letters.values(), key=lambda each: each.id)
        ]
        assert self.letters_now() == expected

    @invariant()
    def no_wake_up_is_lost(self) -> None:
        """From the database alone: a matching signal at a parked row is one that its park was told to ignore."""
        query = (
            "select g.id, s.id from durable.gen_durable g join durable.signals s on s.target_id = g.id"
            " where g.status = 'awaiting_signal' and s.name = any (g.awaits) and s.consumed_at is null"
        )
        for number, signal in self.db.execute(query):
            assert signal in self.world.rows[number].kept

    @invariant()
    def a_barrier_waits_for_living_children(self) -> None:
        query = (
            "select p.id, p.children_pending, p.children_total, p.children_total - (select count(*)"
            " from durable.gen_durable c where c.parent_id = p.id and c.barrier = p.visit"
            " and c.status not in ('done', 'failed')) from durable.gen_durable p"
            " where p.status = 'awaiting_children'"
        )
        for number, pending, total, ended in self.db.execute(query):
            assert 0 < pending <= total - ended, number

    @invariant()
    def terminal_rows_never_change(self) -> None:
        query = "select gen_durable.* from durable.gen_durable where status in ('done', 'failed') order by id"
        now = {row[0]: row for row in self.db.execute(query)}
        assert {number: now.get(number) for number in self.finals} == self.finals
        self.finals = now


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
                stateful_step_count=40,
                deadline=None,
                database=None,
                suppress_health_check=list(HealthCheck),
            ),
        )
