"""Sending and calling: back-pressure, deadlines, and every way an actor can be away."""

from __future__ import annotations

import math

import pytest
import trio
from durable_actors import otp
from tests.kit import until
from tests.otp.kit import Ask, Crash, CrashCall, Hold, Ignore, Note, Quit, root
from trio.testing import wait_all_tasks_blocked


async def test_send_and_call_in_order(kit, autojump_clock):
    async with otp.open_tree(root(kit.actor("a")), observe=kit.observe):
        a = kit["a"]
        await a.send(Note("1"))
        a.send_nowait(Note("2"))
        assert a.cast(Note("3"))
        assert await a.call(Ask("x")) == "a:x"
        assert kit.log[2:] == ["note 1", "note 2", "note 3"]
        assert a.statistics().processed == 4


async def test_back_pressure_is_visible(kit, autojump_clock):
    async with otp.open_tree(root(kit.actor("a", capacity=2)), observe=kit.observe):
        a, go = kit["a"], trio.Event()
        await a.send(Hold(go))
        await wait_all_tasks_blocked()
        a.send_nowait(Note("1"))
        await trio.sleep(2)
        a.send_nowait(Note("2"))
        await trio.sleep(3)
        with pytest.raises(trio.WouldBlock):
            a.send_nowait(Note("3"))
        assert not a.cast(Note("3"))
        with pytest.raises(otp.CallTimeout):
            await a.send(Note("4"), timeout=1)
        stats = a.statistics()
        assert (stats.depth, stats.capacity, stats.dropped, stats.processed) == (2, 2, 1, 1)
        assert stats.oldest_age == 6
        async with trio.open_nursery() as nursery:
            for text in "567":
                nursery.start_soon(a.send, Note(text))
            await wait_all_tasks_blocked()
            assert a.statistics().waiting_senders == 3
            go.set()
        await a.call(Ask())
        assert sorted(kit.log[2:]) == [f"note {i}" for i in (1, 2, 5, 6, 7)]
        assert kit.log[2:4] == ["note 1", "note 2"]
        assert a.statistics().oldest_age == 0


async def test_a_cancelled_sender_sends_nothing_and_wakes_the_next(kit, autojump_clock):
    async with otp.open_tree(root(kit.actor("a", capacity=1)), observe=kit.observe):
        a, go = kit["a"], trio.Event()
        a.send_nowait(Hold(go))
        await wait_all_tasks_blocked()
        a.send_nowait(Note("1"))
        async with trio.open_nursery() as nursery:
            scope = trio.CancelScope()

            async def doomed():
                with scope:
                    await a.send(Note("2"))

            nursery.start_soon(doomed)
            await wait_all_tasks_blocked()
            nursery.start_soon(a.send, Note("3"))
            await wait_all_tasks_blocked()
            scope.cancel()
            go.set()
        await a.call(Ask())
        assert kit.log[2:] == ["note 1", "note 3"]


async def test_call_times_out_and_a_late_reply_is_counted(kit, autojump_clock):
    kept = []

    class Slow(otp.Actor[Ask]):
        async def handle(self, msg):
            kept.append(msg)

    a = otp.Address[Ask]("slow")
    async with otp.open_tree(root(otp.ActorChild(a, Slow))):
        with pytest.raises(otp.CallTimeout, match="'slow' did not answer Ask within 2 s") as info:
            await a.call(Ask(), timeout=2)
        assert isinstance(info.value, trio.TooSlowError)
        assert not kept[0].wanted
        assert kept[0].reply("late") is False
        assert a.statistics().late_replies == 1
        with pytest.raises(RuntimeError, match="make a new object"):
            await a.call(kept[0])
        async with trio.open_nursery() as nursery:

            async def again():
                assert await a.call(ask) == "now"

            ask = Ask()
            nursery.start_soon(again)
            await wait_all_tasks_blocked()
            assert a.statistics().unanswered == 1
            assert kept[1] is ask
            assert ask.wanted
            assert ask.reply("now") is True
            assert ask.reply("twice") is False
        assert a.statistics().late_replies == 2


async def test_a_call_whose_caller_left_the_queue_is_not_handled(kit, autojump_clock):
    async with otp.open_tree(root(kit.actor("a")), observe=kit.observe):
        a, go = kit["a"], trio.Event()
        a.send_nowait(Hold(go))
        ask = Ask()
        with pytest.raises(otp.CallTimeout):
            await a.call(ask, timeout=1)
        go.set()
        assert await a.call(Ask("live")) == "a:live"
        assert ask not in kit.scripts["a"].taken
        assert a.statistics().withdrawn == 1
        assert await a.call(ask) == "a:?"  # withdrawn: the object may be used again


async def test_reply_error_and_deferred_reply(autojump_clock):
    class Deferring(otp.Actor[Ask]):
        async def handle(self, msg):
            if msg.text == "bad":
                msg.reply_error(KeyError("bad"))
            else:
                self.nursery.start_soon(self.later, msg)

        async def later(self, msg):
            await trio.sleep(3)
            msg.reply("later")

    a = otp.Address[Ask]("a")
    async with otp.open_tree(root(otp.ActorChild(a, Deferring))):
        with pytest.raises(KeyError):
            await a.call(Ask("bad"))
        assert await a.call(Ask("good")) == "later"


async def test_a_dying_actor_fails_its_calls_at_once(kit, autojump_clock):
    async with otp.open_tree(root(kit.actor("a")), observe=kit.observe):
        a, found = kit["a"], []
        kit.scripts["a"].slow_terminate = 4

        async def caller(msg):
            with pytest.raises((otp.ActorDied, otp.ActorDown)) as info:
                await a.call(msg, timeout=math.inf)
            found.append((type(msg).__name__, info.value, trio.current_time()))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(caller, Ignore())
            await wait_all_tasks_blocked()
            begin = trio.current_time()
            error = ValueError("why")
            nursery.start_soon(caller, CrashCall(error))
            await wait_all_tasks_blocked()
        found.sort()
        assert [(n, type(e), t - begin) for n, e, t in found] == [
            ("CrashCall", otp.ActorDied, 0),
            ("Ignore", otp.ActorDied, 0),
        ]
        assert "'a' ended while it worked on CrashCall: error: ValueError('why')" in str(found[0][1])
        assert found[1][1].__cause__ is error
        await until(lambda: kit.starts("a") == 2)


@pytest.mark.parametrize("keep", [True, False])
async def test_queued_calls_when_the_actor_dies(kit, autojump_clock, keep):
    spec = kit.actor("a", keep=keep)
    async with otp.open_tree(root(spec), observe=kit.observe):
        a, go, found = kit["a"], trio.Event(), {}

        async def caller(on_down):
            try:
                found[on_down] = await a.call(Ask(on_down), on_down=on_down)
            except otp.ActorDown as exc:
                found[on_down] = exc

        async with trio.open_nursery() as nursery:
            a.send_nowait(Hold(go))
            a.send_nowait(Crash())
            await wait_all_tasks_blocked()
            nursery.start_soon(caller, "fail")
            nursery.start_soon(caller, "wait")
            await wait_all_tasks_blocked()
            go.set()
        assert isinstance(found["fail"], otp.ActorDown)
        assert found["wait"] == "a:wait"
        asked = [m.text for m in kit.scripts["a"].taken if isinstance(m, Ask)]
        assert asked == ["wait"]  # the failed one was not begun, then or later


@pytest.mark.parametrize("keep", [True, False])
async def test_messages_across_a_restart(kit, autojump_clock, keep):
    backoff = otp.Backoff(initial=5)
    async with otp.open_tree(root(kit.actor("a", keep=keep), backoff=backoff), observe=kit.observe) as tree:
        a = kit["a"]
        a.send_nowait(Crash())
        await until(lambda: kit.starts("a") == 2)
        for text in (Crash(), Note("queued behind the crash")):
            a.send_nowait(text)
        await until(lambda: a.status == "restarting")
        if keep:
            a.send_nowait(Note("sent while down"))
        else:
            with pytest.raises(otp.ActorDown, match=r"restarting.*ScriptError"):
                a.send_nowait(Note("sent while down"))
            with pytest.raises(otp.ActorDown):
                await a.send(Note("sent while down"))
            assert not a.cast(Note("sent while down"))
        [node] = tree.snapshot().children
        assert node.state == "waiting"
        assert node.mailbox is not None
        assert node.mailbox.depth == (2 if keep else 0)
        with pytest.raises(otp.ActorDown):
            await a.call(Ask())
        assert await a.call(Ask("back"), on_down="wait", timeout=10) == "a:back"
        notes = [entry for entry in kit.log if entry.startswith("note")]
        assert notes == (["note queued behind the crash", "note sent while down"] if keep else [])
        assert a.statistics().dropped == (0 if keep else 2)


async def test_down_for_good(kit, autojump_clock):
    a_spec = kit.actor("a", restart="temporary", keep=True)
    a = kit["a"]
    assert a.status == "new"
    a.send_nowait(Note("before the start"))
    with pytest.raises(otp.ActorDown, match="'a' is new"):
        await a.call(Ask())
    async with otp.open_tree(root(a_spec), observe=kit.observe):
        async with trio.open_nursery() as nursery:

            async def waiter():
                with pytest.raises(otp.ActorDown, match="down"):
                    await a.call(Ask(), on_down="wait", timeout=math.inf)

            a.send_nowait(Quit())
            nursery.start_soon(waiter)
        assert a.status == "down"
        with pytest.raises(otp.ActorDown, match=r"'a' is down .last exit: normal."):
            a.send_nowait(Note("x"))
        with pytest.raises(otp.ActorDown):
            await a.wait_running()
    assert "note before the start" in kit.log


async def test_waiting_senders_are_told_when_the_actor_goes(kit, autojump_clock):
    async with otp.open_tree(root(kit.actor("a", capacity=1, restart="temporary")), observe=kit.observe):
        a, go = kit["a"], trio.Event()
        a.send_nowait(Hold(go))
        await wait_all_tasks_blocked()
        a.send_nowait(Crash())

        async def sender():
            with pytest.raises(otp.ActorDown):
                await a.send(Note("never read"))

        async def caller():
            with pytest.raises(otp.ActorDown):
                await a.call(Ask(), timeout=math.inf)

        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(sender)
                nursery.start_soon(caller)
            await wait_all_tasks_blocked()
            go.set()
        assert a.statistics().unanswered == 0
        assert a.statistics().waiting_senders == 0


async def test_an_actor_cannot_wait_for_itself(kit, autojump_clock):
    class Selfish(otp.Actor[Note]):
        async def handle(self, msg):
            await me.call(msg)

    me = otp.Address[Note]("me")
    with pytest.raises(otp.RestartLimitReached) as info:
        async with otp.open_tree(root(otp.ActorChild(me, Selfish), intensity=0)):
            me.send_nowait(Note("x"))
            await trio.sleep_forever()
    assert "calls itself" in str(info.value.exceptions[0])


@pytest.mark.parametrize("capacity", [0, -1, 1.5])
def test_capacity_is_checked(capacity):
    with pytest.raises(otp.SpecError, match="'a': capacity"):
        otp.Address("a", capacity=capacity)


async def test_none_is_a_message_like_any_other(autojump_clock):
    seen = []

    class Nothing(otp.Actor[None]):
        async def handle(self, msg):
            seen.append(msg)

    a = otp.Address[None]("a")
    async with otp.open_tree(root(otp.ActorChild(a, Nothing))):
        a.send_nowait(None)
        await a.send(None)
    assert seen == [None, None]
