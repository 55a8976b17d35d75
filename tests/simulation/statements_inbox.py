"""What the other statements mean: inserts, signals, awaits, children, reads, session locks. See `statements`."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence

from durable_actors._postgres.driver import encode
from durable_actors._postgres.driver.statement import Params
from tests.simulation import literals as lit
from tests.simulation.ending import asked_to_cancel, cascade
from tests.simulation.literals import jsonb
from tests.simulation.statements import SECOND, Rows, Scene, meaning, shown
from tests.simulation.statements_journal import FULL, note, note_spawned, note_started
from tests.simulation.tables import Letter, NotYet, Row, Tx

MICRO = 1e-6


def _text(value: bytes | None) -> str:
    return (value or b"").decode()


# -- inserting


@meaning
def insert_instances(scene: Scene, tx: Tx, params: Params) -> Rows:
    read = (
        lit.texts, lit.ints, lit.texts, lit.texts, lit.texts, lit.ints, lit.texts, lit.keys, lit.texts, lit.texts,
        lit.floats, lit.numbers, lit.numbers, lit.texts, lit.texts, lit.ints, lit.texts, lit.texts, lit.numbers,
        lit.numbers, lit.texts, lit.texts,
    )  # fmt: skip
    out: Rows = []
    given = [[*each(param)] for each, param in zip(read, params, strict=True)]
    given[-6:] = [each or [None] * len(given[0]) for each in given[-6:]]
    for columns in zip(*given, strict=True):
        (
            fsm,
            version,
            step,
            state,
            queue,
            priority,
            key,
            unique,
            scope,
            _,
            delay,
            parent,
            barrier,
            tags,
            meta,
            level,
            definition,
            child_key,
            links,
            limit,
            fair_key,
            limits,
        ) = columns
        tx.tables.serial += 1
        occupant = _occupant(tx, unique)
        if occupant is not None:
            out.append(shown(None, occupant))
            continue
        row = Row(
            id=tx.tables.serial, fsm=fsm, version=version, step=step, state=jsonb(state), queue=queue,
            priority=priority, partition_key=key, unique_key=unique, scope=tuple(lit.texts(scope.encode())),
            eligible_at=tx.now + round((delay or 0) * SECOND), parent_id=parent, barrier=barrier,
            tags=tags and tuple(lit.texts(tags.encode())), meta=None if meta is None else jsonb(meta),
            journal=level, fingerprint=definition, child_key=child_key, links=links, hold=5 if links in {1, 3} else 0,
            max_attempts=limit,
            fair_key=fair_key, rate_limit=limits,
        )  # fmt: skip
        tx.insert(row)
        note_started(tx, row)
        out.append(shown(row.id, None))
    return out


@meaning
def insert_plain(scene: Scene, tx: Tx, params: Params) -> Rows:
    return _insert_plain(tx, params)


@meaning
def insert_held(scene: Scene, tx: Tx, params: Params) -> Rows:
    return _insert_plain(tx, params, holds=lit.ints(params[12]))


@meaning
def insert_linked(scene: Scene, tx: Tx, params: Params) -> Rows:
    return _insert_plain(tx, params, lit.texts(params[12]), lit.numbers(params[13]))


def _insert_plain(
    tx: Tx,
    params: Params,
    keys: Sequence[str | None] = (),
    links: Sequence[int | None] = (),
    holds: Sequence[int] = (),
) -> Rows:
    states = lit.texts(params[3])
    read = (lit.texts, lit.ints, lit.texts, lit.texts, lit.ints, lit.texts, lit.floats, lit.ints)
    places = (params[0], params[1], params[2], params[4], params[5], params[6], params[8], params[11])
    given = [[*each(param)] or [None] for each, param in zip(read, places, strict=True)]
    columns = [values * len(states) if len(values) == 1 else values for values in given]
    parent, barrier = (None if each is None else int(each) for each in params[9:11])
    names, parts = keys or [None] * len(states), links or [None] * len(states)
    holds = holds or [5 if part in {1, 3} else 0 for part in parts]
    out: Rows = []
    for state, fsm, version, step, queue, priority, key, delay, level, name, part, hold in zip(
        states, *columns, names, parts, holds, strict=True
    ):
        tx.tables.serial += 1
        row = Row(
            id=tx.tables.serial, fsm=fsm, version=version, step=step, state=jsonb(state), queue=queue,
            priority=priority, partition_key=key, unique_key=None, scope=(),
            eligible_at=tx.now + round((delay or 0) * SECOND), parent_id=parent, barrier=barrier, journal=level,
            child_key=name, links=part, hold=hold,
        )  # fmt: skip
        tx.insert(row)
        out.append(shown(row.id))
    return out


def _occupant(tx: Tx, key: bytes | None) -> int | None:
    if key is None:
        return None
    return next((row.id for row in tx.all() if row.guard == key), None)


# -- signals


@meaning
def send_signals(scene: Scene, tx: Tx, params: Params) -> Rows:
    targets = [
        number if number is not None else _occupant(tx, key)
        for number, key in zip(lit.numbers(params[0]), lit.keys(params[1]), strict=True)
    ]
    for number in sorted({each for each in targets if each is not None and tx.get(each) is not None}):
        tx.lock(number)
    letters = zip(targets, lit.texts(params[2]), lit.texts(params[3]), lit.texts(params[4]), strict=True)
    out: list[tuple[Row | None, str]] = []
    posted: dict[int, list[Letter]] = {}
    for target, name, payload, dedup in letters:
        row = None if target is None else tx.get(target)
        if row is None or row.terminal:
            out.append((None, "no_target"))
            continue
        if dedup is not None and tx.knows(row.id, dedup) and "dedup" not in scene.broken:
            out.append((row, "duplicate"))
            continue
        tx.tables.letter_serial += 1
        letter = Letter(tx.tables.letter_serial, row.id, str(name), jsonb(payload or "null"), dedup, tx.now)
        tx.post(letter)
        posted.setdefault(row.id, []).append(letter)
        out.append((row, "sent"))
    woken = {number for number, letters in posted.items() if _wake(scene, tx, number, letters)}
    return [
        shown(None if row is None else row.id, what, row and row.queue, row is not None and row.id in woken)
        for row, what in out
    ]


def _wake(scene: Scene, tx: Tx, number: int, letters: list[Letter]) -> bool:
    row = tx.get(number)
    assert row is not None
    old = row.clone()
    hit = row.status == "awaiting_signal" and any(each.name in row.awaits for each in letters)
    wakes = hit and "wake" not in scene.broken
    if wakes or not row.inbox:
        new = tx.write(row, "signal", moves=wakes)
        new.inbox = True
        if wakes:
            new.wake(tx.now)
            signals = [
                {"id": each.id, "name": each.name}
                | ({"payload": json.loads(each.payload)} if row.journal >= FULL else {})
                for each in letters
            ]
            note(tx, new, "woken", old, new.step, data={"signals": signals})
    return hit


@meaning
def signal_from_step(scene: Scene, tx: Tx, params: Params) -> Rows:
    sender = tx.get(int(params[5] or 0))
    if sender is None or sender.claim_id != _text(params[6]) or sender.locked_by is None:
        return []
    return send_signals(scene, tx, params[:5]) if sender.visit == int(params[7] or 0) else []


@meaning
def consume_signals(scene: Scene, tx: Tx, params: Params) -> Rows:
    pairs = list(zip(lit.ints(params[0]), lit.ints(params[1]), strict=True))
    for target in {target for target, _ in pairs}:
        if not tx.wrote(target) and "consume" not in scene.broken:
            continue
        ids = {signal for each, signal in pairs if each == target}
        for letter in tx.unread(target):
            if letter.id in ids or ("consume more" in scene.broken and letter.id < max(ids) + 3):
                tx.consume(letter)
    return []


@meaning
def recheck_awaits(scene: Scene, tx: Tx, params: Params) -> Rows:
    ignored = set(lit.ints(params[1]))
    out: Rows = []
    for number in lit.ints(params[0]):
        row = tx.get(number)
        if (
            row is None
            or not tx.wrote(number)
            or row.status != "awaiting_signal"
            or "recheck" in scene.broken
        ):
            continue
        if any(each.name in row.awaits and each.id not in ignored for each in tx.unread(number)):
            old = row.clone()
            new = tx.write(row, *tx.why[number])
            new.wake(tx.now)
            if "unrecorded wake" not in scene.broken:
                note(tx, new, "woken", old, new.step)
            out.append(shown(number))
    return out


def _letter(letter: Letter) -> list[bytes | None]:
    return shown(letter.target, letter.id, letter.name, letter.payload, letter.dedup, lit.instant(letter.at))


@meaning
def read_inboxes(scene: Scene, tx: Tx, params: Params) -> Rows:
    most = int(params[1] or 0)
    found = [_letter(each) for number in lit.ints(params[0]) for each in tx.unread(number)[:most]]
    for number in lit.ints(params[0]):
        row = tx.get(number)
        if row is not None and "decision" in (row.manual or {}):
            found.append(shown(number, None, None, json.dumps(row.manual["decision"]), None, None))
        slot = None if row is None or row.meta is None else json.loads(row.meta).get("durable:schedule")
        if slot is not None:
            found.append(shown(number, None, "schedule", json.dumps(slot), None, None))
    return found


# -- children


@meaning
def lock_parent(scene: Scene, tx: Tx, params: Params) -> Rows:
    row = tx.get(int(params[0] or 0))
    if (
        row is None
        or row.claim_id != _text(params[1])
        or row.locked_by is None
        or row.visit != int(params[2] or 0)
    ):
        return []
    if params[3] != b"t" and row.lease <= tx.clock:
        return []
    if asked_to_cancel(row):
        return []
    tx.lock(row.id)
    return [shown(row.id)]


@meaning
def park_parent(scene: Scene, tx: Tx, params: Params) -> Rows:
    row = tx.get(int(params[0] or 0))
    assert row is not None
    total, needed = int(params[3] or 0), int(params[4] or 0)
    old = row.clone()
    new = tx.write(row, "commit", row.claim_id, row.visit, True)
    new.status, new.hold = ("awaiting_children", 0) if needed else ("runnable", row.held)
    new.step = row.step if needed else _text(params[1])
    new.await_step = _text(params[1]) if needed else None
    timeout = params[6]
    new.await_deadline = None if timeout is None or not needed else tx.now + round(float(timeout) * SECOND)
    new.state = row.state if params[2] is None else jsonb(params[2])
    new.attempt = new.crashes = new.round = 0
    new.error_type = new.traceback = None
    new.visit, new.eligible_at, new.last_error, new.awaits = row.visit + 1, tx.now, None, None
    new.manual = None
    new.children_total, new.children_pending = total, needed
    new.wake_on_failure = params[5] == b"t" and needed > 0
    new.cancel_rest = True if params[14] == b"t" and needed else None if row.cancel_rest is None else False
    new.locked_by = new.lease = None
    note_spawned(tx, old, new, params)
    return [shown(new.id, new.visit, new.status)]


@meaning
def join_parents(scene: Scene, tx: Tx, params: Params) -> Rows:
    ended: dict[tuple[int, int], list[Row]] = {}
    for number in lit.ints(params[0]):
        child = tx.get(number)
        if child is not None and tx.wrote(number) and child.terminal and child.barrier is not None:
            ended.setdefault((child.parent_id, child.barrier), []).append(child)
    out: Rows = []
    for (parent, barrier), children in sorted(ended.items()):
        failed = any(each.status != "done" for each in children)
        opened = count_ended(scene, tx, parent, barrier, len(children), failed=failed)
        if opened is not None:
            out.append(shown(opened.id, opened.queue, opened.cancel_rest or None))
    return out


def count_ended(
    scene: Scene, tx: Tx, parent: int | None, barrier: int | None, count: int, *, failed: bool
) -> Row | None:
    """Count ended children at the barrier of their parent; returns the parent if that opens it."""
    row = None if parent is None or barrier is None else tx.get(parent)
    if row is None or row.status != "awaiting_children" or row.visit != barrier:
        return None
    tx.lock(row.id)
    old = row.clone()
    new = tx.write(row, "join")
    opens = row.children_pending <= count or (row.wake_on_failure and failed)
    new.children_pending = max(row.children_pending - count, 0)
    data = {"count": count, "failed": failed, "pending": new.children_pending}
    if opens and "join" not in scene.broken:
        new.wake(tx.now)
        note(tx, new, "joined", old, new.step, data=data)
        if new.cancel_rest:
            cascade(tx, new.id, new.visit, None)
        return new
    note(tx, new, "child_ended", old, data=data)
    return None


@meaning
def count_children(scene: Scene, tx: Tx, params: Params) -> Rows:
    parent, barrier = (int(each or 0) for each in params)
    found = Counter(r.status for r in tx.all() if r.parent_id == parent and r.barrier == barrier)
    return [shown(status, count) for status, count in found.items()]


@meaning
def read_children(scene: Scene, tx: Tx, params: Params) -> Rows:
    parent, barrier, after = (int(each or 0) for each in params[:3])
    found = [r for r in tx.all() if r.parent_id == parent and r.barrier == barrier and r.id > after]
    page = found[: int(params[3] or 0)]
    return [shown(r.id, r.fsm, r.status, r.result, r.last_error, r.child_key) for r in page]


# -- reading


@meaning
def read_queue(scene: Scene, tx: Tx, params: Params) -> Rows:
    queue, since = _text(params[0]), tx.now - round(float(params[1] or 0) * SECOND)
    rows = [row for row in tx.all() if row.queue == queue]
    out: Rows = []
    stopped = tx.stopped(queue)
    offered = [row for row in rows if row.status == "runnable" and row.hold == 0 and "" not in stopped]
    for priority in sorted({row.priority for row in offered}):
        future = [r.eligible_at for r in offered if r.priority == priority and r.eligible_at > since]
        later = (min(future) - tx.now) / SECOND if future else None
        out.append(shown(priority, later, None, None, None, None))
    shelf = [row for row in rows if row.status == "runnable" and row.hold == 2]
    shelved = {row.address for row in shelf if stopped.isdisjoint({"", row.fsm})}
    out += [shown(None, None, address, None, None, None) for address in sorted(shelved)]
    parked = [r for r in rows if r.status.startswith("awaiting") and r.await_deadline is not None]
    if parked:
        soonest = min(row.await_deadline for row in parked)
        out.append(shown(None, None, None, (soonest - tx.now) / SECOND, None, None))
    tokens = [at for (_, of), at in tx.read_all("limit_waits").items() if of == queue and "" not in stopped]
    if tokens:
        out.append(shown(None, (min(tokens) - tx.now) / SECOND, None, None, None, None))
    out += [shown(None, None, None, None, fsm, _left(tx, queue, fsm)) for fsm in sorted(stopped)]
    return out


def _left(tx: Tx, queue: str, fsm: str) -> float | None:
    """Seconds until a pause is over."""
    until = tx.tables.pauses[queue, fsm]
    return None if until is None else (until - tx.now) / SECOND


@meaning
def find_by_key(scene: Scene, tx: Tx, params: Params) -> Rows:
    key = bytes.fromhex(_text(params[0])[2:])
    occupant = _occupant(tx, key)
    had = [row.id for row in tx.all() if row.unique_key == key]
    return [shown(occupant if occupant is not None else max(had), 0)] if had else []


@meaning
def wait_for_work(scene: Scene, tx: Tx, params: Params) -> Rows:
    queues, every, patience = lit.texts(params[0]), float(params[1] or 0), float(params[2] or 0)
    waited = (tx.clock - tx.now) / SECOND
    if (left := min(every, patience) - waited) > MICRO:
        raise NotYet(left)
    due = [r for r in tx.all() if r.status == "runnable" and r.hold == 0 and r.eligible_at <= tx.clock]
    looked = [queue for queue in queues if "" not in tx.stopped(str(queue))]
    waits = tx.read_all("limit_waits").items()
    thawed = {queue for (_, queue), at in waits if at <= tx.clock and queue in looked}
    found = {queue: [r.priority for r in due if r.queue == queue] for queue in looked}
    if not thawed and not any(found.values()) and (left := patience - waited) > MICRO:
        raise NotYet(min(every, left))
    out = [shown(queue, None, None) for queue in looked if queue in thawed]
    out += [shown(queue, min(priorities), None) for queue, priorities in found.items() if priorities]
    if tx.tables.untold or any(each.next_at <= tx.clock for each in tx.cascades()):
        out.append(shown(None, None, None))
    paused = ((queue, fsm) for queue in queues for fsm in sorted(tx.stopped(str(queue))) if fsm)
    return [*out, *(shown(queue, None, fsm) for queue, fsm in paused)]


@meaning
def read_finals(scene: Scene, tx: Tx, params: Params) -> Rows:
    rows = [row for number in lit.ints(params[0]) if (row := tx.get(number)) is not None]
    return [
        shown(
            r.id,
            r.status,
            r.result if r.status == "done" else None,
            None if r.status == "done" or not r.terminal else r.last_error,
        )
        for r in rows
    ]


@meaning
def read_instances(scene: Scene, tx: Tx, params: Params) -> Rows:
    assert params[1] == b"t"
    rows = [row for number in sorted(lit.ints(params[0])) if (row := tx.get(number)) is not None]
    return [
        shown(
            r.id, r.fsm, r.version, r.step, r.status, r.queue, r.priority, r.attempt, r.crashes, r.visit, r.state,
            r.result, r.last_error, r.partition_key, r.unique_key and f"\\x{r.unique_key.hex()}", r.parent_id,
            r.locked_by, lit.instant(r.eligible_at), None if r.lease is None else lit.instant(r.lease),
            *[lit.instant(tx.now)] * 2, lit.instant(tx.now) if r.terminal else None, r.hold,
            r.interruptions, r.error_type, r.traceback, r.tags and encode.text_array(r.tags), r.meta,
            r.manual and json.dumps(r.manual), r.await_deadline and lit.instant(r.await_deadline), r.request,
            r.rerun_of, r.cancellation, r.child_key,
            node.waits if (node := tx.node(r.id)) is not None and r.hold in {4, 5} else None, r.max_attempts,
        )
        for r in rows
    ]  # fmt: skip


@meaning
def forget_nodes(scene: Scene, tx: Tx, params: Params) -> Rows:
    return []  # nobody here is gone for a day


@meaning
def read_live_nodes(scene: Scene, tx: Tx, params: Params) -> Rows:
    return []  # every node here runs this release: there is nothing to say about the others


@meaning
def touch_node(scene: Scene, tx: Tx, params: Params) -> Rows:
    return []


@meaning
def stop_node(scene: Scene, tx: Tx, params: Params) -> Rows:
    tx.tables.stopped.add((params[0] or b"").decode())
    return []


# -- session locks: not of a transaction


@meaning
def lock_node(scene: Scene, tx: Tx, params: Params) -> Rows:
    holder = scene.locks.setdefault(f"\2{_text(params[1])}", scene.backend)
    return [shown(scene.backend, holder == scene.backend)]


@meaning
def check_session(scene: Scene, tx: Tx, params: Params) -> Rows:
    return [shown(scene.backend, scene.locks.get(f"\2{_text(params[1])}") == scene.backend)]


@meaning
def take_keys(scene: Scene, tx: Tx, params: Params) -> Rows:
    found = [(key, scene.locks.setdefault(f"\1{key}", scene.backend)) for key in lit.texts(params[1])]
    return [shown(key, holder == scene.backend or "keys" in scene.broken) for key, holder in found]


@meaning
def free_keys(scene: Scene, tx: Tx, params: Params) -> Rows:
    out: Rows = []
    for key in lit.texts(params[1]):
        had = scene.locks.get(f"\1{key}") == scene.backend
        if had:
            del scene.locks[f"\1{key}"]
        out.append(shown(key, had or "keys" in scene.broken))
    return out


@meaning
def read_held_keys(scene: Scene, tx: Tx, params: Params) -> Rows:
    return [shown(key) for key in lit.texts(params[1]) if scene.locks.get(f"\1{key}") == scene.backend]
