"""Whether the simulated statements mean what the SQL means: both are given the same calls, and must answer alike.

Random walks of inserts, signals, claims, steps that begin and end, outcomes of every kind (also repeated, stale, or
of a step that began before the last signals came), children, releases, crashes and time. After each call both stores
are compared, and the laws of the store itself are checked. One session: locks are for tests/store. A hand moves time.
"""

from __future__ import annotations

import math
import os
import uuid
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import attrs
import durable_actors as da
import psycopg
from durable_actors._engine.committing.transition import cancellation, plan_children, transition
from durable_actors._store import (
    boundaries,
    children,
    claim as claims,
    commit,
    holds,
    insert,
    lease,
    node as nodes,
    retention,
    signal,
    wakeup,
)
from durable_actors._store.claim import Owner, PickFrom
from durable_actors._store.read import read_by_ids
from durable_actors._store.rows import Claim, Committed, Raised, Transition
from durable_actors.machine import KEEP, Outcome, ScheduleChildren, Signal, current_registry
from durable_actors.machine._labels import Labels
from tests.invariants.journal import instance_problems, read_journal
from tests.simulation.commands import Commands
from tests.simulation.compare import (
    COLUMNS,
    DUE,
    last_kind,
    plain,
    plain_instance,
    recorded,
    retell,
    stored,
    unordered,
)
from tests.simulation.faithful_claims import ClaimWalks
from tests.simulation.faithful_fair import FairWalks
from tests.simulation.faithful_laws import Laws
from tests.simulation.faithful_limits import USES, LimitWalks
from tests.simulation.faithful_pauses import PauseWalks
from tests.simulation.faithful_schedules import ScheduleWalks
from tests.simulation.local import LocalConn
from tests.simulation.process import World
from tests.simulation.server import Server
from tests.simulation.statements import SECOND
from tests.simulation.tables import Row
from tests.simulation.walks_cancel import Cancels
from tests.simulation.walks_graph import GraphWalks
from tests.store.kit import address, connect, known_steps, plan

SCHEMA = "durable"
HEAD = PickFrom([0, 1], ["-infinity"] * 2, [0, 0])
KNOWN = known_steps("m/1/s", "m/1/t")
"""With seeds that are new every time."""
STATE = {"bb": 1, "a": [1, 2]}
LABELS = Labels(("a", "b c"), b'{"k": [1, null], "durable:trace": "00-x#1@2 3"}')


class Model(da.Machine[dict[str, Any]], name="m"):
    """Its steps are never run: the walk says what they would have returned."""

    @da.step(initial=True)
    async def s(self, ctx: da.Context[dict[str, Any]]) -> da.Outcome:
        return da.Done()

    @da.step
    async def t(self, ctx: da.Context[dict[str, Any]]) -> da.Outcome:
        return da.Done()


@attrs.define(eq=False)
class Held:
    """A claim, stale or not, as Postgres gave it and as the model did."""

    real: Claim
    model: Claim
    node: str
    handed: tuple[list[Signal], list[Signal]] | None = None
    """What its step was handed, in both; None before it began."""


Make = Callable[[list[int]], Outcome]
"""Makes an outcome that consumes these signals."""


class Pair(Laws, PauseWalks, Commands, Cancels, GraphWalks, FairWalks, ClaimWalks, LimitWalks, ScheduleWalks):
    """Both stores, and the claims that were given out, side by side."""

    def __init__(self, real: Any, db: psycopg.Connection[Any], seed: int) -> None:
        self.random = Random(seed)
        self.world = World(seed)
        self.world.now = 10_000.0
        self.server = Server(self.world, frozenset())
        self.model = LocalConn(self.server)
        self.real, self.db = real, db
        self.spec = current_registry().find(Model)
        self.held: list[Held] = []
        self.tokens: list[str] = []
        """Of group commits that were not forgotten."""
        self.claim_ids: dict[str, str] = {}
        """Those of Postgres by the model's."""
        self.last: tuple[list[Transition], list[Transition]] = ([], [])
        """What was committed last."""
        self.node = ""
        """By whom."""
        self.touched: set[int] = set()
        """Rows that were held by hand: no record says so."""
        self.kept: dict[int, tuple[int, ...]] = {}
        """Per instance the signals of Postgres that its last park was to ignore."""
        self.finals: dict[int, Any] = {}
        self.told: list[tuple[wakeup.Intent, wakeup.Intent]] = []
        """What a notifier may have been told, in both."""
        self.said: list[str] = []
        self.kinds: set[str] = set()
        """Of records."""
        self.uses: tuple[str | None, ...] = (None, "free")
        """Of limits, by what is inserted."""
        self.eager = False
        self.known = KNOWN
        """Most outcomes end a child."""

    async def both(self, function: Any, *args: Any, **options: Any) -> tuple[Any, Any]:
        self.said.append(f"{function.__name__} {args} {options}")
        return await function(self.real, *args, **options), await function(self.model, *args, **options)

    async def same(self, function: Any, *args: Any, **options: Any) -> Any:
        ours, theirs = await self.both(function, *args, **options)
        assert plain(theirs) == plain(ours), (plain(ours), plain(theirs), self.said[-5:])
        return ours

    def compare(self) -> None:
        found = self.db.execute(f"select {COLUMNS} from durable.gen_durable order by id").fetchall()
        rows = sorted(self.server.tables.rows.values(), key=lambda row: row.id)
        now = self.server.now()
        assert [stored(row, self.claim_ids, now) for row in rows] == found, self.said[-5:]
        letters = self.db.execute(
            "select target_id, name, dedup_key, consumed_at is not null from durable.signals order by id"
        ).fetchall()
        ours = sorted(self.server.tables.letters.values(), key=lambda each: each.id)
        shown = [(each.target, each.name, each.dedup, each.consumed) for each in ours]
        assert shown == letters, self.said[-5:]
        self.compare_journals()
        self.compare_cascades()
        self.compare_graphs()
        self.compare_limits()
        self.compare_schedules()
        self.no_wake_up_is_lost()
        self.barriers_wait_for_living_children()
        self.what_has_ended_stays_as_it_is()

    def compare_journals(self) -> None:
        """The same records; and Postgres's fold into its rows."""
        rows, records = read_journal(self.db)
        self.kinds |= {record["kind"] for record in records}
        model = [record for _, record in sorted(self.server.tables.journal.items())]
        theirs = [recorded(record, self.claim_ids) for record in model]
        assert theirs == [recorded(record) for record in records], self.said[-5:]
        by_id: dict[int, list[Any]] = {}
        for record in records:
            by_id.setdefault(record["instance_id"], []).append(record)
        for row in rows:
            if row["id"] in self.touched:
                del row["hold"]
            problems = instance_problems(row, by_id.get(row["id"], []))
            assert not problems, (problems, self.said[-5:])

    # -- what may be done

    async def insert(self) -> None:
        plans = [
            plan(
                machine="m", version=self.random.choice((1, 1, 1, 2)), step=self.random.choice("sssu"),
                priority=self.random.choice((0, 1)), partition_key=self.random.choice((None, "red", "blue")),
                delay=self.random.choice((0.0, 0.0, 6000.0)),
                journal=self.random.randint(0, 4),
                fair_key=(None, "x", "y")[len(self.server.tables.rows) % 3],
                max_attempts=(None, 5)[(len(self.server.tables.rows) + index) % 2],
                limits=self.uses[(len(self.server.tables.rows) // 2 + index) % len(self.uses)],
                labels=self.random.choice((None, None, LABELS)),
                **self._unique(),
            )
            for index in range(self.random.randint(1, 3))
        ]  # fmt: skip
        # By the short statement, which holds rows behind others.
        if not self.eager and self.random.random() < 0.3:
            for each in plans:
                each.unique_key = each.labels = each.max_attempts = each.fair_key = each.limits = None
                each.unique_scope, each.journal = (), min(each.journal, 1)
            plans += plans
        if len(plans) == 1 and (call := insert.insert_call(plans, SCHEMA))[0].name == "insert_plain":
            await self.at_once(call)
        else:
            await self.same(insert.insert_instances, SCHEMA, plans)

    def _unique(self) -> dict[str, Any]:
        key = self.random.choice((None, None, b"k", b"l"))
        live = ("runnable", "executing", "awaiting_signal", "awaiting_children")
        return {"unique_key": key, "unique_scope": () if key is None else live}

    async def pick(self) -> None:
        owner = Owner(SCHEMA, self.random.choice("ab"), b"hash", 6000.0)
        options = {"queue": "default", "limit": self.random.randint(1, 4), "known": KNOWN, "now": 0.0}
        begin = self.random.choice((HEAD, attrs.evolve(HEAD, shelved=[address("m/1"), address("m/1", "t")])))
        if self.random.random() < 0.3 and self.server.tables.rows:
            ids = sorted(self.server.tables.rows)
            begin = claims.PickFrom((), (), (), by_id=self.random.sample(ids, min(3, len(ids))))
        ours, theirs = await self.both(claims.pick_instances, owner, begin=begin, **options)
        self.took(owner, ours, theirs)

    def took(self, owner: Owner, ours: Any, theirs: Any) -> None:
        """Compare what both have picked, and keep the claims."""

        seen = [[(each.id, each.what) for each in side.seen] for side in (ours, theirs)]
        assert seen[0] == seen[1], self.said[-5:]
        self.kinds |= {f"seen {each.what}" for each in ours.seen}
        self._claimed(ours.claims, theirs.claims, owner.name)

    def _claimed(self, ours: Sequence[Claim], theirs: Sequence[Claim], node: str) -> None:
        """Both have made the same claims, but for their ids."""

        def shown(claims: Sequence[Claim]) -> Any:
            rows = [attrs.asdict(attrs.evolve(each, claim_id="", due_at=None)) for each in claims]
            for each in rows:
                each["recorded"]["lease_until"] = each["recorded"]["lease_until"] and "then"
                if each["cancellation"]:
                    each["cancellation"]["at"] = None
            return rows

        assert shown(theirs) == shown(ours), self.said[-5:]
        pairs = [*zip(ours, theirs, strict=True)]
        self.claim_ids |= {their.claim_id: our.claim_id for our, their in pairs}
        self.held += [Held(*pair, node=node) for pair in pairs]

    def _is_current(self, held: Held) -> bool:
        row, claim = self.server.tables.rows.get(held.model.id), held.model
        return row is not None and (row.status, row.claim_id, row.visit) == (
            "executing",
            claim.claim_id,
            claim.visit,
        )

    def _some(self) -> list[Held]:
        """Of distinct instances, mostly current."""
        current = [held for held in self.held if self._is_current(held)]
        chosen = self.random.choices([*current * 5, *self.held], k=self.random.randint(1, 3))
        return list({held.real.id: held for held in chosen}.values())

    async def begin(self) -> None:
        """Steps begin: what they awaited is handed to them, as it is now. Later signals are not."""
        for held in self._some():
            await self._start(held)

    async def _start(self, held: Held) -> None:
        inboxes = await self.both(signal.read_inboxes, SCHEMA, [held.real.id])
        names = held.real.awaits or ()
        real, model = ([each for each in inbox[held.real.id] if each.name in names] for inbox in inboxes)
        assert [each.name for each in real] == [each.name for each in model], self.said[-5:]
        held.handed = (real, model)

    async def commit(self) -> None:
        chosen = self._some()
        chosen = [held for held in chosen if held.node == chosen[0].node]
        self.node = chosen[0].node
        group: tuple[list[Transition], list[Transition]] = ([], [])
        for held in chosen:
            changes = await self._changes(held, self._outcome(held.real))
            deletes = changes[0].status == "done" and self.random.random() < 0.3
            for side, change in zip(group, changes, strict=True):
                change.deletes = deletes  # as of a machine with keep=0
                side.append(change)
        done = await self._flush(*group)
        self.last = (
            [change for change in group[0] if change.claim.id in done],
            [change for change in group[1] if change.claim.id in done],
        )
        for held, change in zip(chosen, group[0], strict=True):
            verdict = done.get(held.real.id)
            if verdict is not None and change.status == "awaiting_signal":
                self.kept[held.real.id] = change.kept
            if verdict is not None and verdict.status == "executing" and verdict.state is not None:
                for claim in (held.real, held.model):
                    claim.enter(change.step, verdict.visit, verdict.state, inbox=verdict.inbox)
                held.handed = None
        if self.random.random() < 0.3:
            await self.commit_again()

    async def _changes(self, held: Held, make: Make | None) -> tuple[Transition, Transition]:
        """The transition of an outcome, or of a cancellation, in both; signals have other ids there."""
        if make is None:
            reason = self.random.choice((None, "not wanted"))
            real, model = (cancellation(attrs.evolve(claim), reason) for claim in (held.real, held.model))
            return real, model
        if held.handed is None:
            await self._start(held)
        assert held.handed is not None
        inboxes = await self.both(signal.read_inboxes, SCHEMA, [held.real.id])
        count = len(inboxes[0][held.real.id])
        named = self.random.sample(range(count), min(count, self.random.choice((0, 0, 1, 2))))
        keep_claim = held.real.plain and self.random.random() < 0.8
        error = self.random.choice((None, None, None, ValueError("x")))
        changes = [
            transition(
                attrs.evolve(claim),
                self.spec,
                make([inbox[claim.id][index].id for index in named]),
                handed=handed,
                keep_claim=keep_claim,
                error=error,
            )
            for claim, handed, inbox in zip((held.real, held.model), held.handed, inboxes, strict=True)
        ]
        if changes[0].status == "failed" and held.real.attempt and self.random.random() < 0.3:
            for change in changes:  # no run was left
                change.attempt -= 1
        return changes[0], changes[1]

    async def _flush(self, real: list[Transition], model: list[Transition]) -> dict[int, Committed]:
        self.said.append(f"commit {real}")
        late = self.random.random() < 0.5
        # As the flusher does: the group has a name, and the names of earlier ones are forgotten, sooner or later.
        token = str(uuid.UUID(int=len(self.said)))
        known = self.tokens if len(self.tokens) > 2 else []
        options: dict[str, Any] = {"accept_late": late, "node": self.node, "token": token, "known": known}
        options["room"], options["heir"] = self.room(), self.heir()
        done = await commit.commit_outcomes(self.real, SCHEMA, real, **options)
        again = await commit.commit_outcomes(self.model, SCHEMA, model, **options)  # type: ignore[arg-type]
        assert plain(again.committed) == plain(done.committed), self.said[-5:]
        assert unordered(again.offered) == unordered(done.offered), self.said[-5:]
        self._claimed(done.handed, again.handed, self.node)
        self.tokens = [*([] if known else self.tokens), token]
        flushes = await self.both(commit.read_flushes, SCHEMA, [*known, *self.tokens])
        assert flushes[0] == flushes[1], self.said[-5:]
        return done.committed

    async def commit_again(self) -> None:
        """After a commit of unknown fate: it must not happen twice."""
        assert not self.last[0] or not await self._flush(*self.last), self.said[-5:]

    def _outcome(self, claim: Claim) -> Make | None:
        """None: it is cancelled."""
        draw = self.random
        then, state = draw.choice("st"), draw.choice((KEEP, STATE))
        kinds = ("next", "next", "retry", "await", "await", "await", "ask", "done", "stop", "cancel")
        # Else hardly a barrier would open, and hardly an instance would stay on its claim.
        ends = self._ends() if claim.parent_id is not None else ()
        more = ("next",) * 8 if claim.plain else ()
        match draw.choice((*kinds, *ends, *more)):
            case "next":
                key = draw.choice((KEEP, KEEP, KEEP, None, "red"))
                return lambda consume: da.Next(then, state, consume=consume, partition_key=key)
            case "retry":
                delay = draw.choice((0, 0, 0, 6000))
                return lambda consume: da.Retry(state, delay=delay)
            case "await":
                names = draw.choice((claim.awaits or ("x",), claim.awaits or ("y",), ("x",), ("x", "y")))
                step, timeout = draw.choice((then, None)), draw.choice((None, 6000))
                return lambda consume: da.Await(names, state, then=step, timeout=timeout, consume=consume)
            case "ask":
                if draw.random() < 0.3:
                    return lambda consume: da.Pause(then, state, data=STATE)
                other, late = draw.choice((then, None)), draw.choice((None, 6000))
                return lambda consume: da.Approval(then, state, title="ok?", on_reject=other, timeout=late)
            case "done":
                return lambda consume: da.Done({"r": 1})
            case "stop":
                return lambda consume: da.Stop("why")
        return None

    async def spawn(self) -> None:
        [held, *_] = self._some()
        count = self.random.choice((0, 1, 2, 3, 3, 4, 5))
        join = self.random.choice(["all", "any_failed", *range(1, count + 1)])
        rest, timeout = self.random.choice(("leave", "cancel")), self.random.choice((None, 6000))
        outcome = ScheduleChildren("t", self._children(count), join=join, timeout=timeout, rest=rest)
        changes = await self._changes(held, lambda consume: outcome)
        self.said.append(f"spawn {changes[0]} {outcome}")
        level = self.random.choice(("off", "auto", "outcomes", "claims", "full"))
        outs = [
            await children.schedule_children(
                conn, SCHEMA, change, plan_children(outcome, journal=level), accept_late=True, node=held.node
            )
            for conn, change in zip((self.real, self.model), changes, strict=True)
        ]
        assert plain(outs[0]) == plain(outs[1]), self.said[-5:]

    async def signal(self) -> None:
        rows = self.server.tables.rows
        alive = [row.id for row in rows.values() if not row.terminal]
        targets = [*alive * 4, *rows, 10**9]
        deliveries = [
            signal.plan_signal(
                self.random.choice(targets), self.random.choice("xy"), 1, self.random.choice((None, None, "d", "e"))
            )
            for _ in range(self.random.randint(1, 3))
        ]  # fmt: skip
        target = deliveries[0].target
        if len(deliveries) == 1 and target is not None:
            await self.at_once(signal.signal_call(SCHEMA, deliveries), target)
        else:
            await self.same(signal.send_signals, SCHEMA, deliveries)

    async def renew(self) -> None:
        chosen = self._some()
        ours = await lease.renew_leases(self.real, SCHEMA, [held.real for held in chosen], lease_ttl=6000.0)
        theirs = await lease.renew_leases(
            self.model, SCHEMA, [held.model for held in chosen], lease_ttl=6000.0
        )  # type: ignore[arg-type]
        assert ours == {self.claim_ids[claim_id] for claim_id in theirs}, self.said[-5:]

    async def release(self) -> None:
        chosen = self._some()
        keyed = all(held.real.partition_key is not None for held in chosen)
        hold = self.random.choice((holds.OFFERED, holds.SHELVED, *[holds.HELD] * keyed))
        attempts, interruptions = self.random.choice(((0, 0), (0, 1), (1, 0)))
        options = {"attempts": attempts, "interruptions": interruptions, "hold": hold}
        ours = await claims.release_claims(self.real, SCHEMA, [held.real for held in chosen], **options)
        theirs = await claims.release_claims(self.model, SCHEMA, [held.model for held in chosen], **options)  # type: ignore[arg-type]
        assert (ours.runnable, ours.cancelled) == (theirs.runnable, theirs.cancelled), self.said[-5:]
        assert unordered(ours.offered) == unordered(theirs.offered), self.said[-5:]

    async def crash(self) -> None:
        chosen = self._some()
        raised, most = self.random.choice((None, Raised("T", "trace"))), self.random.choice((None, 2, 3))
        results = []
        sides = ((self.real, [held.real for held in chosen]), (self.model, [held.model for held in chosen]))
        for conn, mine in sides:
            results.append(
                await lease.crash_claims(
                    conn, SCHEMA, mine, error="SystemExit: 2", raised=raised, max_crashes=most
                )  # type: ignore[arg-type]
            )
        ours, theirs = results
        assert [unordered(each) for each in ours] == [unordered(each) for each in theirs], self.said[-5:]
        self._far_future()

    async def decide(self) -> None:
        rows, verb = self.server.tables.rows, self.random.choice(("proceed", "approve", "reject"))
        number = self.random.choice([each for each in rows if rows[each].manual] or list(rows))
        await self.same(boundaries.decide_instance, SCHEMA, number, verb, comment="no", data=STATE)

    async def strays(self) -> None:
        known = self._some() if self.held else []
        sides = ((self.real, [held.real for held in known]), (self.model, [held.model for held in known]))
        results = [
            await lease.release_orphans(
                conn, SCHEMA, owner="a", queue="default", known=[claim.claim_id for claim in mine]
            )
            for conn, mine in sides
        ]
        assert results[0][0] == results[1][0], self.said[-5:]
        assert unordered(results[0][1]) == unordered(results[1][1]), self.said[-5:]

    async def stop(self) -> None:
        """A node stops in good order; what it has claimed is left behind."""
        for conn in (self.real, self.model):
            await nodes.register_node(conn, SCHEMA, incarnation="b", node="b", about={})
            await nodes.stop_node(conn, SCHEMA, "b")

    async def reap(self) -> None:
        dead = self.random.choice(({}, {"a": math.inf}, {"a": 0.0}, {"b": math.inf}))
        ours, theirs = await self.both(
            lease.reap_claims, SCHEMA, limit=2, dead=dead, max_crashes=self.random.choice((None, 2, 3))
        )
        assert [unordered(each) for each in ours] == [unordered(each) for each in theirs], self.said[-5:]
        self._far_future()

    def _far_future(self) -> None:
        """Pauses of seconds: the server's clock runs, ours does not."""
        self.db.execute(
            "update durable.gen_durable set eligible_at = eligible_at + interval '1 h'"
            " where eligible_at > now() and status = 'runnable'"
        )
        for row in self.server.tables.rows.values():
            if row.status == "runnable" and row.eligible_at > self.server.now():
                row.eligible_at += 3600 * SECOND
                self._retell(row, "eligible_at", DUE)

    async def delete(self) -> None:
        """Retention: by a walk, or in the commit of `Done`. Only what has ended, and nothing that a parent may read."""
        ages = [self.random.choice((None, 0.0, 0.0, 6000.0)) for _ in range(3)]
        options = {
            "after": self.random.choice((0, 0, 5)),
            "limit": self.random.choice((2, 100)),
            "old": self.random.choice((0.0, 6000.0)),
        }
        before = set(self.server.tables.rows)
        await self.same(retention.delete_ended, SCHEMA, retention.Ages(*ages, 0.0), **options)
        for number in before - set(self.server.tables.rows):
            del self.finals[number]

    async def truncate(self) -> None:
        """Retention: snapshots of live rows, and records that go, some of them."""
        moves = self.random.choice((1, 3, 5))
        await self.same(retention.sample_long_journals, SCHEMA, moves=moves, pages=200, most=1000)
        found = await self.same(retention.find_long_journals, SCHEMA, moves=moves, after=0, limit=100)
        for number in set(found.grown) - self.touched:
            await self.same(retention.snapshot_journal, SCHEMA, number, moves=moves)
        for number in found.ids:
            await self.same(
                retention.truncate_journal, SCHEMA, number, moves=moves, most=self.random.choice((1, 9))
            )

    async def maintain(self) -> None:
        expired, again = await self.both(signal.expire_awaits, SCHEMA, "default", limit=10)
        fields = [[*map(unordered, attrs.astuple(each)[:3]), each.cascades] for each in (expired, again)]
        assert fields[0] == fields[1]
        stuck, _ = await self.same(lease.sweep_keys, SCHEMA, after="", limit=10)
        keys = self.random.choice((["red"], ["blue"], stuck))
        offered, again = await self.both(claims.promote_siblings, SCHEMA, keys)
        assert unordered(offered) == unordered(again)
        owners, models = await self.both(lease.read_owners, SCHEMA)
        assert {(o.owner, o.claims) for o in owners} == {(o.owner, o.claims) for o in models}
        found, models = await self.both(read_by_ids, SCHEMA, list(self.server.tables.rows))
        assert [plain_instance(each) for each in found.values()] == [*map(plain_instance, models.values())]
        shape, model = await self.both(claims.read_queue, SCHEMA, "default")
        assert (shape.priorities, shape.shelved) == (model.priorities, model.shelved)
        assert (shape.next_due is None) == (model.next_due is None)
        assert (shape.next_deadline is None) == (model.next_deadline is None)
        await self.same(claims.wait_for_work, SCHEMA, ["default", "other"], every=0.0, patience=0.0)

    async def tell(self) -> None:
        """A notifier was told of instances, some of which have moved on or ended since."""
        ours, theirs = await self.both(wakeup.read_intents, SCHEMA, sorted(self.server.tables.rows))
        due = [attrs.evolve(each, visible_at=b"") for each in ours]
        assert due == [attrs.evolve(each, visible_at=b"") for each in theirs], self.said[-5:]
        for real, model in self.random.sample(self.told, min(2, len(self.told))):
            done = await wakeup.record_wakeup(self.real, SCHEMA, real)
            assert done == await wakeup.record_wakeup(self.model, SCHEMA, model), self.said[-5:]
        self.told += zip(ours, theirs, strict=True)

    async def time(self) -> None:
        """A lease ends, a deadline passes, a future row is due: in both."""
        row = self.random.choice(list(self.server.tables.rows.values()))
        if last_kind(self.server.tables, row, DUE) == "spawned" and row.status == "runnable":
            return  # such a record cannot tell another time
        query = "update durable.gen_durable set {} where id = %s"
        if row.lease is not None:
            row.lease = self.server.now() - 1
            self.db.execute(query.format("lease_expires_at = now()"), [row.id])
            self._retell(row, "lease_until", ("claimed", "next"), column="lease_expires_at")
        elif row.await_deadline is not None:
            row.await_deadline = self.server.now() - 1
            self.db.execute(query.format("await_deadline = now()"), [row.id])
            self._retell(row, "deadline", ("parked", "asked", "spawned"), column="await_deadline")
        elif row.status == "runnable":
            row.eligible_at = row.id
            self.db.execute(
                query.format("eligible_at = timestamptz '2020-01-01' + id * interval '1 s'"), [row.id]
            )
            self._retell(row, "eligible_at", DUE)

    def _retell(self, row: Row, key: str, kinds: Sequence[str], *, column: str = "eligible_at") -> None:
        retell(self.db, self.server.tables, row, key, kinds, column)


NEED_CLAIMS = {"begin", "commit", "spawn", "renew", "release", "crash"}


async def walk(
    dsn: str, seed: int | str, walks: dict[str, int], *, eager: bool = False, limited: bool = False
) -> set[str]:
    """Walk; the kinds of records that were written."""
    first = seed if isinstance(seed, int) else int.from_bytes(os.urandom(4))
    print(f"seed {first}")
    with psycopg.connect(dsn, autocommit=True) as db:
        async with connect(dsn) as conn:
            pair = Pair(conn, db, first)
            await pair.declare()
            pair.uses = USES if limited else pair.uses
            pair.eager = eager
            await pair.insert()
            for _ in range(200):
                [kind] = pair.random.choices(list(walks), walks.values())
                kind = kind if pair.server.tables.rows else "insert"  # all of them may be deleted
                if kind in NEED_CLAIMS and not pair.held:
                    continue
                pair.said.append(kind)
                pair.world.now += 0.001  # what both write has its time, in the same order
                await getattr(pair, kind)()
                pair.compare()
            return pair.kinds
