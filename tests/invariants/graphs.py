"""I15: what comes after others runs after them. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from durable_actors._store.holds import WAITING
from tests.invariants.changes import InstanceChange
from tests.invariants.history import History, Needs, Violation


def i15_dependents_run_after_what_they_need(history: History) -> list[Violation]:
    """An instance that comes after others is offered once, when the last of them has ended, and never before.

    * When it is unblocked, or claimed by the commit that ends the last one, each that it comes after has ended well: at
      the latest in the same transaction, and since it was retried, if that one was live at its retry.
    * Whoever is doomed comes after one that ended badly, and none of its code runs.
    * At the end nobody waits for instances that have all ended.
    """
    found = list(_ran_doomed(history))
    for number, needs in history.needs.items():
        found.extend(_follow(history, number, needs))
        found.extend(_stuck(history, number, needs))
    return found


def _follow(history: History, number: int, needs: Needs) -> Iterator[Violation]:
    since = 0
    unblocked: InstanceChange | None = None
    for change, move in history.by_instance.get(number, ()):
        old, new = change.old, change.new
        if move in {"started", "revived"}:
            since, unblocked = change.seq, None
            continue
        handed = old is not None and old.hold == WAITING and new is not None and new.status == "executing"
        if handed or move == "unblocked":
            if unblocked is not None:
                yield history.violation("I15", "it was unblocked twice", unblocked, change)
            unblocked = change
            for need in needs.ids:
                if not _ended_well(history, need, needs, since, change):
                    how = "claimed, while it waited," if handed else "unblocked"
                    sentence = f"it was {how} before instance {need} had ended well"
                    yield history.violation("I15", sentence, _last(history, need, change), change)
        elif move == "doomed":
            bad = [need for need in needs.ids if _ended_badly(history, need, since, change)]
            if not bad or needs.any_end:
                yield history.violation("I15", "it is doomed, and nothing that it needs has failed", change)


def _ran_doomed(history: History) -> Iterator[Violation]:
    for key, run in history.runs.items():
        entry = history.entries.get(key)
        if entry is not None and entry.new is not None and "upstream" in (entry.new.cancellation or {}):
            yield history.violation("I15", "it is doomed, and its code ran", entry, run.began)


def _ended_well(history: History, need: int, needs: Needs, since: int, change: InstanceChange) -> bool:
    """Whether it had ended well when the dependent began to wait, or has since; True if that is not known."""
    moves = history.by_instance.get(need)
    if moves is None:
        return True
    good = frozenset({"done", "failed", "cancelled"}) if needs.any_end else frozenset({"done"})
    before = [each for each, _ in moves if each.seq <= since]
    if before and (before[-1].new is None or before[-1].new.status in good):
        return True
    return any(
        each.new is not None and each.new.status in good
        for each, _ in moves
        if since < each.seq and (each.seq < change.seq or each.txid == change.txid)
    )


def _ended_badly(history: History, need: int, since: int, change: InstanceChange) -> bool:
    moves = history.by_instance.get(need)
    return moves is None or any(
        each.new is not None and each.new.status in {"failed", "cancelled"}
        for each, _ in moves
        if since < each.seq and (each.seq < change.seq or each.txid == change.txid)
    )


def _last(history: History, number: int, until: InstanceChange) -> InstanceChange | None:
    moves = [each for each, _ in history.by_instance.get(number, ()) if each.seq < until.seq]
    return moves[-1] if moves else None


def _stuck(history: History, number: int, needs: Needs) -> Iterator[Violation]:
    """Whoever waits at the end although nothing that it waits for will end again."""
    row = history.rows.get(number)
    if row is None or row.status != "runnable" or row.hold != WAITING:
        return
    changes = history.by_instance.get(number, ())
    since = max((change.seq for change, move in changes if move in {"started", "revived"}), default=0)
    ends: list[InstanceChange] = []
    decided = False
    for need in needs.ids:
        last = next((each for each, _ in reversed(history.by_instance.get(need, ()))), None)
        if last is None or (last.new is not None and not last.new.ended):
            if last is not None:
                continue
            return
        ends.append(last)
        bad = last.new is not None and last.new.status != "done" and not needs.any_end
        decided = decided or (bad and last.seq > since)
        if bad and last.seq <= since:
            return  # it was retried, and waits until that one is retried, too
    if not decided and len(ends) < len(needs.ids):
        return
    at = max(each.at for each in ends)
    waited = history.ended - at - history.away(at, history.ended)
    if waited > history.patience:
        sentence = f"it waits for instances that have ended, for {waited:.1f} s"
        yield history.violation("I15", sentence, *ends)
