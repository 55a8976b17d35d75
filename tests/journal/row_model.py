"""A model of one row and its moves, which writes the records that the store would write.

It follows the SQL statements, not the code under test, so it is a second opinion: `row_of(fold(...))` must be its row.
Numbers decide which of the possible moves is made and how, so that Hypothesis can shrink a history.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from durable_actors.journal import ErrorInfo, Level, Record, is_recorded, run_thread
from durable_actors.journal.kinds import KINDS, UnderClaim
from tests.journal.row_model_upstream import Upstreams, json

RUN = 7
START = datetime(2026, 1, 1, tzinfo=UTC)
STEPS = ("begin", "ship", "bill")
ERROR = ErrorInfo(text="ValueError: no stock", type="ValueError", traceback="Traceback ...")
LEASE = timedelta(seconds=60)


STOPPED: dict[str, Any] = {
    "hold": 0, "locked_by": None, "lease_expires_at": None, "claim_id": None, "claim_token_hash": None,
    "await_step": None, "await_deadline": None, "manual": None, "children_pending": 0, "wake_on_failure": False,
}  # fmt: skip
"""What is left of a claim or a wait that somebody else ends."""


class RowModel(Upstreams):
    """One row. `records` are those of its level; `rows` has the row after each of them."""

    def __init__(self, level: Level = "full", numbers: Sequence[int] = ()) -> None:
        self._numbers = list(numbers)
        self.now = START
        self.records: list[Record] = []
        self.rows: list[dict[str, Any]] = []
        self.suspended = False
        self.renewed = False
        self._claims = self._children = 0
        eligible = self.now + timedelta(seconds=self.number(3))
        self.row: dict[str, Any] = {
            "id": RUN,
            "rev": 0,
            "fsm": "shop:Checkout",
            "fsm_version": 1,
            "queue": "default",
            "priority": 5,
            "partition_key": "order:42",
            "unique_key": "\\x6f72646572",
            "parent_id": None,
            "barrier": None,
            "tags": ["blue"],
            "meta": {"who": "me"},
            "journal": level,
            "inserted_at": json(self.now),
            "step": "begin",
            "visit": 1,
            "round": 0,
            "attempt": 0,
            "crashes": 0,
            "interruptions": 0,
            "status": "runnable",
            "hold": 0,
            "shelved_step": None,
            "eligible_at": eligible,
            "claim_id": None,
            "claim_token_hash": None,
            "locked_by": None,
            "lease_expires_at": None,
            "awaits": None,
            "await_step": None,
            "await_deadline": None,
            "manual": None,
            "request": None,
            "children_total": 0,
            "children_pending": 0,
            "wake_on_failure": False,
            "state": {"n": 0},
            "result": None,
            "last_error": None,
            "error_type": None,
            "traceback": None,
            "finished_at": None,
            "cancellation": None,
        }
        self.row["limited_by"] = None
        self.waits = self.number(4) == 1
        """It comes after others, and they have not ended."""
        if self.waits:
            self.row |= {"child_key": "b", "links": 1, "hold": 5}
        self.move("started", {}, row=None)

    # Choices.

    def number(self, below: int) -> int:
        return (self._numbers.pop(0) if self._numbers else 0) % below

    def chance(self) -> bool:
        return self.number(2) == 1

    thread = run_thread(RUN)

    def run(self, moves: int) -> RowModel:
        """Make up to so many moves."""
        for _ in range(moves):
            possible = self.possible()
            if not possible or not self._numbers:
                break
            self.now += timedelta(milliseconds=1 + self.number(2000))
            possible[self.number(len(possible))]()
        return self

    def possible(self) -> list[Callable[[], None]]:
        row = self.row
        paused = self.resume if self.suspended else self.suspend
        anywhere = [self.maybe_cancel, self.wakeup, paused, self.snapshot]
        match row["status"]:
            case "runnable":
                if self.suspended:  # no pick reads it
                    return [*[self.doom] * self.waits, *anywhere]
                if row["hold"] == 5:
                    return [self.unblock, self.unblock, self.doom, *anywhere]
                here = self.waiting() if row["hold"] == 0 else [self.offer]
                delayed = row["hold"] == 0 and row["eligible_at"] > self.now
                here += [self.hasten] * delayed
                return [*[self.claim] * 6, *here, *anywhere]
            case "executing":
                ends = [self.next, self.retry, self.park, self.spawn, self.ask]
                rare = [self.start_child, self.renew, self.cancel_here, self.unfit_claim]
                return [*ends, *ends, self.done, self.fail, *self.returns(), *rare, *anywhere]
            case "awaiting_signal" if "decision" not in (row["manual"] or {"decision": None}):
                return [self.decide, self.reject, self.reject, *anywhere]
            case "awaiting_signal":
                return [self.wake, self.expire, self.unfit_wait, *anywhere]
            case "awaiting_children":
                return [self.count, self.count, self.recount, self.expire, self.unfit_wait, *anywhere]
            case "failed" | "cancelled":
                return [self.revive]
            case _:
                return []

    def returns(self) -> list[Callable[[], None]]:
        return [self.release, self.crash, self.reap]

    # How a move becomes a record.

    def move(self, kind: str, change: dict[str, Any], **fields: Any) -> None:
        """Change the row and record the move. `data` has what the move adds to the record."""
        before = dict(self.row)
        self.row |= change
        self.row["rev"] += 1
        if self.row["finished_at"] is not None:
            self.suspended = False
        if not self.suspended:
            self.row["request"] = None  # as far as the journal tells
        elif self.row["status"] == "runnable":
            self.row["hold"] = 4
        data, outside = dict(fields.pop("data", {})), fields.pop("outside", False)
        if before["round"] and kind not in {"started", "snapshot"}:
            data["round"] = before["round"]
        if fields.pop("row", 0) is None:
            data["row"] = json(self.row)
        else:
            fields = {name: before[name] for name in ("step", "visit", "attempt")} | fields
        level: Level = self.row["journal"]
        ends_failed = self.row["status"] == "failed" and before["status"] != "failed"
        if not is_recorded(kind, level, failed=ends_failed):
            return
        if issubclass(KINDS[kind].data, UnderClaim) and before["status"] == "executing" and not outside:
            fields |= {"claim_id": before["claim_id"], "node": before["locked_by"]}
            if self.renewed:
                data["renewed_until"] = before["lease_expires_at"]
            if level in {"claims", "full"}:
                if before["lease_expires_at"] <= self.now and kind not in {"released", "crashed", "reaped"}:
                    data["late"] = True
            else:
                data["folded"] = {}
        if level != "full":
            data.pop("state", None)
            data.pop("result", None)
        self.records.append(
            Record(instance_id=RUN, rev=self.row["rev"], at=self.now, kind=kind, data=json(data), **fields)
        )
        self.rows.append(dict(self.row))

    def error(self, kind: ErrorInfo | None) -> dict[str, Any]:
        if kind is None:
            return {"last_error": None, "error_type": None, "traceback": None}
        return {"last_error": kind.text, "error_type": kind.type, "traceback": kind.traceback}

    # Runnable.

    def claim(self) -> None:
        self.now = max(self.now, self.row["eligible_at"])
        self._claims += 1
        claim, token = f"claim-{self._claims}", f"hash-{self._claims}"
        lease = self.now + LEASE
        self.renewed = False
        self.move(
            "claimed",
            {
                "status": "executing",
                "hold": 0,
                "claim_id": claim,
                "claim_token_hash": token,
                "locked_by": "node-1",
                "lease_expires_at": lease,
            },
            claim_id=claim,
            node="node-1",
            data={"lease_until": lease, "token_hash": token},
        )

    def hold_it(self) -> None:
        self.move("held", {"hold": 1})

    def shelve(self) -> None:
        self.move("shelved", {"hold": 2, "shelved_step": self.row["step"]})

    def offer(self) -> None:
        self.move("offered", {"hold": 0})

    def unfit(self) -> None:
        error = ErrorInfo(text="its machine name has 3000 bytes")
        change = {"status": "failed", "hold": 0, "finished_at": self.now, **self.error(error)}
        self.move("unfit", change, error=error)

    def unfit_claim(self) -> None:
        """Found by a reap or a crash, which count as usual."""
        error, row = ErrorInfo(text="its partition key has 3000 bytes"), self.row
        counters = {
            "crashes": row["crashes"] + self.number(2),
            "interruptions": row["interruptions"] + self.number(2),
        }
        change = {**self.returned(self.now), **counters, "status": "failed", "finished_at": self.now}
        data = {"eligible_at": self.now, **counters}
        fence = {"claim_id": row["claim_id"], "node": row["locked_by"]}
        self.move("unfit", {**change, **self.error(error)}, error=error, data=data, **fence)

    def unfit_wait(self) -> None:
        """Found when its wait ends."""
        error, row = ErrorInfo(text="its partition key has 3000 bytes"), self.row
        change = {**self.woken(), "status": "failed", "finished_at": self.now, **self.error(error)}
        data = {"eligible_at": self.now}
        if row["status"] == "awaiting_children":
            change["children_pending"] = data["children_pending"] = row["children_pending"] - 1
        self.move("unfit", change, to_step=change["step"], error=error, data=data)

    def wakeup(self) -> None:
        if self.row["status"] in {"runnable", "executing"}:
            self.move("wakeup", {}, data={})

    # Outcomes.

    def committed(self, *, advance: bool) -> dict[str, Any]:
        """What every outcome writes."""
        row = self.row
        return {
            "locked_by": None,
            "lease_expires_at": None,
            "eligible_at": self.now,
            "visit": row["visit"] + advance,
            "round": 0 if advance else row["round"] + 1,
            "crashes": 0 if advance else row["crashes"],
            "children_total": 0 if advance else row["children_total"],
            "children_pending": 0,
            "wake_on_failure": False,
            "awaits": None,
            "manual": None if advance else row["manual"],
            "result": None,
            **self.error(None),
        }

    def new_state(self) -> dict[str, Any]:
        return {"state": {"n": self.row["state"]["n"] + 1}} if self.chance() else {}

    def next(self) -> None:
        step, state = STEPS[self.number(3)], self.new_state()
        error = ERROR if self.number(4) == 1 else None
        change = {**self.committed(advance=True), "status": "runnable", "step": step, "attempt": 0, **state}
        data: dict[str, Any] = dict(state)
        if self.chance() and error is None:  # run ahead
            row = self.row
            kept = ("status", "locked_by", "lease_expires_at", "eligible_at")
            change |= {name: row[name] for name in kept}
            data |= {"keeps_claim": True, "lease_until": row["lease_expires_at"]}
        elif self.chance():
            change["partition_key"] = None
            data["columns"] = {"partition_key": None}
        self.move("next", change, to_step=step, error=error, data=data)
        self.renewed = False

    def retry(self) -> None:
        error, state = (ERROR if self.chance() else None), self.new_state()
        eligible = self.now + timedelta(seconds=self.number(5))
        change = {
            **self.committed(advance=False),
            "awaits": self.row["awaits"],
            "status": "runnable",
            "attempt": self.row["attempt"] + 1,
            "eligible_at": eligible,
            **self.error(error),
            **state,
        }
        self.move("retry", change, error=error, data={"eligible_at": eligible, **state})

    def park(self) -> None:
        then = STEPS[self.number(3)] if self.chance() else None
        error, state = (ERROR if self.number(4) == 1 else None), self.new_state()
        deadline = self.now + timedelta(seconds=9) if self.chance() else None
        change = {
            **self.committed(advance=then is not None),
            "status": "awaiting_signal",
            "attempt": 0 if then and error is None else self.row["attempt"],
            "awaits": ["paid", "gone"],
            "await_step": then,
            "await_deadline": deadline,
            **self.error(error),
            **state,
        }
        data = {"awaits": ["paid", "gone"], "deadline": deadline, **state}
        self.move("parked", change, to_step=then, error=error, data=data)

    def spawn(self) -> None:
        then, state = STEPS[self.number(3)], self.new_state()
        total = self.number(3)
        pending = min(total, 1 + self.number(2)) if total else 0
        wake = self.chance()
        children = []
        for _ in range(total):
            self._children += 1
            children.append({"id": 100 + self._children, "machine": "shop:Parcel", "step": "start"})
        change = {
            **self.committed(advance=True),
            "attempt": 0,
            "children_total": total,
            "children_pending": pending,
            "wake_on_failure": wake,
            **state,
        }
        if pending:
            change |= {"status": "awaiting_children", "await_step": then}
        else:
            change |= {"status": "runnable", "step": then}
        data = {
            "children_total": total,
            "children_pending": pending,
            "wake_on_failure": wake,
            "children": children,
            **state,
        }
        self.move("spawned", change, to_step=then, data=data)

    def done(self) -> None:
        result = {"ok": self.number(3)}
        error = ERROR if self.number(4) == 1 else None
        change = {
            **self.committed(advance=False),
            "status": "done",
            "manual": None,
            "result": result,
            "finished_at": self.now,
        }
        self.move("done", change, error=error, data={"result": result})

    def fail(self) -> None:
        change = {
            **self.committed(advance=False),
            "awaits": self.row["awaits"],
            "status": "failed",
            "finished_at": self.now,
            **self.error(ERROR),
        }
        data: dict[str, Any] = {}
        if self.row["attempt"] and self.chance():  # no run was left
            change["attempt"] = data["to_attempt"] = self.row["attempt"] - 1
        self.move("failed", change, error=ERROR, data=data)

    def ask(self) -> None:
        then = STEPS[self.number(3)]
        kind = "approval" if self.chance() else "pause"
        boundary = {"kind": kind, "then": then, "title": "ok?", "data": {"eur": None}}
        boundary |= {"on_reject": "bill"} if self.chance() else {}
        change = {
            **self.committed(advance=True),
            "status": "awaiting_signal",
            "attempt": 0,
            "awaits": [],
            "await_step": boundary.get("on_reject"),
            "manual": boundary,
        }
        self.move("asked", change, to_step=then, data={"boundary": boundary})

    def start_child(self) -> None:
        self._children += 1
        child = {
            "id": 100 + self._children,
            "machine": "shop:Parcel",
            "step": "start",
            "key": f"k{self._children}",
        }
        self.move("child_started", {}, data={"child": child})

    def renew(self) -> None:
        """No move: only the lease changes, and heartbeats may come late."""
        self.now += timedelta(seconds=self.number(2) * 70)
        self.row["lease_expires_at"] = self.now + LEASE
        self.renewed = True
        if self.rows and self.rows[-1]["rev"] == self.row["rev"]:
            self.rows[-1] = dict(self.row)

    # Ends of a claim without an outcome.

    def returned(self, eligible_at: datetime) -> dict[str, Any]:
        return {
            "status": "runnable",
            "hold": 0,
            "locked_by": None,
            "lease_expires_at": None,
            "claim_id": None,
            "claim_token_hash": None,
            "eligible_at": eligible_at,
        }

    def release(self) -> None:
        row, counted, hold = self.row, self.chance(), 4 if self.suspended else self.number(3)
        interrupted = not counted and self.chance()
        change = {
            **self.returned(row["eligible_at"]),
            "attempt": row["attempt"] + counted,
            "hold": hold,
            "interruptions": row["interruptions"] + interrupted,
        }
        if hold == 2:
            change["shelved_step"] = row["step"]
        data = {
            "to_attempt": change["attempt"],
            "eligible_at": row["eligible_at"],
            "hold": hold,
            "interrupted": interrupted,
        }
        self.move("released", change, data=data)

    def crash(self) -> None:
        row, failed = self.row, self.number(4) == 1
        error = ErrorInfo(text=f"crash {row['crashes'] + 1}: SystemExit", type="SystemExit", traceback="...")
        eligible = self.now + timedelta(seconds=row["crashes"])
        change = {
            **self.returned(eligible),
            "crashes": row["crashes"] + 1,
            "attempt": row["attempt"] + (not failed),
            **self.error(error),
        }
        if failed:
            change |= {"status": "failed", "finished_at": self.now}
        data = {"to_attempt": change["attempt"], "eligible_at": eligible, "failed": failed}
        self.move("crashed", change, error=error, data=data)

    def reap(self) -> None:
        row, proof = self.row, ("lease", "dead", "stopped")[self.number(3)]
        failed = proof != "stopped" and self.number(4) == 1
        if proof == "lease":
            self.now = max(self.now, row["lease_expires_at"])
        stopped = proof == "stopped"
        error = ErrorInfo(text="quarantined: step ended 3 times without an outcome") if failed else None
        eligible = self.now + timedelta(seconds=0 if stopped else row["crashes"])
        change = {
            **self.returned(eligible),
            "attempt": row["attempt"] + (not stopped and not failed),
            "crashes": row["crashes"] + (not stopped),
            "interruptions": row["interruptions"] + stopped,
        }
        if failed:
            change |= {"status": "failed", "finished_at": self.now, **self.error(error)}
        data = {"to_attempt": change["attempt"], "eligible_at": eligible, "proof": proof, "failed": failed}
        self.move("reaped", change, error=error, data=data)

    # The ends of waits.

    def woken(self) -> dict[str, Any]:
        row = self.row
        return {
            "status": "runnable",
            "eligible_at": self.now,
            "step": row["await_step"] or row["step"],
            "await_step": None,
            "await_deadline": None,
        }

    def wake(self) -> None:
        change = self.woken()
        self.move("woken", change, to_step=change["step"], data={"signals": [{"id": 1, "name": "paid"}]})

    def expire(self) -> None:
        change = self.woken()
        waited_for = "children" if self.row["status"] == "awaiting_children" else "signal"
        self.move("expired", change, to_step=change["step"], data={"waited_for": waited_for})

    def count(self) -> None:
        row, ended, failed = self.row, 1 + self.number(2), self.chance()
        ended = min(ended, row["children_pending"])
        pending = row["children_pending"] - ended
        data = {"count": ended, "pending": pending, "failed": failed}
        if pending == 0 or (row["wake_on_failure"] and failed):
            change = {**self.woken(), "children_pending": pending}
            self.move("joined", change, to_step=change["step"], data=data)
        else:
            self.move("child_ended", {"children_pending": pending}, data=data)

    def recount(self) -> None:
        pending = self.row["children_pending"] + 1
        self.move("recounted", {"children_pending": pending}, data={"count": 1, "pending": pending})

    # Commands.

    def command(self, kind: str) -> dict[str, Any]:
        return {"command": {"type": kind, "key": f"{kind}-{self.row['rev']}", "reason": "because"}}

    def decided(self, kind: str) -> tuple[dict[str, Any], dict[str, Any]]:
        decision = {"kind": kind, "by": "ann", "data": {"ok": None}}
        manual = {**self.row["manual"], "decision": decision}
        return {**self.woken(), "step": manual["then"], "manual": manual}, {"decision": decision}

    def decide(self) -> None:
        verb = "approve" if self.row["manual"]["kind"] == "approval" else "proceed"
        change, data = self.decided(f"{verb.rstrip('e')}ed")
        data |= self.command(verb)
        self.move(f"{verb.rstrip('e')}ed", change, to_step=change["step"], by="ann", data=data)

    def reject(self) -> None:
        """By somebody, or by the deadline."""
        kind, by = ("timed_out", None) if self.chance() else ("rejected", "ann")
        change, data = self.decided(kind)
        data |= self.command("reject") if by else {}
        if self.chance():
            error = ErrorInfo(text="rejected: too expensive")
            del change["eligible_at"]
            change |= {"status": "failed", "step": self.row["step"], "manual": None, "finished_at": self.now}
            self.move(kind, change | self.error(error), by=by, error=error, data={**data, "failed": True})
        else:
            change["step"] = "bill"
            self.move(kind, change, to_step="bill", by=by, data=data)

    def suspend(self) -> None:
        self.suspended = True
        request = {"kind": "pause", "by": "ann", "at": json(self.now)}
        self.move("paused", {"request": request}, by="ann", data=self.command("pause"))

    def resume(self) -> None:
        self.suspended = False
        self.waits = self.waits and self.chance()  # what it comes after may have ended meanwhile
        hold = 5 if self.waits and self.row["status"] == "runnable" else self.row["hold"] % 4
        told = self.command("resume") | ({"hold": 5} if hold == 5 else {})
        self.move("resumed", {"hold": hold}, by="ann", data=told)

    def maybe_cancel(self) -> None:
        if self.number(6) == 1:
            (self.compensate if self.row["cancellation"] is None and self.chance() else self.cancel)()

    def cancel_here(self) -> None:
        """The node that runs it commits the cancellation."""
        error = ErrorInfo(text="not wanted") if self.chance() else None
        change = {
            **self.committed(advance=False),
            "awaits": self.row["awaits"],
            "status": "cancelled",
            "finished_at": self.now,
            **self.error(error),
        }
        self.move("cancelled", change, error=error)

    def cancel(self) -> None:
        """From outside: an owner loses its claim."""
        error = ErrorInfo(text="because") if self.chance() else None
        change = {
            **self.error(error), **STOPPED, "status": "cancelled", "finished_at": self.now,
            "manual": self.row["manual"] if "decision" in (self.row["manual"] or {}) else None,
        }  # fmt: skip
        self.move("cancelled", change, by="ann", error=error, data=self.command("cancel"), outside=True)

    def compensate(self) -> None:
        """From outside, too: it enters the step that compensates."""
        self.suspended = self.waits = False
        told = {"by": "ann", "at": self.now.isoformat()}
        change = {
            **self.error(None), **STOPPED, "status": "runnable", "step": "bill", "visit": self.row["visit"] + 1,
            "attempt": 0, "round": 0, "crashes": 0, "awaits": None, "children_total": 0, "eligible_at": self.now,
            "cancellation": told,
        }  # fmt: skip
        data = {**self.command("cancel"), "columns": {"cancellation": told}}
        self.move("compensating", change, to_step="bill", by="ann", data=data, outside=True)

    def hasten(self) -> None:
        self.move("hastened", {"eligible_at": self.now}, by="ann", data=self.command("run_now"))

    def snapshot(self) -> None:
        self.move("snapshot", {}, row=None)
