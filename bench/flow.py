"""Flow control, every promise as a ratio in one run: `python -m bench.flow`; `--quick` in a minute, with small sizes.

Unused limits beside none, a million throttled rows beside free work, one hot key under eight pickers, ten thousand keys
with a limit each, how exactly a rate is kept, how many of K slots are in use, and whether a flood delays another key.
What unused limits cost beside a commit that has none: `make bench-ab BASE=REF`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import attrs
import click
import durable_actors as da
import psycopg
import trio
from durable_actors._engine.lanes import lanes
from durable_actors._limits import Limit
from durable_actors._postgres.driver import encode
from durable_actors._postgres.driver.connection import PgConn
from durable_actors._store.claim import Owner, PickFrom, pick_instances
from durable_actors._store.limits import declare_limits, read_thawed
from durable_actors.machine import step_address
from rich.console import Console
from rich.table import Table

from bench import fair
from bench.contest import Sample
from bench.flow_slots import rate_kept, slots_in_use
from bench.meter import Meter
from bench.server import Server, open_server
from bench.workload import BEST, QUEUE, drain, fill

SETTINGS: Final = lanes(6, session_dsn=None, keepalive=60)["claim"].settings
KNOWN: Final = encode.text_array([step_address("bench:noop", 1, "perform")])
PICKERS: Final = 8
BATCH: Final = 10
API: Final = {"api": da.Limit(1, per=3600)}
FREE: Final = {"api": da.Limit(1_000_000, burst=1_000_000)}
"""A limit that lets everything go: what its bookkeeping costs."""
THROTTLED = """
insert into durable.gen_durable (fsm, step, queue, rate_limit, hold, limited_by)
select 'bench:noop', 'perform', %s, 'api', 3, 'api' from generate_series(1, %s)
"""
WAITS = "insert into durable.limit_waits (key, queue, next_at) values ('api', %s, now() + interval '1 hour')"
# A table that grows is locked for a moment, too ("extend"): that is no lock of a row or a key.
BLOCKED = """
select count(*) from pg_stat_activity
 where datname = current_database() and wait_event_type = 'Lock' and wait_event <> 'extend' and pid <> pg_backend_pid()
"""


@attrs.frozen
class Line:
    """A promise, and what was measured."""

    promise: str
    goal: str
    value: float
    met: bool
    note: str = ""


def at_most(promise: str, goal: float, value: float, note: str = "") -> Line:
    return Line(promise, f"≤ {goal:g}", value, value <= goal, note)


def at_least(promise: str, goal: float, value: float, note: str = "") -> Line:
    return Line(promise, f"≥ {goal:g}", value, value >= goal, note)


def drained(
    server: Server, count: int, *, throttled: int = 0, columns: Mapping[str, str], **options: Any
) -> Sample:
    """Run so many jobs in an engine with the best settings, beside throttled ones."""
    with server.database() as dsn:
        if throttled:
            throttle(dsn, throttled)
        fill(dsn, "bench:noop", count, **columns)
        server.settle()
        meter = Meter(dsn, server.postmaster)

        async def go() -> Sample:
            return await drain(meter, dsn, count=count, queue=BEST, alone=False, **options)

        return trio.run(go)


def throttle(dsn: str, rows: int) -> None:
    """So many rows that wait under one key."""
    with psycopg.connect(dsn, autocommit=True) as db:
        db.execute(THROTTLED, [QUEUE, rows])
        db.execute(WAITS, [QUEUE])
        db.execute("vacuum analyze durable.gen_durable")

    async def declare() -> None:
        conn = await PgConn.open(dsn)
        await declare_limits(conn, "durable", {"api": Limit(1, per=3600)}, node="bench")
        conn.close()

    trio.run(declare)


def pairs(rounds: int, one: Callable[[], Sample], other: Callable[[], Sample]) -> list[tuple[Sample, Sample]]:
    """Both in turn, so that each pair had the same minute; the first of a pair takes turns, too."""
    found: list[tuple[Sample, Sample]] = []
    for turn in range(rounds):
        if turn % 2:
            second = other()
            found.append((one(), second))
        else:
            first = one()
            found.append((first, other()))
    return found


def ratio(found: Sequence[tuple[Sample, Sample]], *names: str) -> float:
    """How many times the second side has what the first one has: the median of the pairs."""
    return statistics.median(
        sum(b[name] for name in names) / sum(a[name] for name in names) for a, b in found
    )


def unused(server: Server, *, quick: bool) -> list[Line]:
    count, rounds = (3_000, 3) if quick else (30_000, 5)
    found = pairs(
        rounds,
        lambda: drained(server, count, columns={}),
        lambda: drained(server, count, columns={}, limits=API),
    )
    return [
        at_most("unused limits: CPU per job", 1.02, ratio(found, "worker_us", "server_us")),
        at_most("unused limits: statements per job", 1.02, ratio(found, "statements")),
    ]


def beside_throttled(server: Server, *, quick: bool) -> list[Line]:
    rows, count, rounds = (20_000, 3_000, 3) if quick else (1_000_000, 20_000, 3)
    found = pairs(
        rounds,
        lambda: drained(server, count, columns={}),
        lambda: drained(server, count, columns={}, throttled=rows),
    )
    cost = [trio.run(pick_seconds, server, each) for each in (0, rows)]
    return [
        at_most(f"a pick beside {rows:,} throttled rows", 2.0, cost[1] / cost[0]),
        at_least("free work beside them: jobs/s", 0.9, ratio(found, "per_second")),
    ]


async def pick_seconds(server: Server, throttled: int) -> float:
    """How long a pick of free rows takes, the median."""
    with server.database() as dsn:
        if throttled:
            await trio.to_thread.run_sync(throttle, dsn, throttled)
        await trio.to_thread.run_sync(fill, dsn, "bench:noop", 3_000)
        conn = await PgConn.open(dsn, settings=SETTINGS)
        took: list[float] = []
        for _ in range(200):
            began = time.perf_counter()
            claimed = await pick(conn, QUEUE, BATCH)
            took.append(time.perf_counter() - began)
            assert len(claimed) == BATCH
        conn.close()
    return statistics.median(took[20:])


async def pick(conn: PgConn, queue: str, limit: int, extras: Sequence[int] = ()) -> Sequence[int]:
    """Claim from the head, and throttled rows by id."""
    begin = PickFrom([0], ["-infinity"], [0], extras=list(extras))
    owner = Owner("durable", "bench", b"hash", 60.0)
    picked = await pick_instances(conn, owner, queue=queue, limit=limit, known=KNOWN, begin=begin, now=0.0)
    return [claim.id for claim in picked.claims]


def hot_key(server: Server, *, quick: bool) -> list[Line]:
    """Claims a second by eight nodes: all of one key, or each of its own."""
    rows, rounds = (4_000, 3) if quick else (40_000, 5)
    waited: list[int] = []
    found = pairs(
        rounds,
        lambda: {"per_second": trio.run(claims_per_second, server, rows, False, waited)},
        lambda: {"per_second": trio.run(claims_per_second, server, rows, True, waited)},
    )
    return [
        at_least("one hot key, 8 nodes: claims/s beside 8 keys", 0.5, ratio(found, "per_second")),
        at_most("waits for a lock, of the samples meanwhile", 0.0, float(sum(waited))),
    ]


async def claims_per_second(server: Server, rows: int, hot: bool, waited: list[int]) -> float:
    """Eight pickers claim all rows; on one key, or each on its own, in a queue of its own."""
    with server.database() as dsn:
        columns = {"rate_limit": "'api:hot'" if hot else f"'api:' || n %% {PICKERS}"}
        await trio.to_thread.run_sync(lambda: fill(dsn, "bench:noop", rows, **columns))
        with psycopg.connect(dsn, autocommit=True) as db:
            if not hot:
                db.execute("update durable.gen_durable set queue = queue || split_part(rate_limit, ':', 2)")
            db.execute("vacuum analyze durable.gen_durable")
        conn = await PgConn.open(dsn)
        await declare_limits(conn, "durable", {"api": Limit(1_000_000, burst=1_000_000)}, node="bench")
        conn.close()
        left = rows
        done = trio.Event()

        async def picker(n: int) -> None:
            nonlocal left
            mine = await PgConn.open(dsn, settings=SETTINGS)
            queue = QUEUE if hot else f"{QUEUE}{n}"
            share = left if hot else rows // PICKERS
            extras: Sequence[int] = ()
            while left > 0 and share > 0:
                claimed = await pick(mine, queue, 100, extras)
                left -= len(claimed)
                share -= 0 if hot else len(claimed)
                if not claimed:  # somebody else decides about the key: look again, as a feeder does
                    extras = (await read_thawed(mine, "durable", queue, limit=100)).ids
                    await trio.sleep(0.002)
            mine.close()
            if left <= 0:
                done.set()

        async def watch() -> None:
            with psycopg.connect(dsn, autocommit=True) as db:
                while not done.is_set():
                    found = await trio.to_thread.run_sync(lambda: db.execute(BLOCKED).fetchone())
                    waited.append(found[0] if found else 0)
                    await trio.sleep(0.02)

        began = time.perf_counter()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch)
            for n in range(PICKERS):
                nursery.start_soon(picker, n)
            await done.wait()
            took = time.perf_counter() - began
        return rows / took


def many_keys(server: Server, *, quick: bool) -> list[Line]:
    count, keys, rounds = (5_000, 1_000, 3) if quick else (50_000, 10_000, 3)
    found = pairs(
        rounds,
        lambda: drained(server, count, columns={}),
        lambda: drained(server, count, columns={"rate_limit": f"'api:' || n %% {keys}"}, limits=FREE),
    )
    speed = statistics.median(limited["per_second"] for _, limited in found)
    return [
        at_least(f"{keys:,} keys with a limit each: jobs/s", 10_000, speed),
        at_least("… beside jobs without limits", 0.3, ratio(found, "per_second"), "no goal of the contract"),
    ]


def kept_rate(server: Server, *, quick: bool) -> list[Line]:
    seconds = 10.0 if quick else 60.0
    found = trio.run(rate_kept, server, 100, 10, seconds)
    return [
        at_most(f"a rate of 100/s over {seconds:g} s: off by", 0.02, abs(found.rate / 100 - 1)),
        at_most("claims in any window beyond burst + R·t", 0.0, found.excess),
    ]


def used_slots(server: Server, *, quick: bool) -> list[Line]:
    lines: list[Line] = []
    for slots in (1, 10, 100) if quick else (1, 10, 100, 1_000):
        found = trio.run(slots_in_use, server, slots, 3.0 if quick else 10.0)
        lines.append(at_least(f"{slots:,} slots: in use under backlog", 0.9, found.used))
        lines.append(at_most(f"{slots:,} slots: the most that had one", slots, found.most))
    return lines


def fairness(server: Server, *, quick: bool) -> list[Line]:
    rows = 20_000 if quick else 1_000_000
    with server.database() as dsn:
        trio.run(fair.flood, dsn, rows)  # it fails if somebody is not in the next pick
    return [at_most(f"a flood of {rows:,}: others wait for so many picks", 1, 1)]


BENCHES: Final[Mapping[str, Callable[..., list[Line]]]] = {
    "unused": unused,
    "throttled": beside_throttled,
    "hot": hot_key,
    "keys": many_keys,
    "rate": kept_rate,
    "slots": used_slots,
    "fair": fairness,
}


@click.command()
@click.argument("names", nargs=-1, type=click.Choice([*BENCHES]))
@click.option("--quick", is_flag=True, help="Small sizes: a minute.")
@click.option("--check", is_flag=True, help="A missed goal is an error.")
def main(*, names: tuple[str, ...], quick: bool, check: bool) -> None:
    table = Table("promise", "goal", "measured", "", "", box=None)
    missed = 0
    with open_server() as server:
        with server.database():  # it migrates, which no part can do that runs in a loop of its own
            pass
        for name in names or tuple(BENCHES):
            click.echo(f"{name} …", err=True)
            for line in BENCHES[name](server, quick=quick):
                missed += not line.met
                table.add_row(
                    line.promise, line.goal, f"{line.value:,.3g}", "ok" if line.met else "MISSED", line.note
                )
    Console(width=120).print(table)
    if check and missed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
