"""Cancel every step of start, restart, stop and call, one at a time.

An instrument counts the steps that Trio's scheduler takes and cancels the scenario before step k, for
every k from the first to the last. Whatever is cut off: all actors that began have ended, each exit was
reported once, nobody hangs (the autojump clock turns a hang into a failure), and Cancelled arrives.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable

import attrs
import pytest
import trio
from durable_actors import otp
from tests.kit import until
from tests.otp.kit import Ask, Crash, CrashCall, Hold, Ignore, Kit, Note, ScriptError
from trio.testing import MockClock

Scenario = Callable[[Kit, bool], Awaitable[None]]


@attrs.define(eq=False)
class CancelAt(trio.abc.Instrument):
    """Cancels `scope` before step number `at`."""

    at: int
    scope: trio.CancelScope
    steps: int = 0

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self.steps += 1
        if self.steps == self.at:
            self.scope.cancel()


def walk(scenario: Scenario, *, drain: bool, check: Callable[[Kit], None] = lambda kit: None) -> int:
    """Run `scenario` once per step, cancelled there. Returns how many steps it has."""
    at = 1
    while True:
        kit = Kit()
        scope = trio.CancelScope()
        instrument = CancelAt(at, scope)

        async def main(kit: Kit = kit, scope: trio.CancelScope = scope) -> None:
            with trio.fail_after(10_000), scope:
                try:
                    await scenario(kit, drain)
                except* (ScriptError, otp.StartFailed, otp.PoolClosed):
                    pass  # given up on, or it came when everything was ending: the owner is told

        trio.run(main, clock=MockClock(autojump_threshold=0), instruments=[instrument])
        verify(kit)
        check(kit)
        if instrument.steps < at:
            assert not scope.cancelled_caught
            return at
        # Cancelled may come too late to be caught only at the very end of the scenario.
        assert scope.cancelled_caught or instrument.steps - at < 12, f"Cancelled was lost at step {at}"
        at += 1


def verify(kit: Kit) -> None:
    for script in kit.scripts.values():
        assert script.alive == 0, f"{script.name} was left running"
    for address in kit.addresses.values():
        assert address.status in ("down", "new")
        stats = address.statistics()
        assert (stats.unanswered, stats.waiting_senders, stats.depth) == (0, 0, 0)
    began = Counter(entry.split()[1] for entry in kit.log if entry.startswith("init"))
    exits = Counter(e.path.split("/")[-1] for e in kit.events if isinstance(e, otp.ChildExited))
    started = Counter(e.path.split("/")[-1] for e in kit.events if isinstance(e, otp.ChildStarted))
    for name in kit.scripts:
        # An incarnation that was cancelled before its first step has no init, but it has an exit.
        assert began[name] <= exits[name] <= began[name] + 1
        assert started[name] <= exits[name]


def spec(kit: Kit, strategy: str = "rest_for_one") -> otp.Supervisor:
    inner = otp.Supervisor("inner", [kit.actor("b"), kit.actor("c", keep=True)])
    return otp.Supervisor("root", [kit.actor("a"), inner, kit.actor("d")], strategy=strategy)


async def start_and_stop(kit: Kit, drain: bool) -> None:
    async with otp.open_tree(spec(kit), observe=kit.observe, drain_on_cancel=drain):
        pass


async def slow_start_and_stop(kit: Kit, drain: bool) -> None:
    tree = spec(kit)
    for script in kit.scripts.values():
        script.slow_init = script.slow_terminate = 1
    async with otp.open_tree(tree, observe=kit.observe, drain_on_cancel=drain):
        kit["c"].send_nowait(Note("x"))
        await trio.sleep(1)


async def restart(kit: Kit, drain: bool) -> None:
    tree = spec(kit)
    for script in kit.scripts.values():
        script.slow_terminate = 1
    async with otp.open_tree(tree, observe=kit.observe, drain_on_cancel=drain):
        kit["a"].send_nowait(Crash())
        await until(lambda: kit.starts("/d") == 2, poll=0.5)


async def failing_restart(kit: Kit, drain: bool) -> None:
    async with otp.open_tree(spec(kit, "one_for_all"), observe=kit.observe, drain_on_cancel=drain):
        kit.scripts["b"].fail_init = 1
        kit["d"].send_nowait(Crash())
        await until(lambda: kit.starts("/d") == 2, poll=0.5)


async def give_up(kit: Kit, drain: bool) -> None:
    tree = otp.Supervisor("root", [kit.actor("a"), kit.actor("b")], intensity=0)
    async with otp.open_tree(tree, observe=kit.observe, drain_on_cancel=drain):
        kit["a"].send_nowait(Crash())
        await trio.sleep_forever()


async def calls(kit: Kit, drain: bool) -> None:
    """Answered, crashing, unanswered, queued and waiting calls, from tasks beside the tree."""
    tree = otp.Supervisor("root", [kit.actor("a", capacity=2), kit.actor("b", keep=True)], intensity=9)

    async def caller(address: otp.Address, msg: object, on_down: str) -> None:
        with contextlib.suppress(otp.ActorDown, otp.ActorDied, otp.CallTimeout):
            await address.call(msg, timeout=2, on_down=on_down)

    async with otp.open_tree(tree, observe=kit.observe, drain_on_cancel=drain):
        go = trio.Event()
        async with trio.open_nursery() as nursery:
            kit["a"].send_nowait(Hold(go))
            for address in (kit["a"], kit["b"]):
                for on_down in ("fail", "wait"):
                    for msg in (Ask(), Ignore(), CrashCall(), Ask()):
                        nursery.start_soon(caller, address, msg, on_down)
            await trio.sleep(0.5)
            go.set()


async def pool(kit: Kit, drain: bool) -> None:
    ended: list[object] = []
    tasks = otp.Pool("pool", slots=3, on_exit=lambda task, reason: ended.append(task.key))
    tree = otp.Supervisor("root", [kit.actor("a"), otp.PoolChild(tasks, shutdown=2)])
    started = 0
    try:
        async with otp.open_tree(tree, observe=kit.observe, drain_on_cancel=drain):
            for i in range(6):
                await tasks.wait_free()
                tasks.start_nowait(trio.sleep, i % 3, key=i)
                started += 1
            tasks.get(5).cancel("enough")
            await tasks.drain(timeout=1)
    finally:
        assert len(tasks) == 0
        assert sorted(ended) == list(range(started))


SCENARIOS = [start_and_stop, slow_start_and_stop, restart, failing_restart, give_up, calls, pool]


@pytest.mark.parametrize("drain", [True, False], ids=["drain", "at once"])
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda s: s.__name__)
def test_cancel_at_every_step(scenario, drain):
    assert walk(scenario, drain=drain) > 30


def test_a_drained_stop_is_in_order_wherever_it_is_cancelled():
    def in_order(kit: Kit) -> None:
        # The scenario starts a, b, c, d once; what came up goes down in reverse, never two at a time.
        ups = [entry.split()[1] for entry in kit.log if entry.startswith("up")]
        ends = [entry for entry in kit.log if entry.startswith(("end", "down"))]
        expected = [f"{what} {name}" for name in reversed(ups) for what in ("end", "down")]
        assert [" ".join(entry.split()[:2]) for entry in ends] == expected

    walk(slow_start_and_stop, drain=True, check=in_order)


def test_the_walk_notices_a_hang():
    async def hang(kit: Kit, drain: bool) -> None:
        await trio.sleep_forever()

    with pytest.raises(trio.TooSlowError):
        walk(hang, drain=True)
