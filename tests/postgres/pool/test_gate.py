"""The back-off before a server that lets nobody in: one knocks, the others wait for the verdict."""

import pytest
import trio
import trio.testing
from durable_actors._postgres.pool.gate import FIRST_DELAY, LONGEST_DELAY, Gate, connect_delay
from durable_actors.errors import ConfigError, StoreUnavailable
from hypothesis import given, strategies as st


@given(st.integers(1, 10_000), st.floats(0, 1))
def test_delay_is_bounded_and_grows(failures, jitter):
    delay = connect_delay(failures, jitter=jitter)
    assert FIRST_DELAY / 2 <= delay <= LONGEST_DELAY
    assert connect_delay(failures + 1, jitter=jitter) >= delay


def test_delay_doubles():
    delays = [connect_delay(n, jitter=0) for n in range(1, 9)]
    assert delays == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0])
    assert connect_delay(1, jitter=1) == pytest.approx(0.05)


class Door:
    """Stands for PgConn.open: counts the attempts, takes its time, fails while it is shut."""

    def __init__(self):
        self.shut = True
        self.knocks: list[float] = []

    async def attempt(self):
        self.knocks.append(trio.current_time())
        await trio.sleep(0.01)
        if self.shut:
            raise StoreUnavailable("shut")
        return "connection"


@pytest.fixture
def door():
    return Door()


@pytest.fixture
def gate():
    return Gate(lambda: 0.0)


async def test_open_gate_lets_everybody_through_at_once(autojump_clock, gate, door, nursery):
    door.shut = False
    for _ in range(5):
        nursery.start_soon(gate.connect, door.attempt)
    await trio.testing.wait_all_tasks_blocked()
    assert len(door.knocks) == 5


async def test_a_first_failure_is_told_at_once(autojump_clock, gate, door):
    start = trio.current_time()
    with pytest.raises(StoreUnavailable, match="shut"):
        await gate.connect(door.attempt)
    assert trio.current_time() - start == pytest.approx(0.01)
    assert gate.failures == 1


async def test_an_outage_is_no_storm(autojump_clock, gate, door):
    """A hundred callers that try again at once, for a minute: a knock per pause, shared by all."""
    refused = 0

    async def caller():
        nonlocal refused
        while True:
            try:
                await gate.connect(door.attempt)
            except StoreUnavailable:
                refused += 1

    with trio.move_on_after(60):
        async with trio.open_nursery() as nursery:
            for _ in range(100):
                nursery.start_soon(caller)
    first_minute = len(door.knocks) - 100  # all came at once before anything was known
    assert 12 <= first_minute <= 20
    assert refused >= 100 * first_minute


async def test_nobody_waits_longer_than_the_pause_and_a_connect(autojump_clock, gate, door):
    for _ in range(10):
        start = trio.current_time()
        with pytest.raises(StoreUnavailable):
            await gate.connect(door.attempt)
        assert trio.current_time() - start <= LONGEST_DELAY + 0.02


async def test_failures_that_were_under_way_together_count_as_one(autojump_clock, gate, door, nursery):
    async def caller():
        with pytest.raises(StoreUnavailable):
            await gate.connect(door.attempt)

    for _ in range(8):
        nursery.start_soon(caller)
    await trio.sleep(0.02)
    assert gate.failures == 1


async def test_success_opens_the_gate_for_all(autojump_clock, gate, door, nursery):
    with pytest.raises(StoreUnavailable):
        await gate.connect(door.attempt)
    door.shut = False
    got = []

    async def caller():
        got.append(await gate.connect(door.attempt))

    for _ in range(5):
        nursery.start_soon(caller)
    await trio.sleep(0.05)
    assert len(door.knocks) == 1  # the pause
    await trio.sleep(0.1)
    assert got == ["connection"] * 5
    assert gate.failures == 0


async def test_a_cancelled_knocker_is_replaced(autojump_clock, gate, door, nursery):
    with pytest.raises(StoreUnavailable):
        await gate.connect(door.attempt)
    door.shut = False
    first = trio.CancelScope()
    got = []

    async def knocker():
        with first:
            await gate.connect(door.attempt)

    async def other():
        got.append(await gate.connect(door.attempt))

    nursery.start_soon(knocker)
    await trio.testing.wait_all_tasks_blocked()
    nursery.start_soon(other)
    await trio.testing.wait_all_tasks_blocked()
    first.cancel()
    await trio.sleep(0.2)
    assert got == ["connection"]


async def test_other_errors_pass_and_do_not_count(autojump_clock, gate):
    async def broken():
        raise ConfigError("dsn")

    with pytest.raises(ConfigError):
        await gate.connect(broken)
    assert gate.failures == 0


def test_only_news_of_the_present_generation_counts(gate):
    gate.suspect(0)
    assert gate.generation == 1
    gate.suspect(0)  # opened before the failover that is known already
    assert gate.generation == 1
    gate.suspect(1)
    assert gate.generation == 2
