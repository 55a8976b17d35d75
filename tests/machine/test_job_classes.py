"""The class form of a job: a machine with `perform` instead of steps."""

from typing import Any

import attrs
import durable_actors.machine as da
import pytest


@attrs.frozen
class Order:
    order: int


async def test_the_class_form_of_a_job():
    class Cleanup(da.Machine[Order], max_attempts=3, queue="clean"):
        async def perform(self, args, ctx):
            return args.order + ctx.attempt

        def backoff(self, attempt):
            return 10 * attempt

    spec = Cleanup.__durable__
    assert (spec.kind, spec.initial, spec.max_attempts, spec.queue) == ("job", "perform", 3, "clean")
    assert await spec.steps["perform"].call(da.Context(state=Order(40), attempt=2)) == 42
    assert spec.backoff(4) == 40


@pytest.mark.parametrize("form", ["none", "args", "ctx", "both"])
def test_perform_takes_what_it_wants(form):
    class None_(da.Machine[Order]):
        def perform(self):
            return "none"

    class Args(da.Machine[Order]):
        def perform(self, args):
            return ("args", args)

    class Ctx(da.Machine[Order]):
        def perform(self, ctx):
            return ("ctx", ctx.state)

    class Both(da.Machine[Order]):
        def perform(self, args, ctx):
            return ("both", args, ctx.state)

    machine = {"none": None_, "args": Args, "ctx": Ctx, "both": Both}[form]
    step = machine.__durable__.steps["perform"]
    result = step.call(da.Context(state=Order(1)))
    assert (
        result
        == {
            "none": "none",
            "args": ("args", Order(1)),
            "ctx": ("ctx", Order(1)),
            "both": ("both", Order(1), Order(1)),
        }[form]
    )
    assert step.wants_ctx is (form in {"ctx", "both"})
    assert machine.__durable__.max_attempts == 20


def test_perform_names_its_type_when_nothing_else_does():
    class Cleanup(da.Machine):
        def perform(self, args: Order) -> None: ...

    class Anything(da.Machine):
        def perform(self, args) -> None: ...

    assert Cleanup.__durable__.codec.type is Order
    assert Anything.__durable__.codec.type is Any


def test_a_job_class_can_be_inherited():
    class Base(da.Machine[Order], max_attempts=3, queue="q"):
        def perform(self, args): ...

    class Sub(Base):
        def backoff(self, attempt):
            return 1

    assert (Sub.__durable__.max_attempts, Sub.__durable__.queue) == (3, "q")
    assert Sub.__durable__.backoff(9) == 1
    assert Base.__durable__.backoff is None
