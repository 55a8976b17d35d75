"""The root: cancellation from outside, interrupts, errors of the block, snapshots."""

from __future__ import annotations

import pytest
import trio
from durable_actors import otp
from tests.kit import until
from tests.otp.kit import Ask, Crash, Hold, Kit, Note, ScriptError
from trio.testing import wait_all_tasks_blocked


def tree_of(kit: Kit, names: str, **options) -> otp.Supervisor:
    return otp.Supervisor("root", [kit.actor(n) for n in names], **options)


async def test_cancellation_from_outside_becomes_an_ordered_stop(kit, autojump_clock):
    spec = tree_of(kit, "abc")
    for script in kit.scripts.values():
        script.slow_terminate = 2
    with trio.CancelScope() as scope:
        async with otp.open_tree(spec, observe=kit.observe):
            kit["a"].send_nowait(Note("handled before the end"))
            kit.take_log()
            scope.cancel()
            await trio.sleep_forever()
    assert scope.cancelled_caught
    assert kit.log == [
        *["end c Shutdown", "down c", "end b Shutdown", "down b"],
        *["note handled before the end", "end a Shutdown", "down a"],
    ] or kit.log == [
        "note handled before the end",
        *["end c Shutdown", "down c", "end b Shutdown", "down b", "end a Shutdown", "down a"],
    ]
    assert all(str(kit.exits(f"/{n}")[0]) == "shutdown: cancelled from outside" for n in "abc")


async def test_the_roots_shutdown_time_bounds_the_ordered_stop(kit, autojump_clock):
    spec = tree_of(kit, "ab", shutdown=3)
    kit.scripts["b"].slow_terminate = 4  # less than its own shutdown time
    with trio.CancelScope() as scope:
        async with otp.open_tree(spec, observe=kit.observe):
            begin = trio.current_time()
            scope.cancel()
    assert scope.cancelled_caught
    # b's terminate is shielded for its own shutdown time (5 s); a is cancelled when root's is over
    assert trio.current_time() - begin == 4
    assert kit.log[-1] == "down b"
    assert kit.scripts["a"].alive == kit.scripts["b"].alive == 0


async def test_without_drain_all_are_cancelled_at_once(kit, autojump_clock):
    spec = tree_of(kit, "abc")
    for script in kit.scripts.values():
        script.slow_terminate = 2
    with trio.CancelScope() as scope:
        async with otp.open_tree(spec, observe=kit.observe, drain_on_cancel=False):
            begin = trio.current_time()
            scope.cancel()
    assert scope.cancelled_caught
    assert trio.current_time() - begin == 2
    assert {e for e in kit.log if e.startswith("down")} == {"down a", "down b", "down c"}
    assert [type(r) for n in "abc" for r in kit.exits(f"/{n}")] == [otp.Shutdown] * 3


async def test_errors_of_a_stop_by_cancellation_are_not_lost(kit, autojump_clock):
    for drain in (True, False):
        spec = tree_of(kit, "ab")
        kit.scripts["a"].fail_terminate = KeyError("a")
        with pytest.RaisesGroup(KeyError, flatten_subgroups=True), trio.CancelScope() as scope:
            async with otp.open_tree(spec, observe=kit.observe, drain_on_cancel=drain):
                scope.cancel()


async def test_giving_up_is_not_lost_when_its_stop_is_cancelled(kit, autojump_clock):
    spec = tree_of(kit, "ab", intensity=0)
    kit.scripts["b"].slow_terminate = 3
    with pytest.RaisesGroup(ScriptError, flatten_subgroups=True), trio.move_on_after(1):
        async with otp.open_tree(spec, observe=kit.observe, drain_on_cancel=False):
            kit["a"].send_nowait(Crash())
            await trio.sleep_forever()
    assert kit.log[-1] == "down b"


@pytest.mark.parametrize("drain", [True, False])
async def test_an_interrupt_during_a_cancellation_is_not_lost(kit, autojump_clock, drain):
    async def interrupted():
        try:
            await trio.sleep_forever()
        finally:
            raise KeyboardInterrupt

    spec = otp.Supervisor("root", [kit.actor("a"), otp.TaskChild("task", interrupted)])
    with pytest.RaisesGroup(KeyboardInterrupt, flatten_subgroups=True), trio.CancelScope() as scope:
        async with otp.open_tree(spec, observe=kit.observe, drain_on_cancel=drain):
            scope.cancel()
            await trio.sleep_forever()
    assert kit.log[-1] == "down a"


async def test_cancelled_before_the_start_starts_nothing(kit, autojump_clock):
    with trio.CancelScope() as scope:
        scope.cancel()
        async with otp.open_tree(tree_of(kit, "a"), observe=kit.observe):
            raise AssertionError("must not start")
    assert kit.log == []


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3)], ids=repr)
@pytest.mark.parametrize("where", ["actor", "pool", "task"])
async def test_an_interrupt_stops_in_order_and_is_raised_again(kit, autojump_clock, error, where):
    pool = otp.Pool("pool", slots=2, on_exit=lambda task, reason: None)
    bomb = trio.Event()

    async def explode():
        await bomb.wait()
        raise error

    inner = otp.Supervisor(
        "inner",
        [kit.actor("x"), otp.TaskChild("task", explode if where == "task" else trio.sleep_forever)],
    )
    spec = otp.Supervisor("root", [kit.actor("a"), otp.PoolChild(pool), inner, kit.actor("z")])
    with pytest.raises(type(error)) as info:
        async with otp.open_tree(spec, observe=kit.observe):
            kit.take_log()
            if where == "actor":
                kit["x"].send_nowait(Crash(error))
            elif where == "pool":
                pool.start_nowait(explode)
            await wait_all_tasks_blocked()
            bomb.set()
            await trio.sleep_forever()
    assert info.value is error
    assert [e.split()[1] for e in kit.log if e.startswith("down")] == (
        ["x", "z", "a"] if where != "pool" else ["z", "x", "a"]
    )
    assert not [e for e in kit.events if isinstance(e, otp.ChildRestarting)]


async def test_an_error_of_the_block_leaves_it_bare(kit, autojump_clock):
    error = LookupError("mine")
    with pytest.raises(LookupError) as info:
        async with otp.open_tree(tree_of(kit, "ab"), observe=kit.observe):
            raise error
    assert info.value is error
    assert kit.log[-4:] == ["end b Shutdown", "down b", "end a Shutdown", "down a"]


async def test_block_and_tree_fail(kit, autojump_clock):
    spec = tree_of(kit, "ab")
    kit.scripts["a"].fail_terminate = KeyError("a")
    with pytest.RaisesGroup(LookupError, pytest.RaisesGroup(KeyError)):
        async with otp.open_tree(spec, observe=kit.observe):
            raise LookupError("mine")


async def test_the_blocks_error_survives_a_cancelled_stop(kit, autojump_clock):
    spec = tree_of(kit, "a")
    kit.scripts["a"].slow_terminate = 3
    with pytest.RaisesGroup(LookupError, flatten_subgroups=True), trio.move_on_after(1):
        async with otp.open_tree(spec, observe=kit.observe):
            raise LookupError("mine")
    assert kit.log[-1] == "down a"


async def test_run_tree_under_a_nursery(kit, autojump_clock):
    async with trio.open_nursery() as nursery:
        tree = await nursery.start(otp.run_tree, tree_of(kit, "ab"))
        assert await kit["a"].call(Ask()) == "a:?"
        with trio.move_on_after(0):
            await tree.stop()  # cancelled: the stop goes on
        await tree.wait_stopped()
    assert kit["a"].status == "down"


async def test_a_stop_interrupts_a_restart(kit, autojump_clock):
    """A stop while serving stands in the middle of a restart, in every phase of it."""
    spec = tree_of(kit, "abc", strategy="rest_for_one", backoff=otp.Backoff(initial=5), intensity=9)
    for name in "abc":
        kit.scripts[name].slow_terminate = 1
        kit.scripts[name].slow_init = 1
    for delay in (0.5, 1.5, 2.5, 3.5, 4.5, 5.5, 6.5):
        async with otp.open_tree(spec, observe=kit.observe):
            kit["a"].send_nowait(Crash())
            await trio.sleep(delay)
        assert [s.alive for s in kit.scripts.values()] == [0, 0, 0]
        assert {a.status for a in kit.addresses.values()} == {"down"}


async def test_asking_twice_gains_no_time(kit, autojump_clock):
    spec = otp.Supervisor("root", [kit.actor("a", shutdown=100)], shutdown=5)
    async with otp.open_tree(spec, observe=kit.observe) as tree:
        kit["a"].send_nowait(Hold(trio.Event()))
        begin = trio.current_time()
        tree.request_stop()
        await trio.sleep(4)
        tree.request_stop()
        await tree.wait_stopped()
        assert trio.current_time() - begin == 5


async def test_a_child_in_init_is_not_waited_for(kit, autojump_clock):
    spec = tree_of(kit, "ab")
    kit.scripts["b"].slow_init = 100
    begin = trio.current_time()
    with trio.move_on_after(1) as scope:
        async with otp.open_tree(spec, observe=kit.observe):
            raise AssertionError("must not be ready")
    assert scope.cancelled_caught
    assert trio.current_time() - begin == 1
    assert kit.log == ["init a", "up a", "init b", "end a Shutdown", "down a"]


async def test_snapshot(kit, autojump_clock):
    inner = otp.Supervisor("inner", [kit.actor("b"), otp.TaskChild("t", trio.sleep_forever)])
    spec = otp.Supervisor("root", [kit.actor("a"), inner])
    async with otp.open_tree(spec, observe=kit.observe) as tree:
        kit["a"].send_nowait(Crash())
        await until(lambda: kit.starts("/a") == 2)
        go = trio.Event()
        kit["b"].send_nowait(Hold(go))
        await wait_all_tasks_blocked()
        kit["b"].send_nowait(Note("x"))
        await trio.sleep(7)
        node = tree.snapshot()
        a, b = node.children[0], node.children[1].children[0]
        assert (a.restarts, a.last_error) == (1, "ScriptError('crash')")
        assert a.waits_for is not None
        assert a.waits_for.startswith("Mailbox.receive")
        assert b.waits_for is not None
        assert b.waits_for.startswith("Scripted.handle")
        assert b.mailbox is not None
        assert (b.mailbox.depth, b.mailbox.oldest_age) == (1, 7)
        text = node.render()
        go.set()
    lines = text.splitlines()
    assert [line.split(" [")[0] for line in lines] == [
        "root",
        "├── a",
        "└── inner",
        "    ├── b",
        "    └── t",
    ]
    assert "restarts 1 · last error ScriptError('crash')" in lines[1]
    assert "mailbox 1/100 · oldest 7 s" in lines[3]


async def test_an_observer_that_fails_takes_the_tree_down(kit, autojump_clock):
    def bad(event):
        if isinstance(event, otp.ChildExited):
            raise LookupError("observer")  # noqa: TRY004 - any error will do

    with pytest.RaisesGroup(LookupError, flatten_subgroups=True):
        async with otp.open_tree(tree_of(kit, "a"), observe=bad):
            kit["a"].send_nowait(Crash())
            await trio.sleep_forever()


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: otp.TaskChild("", trio.sleep_forever), "not be empty"),
        (lambda: otp.TaskChild("a/b", trio.sleep_forever), "not contain a slash"),
        (lambda: otp.TaskChild("a", trio.sleep_forever, restart="always"), "restart='always'"),
        (lambda: otp.TaskChild("a", trio.sleep_forever, shutdown=-1), "shutdown=-1"),
        (lambda: otp.TaskChild("a", trio.sleep_forever, start_timeout=0), "start_timeout"),
        (lambda: otp.TaskChild("a", trio.sleep_forever, significant=True), "permanent"),
        (lambda: otp.Supervisor("s", [], strategy="all"), "strategy='all'"),
        (lambda: otp.Supervisor("s", [], auto_shutdown="yes"), "auto_shutdown='yes'"),
        (lambda: otp.Supervisor("s", [], intensity=-1), "intensity"),
        (lambda: otp.Supervisor("s", [otp.Supervisor("x", []), otp.Supervisor("x", [])]), "named 'x'"),
        (
            lambda: otp.Supervisor(
                "s", [otp.TaskChild("a", trio.sleep_forever, significant=True, restart="transient")]
            ),
            "auto_shutdown",
        ),
    ],
)
def test_bad_specs_are_refused(make, text):
    with pytest.raises(otp.SpecError, match=text):
        make()
