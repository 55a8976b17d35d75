"""The primary dies and its standby takes over: what was acknowledged is there, and the engine goes on by itself.

Two servers of the test's own on this machine; the DSN names both and asks for the one that can be written to.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import LiteralString

import durable_actors as da
import psycopg
import pytest
import trio
from durable_actors.machine import isolated_registry
from durable_actors.telemetry import OutcomeStale, StepCommitted
from tests.chaos.cluster import Cluster, multi_host, open_pair
from tests.engine.kit import Gate, Run, running
from tests.kit import PATIENCE, until

pytestmark = [pytest.mark.usefixtures("registry"), pytest.mark.slow]


@pytest.fixture
def registry():
    with isolated_registry() as found:
        yield found


@pytest.fixture
def pair() -> Iterator[tuple[Cluster, Cluster]]:
    with open_pair() as clusters:
        yield clusters


def restarts(run: Run) -> list[tuple[str, int]]:
    return [(node.name, node.restarts) for node in run.engine.snapshot().walk() if node.restarts]


class Ledger:
    """What the server has acknowledged, and nothing else."""

    def __init__(self) -> None:
        self.inserted: list[int] = []
        self.signalled: list[tuple[int, str]] = []
        self.unknown = 0
        self.refused = 0
        self.stop = False

    async def send(self, run: Run, waits: type[da.Machine]) -> None:
        """Insert and signal as fast as the server answers; whoever gets an error does not repeat the call."""
        number = 0
        while not self.stop:
            number += 1
            try:
                target = await run.engine.client.insert(waits, state={"n": number})
                assert target is not None
                self.inserted.append(target)
                await run.engine.client.signal(target, "go", number)
                self.signalled.append((target, str(number)))
            except da.CommitUnknown:
                self.unknown += 1
            except da.StoreUnavailable:
                self.refused += 1
                await trio.sleep(0.01)


def define(gate: Gate, claims: list[str]) -> tuple[type[da.Machine], type[da.Machine]]:
    class Waits(da.Machine, name="waits"):
        @da.step
        async def start(self, ctx):
            claims.append(ctx.claim_id)
            return da.Await("go", then=self.end)

        @da.step
        async def end(self, ctx):
            return da.Done([signal.payload for signal in ctx.awaited])

    class Holds(da.Machine, name="holds"):
        @da.step
        async def start(self, ctx):
            claims.append(ctx.claim_id)
            await gate.wait()
            return da.Done(f"{ctx.attempt}")

    return Waits, Holds


async def test_what_was_acknowledged_survives_and_the_engine_goes_on(pair):
    primary, standby = pair
    gate, ledger = Gate(), Ledger()
    claims: list[str] = []
    waits, holds = define(gate, claims)
    # One connection per purpose would hide it: the pool replaces all connections of the old server.
    async with running(multi_host(pair), heartbeat_interval=0.2, reap_interval=0.5) as run:
        held = await run.insert(holds)
        keyed = await run.insert(holds, partition_key="k")
        await gate.wait_entered(2)
        async with trio.open_nursery() as nursery:
            for _ in range(4):
                nursery.start_soon(ledger.send, run, waits)
            await until(lambda: len(ledger.signalled) >= 100)
            primary.kill()
            told = {event.id for event in run.events.all(StepCommitted) if event.status == "done"}
            await until(lambda: ledger.refused)
            await trio.to_thread.run_sync(standby.promote)
            survivors = standby_rows(standby)
            after = len(ledger.signalled)
            await until(lambda: len(ledger.signalled) >= after + 100)
            ledger.stop = True
        gate.open()
        await run.ended(held)
        await run.ended(keyed)
        for number, _ in ledger.signalled:
            await run.ended(number)
        assert restarts(run) == []
    rows = standby_rows(standby)
    assert told <= {number for number, (status, _) in survivors.items() if status == "done"}, "I1"
    assert set(ledger.inserted) <= rows.keys()
    assert {number: rows[number] for number, _ in ledger.signalled} == {
        number: ("done", f"[{payload}]") for number, payload in ledger.signalled
    }
    # Its lease was still good, so the step that ran through it all was not run again.
    assert rows[held] == ("done", '"0"')
    # The lock of a key went down with the old server, so that one was cancelled, and run anew.
    assert rows[keyed][0] == "done"
    assert len(claims) == len(set(claims)), "claim ids never repeat"
    assert leftovers(standby) == (0, 0)


def standby_rows(cluster: Cluster) -> dict[int, tuple[str, str]]:
    with psycopg.connect(cluster.dsn(), autocommit=True) as conn:
        query = "select id, status::text, result::text from durable.gen_durable"
        return {number: (status, result) for number, status, result in conn.execute(query)}


def leftovers(cluster: Cluster) -> tuple[int, int]:
    """Claims in nobody's hands, and locks."""
    with psycopg.connect(cluster.dsn(), autocommit=True) as conn:
        executing = "select count(*) from durable.gen_durable where status = 'executing'"
        locks = "select count(*) from pg_locks where locktype = 'advisory'"
        return tuple(conn.execute(query).fetchone()[0] for query in (executing, locks))  # type: ignore[index,return-value]


def wait_replayed(primary: Cluster, standby: Cluster) -> None:
    """Until the standby has all that the primary has written."""
    with (
        psycopg.connect(primary.dsn(), autocommit=True) as here,
        psycopg.connect(standby.dsn(), autocommit=True) as there,
    ):
        written = here.execute("select pg_current_wal_lsn()").fetchone()
        deadline = time.monotonic() + PATIENCE
        while there.execute("select pg_last_wal_replay_lsn() >= %s", written).fetchone() != (True,):
            assert time.monotonic() < deadline
            time.sleep(0.01)


async def test_a_standby_from_the_past_takes_over():
    """Replication was broken, so claims and inserts that had been acknowledged are gone: nothing can bring them back.

    What the server of the past holds is run, by new claims; the outcome of a claim that it never gave changes nothing.
    """
    gates = [Gate(), Gate()]
    runs: list[tuple[int, str]] = []

    class Twice(da.Machine, name="twice"):
        @da.step
        async def start(self, ctx):
            runs.append((ctx.id, ctx.claim_id))
            turn = len(runs)
            await gates[turn - 1].wait()
            return da.Done(turn)

    with open_pair(synchronous=False) as pair:
        primary, standby = pair
        async with running(multi_host(pair)) as run:
            queue = "update durable.gen_durable set eligible_at = now()"
            await run.insert(Twice, schedule_in=3600)
            wait_replayed(primary, standby)
            standby.stop()
            execute(primary, queue)
            await gates[0].wait_entered()
            lost = await run.insert(Twice, schedule_in=3600)
            primary.kill()
            standby.start()
            await trio.to_thread.run_sync(standby.promote)
            execute(standby, queue)
            await gates[1].wait_entered()
            gates[0].open()
            await run.events.wait(OutcomeStale)
            gates[1].open()
            [(number, first), (again, second)] = runs
            row = await run.ended(number)
            with pytest.raises(da.NoTarget):
                await run.engine.client.inspect(lost)
            assert restarts(run) == []
    assert (again, row.status, row.result) == (number, "done", 2)
    assert first != second


def execute(cluster: Cluster, statement: LiteralString) -> None:
    with psycopg.connect(cluster.dsn(), autocommit=True) as conn:
        conn.execute(statement)
