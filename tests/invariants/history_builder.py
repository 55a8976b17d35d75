"""Builds histories by hand, lawful or not, for the tests of the checkers."""

from __future__ import annotations

from typing import Any

import attrs
from tests.invariants.changes import (
    Change,
    Clock,
    InstanceChange,
    InstanceState,
    ReceiptRow,
    SignalChange,
    SignalState,
    Snapshot,
)
from tests.invariants.check import check
from tests.invariants.effect_log import Effect
from tests.invariants.history import History

LEASE = 10.0
NOT_COUNTED = frozenset({"lease_expires_at", "inbox"})
"""Columns whose change alone is no move."""


class HistoryBuilder:
    """Each call is one event, one second after the last. Without `tx`, each change is its own transaction."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.tx = 100
        self.changes: list[Change] = []
        self.effects: list[Effect] = []
        self.rows: dict[int, InstanceState] = {}
        self.inbox: dict[int, SignalState] = {}
        self.receipts: list[ReceiptRow] = []

    # -- the database

    def put(
        self, number: int, *, tx: int | None = None, writer: str = "", at: float = 1.0, **columns: Any
    ) -> int:
        """Write a row; None as status deletes it. `rev` counts moves, unless it is given. Returns the transaction."""
        old = self.rows.get(number)
        if columns.get("status", "") is None:
            new = None
            del self.rows[number]
        elif old is None:
            new = InstanceState(
                **{"id": number, "status": "runnable", "visit": 1, "eligible_at": self.now} | columns
            )
            self.rows[number] = new
        else:
            changed = {name for name in columns if getattr(old, name) != columns[name]}
            requested = changed == {"request"} and "cancel" in (columns["request"] or "")
            moves = bool(changed - NOT_COUNTED) and not requested
            new = self.rows[number] = attrs.evolve(old, **({"rev": old.rev + moves} | columns))
        return self._change(InstanceChange, number, old, new, tx, writer, at)

    def pick(self, number: int, claim: str, **columns: Any) -> int:
        lease = {"locked_by": "node", "lease_expires_at": self.now + 1 + LEASE}
        return self.put(number, **({"status": "executing", "claim_id": claim} | lease | columns))

    def commit(self, number: int, status: str, **columns: Any) -> int:
        """An outcome: the claim is kept, the lease is not. Whoever is to be cancelled is asked first."""
        if status == "cancelled" and self.rows[number].request is None:
            self.ask(number)
        given_up = {} if status == "executing" else {"locked_by": None, "lease_expires_at": None}
        return self.put(number, **({"status": status} | given_up | columns))

    def give_back(self, number: int, *, crash: bool = False, **columns: Any) -> int:
        row = self.rows[number]
        counts = {"attempt": row.attempt + 1, "crashes": row.crashes + crash}
        free = {"claim_id": None, "locked_by": None, "lease_expires_at": None}
        return self.put(number, **({"status": "runnable"} | counts | free | columns))

    def ask(self, number: int, key: str | None = None) -> int:
        """A command asks the node that runs it to cancel it."""
        tx = self.put(number, request='{"kind": "cancel"}')
        return self.receipt(number, "cancel", "requested", tx, key)

    def cancel(self, number: int, key: str | None = None, **columns: Any) -> int:
        """A command cancels it at once."""
        free = {
            "claim_id": None,
            "locked_by": None,
            "lease_expires_at": None,
            "request": '{"kind": "cancel"}',
        }
        return self.receipt(
            number, "cancel", "cancelled", self.put(number, **({"status": "cancelled"} | free | columns)), key
        )

    def pause(self, number: int) -> int:
        row = self.rows[number]
        hold = 4 if row.status == "runnable" else row.hold
        tx = self.put(number, hold=hold, request='{"kind": "pause"}')
        return self.receipt(number, "pause", "requested" if row.status == "executing" else "paused", tx)

    def resume(self, number: int) -> int:
        return self.receipt(number, "resume", number, self.put(number, hold=0, request=None))

    def decide(self, number: int, command: str = "approve", *, by: str = "ada", **told: Any) -> int:
        """Somebody decides; `told` is what the row says otherwise than the receipt."""
        kind = {"proceed": "proceeded", "approve": "approved", "reject": "rejected"}[command]
        row = self.rows[number]
        manual = {**(row.manual or {}), "decision": {"kind": kind, "by": by, **told}}
        woken = {
            "status": "runnable",
            "step": manual["then"],
            "await_step": None,
            "eligible_at": self.now + 1,
        }
        tx = self.put(number, manual=manual, **woken)
        return self.receipt(number, command, number, tx, by=by)

    def receipt(
        self, number: int | str, command: str, result: object, tx: int, key: str | None = None, **more: Any
    ) -> int:
        """Of an instance by its number, of a queue by its name."""
        row = ReceiptRow(
            id=len(self.receipts) + 1,
            xid=tx,
            command=command,
            scope="queue" if isinstance(number, str) else "instance",
            target=str(number),
            key=key,
            result=result,
            began=self.now,
            **more,
        )
        self.receipts.append(row)
        return tx

    def send(self, signal: int, target: int, name: str = "go", *, tx: int | None = None) -> int:
        new = self.inbox[signal] = SignalState(id=signal, target_id=target, name=name)
        return self._change(SignalChange, target, None, new, tx)

    def take(self, signal: int, *, tx: int | None = None) -> int:
        old = self.inbox.pop(signal)
        return self._change(SignalChange, old.target_id, old, None, tx)

    def _change(
        self, kind: Any, number: int, old: Any, new: Any, tx: int | None, writer: str = "", at: float = 1.0
    ) -> int:
        self.now += at
        if tx is None:
            self.tx += 1
        found = tx or self.tx
        seen = Snapshot(xmin=found, xmax=found)  # all earlier transactions have ended
        self.changes.append(
            kind(
                len(self.changes) + 1, found, self.now, self.now, self.now, seen, writer, 1, number, old, new
            )
        )
        return found

    # -- the steps

    def begin(self, number: int, **more: Any) -> None:
        self.effect("begin", number, **more)

    def end(self, number: int, **more: Any) -> None:
        self.effect("end", number, **more)

    def effect(
        self, kind: str, number: int | None = None, *, pid: int = 1, row: Any = None, **more: Any
    ) -> None:
        self.now += 1
        about: dict[str, Any] = {}
        if number is not None and kind in {"begin", "end", "left"}:
            row = row or self.rows[number]
            about = {
                "fsm": row.fsm,
                "step": row.step,
                "visit": row.visit,
                "attempt": row.attempt,
                "claim": row.claim_id,
            }
        about |= {name: more.pop(name) for name in list(about) if name in more}
        self.effects.append(Effect(int(self.now * 1e9), pid, kind, number, **about, data=more))

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    # -- the result

    def history(self, **options: Any) -> History:
        known = {"lease": LEASE, "reap_interval": 5.0, "margin": 1.0, "patience": 20.0, "ended": self.now}
        known |= {"retention": 0.0}
        return History(
            changes=self.changes,
            effects=self.effects,
            rows=dict(self.rows),
            signals=dict(self.inbox),
            receipts=self.receipts,
            clock=Clock(),
            **(known | options),
        )

    def broken(self, **options: Any) -> set[str]:
        """The numbers of the invariants that do not hold."""
        return {violation.invariant for violation in check(self.history(**options))}

    def sentences(self, **options: Any) -> str:
        return "\n".join(map(str, check(self.history(**options))))


def run(builder: HistoryBuilder, number: int = 1, claim: str = "a", **data: Any) -> InstanceState:
    """Pick it and run its step to its end. Returns the row at that time."""
    builder.pick(number, claim)
    builder.begin(number)
    builder.end(number, **data)
    return builder.rows[number]
