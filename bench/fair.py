"""Fair queues: what a key costs in a queue that is not fair, and what a fair pick costs with few keys, many, and none.

`python -m bench.fair --rows 1000000`: a tenant floods, another sends one row. How long is it until that is claimed?
"""

from __future__ import annotations

import statistics
import time

import click
import psycopg
import trio
from durable_actors._engine.claiming.fair_cursor import FairCursor
from durable_actors._engine.lanes import lanes
from durable_actors._engine.shares import FairShares
from durable_actors._postgres.driver import encode
from durable_actors._postgres.driver.connection import PgConn
from durable_actors._store.claim import Owner
from durable_actors._store.fair import pick_fair, read_fair_keys
from durable_actors.machine import step_address

from bench.contest import Contestant, Figure, Progress, compete, in_child
from bench.server import Server, open_server
from bench.workload import BEST

FAIR = {**BEST, "fair": True}
BATCH = 10
FLOOD = """
insert into durable.gen_durable (fsm, step, fair_key, eligible_at)
select 'm', 's', 'flood', now() - interval '1 day' + n * interval '1 ms' from generate_series(1, %s) n
"""
ONE = "insert into durable.gen_durable (fsm, step, fair_key) values ('m', 's', %s) returning id"


def run(server: Server, progress: Progress, *, quick: bool) -> list[Figure]:
    count, rounds = (3_000, 2) if quick else (20_000, 3)

    def keyed(name: str, keys: int, queue: dict[str, object]) -> Contestant:
        columns = {"fair_key": f"'tenant ' || n %% {keys}"}
        return Contestant(name, in_child(what="engine", count=count, queue=queue, columns=columns))

    contestants = [
        Contestant("no keys, not fair", in_child(what="engine", count=count, queue=BEST)),
        keyed("10 keys, not fair", 10, dict(BEST)),
        keyed("10 keys, fair", 10, FAIR),
        keyed("1,000 keys, fair", 1_000, FAIR),
        Contestant("no keys, fair", in_child(what="engine", count=count, queue=FAIR)),
    ]
    return compete("fair", server, contestants, rounds=rounds, progress=progress)


async def flood(dsn: str, rows: int) -> None:
    """A tenant has a backlog, another one sends a row now and then: each is in the next pick."""
    shares = FairShares({})
    cursor, known = FairCursor(shares), encode.text_array([step_address("m", 1, "s")])
    owner = Owner("durable", "bench", b"hash", 60.0)
    conn = await PgConn.open(dsn, settings=lanes(6, session_dsn=None, keepalive=60)["claim"].settings)
    took: list[float] = []
    with psycopg.connect(dsn, autocommit=True) as db:
        db.execute(FLOOD, [rows])
        db.execute("vacuum analyze durable.gen_durable")
        for turn in range(200):
            found = db.execute(ONE, [f"tenant {turn}"]).fetchone()
            assert found is not None
            now = time.perf_counter()
            begin = cursor.look(limit=BATCH)
            look = await read_fair_keys(conn, "durable", "default", begin)
            take = cursor.take(begin, look, now, limit=BATCH, known=frozenset())
            picked, keys = await pick_fair(
                conn, owner, queue="default", limit=BATCH, known=known, take=take, now=now
            )
            took.append(time.perf_counter() - now)
            assert found[0] in {claim.id for claim in picked.claims}, "not in the next pick"
            shares.claimed(keys, now)
            cursor.full = True
            cursor.advance(picked, now=now, took=0.0)
            for claim_id in keys:
                shares.ended(claim_id, now)
    conn.close()
    click.echo(
        f"{rows:,} rows of one key: 200 others, each in the next pick of {BATCH}; look and pick take "
        f"{statistics.median(took) * 1000:.2f} ms (median), {max(took) * 1000:.1f} ms at most"
    )


@click.command()
@click.option("--rows", default=1_000_000, show_default=True)
def main(rows: int) -> None:
    with open_server() as server, server.database() as dsn:
        trio.run(flood, dsn, rows)


if __name__ == "__main__":
    main()
