"""The book: what happened, and whether it may. One check per invariant, each at the moment when it could break.

It is told of every committed change of a row, of every statement that reaps and every look at a node's lock, and of
every step that begins and ends; of dead processes, nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import attrs
from durable_actors._engine.committing.queue import PendingCommit
from durable_actors._engine.committing.verdicts import Verdict
from durable_actors._postgres.driver.waiting import CANCEL_TIMEOUT
from durable_actors._store.moves import move_of
from durable_actors._store.rows import Committed
from durable_actors.machine import Context
from tests.invariants.journal import journal_problems
from tests.simulation.book_flow import FlowChecks
from tests.simulation.ending import asked_to_cancel
from tests.simulation.process import Process, Violation, World, current_process
from tests.simulation.server import Server
from tests.simulation.statements import SECOND
from tests.simulation.statements_journal import stored
from tests.simulation.tables import Letter, Row, Tx

HAIR = 0.001
"""Seconds: instants are rounded to microseconds on the way."""


@attrs.define(eq=False)
class Run:
    """A step that runs."""

    process: Process
    claim: str
    key: str | None
    handed: frozenset[int]


@attrs.define
class Looks:
    """One server session has looked at an owner's lock and found it free each time, while no lease of it moved."""

    first: int
    last: int
    lease: int
    """The end of the owner's last lease at the first look."""


class Book(FlowChecks):
    """All checks of one world."""

    def __init__(self, world: World, server: Server, *, dead_after: float) -> None:
        super().__init__()
        self.world = world
        self.server = server
        self.dead_after = dead_after
        self.failure: Violation | None = None
        self.counts: Counter[str] = Counter()
        self.running: dict[str, Run] = {}
        self.owners: dict[str, Process] = {}
        """Incarnation to its process."""
        self.names: dict[str, int] = {}
        """Items of the plan to their instances, once they are inserted."""
        self._leases: dict[str, int] = {}
        """Per claim the latest end of its lease that was ever committed."""
        self._handed: dict[str, frozenset[int]] = {}
        """Per claim what its last run was handed."""
        self._claims: set[str] = set()
        self._commands: Counter[tuple[str, int, str | None]] = Counter()
        """How often each command took effect, by name, instance and idempotency key."""
        self._answers: dict[tuple[str, int, str], object] = {}
        self._ends: dict[tuple[int, int], Counter[str]] = {}
        """By parent and barrier: how its children ended."""
        self._looks: dict[tuple[int, str], Looks] = {}
        """By server session and owner."""
        server.scene.owner_locked = self._look_at
        server.tables.written = self.written
        server.tables.changed = self.changed
        server.tables.consumed = self.consumed
        server.tables.deleted = self.deleted
        server.tables.charged = self.charged

    def fail(self, rule: str, text: str) -> None:
        """Note the first violation; the world stops at it."""
        if self.failure is None:
            self.world.log("VIOLATION", rule, text)
            self.failure = Violation(rule, text)

    # -- rows

    def deleted(self, tx: Tx, row: Row) -> None:
        """Retention deletes nothing that lives, and nothing that its parent waits for or may read."""
        self.counts["delete"] += 1
        self.world.log("row", row.id, "delete", row.status)
        if row.status == "executing" and tx.why.get(row.id, ("",))[0] == "commit":
            self._finished(tx, row)
        elif not row.terminal:
            self.fail("retention", f"instance {row.id} is {row.status}, and was deleted")
        parent = None if row.parent_id is None else tx.get(row.parent_id)
        if parent is not None and not parent.terminal and row.barrier == parent.visit:
            self.fail(
                "retention", f"instance {row.id} was deleted, and its parent {parent.id} has not read it"
            )

    def _finished(self, tx: Tx, row: Row) -> None:
        """A commit deletes the row that it ends: `Done` of a machine with `keep=0`."""
        why = tx.why[row.id]
        self.counts["finished"] += 1
        if row.claim_id != why[1]:
            self.fail(
                "I4", f"instance {row.id}: stale commit of {why[1]} deleted it; its claim was {row.claim_id}"
            )
        self._committed(tx, row, why)
        if row.parent_id is not None or row.links is not None:
            self.fail(
                "retention", f"instance {row.id} was deleted by its commit, and somebody may look for it"
            )

    def judged(self, pending: PendingCommit, verdict: Verdict | None) -> None:
        """A node has a verdict on an outcome whose commit deletes the row; None: it was withdrawn."""
        claim = pending.transition.claim
        if not pending.transition.deletes or current_process.get().dead:
            return
        ours = claim.claim_id in self.server.tables.finished.get(claim.id, ())
        told = isinstance(verdict, Committed)
        self.counts[f"finished, {'told' if told else 'not told'}"] += ours
        if verdict is not None and told != ours:
            self.fail("fate", f"instance {claim.id}: {claim.claim_id} was told {verdict}, and {ours=}")

    def check_finished(self, number: int) -> None:
        """It was deleted by its commit, by one."""
        finished = self.server.tables.finished.get(number, [])
        if len(finished) != 1 or number in self.server.tables.rows:
            self.fail("result", f"instance {number} was finished by {finished}")

    def changed(self, tx: Tx, old: Row | None, new: Row) -> None:
        why = tx.why[new.id]
        what = why[0]
        self.counts[what] += 1
        counts = (f"v{new.visit}", f"a{new.attempt}")
        self.world.log("row", new.id, *why[:2], new.status, new.step, *counts, new.claim_id, new.locked_by)
        self._constraints(tx, new)
        self.flows(tx, old, new, what)
        if old is None:
            return
        if old.terminal and what != "retry":
            self.fail("I8", f"instance {old.id} was {old.status}, and {what} made it {new.status}")
        if new.visit < old.visit:
            self.fail("I3", f"instance {old.id}: visit {old.visit} became {new.visit}")
        live = old.status == "executing"
        self._commanded(tx, old, new, why)
        if live and new.status == "executing" and new.claim_id != old.claim_id:
            self.fail("I2", f"instance {old.id}: {new.claim_id} took it while {old.claim_id} holds it")
        if new.claim_id != old.claim_id and new.claim_id is not None:
            if what != "claim" or new.claim_id in self._claims:
                self.fail("I3", f"instance {old.id}: {what} set claim {new.claim_id}")
            self._claims.add(new.claim_id)
        if new.lease is not None:
            self._leases[new.claim_id] = max(self._leases.get(new.claim_id, 0), new.lease)
        if what in {"commit", "renew", "release", "crash"} and (not live or old.claim_id != why[1]):
            self.fail(
                "I4", f"instance {old.id}: stale {what} of {why[1]} changed it; its claim was {old.claim_id}"
            )
        elif what == "commit":
            self._committed(tx, old, why)
        elif what in {"release", "crash"}:
            self._released(old)
        # A transaction may move a row twice: a park, and the wake of its recheck.
        if new.rev <= old.rev + 1 and self.failure is None and move_of(old.columns(), new.columns()) is None:
            self.fail("I4", f"instance {old.id}: {what} is no move: {old} became {new}")

    # -- commands

    def _commanded(self, tx: Tx, old: Row, new: Row, why: tuple[Any, ...]) -> None:
        what = why[0]
        if what in {"cancel", "ask", "retry", "pause", "resume"}:
            name = "cancel" if what == "ask" else what
            self._commands[name, new.id, why[1]] += 1
            if why[1] is not None and self._commands[name, new.id, why[1]] > 1:
                self.fail("receipt", f"instance {new.id}: {name} with key {why[1]} was carried out twice")
        same = (new.status, new.claim_id, new.visit) == (old.status, old.claim_id, old.visit)
        if asked_to_cancel(old) and not old.terminal and not same and not _obeys(old, new):
            self.fail("cancel", f"instance {old.id} was asked to end, and {what} made it {new.status}")
        if new.status == "cancelled" and not asked_to_cancel(new) and new.cancellation is None:
            self.fail("cancel", f"instance {old.id} was cancelled, and nobody had asked for that")
        if old.paused and not old.terminal:
            if new.status == "executing" and not same:
                self.fail("pause", f"instance {old.id} is paused, and {what} let it enter a step")
            over = new.terminal or asked_to_cancel(new) or what == "resume"
            if not new.paused and not over:
                self.fail("pause", f"instance {old.id} was paused, and {what} has ended that")
        if what == "claim" and tx.is_stopped(new):
            self.fail("pause", f"instance {old.id} was claimed, and its queue or machine is paused")
        if new.terminal and new.barrier is not None:
            self._ends.setdefault((new.parent_id, new.barrier), Counter())[new.status] += 1
        if what == "join" and new.status == "runnable":
            living = [
                r.id for r in tx.all() if (r.parent_id, r.barrier) == (new.id, new.visit) and not r.terminal
            ]
            if living:
                self.fail("I11", f"instance {new.id}: its barrier opened, and children {living} live")

    def answered(self, command: str, number: int, key: str, answer: object) -> None:
        """A command was answered: it has been carried out, and says the same whenever it is repeated."""
        self.world.log("client", command, number, key, answer)
        self.counts[f"{command} {answer if isinstance(answer, str) else 'done'}"] += 1
        if not self._commands[command, number, key]:
            self.fail("receipt", f"instance {number}: {command} was answered {answer}, and not carried out")
        if self._answers.setdefault((command, number, key), answer) != answer:
            self.fail("receipt", f"instance {number}: {command} with key {key} was answered in two ways")

    def was_cancelled(self, number: int) -> bool:
        """Whether a command has cancelled it, or asked for that."""
        return any(name == "cancel" and each == number for name, each, _ in self._commands)

    def children_done(self, parent: int, size: int) -> int:
        """How many children of its last barrier are done: all, unless some were cancelled."""
        barrier = max((barrier for each, barrier in self._ends if each == parent), default=0)
        ends = self._ends.get((parent, barrier), Counter())
        if ends.total() != size:
            self.fail("I11", f"instance {parent}: of {size} children {ends.total()} ended")
        return ends["done"]

    def _constraints(self, tx: Tx, row: Row) -> None:
        owned = row.claim_id is not None and row.locked_by is not None and row.lease is not None
        if owned != (row.status == "executing") and (row.status == "executing" or row.locked_by or row.lease):
            self.fail("constraint", f"gen_durable_claimed: {row}")
        if row.status == "awaiting_signal" and row.awaits is None:
            self.fail("constraint", f"gen_durable_awaits: {row}")
        if row.status == "executing" and row.partition_key is not None:
            for other in tx.all():  # as its transaction leaves them: a commit hands a key on
                same = other.partition_key == row.partition_key and other.id != row.id
                if same and other.status == "executing":
                    self.fail(
                        "I9", f"instances {other.id} and {row.id} of key {row.partition_key} are executing"
                    )

    def _committed(self, tx: Tx, old: Row, why: tuple[Any, ...]) -> None:
        _, claim, visit, late = why
        if visit != old.visit:
            self.fail(
                "I4", f"instance {old.id}: the outcome of visit {visit} was written over visit {old.visit}"
            )
        if not late and old.lease <= tx.clock:
            self.fail("I4", f"instance {old.id}: {claim} committed after its lease, which was refused to it")

    def _released(self, old: Row) -> None:
        run = self.running.get(old.claim_id)
        if run is not None and not run.process.dead and not run.process.paused:
            self.fail("I2", f"instance {old.id}: {old.claim_id} was given back while its step runs")

    # -- reaps

    def _look_at(self, owner: str) -> bool:
        """Stands for a statement's look at an owner's lock, and notes what it shows."""
        locked = f"\2{owner}" in self.server.locks
        key = (self.server.scene.backend, owner)
        looks = self._looks.pop(key, None)
        if not locked:
            now, lease = self.server.now(), self._last_lease(owner)
            if looks is None or looks.lease < lease:
                looks = Looks(now, now, lease)
            looks.last = now
            self._looks[key] = looks
        return locked

    def _last_lease(self, owner: str) -> int:
        """It moves whenever the owner claims or renews anything."""
        return max(
            (row.lease for row in self.server.tables.rows.values() if row.locked_by == owner), default=0
        )

    def written(self, tx: Tx, row: Row) -> None:
        """A statement is about to write this row. Its transaction commits later, or never."""
        if tx.why[row.id][0] == "reap":
            self._reaps(row)

    def _reaps(self, row: Row) -> None:
        """A reap is judged at its statement, which looks at the lock once more.

        Afterwards the reaper has its row lock, and its owner may take the session lock back before the commit: that is
        allowed. So is an owner that took its lock and lost it again between two looks.
        """
        owner, name = self.owners.get(row.locked_by), row.locked_by
        if self._leases[row.claim_id] <= self.server.now() or owner is None or owner.dead or owner.ended:
            return
        # Alive, and its lease has not expired: only a lock that was seen free for long enough allows this.
        enough = (self.dead_after - HAIR) * SECOND
        seen = any(
            looks.last - looks.first >= enough and looks.lease >= row.lease
            for (_, seen_of), looks in self._looks.items()
            if seen_of == name
        )
        if not seen or f"\2{name}" in self.server.locks:
            self.fail("I2", f"instance {row.id}: {row.claim_id} of {owner.name} was reaped within its lease")

    def consumed(self, tx: Tx, letter: Letter) -> None:
        why = tx.why.get(letter.target)
        self.world.log("consumed", letter.id, letter.target)
        if why is None or why[0] != "commit":
            self.fail("I6", f"signal {letter.id} of {letter.target} was consumed, but not by a commit: {why}")
        elif letter.id not in self._handed.get(why[1], frozenset()):
            self.fail("I6", f"signal {letter.id} of {letter.target} was consumed by a step that never saw it")

    # -- steps

    @contextmanager
    def step(self, ctx: Context[Any], *, calls: bool = False) -> Iterator[None]:
        """Around the body of a step. `calls`: it uses the database, whose cancellation may take a moment."""
        process, claim = current_process.get(), str(ctx.claim_id)
        row = self.server.tables.rows.get(ctx.id)
        handed = frozenset(signal.id for signal in ctx.awaited)
        if row is None:  # it was taken for dead, and the next owner has run and deleted it
            self.counts["step of a row that is gone"] += 1
        elif not process.dead:
            self._began(process, ctx, row, claim, handed)
        try:
            yield
        finally:
            if not process.dead:
                self.running.pop(claim, None)
                self._in_trust(process, claim, margin=CANCEL_TIMEOUT if calls else 0.0)

    def _began(
        self, process: Process, ctx: Context[Any], row: Row, claim: str, handed: frozenset[int]
    ) -> None:
        self.counts["step"] += 1
        self.world.log(process.name, "step", ctx.id, ctx.step, f"v{ctx.visit}", f"a{ctx.attempt}", claim)
        if row.visit < ctx.visit:
            self.fail("I1", f"instance {ctx.id}: visit {ctx.visit} runs, committed is {row.visit}")
        if claim in self.running:
            self.fail("I2", f"instance {ctx.id}: two steps of {claim} run at once")
        if claim not in self._claims:
            self.fail("I2", f"instance {ctx.id}: a step of {claim}, which nobody was given")
        for other in self.running.values():
            awake = not other.process.paused and not other.process.dead
            same = row.partition_key is not None and other.key == row.partition_key
            if same and awake and other.process.resumed_at < self.world.now:
                self.fail("I9", f"key {other.key}: {other.claim} and {claim} run at once")
        self._handed[claim] = handed
        self.began(claim)
        self.running[claim] = Run(process, claim, row.partition_key, handed)
        self._in_trust(process, claim)

    def refused(self, target: str) -> None:
        """A signal found no target: a repetition, to an instance that has had all it wanted. The result tells."""
        row = self.server.tables.rows[self.names[target]]
        self.world.log("no target", target)
        if not row.terminal:
            self.fail("I7", f"a signal to {target} found no target, which is {row.status}")

    def effect(self) -> None:
        """Something that a step does to the world outside."""
        process = current_process.get()
        if not process.dead:
            self.counts["effect"] += 1

    def _in_trust(self, process: Process, claim: str, margin: float = 0.0) -> None:
        late = (self.server.now() - self._leases.get(claim, 0)) / SECOND - margin
        # What was ready to run when its process was stopped runs once more when that goes on.
        if late > HAIR and process.resumed_at < self.world.now - margin:
            self.fail("I5", f"a step of {claim} ran {late:.3f} s beyond its lease on {process.name}")

    # -- the end of the faults, and of everything

    def check_journal(self) -> None:
        """The records of every instance fold into its row; `verify` finds nothing; a rebuild would change nothing."""
        tables = self.server.tables
        records = [record for _, record in sorted(tables.journal.items())]
        self.counts["record"] = len(records)
        for problem in journal_problems(map(stored, tables.rows.values()), records)[:1]:
            self.fail("journal", problem)

    def stuck(self) -> list[Row]:
        """Executing without a live owner (I12)."""
        return [
            row
            for row in self.server.tables.rows.values()
            if row.status == "executing" and not self._held(row)
        ]

    def _held(self, row: Row) -> bool:
        owner = self.owners.get(row.locked_by)
        if owner is None or owner.dead or owner.ended:
            return False
        engine = getattr(owner, "engine", None)
        return engine is not None and engine._node.claims.find(row.claim_id) is not None


def _obeys(old: Row, new: Row) -> bool:
    """Whether this is what may follow a request to cancel: its end, or its compensation."""
    return new.status in {"done", "cancelled"} or (old.cancellation is None is not new.cancellation)
