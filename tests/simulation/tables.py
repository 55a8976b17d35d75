"""The tables, and transactions on them: read committed, row locks, all or nothing.

A transaction writes into copies; whoever else looks sees the committed rows until it commits. A row that another open
transaction has written or locked is skipped or waited for (`Blocked`), as the statement says.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import psycopg
from durable_actors._store.holds import HOLDS, PAUSED
from durable_actors.machine import ENDED, step_address
from durable_actors.retention import Retention
from tests.simulation.small_tables import Name, SmallTables

SHORT = Retention(done=1, cancelled=1, failed=1, interval=1)
"""How long simulated engines keep ended rows, as far as no unique key holds them: children, mostly."""
object.__setattr__(SHORT, "history", 5)  # shorter than users may have it
WITHOUT_PLACE = frozenset(hold.number for hold in HOLDS if not hold.keeps_place)


class Row:
    """One row of gen_durable. Instants are microseconds of the server's clock."""

    __slots__ = (
        "attempt", "await_deadline", "await_step", "awaits", "barrier", "cancel_rest", "cancellation", "child_key",
        "children_pending", "children_total", "claim_id", "crashes", "eligible_at", "error_type", "fair_key",
        "fingerprint",
        "finished_at", "fsm", "hold", "id", "inbox", "inserted_at", "interruptions", "journal", "last_error",
        "lease", "limited_by", "links", "locked_by", "manual", "max_attempts", "meta", "parent_id", "partition_key",
        "priority",
        "queue", "rate_limit", "request", "rerun_of", "result", "rev", "round", "scope", "shelved_step", "state",
        "status", "step", "tags", "token", "traceback", "unique_key", "version", "visit", "wake_on_failure",
    )  # fmt: skip

    def __init__(self, **columns: Any) -> None:
        defaults: dict[str, Any] = {
            "status": "runnable", "hold": 0, "attempt": 0, "crashes": 0, "interruptions": 0, "visit": 1, "priority": 0,
            "round": 0, "rev": 1, "journal": 0,
            "inbox": False, "children_total": 0, "children_pending": 0, "wake_on_failure": False, "scope": (),
            "version": 1,
        }  # fmt: skip
        for name in Row.__slots__:
            setattr(self, name, columns.get(name, defaults.get(name)))

    def clone(self) -> Row:
        new = Row.__new__(Row)
        for name in Row.__slots__:
            setattr(new, name, getattr(self, name))
        return new

    def columns(self) -> dict[str, Any]:
        """By the names of the table, as far as moves change them."""
        found = {name: getattr(self, name) for name in Row.__slots__}
        found["lease_expires_at"] = found.pop("lease")
        found["claim_token_hash"] = found.pop("token")
        return found

    @property
    def address(self) -> str:
        return step_address(self.fsm, self.version, self.step)

    @property
    def urgency(self) -> tuple[int, int, int]:
        return (self.priority, self.eligible_at, self.id)

    @property
    def terminal(self) -> bool:
        return self.status in ENDED

    @property
    def keeps_place(self) -> bool:
        return self.hold not in WITHOUT_PLACE

    @property
    def guard(self) -> bytes | None:
        return self.unique_key if self.unique_key is not None and self.status in self.scope else None

    @property
    def paused(self) -> bool:
        """durable.asked_to_pause."""
        request = None if self.request is None else json.loads(self.request)
        return isinstance(request, dict) and request.get("kind") == "pause"

    @property
    def held(self) -> int:
        """durable.hold_of: its hold when it becomes runnable."""
        return PAUSED if self.paused else 0

    def wake(self, now: int) -> None:
        self.status, self.step, self.eligible_at = "runnable", self.await_step or self.step, now
        self.hold = self.held
        self.await_step = self.await_deadline = None

    def unclaim(self) -> None:
        self.locked_by = self.lease = self.claim_id = self.token = None

    def __repr__(self) -> str:
        shown = ", ".join(
            f"{name}={value!r}"
            for name in Row.__slots__
            if (value := getattr(self, name)) not in (None, 0, False, ())
        )
        return f"Row({shown})"


class Letter:
    """One signal."""

    __slots__ = ("at", "consumed", "dedup", "id", "name", "payload", "target")

    def __init__(
        self, number: int, target: int, name: str, payload: bytes, dedup: str | None, at: int
    ) -> None:
        self.id, self.target, self.name, self.payload, self.dedup, self.at = (
            number,
            target,
            name,
            payload,
            dedup,
            at,
        )
        self.consumed = False


class Cascade:
    """One row of cascades."""

    __slots__ = ("after", "barrier", "id", "missed", "next_at", "parent", "request", "up_to")

    def __init__(self, parent: int, barrier: int | None, up_to: int, request: dict[str, Any]) -> None:
        self.id = 0
        self.parent, self.barrier, self.up_to, self.request = parent, barrier, up_to, request
        self.after, self.missed, self.next_at = 0, None, -1

    def clone(self) -> Cascade:
        new = Cascade(self.parent, self.barrier, self.up_to, self.request)
        new.id, new.after, new.missed, new.next_at = self.id, self.after, self.missed, self.next_at
        return new


class Node:
    """One row of graph."""

    __slots__ = ("any_end", "feeds", "id", "needs", "owed", "told_at", "waits")

    def __init__(
        self, number: int, needs: list[int] | None, feeds: list[int] | None, *, any_end: bool
    ) -> None:
        self.id, self.needs, self.feeds, self.any_end = number, needs, feeds, any_end
        self.owed, self.waits = feeds, len(needs or ())
        self.told_at: int | None = None

    def clone(self) -> Node:
        new = Node(self.id, self.needs, self.feeds, any_end=self.any_end)
        new.owed, new.waits, new.told_at = self.owed, self.waits, self.told_at
        return new


GRAPH = 1 << 62
"""Added to the number of the lock of a row of graph."""


class Blocked(Exception):
    """A row lock of somebody else's is in the way: wait and run the statement again."""

    def __init__(self, row: int) -> None:
        super().__init__(row)
        self.row = row


class AlreadyDone(psycopg.errors.UniqueViolation):
    """A command with this idempotency key was carried out."""

    @property
    def diag(self) -> Any:
        return SimpleNamespace(constraint_name="receipts_once")


class NotYet(Exception):
    """A statement that waits on the server by itself: run it again after so many seconds."""

    def __init__(self, seconds: float) -> None:
        super().__init__(seconds)
        self.seconds = seconds


class Tables:
    """What is committed, and who has locked what."""

    def __init__(self) -> None:
        self.rows: dict[int, Row] = {}
        self.letters: dict[int, Letter] = {}
        self.journal: dict[tuple[int, int], dict[str, Any]] = {}
        """Records by instance and rev."""
        self.receipts: dict[tuple[str, int, str], bytes] = {}
        """Results of commands, by command, instance and idempotency key; those without a key are not kept."""
        self.snapshots: dict[int, tuple[int, int | None]] = {}
        """Per instance the last snapshot that retention wrote, and the one before: "snapshot of run:ID"."""
        self.locks: dict[int, Tx] = {}
        self.cascades: dict[int, Cascade] = {}
        self.cascade_serial = 0
        self.graph: dict[int, Node] = {}
        self.untold: list[int] = []
        """Instances that have ended, and whose dependents may not know it."""
        self.compensations: dict[tuple[str, int], str] = {}
        """Machine and version → the step that compensates."""
        self.compensation_limits: dict[tuple[str, int], str | None] = {}
        """The limits of that step."""
        self.stopped: set[str] = set()
        """Nodes that have stopped in good order."""
        self.pauses: dict[tuple[str, str], int | None] = {}
        """Paused queues and machines: until when."""
        self.flushes: dict[str, frozenset[int]] = {}
        """Group commits that deleted rows, by token: what they did not delete."""
        self.finished: dict[int, list[str]] = {}
        """Instances that their commit deleted, with the claims that did."""
        self.small: dict[Name, Any] = {}
        """Rows of limits and schedules, by table and key."""
        self.serial = 0
        self.letter_serial = 0
        self.log_serial = 0
        self.written: Callable[[Tx, Row], None] = lambda tx, row: None
        """Told of every row that a statement writes, before it does; its transaction may still be rolled back."""
        self.changed: Callable[[Tx, Row | None, Row], None] = lambda tx, old, new: None
        """Told of every row that a commit changes, before it does."""
        self.deleted: Callable[[Tx, Row], None] = lambda tx, row: None
        """Told of every row that a statement deletes, before it does; its transaction may still be rolled back."""
        self.consumed: Callable[[Tx, Letter], None] = lambda tx, letter: None
        self.charged: Callable[[str, float], None] = lambda key, weight: None
        """Told of every change of a level that no pick makes, by key and weight."""
        self.slot_freed: Callable[[Tx, Row], None] = lambda tx, row: None
        """What the trigger on the end of a step with a slot does."""
        self.unlocked: Callable[[], None] = lambda: None


class Tx(SmallTables):
    """One transaction of one session."""

    def __init__(self, tables: Tables, now: int) -> None:
        super().__init__()
        self.tables = tables
        self.now = now
        """Of the transaction's beginning, as `now()` is."""
        self.clock = now
        """As `clock_timestamp()` is."""
        self.why: dict[int, tuple[Any, ...]] = {}
        """Per written row: what the last statement that wrote it was about."""
        self._rows: dict[int, Row] = {}
        self._letters: dict[int, Letter] = {}
        self._records: dict[tuple[int, int], dict[str, Any]] = {}
        self._consumed: set[int] = set()
        self._deleted: set[int] = set()
        self._locked: set[int] = set()
        self._gone: set[int] = set()
        self._receipts: dict[tuple[str, int, str], bytes] = {}
        self._snapshots: dict[int, tuple[int, int | None]] = {}
        self._cut: set[tuple[int, int]] = set()
        self._cascades: dict[int, Cascade | None] = {}
        self._graph: dict[int, Node] = {}
        self._told: list[int] = []
        self._taken: list[int] = []
        self._flushes: dict[str, frozenset[int] | None] = {}

    # -- group commits that delete

    def note_flush(self, token: str, kept: frozenset[int]) -> None:
        self._flushes[token] = kept

    def forget_flushes(self, tokens: Iterable[str]) -> None:
        self._flushes |= dict.fromkeys(tokens)

    def noted_flush(self, token: str) -> frozenset[int] | None:
        """The same of a group that this transaction deletes."""
        return self._flushes.get(token)

    def flush(self, token: str) -> frozenset[int] | None:
        """What a committed group did not delete; None: it was not committed."""
        return self.tables.flushes.get(token)

    # -- graphs

    def node(self, number: int) -> Node | None:
        return self._graph.get(number) or self.tables.graph.get(number)

    def lock_node(self, number: int) -> None:
        if self.node(number) is not None:
            self.lock(GRAPH + number)

    def change_node(self, number: int) -> Node:
        """A copy to change."""
        self.lock(GRAPH + number)
        if number not in self._graph:
            self._graph[number] = self.tables.graph[number].clone()
        return self._graph[number]

    def put_node(self, node: Node) -> None:
        self._graph[node.id] = node

    def owe(self) -> None:
        """The trigger: what this transaction has ended is untold, unless it has told it itself."""
        for number, row in self._rows.items():
            before = self.tables.rows.get(number)
            ended = row.finished_at is not None and (before is None or before.finished_at is None)
            if ended and (row.links or 0) > 1 and number not in self._told:
                self.tables.untold.append(number)

    def free_slots(self) -> None:
        """The triggers: a step that had a slot has ended, so those that wait for it look at once."""
        for number in {*self._rows, *self._gone}:
            before, after = self.tables.rows.get(number), self._rows.get(number)
            if before is None or before.status != "executing" or "!" not in (before.rate_limit or ""):
                continue
            if number in self._gone or (after is not None and after.status != "executing"):
                self.tables.slot_freed(self, before)

    def take_untold(self, most: int) -> list[int]:
        """Those that are committed, and nobody else takes; the lock of one has the number of its graph, negative."""
        found = sorted({each for each in self.tables.untold if not self.is_locked(-GRAPH - each)})[:most]
        for number in found:
            self.lock(-GRAPH - number)
        self._taken += found
        return found

    def told(self, number: int) -> None:
        """What the trigger writes in this transaction is done."""
        self._told.append(number)

    # -- cascades

    def cascades(self) -> list[Cascade]:
        found = {**self.tables.cascades, **self._cascades}
        return [each for each in found.values() if each is not None]

    def put_cascade(self, each: Cascade) -> None:
        self.tables.cascade_serial += 1
        each.id = self.tables.cascade_serial
        self._cascades[each.id] = each

    def change_cascade(self, each: Cascade) -> Cascade:
        """A copy to change. Its lock has a negative number: rows have the others."""
        self.lock(-each.id)
        new = each.clone()
        self._cascades[each.id] = new
        return new

    def drop_cascade(self, each: Cascade) -> None:
        self.lock(-each.id)
        self._cascades[each.id] = None

    # -- rows

    def get(self, number: int) -> Row | None:
        return None if number in self._gone else self._rows.get(number) or self.tables.rows.get(number)

    def all(self) -> Iterator[Row]:
        mine, gone = self._rows, self._gone
        for number, row in self.tables.rows.items():
            if number not in gone:
                yield mine.get(number, row)
        for number, row in mine.items():
            if number not in self.tables.rows and number not in gone:
                yield row

    def stopped(self, queue: str) -> set[str]:
        """The machines that are paused in a queue; "" is the whole queue."""
        pauses = self.tables.pauses.items()
        return {
            fsm for (name, fsm), until in pauses if name == queue and (until is None or until > self.clock)
        }

    def is_stopped(self, row: Row) -> bool:
        """Whether its queue or its machine there is paused."""
        return not self.stopped(row.queue).isdisjoint({"", row.fsm})

    def delete(self, row: Row) -> int:
        """Delete a row that nobody else has locked, with its signals and records; returns how many records."""
        self.lock(row.id)
        self.tables.deleted(self, row)
        self._gone.add(row.id)
        self.drop_inbox(row.id)
        return sum(number == row.id for number, _ in {*self.tables.journal, *self._records})

    def is_locked(self, number: int) -> bool:
        """By somebody else."""
        holder = self.tables.locks.get(number)
        return holder is not None and holder is not self

    def lock(self, number: int) -> None:
        """Lock a row; `Blocked` when somebody else has."""
        if self.is_locked(number):
            raise Blocked(number)
        self.tables.locks[number] = self
        self._locked.add(number)

    def write(self, row: Row, *why: Any, moves: bool = True) -> Row:
        """A copy to change. The caller has seen to it that nobody else has it locked, or waits.

        `rev` counts it, unless it is no move (`_store/moves.py`).
        """
        self.lock(row.id)
        self.why[row.id] = why
        self.tables.written(self, row)
        mine = self._rows.get(row.id)
        if mine is None:
            mine = self._rows[row.id] = row.clone()
        mine.rev += moves
        return mine

    def wrote(self, number: int) -> bool:
        return number in self._rows

    def insert(self, row: Row) -> None:
        self._rows[row.id] = row
        row.inserted_at = self.now
        self.why[row.id] = ("insert",)

    def record(self, record: dict[str, Any]) -> None:
        """Add a record to the journal; one that is there already stays as it is."""
        key = (record["instance_id"], record["rev"])
        if key not in self.tables.journal:
            self._records.setdefault(key, record)

    def receipt(self, command: str, number: int, key: str | None, result: bytes) -> None:
        """Write the receipt of a command. The same key again is refused, with all that its statement did."""
        if key is None:
            return
        if (command, number, key) in self.tables.receipts:
            raise AlreadyDone(key)
        self._receipts[command, number, key] = result

    def snapshot_of(self, number: int) -> tuple[int, int | None] | None:
        return self._snapshots.get(number) or self.tables.snapshots.get(number)

    def note_snapshot(self, number: int, rev: int, before: int | None) -> None:
        self._snapshots[number] = (rev, before)

    def records_of(self, number: int) -> dict[int, dict[str, Any]]:
        """What is recorded of an instance, by rev, in order."""
        both = {**self.tables.journal, **self._records}
        return {key[1]: both[key] for key in sorted(both) if key[0] == number and key not in self._cut}

    def cut(self, number: int, revs: list[int]) -> None:
        """Delete these records."""
        self._cut.update((number, rev) for rev in revs)

    # -- the inbox

    def unread(self, target: int) -> list[Letter]:
        both = {**self.tables.letters, **self._letters}
        return [
            each
            for number, each in sorted(both.items())
            if each.target == target
            and not each.consumed
            and number not in self._consumed
            and number not in self._deleted
        ]

    def knows(self, target: int, dedup: str) -> bool:
        """Also consumed ones: tombstones."""
        letters = (*self.tables.letters.values(), *self._letters.values())
        return any(each.target == target and each.dedup == dedup for each in letters)

    def post(self, letter: Letter) -> None:
        self._letters[letter.id] = letter

    def consume(self, letter: Letter) -> None:
        self._consumed.add(letter.id)

    def drop_inbox(self, target: int) -> None:
        for letter in (*self.tables.letters.values(), *self._letters.values()):
            if letter.target == target:
                self._deleted.add(letter.id)

    # -- the end

    def mark(self) -> tuple[Any, ...]:
        """A savepoint."""
        rows = {number: row.clone() for number, row in self._rows.items()}
        return (
            rows,
            dict(self._letters),
            set(self._consumed),
            set(self._deleted),
            set(self._locked),
            dict(self.why),
            dict(self._records),
            set(self._gone),
            dict(self._receipts),
            dict(self._snapshots),
            set(self._cut),
            dict(self._cascades),
            {number: node.clone() for number, node in self._graph.items()},
            list(self._told),
            list(self._taken),
            dict(self._flushes),
            dict(self._small),
        )

    def back_to(self, mark: tuple[Any, ...]) -> None:
        self._unlock(self._locked - mark[4])
        self._rows, self._letters, self._consumed, self._deleted, self._locked, self.why, self._records = (
            mark[:7]
        )
        self._gone, self._receipts, self._snapshots, self._cut, self._cascades = mark[7:12]
        self._graph, self._told, self._taken, self._flushes = mark[12:16]
        self._small = mark[16]

    def commit(self) -> None:
        tables = self.tables
        tables.untold = [each for each in tables.untold if each not in self._taken]
        self.owe()
        self.free_slots()
        self.commit_small()
        for number, row in self._rows.items():
            tables.changed(self, tables.rows.get(number), row)
        for number in sorted(self._consumed):
            letter = tables.letters.get(number) or self._letters[number]
            tables.consumed(self, letter)
            letter.consumed = True
            if letter.dedup is None:
                self._deleted.add(number)
        tables.journal.update(self._records)
        tables.receipts.update(self._receipts)
        tables.snapshots.update(self._snapshots)
        for cut in self._cut:
            tables.journal.pop(cut, None)
        tables.rows.update(self._rows)
        tables.letters.update(self._letters)
        for number, each in self._cascades.items():
            if each is None:
                tables.cascades.pop(number, None)
            else:
                tables.cascades[number] = each
        tables.graph.update(self._graph)
        for token, kept in self._flushes.items():
            if kept is None:
                tables.flushes.pop(token, None)
            else:
                tables.flushes[token] = kept
        for number in self._deleted:
            tables.letters.pop(number, None)
        for number in self._gone:
            if number in self.why and number not in self._rows:
                tables.finished.setdefault(number, []).append(self.why[number][1])
            tables.graph.pop(number, None)
            tables.rows.pop(number, None)
            tables.snapshots.pop(number, None)
            for key in [key for key in tables.journal if key[0] == number]:
                del tables.journal[key]
        self.rollback()

    def rollback(self) -> None:
        """Also the end of a commit: nothing is left."""
        self._rows, self._letters, self._records, self._gone, self._receipts = {}, {}, {}, set(), {}
        self._snapshots, self._cut, self._cascades = {}, set(), {}
        self._graph, self._told, self._taken, self._flushes, self._small = {}, [], [], {}, {}
        self._unlock(self._locked)

    def _unlock(self, numbers: set[int]) -> None:
        for number in numbers:
            del self.tables.locks[number]
        self._locked = self._locked - numbers
        if numbers:
            self.tables.unlocked()
