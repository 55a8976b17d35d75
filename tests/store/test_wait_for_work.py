"""The server's look for due work of several queues."""

from __future__ import annotations

import json

import trio
from durable_actors._store.claim import WorkSeen, wait_for_work
from tests.kit import until
from tests.store.kit import connect

INSERT = "insert into durable.gen_durable (fsm, step, queue, priority, eligible_at, hold) "


async def test_it_tells_which_queues_have_a_due_row(durable_dsn, db):
    db.execute(
        INSERT + "values ('m', 's', 'due', 7, now(), 0), ('m', 's', 'due', 9, now(), 0),"
        " ('m', 's', 'due', 3, now() + interval '1 h', 0), ('m', 's', 'late', 0, 'infinity', 0),"
        " ('m', 's', 'held', 0, now(), 1), ('m', 's', 'shelved', 0, now(), 2), ('m', 's', 'other', 0, now(), 0),"
        " ('m', 's', 'early', -32768, '-infinity', 0)"
    )
    async with connect(durable_dsn) as conn:
        watched = ["due", "late", "held", "shelved", "empty", "early"]
        seen = await wait_for_work(conn, "durable", watched, every=0.001, patience=0.01)
        assert seen.due == {"due": 7, "early": -32768}
        assert (
            await wait_for_work(conn, "durable", ["late", "held"], every=0.001, patience=0.01) == WorkSeen()
        )
        assert await wait_for_work(conn, "durable", [], every=0.001, patience=0.0) == WorkSeen()


async def test_a_row_that_becomes_due_meanwhile_is_seen(durable_dsn, db):
    db.execute(INSERT + "values ('m', 's', 'q', 0, clock_timestamp() + interval '0.2 s', 0)")
    async with connect(durable_dsn) as conn:
        assert await wait_for_work(conn, "durable", ["q"], every=0.01, patience=30.0) == WorkSeen(
            due={"q": 0}
        )


async def test_a_row_that_is_committed_meanwhile_is_seen(durable_dsn, db):
    """Each look has a snapshot of its own: it returns, and not because its patience is over."""
    async with connect(durable_dsn) as conn, trio.open_nursery() as nursery:
        found: list[dict[str, int]] = []

        async def wait() -> None:
            found.append((await wait_for_work(conn, "durable", ["q"], every=0.01, patience=3600.0)).due)

        nursery.start_soon(wait)
        query = "select 1 from pg_stat_activity where pid = %s and wait_event = 'PgSleep'"
        while not db.execute(query, [conn.pid]).fetchall():
            await trio.sleep(0.01)
        db.execute(INSERT + "values ('m', 's', 'q', 4, now(), 0)")
        await until(lambda: found)
    assert found == [{"q": 4}]


async def test_it_tells_at_its_end_which_machines_are_paused(durable_dsn, db):
    """Also one that was resumed, or paused, while it waited: the long poll must not learn it a statement later."""
    db.execute(
        "insert into durable.pauses (queue, fsm, until) values ('q', '', null), ('q', 'a', null),"
        " ('q', 'b', now() + interval '1 h'), ('q', 'gone', now() - interval '1 s'), ('other', 'c', null)"
    )
    async with connect(durable_dsn) as conn:
        seen = await wait_for_work(conn, "durable", ["q", "r"], every=0.001, patience=0.0)
        assert seen == WorkSeen(paused_machines={"q": {"a", "b"}})
        async with trio.open_nursery() as nursery:
            found: list[WorkSeen] = []

            async def wait() -> None:
                found.append(await wait_for_work(conn, "durable", ["q"], every=0.5, patience=0.5))

            nursery.start_soon(wait)
            query = "select 1 from pg_stat_activity where pid = %s and wait_event = 'PgSleep'"
            while not db.execute(query, [conn.pid]).fetchall():
                await trio.sleep(0.01)
            db.execute("delete from durable.pauses where fsm = 'a'")
            db.execute("insert into durable.pauses (queue, fsm) values ('q', 'd')")
        assert found == [WorkSeen(paused_machines={"q": {"b", "d"}})]


def test_a_look_is_cheap_whatever_lies_in_the_future(db):
    """Ten thousand future rows in three priorities, statistics that know of none."""
    db.execute("alter table durable.gen_durable set (autovacuum_enabled = off)")
    db.execute("analyze durable.gen_durable")
    db.execute(
        INSERT + "select 'm', 's', 'q', n % 3, now() + n * interval '1 h', 0 from generate_series(1, 10000) n"
    )
    query = "explain (analyze, buffers, format json) select durable.wait_for_work('{q,r,s}', 0.0, 0.0)"
    db.execute(query)
    [[plan]] = db.execute(query).fetchall()
    plan = plan if isinstance(plan, list) else json.loads(plan)
    top = plan[0]["Plan"]
    assert top["Shared Hit Blocks"] + top["Shared Read Blocks"] < 140, "to read them all takes 400"
