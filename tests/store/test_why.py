"""The sentence that tells why an instance waits: every case, as a function of what was read."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import attrs
import pytest
from durable_actors._store.boundaries import Boundary
from durable_actors._store.commands import Request
from durable_actors._store.explanation import REASONS_IN_ORDER, Explanation, Reason
from durable_actors._store.holds import HOLDS, REASONS
from durable_actors._store.limit_texts import LimitSeen
from durable_actors._store.observe import InstanceDetails, NodeView, Observed, Sibling
from durable_actors._store.pauses import QueuePause
from durable_actors._store.read import Instance
from durable_actors._store.why import explain_observed, why

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def instance(**changes: Any) -> Instance:
    values: dict[str, Any] = {
        "id": 9,
        "machine": "m",
        "version": 1,
        "step": "s",
        "status": "runnable",
        "queue": "q",
        "priority": 0,
        "attempt": 0,
        "crashes": 0,
        "visit": 1,
        "state": {},
        "result": None,
        "last_error": None,
        "partition_key": None,
        "unique_key": None,
        "parent_id": None,
        "locked_by": None,
        "eligible_at": NOW,
        "lease_expires_at": None,
        "inserted_at": NOW,
        "updated_at": NOW,
        "finished_at": None,
        "hold": 0,
    }
    return Instance(**{**values, **changes})


def around(**changes: Any) -> InstanceDetails:
    values: dict[str, Any] = {
        "eligible_in": -5.0,
        "lease_left": None,
        "deadline_in": None,
        "awaits": (),
        "await_step": None,
        "children_pending": 0,
        "children_total": 0,
        "unread": {},
        "children": {},
        "key_holder": None,
        "elders": (),
    }
    return InstanceDetails(**{**values, **changes})


def node(name: str = "n:1", **changes: Any) -> NodeView:
    values: dict[str, Any] = {
        "incarnation": name,
        "node": "n",
        "started_at": NOW,
        "seen_at": NOW,
        "stopped_at": None,
        "queues": {"q": 5},
        "machines": ("m/1",),
        "pid": 1,
        "version": "x",
        "alive": True,
        "claims": 0,
    }
    return NodeView(**{**values, **changes})


STOP = QueuePause(queue="q", at=NOW, by="ada", reason="why")
running = {"status": "executing", "locked_by": "n:1"}
APPROVAL = Boundary(kind="approval", then="t", title="ok?", since=NOW)
PAUSE = Boundary(kind="pause", then="t", since=NOW)
keyed = {"partition_key": "k", "hold": 1}
API = LimitSeen("api", known=True, slots=None, next_in=30.0, next_at=NOW, blocked=False, holders=())

SHELVED_BEFORE = "it is shelved: a node that read it did not have its step, or its machine was paused"
CASES: dict[str, tuple[Instance, InstanceDetails, list[NodeView], str]] = {
    "done": (instance(status="done"), around(), [], "it has ended: done"),
    "cancelled": (instance(status="cancelled"), around(), [], "it has ended: cancelled in step 's'"),
    "failed": (instance(status="failed"), around(), [], "`durable-actors retry 9` runs it again"),
    "runs": (instance(**running), around(lease_left=30.0), [node()], "it is running step 's' on n:1"),
    "its node is lost": (
        *(instance(**running), around(lease_left=30.0), [node(alive=False)]),
        (
            "its node n:1 is lost: its claim is released when other nodes have seen the node dead for dead_after, "
            "at the latest when the lease expires in 30 s"
        ),
    ),
    "its node is unknown": (
        instance(**running),
        around(lease_left=3.0),
        [],
        "on n:1, a call of execute_next or",
    ),
    "its lease ended": (
        *(instance(**running), around(lease_left=-3.0), [node()]),
        "the lease of n:1 expired 3.0 s ago: the reaper of a live node releases the claim",
    ),
    "nobody reaps": (instance(**running), around(lease_left=-3.0), [], "but no node is alive"),
    "awaits": (
        *(
            instance(status="awaiting_signal"),
            around(awaits=("a", "b"), deadline_in=90.0, await_step="t"),
            [],
        ),
        "it awaits a signal named 'a', 'b' until its deadline in 90 s, then runs step 't'",
    ),
    "overdue": (
        *(instance(status="awaiting_signal"), around(awaits=("a",), deadline_in=-2.0), []),
        "its deadline passed 2.0 s ago",
    ),
    "asks": (
        *(instance(status="awaiting_signal", boundary=APPROVAL), around(deadline_in=90.0), []),
        "then runs step 't'; if it is rejected, it fails; if nobody decides until its deadline in 90 s, it fails",
    ),
    "asks in vain": (
        *(instance(status="awaiting_signal", boundary=APPROVAL), around(deadline_in=-2.0), []),
        "; nobody has decided, its deadline passed 2.0 s ago (a node that serves its queue wakes it), then it fails",
    ),
    "paused by its step": (
        *(instance(status="awaiting_signal", boundary=PAUSE), around(), []),
        "its step has paused it: it waits until somebody lets it proceed, then runs step 't'",
    ),
    "children": (
        *(instance(status="awaiting_children"), around(children_pending=2, children_total=5), []),
        "it waits for 2 more of 5 children, then runs step 's'",
    ),
    "due": (
        *(instance(), around(), [node(), node("n:2")]),
        "it is due and waits for a free slot: 2 live nodes serve queue 'q'",
    ),
    "scheduled": (
        *(instance(attempt=2), around(eligible_in=7200.0, due=False), [node()]),
        "it is scheduled: due in 2 h (run 3)",
    ),
    "scheduled for nobody": (
        *(instance(), around(eligible_in=50.0, due=False), []),
        "it is scheduled: due in 50 s; and no live node serves queue 'q'",
    ),
    "nobody serves": (
        *(instance(), around(), [node(queues={"other": 1}), node(alive=False)]),
        "it waits: no live node serves queue 'q'",
    ),
    "nobody knows": (
        *(instance(hold=2), around(), [node(machines=("m/2",))]),
        f"{REASONS[2].explanation}; no live node that serves queue 'q' knows m/1 (n:1 does not)",
    ),
    "nobody has the step": (
        *(instance(hold=2), around(), [node(steps={"m/1": ("t",)}), node("n:2", machines=())]),
        "; no live node that serves queue 'q' knows step 's' of m/1 (n:1, n:2 do not)",
    ),
    "somebody has the step": (
        *(instance(), around(), [node(steps={"m/1": ("t",)}), node("n:2", steps={"m/1": ("s", "t")})]),
        "it is due and waits for a free slot: 1 live node serves queue 'q'",
    ),
    "held": (
        *(instance(**keyed), around(key_holder=(4, "n:2")), [node()]),
        "it waits for partition key 'k', which instance 4 holds on n:2",
    ),
    "not its turn": (
        *(instance(**keyed), around(elders=(Sibling(4, "m/1", "s", 0),)), [node()]),
        "it waits for partition key 'k': instance 4 runs first",
    ),
    "held by nobody": (
        *(instance(**keyed), around(offered=False), [node()]),
        "it waits for its partition key: another instance of the key runs first",
    ),
    "shelved, and somebody has the step": (
        *(instance(hold=2), around(), [node(), node("n:2")]),
        f"{SHELVED_BEFORE}; 2 live nodes of queue 'q' can run it, with the next pick",
    ),
    "throttled": (instance(hold=3), around(), [node()], "it waits for a limit"),
    "will be throttled": (
        instance(),
        around(limit=API),
        [node()],
        "it waits for the limit 'api': its tokens are spent, the next one may run in 30 s",
    ),
    "behind others under its limit": (
        instance(hold=3),
        around(limit=attrs.evolve(API, ahead=4)),
        [node()],
        "the next one may run in 30 s; instance 4 goes first",
    ),
    "its token is there": (
        instance(hold=3),
        around(offered=False, limit=attrs.evolve(API, free=True)),
        [node()],
        "it is due and waits for a free slot",
    ),
    "its token is there, for nobody": (
        instance(hold=3),
        around(offered=False, limit=attrs.evolve(API, free=True)),
        [],
        "it waits: no live node serves queue 'q'",
    ),
    "uses a limit that lets it go": (
        instance(),
        around(limit=attrs.evolve(API, free=True)),
        [node()],
        "it is due and waits for a free slot",
    ),
    "paused": (instance(hold=4), around(eligible_in=50.0, due=False), [], "it is paused"),
    "its queue is paused": (
        instance(),
        around(pauses=(STOP, attrs.evolve(STOP, machine="m"))),
        [],
        "it is due, but queue 'q' is paused by ada: why; and no live node serves queue 'q'",
    ),
    "paused by a command": (
        instance(hold=4, request=Request("pause", "ada", "odd")),
        around(request=Request("pause", "ada", "odd"), requested_ago=3.0),
        [node()],
        "it was paused 3.0 s ago by ada: odd",
    ),
    "to be paused": (
        instance(**running, request=Request("pause", "ada")),
        around(lease_left=30.0, request=Request("pause", "ada"), requested_ago=3.0),
        [node()],
        "; pause requested by ada 3.0 s ago: it is paused when its step has ended",
    ),
    "waits for others": (
        instance(hold=5),
        around(),
        [node()],
        "it waits for instances that it comes after",
    ),
    "its turn": (instance(partition_key="k"), around(), [node()], "it is due and waits"),
}


REASON: dict[str, Reason] = {
    "done": "done",
    "failed": "failed",
    "cancelled": "cancelled",
    "runs": "executing",
    "its node is lost": "owner_lost",
    "its node is unknown": "executing",
    "its lease ended": "lease_expired",
    "nobody reaps": "lease_expired",
    "awaits": "awaiting_signal",
    "overdue": "awaiting_signal",
    "asks": "awaiting_approval",
    "asks in vain": "awaiting_approval",
    "paused by its step": "awaiting_proceed",
    "children": "awaiting_children",
    "due": "ready",
    "scheduled": "scheduled",
    "scheduled for nobody": "scheduled",
    "nobody serves": "unserved",
    "nobody knows": "unknown_step",
    "nobody has the step": "unknown_step",
    "somebody has the step": "ready",
    "held": "waiting_for_key",
    "not its turn": "waiting_for_key",
    "held by nobody": "waiting_for_key",
    "shelved, and somebody has the step": "ready",
    "throttled": "throttled",
    "will be throttled": "throttled",
    "behind others under its limit": "throttled",
    "its token is there": "ready",
    "its token is there, for nobody": "unserved",
    "uses a limit that lets it go": "ready",
    "paused": "paused",
    "its queue is paused": "queue_paused",
    "paused by a command": "paused",
    "to be paused": "executing",
    "waits for others": "awaiting_dependencies",
    "its turn": "ready",
}


def test_every_reason_to_hold_a_row_is_explained():
    said = [expected for _, _, _, expected in CASES.values()]
    assert not [hold.name for hold in HOLDS if not any(hold.explanation in each for each in said)]


@pytest.mark.parametrize("case", CASES)
def test_why(case: str):
    row, surroundings, nodes, expected = CASES[case]
    assert expected in why(row, surroundings, nodes)


@pytest.mark.parametrize("case", CASES)
def test_the_reason(case: str):
    row, surroundings, nodes, _ = CASES[case]
    assert explained(row, surroundings, nodes).reason == REASON[case]


@pytest.mark.parametrize(
    ("fair", "text"),
    [
        (("a", 0), "it is the next one of fair key 'a'"),
        (("a", 1), "1 row of fair key 'a' goes first"),
        (("a", 1000), "1,000 rows or more of fair key 'a' go first"),
        (None, "rows without a fair_key share one place"),
    ],
)
def test_the_place_in_a_fair_queue(fair: tuple[str, int] | None, text: str):
    said = why(instance(), around(fair=fair), [node(fair=("q",))])
    assert said == f"it is due and waits for a free slot: 1 live node serves queue 'q', which is fair: {text}"
    assert "fair" not in why(instance(), around(fair=fair), [node()])


@pytest.mark.parametrize(
    ("limit", "until"),
    [
        (API, NOW),
        (attrs.evolve(API, ahead=4), None),
        (attrs.evolve(API, slots=2), None),
        (attrs.evolve(API, known=False), None),
    ],
)
def test_until_when_a_limit_holds_it(limit: LimitSeen, until: datetime | None):
    assert explained(instance(hold=3), around(limit=limit), [node()]).until == until


def test_every_reason_has_a_case():
    assert set(REASON) == set(CASES)
    assert set(REASON.values()) == set(REASONS_IN_ORDER)


def explained(row: Instance, surroundings: InstanceDetails, nodes: Sequence[NodeView]) -> Explanation:
    return explain_observed(Observed(row, surroundings), nodes)


# -- precedence: of several reasons that hold, the first one in the order of `Reason`

ELDER = Sibling(4, "m/1", "s", 0)
LATER: dict[str, Any] = {"due": False, "eligible_in": 60.0}
STRANGER = node("n:2", machines=("other/1",))
BOTH: dict[tuple[Reason, Reason], tuple[Instance, InstanceDetails, list[NodeView]]] = {
    ("done", "awaiting_signal"): (instance(status="done"), around(awaits=("a",)), []),
    ("paused", "scheduled"): (instance(hold=4), around(**LATER), [node()]),
    ("paused", "unserved"): (instance(hold=4), around(), []),
    ("paused", "queue_paused"): (instance(hold=4), around(pauses=(STOP,)), [node()]),
    ("scheduled", "queue_paused"): (instance(), around(**LATER, pauses=(STOP,)), [node()]),
    ("queue_paused", "unserved"): (instance(), around(pauses=(STOP,)), []),
    ("awaiting_dependencies", "unserved"): (instance(hold=5), around(), []),
    ("throttled", "unknown_step"): (instance(hold=3), around(), [STRANGER]),
    ("lease_expired", "owner_lost"): (
        instance(**running),
        around(lease_left=-1.0, offered=False),
        [node(alive=False)],
    ),
    ("scheduled", "waiting_for_key"): (
        instance(partition_key="k"),
        around(**LATER, key_holder=(4, "n:1")),
        [node()],
    ),
    ("scheduled", "unserved"): (instance(), around(**LATER), []),
    ("waiting_for_key", "unknown_step"): (
        instance(partition_key="k"),
        around(key_holder=(4, "n:1")),
        [STRANGER],
    ),
    ("waiting_for_key", "unserved"): (instance(partition_key="k"), around(elders=(ELDER,)), []),
}


@pytest.mark.parametrize("both", BOTH, ids=" over ".join)
def test_precedence(both: tuple[Reason, Reason]):
    first, second = both
    assert REASONS_IN_ORDER.index(first) < REASONS_IN_ORDER.index(second)
    assert explained(*BOTH[both]).reason == first


def test_the_reason_that_comes_second_is_told_as_well():
    found = explained(*BOTH["waiting_for_key", "unserved"])
    assert [(each.kind, each.name) for each in found.blockers] == [("instance", "4"), ("queue", "q")]
    assert found.summary == (
        "it waits for partition key 'k': instance 4 runs first; and no live node serves queue 'q'"
    )
    assert [each.command for each in found.next_actions] == [
        "durable-actors why 4",
        "durable-actors serve MODULE --queue q",
    ]


# -- keys: each node passes by the elders whose step it does not have

KEYED = instance(partition_key="k")
ELDERS = around(elders=(Sibling(4, "m/2", "s", 0), Sibling(5, "m/1", "t", 1)))


@pytest.mark.parametrize(
    ("nodes", "elders"),
    [
        ([node(machines=("m/1", "m/2"))], [4]),
        ([node()], [5]),
        ([node(), node("n:2", machines=("m/1", "m/2"))], [5, 4]),
        ([node(steps={"m/1": ("s",)})], None),
        ([node(), node("n:2", steps={"m/1": ("s",)})], None),
        ([node(), node("n:2", steps={"m/1": ("s",)}, alive=False)], [5]),
        ([node(), node("n:2", steps={"m/1": ("s",)}, queues={"other": 1})], [5]),
    ],
)
def test_the_elder_of_each_node(nodes: list[NodeView], elders: list[int] | None):
    found = explained(KEYED, ELDERS, nodes)
    assert found.reason == ("ready" if elders is None else "waiting_for_key")
    assert [each.id for each in found.blockers] == (elders or [])


def test_a_row_on_the_shelf_of_another_step_is_not_found():
    """Only a hand writes that: the shelf has it under a step that the node does not have."""
    shelved = around(offered=False, shelved_step="u")
    found = explained(instance(hold=2), shelved, [node(steps={"m/1": ("s",)})])
    assert found.reason == "unknown_step"
    assert [(each.kind, each.name) for each in found.blockers] == [("step", "u")]
    found = explained(instance(hold=2), shelved, [node(steps={"m/1": ("s", "u")})])
    assert found.reason == "ready"


# -- the other fields


def test_a_node_that_is_too_old_for_a_request():
    asked = around(lease_left=30.0, request=Request("cancel", "ada"), requested_ago=3.0)
    found = explained(instance(**running), asked, [node(version="0.1.4")])
    said = "cancel requested by ada 3.0 s ago (a step in a thread runs to its end first)"
    assert found.summary == f"it is running step 's' on n:1; {said}"
    [blocker] = found.blockers
    assert blocker.text == "node n:1 runs durable_actors 0.1.4, which ignores commands to running steps"
    assert not explained(instance(**running), asked, [node(version="0.2.0")]).blockers


def test_since_and_until():
    hour = timedelta(hours=1)
    ended = explained(instance(status="failed", finished_at=NOW + hour), around(), [])
    assert (ended.since, ended.until) == (NOW + hour, None)
    later = explained(instance(eligible_at=NOW + hour), around(**LATER), [node()])
    assert (later.since, later.until) == (NOW, NOW + hour)
    due = explained(instance(eligible_at=NOW + hour), around(), [node()])
    assert (due.since, due.until) == (NOW + hour, None)
    parked = explained(
        instance(status="awaiting_signal"),
        around(awaits=("a",), deadline=NOW + hour, deadline_in=9.0),
        [],
    )
    assert (parked.since, parked.until) == (NOW, NOW + hour)
    lost = explained(
        instance(**running, lease_expires_at=NOW + hour), around(lease_left=5.0), [node(alive=False)]
    )
    assert lost.until == NOW + hour


def test_an_overdue_await_waits_for_a_node():
    overdue = around(awaits=("a",), deadline_in=-2.0)
    found = explained(instance(status="awaiting_signal"), overdue, [])
    assert [each.kind for each in found.blockers] == ["signal", "queue"]
    found = explained(instance(status="awaiting_signal"), overdue, [node()])
    assert [each.kind for each in found.blockers] == ["signal"]


def test_what_one_can_do():
    def commands(*facts: Any) -> list[str | None]:
        return [each.command for each in explained(*facts).next_actions]

    assert commands(*CASES["failed"][:3]) == ["durable-actors retry 9"]
    assert commands(*CASES["done"][:3]) == []
    parked = instance(status="awaiting_signal")
    assert commands(parked, around(awaits=("it's",)), []) == ["""durable-actors signal 9 'it'"'"'s'"""]
    assert commands(*CASES["held"][:3]) == ["durable-actors why 4"]
    assert commands(*CASES["nobody serves"][:3]) == ["durable-actors serve MODULE --queue q"]
    assert commands(*CASES["due"][:3]) == ["durable-actors queues"]
    assert commands(*CASES["to be paused"][:3])[0] == "durable-actors resume 9"
    assert commands(*CASES["its queue is paused"][:3])[:2] == [
        "durable-actors queue resume q",
        "durable-actors queue resume q --machine m",
    ]


def test_children_are_explained_so_many_levels_deep():
    """Also where rows that a hand wrote are each other's children."""
    parked: dict[str, Any] = {"status": "awaiting_children"}
    circle = {
        1: Observed(instance(id=1, **parked), around(children_pending=1, children_total=1, missing=(2,))),
        2: Observed(instance(id=2, **parked), around(children_pending=1, children_total=1, missing=(1, 3))),
    }
    found = explain_observed(circle[1], [], circle, levels=2)
    [second] = found.blockers
    assert second.because is not None
    first, unread = second.because.blockers
    assert (first.id, unread.text) == (1, "child 3 has not ended")
    assert first.because is not None
    assert [each.because for each in first.because.blockers] == [None]
