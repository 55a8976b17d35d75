"""`graph`: what an instance or a machine is drawn from: rows, journals, and the source; a few statements, no locks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import durable_actors as da
import psycopg
import pytest
import trio
from durable_actors._store.dialogues import run_dialogue
from durable_actors._store.drawing import drawing
from durable_actors.diagrams import Diagram, render
from durable_actors.testing import Bench
from tests.store.kit import SCHEMA, connect, insert
from tests.support.sql import count_statements

pytestmark = pytest.mark.usefixtures("registry")

States = dict[str, tuple[str, str]]


def states(diagram: Diagram) -> States:
    return {node.label: (node.state, node.detail) for node in diagram.nodes if node.shape == "box"}


def ways(diagram: Diagram, **having: bool) -> list[tuple[str, str, str]]:
    names = {node.id: node.label for node in diagram.nodes}
    return [
        (names[edge.source], names[edge.target], edge.label)
        for edge in diagram.edges
        if all(getattr(edge, name) is value for name, value in having.items())
    ]


def add_graph(
    db: psycopg.Connection, parent: int, barrier: int, nodes: dict[str, Any], after: dict[str, str]
) -> dict[str, int]:
    """Children of a barrier, by hand: their columns, and the keys that each comes after."""
    ids: dict[str, int] = {}
    for key, columns in nodes.items():
        links = (1 if after.get(key) else 0) + (2 if any(key in each for each in after.values()) else 0)
        [ids[key]] = insert(
            db, parent_id=parent, barrier=barrier, child_key=key, links=links or None, **columns
        )
    for key, number in ids.items():
        needs = [ids[each] for each in after.get(key, "")]
        feeds = [ids[each] for each, those in after.items() if key in those]
        db.execute(
            "insert into durable.graph (id, needs, feeds, waits) values (%s, %s, %s, %s)",
            [number, needs or None, feeds or None, len(needs)],
        )
    return ids


@pytest.fixture
async def client(durable_dsn: str) -> AsyncIterator[da.Client]:
    async with da.open_client(durable_dsn) as found:
        yield found


ENDED = {"finished_at": "=now()", "inserted_at": "=now() - interval '3 s'"}
TASKS: dict[str, Any] = {
    "a": {"status": "done", **ENDED},
    "b": {"status": "failed", "last_error": "no\nstock", "attempt": 2, **ENDED},
    "c": {"status": "runnable", "hold": 5},
    "d": {"status": "cancelled", "last_error": "upstream failed: b failed", **ENDED},
    "e": {"status": "runnable", "eligible_at": "=now() + interval '1 h'"},
    "f": {"status": "runnable", "hold": 4},
    "g": {"status": "awaiting_signal", "awaits": ["x"]},
    "h": {"status": "runnable", "hold": 5},
}
AFTER = {"c": "ae", "d": "b", "h": "bc"}


async def test_the_tasks_of_an_instance(client: da.Client, db: psycopg.Connection):
    [parent] = insert(db, status="awaiting_children", children_pending=8, children_total=8, unique_key=b"top")
    ids = add_graph(db, parent, 2, TASKS, AFTER)
    for target in (parent, "top"):
        diagram = await client.graph(target)
        counts = "5 waiting, 1 done, 1 failed, 1 cancelled"
        assert diagram.title == f"m {parent}, awaiting_children: 8 tasks ({counts})"
        found = states(diagram)
        assert found["a"] == ("done", "3.0 s")
        assert found["b"] == ("failed", "attempt 3, 3.0 s, no stock")
        assert found["c"] == ("waiting", "for e")
        assert found["d"] == ("cancelled", "upstream failed: b failed")
        assert found["e"][0] == "waiting"
        assert found["e"][1].startswith("due in ")
        assert found["f"] == ("waiting", "paused")
        assert found["g"] == ("waiting", "for a signal or a person")
        assert found["h"] == ("waiting", "for b (failed), c")
    facts = {node.label: node.facts for node in diagram.nodes}
    assert facts["c"]["after"] == [ids["a"], ids["e"]]
    assert (facts["b"]["id"], facts["b"]["status"], facts["b"]["attempt"]) == (ids["b"], "failed", 2)
    assert ways(diagram, passed=True) == [("a", "c", "")]
    assert ways(diagram, passed=False) == [("e", "c", ""), ("b", "d", ""), ("b", "h", ""), ("c", "h", "")]


async def test_a_barrier_can_be_named_and_must_be_there(client: da.Client, db: psycopg.Connection):
    [parent] = insert(db, status="awaiting_children", children_pending=1, children_total=1)
    add_graph(db, parent, 2, {"o": {}, "x": {"hold": 5}}, {"x": "o"})
    add_graph(db, parent, 5, {"n": {}, "x": {"hold": 5}}, {"x": "n"})
    assert list(states(await client.graph(parent))) == ["n", "x"]
    assert list(states(await client.graph(parent, barrier=2))) == ["o", "x"]
    with pytest.raises(da.NoTarget, match=f"instance {parent} has no children of barrier 7"):
        await client.graph(parent, barrier=7)
    with pytest.raises(da.NoTarget, match="there is no instance 99"):
        await client.graph(99)
    for wrong in ({"barrier": -1}, {"limit": 0}, {"steps": "yes"}):
        with pytest.raises(da.ConfigError):
            await client.graph(parent, **wrong)


async def test_of_a_large_graph_tasks_that_look_the_same_are_one_node(
    client: da.Client, db: psycopg.Connection
):
    [parent] = insert(db, status="awaiting_children", children_pending=1, children_total=1)
    names = [f"n{number}" for number in range(30)]
    nodes: dict[str, Any] = {name: {"status": "done", **ENDED} for name in names}
    nodes["n20"] = {"status": "failed", "last_error": "x", **ENDED}
    ids = add_graph(db, parent, 1, {**nodes, "join": {"hold": 5}}, {})
    db.execute(
        "update durable.graph set needs = %s where id = %s", [[ids[name] for name in names], ids["join"]]
    )
    db.execute("update durable.gen_durable set links = 1 where id = %s", [ids["join"]])
    assert len((await client.graph(parent)).nodes) == 31
    diagram = await client.graph(parent, limit=3)
    assert states(diagram) == {
        "n0 … n29": ("done", "29 tasks"),
        "n20": ("failed", states(diagram)["n20"][1]),
        "join": ("waiting", "for n20 (failed)"),
    }
    assert diagram.nodes[0].facts["count"] == 29
    assert ways(diagram) == [("n0 … n29", "join", ""), ("n20", "join", "")]
    assert (diagram.hidden, diagram.hidden_edges) == ({}, 0)
    small = await client.graph(parent, limit=2)
    assert list(states(small)) == ["n20", "join"]
    assert (small.hidden, small.hidden_edges) == ({"done": 29}, 29)
    fan: dict[str, Any] = {"a": {}, **{key: {"hold": 5} for key in "bcdef"}}
    add_graph(db, parent, 2, fan, dict.fromkeys("bcdef", "a"))
    drawn = await client.graph(parent, limit=2)
    assert ways(drawn) == [("a", "b … f", "")]
    assert (drawn.hidden, drawn.hidden_edges) == ({}, 0)


async def test_a_workflow_that_runs(durable: Bench):
    class Report(da.Workflow, name="draw:report"):
        @da.task(max_attempts=1)
        async def fetch(self, ctx: da.Context) -> int:
            return 1

        @da.task(max_attempts=1)
        async def rates(self, ctx: da.Context) -> int:
            raise ValueError("no rates")

        @da.task(after=[fetch, rates])
        async def mail(self, ctx: da.Context) -> int:
            return 2

    number = await durable.insert(Report)
    before = await durable.graph(number)
    assert before.title == f"draw:report {number}, runnable: 3 tasks"
    assert states(before) == dict.fromkeys(["fetch", "rates", "mail"], ("waiting", ""))
    await durable.drain()
    after = await durable.graph(number)
    assert {name: state for name, (state, _) in states(after).items()} == {
        "fetch": "done", "rates": "failed", "mail": "cancelled",
    }  # fmt: skip
    assert states(after)["mail"][1].startswith("upstream failed: rates failed")
    assert ways(after, passed=True) == [("fetch", "mail", "")]
    assert (await durable.graph(Report)).title == "draw:report v1: 3 tasks"
    steps = await durable.graph(number, steps=True)
    assert ("start", "finish", "children") in ways(steps, passed=True)


async def test_the_steps_of_an_instance(durable: Bench):
    class Order(da.Machine, name="draw:order", journal="outcomes"):
        @da.step(initial=True)
        async def begin(self, ctx: da.Context) -> da.Outcome:
            return da.Next(ctx.state["to"])

        @da.step
        async def pay(self, ctx: da.Context) -> da.Outcome:
            return da.Await("paid", then=self.ship)

        @da.step
        async def ship(self, ctx: da.Context) -> da.Outcome:
            return da.Approval(self.sent, on_reject=self.sent, title="Send?")

        @da.step
        async def sent(self, ctx: da.Context) -> da.Outcome:
            return da.Done()

    number = await durable.insert(Order, state={"to": "pay"})
    await durable.drain()
    diagram = await durable.graph(number)
    assert diagram.title == f"instance {number} of draw:order v1: awaiting_signal in pay"
    assert states(diagram)["begin"] == ("done", "")
    assert states(diagram)["pay"] == ("waiting", "for a signal")
    assert states(diagram)["ship"] == ("plain", "")
    assert ways(diagram, passed=True) == [("begin", "pay", "")]
    assert ways(diagram, observed=True) == [("begin", "pay", "")]  # a state chose it
    await durable.signal(number, "paid")
    await durable.drain()
    diagram = await durable.graph(number)
    assert states(diagram)["ship"] == ("waiting", "for a person: Send?")
    assert ("pay", "ship", "signal 'paid'") in ways(diagram, passed=True)
    await durable.reject(number)
    await durable.drain()
    diagram = await durable.graph(number)
    assert [node.label for node in diagram.nodes if node.current] == ["done"]
    assert ways(diagram, passed=True) == [
        ("pay", "ship", "signal 'paid'"), ("ship", "sent", "rejected"), ("sent", "done", ""), ("begin", "pay", ""),
    ]  # fmt: skip
    # Of the machine: what journals add to the source.
    machine = await durable.graph(Order)
    assert ways(machine, observed=True) == [("begin", "pay", "")]
    assert ways(da.machine_graph(Order), observed=True) == []


async def test_an_instance_whose_machine_is_not_here(client: da.Client, db: psycopg.Connection):
    [parent] = insert(db)
    [number] = insert(db, status="failed", last_error="no", finished_at="=now()", parent_id=parent)
    db.execute("update durable.gen_durable set fsm = 'else:Where', step = 'x<b>' where id = %s", [number])
    diagram = await client.graph(number)
    assert states(diagram) == {"x<b>": ("failed", "no")}
    assert diagram.notes[0].startswith("its machine is not known here")
    assert diagram.notes[1] == f"it is a child of instance {parent}"
    assert "x&lt;b&gt;" in render(diagram, "svg")


async def test_a_few_statements_whatever_the_size(db: psycopg.Connection, durable_dsn: str):
    [parent] = insert(db, status="awaiting_children", children_pending=8, children_total=8)
    add_graph(db, parent, 2, TASKS, AFTER)
    [alone] = insert(db)
    async with connect(durable_dsn, "client") as conn:
        for target, most in ((parent, 2), (alone, 3)):
            with count_statements(durable_dsn) as count:
                await run_dialogue(conn, drawing(SCHEMA, target))
            assert count.total == most, str(count)


async def test_every_kind_of_connection_reads_the_same(
    client: da.Client, db: psycopg.Connection, durable_dsn: str
):
    class Order(da.Machine, name="draw:kinds"):
        @da.step
        async def start(self, ctx: da.Context) -> da.Outcome:
            return da.Done()

    [parent] = insert(db, status="awaiting_children", children_pending=8, children_total=8)
    add_graph(db, parent, 2, TASKS, AFTER)
    number = await client.insert(Order, journal="outcomes")
    await client.execute_next()
    for target in (parent, number, Order):
        found = await da.graph(target, engine=client)
        with psycopg.connect(durable_dsn) as conn:
            assert states(da.sync.graph(conn, target)) == states(found)
            assert ways(da.sync.graph(conn, target)) == ways(found)
        assert await in_asyncio(durable_dsn, target) == states(found)


async def in_asyncio(dsn: str, target: Any) -> States:
    async def read() -> States:
        async with await psycopg.AsyncConnection.connect(dsn) as conn:
            return states(await da.aio.graph(conn, target))

    return await trio.to_thread.run_sync(lambda: asyncio.run(read()))
