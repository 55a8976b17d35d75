"""What each statement of `_store/sql` that moves claims means, one function per file: claim, commit, renew, give back.

Each runs at one instant inside a transaction; `Blocked` makes the server run it again when the lock is gone. Where
a file says SKIP LOCKED, locked rows are passed over. `scene.broken` names rules that are left out on purpose, to see
whether the checks notice (`breakages`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from durable_actors._postgres.driver.statement import Params
from tests.simulation import literals as lit
from tests.simulation.ending import asked_to_cancel, end_claim
from tests.simulation.limits import judge_limits, throttle
from tests.simulation.literals import jsonb
from tests.simulation.statements_journal import OUTCOMES, fenced, iso, journal_outcomes, note, note_claimed
from tests.simulation.tables import Row, Tx

Rows = list[Any]
"""Lists of bytes; of typed statements tuples of values, see `Statement.typed`."""
SECOND = 1_000_000


class Scene:
    """What a statement may know beside its parameters."""

    def __init__(self, broken: frozenset[str], new_claim: Callable[[], str], locks: dict[str, int]) -> None:
        self.broken = broken
        self.new_claim = new_claim
        self.locks = locks
        """Session locks: name to server process."""
        self.backend = 0
        self.started_at = 0
        self.owner_locked: Callable[[str], bool] = lambda owner: f"\2{owner}" in self.locks


Meaning = Callable[[Scene, Tx, Params], Rows]
MEANINGS: dict[str, Meaning] = {}


def meaning(function: Meaning) -> Meaning:
    MEANINGS[function.__name__] = function
    return function


def shown(*columns: object) -> list[bytes | None]:
    return [lit.text(column) for column in columns]


def due(row: Row, tx: Tx, queue: str) -> bool:
    return (
        row.status == "runnable"
        and row.queue == queue
        and row.eligible_at <= tx.now
        and not tx.is_locked(row.id)
    )


# -- claiming


@meaning
def pick_instances(scene: Scene, tx: Tx, params: Params) -> Rows:
    queue = (params[0] or b"").decode()
    limit = int(params[1] or 0)
    stopped = set[str]() if "pauses" in scene.broken else tx.stopped(queue)
    if "" in stopped:
        return []
    begins = zip(lit.ints(params[5]), lit.texts(params[6]), lit.ints(params[7]), strict=True)
    extras, shelved = set(lit.ints(params[8])), set(lit.texts(params[10]))
    window: dict[int, Row] = {}
    offered = [row for row in tx.all() if due(row, tx, queue)]
    if "double claim" in scene.broken:
        offered += [row for row in tx.all() if row.status == "executing" and row.queue == queue]
    for row in offered:
        on_shelf = row.hold == 2 and row.address in shelved and row.fsm not in stopped
        if (row.hold in {0, 3} and row.id in extras) or on_shelf:
            window[row.id] = row
    for priority, at, number in begins:
        start = (lit.micros(at or "-infinity"), number)
        head = [
            r for r in offered if r.hold == 0 and r.priority == priority and (r.eligible_at, r.id) > start
        ]
        head.sort(key=lambda row: (row.eligible_at, row.id))
        window.update({row.id: row for row in head[:limit]})
    chosen = sorted(window.values(), key=lambda row: row.urgency)[:limit]
    return take_window(scene, tx, params, chosen, stopped)


def take_window(scene: Scene, tx: Tx, params: Params, chosen: Sequence[Row], stopped: set[str]) -> Rows:
    """Claim, hold, shelve or leave the rows of a pick's window. $3 to $5 and $12 are the same in every pick."""
    known = set(lit.texts(params[4]))
    mine = {row.id for row in chosen if row.address in known and row.fsm not in stopped}
    verdicts, heal = _judge(tx, [row for row in chosen if row.id in mine], known)
    promote(tx, [*(row.partition_key for row in chosen if row.id not in mine), *heal])
    limited = [
        row for row in chosen if row.rate_limit is not None and row.id in mine and verdicts[row.id] == "c"
    ]
    aside = [row.id for row in chosen if row.id not in mine]
    judged = judge_limits(scene, tx, (params[0] or b"").decode(), limited, aside) if limited else None
    if judged is not None:
        verdicts |= {row.id: judged.verdict(row.id) for row in limited}
    out: Rows = []
    for row in chosen:
        what = verdicts[row.id] if row.id in mine else "s"
        if what == "c":
            out.append(claim(scene, tx, row, params, params[11]))
            continue
        if what == "t":
            throttle(tx, row, judged.throttle[row.id])
        elif what != "l":
            new = tx.write(row, "hold")
            new.hold = 1 if what == "h" else 2
            new.shelved_step = row.step if what == "s" else row.shelved_step
            note(tx, new, "held" if what == "h" else "shelved", new)
        out.append((row.id, row.priority, lit.instant(row.eligible_at), what, *[None] * 16))
    return out


@meaning
def pick_instances_by_id(scene: Scene, tx: Tx, params: Params) -> Rows:
    queue, told = (params[0] or b"").decode(), set(lit.ints(params[1]))
    known = set(lit.texts(params[4]))
    offered = [row for row in tx.all() if row.id in told and row.hold == 0 and due(row, tx, queue)]
    mine = [
        row
        for row in offered
        if row.partition_key is None and row.rate_limit is None and row.address in known
    ]
    mine = [row for row in mine if not tx.is_stopped(row)]
    return [(*claim(scene, tx, row, params, params[5]), None) for row in mine]


@meaning
def claim_at_once(scene: Scene, tx: Tx, params: Params) -> Rows:
    queues, known = set(lit.texts(params[0])), set(lit.texts(params[4]))
    told = set(lit.ints(params[1])) or {tx.tables.serial}
    mine = [
        row
        for row in tx.all()
        if row.id in told and row.queue in queues and row.hold == 0 and due(row, tx, row.queue)
    ]
    mine = [
        row
        for row in mine
        if row.partition_key is None
        and row.rate_limit is None
        and row.journal < 3
        and row.address in known
        and not tx.is_stopped(row)
    ]
    return [(*claim(scene, tx, row, params, params[5]), row.queue) for row in mine]


def claim(scene: Scene, tx: Tx, row: Row, params: Params, token: bytes | None) -> tuple[object, ...]:
    """Claim it for the owner of $3, for $4 seconds."""
    new = tx.write(row, "claim", moves="rev" not in scene.broken)
    new.status, new.hold, new.locked_by = "executing", 0, (params[2] or b"").decode()
    new.claim_id, new.lease = scene.new_claim(), tx.now + round(float(params[3] or 0) * SECOND)
    new.token = (token or b"").decode()
    note_claimed(tx, new)
    return _claimed(new)


def _recorded(row: Row) -> str | None:
    """As `_read_recorded` reads it: the first that are there, and the limits last."""
    trace = None if row.meta is None else json.loads(row.meta).get("durable:trace")
    text = "" if trace is None else f"{trace[:1000]}\x1f"
    text += "" if row.max_attempts is None else f"{row.max_attempts}#"
    text += "" if row.links is None else f"{row.links}@"
    text += str(row.journal) if row.journal else ""
    text += f" {row.fingerprint or ''}" if row.journal >= 2 else ""
    text += f" {lit.instant(row.lease)}" if row.journal >= 3 else ""
    text += "" if row.rate_limit is None else f"\x1d{row.rate_limit}\x1d1"
    return text or None


def _claimed(row: Row) -> tuple[object, ...]:
    awaits = lit.text_array(row.awaits)
    return (
        row.id, row.priority, lit.instant(row.eligible_at), "c", row.claim_id, row.fsm, row.version, row.step,
        row.attempt, row.crashes, row.visit, row.state.decode(), row.partition_key, row.parent_id,
        None if awaits is None else awaits.decode(), row.inbox, row.children_total, row.round,
        _recorded(row), None if row.cancellation is None else row.cancellation.decode(),
    )  # fmt: skip


def _judge(tx: Tx, mine: Sequence[Row], known: set[str | None]) -> tuple[dict[int, str], list[str]]:
    """judge_siblings: what a pick may do with each row, and keys whose elder is held. Nobody else decides now."""
    verdicts: dict[int, str] = {}
    heal: list[str] = []
    decided: dict[str, str] = {}
    for row in mine:
        key = row.partition_key
        if key is None:
            verdicts[row.id] = "c"
        elif key in decided:
            verdicts[row.id] = "h" if decided[key] != "l" else "l"
        else:
            siblings = [each for each in tx.all() if each.partition_key == key and each.id != row.id]
            runs = [each for each in siblings if each.status == "executing"]
            elders = [
                each
                for each in siblings
                if each.status == "runnable"
                and each.eligible_at <= tx.now
                and each.keeps_place
                and each.urgency < row.urgency
                and each.address in known
                and not tx.is_stopped(each)
            ]
            before = runs[:1] or sorted(elders, key=lambda each: each.urgency)[:1]
            if not before:
                decided[key] = "c"
            elif tx.is_locked(before[0].id):
                decided[key] = "l"
            else:
                decided[key] = "h"
                if before[0].hold == 1 and not runs:
                    heal.append(key)
            verdicts[row.id] = decided[key]
    return verdicts, heal


@meaning
def release_claims(scene: Scene, tx: Tx, params: Params) -> Rows:
    out: Rows = []
    for number, claim in zip(lit.ints(params[0]), lit.texts(params[1]), strict=True):
        row = tx.get(number)
        if row is None or row.claim_id != claim or row.locked_by is None or tx.is_locked(number):
            continue
        if asked_to_cancel(row) and "release asked" not in scene.broken:
            if (ended := end_claim(tx, row, "release", claim)) is not None:
                out.append(shown(number, row.queue, row.partition_key, *ended))
            continue
        old = row.clone()
        new = tx.write(row, "release", claim)
        new.status, new.attempt = "runnable", row.attempt + int(params[2] or 0)
        new.hold = row.held or int(params[3] or 0)
        new.interruptions = row.interruptions + int(params[4] or 0)
        new.shelved_step = row.step if new.hold == 2 else row.shelved_step
        new.unclaim()
        data = {"to_attempt": new.attempt, "eligible_at": iso(new.eligible_at), "hold": new.hold}
        interrupted = int(params[4] or 0) > 0
        note(tx, new, "released", old, **fenced(old), data={**data, "interrupted": interrupted})
        out.append(shown(number, row.queue, row.partition_key, "runnable", None))
    return out


@meaning
def read_orphans(scene: Scene, tx: Tx, params: Params) -> Rows:
    owner, queue = (params[0] or b"").decode(), (params[1] or b"").decode()
    known = set() if "strays" in scene.broken else set(lit.texts(params[2]))
    return [
        shown(row.id, row.claim_id, row.partition_key, row.parent_id)
        for row in sorted(tx.all(), key=lambda each: each.id)
        if row.status == "executing"
        and row.locked_by == owner
        and row.queue == queue
        and row.claim_id not in known
    ]


@meaning
def promote_siblings(scene: Scene, tx: Tx, params: Params) -> Rows:
    promoted = promote(tx, lit.texts(params[0]))
    return [shown(row.id, row.queue, row.priority, lit.instant(row.eligible_at)) for row in promoted]


def promote(tx: Tx, keys: Sequence[str | None]) -> list[Row]:
    """Offer the first held row of each key again."""
    found: dict[int, Row] = {}
    for key in keys:
        held = [
            row
            for row in tx.all()
            if row.partition_key == key
            and key is not None
            and row.status == "runnable"
            and (row.hold == 1 or row.id in found)
            and not tx.is_locked(row.id)
            and not tx.is_stopped(row)
        ]
        if held:
            first = min(held, key=lambda row: row.urgency)
            if first.id in found:
                continue
            found[first.id] = tx.write(first, "promote")
            found[first.id].hold = 0
            note(tx, found[first.id], "offered", first)
    return list(found.values())


@meaning
def read_claims(scene: Scene, tx: Tx, params: Params) -> Rows:
    found = [row for number in lit.ints(params[0]) if (row := tx.get(number)) is not None]
    return [shown(row.id, row.claim_id, row.visit, row.status, row.state, row.request) for row in found]


@meaning
def probe_locks(scene: Scene, tx: Tx, params: Params) -> Rows:
    return [shown(number) for number in sorted(lit.ints(params[0])) if not tx.is_locked(number)]


# -- committing


def current(scene: Scene, tx: Tx, number: int, claim: str | None, visit: int, *, late: bool) -> Row | None:
    """The fence."""
    row = tx.get(number)
    if row is None:
        return None
    if "fence" in scene.broken:
        return None if row.terminal else row
    if row.claim_id != claim or row.locked_by is None:
        return None
    if row.visit != visit and "visit" not in scene.broken:
        return None
    if not late and (row.lease or 0) <= tx.clock and "lease" not in scene.broken:
        return None
    return row


def _overruled(scene: Scene, row: Row, status: object) -> bool:
    """Under a request to cancel only these ends are committed."""
    return "overrule" not in scene.broken and asked_to_cancel(row) and status not in {"done", "cancelled"}


def enter(tx: Tx, row: Row, why: tuple[object, ...], columns: tuple[object, ...]) -> Row:
    """What both commits write."""
    status, step, state, result, attempt, advance, delay, error, rekey, key = columns
    assert isinstance(advance, int)
    assert isinstance(delay, float)
    new = tx.write(row, *why)
    new.status, new.step, new.attempt, new.last_error = status, step, attempt, error
    new.hold = row.held if status == "runnable" else 0
    new.error_type = new.traceback = None
    new.state = row.state if state is None else jsonb(str(state))
    new.result = None if result is None else jsonb(str(result))
    new.visit = row.visit + advance
    new.crashes = 0 if advance else row.crashes
    new.round = 0 if advance else row.round + 1
    new.eligible_at = tx.now + round(delay * SECOND)
    new.finished_at = tx.now if new.terminal else None
    if rekey:
        new.partition_key = key
    return new


def _row_columns(params: Params) -> list[list[object]]:
    """step, state, result, attempt, advance, delay, last_error, rekey, new key: as `_row_params` writes them."""
    readers: list[Callable[[bytes | None], Sequence[object]]] = [
        lit.texts, lit.texts, lit.texts, lit.ints, lit.ints, lit.floats, lit.texts, lit.bools, lit.texts,
    ]  # fmt: skip
    return [list(read(param)) for read, param in zip(readers, params, strict=True)]


MEANINGS["journal_outcomes"] = journal_outcomes


@meaning
def write_limits(scene: Scene, tx: Tx, params: Params) -> Rows:
    """The model has one limit, which lets everything go: what a pick judges, tests/store and tests/engine try."""
    for number, claim, limits in zip(
        lit.ints(params[0]), lit.texts(params[1]), lit.texts(params[2]), strict=True
    ):
        row = tx.get(number)
        if row is not None and row.claim_id == claim and tx.wrote(number):
            new = tx.write(row, *tx.why[number])
            new.rate_limit = limits
            note(tx, new, "limited", new, level=OUTCOMES, data={"columns": {"rate_limit": limits}})
    return []


@meaning
def commit_outcomes(scene: Scene, tx: Tx, params: Params) -> Rows:
    late = params[15] == b"t"
    numbers = lit.ints(params[0])
    columns: list[Sequence[object]] = [
        lit.ints(params[2]), lit.texts(params[3]), lit.texts(params[4]), lit.bools(params[5]),
        *_row_columns(params[6:15]),
    ]  # fmt: skip
    full = [[*(each or [None])] * (len(numbers) if len(each) < 2 else 1) for each in columns]
    heads: Iterable[tuple[Any, ...]] = zip(numbers, lit.texts(params[1]), *full, strict=True)
    out: Rows = []
    # Of the statement's snapshot: a row that it makes runnable itself is not seen.
    due = {
        y.partition_key
        for y in tx.all()
        if y.status == "runnable" and y.eligible_at <= tx.now and y.keeps_place
    }
    for number, claim, visit, key, status, ahead, *rest in heads:
        row = current(scene, tx, number, claim, visit, late=late)
        if row is None or _overruled(scene, row, status):
            continue
        stays = (
            ahead and ("paused ahead" in scene.broken or not row.paused) and (key is None or key not in due)
        )
        new = enter(tx, row, ("commit", claim, visit, late), (status, *rest))
        if stays:
            new.status, new.eligible_at = "executing", row.eligible_at
        else:
            new.locked_by = new.lease = None
        if new.status == "done":
            tx.drop_inbox(number)
        out.append((number, new.visit, new.status, new.state.decode() if stays else None, new.inbox, None))
    return out


@meaning
def commit_parks(scene: Scene, tx: Tx, params: Params) -> Rows:
    late = params[19] == b"t"
    types, traces = lit.texts(params[17]), lit.texts(params[18])
    heads = zip(
        lit.ints(params[0]), lit.texts(params[1]), lit.ints(params[2]), lit.texts(params[3]),
        *_row_columns(params[4:13]),
        lit.texts(params[13]), lit.bools(params[14]), lit.texts(params[15]), lit.floats(params[16]),
        types or [None] * len(lit.ints(params[0])), traces or [None] * len(lit.ints(params[0])),
        lit.texts(params[20]) or [None] * len(lit.ints(params[0])), strict=True,
    )  # fmt: skip
    out: Rows = []
    for number, claim, visit, status, *rest, awaits, keeps, then, timeout, kind, trace, boundary in heads:
        row = current(scene, tx, number, claim, visit, late=late)
        if row is None or _overruled(scene, row, status):
            continue
        new = enter(tx, row, ("commit", claim, visit, late), (status, *rest))
        new.error_type, new.traceback = kind, trace
        new.locked_by = new.lease = None
        if not keeps and status not in {"failed", "cancelled"}:
            new.awaits = None if awaits is None else tuple(lit.texts(str(awaits).encode()))
        new.await_step = then
        if boundary is not None or new.visit > row.visit or status == "done":
            new.manual = None if boundary is None else json.loads(boundary)
        new.await_deadline = None if timeout is None else tx.now + round(timeout * SECOND)
        new.children_total = 0 if new.visit > row.visit else row.children_total
        new.children_pending, new.wake_on_failure = 0, False
        if new.status == "done":
            tx.drop_inbox(number)
        out.append((number, new.visit, new.status, None, new.inbox, None))
    return out
