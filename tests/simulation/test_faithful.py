"""The simulated statements mean what the SQL means: both are given the same calls, and must answer and store the same.

One session, so no locks: those are for tests/store. Time is moved by hand, in both.
"""

from __future__ import annotations

import math
from random import Random
from typing import Any

import attrs
import psycopg
import pytest
import trio
from durable_actors._store import children, claim as claims, commit, insert, lease, node as nodes, signal
from durable_actors._store.claim import Owner, PickFrom
from durable_actors._store.read import Instance, read_by_ids
from durable_actors._store.rows import Claim, Raised, Transition
from durable_actors.machine._labels import Labels
from tests.simulation.driver import Transaction
from tests.simulation.process import World
from tests.simulation.server import Request, Server
from tests.simulation.statements import SECOND
from tests.simulation.tables import Row
from tests.store.kit import address, connect, known_steps, plan

SCHEMA = "durable"
HEAD = PickFrom([0, 1], ["-infinity"] * 2, [0, 0])
KNOWN = known_steps("m/1/s", "m/1/t")
COLUMNS = (
    "id, status, hold, step, attempt, crashes, visit, round, priority, partition_key, inbox, awaits, await_step, "
    "locked_by, claim_id is not null, lease_expires_at is not null, await_deadline is not null, children_total, "
    "children_pending, wake_on_failure, parent_id, barrier, last_error is not null, state::text, result::text, "
    "interruptions, tags, meta::text, error_type, traceback"
)


class LocalConn:
    """A connection to the simulated server without a network: every answer is there at once."""

    def __init__(self, server: Server) -> None:
        self.server, self.session = server, server.open_session({})
        self.in_transaction = self.closed = False
        self.preamble: list[Any] = []

    @property
    def pristine(self) -> bool:
        return self.session.tx is None

    async def _ask(self, calls: list[Any], command: str | None) -> Any:
        await trio.lowlevel.checkpoint()
        replies: list[Any] = []
        self.server.receive(self.session, Request(calls, command, replies.append))
        [reply] = replies
        if isinstance(reply, Exception):
            raise reply
        return reply

    async def run(self, statement: Any, params: Any = ()) -> Any:
        return (await self._ask([(statement, params)], None))[0]

    async def batch(self, calls: Any) -> Any:
        return await self._ask(list(calls), None)

    async def command(self, sql: str, *, commits: bool = False) -> Any:
        return await self._ask([], sql)

    def transaction(self) -> Transaction:
        return Transaction(self, "BEGIN")  # type: ignore[arg-type]


def plain(value: Any) -> Any:
    """Something to compare: not every class of the store has an equality."""
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    return attrs.asdict(value) if attrs.has(type(value)) else value


def plain_instance(each: Instance) -> tuple[Any, ...]:
    """What both must say of an instance; their clocks differ."""
    ended = each.finished_at is not None
    return (
        each.id,
        each.machine,
        each.step,
        each.status,
        each.attempt,
        each.visit,
        each.state,
        each.result,
        ended,
    )


def unordered(values: Any) -> list[Any]:
    """RETURNING has no order."""
    return sorted(values, key=str)


def stored(row: Row) -> tuple[Any, ...]:
    """As COLUMNS shows it."""
    return (
        row.id, row.status, row.hold, row.step, row.attempt, row.crashes, row.visit, row.round, row.priority,
        row.partition_key, row.inbox, None if row.awaits is None else list(row.awaits), row.await_step, row.locked_by,
        row.claim_id is not None, row.lease is not None, row.await_deadline is not None, row.children_total,
        row.children_pending, row.wake_on_failure, row.parent_id, row.barrier, row.last_error is not None,
        row.state.decode(), None if row.result is None else row.result.decode(), row.interruptions,
        None if row.tags is None else list(row.tags), None if row.meta is None else row.meta.decode(),
        row.error_type, row.traceback,
    )  # fmt: skip


class Pair:
    """Both stores, and the claims that were given out, side by side."""

    def __init__(self, real: Any, db: psycopg.Connection[Any], seed: int) -> None:
        self.random = Random(seed)
        self.world = World(seed)
        self.world.now = 10_000.0
        self.server = Server(self.world, frozenset())
        self.model = LocalConn(self.server)
        self.real, self.db = real, db
        self.held: list[tuple[Claim, Claim]] = []
        self.said: list[str] = []

    async def both(self, function: Any, *args: Any, **options: Any) -> tuple[Any, Any]:
        self.said.append(f"{function.__name__} {args} {options}")
        self.world.now += 0.001
        return await function(self.real, *args, **options), await function(self.model, *args, **options)

    async def same(self, function: Any, *args: Any, **options: Any) -> Any:
        ours, theirs = await self.both(function, *args, **options)
        assert plain(theirs) == plain(ours), self.said[-5:]
        return ours

    def compare(self) -> None:
        found = self.db.execute(f"select {COLUMNS} from durable.gen_durable order by id").fetchall()
        rows = sorted(self.server.tables.rows.values(), key=lambda row: row.id)
        assert [stored(row) for row in rows] == found, self.said[-5:]
        letters = self.db.execute(
            "select target_id, name, dedup_key, consumed_at is not null from durable.signals order by id"
        ).fetchall()
        ours = sorted(self.server.tables.letters.values(), key=lambda each: each.id)
        assert [(each.target, each.name, each.dedup, each.consumed) for each in ours] == letters, self.said[
            -5:
        ]

    # -- what may be done

    async def insert(self) -> None:
        plans = [
            plan(
                machine="m", version=self.random.choice((1, 1, 1, 2)), step=self.random.choice("sssu"),
                priority=self.random.choice((0, 1)), partition_key=self.random.choice((None, "red", "blue")),
                delay=self.random.choice((0.0, 0.0, 6000.0)),
                labels=self.random.choice((None, None, Labels(("a", "b c"), b'{"k": [1, null]}'))),
            )
            for _ in range(self.random.randint(1, 3))
        ]  # fmt: skip
        await self.same(insert.insert_instances, SCHEMA, plans)

    async def pick(self) -> None:
        owner = Owner(SCHEMA, self.random.choice("ab"), b"hash", 6000.0)
        options = {"queue": "default", "limit": self.random.randint(1, 4), "known": KNOWN, "now": 0.0}
        begin = self.random.choice((HEAD, attrs.evolve(HEAD, shelved=[address("m/1"), address("m/1", "t")])))
        if self.random.random() < 0.3 and self.server.tables.rows:
            ids = sorted(self.server.tables.rows)
            begin = claims.PickFrom((), (), (), by_id=self.random.sample(ids, min(3, len(ids))))
        ours, theirs = await self.both(claims.pick_instances, owner, begin=begin, **options)

        def shown(picked: Any) -> Any:
            rows = [attrs.evolve(each, claim_id="") for each in picked.claims]
            return [attrs.asdict(each) for each in rows], [(each.id, each.what) for each in picked.seen]

        assert shown(theirs) == shown(ours), self.said[-5:]
        self.held += zip(ours.claims, theirs.claims, strict=True)

    def _some(self) -> list[tuple[Claim, Claim]]:
        """ActiveClaim ones, of distinct instances, stale or not."""
        chosen = self.random.sample(self.held, min(len(self.held), self.random.randint(1, 3)))
        return list({ours.id: (ours, theirs) for ours, theirs in chosen}.values())

    async def commit(self) -> None:
        pairs = self._some()
        ids = [ours.id for ours, _ in pairs]
        inboxes, models = await self.both(signal.read_inboxes, SCHEMA, ids)
        real, model = [], []
        for ours, theirs in pairs:
            shape = self._outcome(ours)
            take = self.random.random() < 0.7 and ours.awaits is not None
            for side, claim, inbox in ((real, ours, inboxes), (model, theirs, models)):
                seen = [each.id for each in inbox[claim.id] if claim.awaits and each.name in claim.awaits]
                parks = shape["status"] == "awaiting_signal"
                side.append(
                    Transition(
                        claim, **shape, consumed=tuple(seen) if take else (),
                        kept=tuple(seen) if parks and not take else (),
                    )
                )  # fmt: skip
        self.said.append(f"commit {real}")
        late = self.random.random() < 0.5
        done = await commit.commit_outcomes(self.real, SCHEMA, real, accept_late=late)
        again = await commit.commit_outcomes(self.model, SCHEMA, model, accept_late=late)  # type: ignore[arg-type]
        assert plain(again.committed) == plain(done.committed), self.said[-5:]
        assert unordered(again.offered) == unordered(done.offered), self.said[-5:]

    def _outcome(self, claim: Claim) -> dict[str, Any]:
        draw = self.random
        state = None if draw.random() < 0.5 else b'{"bb":1,"a":[1,2]}'
        kind = draw.choice(("next", "next", "retry", "park", "park", "done", "failed"))
        if kind == "next":
            ahead = claim.plain and draw.random() < 0.5
            return {
                "status": "runnable",
                "step": "t",
                "attempt": 0,
                "advance": 1,
                "keep_claim": ahead,
                "state": state,
            }
        if kind == "retry":
            retry = {"attempt": claim.attempt + 1, "delay": draw.choice((0.0, 6000.0)), "keeps_awaits": True}
            raised = draw.choice((None, Raised("T", "trace")))
            return {"status": "runnable", "step": claim.step, "last_error": "x", "raised": raised, **retry}
        if kind == "park":
            then = draw.choice((None, "t"))
            timeout = draw.choice((None, 6000.0))
            parked = {"awaits": draw.choice((("x",), ("x", "y"))), "await_step": then, "timeout": timeout}
            return {"status": "awaiting_signal", "step": claim.step, "attempt": 0, "state": state, **parked}
        ended = (
            {"result": b'{"r":1}'}
            if kind == "done"
            else {"last_error": "why", "raised": draw.choice((None, Raised("T", None)))}
        )
        return {"status": kind, "step": claim.step, "attempt": claim.attempt, **ended}

    async def spawn(self) -> None:
        [(ours, theirs), *_] = self._some()
        then = children.Spawn(
            [plan(machine="m")] * self.random.randint(0, 2), "t", self.random.choice((None, 1)), True, None
        )
        outs = []
        for conn, claim in ((self.real, ours), (self.model, theirs)):
            change = Transition(claim, "awaiting_children", claim.step, attempt=0, advance=1, await_step="t")
            outs.append(await children.schedule_children(conn, SCHEMA, change, then, accept_late=True))
        assert plain(outs[0]) == plain(outs[1]), self.said[-5:]

    async def signal(self) -> None:
        number = self.random.randint(1, self.server.tables.serial + 1)
        deliveries = [
            signal.plan_signal(number, self.random.choice("xy"), 1, self.random.choice((None, "d", "e")))
            for _ in range(self.random.randint(1, 2))
        ]
        await self.same(signal.send_signals, SCHEMA, deliveries)

    async def renew(self) -> None:
        pairs = self._some()
        ours = await lease.renew_leases(self.real, SCHEMA, [each for each, _ in pairs], lease_ttl=6000.0)
        theirs = await lease.renew_leases(self.model, SCHEMA, [each for _, each in pairs], lease_ttl=6000.0)  # type: ignore[arg-type]
        assert [each.claim_id in ours for each, _ in pairs] == [each.claim_id in theirs for _, each in pairs]

    async def release(self) -> None:
        pairs = self._some()
        keyed = all(ours.partition_key is not None for ours, _ in pairs)
        hold = self.random.choice((claims.OFFERED, claims.SHELVED, *[claims.HELD] * keyed))
        attempts, interruptions = self.random.choice(((0, 0), (0, 1), (1, 0)))
        options = {"attempts": attempts, "interruptions": interruptions, "hold": hold}
        ours = await claims.release_claims(self.real, SCHEMA, [each for each, _ in pairs], **options)
        theirs = await claims.release_claims(self.model, SCHEMA, [each for _, each in pairs], **options)  # type: ignore[arg-type]
        assert ours[0] == theirs[0], self.said[-5:]
        assert unordered(ours[1]) == unordered(theirs[1]), self.said[-5:]

    async def crash(self) -> None:
        pairs = self._some()
        results = []
        for side, conn in enumerate((self.real, self.model)):
            chosen = [pair[side] for pair in pairs]
            results.append(
                await lease.crash_claims(conn, SCHEMA, chosen, error="SystemExit: 2", max_crashes=3)  # type: ignore[arg-type]
            )
        ours, theirs = results
        assert [unordered(each) for each in ours] == [unordered(each) for each in theirs], self.said[-5:]
        self._far_future()

    async def strays(self) -> None:
        known = self._some() if self.held else []
        results = []
        for side, conn in enumerate((self.real, self.model)):
            ids = [pair[side].claim_id for pair in known]
            known_ids = ids if side == 1 else [each for each in ids if len(each) == 36]
            results.append(
                await lease.release_orphans(conn, SCHEMA, owner="a", queue="default", known=known_ids)
            )
        assert results[0][0] == results[1][0], self.said[-5:]
        assert unordered(results[0][1]) == unordered(results[1][1]), self.said[-5:]

    async def stop(self) -> None:
        """A node stops in good order; what it has claimed is left behind."""
        for conn in (self.real, self.model):
            await nodes.register_node(conn, SCHEMA, incarnation="b", node="b", about={})
            await nodes.stop_node(conn, SCHEMA, "b")

    async def reap(self) -> None:
        dead = self.random.choice(({}, {"a": math.inf}, {"a": 0.0}, {"b": math.inf}))
        ours, theirs = await self.both(lease.reap_claims, SCHEMA, limit=2, dead=dead, max_crashes=3)
        assert [unordered(each) for each in ours] == [unordered(each) for each in theirs], self.said[-5:]
        self._far_future()

    def _far_future(self) -> None:
        """Pauses of seconds: the server's clock runs, ours does not."""
        self.db.execute(
            "update durable.gen_durable set eligible_at = eligible_at + interval '1 h' where eligible_at > now()"
        )
        for row in self.server.tables.rows.values():
            row.eligible_at += 3600 * SECOND if row.eligible_at > self.server.now() else 0

    async def maintain(self) -> None:
        await self.same(signal.expire_awaits, SCHEMA, "default", limit=10)
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
        assert [shape.next_due is None, shape.next_deadline is None] == [
            model.next_due is None, model.next_deadline is None,
        ]  # fmt: skip
        await self.same(claims.wait_for_work, SCHEMA, ["default", "other"], every=0.0, patience=0.0)

    async def time(self) -> None:
        """A lease ends, a deadline passes, a future row is due: in both."""
        row = self.random.choice(list(self.server.tables.rows.values()))
        query = "update durable.gen_durable set {} where id = %s"
        if row.lease is not None:
            row.lease = self.server.now() - 1
            self.db.execute(query.format("lease_expires_at = now()"), [row.id])
        elif row.await_deadline is not None:
            row.await_deadline = self.server.now() - 1
            self.db.execute(query.format("await_deadline = now()"), [row.id])
        elif row.status == "runnable":
            row.eligible_at = row.id
            self.db.execute(
                query.format("eligible_at = timestamptz '2020-01-01' + id * interval '1 s'"), [row.id]
            )


@pytest.mark.parametrize("seed", range(2))
async def test_the_model_does_what_the_sql_does(durable_dsn: str, seed: int):
    kinds = ("insert", "pick", "pick", "pick", "commit", "commit", "commit", "spawn", "signal", "signal", "renew",
             "release", "crash", "strays", "reap", "stop", "maintain", "time", "time")  # fmt: skip
    with psycopg.connect(durable_dsn, autocommit=True) as db:
        async with connect(durable_dsn) as conn:
            pair = Pair(conn, db, seed)
            await pair.insert()
            for _ in range(120):
                kind = pair.random.choice(kinds)
                if kind in {"commit", "spawn", "renew", "release"} and not pair.held:
                    continue
                pair.said.append(kind)
                await getattr(pair, kind)()
                pair.compare()
