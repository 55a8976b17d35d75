"""Every condition of the statements of commands, one at a time: which rows and columns they change, what they return.

The other tests of commands show what callers and races see. Here each test fails if one condition of its statement is
left out: a tool that leaves out one after the other finds none that nothing here notices.
"""

from __future__ import annotations

from typing import Any

import psycopg
import pytest
from durable_actors._store.sql import statement
from psycopg.types.json import Jsonb
from tests.store.kit import SCHEMA, insert, rows

SAID = ("ada", "why", "key", '{"a": 1}')
WIDE = "k" * 2500
"""A partition key that no index of runnable rows can hold."""
PARKED = {
    "status": "awaiting_signal",
    "awaits": ["go"],
    "await_step": "t",
    "await_deadline": "=now() + interval '1 h'",
}
EXECUTING = {
    "status": "executing", "locked_by": "n", "claim_id": "4a1b0f6e-0000-4000-8000-000000000000",
    "claim_token_hash": b"x", "lease_expires_at": "=now() + interval '1 h'",
}  # fmt: skip
WAITS = {
    "status": "awaiting_children", "visit": 3, "children_pending": 1, "children_total": 1, "await_step": "t",
}  # fmt: skip
ASKED = Jsonb({"kind": "cancel", "by": "eve", "reason": "hers", "children": "cancel"})


@pytest.fixture(autouse=True)
def _nothing_waits(db: psycopg.Connection) -> None:
    db.execute("set lock_timeout = '500ms'")


def call(db: psycopg.Connection, name: str, *params: Any) -> list[tuple[Any, ...]]:
    with psycopg.RawCursor(db) as cursor:
        return cursor.execute(statement(name, SCHEMA).sql, params).fetchall()  # type: ignore[arg-type]


def row(db: psycopg.Connection, number: int, columns: str = "to_jsonb(gen_durable)") -> Any:
    [found] = rows(db, columns, f"id = {number}")
    return found[0] if len(found) == 1 else found


def kinds(db: psycopg.Connection, number: int) -> list[str]:
    query = "select kind from durable.journal where instance_id = %s order by rev"
    return [kind for (kind,) in db.execute(query, [number])]


def compensates(db: psycopg.Connection, version: int = 2) -> None:
    db.execute("insert into durable.compensations values ('m', %s, 'undo')", [version])


# -- cancel_children


def cascade(db: psycopg.Connection, parent: int, **columns: Any) -> None:
    given = {"parent_id": parent, "up_to": 10**9, "request": Jsonb(request(parent)), **columns}
    names, places = ", ".join(given), ", ".join(["%s"] * len(given))
    db.execute(f"insert into durable.cascades ({names}) values ({places})", [*given.values()])  # type: ignore[arg-type]


def request(parent: int) -> dict[str, Any]:
    return {"kind": "cancel", "by": "ada", "reason": "why", "children": "cancel", "parent": parent}


def go(db: psycopg.Connection, *, children: int = 200) -> dict[str, list[int]]:
    """What happened to whom."""
    found: dict[str, list[int]] = {}
    for what, number, _, _ in call(db, "cancel_children", 20, children):
        found.setdefault(what, []).append(number)
    found.pop("looked")
    return {what: sorted(numbers) for what, numbers in found.items()}


def left(db: psycopg.Connection) -> int:
    return len(db.execute("select 1 from durable.cascades").fetchall())


def next_lap(db: psycopg.Connection) -> None:
    db.execute("update durable.cascades set next_at = '-infinity'")


def family(db: psycopg.Connection, *children: dict[str, Any], **columns: Any) -> tuple[int, list[int]]:
    [parent] = insert(db, **{"status": "cancelled", "finished_at": "=now()", **columns})
    return parent, [insert(db, parent_id=parent, **each)[0] for each in children]


def test_which_children_a_cascade_means(db: psycopg.Connection):
    parent, [a, b, c, d] = family(db, {"barrier": 3}, {"barrier": 4}, {}, {"barrier": 3})
    before = {number: row(db, number) for number in (b, c, d)}
    cascade(db, parent, barrier=3, up_to=c)
    assert go(db) == {"ended": [a]}
    assert {number: row(db, number) for number in before} == before
    cascade(db, parent, after=b, up_to=c)
    assert go(db) == {"ended": [c]}
    cascade(db, parent, next_at="infinity")
    assert go(db) == {}


def test_the_barrier_of_a_parent_that_somebody_has_locked(db: psycopg.Connection, durable_dsn: str):
    parent, [here, earlier, none] = family(db, {"barrier": 3}, {"barrier": 2}, {}, **WAITS, finished_at=None)
    cascade(db, parent)
    with psycopg.connect(durable_dsn) as other:
        other.execute("select 1 from durable.gen_durable where id = %s for update", [parent])
        assert go(db) == {"ended": [earlier, none], "rests": [1]}
        [(soon,)] = db.execute("select next_at > clock_timestamp() from durable.cascades").fetchall()
        assert soon
    next_lap(db)
    assert go(db) == {"ended": [here], "opened": [parent]}
    assert (row(db, parent, "status::text"), left(db)) == ("runnable", 0)


def test_a_parent_that_waits_no_more_is_neither_needed_nor_locked(db: psycopg.Connection, durable_dsn: str):
    parent, [child] = family(db, {"barrier": 3}, **EXECUTING, visit=3, finished_at=None)
    with psycopg.connect(durable_dsn) as other:
        other.execute("select 1 from durable.gen_durable where id = %s for update", [parent])
        cascade(db, parent)
        assert go(db) == {"ended": [child]}
    ended, [child] = family(db, {"barrier": 3})
    cascade(db, ended)
    with psycopg.connect(durable_dsn) as other, db.transaction():
        assert go(db) == {"ended": [child]}
        other.execute("select 1 from durable.gen_durable where id = %s for update nowait", [ended])


def test_a_parent_and_its_child_in_one_statement(db: psycopg.Connection):
    """The parent ends; its child is left for the next lap, when nobody waits for it any more."""
    grandparent, [parent] = family(db, WAITS | {"journal": 3})
    [child] = insert(db, parent_id=parent, barrier=3)
    for each in (parent, grandparent):
        cascade(db, each)
    assert go(db) == {"ended": [parent], "rests": [1]}
    assert (row(db, parent, "status::text, children_pending"), kinds(db, parent)) == (
        ("cancelled", 0),
        ["cancelled"],
    )
    next_lap(db)
    assert go(db) == {"ended": [child]}
    assert (row(db, parent, "status::text"), left(db)) == ("cancelled", 0)


def test_children_that_are_passed_by(db: psycopg.Connection):
    cancellation = Jsonb({"reason": "before"})
    parent, numbers = family(
        db,
        {"cancellation": cancellation},
        {**EXECUTING, "request": ASKED},
        {"status": "done", "finished_at": "=now()"},
    )
    before = [row(db, number) for number in numbers]
    cascade(db, parent)
    assert go(db) == {}
    assert ([row(db, number) for number in numbers], left(db)) == (before, 0)


def test_what_is_asked_of_a_child_that_runs(db: psycopg.Connection):
    compensates(db)
    for_itself = Jsonb({"kind": "cancel", "by": "eve", "reason": "hers"})
    odd = Jsonb({"kind": "pause", "children": "cancel"})
    parent, [plain, undoes, asked, paused, stale] = family(
        db,
        EXECUTING,
        {**EXECUTING, "fsm_version": 2},
        {**EXECUTING, "request": for_itself},
        {**EXECUTING, "request": odd},
        {"request": ASKED},
    )
    cascade(db, parent)
    assert go(db) == {"ended": [stale], "asked": [plain, undoes, asked, paused]}
    whole = request(parent)
    assert row(db, plain, "request") == row(db, paused, "request") == whole
    assert row(db, undoes, "request") == {**whole, "on_cancel": "undo"}
    assert row(db, asked, "request") == {
        "kind": "cancel",
        "by": "eve",
        "reason": "hers",
        "children": "cancel",
    }
    assert row(db, undoes, "status::text, step, claim_id is null") == ("executing", "s", False)


def test_children_that_compensate_do_so_once(db: psycopg.Connection):
    compensates(db)
    parent, [old, new, wide] = family(
        db, PARKED, {**PARKED, "fsm_version": 2}, {**PARKED, "fsm_version": 2, "partition_key": WIDE}
    )
    cascade(db, parent)
    cascade(db, parent)
    assert go(db) == {"ended": [old, wide], "entered": [new]}
    assert row(db, new, "status::text, step, visit, rev, cancellation ->> 'reason'") == (
        "runnable", "undo", 2, 2, "why",
    )  # fmt: skip
    assert (go(db), left(db)) == ({}, 0), "the one for its own children"


def test_what_is_left_of_a_child_that_ends(db: psycopg.Connection):
    boundary, decided = (
        {"kind": "approval", "then": "x"},
        {"kind": "pause", "decision": {"kind": "proceeded"}},
    )
    parent, [parked, waits, held, quiet] = family(
        db,
        {**PARKED, "manual": Jsonb(boundary), "last_error": "old", "journal": 2},
        {"status": "awaiting_children", "children_pending": 2, "children_total": 2, "wake_on_failure": True},
        {"hold": 1, "partition_key": "k", "manual": Jsonb(decided), "awaits": []},
        {"journal": 1},
    )
    cascade(db, parent)
    assert go(db) == {"ended": [parked, waits, held, quiet]}
    columns = "status::text, await_step, await_deadline, manual, last_error, finished_at is null, rev"
    assert row(db, parked, columns) == (
        "cancelled", None, None, None, "why", False, 2,
    )  # fmt: skip
    assert row(db, parked, "request") == request(parent)
    assert row(db, waits, "children_pending, wake_on_failure") == (0, False)
    assert row(db, held, "hold, manual") == (0, decided)
    assert (kinds(db, parked), kinds(db, quiet)) == (["cancelled"], [])


def test_the_cascade_goes_on_only_where_children_live(db: psycopg.Connection):
    parent, [childless, bereft, mother] = family(db, {}, {}, {})
    insert(db, parent_id=bereft, status="done", finished_at="=now()")
    insert(db, parent_id=mother)
    cascade(db, parent)
    assert go(db) == {"ended": [childless, bereft, mother]}
    assert db.execute("select parent_id from durable.cascades").fetchall() == [(mother,)]


@pytest.mark.parametrize("page", [1, 3])
def test_a_child_that_is_locked_is_not_forgotten(db: psycopg.Connection, durable_dsn: str, page: int):
    parent, [first, second, ended, last] = family(db, {}, {}, {"status": "done", "finished_at": "=now()"}, {})
    cascade(db, parent)
    with psycopg.connect(durable_dsn) as other:
        other.execute("select 1 from durable.gen_durable where id = %s for update", [first])
        told: dict[str, list[int]] = {}
        for _ in range(5):
            if "rests" in (found := go(db, children=page)):
                assert told or page == 3, "not before the last page"
            for what, numbers in found.items():
                told[what] = told.get(what, []) + numbers
        assert told == {"ended": [second, last], "rests": [1]}
        assert row(db, ended, "rev") == 1
    next_lap(db)
    assert go(db) == {"ended": [first]}
    next_lap(db)
    assert (go(db), left(db)) == ({}, 0)


# -- cancel_instance


def cancel(db: psycopg.Connection, number: int, *, force: bool = False, children: bool = False) -> Any:
    """What it returns: answer, key, parent, its queue, own queue."""
    found = call(db, "cancel_instance", number, *SAID[:2], f"key {number}", SAID[3], force, children)
    return found[0] if found else None


def test_what_is_asked_of_an_instance_that_runs(db: psycopg.Connection):
    compensates(db)
    [plain], [undoes] = insert(db, **EXECUTING), insert(db, **EXECUTING, fsm_version=2)
    for number, more in ((plain, {}), (undoes, {"on_cancel": "undo"})):
        assert cancel(db, number) == ("requested", None, None, None, None)
        found = row(db, number, "request")
        assert found.pop("at")
        whole = {"kind": "cancel", "by": "ada", "reason": "why", "key": f"key {number}", "metadata": {"a": 1}}
        assert found == {**whole, **more}
        assert row(db, number, "status::text, step, claim_id is null, rev") == ("executing", "s", False, 1)
    odd = Jsonb({"kind": "pause", "children": "cancel"})
    [asked], [paused], [anew] = (insert(db, **EXECUTING, request=each) for each in (ASKED, odd, None))
    for number, children, kept in ((asked, False, "cancel"), (paused, False, None), (anew, True, "cancel")):
        assert cancel(db, number, children=children)[0] == "requested"
        assert row(db, number, "request").get("children") == kept
    assert left(db) == 0


def test_force_ends_what_runs(db: psycopg.Connection):
    compensates(db)
    [number], [undoes] = insert(db, **EXECUTING, partition_key="k"), insert(db, **EXECUTING, fsm_version=2)
    assert cancel(db, number, force=True) == ("cancelled", "k", None, None, None)
    columns = "status::text, locked_by, lease_expires_at, claim_id, claim_token_hash"
    assert row(db, number, columns) == ("cancelled", None, None, None, None)
    assert cancel(db, undoes, force=True)[0] == "requested", "it compensates"
    assert row(db, undoes, "status::text, step") == ("runnable", "undo")


def test_who_compensates_is_ended_by_force_alone(db: psycopg.Connection):
    compensates(db)
    given = {"fsm_version": 2, "cancellation": Jsonb({"reason": "before"})}
    [number], [other] = insert(db, **given), insert(db, **given)
    before = row(db, number)
    assert cancel(db, number) is None
    assert row(db, number) == before
    assert cancel(db, number, force=True)[0] == "cancelled"
    assert row(db, number, "last_error") == "why"
    assert call(db, "cancel_instance", other, None, None, None, "{}", True, False)[0][0] == "cancelled"
    assert row(db, other, "last_error") == "before"


def test_which_step_compensates(db: psycopg.Connection):
    compensates(db)
    [other], [wide] = insert(db, fsm_version=3), insert(db, **PARKED, fsm_version=2, partition_key=WIDE)
    assert [cancel(db, number)[0] for number in (other, wide)] == ["cancelled", "cancelled"]
    [number] = insert(db, fsm_version=2, partition_key="k", queue="q")
    assert cancel(db, number) == ("requested", "k", None, None, "q")
    assert row(db, number, "status::text, step") == ("runnable", "undo")


def test_what_has_ended_is_not_cancelled(db: psycopg.Connection):
    for status in ("done", "failed", "cancelled"):
        [number] = insert(db, status=status, finished_at="=now()")
        assert cancel(db, number, force=True) is None
    assert db.execute("select 1 from durable.receipts").fetchall() == []


def test_what_is_left_of_an_instance_that_is_cancelled(db: psycopg.Connection):
    boundary, decided = (
        {"kind": "approval", "then": "x"},
        {"kind": "pause", "decision": {"kind": "proceeded"}},
    )
    old = {"last_error": "old", "error_type": "E", "traceback": "T"}
    [parked] = insert(db, **PARKED, **old, manual=Jsonb(boundary), journal=2)
    [waits] = insert(
        db, status="awaiting_children", children_pending=2, children_total=2, wake_on_failure=True
    )
    [held] = insert(db, hold=1, partition_key="k", manual=Jsonb(decided), awaits=[], journal=1)
    assert [cancel(db, number)[0] for number in (parked, waits, held)] == ["cancelled"] * 3
    columns = (
        "await_step, await_deadline, manual, last_error, error_type, traceback, finished_at is null, rev"
    )
    assert row(db, parked, columns) == (None, None, None, "why", None, None, False, 2)
    assert row(db, waits, "children_pending, wake_on_failure") == (0, False)
    assert row(db, held, "hold, manual") == (0, decided)
    assert (kinds(db, parked), kinds(db, held)) == (["cancelled"], [])
    assert left(db) == 0
    [again] = insert(db)
    cancel(db, again, children=True)
    assert db.execute("select parent_id, barrier from durable.cascades").fetchall() == [(again, None)]


def test_the_parent_is_named_if_its_barrier_opens(db: psycopg.Connection):
    waits = {
        "status": "awaiting_children",
        "visit": 3,
        "children_pending": 2,
        "children_total": 2,
        "await_step": "t",
    }
    parent, [first, last] = family(db, {"barrier": 3}, {"barrier": 3}, **waits, finished_at=None, queue="p")
    assert cancel(db, first) == ("cancelled", None, None, None, None)
    assert cancel(db, last) == ("cancelled", None, parent, "p", None)


# -- pause and resume


def test_which_instances_are_paused_and_how(db: psycopg.Connection):
    [due] = insert(db, partition_key="k", journal=2)
    [parked], [runs] = insert(db, **PARKED, partition_key="k", journal=1), insert(db, **EXECUTING)
    for number, said in ((due, ("paused", "k")), (parked, ("paused", None)), (runs, ("requested", None))):
        assert call(db, "pause_instance", number, *SAID[:2], str(number), SAID[3]) == [said]
        found = row(db, number, "request")
        assert found.pop("at")
        assert found == {"kind": "pause", "by": "ada", "reason": "why"}
    assert [row(db, number, "hold") for number in (due, parked, runs)] == [4, 0, 0]
    assert (kinds(db, due), kinds(db, parked)) == (["paused"], [])
    [done], [asked] = insert(db, status="done", finished_at="=now()"), insert(db, **EXECUTING, request=ASKED)
    for number in (due, done, asked):
        before = row(db, number)
        assert call(db, "pause_instance", number, *SAID[:2], "again", SAID[3]) == []
        assert row(db, number) == before


def test_which_instances_are_resumed_and_how(db: psycopg.Connection):
    pause = Jsonb({"kind": "pause"})
    [due], [by_hand] = insert(db, hold=4, request=pause, journal=2), insert(db, hold=4, journal=1)
    [held], [parked] = (
        insert(db, hold=1, partition_key="k", request=pause),
        insert(db, **PARKED, request=pause),
    )
    for number in (due, by_hand, held, parked):
        assert call(db, "resume_instance", number, *SAID[:2], str(number), SAID[3]) == [(number,)]
        assert row(db, number, "request") is None
    assert [row(db, number, "hold") for number in (due, by_hand, held, parked)] == [0, 0, 1, 0]
    assert (kinds(db, due), kinds(db, by_hand)) == (["resumed"], [])
    [done] = insert(db, status="done", finished_at="=now()", request=pause)
    [plain], [asked], [odd] = insert(db), insert(db, **EXECUTING, request=ASKED), insert(db, **PARKED, hold=4)
    for number in (done, plain, asked, odd):
        before = row(db, number)
        assert call(db, "resume_instance", number, *SAID[:2], "again", SAID[3]) == []
        assert row(db, number) == before


def pause_queue(
    db: psycopg.Connection, by: str, queue: str, fsm: str, until: Any, seconds: Any = None
) -> Any:
    found = call(db, "pause_queue", "t", by, f"{by} says", None, "{}", queue, fsm, until, seconds)
    return found[0][0] if found else None


def test_pauses_of_queues(db: psycopg.Connection):
    whole = pause_queue(db, "ada", "q", "", None)
    assert (whole["queue"], whole["machine"], whole["until"], whole["by"]) == ("q", None, None, "ada")
    machine = pause_queue(db, "ada", "q", "m", "2999-01-01")
    assert (machine["machine"], machine["until"][:4]) == ("m", "2999")
    again = pause_queue(db, "eve", "q", "", None, 3600)
    assert (again["by"], again["reason"], again["until"] is None) == ("eve", "eve says", False)
    assert again["at"] == whole["at"], "it is paused since then"
    assert pause_queue(db, "ada", "q", "", "2000-01-01") is None
    pause_queue(db, "ada", "other", "", None)
    db.execute("insert into durable.pauses (queue, until, at) values ('past', now(), 'yesterday')")
    resume = [
        call(db, "resume_queue", "t", *SAID[:2], None, "{}", *each) for each in (("past", ""), ("q", ""))
    ]
    assert [each[0][0]["machine"] if each else None for each in resume] == [None, None]
    assert (resume[0], resume[1][0][0]["by"]) == ([], "eve")
    assert sorted(db.execute("select queue, fsm from durable.pauses").fetchall()) == [
        ("other", ""), ("past", ""), ("q", "m"),
    ]  # fmt: skip
    since = pause_queue(db, "ada", "past", "", None)["at"]
    assert since > whole["at"], "that one has ended"


# -- decisions


def decide(
    db: psycopg.Connection, verb: str, number: int, comment: Any = None, data: Any = None, **said: Any
) -> Any:
    given = {"by": "ada", "reason": "why", **said}
    key = f"{verb} {number} {comment}"
    found = call(
        db, "resolve_boundary", number, given["by"], given["reason"], key, SAID[3], verb, comment, data
    )
    return found[0] if found else None


def asking(db: psycopg.Connection, kind: str = "approval", **columns: Any) -> int:
    """An instance that waits for a person; `then` and so on are those of its boundary."""
    boundary = {"kind": kind, "then": "yes", **columns.pop("boundary", {})}
    old = {"last_error": "old", "error_type": "E", "traceback": "T", "eligible_at": "=now() + interval '1 h'"}
    given = {**PARKED, "manual": Jsonb(boundary), **old, "journal": 2, **columns}
    return insert(db, **given)[0]


@pytest.mark.parametrize(
    ("verb", "kind", "to", "what"),
    [("proceed", "pause", "yes", "proceeded"), ("approve", "approval", "yes", "approved"),
     ("reject", "approval", "no", "rejected")],
)  # fmt: skip
def test_a_decision_and_the_step_that_it_enters(
    db: psycopg.Connection, verb: str, kind: str, to: str, what: str
):
    number = asking(db, kind, boundary={"on_reject": "no"})
    assert decide(db, verb, number, "fine", '{"x": 1}') == (number, None, None)
    columns = (
        "status::text, step, hold, finished_at, last_error, error_type, traceback, await_step, await_deadline"
    )
    assert row(db, number, columns) == ("runnable", to, 0, None, "old", "E", "T", None, None)
    assert row(db, number, "eligible_at <= now()")
    found = row(db, number, "manual")["decision"]
    assert found.pop("at")
    assert found == {"kind": what, "by": "ada", "comment": "fine", "data": {"x": 1}}
    assert kinds(db, number) == [what]
    [(data,)] = db.execute("select data from durable.receipts").fetchall()
    assert data == {"a": 1, "comment": "fine"}
    assert decide(db, verb, number, "again") is None, "it is decided"
    [plain] = [asking(db, kind, boundary={"then": None, "on_reject": "no"}, journal=1)]
    decide(db, verb, plain)
    assert row(db, plain, "step") == ("no" if verb == "reject" else "s")
    assert "data" not in row(db, plain, "manual")["decision"]
    assert kinds(db, plain) == []


def test_a_decision_that_is_not_asked_for(db: psycopg.Connection):
    approval, pause = asking(db), asking(db, "pause")
    executing = insert(db, **EXECUTING, manual=Jsonb({"kind": "approval", "then": "yes"}))[0]
    plain = insert(db, **PARKED)[0]
    for verb, numbers in (
        ("proceed", (approval, plain, executing)),
        ("approve", (pause, plain, executing)),
        ("reject", (pause, plain, executing)),
    ):
        for number in numbers:
            before = row(db, number)
            assert decide(db, verb, number) is None
            assert row(db, number) == before


def test_a_paused_instance_is_decided_into_its_pause(db: psycopg.Connection):
    number = asking(db, request=Jsonb({"kind": "pause"}))
    decide(db, "approve", number)
    assert row(db, number, "status::text, hold") == ("runnable", 4)
    number = asking(db, request=Jsonb({"kind": "pause"}))
    decide(db, "reject", number)
    assert row(db, number, "status::text, hold") == ("failed", 0)


def test_a_rejection_that_ends_it(db: psycopg.Connection):
    waits = {
        "status": "awaiting_children",
        "visit": 3,
        "children_pending": 3,
        "children_total": 3,
        "await_step": "t",
    }
    [parent] = insert(db, **waits, queue="p")
    child = {"parent_id": parent, "barrier": 3}
    first, second, last = asking(db, **child, journal=1), asking(db, **child, journal=0), asking(db, **child)
    due = row(db, first, "eligible_at")
    assert decide(db, "reject", first, "no") == (first, None, None)
    columns = (
        "status::text, step, last_error, error_type, traceback, manual, finished_at is null, await_deadline"
    )
    assert row(db, first, columns) == ("failed", "s", "rejected by ada: no", None, None, None, False, None)
    assert (row(db, first, "eligible_at"), row(db, first, "await_step")) == (due, None)
    assert decide(db, "reject", second, by=None) == (second, None, None)
    assert row(db, second, "last_error") == "rejected: why"
    assert decide(db, "reject", last, None, reason=None) == (last, parent, "p")
    assert row(db, last, "last_error") == "rejected by ada"
    assert (kinds(db, first), kinds(db, second)) == (["rejected"], [])
    [(data,)] = db.execute("select data from durable.journal where instance_id = %s", [first]).fetchall()
    assert data["failed"] is True
    open_, [child_of] = family(db, {**PARKED, "barrier": 3, "manual": Jsonb({"kind": "approval", "then": "x"})},
                               **waits, finished_at=None)  # fmt: skip
    decide(db, "approve", child_of)
    assert row(db, open_, "children_pending") == 3, "it has not ended"


# -- retry


def test_what_is_retried_and_how(db: psycopg.Connection):
    used = {"attempt": 4, "crashes": 2, "finished_at": "=now()", "eligible_at": "=now() + interval '1 h'", "hold": 1,
            "claim_id": EXECUTING["claim_id"], "claim_token_hash": b"x", "request": ASKED}  # fmt: skip
    [failed] = insert(db, **used, status="failed", journal=2)
    [cancelled] = insert(db, **used, status="cancelled", journal=1)
    columns = "status::text, attempt, crashes, finished_at, hold, claim_id, claim_token_hash, request"
    for number in (failed, cancelled):
        assert call(db, "retry_instance", number, *SAID[:2], str(number), SAID[3]) == [(number,)]
        assert row(db, number, columns) == ("runnable", 0, 0, None, 0, None, None, None)
        assert row(db, number, "eligible_at <= now()")
    assert (kinds(db, failed), kinds(db, cancelled)) == (["revived"], [])
    [(attempt,)] = db.execute("select attempt from durable.journal").fetchall()
    assert attempt == 4, "the one that had failed"
    for columns_ in ({"status": "done", "finished_at": "=now()"}, {}, PARKED, EXECUTING):
        [number] = insert(db, **columns_)
        assert call(db, "retry_instance", number, *SAID[:2], "again", SAID[3]) == []


@pytest.mark.parametrize(
    ("status", "visit", "pending"),
    [("awaiting_children", 3, 2), ("awaiting_children", 4, 1), ("runnable", 3, 1)],
)
def test_a_parent_that_still_waits_waits_again(db: psycopg.Connection, status: str, visit: int, pending: int):
    for journal in (2, 3):
        waits = {
            "status": status,
            "visit": visit,
            "children_pending": 1,
            "children_total": 2,
            "journal": journal,
        }
        parent, [child] = family(
            db, {"status": "failed", "finished_at": "=now()", "barrier": 3}, **waits, finished_at=None
        )
        call(db, "retry_instance", child, *SAID[:2], str(child), SAID[3])
        assert row(db, parent, "children_pending") == pending
        assert kinds(db, parent) == ["recounted"] * (pending == 2 and journal == 3)


@pytest.mark.parametrize("name", ["cancel_instance", "pause_instance", "resume_instance", "retry_instance"])
def test_a_command_waits_for_whoever_has_the_row(db: psycopg.Connection, durable_dsn: str, name: str):
    """It does not skip it, and say that there is nothing to do."""
    status = {"status": "failed", "finished_at": "=now()"} if name == "retry_instance" else {}
    [number] = insert(db, **status, **({"hold": 4} if name == "resume_instance" else {}))
    more = (False, False) if name == "cancel_instance" else ()
    with psycopg.connect(durable_dsn) as other:
        other.execute("select 1 from durable.gen_durable where id = %s for update", [number])
        with pytest.raises(psycopg.errors.LockNotAvailable):
            call(db, name, number, *SAID, *more)


def test_a_decision_waits_for_whoever_has_the_row(db: psycopg.Connection, durable_dsn: str):
    number = asking(db)
    with psycopg.connect(durable_dsn) as other:
        other.execute("select 1 from durable.gen_durable where id = %s for update", [number])
        with pytest.raises(psycopg.errors.LockNotAvailable):
            decide(db, "approve", number)
