"""Real runs, in which the engine makes every move: no checker reports a violation."""

from __future__ import annotations

from pathlib import Path

import attrs
import durable_actors as da
import psycopg
import pytest
import trio
from durable_actors._store.moves import MOVES, OUTCOMES
from durable_actors.machine import FULL, isolated_registry
from tests.engine.kit import QUICK, make_node, pick
from tests.invariants.audit import install_audit
from tests.invariants.check import check, read_history
from tests.invariants.effect_log import EffectLog
from tests.invariants.history import History
from tests.invariants.journal import JournalWatch, recording
from tests.invariants.shop import define
from tests.kit import PATIENCE
from tests.support.commands import retry_instance

LEASE = 3.0
SETTINGS = {**QUICK, "lease_ttl": LEASE, "reap_interval": 0.2, "drain_timeout": 0.05, "pool_size": 4}
LIMITS = {"press": da.Limit(slots=1)}
MARGIN = 10.0
"""The machine is loaded."""
NOT_HERE = {
    "dropped",
    "asked",
    "compensating",
    "proceeded",
    "approved",
    "rejected",
    "timed_out",
    "rebuilt",
    "snapshot",
    "requested",
    "restored",
    "wakeup",
    "cancelled",
    "crashed",
    "reaped",
    "renewed",
    "revived",
    "hastened",
    "recounted",
    "shelved",
    "unfit",
    "deleted",
}
"""Moves that the first run does not make."""


@pytest.fixture
def log(tmp_path: Path):
    log = EffectLog(tmp_path / "effects.jsonl")
    yield log
    log.close()


@pytest.fixture
def shop(log: EffectLog):
    with isolated_registry():
        yield define(log)


@pytest.fixture
def everything_recorded():
    with recording(FULL):
        yield


def read(dsn: str, log: EffectLog, **options) -> History:
    known = {"lease": LEASE, "reap_interval": 0.2, "margin": MARGIN}
    return read_history(dsn, [log.path], **(known | options))


async def work(dsn: str, log: EffectLog, shop) -> None:
    """Two nodes do everything once. The second one stops in the middle of a step."""
    async with da.open_client(dsn) as client:
        ids = await insert_all(
            client, shop
        )  # all at once: keyed rows meet in one window of a pick, and are held
    async with da.open_engine(dsn=dsn, name="a", limits=LIMITS, **SETTINGS) as a:
        pack, sleeper = ids["pack"], ids["sleeper"]
        async with da.open_engine(dsn=dsn, name="b", limits=LIMITS, **SETTINGS) as b:
            for n in range(3):
                await a.client.signal(pack, "part", n, dedup_key=f"part-{n}")
                await a.client.signal(pack, "noise")
                log.note("sent", id=pack, name="part", dedup=f"part-{n}")
            await b.client.signal(pack, "approved")
            log.note("sent", id=pack, name="approved")
            await wait_for(
                dsn,
                "select step = 'wake' and status = 'executing' from durable.gen_durable where id = %s",
                sleeper,
            )
            await b.client.signal(sleeper, "noise")
        for number in ids["all"]:
            with trio.fail_after(PATIENCE):
                await outcome(a.client, number)


async def insert_all(client: da.Client, shop) -> dict:
    # First: they meet in one window of a pick, too, and all but one are throttled.
    prints = [await client.insert(shop.Print, state={}) for _ in range(3)]
    orders = [
        await client.insert(
            shop.Order, state={"fails": fails, "join": join}, unique_key="order", unique_scope=[]
        )
        for fails, join in (([0, 1], "all"), ([0, 9, 0], 2), ([9], "any_failed"), ([], "all"))
    ]
    orders.append(await client.insert(shop.Order, state={"fails": [0, 0, 9, 0], "graph": True}))
    keyed = [
        await client.insert(shop.count, args={"n": n}, partition_key=f"k{n % 2}", priority=n % 3)
        for n in range(8)
    ]
    once = [
        number
        for _ in range(3)
        for number in [await client.insert(shop.ship, args={}, unique_key="once", on_duplicate="return")]
    ]
    keyed.append(await client.insert(shop.Order, state={"fails": []}, partition_key="k0"))
    keyed += [await client.insert(shop.glance, args={}, partition_key=key) for key in ("k0", None)]
    pack = await client.insert(shop.Pack, state={}, unique_key="pack")
    failing = await client.insert(shop.Sleeper, state={})
    sleeper = await client.insert(shop.Sleeper, state={"long": True})
    await client.pause(sleeper)
    await client.resume(sleeper)
    everything = {*prints, *orders, *keyed, *once, pack, failing}
    return {"pack": pack, "sleeper": sleeper, "all": sorted(everything)}


async def outcome(client: da.Client, number: int) -> object:
    try:
        return await client.result(number)
    except (da.InstanceFailed, da.NoTarget) as exc:  # the other node has deleted it (`keep=0`)
        return exc


async def wait_for(dsn: str, query: str, *args: object) -> None:
    def look() -> bool:
        row = connection.execute(query, args).fetchone()
        return row is not None and bool(row[0])

    with psycopg.connect(dsn, autocommit=True) as connection, trio.fail_after(PATIENCE):
        while not look():
            await trio.sleep(0.02)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("level", [0, 2, 4])
async def test_a_run_of_everything_breaks_nothing(durable_dsn, log, shop, level):
    install_audit(durable_dsn)
    watch = JournalWatch(durable_dsn)
    with recording(level):
        await work(durable_dsn, log, shop)
    assert "\n".join(watch.problems()) == ""
    history = read(durable_dsn, log)
    assert "\n".join(map(str, check(history))) == ""
    moves = {move for _, move in history.moves}
    assert {move.name for move in MOVES} - moves <= NOT_HERE, history.tally
    assert history.tally["outcomes"] == sum(move in OUTCOMES for _, move in history.moves) > 30
    assert history.tally["runs"] > 30
    assert any(run.threaded for run in history.runs.values())
    assert any(change.takes for changes in history.signal_changes.values() for change in changes)


@pytest.mark.timeout(120)
async def test_lost_claims_renewals_and_operators_break_nothing(durable_dsn, log, shop, everything_recorded):
    """A worker claims and dies; a step outlives its first lease; a failed instance is retried, a done one deleted."""
    install_audit(durable_dsn)
    watch = JournalWatch(durable_dsn)
    async with (
        da.open_client(durable_dsn) as client,
        make_node(durable_dsn, lease_ttl=0.3) as dead,
    ):
        number = await client.insert(shop.ship, args={})
        [claim] = await pick(dead)
        assert claim.id == number
        async with da.open_engine(dsn=durable_dsn, name="a", **SETTINGS | {"lease_ttl": 0.6}):
            assert await client.result(number, timeout=PATIENCE) == "shipped"
            sleeper = await client.insert(shop.Sleeper, state={"long": True})
            failed = await client.insert(shop.ship, args={"fails": 5})
            assert isinstance(await outcome(client, failed), da.InstanceFailed)
            async with dead.pool.acquire(dead.lane("client")) as conn:
                assert await retry_instance(conn, "durable", failed)
            assert isinstance(await outcome(client, failed), da.InstanceFailed)
            renewed = "select count(*) > 0 from durable_audit.change where instance = %s"
            renewed += " and (before).status = 'executing' and (after).status = 'executing'"
            await wait_for(durable_dsn, renewed, sleeper)
    assert "\n".join(watch.problems()) == ""
    with psycopg.connect(durable_dsn, autocommit=True) as connection:
        connection.execute("delete from durable.gen_durable where id = %s", [number])
    history = read(durable_dsn, log, retention=0.0)
    assert "\n".join(map(str, check(history))) == ""
    moves = {move for _, move in history.moves}
    assert moves >= {"renewed", "reaped", "revived", "deleted", "released"}
    assert {each.invariant for each in check(attrs.evolve(history, receipts=()))} == {"I8"}
