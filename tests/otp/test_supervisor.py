"""Supervisors: order, strategies, escalation, back-off, significant children."""

from __future__ import annotations

import functools
import logging
import math
import traceback

import pytest
import trio
from durable_actors import otp
from tests.kit import until
from tests.otp.kit import Ask, Crash, Hold, Note, Quit, ScriptError, states
from trio.testing import wait_all_tasks_blocked


def up(*names: str) -> list[str]:
    return [f"{what} {name}" for name in names for what in ("init", "up")]


def down(*names: str, reason: str = "Shutdown") -> list[str]:
    return [f"{what} {name}{tail}" for name in names for what, tail in (("end", f" {reason}"), ("down", ""))]


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        ("one_for_one", up("b")),
        ("rest_for_one", [*down("d", "c"), *up("b", "c", "d")]),
        ("one_for_all", [*down("d", "c", "a"), *up("a", "b", "c", "d")]),
    ],
)
async def test_strategies(kit, autojump_clock, strategy, expected):
    tree = otp.Supervisor("root", [kit.actor(n) for n in "abcd"], strategy=strategy)
    async with otp.open_tree(tree, observe=kit.observe):
        kit.take_log()
        kit["b"].send_nowait(Crash())
        await until(lambda: kit.starts("/b") == 2 and kit["d"].status == "running")
        assert kit.take_log() == [*down("b", reason="Error"), *expected]
    assert kit.log == down("d", "c", "b", "a")


async def test_a_child_starts_only_when_the_one_before_is_ready(kit, autojump_clock):
    specs = [kit.actor(n) for n in "ab"]
    kit.scripts["a"].slow_init = 3
    async with otp.open_tree(otp.Supervisor("root", specs)) as tree:
        assert kit.log == up("a", "b")
        assert trio.current_time() >= 3
        assert states(tree.snapshot()) == {"root": "running", "a": "running", "b": "running"}


async def test_a_failing_init_stops_what_was_started_and_tells_the_cause(kit, autojump_clock):
    specs = [kit.actor(n) for n in "abcd"]
    kit.scripts["c"].fail_init = 1
    inner = otp.Supervisor("inner", specs)
    with pytest.raises(otp.StartFailed) as info:
        async with otp.open_tree(otp.Supervisor("root", [inner]), observe=kit.observe):
            raise AssertionError("must not start")
    assert kit.log == [*up("a", "b"), "init c", *down("b", "a")]
    assert info.value.path == "root/inner"
    cause = info.value.__cause__
    assert isinstance(cause, otp.StartFailed)
    assert cause.path == "root/inner/c"
    assert isinstance(cause.__cause__, ScriptError)
    assert "init of c" in str(info.value)
    assert len(kit.exits("/c")) == 1
    assert not kit.exits("/d")


async def test_a_restart_that_fails_is_tried_again_and_counted(kit, autojump_clock):
    specs = [kit.actor(n) for n in "abc"]
    tree = otp.Supervisor("root", specs, strategy="rest_for_one", intensity=3)
    async with otp.open_tree(tree, observe=kit.observe):
        kit.take_log()
        kit.scripts["b"].fail_init = 2
        kit["a"].send_nowait(Crash())
        await until(lambda: kit["c"].status == "running" and kit.starts("/c") == 2)
        assert kit.take_log() == [
            *down("a", reason="Error"),
            *down("c", "b"),
            *up("a"),
            "init b",
            "init b",
            *up("b", "c"),
        ]


async def test_back_off_grows_and_forgets(kit, autojump_clock):
    backoff = otp.Backoff(initial=1, factor=3, maximum=5, reset_after=60)
    tree = otp.Supervisor("root", [kit.actor("a")], intensity=100, backoff=backoff)
    async with otp.open_tree(tree, observe=kit.observe):
        for _ in range(5):
            await kit["a"].wait_running()
            kit["a"].send_nowait(Crash())
            await wait_all_tasks_blocked()
        await kit["a"].wait_running()
        await trio.sleep(61)
        kit["a"].send_nowait(Crash())
        await wait_all_tasks_blocked()
    delays = [e.delay for e in kit.events if isinstance(e, otp.ChildRestarting)]
    assert delays == [0, 1, 3, 5, 5, 0]


async def test_one_child_in_back_off_does_not_hold_up_another(kit, autojump_clock):
    backoff = otp.Backoff(initial=100, maximum=100)
    tree = otp.Supervisor("root", [kit.actor("a"), kit.actor("b")], intensity=10, backoff=backoff)
    async with otp.open_tree(tree, observe=kit.observe) as running:
        for _ in range(2):
            kit["a"].send_nowait(Crash())
            await wait_all_tasks_blocked()
        assert states(running.snapshot())["a"] == "waiting"
        assert running.snapshot().supervisor == otp.SupervisorStatistics(
            strategy="one_for_one", intensity=10, period=5.0, used=2
        )
        assert "2 of 10 restarts used" in running.snapshot().render()
        begin = trio.current_time()
        kit["b"].send_nowait(Crash())
        await kit["b"].call(Ask(), on_down="wait")
        assert trio.current_time() == begin
        await kit["a"].call(Ask(), on_down="wait", timeout=math.inf)
        assert trio.current_time() == begin + 100


async def test_escalation_is_one_readable_group(kit, autojump_clock):
    inner = otp.Supervisor("inner", [kit.actor("a"), kit.actor("b")], intensity=1, period=5)
    tree = otp.Supervisor(
        "root", [kit.actor("x"), inner, kit.actor("y")], intensity=0, strategy="one_for_all"
    )
    with pytest.raises(otp.RestartLimitReached) as info:
        async with otp.open_tree(tree, observe=kit.observe):
            kit.take_log()
            kit["a"].send_nowait(Crash(ValueError("first")))
            await until(lambda: kit.starts("/a") == 2, poll=0.01)
            kit["a"].send_nowait(Crash(ValueError("second")))
            await trio.sleep_forever()
    [inner_error] = info.value.exceptions
    assert isinstance(inner_error, otp.RestartLimitReached)
    [error] = inner_error.exceptions
    assert repr(error) == "ValueError('second')"
    text = "".join(traceback.format_exception(info.value))
    assert "child 'root/inner/a' ended with error: ValueError('second')" in text
    assert "had already restarted 1 times in the last 0.01 s (limit: 1 in 5 s)" in text
    assert "supervisor 'root' gave up on 'inner'" in text
    # b was stopped by inner, then y and x by root, in reverse order
    assert kit.log[-6:] == down("b", "y", "x")
    gave_up = [(e.path, e.child) for e in kit.events if isinstance(e, otp.SupervisorGaveUp)]
    assert gave_up == [("root/inner", "root/inner/a"), ("root", "root/inner")]


async def test_an_inner_supervisor_is_restarted_as_a_whole(kit, autojump_clock):
    inner = otp.Supervisor("inner", [kit.actor("a", keep=True), kit.actor("b", keep=True)], intensity=0)
    async with otp.open_tree(otp.Supervisor("root", [inner]), observe=kit.observe):
        kit.take_log()
        go = trio.Event()
        kit["b"].send_nowait(Hold(go))
        await wait_all_tasks_blocked()
        kit["b"].send_nowait(Note("kept across the restart of its supervisor"))
        kit["a"].send_nowait(Crash())
        await wait_all_tasks_blocked()
        go.set()
        await kit["b"].call(Ask(), on_down="wait")
        assert kit.log == [
            *down("a", reason="Error"),
            *down("b"),
            *up("a", "b"),
            "note kept across the restart of its supervisor",
        ]


async def test_permanent_children_that_end_normally_escalate_too(kit, autojump_clock):
    with pytest.raises(otp.RestartLimitReached) as info:
        async with otp.open_tree(otp.Supervisor("root", [kit.actor("a")], intensity=0)):
            kit["a"].send_nowait(Quit())
            await trio.sleep_forever()
    assert "ended unexpectedly: normal" in str(info.value.exceptions[0])


@pytest.mark.parametrize("auto", ["any_significant", "all_significant"])
async def test_auto_shutdown(kit, autojump_clock, auto):
    specs = [kit.actor(n, restart="transient", significant=n != "c") for n in "abc"]
    tree = otp.Supervisor("root", specs, auto_shutdown=auto)
    async with otp.open_tree(tree, observe=kit.observe) as running:
        kit["c"].send_nowait(Quit())
        await until(lambda: kit["c"].status == "down")
        kit["a"].send_nowait(Quit())
        if auto == "all_significant":
            await until(lambda: kit["a"].status == "down")
            assert await kit["b"].call(Ask()) == "b:?"
            kit["b"].send_nowait(Quit())
        await running.wait_stopped()
        assert str(kit.exits("root")[-1]).startswith("shutdown: root/")


async def test_group_restart_drops_temporary_and_revives_transient(kit, autojump_clock):
    specs = [kit.actor("a"), kit.actor("t", restart="temporary"), kit.actor("n", restart="transient")]
    async with otp.open_tree(
        otp.Supervisor("root", specs, strategy="one_for_all"), observe=kit.observe
    ) as tree:
        kit["n"].send_nowait(Quit())
        await until(lambda: kit["n"].status == "down")
        kit["a"].send_nowait(Crash())
        await kit["n"].call(Ask(), on_down="wait") if kit["n"].status != "down" else None
        await until(lambda: kit["n"].status == "running")
        assert states(tree.snapshot()) == {"root": "running", "a": "running", "t": "ended", "n": "running"}
        assert kit["t"].status == "down"


async def test_functions_as_children(kit, autojump_clock):
    log = []

    async def plain(name, *, fail=False):
        log.append(name)
        if fail:
            raise OSError(name)
        await trio.sleep_forever()

    async def shaking(*, task_status):
        await trio.sleep(2)
        log.append("ready")
        task_status.started()
        await trio.sleep_forever()

    async def liar(*, task_status):
        return

    async def once():
        log.append("once")

    specs = [
        otp.TaskChild("shaking", shaking, handshake=True),
        otp.TaskChild("plain", functools.partial(plain, "plain")),
        otp.TaskChild("once", once, restart="transient"),
    ]
    async with otp.open_tree(otp.Supervisor("root", specs), observe=kit.observe):
        await wait_all_tasks_blocked()
        assert log == ["ready", "plain", "once"]
        assert kit.exits("/once") == [otp.Normal()]
    assert [str(r) for r in kit.exits("/plain")] == ["shutdown: the block ended"]
    for bad, text in [
        (otp.TaskChild("liar", liar, handshake=True), "returned before it was ready"),
        (otp.TaskChild("late", shaking, handshake=True, start_timeout=1), "not ready within 1 s"),
    ]:
        with pytest.raises(otp.StartFailed, match=text):
            async with otp.open_tree(otp.Supervisor("root", [bad]), observe=kit.observe):
                pass


async def test_errors_while_stopping_are_raised_at_the_end(kit, autojump_clock):
    specs = [kit.actor(n) for n in "abc"]
    kit.scripts["b"].fail_terminate = KeyError("b")
    with pytest.raises(otp.StopFailed) as info:
        async with otp.open_tree(otp.Supervisor("root", specs), observe=kit.observe):
            kit.take_log()
    assert [repr(e) for e in info.value.exceptions] == ["KeyError('b')"]
    assert kit.log == [*down("c"), "end b Shutdown", *down("a")]


async def test_log_event(kit, autojump_clock, caplog):
    caplog.set_level(logging.DEBUG, "durable_actors.otp")
    with pytest.raises(otp.RestartLimitReached):
        async with otp.open_tree(otp.Supervisor("root", [kit.actor("a")], intensity=1)):
            kit["a"].send_nowait(Crash())
            await until(lambda: kit["a"].statistics().processed == 1)
            await kit["a"].wait_running()
            kit["a"].send_nowait(Crash())
            await trio.sleep_forever()
    texts = [(r.levelname, r.getMessage()) for r in caplog.records]
    assert ("WARNING", "root/a: restarting a in 0 s") in texts
    assert any(level == "ERROR" and text.startswith("root: gave up") for level, text in texts)
    assert sum(r.exc_info is not None for r in caplog.records) == 3  # twice a, once root


async def test_the_start_timeout_ends_with_the_start(kit, autojump_clock):
    async with otp.open_tree(otp.Supervisor("root", [kit.actor("a", start_timeout=2)]), observe=kit.observe):
        await trio.sleep(10)
        assert await kit["a"].call(Ask()) == "a:?"
        assert kit.starts("/a") == 1
