"""The sentence that tells why an instance waits: every case, as a function of what was read."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
from durable_actors._store.observe import InstanceDetails, NodeView
from durable_actors._store.read import Instance
from durable_actors.cli.why import why

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
        "first_of_key": None,
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


running = {"status": "executing", "locked_by": "n:1"}
keyed = {"partition_key": "k", "hold": 1}

CASES: dict[str, tuple[Instance, InstanceDetails, list[NodeView], str]] = {
    "done": (instance(status="done"), around(), [], "it has ended: done"),
    "failed": (instance(status="failed"), around(), [], "`durable-actors retry 9` runs it again"),
    "runs": (instance(**running), around(lease_left=30.0), [node()], "it is running step 's' on n:1"),
    "its node is lost": (
        *(instance(**running), around(lease_left=30.0), [node(alive=False)]),
        (
            "its node n:1 is lost: its claim is released when other nodes have seen the node dead for dead_after, "
            "at the latest when the lease expires in 30 s"
        ),
    ),
    "its node is unknown": (instance(**running), around(lease_left=3.0), [], "its node n:1 is unknown"),
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
    "children": (
        *(instance(status="awaiting_children"), around(children_pending=2, children_total=5), []),
        "it waits for 2 more of 5 children, then runs step 's'",
    ),
    "due": (
        *(instance(), around(), [node(), node("n:2")]),
        "it is due and waits for a free slot: 2 live nodes serve queue 'q'",
    ),
    "scheduled": (
        *(instance(attempt=2), around(eligible_in=7200.0), [node()]),
        "it is scheduled: due in 2 h (run 3)",
    ),
    "scheduled for nobody": (
        *(instance(), around(eligible_in=50.0), []),
        "it is scheduled: due in 50 s; and no live node serves queue 'q'",
    ),
    "nobody serves": (
        *(instance(), around(), [node(queues={"other": 1}), node(alive=False)]),
        "it waits: no live node serves queue 'q'",
    ),
    "nobody knows": (
        *(instance(hold=2), around(), [node(machines=("m/2",))]),
        "it is shelved: no live node that serves queue 'q' knows m/1 (n:1 does not)",
    ),
    "nobody has the step": (
        *(instance(hold=2), around(), [node(steps={"m/1": ("t",)}), node("n:2", machines=())]),
        "it is shelved: no live node that serves queue 'q' knows step 's' of m/1 (n:1, n:2 do not)",
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
        *(instance(**keyed), around(first_of_key=4), [node()]),
        "it waits for partition key 'k': instance 4 runs first",
    ),
    "its turn": (instance(partition_key="k"), around(first_of_key=9), [node()], "it is due and waits"),
}


@pytest.mark.parametrize("case", CASES)
def test_why(case: str):
    row, surroundings, nodes, expected = CASES[case]
    assert expected in why(row, surroundings, nodes)
