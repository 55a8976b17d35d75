"""`Bench.advance`: delays, deadlines and records move together, leases do not."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import durable_actors as da
import psycopg
import pytest
import trio
from durable_actors.testing import Bench
from durable_actors.testing.clock import parse_span
from tests.kit import PATIENCE
from tests.testing.shop import Checkout, Order, mail


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("3d", 259_200), ("1h30m", 5400), ("90s", 90), ("1.5h", 5400), ("250ms", 0.25), ("2w", 1_209_600),
     (" 1h 5min ", 3900), (7, 7), (timedelta(minutes=2), 120)],
)  # fmt: skip
def test_time_spans(text: Any, seconds: float) -> None:
    assert parse_span(text) == seconds


@pytest.mark.parametrize(
    "text",
    [
        "",
        "3",
        "3 days",
        "d3",
        "-1d",
        "1h-5m",
        -3,
        0,
        "0s",
        "1e3s",
        float("nan"),
        None,
        "9999w",
        "99999999999d",
        "9" * 400 + "s",
    ],
)
def test_what_is_no_time_span(text: Any) -> None:
    with pytest.raises(da.ConfigError, match="by="):
        parse_span(text)


async def test_three_days_pass(durable: Bench) -> None:
    number = await durable.insert(Checkout, state=Order(1))
    await durable.drain()
    before = await durable.now()
    await durable.advance("2d")
    assert (await durable.drain()).ran == ()
    after = await durable.advance("1d")
    assert timedelta(days=3) <= after - before < timedelta(days=3, seconds=PATIENCE)
    assert (await durable.drain()).steps == ["charge"]
    await durable.assert_failed(number, "nobody confirmed the order")
    ended = await durable.inspect(number)
    assert ended.finished_at - ended.inserted_at >= timedelta(days=3)


async def test_delays_and_schedules_move(durable: Bench) -> None:
    later = await durable.insert(mail, args={"to": "x"}, schedule_in=3600)
    at = await durable.insert(mail, args={"to": "x"}, schedule_at=await durable.now() + timedelta(days=7))
    assert (await durable.drain()).ran == ()
    await durable.advance("61m")
    assert [each.id for each in (await durable.drain()).ran] == [later]
    await durable.advance("1w")
    assert [each.id for each in (await durable.drain()).ran] == [at]


async def test_no_time_passes_in_a_drain(durable: Bench) -> None:
    seen = []

    class Soon(da.Machine, name="soon"):
        @da.step
        async def start(self, ctx: da.Context) -> da.Outcome:
            seen.append(await durable.now())
            await trio.sleep(0.01)
            return da.Retry(delay=0.001) if ctx.attempt < 3 else da.Done()

    number = await durable.insert(Soon)
    for _ in range(3):
        await durable.insert(mail, args={"to": "x"})
        drained = await durable.drain()
        assert drained.steps.count("start") == 1
        assert "it is scheduled: due in 0.0 s" in drained.waiting[0].why
        await durable.advance(0.001)
    await durable.drain()
    await durable.assert_done(number)
    assert seen == sorted(seen)
    before = await durable.now()
    assert await durable.now() > before  # it goes on


async def test_time_never_goes_back(durable: Bench) -> None:
    before = await durable.advance("1h")
    with pytest.raises(da.ConfigError):
        await durable.advance(-60)
    with psycopg.connect(durable.dsn) as conn, pytest.raises(psycopg.errors.CheckViolation):
        conn.execute("update durable.bench_clock set ahead = '-1 hour'")
    assert await durable.now() >= before


async def test_leases_do_not_move(durable: Bench) -> None:
    """A step that runs while the clock is advanced keeps its claim."""
    gate = trio.Event()

    class Slow(da.Machine, name="slow"):
        @da.step
        async def start(self, ctx: da.Context) -> da.Outcome:
            await gate.wait()
            return da.Done(ctx.attempt)

    number = await durable.insert(Slow)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(durable.drain)
        with psycopg.connect(durable.dsn, autocommit=True) as conn:
            query = "select lease_expires_at - now() from durable.gen_durable where status = 'executing'"
            with trio.fail_after(PATIENCE):
                while not (rows := conn.execute(query).fetchall()):
                    await trio.sleep(0.005)
            await durable.advance("30d")
            assert timedelta(seconds=30) < rows[0][0] <= timedelta(seconds=60)
            assert await durable.execute_next() is None
        gate.set()
    await durable.assert_done(number, 0)


async def test_an_engine_on_the_same_database_notices(durable: Bench) -> None:
    async with da.open_engine(dsn=durable.dsn, poll_interval=0.05, max_poll_interval=0.05) as engine:
        number = await engine.client.insert(Checkout, state=Order(1))
        later = await engine.client.insert(mail, args={"to": "x"}, schedule_in=86_400)
        with trio.fail_after(PATIENCE):
            while (await durable.inspect(number)).status != "awaiting_signal":
                await trio.sleep(0.01)
        await durable.advance("4d")
        assert await engine.client.result(later, timeout=PATIENCE) == "mailed x"
        with pytest.raises(da.InstanceFailed, match="nobody confirmed"):
            await durable.result(number, timeout=PATIENCE)
