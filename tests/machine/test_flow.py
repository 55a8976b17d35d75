"""The graph of a machine from its source: every way that an outcome can name a step, and what is not seen is said."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import durable_actors as da
import pytest
from durable_actors.diagrams import render
from durable_actors.machine import Passage, Standing, draw_machine
from durable_actors.machine._flow import flow_of

pytestmark = pytest.mark.usefixtures("registry")

HOUR = 3600
ROUTE = "ship"


def edges(machine: Any) -> list[tuple[str | None, str | None, str]]:
    """Source, target or end, label."""
    return [(each.source, each.end or each.target, each.label) for each in flow_of(machine.__durable__).edges]


def unseen(machine: Any) -> list[str]:
    return [each.text for each in flow_of(machine.__durable__).unseen]


def outside(ctx: Any) -> da.Outcome:
    return da.Next("ship") if ctx.state else da.Stop("no")


def logged(func: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(func)
    async def wrapper(*args: Any) -> Any:
        return await func(*args)

    return wrapper


def test_every_outcome():
    @da.job
    async def parcel(number: int) -> None: ...

    class Order(da.Machine):
        @da.step(initial=True)
        async def begin(self, ctx: da.Context) -> da.Outcome:
            if ctx.attempt:
                return da.Retry(delay=1)
            if ctx.state:
                return da.Await(["paid", "void"], then=self.ask, timeout=7 * 24 * HOUR)
            return da.Await("again", timeout=timedelta(days=1, hours=2))

        @da.step
        def ask(self, ctx: da.Context) -> da.Outcome:
            if ctx.state:
                return da.Approval(self.pack, on_reject=self.refund, timeout=HOUR, on_timeout=self.begin)
            if ctx.attempt:
                return da.Approval(self.pack, timeout=HOUR)
            return da.Pause(self.pack)

        @da.step
        async def pack(self, ctx: da.Context) -> da.Outcome:
            children = [da.Child(parcel, args=number) for number in range(3)]
            return da.ScheduleChildren(self.ship, children, timeout=60)

        @da.step
        async def ship(self, ctx: da.Context) -> da.Outcome:
            return da.Done()

        @da.step
        async def refund(self, ctx: da.Context) -> da.Outcome:
            return da.Stop("refunded")

    assert edges(Order) == [
        ("begin", "begin", "retry"),
        ("begin", "ask", "signal 'paid' or 'void' or 7 d"),
        ("begin", "begin", "signal 'again' or 26 h"),
        ("ask", "pack", "approved"),
        ("ask", "refund", "rejected"),
        ("ask", "begin", "nobody decides within 60 min"),
        ("ask", "failed", "rejected"),
        ("ask", "failed", "nobody decides within 60 min"),
        ("ask", "pack", "somebody lets it proceed"),
        ("pack", "ship", "children: parcel or 60 s"),
        ("ship", "done", ""),
        ("refund", "failed", ""),
    ]
    assert unseen(Order) == []


def test_every_way_to_name_a_step():
    class Base(da.Machine):
        @da.step
        async def start(self, ctx: da.Context) -> da.Outcome:
            return da.Next(type(self).ship)

        @da.step
        async def ship(self, ctx: da.Context) -> da.Outcome:
            """Text that is not indented:
            no.
            """
            return da.Next(Base.one if ctx.attempt else self.two)

        @da.step
        async def one(self, ctx: da.Context) -> da.Outcome:
            target = self.two
            if ctx.state:
                target = self.three
            return da.Next(step=target, state={})

        @da.step
        async def two(self, ctx: da.Context) -> da.Outcome:
            return da.Next({"a": self.one, "b": self.three}[ctx.state["x"]])

        @da.step
        async def three(self, ctx: da.Context) -> da.Outcome:
            if (chosen := self.one) and ctx.state:
                return da.Next(chosen)
            if ctx.attempt:
                return da.Next(ROUTE)
            outcome = da.Next("two") if ctx.state else da.Done()
            return outcome  # noqa: RET504 - the point

    class Order(Base, name="child"):
        @da.step
        async def two(self, ctx: da.Context) -> da.Outcome:
            from durable_actors import Next, Stop as Halt  # noqa: PLC0415 - the point

            if ctx.state:
                return Next(Base.one)
            return Halt("renamed: not seen")

    expected = [
        ("start", "ship"), ("ship", "one"), ("ship", "two"), ("one", "two"), ("one", "three"),
        ("three", "one"), ("three", "ship"), ("three", "two"), ("three", "done"),
    ]  # fmt: skip
    assert {each[:2] for each in edges(Base)} == {*expected, ("two", "one"), ("two", "three")}
    assert {each[:2] for each in edges(Order)} == {*expected, ("two", "one")}
    assert unseen(Base) == []
    assert unseen(Order) == ["Halt('renamed: not seen')"]


def test_helpers_are_followed_where_their_outcome_is_returned():
    class Order(da.Machine):
        @da.step
        async def start(self, ctx: da.Context) -> da.Outcome:
            if ctx.attempt:
                return await self._later(ctx)
            return self.fixed() or outside(ctx)

        async def _later(self, ctx: da.Context) -> da.Outcome:
            return await self._later(ctx) if ctx.state else da.Retry()

        @staticmethod
        def fixed() -> da.Outcome:
            return da.Done()

        @da.step
        @logged
        async def ship(self, ctx: da.Context) -> da.Outcome:
            return await self.start(ctx)

    assert {each[:2] for each in edges(Order)} == {
        *{("start", each) for each in ("start", "done", "ship", "failed")},
        *{("ship", each) for each in ("ship", "done", "failed")},
    }
    assert unseen(Order) == []


def test_what_is_not_seen_is_named_with_its_line():
    class Order(da.Machine):
        @da.step
        async def start(self, ctx: da.Context) -> da.Outcome:
            if ctx.attempt:
                return da.Next(ctx.state["step"])
            return ctx.state["table"](ctx)

        @da.step
        async def lost(self, ctx: da.Context) -> da.Outcome:
            raise ValueError

    first = inspect.getsourcelines(Order)[1]
    found = flow_of(Order.__durable__).unseen
    assert [(each.step, each.line - first, each.text) for each in found] == [
        ("start", 4, "da.Next(ctx.state['step'])"),
        ("start", 5, "ctx.state['table'](ctx)"),
    ]
    notes = da.machine_graph(Order).notes
    assert notes[0] == "nothing enters lost, as far as the source shows; insert(step=...) could start there"
    assert notes[1].startswith("not followed: da.Next(ctx.state['step']) (step start, line ")


def test_handle_and_a_step_for_cancelled_instances():
    class Order(da.Machine):
        @da.step
        async def start(self, ctx: da.Context) -> da.Outcome:
            return da.Done()

        @da.step
        async def fix(self, ctx: da.Context) -> da.Outcome:
            return da.Done()

        @da.step(on_cancel=True)
        async def undo(self, ctx: da.Context) -> da.Outcome:
            return da.Done()

        async def handle(self, error: Exception, ctx: da.Context) -> da.Outcome:
            return da.Next(self.fix) if ctx.attempt else da.Retry(delay=1)

    text = render(da.machine_graph(Order))
    assert (
        "○ an error in any step  handle\n    → fix\n    ↻ an error in any step  runs the step again\n" in text
    )
    assert "○ a request to cancel\n    → undo\n" in text
    assert "note:" not in text


def test_jobs():
    @da.job(max_attempts=3)
    async def send() -> None: ...

    @da.job(max_attempts=1)
    async def once() -> None: ...

    assert edges(send) == [
        ("perform", "done", ""),
        ("perform", "perform", "error, retry"),
        ("perform", "failed", "after 3 attempts"),
    ]
    assert edges(once) == [("perform", "done", ""), ("perform", "failed", "after 1 attempt")]


def test_a_workflow_is_its_tasks():
    class Report(da.Workflow):
        @da.task
        async def fetch(self, ctx: da.Context) -> int: ...

        @da.task(after=[fetch], queue="cpu", timeout=60)
        async def draw(self, ctx: da.Context) -> int: ...

        @da.task(after=[fetch, draw], when="ended")
        async def mail(self, ctx: da.Context) -> int: ...

    diagram = da.machine_graph(Report)
    assert diagram.kind == "tasks"
    assert [(node.label, node.detail) for node in diagram.nodes] == [
        ("fetch", ""), ("draw", "queue cpu, timeout 60 s"), ("mail", "however those end"),
    ]  # fmt: skip
    assert [(edge.source, edge.target) for edge in diagram.edges] == [
        ("task:fetch", "task:draw"), ("task:fetch", "task:mail"), ("task:draw", "task:mail"),
    ]  # fmt: skip
    assert diagram.notes == ()


def test_a_machine_without_source():
    space: dict[str, Any] = {"da": da}
    code = """
class Shell(da.Machine, name="shell"):
    @da.step
    async def start(self, ctx):
        return da.Done()
"""
    exec(compile(code, "<typed>", "exec"), space)
    diagram = da.machine_graph(space["Shell"])
    assert [node.label for node in diagram.nodes] == [
        "start",
        "start",
    ]  # the beginning, and the step of that name
    assert "the source of start is not there" in diagram.notes


def test_a_machine_that_is_not_known():
    with pytest.raises(da.UnknownMachine, match="no machine is named 'nobody'"):
        da.machine_graph("nobody")


def test_where_an_instance_stands_and_what_only_its_journal_knows():
    class Order(da.Machine):
        @da.step
        async def start(self, ctx: da.Context) -> da.Outcome:
            return da.Next(self.ship)

        @da.step
        async def ship(self, ctx: da.Context) -> da.Outcome:
            return da.Await("go", then=self.lost) if ctx.state else ctx.state["x"]

        @da.step
        async def lost(self, ctx: da.Context) -> da.Outcome:
            return da.Done()

    passages = [
        Passage("start", "ship", "next"),
        Passage("start", "lost", "next"),
        Passage("lost", "gone", "approved"),
        Passage("gone", None, "failed", "failed"),
    ]
    standing = Standing(title="i", step="ship", state="running", passed=frozenset({"start", "lost", "gone"}))
    diagram = draw_machine(Order.__durable__, passages, standing)
    states = {node.id: (node.state, node.current) for node in diagram.nodes}
    assert states["step:start"] == ("done", False)
    assert states["step:ship"] == ("running", True)
    assert states["step:gone"] == ("done", False)
    shown = {(edge.source, edge.target): (edge.observed, edge.passed, edge.label) for edge in diagram.edges}
    assert shown["step:start", "step:ship"] == (False, True, "")
    assert shown["step:start", "step:lost"] == (True, True, "")
    assert shown["step:ship", "step:lost"] == (False, False, "signal 'go'")
    assert shown["step:lost", "step:gone"] == (True, True, "approved")
    assert shown["step:gone", "end:failed"] == (True, True, "error")
    assert "this version of the machine has no step gone: only journals know it" in diagram.notes
    # Of the machine the same ways are observed, and nobody took them.
    assert not any(edge.passed for edge in draw_machine(Order.__durable__, passages).edges)


def test_an_edge_is_told_apart_by_the_kind_of_its_record():
    class Order(da.Machine):
        @da.step
        async def start(self, ctx: da.Context) -> da.Outcome:
            return da.Approval(self.done, on_reject=self.back, timeout=60)

        @da.step
        async def back(self, ctx: da.Context) -> da.Outcome:
            return da.Done()

        @da.step
        async def done(self, ctx: da.Context) -> da.Outcome:
            return da.Done()

    standing = Standing(title="i", step="back", state="ready")
    diagram = draw_machine(Order.__durable__, [Passage("start", "back", "timed_out")], standing)
    assert [edge.label for edge in diagram.edges if edge.passed] == ["nobody decides within 60 s"]
    # A step may have the name of an end.
    assert {"step:done", "end:done"} <= {node.id for node in diagram.nodes}
