"""The evidence of a run: changes, effects and the remaining rows, with the indexes that the checkers need. Pure."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Final, Literal

import attrs
from durable_actors._store.move_parts import MoveName
from durable_actors._store.moves import OUTCOMES
from tests.invariants.changes import (
    Change,
    Clock,
    InstanceChange,
    InstanceState,
    ReceiptRow,
    SignalChange,
    SignalState,
    move_of,
)
from tests.invariants.effect_log import (
    BEGIN,
    END,
    LEFT,
    OUTAGE,
    PAUSED,
    RECOVERED,
    RESUMED,
    SESSIONS_LOST,
    Effect,
)
from tests.invariants.limits import Slots
from tests.invariants.schedules import ScheduleEvidence

Event = Change | Effect | ReceiptRow

XIDS: Final = 2**32
"""A row tells only the lower part of its transaction's number."""
RECOVERY: Final = 3.0
"""Seconds after an outage in which work need not have resumed: actors retry within a back-off of 2 s."""


@attrs.frozen
class Violation:
    """An invariant that did not hold, and the events that show it."""

    invariant: str
    """Its number: `I1` … `I17`."""
    instances: tuple[int, ...]
    sentence: str
    story: tuple[tuple[float, Event], ...]
    """The few events that prove it, in order, each with the server's time."""

    def __str__(self) -> str:
        who = ", ".join(map(str, self.instances))
        lines = [f"{self.invariant}, instance {who}: {self.sentence}"]
        first = self.story[0][0] if self.story else 0.0
        lines += [f"  {at - first:+10.4f} s  {_describe(event)}" for at, event in self.story]
        return "\n".join(lines)


def _describe(event: Event) -> str:
    if isinstance(event, ReceiptRow):
        return str(event)
    if isinstance(event, Effect):
        return f"{'' if event.id is None else event.id}  {event}"
    writer = f" by {event.writer}" if event.writer else ""
    return f"{event.instance}  {event} (transaction {event.txid}{writer})"


@attrs.frozen
class Needs:
    """What an instance comes after."""

    ids: tuple[int, ...]
    any_end: bool = False
    """Whether it runs however those end."""


@attrs.frozen
class StepRun:
    """What one run of one step recorded: the events of one claim and one visit, in order."""

    events: tuple[Effect, ...]

    @property
    def began(self) -> Effect | None:
        """Its begin."""
        return next((event for event in self.events if event.kind == BEGIN), None)

    @property
    def ended(self) -> Effect | None:
        """The last event which shows that its code had finished, if there is one."""
        return next((event for event in reversed(self.events) if event.kind in {END, LEFT}), None)

    @property
    def outcome(self) -> Effect | None:
        """The event with the outcome."""
        return next((event for event in self.events if event.kind == END and event.data.get("outcome")), None)

    @property
    def threaded(self) -> bool:
        """Whether it ran in a thread, which cannot be cancelled."""
        return any(event.data.get("thread") for event in self.events)


@attrs.frozen
class Span:
    """A period, in monotonic nanoseconds."""

    start: int
    end: int

    def overlap(self, start: int, end: int) -> float:
        """Seconds that it shares with another period."""
        return max(0, min(self.end, end) - max(self.start, start)) / 1e9


@attrs.frozen(kw_only=True)
class History:
    """All evidence of a run."""

    changes: Sequence[Change]
    """In order."""
    effects: Sequence[Effect] = ()
    """In order."""
    rows: Mapping[int, InstanceState] = attrs.field(factory=dict[int, InstanceState])
    """The instances at the end, by id."""
    signals: Mapping[int, SignalState] = attrs.field(factory=dict[int, SignalState])
    """The signals at the end, by id."""
    needs: Mapping[int, Needs] = attrs.field(factory=dict[int, Needs])
    """What instances come after, as far as that is still there, by id."""
    receipts: Sequence[ReceiptRow] = ()
    """The commands that were carried out, in order."""
    schedules: Sequence[ScheduleEvidence] = ()
    """The schedules with a period, with their records and instances."""
    slots: Mapping[str, Slots] = attrs.field(factory=dict[str, Slots])
    """The limits that have slots, by name: the most that they have had."""
    clock: Clock = attrs.field(factory=Clock)
    lease: float
    """`lease_ttl` of the workers."""
    reap_interval: float
    """`reap_interval` of the workers."""
    margin: float = 1.0
    """Seconds by which a loaded machine may be late."""
    ended: float
    """The time until which workers served every queue, on the server's clock. A row that is due for longer than
    `patience` then is stuck."""
    patience: float
    """Seconds that a due row may wait while its queue is quiet."""
    late_commit: Literal["accept", "reject"] = "accept"
    """The option of the workers."""
    operator: bool = False
    """Whether failed instances were retried by hand, and no receipts are here to say which."""
    snapshots: bool = False
    """Whether janitors record long histories: a row that only counts a move may be their write."""
    retention: float = 86_400.0
    """Seconds for which the workers keep what has ended, at least."""

    @property
    def doubt(self) -> float:
        """Seconds by which the times of effects and changes may be out of order."""
        return self.clock.doubt + 0.01

    def at(self, event: Event) -> float:
        """The time of an event, on the server's clock."""
        if isinstance(event, ReceiptRow):
            return next(
                (change.at for change in self.changes if change.txid % XIDS == event.xid), event.began
            )
        return self.clock.at(event.at) if isinstance(event, Effect) else event.at

    def violation(self, invariant: str, sentence: str, *events: Event | None) -> Violation:
        """A violation that these events prove."""
        story = sorted(((self.at(event), event) for event in events if event is not None), key=_moment)
        ids = (event.instance if isinstance(event, Change | ReceiptRow) else event.id for _, event in story)
        return Violation(
            invariant, tuple(dict.fromkeys(n for n in ids if n is not None)), sentence, tuple(story)
        )

    # -- what the database recorded

    @cached_property
    def moves(self) -> Sequence[tuple[InstanceChange, MoveName | None]]:
        """Every change of an instance, with its move; None: it is none."""
        return [
            (change, move_of(change.old, change.new))
            for change in self.changes
            if isinstance(change, InstanceChange)
        ]

    @cached_property
    def tally(self) -> Mapping[str, int]:
        """How much was checked: changes by move (`done`, `reaped`, …), all outcomes together, and runs of steps."""
        moves = Counter[str](move or "no move" for _, move in self.moves)
        return {
            **moves,
            "outcomes": sum(moves[name] for name in OUTCOMES),
            "signal changes": len(self.changes) - len(self.moves),
            "runs": len(self.runs),
        }

    @cached_property
    def by_instance(self) -> Mapping[int, Sequence[tuple[InstanceChange, MoveName | None]]]:
        """The same, by instance."""
        found: dict[int, list[tuple[InstanceChange, MoveName | None]]] = defaultdict(list)
        for change, move in self.moves:
            found[change.instance].append((change, move))
        return found

    @cached_property
    def signal_changes(self) -> Mapping[int, Sequence[SignalChange]]:
        """Changes of inboxes, by target."""
        found: dict[int, list[SignalChange]] = defaultdict(list)
        for change in self.changes:
            if isinstance(change, SignalChange):
                found[change.instance].append(change)
        return found

    @cached_property
    def entries(self) -> Mapping[tuple[str, int], InstanceChange]:
        """By claim and visit: the change that allowed the step to run (a pick, or the previous commit)."""
        found: dict[tuple[str, int], InstanceChange] = {}
        for change, _ in self.moves:
            new = change.new
            if new is not None and new.status == "executing" and new.claim_id is not None:
                found.setdefault((new.claim_id, new.visit), change)
        return found

    @cached_property
    def exits(self) -> Mapping[tuple[str, int], tuple[InstanceChange, MoveName | None]]:
        """By claim and visit: the change that ended it (a commit, a release, a reap)."""
        found: dict[tuple[str, int], tuple[InstanceChange, MoveName | None]] = {}
        for change, move in self.moves:
            old = change.old
            if (
                move in {*OUTCOMES, "released", "reaped", "crashed"}
                and old is not None
                and old.claim_id is not None
            ):
                found.setdefault((old.claim_id, old.visit), (change, move))
        return found

    @cached_property
    def commands(self) -> Mapping[tuple[int, int], Sequence[ReceiptRow]]:
        """By instance and transaction (the lower 32 bits of its number): the receipts of commands on it."""
        found: dict[tuple[int, int], list[ReceiptRow]] = defaultdict(list)
        for receipt in self.receipts:
            if receipt.instance is not None:
                found[receipt.instance, receipt.xid].append(receipt)
        return found

    def commanded(self, change: Change) -> Sequence[ReceiptRow]:
        """The commands that were carried out in the transaction of this change, on its instance."""
        return self.commands.get((change.instance, change.txid % XIDS), ())

    def queue_paused(self, row: InstanceState, at: float) -> bool:
        """Whether its queue, or its machine there, may have been paused at that time or shortly before."""
        names = {row.queue, f"{row.queue}/{row.fsm}"}
        return any(
            since <= at <= until + self.margin
            for target in names
            for since, until in self._queue_pauses.get(target, ())
        )

    @cached_property
    def _queue_pauses(self) -> Mapping[str, Sequence[tuple[float, float]]]:
        """By queue, or queue and machine: from when until when it may have been paused."""
        found: dict[str, list[tuple[float, float]]] = defaultdict(list)
        since: dict[str, float] = {}
        for receipt in self.receipts:
            if receipt.scope == "queue" and receipt.command == "pause":
                since.setdefault(receipt.target, receipt.began)
            elif receipt.scope == "queue" and receipt.target in since:
                found[receipt.target].append((since.pop(receipt.target), receipt.began))
        for target, at in since.items():
            found[target].append((at, math.inf))
        return found

    @cached_property
    def open_until(self) -> Mapping[int, float]:
        """By transaction: the last time at which it was seen running. Its changes were not committed before that."""
        return self._testimony[0]

    @cached_property
    def ended_by(self) -> Mapping[int, float]:
        """By transaction: the first time at which it was seen to have ended."""
        return self._testimony[1]

    @cached_property
    def _testimony(self) -> tuple[Mapping[int, float], Mapping[int, float]]:
        open_until: dict[int, float] = {}
        ended_by: dict[int, float] = {}
        pending: set[int] = set()
        for change in self.changes:
            if change.snapshot is not None:
                # Not its own transaction, which a snapshot does not list as running.
                seen = {txid for txid in pending if txid != change.txid and change.snapshot.sees(txid)}
                for txid in seen:
                    ended_by[txid] = min(change.seen, ended_by.get(txid, change.seen))
                pending -= seen
                for txid in pending:
                    open_until[txid] = max(change.at, open_until.get(txid, change.at))
            if change.txid not in ended_by:
                pending.add(change.txid)
        return open_until, ended_by

    # -- what the steps recorded

    @cached_property
    def runs(self) -> Mapping[tuple[str, int], StepRun]:
        """By claim and visit: the run of the step."""
        found: dict[tuple[str, int], list[Effect]] = defaultdict(list)
        for effect in self.effects:
            if effect.run is not None:
                found[effect.run].append(effect)
        return {key: StepRun(tuple(events)) for key, events in found.items()}

    @cached_property
    def instrumented(self) -> frozenset[tuple[str | None, str | None]]:
        """Machine and step of the steps that write an effect log."""
        return frozenset((effect.fsm, effect.step) for effect in self.effects if effect.kind == BEGIN)

    def notes(self, kind: str) -> Sequence[Effect]:
        """Events of this kind."""
        return [effect for effect in self.effects if effect.kind == kind]

    @cached_property
    def sessions_lost(self) -> Sequence[Effect]:
        """The events at which sessions were terminated by force."""
        return self.notes(SESSIONS_LOST)

    @cached_property
    def _pauses(self) -> Mapping[int, Sequence[Span]]:
        pids = {effect.pid for effect in self.effects if effect.kind == PAUSED}
        return {pid: self._spans(PAUSED, RESUMED, pid) for pid in pids}

    @cached_property
    def _outages(self) -> Sequence[Span]:
        return self._spans(OUTAGE, RECOVERED, None)

    def _spans(self, start: str, end: str, pid: int | None) -> Sequence[Span]:
        """The periods from a start to the next end; the last one may be open."""
        spans: list[Span] = []
        began: int | None = None
        for effect in self.effects:
            if pid is not None and effect.pid != pid:
                continue
            if effect.kind == start and began is None:
                began = effect.at
            elif effect.kind == end and began is not None:
                spans.append(Span(began, effect.at))
                began = None
        return spans if began is None else [*spans, Span(began, 2**63)]

    def paused(self, pid: int, start: int, end: int) -> float:
        """Seconds of this period (monotonic) in which that process did not run."""
        return sum(span.overlap(start, end) for span in self._pauses.get(pid, ()))

    def away(self, start: float, end: float) -> float:
        """Seconds of this period (server's clock) in which no work was possible, or had not resumed yet."""
        spans = [(self.clock.at(span.start), self.clock.at(span.end) + RECOVERY) for span in self._outages]
        return sum(max(0.0, min(end, until) - max(start, since)) for since, until in spans)

    def cut_before(self, change: Change) -> bool:
        """Whether sessions were lost shortly before this change, and may not be back yet."""
        soon = self.lease + RECOVERY + self.margin
        cuts = [(loss.at, loss.at) for loss in self.sessions_lost]
        cuts += [(span.start, span.end) for span in self._outages]
        return any(self.clock.at(start) <= change.at <= self.clock.at(end) + soon for start, end in cuts)

    def woke_before(self, change: Change, pid: int) -> bool:
        """Whether that process was resumed shortly before: it may have given up its session then."""
        woke = (self.clock.at(span.end) for span in self._pauses.get(pid, ()))
        return any(change.at - self.lease - self.margin <= at <= change.at for at in woke)


def _moment(entry: tuple[float, Event]) -> tuple[float, int]:
    """By time; changes of one moment by `seq`."""
    at, event = entry
    return (at, event.seq if isinstance(event, Change) else 0)
