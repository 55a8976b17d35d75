"""A state machine that crashes, slows down, stops and cancels a supervisor, against a model.

The model reads the supervisor's events and the actors' own log: who may start when, in which order,
who must come back, when to give up. It knows the rules, not `_restart.decide`.
"""

from __future__ import annotations

import attrs
import trio
from durable_actors import otp
from hypothesis import HealthCheck, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from tests.otp.guest import Guest
from tests.otp.kit import Crash, Kit, Quit, ScriptError

PERIOD = 80.0
SETTLE = 30.0  # longer than five rounds of slow stops, slow starts and back-off
NAMES = "abcd"


@attrs.define(eq=False)
class TimedKit(Kit):
    times: list[float] = attrs.field(factory=list)

    def observe(self, event: otp.Event) -> None:
        self.times.append(trio.current_time())
        self.events.append(event)


@attrs.define(eq=False)
class Model:
    """What must hold of a trace."""

    kit: TimedKit
    kinds: list[str]
    strategy: str
    intensity: int
    up: set[int] = attrs.field(factory=set)
    open_crashes: set[int] = attrs.field(factory=set)

    def group(self, cause: int) -> list[int]:
        span = {
            "one_for_one": range(cause, cause + 1),
            "rest_for_one": range(cause, len(self.kinds)),
            "one_for_all": range(len(self.kinds)),
        }[self.strategy]
        return [i for i in span if self.kinds[i] != "temporary"]

    def child_events(self) -> list[tuple[float, otp.Event, int | None]]:
        found: list[tuple[float, otp.Event, int | None]] = []
        for at, event in zip(self.kit.times, self.kit.events, strict=True):
            name = event.path.rpartition("/")[2]
            found.append((at, event, NAMES.index(name) if name in NAMES else None))
        return found

    def check_trace(self) -> None:
        up: set[int] = set()
        restarts: list[float] = []
        open_crashes: set[int] = set()
        starting: list[int] = []  # what the last restart still has to start
        stopping: list[int] = []  # whom it has stopped so far
        for at, event, child in self.child_events():
            match event:
                case otp.ChildStarted() if child is not None:
                    assert child not in up, "started twice"
                    if restarts:
                        assert child in starting
                        assert child == min(starting) or self.strategy == "one_for_one", (
                            "started out of order"
                        )
                        starting.remove(child)
                    up.add(child)
                case otp.ChildExited() if child is not None:
                    stopped = child in up and child in starting  # for the restart that was announced
                    up.discard(child)
                    if str(event.reason).startswith("shutdown: restart of"):
                        assert not stopping or child < stopping[-1], "stopped out of order"
                        stopping.append(child)
                    if self.needs_restart(child, event.reason) and not stopped:
                        open_crashes.add(child)
                case otp.ChildRestarting():
                    assert child is not None
                    group = self.group(child)
                    assert event.siblings == tuple(NAMES[i] for i in group)
                    restarts.append(at)
                    assert sum(at - t <= PERIOD for t in restarts) <= self.intensity, "should have given up"
                    open_crashes -= set(group)
                    starting = sorted(set(starting) | set(group))
                    stopping = []
                case otp.SupervisorGaveUp():
                    assert sum(at - t <= PERIOD for t in restarts) + 1 == event.restarts
                    assert event.restarts > self.intensity, "gave up too early"
                    open_crashes.clear()
                case _:
                    pass
        self.up = up
        self.open_crashes = open_crashes

    def needs_restart(self, child: int, reason: otp.ExitReason) -> bool:
        if isinstance(reason, otp.Shutdown):
            return False
        kind = self.kinds[child]
        return kind == "permanent" or (kind == "transient" and isinstance(reason, otp.Error))

    def expected_up(self) -> set[int]:
        """Who runs when all is quiet: the last thing that happened to a child decides."""
        up = set()
        for i, kind in enumerate(self.kinds):
            fate, announced = True, False
            for _, event, child in self.child_events():
                if isinstance(event, otp.ChildRestarting) and NAMES[i] in event.siblings:
                    fate = announced = True
                elif isinstance(event, otp.ChildStarted) and child == i:
                    announced = False
                elif isinstance(event, otp.ChildExited) and child is None:
                    return set()  # the supervisor itself
                elif isinstance(event, otp.ChildExited) and child == i and not announced:
                    # Who goes after a restart was announced, stopped for it or by itself, is started with the others.
                    fate = kind == "permanent" or (
                        kind == "transient" and self.needs_restart(i, event.reason)
                    )
            if fate:
                up.add(i)
        return up


class SupervisorMachine(RuleBasedStateMachine):
    @initialize(
        kinds=st.lists(st.sampled_from(["permanent", "transient", "temporary"]), min_size=1, max_size=4),
        strategy=st.sampled_from(["one_for_one", "rest_for_one", "one_for_all"]),
        intensity=st.integers(0, 4),
        drain=st.booleans(),
    )
    def start(self, kinds, strategy, intensity, drain):
        self.kit = TimedKit()
        self.model = Model(self.kit, kinds, strategy, intensity)
        backoff = otp.Backoff(initial=0.2, maximum=0.5, reset_after=50)
        children = [self.kit.actor(n, restart=k, shutdown=1) for n, k in zip(NAMES, kinds, strict=False)]
        self.spec = otp.Supervisor(
            "root", children, strategy=strategy, intensity=intensity, period=PERIOD, backoff=backoff
        )
        self.error = None
        self.drain = drain
        self.scope = trio.CancelScope()
        self.guest = Guest()
        self.guest.run(self._start)

    async def _start(self):
        self.ended = trio.Event()
        self.ready = trio.Event()
        trio.lowlevel.spawn_system_task(self._tree)
        await self.ready.wait()

    async def _tree(self):
        try:
            with self.scope:
                async with otp.open_tree(
                    self.spec, observe=self.kit.observe, drain_on_cancel=self.drain
                ) as self.tree:
                    self.ready.set()
                    await self.tree.wait_stopped()
        except (otp.RestartLimitReached, otp.StopFailed, ScriptError, ExceptionGroup) as exc:
            self.error = exc
        finally:
            self.ended.set()

    # -- what happens to it

    @precondition(lambda self: not self.over)
    @rule(victims=st.lists(st.tuples(st.integers(0, 3), st.floats(0, 1), st.booleans()), max_size=3))
    def hit(self, victims):
        """Crash or end children, at once or in the middle of each other's restarts; then all is quiet."""
        self.guest.run(self._hit, victims)
        self.guest.run(trio.sleep, SETTLE)
        self.check_quiet()

    async def _hit(self, victims):
        for index, delay, crash in victims:
            await trio.sleep(delay)
            if index < len(self.model.kinds):
                self.kit[NAMES[index]].cast(Crash() if crash else Quit())

    @precondition(lambda self: not self.over)
    @rule(index=st.integers(0, 3), count=st.integers(1, 2))
    def next_inits_fail(self, index, count):
        if index < len(self.model.kinds):
            self.kit.scripts[NAMES[index]].fail_init = count

    @precondition(lambda self: not self.over)
    @rule(index=st.integers(0, 3), init=st.sampled_from([0, 0.1]), end=st.sampled_from([0, 0.1, 2]))
    def slow_down(self, index, init, end):
        if index < len(self.model.kinds):
            script = self.kit.scripts[NAMES[index]]
            script.slow_init, script.slow_terminate = init, end

    @precondition(lambda self: not self.over)
    @rule(seconds=st.sampled_from([1, 50, 200]))
    def time_passes(self, seconds):
        self.guest.run(trio.sleep, seconds)
        self.check_quiet()

    @precondition(lambda self: not self.over)
    @rule(
        victims=st.lists(st.tuples(st.integers(0, 3), st.floats(0, 1), st.booleans()), max_size=2),
        after=st.floats(0, 1),
        cancel=st.booleans(),
    )
    def end(self, victims, after, cancel):
        """Stop or cancel it from outside, perhaps in the middle of restarts."""

        async def end():
            await self._hit(victims)
            await trio.sleep(after)
            if cancel:
                self.scope.cancel()
            else:
                self.tree.request_stop()
            with trio.fail_after(100):
                await self.ended.wait()

        self.guest.run(end)
        self.check_over()
        if self.drain or not cancel:
            self.check_order({index for index, _, _ in victims})

    @precondition(lambda self: self.over)
    @rule()
    def start_again(self):
        """The same tree once more, with the same addresses."""
        for trace in (self.kit.events, self.kit.times, self.kit.log):
            trace.clear()
        for script in self.kit.scripts.values():
            script.fail_init = 0
        self.error = None
        self.scope = trio.CancelScope()
        self.guest.run(self._start)
        self.check_quiet()

    # -- what must hold

    @property
    def over(self):
        return self.ended.is_set()

    def check_quiet(self):
        if self.over:
            self.check_over()
            return
        self.model.check_trace()
        assert not self.model.open_crashes, "a crash that nobody dealt with"
        assert self.model.up == self.model.expected_up()
        alive = {i for i, n in enumerate(NAMES) if n in self.kit.scripts and self.kit.scripts[n].alive}
        assert alive == self.model.up

    def check_over(self):
        self.model.check_trace()
        assert not self.model.up, "a child was left"
        kit = self.kit
        for name, script in kit.scripts.items():
            assert script.alive == 0
            begun = kit.log.count(f"init {name}")
            assert begun <= len(kit.exits(f"/{name}")) <= begun + 1, "each exit is reported once"
            assert kit[name].status == "down"
        assert len(kit.exits("root")) == 1
        gave_up = [e for e in kit.events if isinstance(e, otp.SupervisorGaveUp)]
        assert isinstance(self.error, otp.RestartLimitReached) or not gave_up or self.error is not None

    def check_order(self, victims):
        """An ordered stop: in reverse, except for those that were ending by themselves."""
        stopped = [
            child
            for _, event, child in self.model.child_events()
            if isinstance(event, otp.ChildExited)
            and child not in {None, *victims}
            and str(event.reason).startswith(("shutdown: asked to stop", "shutdown: cancelled from outside"))
        ]
        assert stopped == sorted(stopped, reverse=True)

    def teardown(self):
        if not hasattr(self, "guest"):
            return
        try:
            if not self.over:
                self.guest.run(self._finish)
                self.check_over()
                self.check_order(set())
        finally:
            self.guest.close()

    async def _finish(self):
        self.tree.request_stop()
        with trio.fail_after(100):
            await self.ended.wait()


TestSupervisor = SupervisorMachine.TestCase
TestSupervisor.settings = settings(
    max_examples=60,
    stateful_step_count=12,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
