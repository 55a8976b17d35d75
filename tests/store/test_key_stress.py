"""Four pickers, two inserters, sixty keys: the database keeps a log, by which every promise about keys is checked."""

from __future__ import annotations

import random
from collections import defaultdict

import attrs
import psycopg
import pytest
import trio
from durable_actors._engine.claiming.cursor import PickCursor
from durable_actors._postgres.driver.connection import PgConn
from durable_actors._postgres.driver.statement import Statement
from durable_actors._store.claim import Owner, PickFrom, QueueShape, promote_siblings
from durable_actors._store.commit import commit_outcomes
from durable_actors._store.lease import sweep_keys
from durable_actors._store.rows import Claim, Transition
from tests.store.kit import SCHEMA, connect, outcome, pick

ROWS = 4200
PRIORITIES = range(4)
QUEUES = ("a", "b")
KNOWN = frozenset({"m/1"})
SNAPSHOT = Statement("snapshot", "select pg_current_xact_id()::text, pg_current_snapshot()::text")

LOG = """
create table log (seq bigserial, id bigint, key text, status text, priority int, eligible_at timestamptz,
                  xid text default pg_current_xact_id()::text, at timestamptz default now());
create function log() returns trigger language plpgsql as $$ begin
    insert into log (id, key, status, priority, eligible_at)
    values (new.id, new.partition_key, new.status, new.priority, new.eligible_at);
    return null;
end $$;
create trigger log after insert or update of status on durable.gen_durable for each row execute function log();
"""
INSERT = """
insert into durable.gen_durable (fsm, step, queue, priority, partition_key, eligible_at)
select 'm', 's', q, p, k, now() - make_interval(secs => age)
  from unnest(%s::text[], %s::int[], %s::text[], %s::float8[]) u(q, p, k, age)
"""


@attrs.define
class Tally:
    """What the pickers have done."""

    snapshots: dict[str, str] = attrs.field(factory=dict)
    """By transaction, what was committed before its pick began."""
    claims: int = 0
    retries: int = 0
    idle: int = 0
    inserting: int = 2
    swept: int = 0


async def insert_late(dsn: str, seed: int, count: int, tally: Tally) -> None:
    """Small transactions that stay open for a while, with dates in the past: rows appear behind every cursor."""
    chance = random.Random(seed)
    conn = await trio.to_thread.run_sync(psycopg.connect, dsn)
    with conn:
        while count > 0:
            size = min(count, chance.randint(1, 12))
            count -= size
            keys = [
                None if chance.random() < 0.1 else f"k{int(60 * chance.random() ** 1.5)}" for _ in range(size)
            ]
            rows = [
                [chance.choice(QUEUES) for _ in keys],
                [chance.choice(PRIORITIES) for _ in keys],
                keys,
                [chance.choice([0.0, 0.0, 1.0, 5.0]) for _ in keys],
            ]
            await trio.to_thread.run_sync(conn.execute, INSERT, rows)
            await trio.sleep(0.003)
            await trio.to_thread.run_sync(conn.commit)
    tally.inserting -= 1


def decide(claim: Claim, chance: random.Random) -> Transition:
    """Most steps end; some are tried again, at once or a little later; some go on."""
    what = chance.random()
    if what < 0.1:
        return outcome(claim, status="runnable", attempt=claim.attempt + 1, delay=chance.choice([0.0, 0.004]))
    if what < 0.15:
        return outcome(claim, status="runnable", step="b", attempt=0, advance=1)
    return outcome(claim)


async def work(dsn: str, number: int, db: psycopg.Connection, tally: Tally) -> None:
    """Pick and commit until nothing is left. Two use the engine's cursor, two begin at the head."""
    chance = random.Random(number)
    owner = Owner(SCHEMA, f"node {number}", b"", 60.0)
    cursors = {queue: PickCursor() for queue in QUEUES}
    for cursor in cursors.values():
        cursor.learn(QueueShape(tuple(PRIORITIES), None, (), None), known=KNOWN)
    head = PickFrom(PRIORITIES, ["-infinity"] * len(PRIORITIES), [0] * len(PRIORITIES))
    async with connect(dsn, lock_timeout="0") as conn:  # 100 ms are not enough on a busy machine
        while tally.inserting or left_over(db):
            queue, limit = chance.choice(QUEUES), chance.randint(1, 12)
            now = trio.current_time()
            begin = cursors[queue].begin(now, limit=limit, known=KNOWN) if number % 2 else head
            async with conn.transaction():
                [[xid, snapshot]] = (await conn.run(SNAPSHOT)).rows
                picked = await pick(conn, owner=owner, queue=queue, limit=limit, begin=begin)
            tally.snapshots[(xid or b"").decode()] = (snapshot or b"").decode()
            cursors[queue].advance(picked, now=trio.current_time(), took=trio.current_time() - now)
            if picked.claims:
                await finish(conn, picked.claims, chance, cursors, tally)
            else:
                await rest(conn, tally)


async def finish(
    conn: PgConn, claims: list[Claim], chance: random.Random, cursors: dict[str, PickCursor], tally: Tally
) -> None:
    tally.idle = 0
    outcomes = [decide(claim, chance) for claim in claims]
    flushed = await commit_outcomes(conn, SCHEMA, outcomes, accept_late=True)
    assert len(flushed.committed) == len(claims), "nobody takes a claim away here"
    tally.claims += len(claims)
    tally.retries += sum(not each.ends for each in outcomes)
    for row in flushed.offered:
        cursors[row.queue].hint(row.id)


async def rest(conn: PgConn, tally: Tally) -> None:
    """Nothing was claimed. After a long while of that do what the reaper does now and then."""
    tally.idle += 1
    await trio.sleep(0.002)
    if tally.idle >= 200:
        stuck, _ = await sweep_keys(conn, SCHEMA, after="", limit=1000)
        tally.swept += len(await promote_siblings(conn, SCHEMA, stuck)) if stuck else 0
        tally.idle = 0


def left_over(db: psycopg.Connection) -> bool:
    row = db.execute("select exists (select 1 from durable.gen_durable where status <> 'done')").fetchone()
    return row == (True,)


def visible(xid: str, snapshot: str) -> bool:
    """Whether this transaction had committed when the snapshot was taken (none is rolled back here)."""
    low, high, running = snapshot.split(":")
    return int(xid) < int(low) or (int(xid) < int(high) and xid not in running.split(","))


def violations(log: list[tuple], snapshots: dict[str, str]) -> tuple[list[tuple], list[tuple]]:
    """Go through what happened: claims of a busy key, and claims before an elder that was due and could be seen."""
    busy: dict[str, int] = {}
    siblings: defaultdict[str, dict[int, tuple]] = defaultdict(dict)
    twice, early = list[tuple](), list[tuple]()
    for number, key, status, priority, eligible_at, xid, at in log:
        place = (priority, eligible_at, number)
        if status == "executing":
            if key in busy:
                twice.append((key, number, busy[key]))
            busy[key] = number
            early.extend(
                (key, number, elder)
                for elder, (elder_place, due, since) in siblings[key].items()
                if elder != number and elder_place < place and due <= at and visible(since, snapshots[xid])
            )
        elif busy.get(key) == number:
            del busy[key]
        if status == "runnable":
            siblings[key][number] = (place, eligible_at, xid)
        else:
            siblings[key].pop(number, None)
    return twice, early


def test_the_check_finds_violations():
    """A check that finds nothing must be able to."""
    snapshots = {"5": "3:3:", "6": "5:6:5"}
    log = [
        (1, "k", "runnable", 0, 1, "1", 1),
        (2, "k", "runnable", 0, 2, "2", 2),
        (3, "k", "runnable", 0, 0, "4", 2),  # committed after the picks began
        (2, "k", "executing", 0, 2, "5", 9),
        (1, "k", "executing", 0, 1, "6", 9),
    ]
    assert violations(log, snapshots) == ([("k", 1, 2)], [("k", 2, 1), ("k", 1, 3)])


@pytest.mark.slow
async def test_no_key_runs_twice_or_out_of_order_and_nothing_is_left(
    db: psycopg.Connection, durable_dsn: str
):
    db.execute(LOG)  # type: ignore[arg-type]
    tally = Tally()
    with trio.fail_after(50):
        async with trio.open_nursery() as nursery:
            for number in range(2):
                nursery.start_soon(insert_late, durable_dsn, number, ROWS // 2, tally)
            for number in range(4):
                nursery.start_soon(work, durable_dsn, number, db, tally)
    assert tally.claims == ROWS + tally.retries
    log = db.execute(
        "select id, key, status, priority, eligible_at, xid, at from log where key is not null order by seq"
    ).fetchall()
    assert len(log) > 2 * ROWS
    assert violations(log, tally.snapshots) == ([], [])
    assert db.execute("select count(*) from durable.gen_durable where status <> 'done'").fetchone() == (0,)
    assert db.execute(
        "select deadlocks from pg_stat_database where datname = current_database()"
    ).fetchone() == (0,)
