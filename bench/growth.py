"""10. What a pick of 100 rows costs as the table grows and ages: the statement alone, by the feeder's own cursor."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Generator

import attrs
import psycopg
import trio
from durable_actors._engine.claiming.cursor import PickCursor
from durable_actors._engine.lanes import _PLANS
from durable_actors._postgres.driver import encode
from durable_actors._postgres.driver.connection import PgConn
from durable_actors._store.claim import Owner, pick_instances, read_queue
from durable_actors.machine import step_address

from bench.contest import Figure, Progress, Sample
from bench.meter import on_cpu
from bench.server import Server
from bench.workload import MACHINES, QUEUE, fill

BATCH = 100
PICKS = 40
KNOWN = frozenset({step_address("bench:noop", 1, "perform")})
MACHINES["bench:unknown"] = "start"


async def picks(dsn: str, count: int) -> Sample:
    """Median and worst milliseconds of picks one after the other, each full; and of the server's CPU."""
    owner = Owner("durable", "bench", b"x" * 16, 60.0)
    cursor = PickCursor()
    conn = await PgConn.open(dsn, settings=_PLANS)
    cursor.learn(await read_queue(conn, "durable", QUEUE), known=KNOWN)
    seconds: list[float] = []
    cpu: list[float] = []
    idle: list[float] = []  # picks that claim nothing: they shelve rows of unknown machines
    claimed = 0
    for _ in range(count):
        now = trio.current_time()
        began, busy = time.perf_counter(), on_cpu(conn.pid)
        picked = await pick_instances(
            conn,
            owner,
            queue=QUEUE,
            limit=BATCH,
            known=encode.text_array(sorted(KNOWN)),
            begin=cursor.begin(now, limit=BATCH, known=KNOWN),
            now=now,
        )
        took = time.perf_counter() - began
        cursor.advance(picked, now=trio.current_time(), took=took)
        (seconds if picked.claims else idle).append(took)
        if picked.claims:
            cpu.append(on_cpu(conn.pid) - busy)
        claimed += len(picked.claims)
    conn.close()
    if not seconds:
        seconds = [0.0]
    seconds.sort()
    return {
        "shelve_ms": statistics.median(idle or [0.0]) * 1e3,
        "cpu_ms": statistics.median(cpu or [0.0]) * 1e3,
        "pick_ms": seconds[len(seconds) // 2] * 1e3,
        "best_ms": seconds[0] * 1e3,
        "worst_ms": seconds[-1] * 1e3,
        "claimed": claimed,
    }


@attrs.frozen
class Case:
    name: str
    statements: tuple[str, ...] = ()
    """Run after 10,000 runnable rows are there."""
    rows: int = 10_000
    before: int = 0
    """Claims made and completed beforehand, without vacuum."""
    holds_xmin: bool = False
    unknown: int = 0
    """Rows of a machine that this node does not know, in front."""


def terminal(count: int) -> str:
    return (
        "insert into durable.gen_durable (fsm, step, queue, status, finished_at)"
        f" select 'bench:noop', 'perform', '{QUEUE}', 'done', now() from generate_series(1, {count}) n"
    )


def cases(*, quick: bool) -> list[Case]:
    small = 10 if quick else 1
    future = (
        "insert into durable.gen_durable (fsm, step, queue, priority, eligible_at) select 'bench:noop', 'perform',"
        f" '{QUEUE}', -5, now() + make_interval(hours => 24, secs => n) from generate_series(1, {100_000 // small}) n"
    )
    executing = (
        "insert into durable.gen_durable (fsm, step, queue, status, claim_id, locked_by, lease_expires_at)"
        f" select 'bench:noop', 'perform', '{QUEUE}', 'executing', gen_random_uuid(), 'someone',"
        " now() + interval '1 hour' from generate_series(1, 2000) n"
    )
    unknown = (
        "insert into durable.gen_durable (fsm, step, queue, eligible_at) select 'bench:unknown', 'start',"
        f" '{QUEUE}', now() - interval '1 hour' from generate_series(1, {100_000 // small}) n"
    )
    return [
        *(Case(f"{10**n:,} runnable", rows=10**n) for n in ((4, 5) if quick else (4, 5, 6))),
        Case("1,000 runnable", rows=1_000),
        Case(f"{1_000_000 // small:,} terminal", (terminal(1_000_000 // small),)),
        Case(f"{100_000 // small:,} far-future rows, more urgent", (future,)),
        Case("2,000 executing", (executing,)),
        Case(f"behind {100_000 // small:,} rows of an unknown machine", (unknown,), unknown=100_000 // small),
        Case(f"after {100_000 // small:,} claims without vacuum", before=100_000 // small),
        Case("the same with a transaction that holds xmin", before=100_000 // small, holds_xmin=True),
    ]


@contextlib.contextmanager
def snapshot(dsn: str, *, held: bool) -> Generator[None]:
    """A transaction that keeps its snapshot, or nothing."""
    if not held:
        yield
        return
    with psycopg.connect(dsn) as connection:
        connection.execute("set transaction isolation level repeatable read")
        connection.execute("select count(*) from durable.nodes")
        yield
        connection.rollback()


def measure(server: Server, case: Case) -> Sample:
    with server.database() as dsn, psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("alter table durable.gen_durable set (autovacuum_enabled = off)")
        with snapshot(dsn, held=case.holds_xmin):
            if case.before:
                fill(dsn, "bench:noop", case.before)
                trio.run(picks, dsn, case.before // BATCH)
                connection.execute(
                    "update durable.gen_durable set status = 'done', finished_at = now(), locked_by = null,"
                    " lease_expires_at = null where status = 'executing'"
                )
            _insert(connection, case.rows)
            for statement in case.statements:
                connection.execute(statement)  # type: ignore[arg-type]
            if not case.before:
                connection.execute("analyze durable.gen_durable")
            # Picks take rows of unknown machines out of the index, once; then they cost nothing.
            shelving = trio.run(picks, dsn, case.unknown // BATCH)["shelve_ms"] if case.unknown else 0.0
            sample = trio.run(picks, dsn, min(PICKS, case.rows // BATCH))
    return {**sample, "shelve_ms": shelving}


def _insert(connection: psycopg.Connection, rows: int) -> None:
    connection.execute(
        "insert into durable.gen_durable (fsm, step, queue, state)"
        f" select 'bench:noop', 'perform', '{QUEUE}', '{{\"n\": 0}}' from generate_series(1, {rows}) n"
    )


def run(server: Server, progress: Progress, *, quick: bool) -> list[Figure]:
    samples: dict[str, list[Sample]] = {}
    for number in range(1):
        for case in cases(quick=quick):
            progress(f"growth: {case.name} ({number + 1})")
            server.settle()
            samples.setdefault(case.name, []).append(measure(server, case))
    return [Figure.of("growth", name, "pick of 100", found) for name, found in samples.items()]
