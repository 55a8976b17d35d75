"""Children that come after each other: `Child(key=, after=, when=)` and the check of a whole `ScheduleChildren`."""

import time
from itertools import pairwise

import durable_actors as da
import pytest
from durable_actors._engine.committing.transition import plan_children
from durable_actors.machine._child import graph_cycle
from hypothesis import given, strategies as st


@pytest.fixture
def work():
    @da.job(name="work")
    def work(args: dict[str, int]) -> int:
        return len(args)

    return work


def needs(outcome: da.ScheduleChildren) -> list[tuple[int, ...]]:
    return [child.needs for child in outcome.children]


def test_children_are_named_by_object_and_by_key(work):
    left = da.Child(work, key="left")
    right = da.Child(work)
    join = da.Child(work, after=[left, right, "left", right], when="ended")
    last = da.Child(work, key="last", after=join)
    outcome = da.ScheduleChildren("then", [last, left, right, join])
    assert needs(outcome) == [(3,), (), (), (1, 2)]
    assert [child.key for child in outcome.children] == ["last", "left", "#2", "#3"]
    assert [child.any_end for child in outcome.children] == [False, False, False, True]
    assert outcome.children[3].after == ("left", "#2")
    assert right.key is None, "what the user wrote is left as it is"
    assert right.needs == ()


def test_a_child_can_be_used_in_several_outcomes(work):
    first, second = da.Child(work, key="first"), da.Child(work, after="first")
    ahead = da.ScheduleChildren("then", [first, second])
    behind = da.ScheduleChildren("then", [second, first])
    assert (needs(ahead), needs(behind)) == ([(), (0,)], [(1,), ()])
    assert ahead == da.ScheduleChildren("then", [first, second])
    assert ahead != da.ScheduleChildren("then", [first, da.Child(work)])
    assert da.ScheduleChildren("then", ahead.children) == ahead


def test_the_engine_gets_keys_needs_and_conditions(work):
    first = da.Child(work)
    spawn = plan_children(da.ScheduleChildren("then", [first, da.Child(work, after=first, when="ended")]))
    assert spawn.graph is not None
    assert list(spawn.graph.keys) == ["#0", None]
    assert list(spawn.graph.needs) == [(), (0,)]
    assert list(spawn.graph.any_end) == [False, True]


def test_children_without_keys_are_no_graph(work):
    outcome = da.ScheduleChildren("then", [da.Child(work), work, da.Child(work, when="ended")])
    assert plan_children(outcome).graph is None
    assert plan_children(da.ScheduleChildren("then", [da.Child(work, key="alone")])).graph is not None
    same = da.Child(work)
    assert len(da.ScheduleChildren("then", [same, same]).children) == 2


@pytest.mark.parametrize(
    ("edges", "told"),
    [
        ({"a": ["b"], "b": ["a"]}, r"a -> b -> a|b -> a -> b"),
        ({"a": ["a"]}, "a -> a"),
        (
            {"root": [], "a": ["root", "c"], "b": ["a"], "c": ["b"], "end": ["c"]},
            r"[abc] -> [abc] -> [abc] -> [abc]",
        ),
        ({f"k{n}": [f"k{(n + 1) % 1000}"] for n in range(1000)}, r"k\d+ -> .* -> … \(990 more\) -> k\d+"),
    ],
)
def test_a_cycle_is_refused_and_named(work, edges, told):
    children = [da.Child(work, key=key, after=after) for key, after in edges.items()]
    with pytest.raises(da.InvalidOutcome, match=f"come after each other.*: ({told})$") as error:
        da.ScheduleChildren("then", children)
    names = str(error.value).rsplit(": ", 1)[1].split(" -> ")
    for first, then in pairwise(names):  # "a -> b": b comes after a
        assert "…" in first + then or first in edges[then]


def test_what_is_not_among_the_children_is_refused(work):
    with pytest.raises(da.InvalidOutcome, match=r"child 1 comes after the unknown key 'c'; the keys are: a$"):
        da.ScheduleChildren("then", [da.Child(work, key="a"), da.Child(work, after="c")])
    with pytest.raises(
        da.InvalidOutcome, match=r"child 'b' comes after .*'x'.*, which is not among the children"
    ):
        da.ScheduleChildren("then", [da.Child(work, key="b", after=da.Child(work, key="x"))])
    twice = da.Child(work)
    with pytest.raises(da.InvalidOutcome, match="in the list twice"):
        da.ScheduleChildren("then", [twice, twice, da.Child(work, after=twice)])
    with pytest.raises(da.InvalidOutcome, match="children 0 and 2 have the same key 'a'"):
        da.ScheduleChildren("then", [da.Child(work, key="a"), work, da.Child(work, key="a")])


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"when": "done"}, r'when=\.\.\.\) must be "succeeded" or "ended"; it is \'done\''),
        ({"key": ""}, r"key=\.\.\.\) must not be empty"),
        ({"key": 7}, r"key=\.\.\.\) must be a str"),
        ({"key": "#1"}, "begin with #"),
        ({"key": "k" * 256}, "at most 255 characters"),
        ({"after": 7}, "by their Child objects or keys, not 7"),
        ({"after": [7]}, "by their Child objects or keys, not 7"),
        ({"after": {"a": 1}}, "by their Child objects or keys"),
    ],
)
def test_a_mistake_in_a_child_is_found_where_it_is_made(work, options, told):
    with pytest.raises(da.InvalidOutcome, match=told):
        da.Child(work, **options)


def test_a_job_is_not_a_child(work):
    with pytest.raises(da.InvalidOutcome, match="by their Child objects or keys, not <job"):
        da.Child(work, after=[work])


def test_a_long_chain_neither_recurses_nor_prints_itself(work):
    chain = [da.Child(work)]
    for _ in range(20_000):
        chain.append(da.Child(work, after=chain[-1]))
    outcome = da.ScheduleChildren("then", chain[::-1])  # the order that needs the full check
    assert outcome.children[0].needs == (1,)
    assert outcome.children[-1].needs == ()
    assert len(repr(chain[-1])) < 500
    assert outcome == da.ScheduleChildren("then", chain[::-1])


def test_ten_thousand_children_with_fifty_thousand_edges_are_checked_at_once(work):
    children = [
        da.Child(work, key=f"k{n}", after=[f"k{m}" for m in range(n + 1, min(n + 6, 10_000))])
        for n in range(10_000)
    ]
    began = time.process_time()
    outcome = da.ScheduleChildren("then", children)
    assert time.process_time() - began < 0.5  # 0.03 s on an idle machine
    assert sum(len(child.needs) for child in outcome.children) == 49_985


def test_a_step_knows_what_it_comes_after():
    view = da.ChildView(3, "work", "done", result=9, key="left")
    ctx = da.Context(state={}, dependencies={"left": view})
    assert ctx.dependencies["left"].result == 9
    assert ctx.for_handle().dependencies == {"left": view}
    assert dict(da.Context(state={}).dependencies) == {}


@given(
    st.integers(1, 12).flatmap(
        lambda size: st.lists(st.lists(st.integers(0, size - 1), max_size=3), min_size=size, max_size=size)
    )
)
def test_a_cycle_is_found_exactly_if_there_is_one(needs):
    """Compared with a graph whose transitive closure is written out."""
    reach = [set(each) for each in needs]
    for _ in needs:
        reach = [each | {far for near in each for far in reach[near]} for each in reach]
    found = graph_cycle(needs)
    assert (found is not None) == any(index in each for index, each in enumerate(reach))
    if found is not None:
        assert found[0] == found[-1]
        assert all(first in needs[then] for first, then in pairwise(found))
        assert len(set(found)) == len(found) - 1
