import attrs
import durable_actors.machine as da
import pytest
from durable_actors.errors import DurableError, TooManyChildren


def test_a_context_can_be_made_by_hand():
    context = da.Context(state={"a": 1})
    assert (context.state, context.attempt, context.visit, context.signals, context.parent_id) == (
        {"a": 1},
        0,
        1,
        (),
        None,
    )


def test_the_idempotency_key_names_the_visit():
    context = da.Context(state=None, id=42, visit=3, step="ship", attempt=0)
    assert context.idempotency_key == "42/3/ship"
    assert attrs.evolve(context, attempt=5).idempotency_key == context.idempotency_key
    assert attrs.evolve(context, visit=4).idempotency_key != context.idempotency_key


def test_it_is_read_only():
    context = da.Context(state={})
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        context.state = {"lost": True}


def test_the_context_of_handle_has_no_messages():
    signal, child = da.Signal(1, "paid", {"amount": 1}), da.ChildView(2, "m", "done", result=3)
    context = da.Context(
        state={"a": 1}, id=7, attempt=2, signals=(signal,), awaited=(signal,), children=(child,)
    )
    bare = context.for_handle()
    assert (bare.signals, bare.awaited, bare.children) == ((), (), ())
    assert (bare.id, bare.attempt, bare.state) == (7, 2, {"a": 1})
    assert bare.for_handle() is bare


def test_children_are_whole_or_refused():
    child, other = da.ChildView(2, "m", "done", result=3), da.ChildView(3, "m", "failed")
    context = da.Context(state={}, children=(child, other))
    assert context.children == (child, other)
    assert context.children_counts == {"done": 1, "failed": 1}
    assert context.children_counts["runnable"] == 0
    many = da.Context(state={}, id=7, children=None, children_counts={"done": 12_345})
    assert many.children_counts == {"done": 12_345}
    with pytest.raises(TooManyChildren, match=r"12,345 children.*10,000.*iter_children.*children_counts"):
        _ = many.children
    assert (many.for_handle().children, many.for_handle().children_counts) == ((), {})


class Port:
    """Notes what the context asks of the engine."""

    def __init__(self):
        self.calls = []

    async def insert(self, *arguments):
        self.calls.append(("insert", *arguments))
        return 1

    async def signal(self, *arguments):
        self.calls.append(("signal", *arguments))

    async def start_child(self, *arguments):
        self.calls.append(("start_child", *arguments))
        return 2

    async def iter_signals(self, ctx):
        yield da.Signal(1, "a")

    async def iter_children(self, ctx):
        yield da.ChildView(1, "m", "done")


async def test_the_door_to_the_engine():
    port = Port()
    context = da.Context(state={}, id=7, port=port)
    assert await context.insert("m", state=1, queue="q") == 1
    await context.signal(9, "paid", {"x": 1}, dedup_key="k")
    await context.signal("key", "paid")
    assert await context.start_child("m", key="a", args=5) == 2
    assert [each async for each in context.iter_signals()] == [da.Signal(1, "a")]
    assert [each async for each in context.iter_children()] == [da.ChildView(1, "m", "done")]
    assert port.calls == [
        ("insert", context, "m", {"state": 1, "queue": "q"}),
        ("signal", context, 9, "paid", {"x": 1}, "k"),
        ("signal", context, "key", "paid", None, None),
        ("start_child", context, "m", "a", {"args": 5}),
    ]
    assert "port" not in repr(context)


async def test_without_an_engine_it_says_so():
    context = da.Context(state={})
    with pytest.raises(DurableError, match=r"ctx.insert\(\) needs a running engine"):
        await context.insert("m")
    with pytest.raises(DurableError, match=r"ctx.signal\(\) needs a running engine"):
        await context.signal(1, "x")
    with pytest.raises(DurableError, match=r"ctx.start_child\(\) needs"):
        await context.start_child("m", key="a")
    for method in (context.iter_signals, context.iter_children):
        with pytest.raises(DurableError, match="needs a running engine"):
            method()
