"""Partition keys end to end: engines, keepers and reapers together."""

from __future__ import annotations

from typing import Any

import durable_actors as da
import trio
from durable_actors.engine import open_engine
from durable_actors.telemetry import ClaimLost
from tests.engine.kit import Db, until


class Probe:
    """What the steps of a test do, and that no two of a key ran at once."""

    def __init__(self) -> None:
        self.now: dict[str, int] = {}
        self.most = 0
        self.order: list[tuple[str, int]] = []
        self.started: list[int] = []


# Whoever has an advisory lock: the keepers, and now and then a pick that is deciding about keys.
CUT = (
    "select pg_terminate_backend(pid, 5000) from pg_locks where locktype = 'advisory' and objsubid = 1"
    " and database = (select oid from pg_database where datname = current_database())"
)


def keyed(probe: Probe) -> type[da.Machine[dict[str, Any]]]:
    class Keyed(da.Machine[dict[str, Any]], queue="keyed", name="test.Keyed"):
        @da.step(initial=True)
        async def start(self, ctx: da.Context[dict[str, Any]]) -> da.Outcome:
            key = ctx.state["key"]
            probe.now[key] = probe.now.get(key, 0) + 1
            probe.most = max(probe.most, probe.now[key])
            try:
                await trio.lowlevel.checkpoint()
            finally:
                probe.now[key] -= 1
            probe.order.append((key, ctx.state["n"]))
            return da.Done(ctx.attempt)

    return Keyed


def waits(probe: Probe) -> type[da.Machine[dict[str, Any]]]:
    class Waits(da.Machine[dict[str, Any]], queue="waits", name="test.Waits"):
        @da.step(initial=True)
        async def start(self, ctx: da.Context[dict[str, Any]]) -> da.Outcome:
            probe.started.append(ctx.attempt)
            if ctx.attempt == 0:
                await trio.sleep_forever()
            return da.Done(ctx.attempt)

    return Waits


async def test_two_engines_never_run_two_steps_of_a_key_and_keep_its_order(db: Db, registry: object):
    probe = Probe()
    machine = keyed(probe)
    options: dict[str, Any] = {
        "dsn": db.dsn,
        "queues": {"keyed": 8},
        "machines": [machine],
        "poll_interval": 0.02,
    }
    async with open_engine(**options, name="a", node="a") as a, open_engine(**options, name="b", node="b"):
        rows = [{"state": {"key": f"k{n % 5}", "n": n}, "partition_key": f"k{n % 5}"} for n in range(100)]
        ids = await da.insert_many(machine, rows, engine="a")
        with trio.fail_after(30):
            for number in ids:
                assert number is not None
                assert await da.result(number, engine="a") == 0, "no attempt was spent"
        assert probe.most == 1
        for key in {key for key, _ in probe.order}:
            order = [n for each, n in probe.order if each == key]
            assert order == sorted(order)
        assert a.name == "a"
    await until(lambda: db.locks() == 0)


async def test_a_lost_session_runs_the_step_again_at_once(db: Db, registry: object):
    """Cancelled, released with attempt + 1, crashes unchanged, and not after a lease but now."""
    probe = Probe()
    machine = waits(probe)
    async with open_engine(dsn=db.dsn, queues={"waits": 2}, machines=[machine], node="n") as engine:
        lost: list[ClaimLost] = []
        engine.telemetry.subscribe(lambda event: lost.append(event) if isinstance(event, ClaimLost) else None)
        number = await da.insert(machine, state={}, partition_key="k")
        assert number is not None
        await until(lambda: probe.started)
        db.execute(CUT)
        with trio.fail_after(10):
            assert await da.result(number) == 1
        assert db.row(number, "attempt, crashes, status") == (1, 0, "done")
        assert [event.attempt for event in lost] == [0]
        assert "session" in lost[0].reason


async def test_keys_hold_while_sessions_are_cut_again_and_again(db: Db, registry: object):
    """A cut session ends its steps, but their rows stay executing until they have exited: nobody else gets the key."""
    probe = Probe()
    machine = keyed(probe)
    options: dict[str, Any] = {
        "dsn": db.dsn,
        "queues": {"keyed": 8},
        "machines": [machine],
        "poll_interval": 0.02,
    }
    async with open_engine(**options, name="a", node="a"), open_engine(**options, name="b", node="b"):
        rows = [{"state": {"key": f"k{n % 7}", "n": n}, "partition_key": f"k{n % 7}"} for n in range(150)]
        ids = await da.insert_many(machine, rows, engine="a")
        cuts = 0
        with trio.fail_after(40):
            while not db.execute("select bool_and(status = 'done') from durable.gen_durable")[0][0]:
                if cuts < 10:
                    cuts += 1
                    db.execute(CUT)
                await trio.sleep(0.02)
        assert cuts > 2
        assert probe.most == 1
        assert {n for _, n in probe.order} == set(range(150))
        assert len(ids) == 150
        assert db.execute("select max(crashes) from durable.gen_durable") == [(0,)]
    await until(lambda: db.locks() == 0)
