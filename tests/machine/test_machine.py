"""What a machine class becomes: name, version, steps, state type; how its steps are called."""

import abc
import dataclasses
import inspect
from typing import Generic, TypedDict, TypeVar

import attrs
import durable_actors.machine as da
import msgspec
import pytest
from durable_actors.errors import DefinitionError


@attrs.frozen
class Order:
    order: int
    n: int = 0


@dataclasses.dataclass
class Basket:
    items: list[str] = dataclasses.field(default_factory=list)


class Cart(TypedDict):
    total: float


class Parcel(msgspec.Struct):
    weight: float


def checkout(**keywords):
    class Checkout(da.Machine[Order], **keywords):
        @da.step(initial=True, timeout=5)
        async def begin(self, ctx):
            return da.Next(self.ship, attrs.evolve(ctx.state, n=1))

        @da.step
        def ship(self, ctx):
            return da.Done(ctx.state.order)

    return Checkout


def test_the_defaults(registry):
    machine = checkout()
    spec = machine.__durable__
    assert spec.name == f"{__name__}:checkout.<locals>.Checkout"
    assert (spec.version, spec.kind, spec.queue, spec.initial) == (1, "machine", "default", "begin")
    assert (spec.run_ahead, spec.max_attempts, spec.backoff) == (True, None, None)
    assert list(spec.steps) == ["begin", "ship"]
    assert spec.codec.type is Order
    assert spec.definition is machine
    assert spec.handle.is_default
    assert str(spec) == f"{spec.name} v1"
    assert registry.get(spec.name, 1) is spec


def test_the_keywords():
    spec = checkout(name="checkout", version=3, queue="fast", run_ahead=False).__durable__
    assert (spec.name, spec.version, spec.queue, spec.run_ahead) == ("checkout", 3, "fast", False)


async def test_steps_are_called_with_a_new_object_each_time():
    seen = []

    class Machine(da.Machine):
        @da.step
        async def start(self, ctx):
            seen.append(self)
            return da.Next(self.work)

        @da.step
        def work(self, ctx):
            seen.append(self)
            return da.Done(ctx.state)

    start, work = (Machine.__durable__.steps[name] for name in ("start", "work"))
    assert (start.is_async, work.is_async) == (True, False)
    assert (start.timeout, work.wants_ctx) == (None, True)
    assert await start.call(da.Context(state={})) == da.Next("work")
    assert work.call(da.Context(state={"a": 1})) == da.Done({"a": 1})
    assert [type(each) for each in seen] == [Machine, Machine]
    assert seen[0] is not seen[1]


async def test_a_step_can_be_called_like_a_method():
    machine = checkout()
    context = da.Context(state=Order(7))
    assert await machine().begin(context) == da.Next("ship", Order(7, 1))
    assert machine().ship(context) == da.Done(7)
    assert machine.ship(machine(), context) == da.Done(7)
    assert repr(machine.ship) == repr(machine().ship) == "<step checkout.<locals>.Checkout.ship>"
    assert list(inspect.signature(machine.ship).parameters) == ["self", "ctx"]


@pytest.mark.parametrize("type_", [Order, Basket, Cart, Parcel, dict[str, int], dict, int, list[Order]])
def test_state_types_in_brackets_or_by_keyword(type_):
    class Bracket(da.Machine[type_]):
        @da.step
        async def start(self, ctx): ...

    class Keyword(da.Machine, state=type_):
        @da.step
        async def start(self, ctx): ...

    assert Bracket.__durable__.codec.type == Keyword.__durable__.codec.type == type_


def test_a_nested_state_is_adopted():
    class Nested(da.Machine):
        @attrs.frozen
        class State:
            n: int = 0

        @da.step
        async def start(self, ctx): ...

    assert Nested.__durable__.codec.type is Nested.State
    assert Nested.__durable__.codec.decode(b"{}", step="start") == Nested.State(0)


def test_brackets_win_over_a_nested_state():
    class Nested(da.Machine[Order]):
        class State: ...

        @da.step
        async def start(self, ctx): ...

    assert Nested.__durable__.codec.type is Order


def test_without_any_type_the_state_is_a_dict():
    class Plain(da.Machine):
        @da.step
        async def start(self, ctx): ...

    assert Plain.__durable__.codec.decode(b'{"a":1}', step="start") == {"a": 1}


def test_inheritance_of_steps_keywords_and_state():
    base = checkout(queue="fast", run_ahead=False, name="base")

    class Better(base, version=2):
        @da.step
        async def ship(self, ctx):
            return da.Next(self.notify)

        @da.step
        async def notify(self, ctx):
            return da.Done()

    spec = Better.__durable__
    assert list(spec.steps) == ["begin", "ship", "notify"]
    assert spec.steps["ship"].is_async
    assert (spec.initial, spec.queue, spec.run_ahead, spec.version) == ("begin", "fast", False, 2)
    assert spec.name.endswith("<locals>.Better")
    assert spec.codec.type is Order
    assert base.__durable__.steps["ship"].is_async is False


def test_a_subclass_may_begin_elsewhere():
    base = checkout()

    class ByMark(base):
        @da.step(initial=True)
        async def prepare(self, ctx): ...

    class ByKeyword(base, initial="ship"):
        pass

    class ByReference(base, initial=base.ship):
        pass

    class ByOverride(base):
        @da.step
        async def begin(self, ctx): ...

    found = [each.__durable__.initial for each in (ByMark, ByKeyword, ByReference, ByOverride)]
    assert found == ["prepare", "ship", "ship", "begin"]


def test_a_subclass_of_a_nested_state_may_bring_its_own():
    class Base(da.Machine):
        class State(msgspec.Struct):
            a: int = 0

        @da.step
        async def start(self, ctx): ...

    class Same(Base):
        pass

    class Other(Base):
        class State(msgspec.Struct):
            b: int = 0

    assert Same.__durable__.codec.type is Base.State
    assert Other.__durable__.codec.type is Other.State


async def test_super_reaches_the_step_of_the_base():
    class Base(da.Machine):
        @da.step
        async def start(self, ctx):
            return da.Done("base")

    class Sub(Base):
        @da.step
        async def start(self, ctx):
            outcome = await super().start(ctx)
            return da.Done(outcome.result + "+sub")

    assert await Sub.__durable__.steps["start"].call(da.Context(state={})) == da.Done("base+sub")


def test_a_mixin_brings_steps_and_handle():
    class Giving:
        @da.step
        async def give_up(self, ctx):
            return da.Stop("enough")

        def handle(self, error, ctx):
            return da.Next("give_up")

    class Machine(Giving, da.Machine):
        @da.step
        async def start(self, ctx): ...

    spec = Machine.__durable__
    assert set(spec.steps) == {"start", "give_up"}
    assert not spec.handle.is_default
    assert spec.handle.call(ValueError(), da.Context(state={})) == da.Next("give_up")
    assert da.normalize_outcome(
        da.Next(Giving.give_up), spec, step="start", attempt=0, random=lambda: 0.5
    ) == da.Next("give_up")


def test_an_abstract_base_is_no_machine(registry):
    class Base(da.Machine[Order], abc.ABC):
        async def handle(self, error, ctx):
            return da.Retry()

    class Concrete(Base):
        @da.step
        async def start(self, ctx): ...

    assert Base.__durable__ is None
    assert len(registry) == 1
    assert Concrete.__durable__.codec.type is Order
    assert Concrete.__durable__.handle.is_async


def test_keywords_of_an_abstract_base_are_inherited():
    class Base(da.Machine, abc.ABC, queue="fast", run_ahead=False, state=Order, initial="go"):
        @da.step
        async def go(self, ctx): ...

        @da.step
        async def other(self, ctx): ...

    class Plain(Base): ...

    class Own(Base, queue="slow", initial="other"): ...

    class Marked(Base):
        @da.step(initial=True)
        async def mine(self, ctx): ...

    class Sub(Marked): ...

    specs = [each.__durable__ for each in (Plain, Own, Marked, Sub)]
    assert [spec.queue for spec in specs] == ["fast", "slow", "fast", "fast"]
    assert [spec.initial for spec in specs] == ["go", "other", "mine", "mine"]
    assert {spec.run_ahead for spec in specs} == {False}
    assert {spec.codec.type for spec in specs} == {Order}


def test_a_decorator_that_makes_the_class_again(registry):
    @attrs.define
    class Slotted(da.Machine, queue="fast", name="slotted", version=2):
        @da.step
        async def start(self, ctx):
            return da.Next(self.start)

    spec = Slotted.__durable__
    assert (spec.name, spec.version, spec.queue) == ("slotted", 2, "fast")
    assert spec.definition is Slotted
    assert list(registry.specs.values()) == [spec]


def test_a_generic_base_is_no_machine_until_its_state_is_known(registry):
    S = TypeVar("S")

    class Polling(da.Machine[S], Generic[S]):
        @da.step
        async def start(self, ctx): ...

    class Many(Polling[list[S]], Generic[S]): ...

    class Orders(Polling[Order]): ...

    class ManyOrders(Many[Order]): ...

    assert len(registry) == 2
    assert Orders.__durable__.codec.type is Order
    assert ManyOrders.__durable__.codec.type == list[Order]
    with pytest.raises(DefinitionError, match="generic in S"):

        class Forgotten(Polling): ...


async def test_handle_sync_and_async():
    class Sync(da.Machine):
        @da.step
        async def start(self, ctx): ...

        def handle(self, error, ctx):
            return da.Stop(str(error))

    class Async(Sync):
        async def handle(self, error, ctx):
            return da.Retry(delay=ctx.attempt)

    context = da.Context(state={}, attempt=3)
    assert Sync.__durable__.handle.call(ValueError("no"), context) == da.Stop("no")
    assert (Sync.__durable__.handle.is_async, Async.__durable__.handle.is_async) == (False, True)
    assert await Async.__durable__.handle.call(ValueError("no"), context) == da.Retry(delay=3)


def test_the_default_handle_stops():
    error = ValueError("no")
    spec = checkout().__durable__
    assert spec.handle.call(error, da.Context(state=Order(1))) == da.Stop(error)
    assert not spec.handle.is_async
