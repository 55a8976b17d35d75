"""19. Pick, commit, signal, `keep=0` delete and the janitor's batch, on tables of 10³ to 10⁶ rows (`--rows`: 10⁷).

The table holds finished rows, a tenth as many parked ones, and a tenth as many unread signals; what is measured works
on other rows beside them. The server's CPU of one connection, the median of its statements.
"""

from __future__ import annotations

import statistics
from collections.abc import Awaitable, Callable, Sequence

import click
import psycopg
import trio
from durable_actors import Done
from durable_actors._engine.claiming.cursor import PickCursor
from durable_actors._engine.committing.transition import transition
from durable_actors._engine.lanes import lanes
from durable_actors._postgres.driver import encode
from durable_actors._postgres.driver.connection import PgConn
from durable_actors._store.claim import Owner, pick_instances, read_queue
from durable_actors._store.commit import commit_outcomes
from durable_actors._store.retention import Ages, delete_ended
from durable_actors._store.rows import Claim
from durable_actors._store.signal import plan_signal, send_signals
from durable_actors.machine import step_address

from bench.contest import Figure, Progress, Sample
from bench.meter import on_cpu
from bench.retention import CHUNK, finished
from bench.server import Server, open_server
from bench.workload import QUEUE, brief, fill, noop

SETTINGS = lanes(6, session_dsn=None, keepalive=60)["claim"].settings
OWNER = Owner("durable", "bench", b"x" * 16, 60.0)
SPECS = {spec.name: spec for spec in (noop.__durable__, brief.__durable__)}
KNOWN = frozenset(step_address(name, 1, "perform") for name in SPECS)
BATCH, TIMES, WARM = 100, 40, 5
AGES = Ages(done=7 * 86400.0, cancelled=None, failed=None, inserted=0.0)
SIZES = (1_000, 100_000, 1_000_000)
QUICK = (1_000, 20_000)


def crowd(connection: psycopg.Connection, rows: int) -> None:
    """So many rows that nobody works on, and unread signals of some."""
    finished(connection, rows, "1 day")
    for done in range(0, rows // 10, CHUNK):
        connection.execute(
            "with parked as (insert into durable.gen_durable (fsm, step, queue, status, awaits, inbox)"
            f" select 'bench:noop', 'perform', '{QUEUE}', 'awaiting_signal', '{{never}}', true"
            f" from generate_series(1, {min(CHUNK, rows // 10 - done)}) returning id)"
            " insert into durable.signals (target_id, name, payload) select id, 'other', '1' from parked"  # type: ignore[arg-type]
        )


def own_rows(connection: psycopg.Connection, dsn: str) -> list[int]:
    """Rows to pick, to signal (returned), and to delete."""
    fill(dsn, "bench:noop", BATCH * TIMES)
    fill(dsn, "bench:brief", BATCH * TIMES, priority="1")
    parked = connection.execute(
        "insert into durable.gen_durable (fsm, step, queue, status, awaits)"
        f" select 'bench:noop', 'perform', '{QUEUE}', 'awaiting_signal', '{{go}}'"
        f" from generate_series(1, {TIMES}) returning id"  # type: ignore[arg-type]
    ).fetchall()
    finished(connection, BATCH * TIMES, "9 days")
    connection.execute("vacuum analyze durable.gen_durable")
    connection.execute("vacuum analyze durable.signals")
    connection.execute("checkpoint")
    return [number for (number,) in parked]


async def cpu(conn: PgConn, call: Callable[[], Awaitable[object]]) -> float:
    """Milliseconds of the server's CPU."""
    began = on_cpu(conn.pid)
    await call()
    return (on_cpu(conn.pid) - began) * 1e3


async def pick_and_commit(conn: PgConn, took: dict[str, list[float]]) -> None:
    """All rows: those that are kept go first."""
    cursor = PickCursor()
    cursor.learn(await read_queue(conn, "durable", QUEUE), known=KNOWN)
    known, claims = encode.text_array(sorted(KNOWN)), list[Claim]()
    tokens = iter(range(1, 10**6))

    async def pick() -> None:
        now = trio.current_time()
        begin = cursor.begin(now, limit=BATCH, known=KNOWN)
        picked = await pick_instances(
            conn, OWNER, queue=QUEUE, limit=BATCH, known=known, begin=begin, now=now
        )
        cursor.advance(picked, now=trio.current_time(), took=0.0)
        claims[:] = picked.claims

    async def commit() -> None:
        ends = [transition(claim, SPECS[claim.fsm], Done(1)) for claim in claims]
        token = f"00000000-0000-0000-0000-{next(tokens):012}"
        done = await commit_outcomes(conn, "durable", ends, accept_late=True, token=token)
        assert len(done.committed) == BATCH

    for _ in range(2 * TIMES):
        took["pick of 100"].append(await cpu(conn, pick))
        assert len(claims) == BATCH
        goes = SPECS[claims[0].fsm].keep == 0
        took["commit of 100, keep=0" if goes else "commit of 100"].append(await cpu(conn, commit))


async def signal_each(conn: PgConn, targets: Sequence[int], took: list[float]) -> None:
    left = iter(targets)

    async def send() -> None:
        [sent] = await send_signals(conn, "durable", [plan_signal(next(left), "go", 1, None)])
        assert sent.woken

    took.extend([await cpu(conn, send) for _ in targets])


async def sweep(conn: PgConn, first: int, took: list[float]) -> None:
    """The janitor's batches, from the first row that is old enough."""
    after = first - 1

    async def delete() -> None:
        nonlocal after
        swept = await delete_ended(conn, "durable", AGES, after=after, limit=BATCH, old=86400.0)
        assert swept.done == BATCH
        assert swept.last is not None
        after = swept.last

    took.extend([await cpu(conn, delete) for _ in range(TIMES)])


async def measure(dsn: str, targets: Sequence[int], first: int) -> Sample:
    took: dict[str, list[float]] = {
        "pick of 100": [],
        "commit of 100": [],
        "commit of 100, keep=0": [],
        "one signal": [],
        "janitor's 100": [],
    }
    conn = await PgConn.open(dsn, settings=SETTINGS)
    await pick_and_commit(conn, took)
    await signal_each(conn, targets, took["one signal"])
    await sweep(conn, first, took["janitor's 100"])
    conn.close()
    return {name: statistics.median(each[WARM:]) for name, each in took.items()}


def grown(server: Server, rows: int) -> Sample:
    with server.database() as dsn, psycopg.connect(dsn, autocommit=True) as connection:
        crowd(connection, rows)
        targets = own_rows(connection, dsn)
        query = "select min(id) from durable.gen_durable where finished_at < now() - interval '8 days'"
        [[first]] = connection.execute(query).fetchall()
        return trio.run(measure, dsn, targets, first)


def run(server: Server, progress: Progress, *, quick: bool) -> list[Figure]:
    return [_figure(server, rows, progress) for rows in (QUICK if quick else SIZES)]


def _figure(server: Server, rows: int, progress: Progress) -> Figure:
    progress(f"grown: {rows:,} rows")
    server.settle()
    return Figure.of("grown", f"{rows:,} rows", "ms of the server's CPU", [grown(server, rows)])


@click.command()
@click.option("--rows", default=10_000_000, show_default=True, help="Finished rows, compared with 1,000.")
def main(rows: int) -> None:
    """Compare a table of this size with one of 1,000 rows."""
    with open_server() as server:
        small, large = (_figure(server, each, click.echo) for each in (1_000, rows))
    for name, spread in large.values.items():
        before = small.median(name)
        click.echo(f"{name:22} {before:8.3f} -> {spread.median:8.3f} ms   {spread.median / before:5.2f} x")


if __name__ == "__main__":
    main()
