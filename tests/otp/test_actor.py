"""The life of an actor: handshake, loop, batches, timers, terminate."""

from __future__ import annotations

import math

import pytest
import trio
from durable_actors import otp
from tests.kit import until
from tests.otp.kit import Ask, Crash, Hold, Ignore, Note, Quit, ScriptError, root
from trio.testing import wait_all_tasks_blocked


async def test_the_whole_life(kit, autojump_clock):
    async with otp.open_tree(root(kit.actor("a"), kit.actor("b")), observe=kit.observe):
        assert kit.take_log() == ["init a", "up a", "init b", "up b"]
    assert kit.log == ["end b Shutdown", "down b", "end a Shutdown", "down a"]
    assert [str(r) for r in kit.exits("/a")] == ["shutdown: the block ended"]


async def test_a_stop_handles_what_is_queued_and_the_current_message(kit, autojump_clock):
    async with otp.open_tree(root(kit.actor("a", shutdown=10)), observe=kit.observe) as tree:
        a, go = kit["a"], trio.Event()
        a.send_nowait(Hold(go))
        a.send_nowait(Note("queued"))
        await wait_all_tasks_blocked()
        tree.request_stop()
        await wait_all_tasks_blocked()
        assert a.status == "stopping"
        with pytest.raises(otp.ActorDown, match="stopping"):
            a.send_nowait(Note("too late"))
        go.set()
    assert kit.log[2:] == ["note queued", "end a Shutdown", "down a"]
    assert a.status == "down"


async def test_a_call_queued_before_the_stop_is_answered(kit, autojump_clock):
    async with otp.open_tree(root(kit.actor("a", shutdown=10)), observe=kit.observe) as tree:
        a, go = kit["a"], trio.Event()
        a.send_nowait(Hold(go))
        await wait_all_tasks_blocked()
        async with trio.open_nursery() as nursery:

            async def caller():
                assert await a.call(Ask("last")) == "a:last"

            nursery.start_soon(caller)
            await wait_all_tasks_blocked()
            tree.request_stop()
            go.set()


async def test_a_stop_answers_the_calls_that_nobody_will(kit, autojump_clock):
    async with (
        otp.open_tree(root(kit.actor("a")), observe=kit.observe) as tree,
        trio.open_nursery() as nursery,
    ):

        async def caller():
            with pytest.raises(otp.ActorDied, match="shutdown: asked to stop"):
                await kit["a"].call(Ignore(), timeout=math.inf)

        nursery.start_soon(caller)
        await wait_all_tasks_blocked()
        tree.request_stop()


async def test_nothing_is_accepted_between_crash_and_exit(kit, autojump_clock):
    async with otp.open_tree(root(kit.actor("a")), observe=kit.observe):
        kit.scripts["a"].slow_terminate = 3
        kit["a"].send_nowait(Crash())
        await wait_all_tasks_blocked()
        assert "end a Error" in kit.log
        with pytest.raises(otp.ActorDown, match="stopping"):
            kit["a"].send_nowait(Note("would be lost"))
        await until(lambda: kit.starts("a") == 2)


async def test_shutdown_time_then_cancelled_then_terminate(kit, autojump_clock):
    async with otp.open_tree(root(kit.actor("a", shutdown=7)), observe=kit.observe):
        kit["a"].send_nowait(Hold(trio.Event()))
        await wait_all_tasks_blocked()
        begin = trio.current_time()
    assert trio.current_time() - begin == 7
    assert kit.log[2:] == ["end a Shutdown", "down a"]
    [reason] = kit.exits("/a")
    assert isinstance(reason, otp.Shutdown)
    assert reason.killed


async def test_brutal_means_no_terminate(kit, autojump_clock):
    async with otp.open_tree(root(kit.actor("a", shutdown="brutal")), observe=kit.observe):
        kit["a"].send_nowait(Hold(trio.Event()))
        await wait_all_tasks_blocked()
    assert kit.log == ["init a", "up a"]
    [reason] = kit.exits("/a")
    assert isinstance(reason, otp.Shutdown)
    assert reason.killed


async def test_terminate_has_the_shutdown_time_too(kit, autojump_clock):
    spec = kit.actor("a", shutdown=3)
    kit.scripts["a"].slow_terminate = 100
    with pytest.raises(otp.StopFailed) as info:
        async with otp.open_tree(root(spec), observe=kit.observe):
            begin = trio.current_time()
    assert trio.current_time() - begin == 3
    assert isinstance(info.value.exceptions[0], otp.TerminateTimeout)
    assert "down a" not in kit.log


async def test_a_crash_runs_terminate_with_the_error(kit, autojump_clock):
    async with otp.open_tree(root(kit.actor("a")), observe=kit.observe):
        kit["a"].send_nowait(Crash())
        await until(lambda: kit.starts("a") == 2)
        assert kit.log[2:] == ["end a Error", "down a", "init a", "up a"]
        assert kit["a"].status == "running"


async def test_neither_error_hides_the_other(kit, autojump_clock):
    spec = kit.actor("a")
    kit.scripts["a"].fail_terminate = KeyError("terminate")
    with pytest.raises(otp.RestartLimitReached) as info:
        async with otp.open_tree(root(spec, intensity=0), observe=kit.observe):
            kit["a"].send_nowait(Crash())
            await trio.sleep_forever()
    [group] = info.value.exceptions
    assert isinstance(group, ExceptionGroup)
    assert [type(e) for e in group.exceptions] == [ScriptError, KeyError]


async def test_stop_is_the_normal_end(kit, autojump_clock):
    async with otp.open_tree(root(kit.actor("a", restart="transient")), observe=kit.observe) as tree:
        kit["a"].send_nowait(Quit())
        kit["a"].send_nowait(Note("queued"))
        await until(lambda: kit["a"].status == "down")
        assert kit.log[2:] == ["note queued", "end a Normal", "down a"]
        assert kit.exits("/a") == [otp.Normal()]
        assert [n.state for n in tree.snapshot().children] == ["ended"]


async def test_own_loop_with_batches(autojump_clock):
    batches = []

    class Batcher(otp.Actor[int | Ask]):
        async def run(self):
            while True:
                batch = await self.mailbox.receive_many(4)
                batches.append([m for m in batch if isinstance(m, int)])
                for msg in batch:
                    if isinstance(msg, Ask):
                        msg.reply("done")

    a = otp.Address[int | Ask]("a")
    async with otp.open_tree(root(otp.ActorChild(a, Batcher))):
        for i in range(9):
            a.send_nowait(i)
        assert await a.call(Ask()) == "done"
        for i in range(9, 12):
            a.send_nowait(i)
    assert batches == [[0, 1, 2, 3], [4, 5, 6, 7], [8], [9, 10, 11]]


async def test_own_loop_with_async_for_and_nowait(autojump_clock):
    seen = []

    class Reader(otp.Actor[int]):
        async def run(self):
            async for msg in self.mailbox:
                seen.append(msg)
                with pytest.raises((trio.WouldBlock, otp.MailboxClosed)):
                    while True:
                        seen.append(self.mailbox.receive_nowait())
            seen.append("end")

    a = otp.Address[int]("a")
    async with otp.open_tree(root(otp.ActorChild(a, Reader))):
        for i in range(3):
            a.send_nowait(i)
        await wait_all_tasks_blocked()
        a.send_nowait(3)
    assert seen == [0, 1, 2, 3, "end"]


async def test_helpers_die_with_the_actor_and_it_with_them(kit, autojump_clock):
    log = []

    class Parent(otp.Actor[str]):
        async def init(self):
            self.nursery.start_soon(self.helper)

        async def helper(self):
            try:
                await trio.sleep(5)
                raise LookupError("helper")
            finally:
                log.append("helper ends")

        async def terminate(self, reason):
            log.append(str(reason))

    a = otp.Address[str]("a")
    async with otp.open_tree(root(otp.ActorChild(a, Parent)), observe=kit.observe):
        await trio.sleep(6)
        assert log == ["helper ends", "error: LookupError('helper')"]
    assert log[2:] == ["helper ends", "shutdown: the block ended"]


async def test_timers(autojump_clock):
    seen = []

    class Ticker(otp.Actor[str]):
        async def init(self):
            self.t0 = trio.current_time()
            self.send_every(2, "tick")
            self.send_after(5, "once")
            self.send_after(1, "never").cancel()

        async def handle(self, msg):
            seen.append((msg, trio.current_time() - self.t0))
            if msg == "once":
                await trio.sleep(4.5)  # ticks at 6 and 8 come due meanwhile

    a = otp.Address[str]("a", capacity=1)
    async with otp.open_tree(root(otp.ActorChild(a, Ticker))):
        await trio.sleep(13)
    assert seen == [
        ("tick", 2),
        ("tick", 4),
        ("once", 5),
        ("tick", 9.5),
        ("tick", 9.5),
        ("tick", 10),
        ("tick", 12),
    ]


async def test_periodic_does_not_drift_and_skips(autojump_clock):
    ticks = []
    begin = trio.current_time()
    async for tick in otp.periodic(1.0):
        ticks.append((tick, trio.current_time() - begin))
        await trio.sleep(2.5 if tick == 2 else 0.4)
        if tick >= 6:
            break
    assert ticks == [(0, 0), (1, 1), (2, 2), (4, 4.5), (5, 5), (6, 6)]
    with pytest.raises(otp.SpecError):
        otp.periodic(0)


async def test_a_busy_actor_lets_others_run(autojump_clock):
    class Loop(otp.Actor[int]):
        async def handle(self, msg):
            self.address.send_nowait(msg + 1)
            if msg > 100_000:
                raise AssertionError("nobody else ever ran")

    a = otp.Address[int]("a")
    async with otp.open_tree(root(otp.ActorChild(a, Loop, shutdown="brutal"))):
        a.send_nowait(0)
        for _ in range(5):
            await trio.lowlevel.checkpoint()


async def test_an_address_has_one_actor_at_a_time(kit, autojump_clock):
    spec = kit.actor("a")
    async with otp.open_tree(root(spec), observe=kit.observe):
        with pytest.raises(otp.StartFailed) as info:
            async with otp.open_tree(otp.Supervisor("second", [spec])):
                raise AssertionError("must not start")
        assert isinstance(info.value.__cause__, otp.SpecError)
        assert await kit["a"].call(Ask()) == "a:?"


async def test_a_tree_can_be_started_again(kit, autojump_clock):
    spec = root(kit.actor("a"))
    for _ in range(2):
        async with otp.open_tree(spec, observe=kit.observe):
            assert await kit["a"].call(Ask()) == "a:?"
        assert kit["a"].status == "down"


async def test_an_actor_without_handle_says_so(autojump_clock):
    a = otp.Address[str]("a")
    with pytest.raises(otp.RestartLimitReached) as info:
        async with otp.open_tree(root(otp.ActorChild(a, otp.Actor), intensity=0)):
            a.send_nowait("x")
            await trio.sleep_forever()
    assert "overrides neither" in str(info.value.exceptions[0])


async def test_a_tick_that_waits_for_room_does_not_fail_a_stop(autojump_clock):
    class Busy(otp.Actor[str]):
        async def init(self):
            self.send_every(1, "tick")

        async def handle(self, msg):
            await trio.sleep(10)

    a = otp.Address[str]("a", capacity=1)
    async with otp.open_tree(root(otp.ActorChild(a, Busy, shutdown=60))):
        await trio.sleep(5)
        assert a.statistics().waiting_senders == 1


async def test_a_stop_reaches_every_reader(autojump_clock):
    class Two(otp.Actor[str]):
        async def run(self):
            async with trio.open_nursery() as nursery:
                for _ in range(2):
                    nursery.start_soon(self.read)

        async def read(self):
            async for _ in self.mailbox:
                pass

    a = otp.Address[str]("a")
    async with otp.open_tree(root(otp.ActorChild(a, Two, shutdown=60))):
        await wait_all_tasks_blocked()
        begin = trio.current_time()
    assert trio.current_time() == begin
