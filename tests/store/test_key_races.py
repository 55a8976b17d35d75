"""Partition keys under two pickers: every interleaving made to order (docs/explanation/races.md tells them)."""

from __future__ import annotations

from typing import Any

import attrs
import psycopg
import pytest
import trio
from durable_actors._postgres.driver.connection import PgConn
from durable_actors._postgres.driver.statement import Params, Result, Statement
from durable_actors._store.claim import PickFrom, promote_siblings, release_claims
from durable_actors._store.commit import commit_outcomes
from durable_actors._store.holds import SHELVED
from durable_actors._store.lease import reap_claims, sweep_keys
from durable_actors._store.rows import Claim, PickResult
from tests.store.kit import EXPIRE, HEAD, SCHEMA, address, connect, insert, outcome, pick, rows
from tests.support.interleave import wait_backend_blocked

GATE = 4711


class Gated:
    """A connection whose pick stops at a gate, its snapshot taken: before it reads anything, or before it judges."""

    def __init__(self, conn: PgConn, where: str) -> None:
        self._conn = conn
        self._from = {
            "scan": "from unnest($6::smallint[], $7::timestamptz[], $8::bigint[]) p(priority, at, id)",
            "extra": "from durable.gen_durable g\n     where g.id = any ($9::bigint[])".replace(
                "durable.", '"durable".'
            ),
            "judge": "from win where k is not null having",
        }[where]

    async def run(self, statement: Statement, params: Params) -> Result:
        sql = statement.sql.replace(
            "with extra as", f"with gate as (select pg_advisory_xact_lock({GATE})), extra as", 1
        )
        gated = sql.replace(self._from, self._from.replace("from ", "from gate, ", 1), 1)
        gated = gated.replace(
            "for no key update skip locked\n), shelf", "for no key update of g skip locked\n), shelf"
        )
        assert gated != sql != statement.sql
        return await self._conn.run(Statement("gated", gated, typed=statement.typed), params)


@attrs.define
class Gate:
    """Closed until opened. Who stands before it is waited for, not guessed."""

    db: psycopg.Connection

    def __attrs_post_init__(self) -> None:
        self.db.execute("select pg_advisory_lock(%s)", [GATE])

    async def wait_for(self, conn: PgConn) -> None:
        await wait_backend_blocked(self.db.info.dsn, conn.pid, by=self.db.info.backend_pid)

    def open(self) -> None:
        self.db.execute("select pg_advisory_unlock(%s)", [GATE])


def what(picked: PickResult) -> dict[int, str]:
    """What became of each row of a window."""
    return {claim.id: "c" for claim in picked.claims} | {row.id: row.what for row in picked.seen}


async def end(conn: PgConn, claim: Claim, **columns: Any) -> list[int]:
    """Commit the end of a step; return the rows that are on offer because of it."""
    flushed = await commit_outcomes(conn, SCHEMA, [outcome(claim, **columns)], accept_late=True)
    assert claim.id in flushed.committed
    return [row.id for row in flushed.offered]


# -- PICKER I1 to I4


async def test_a_key_that_another_pick_is_deciding_about_is_left_alone(
    db: psycopg.Connection, durable_dsn: str
):
    one, two, three = insert(db, 3, partition_key="k")
    other, after = insert(db, 2, partition_key="other")
    async with connect(durable_dsn) as a, connect(durable_dsn) as b:
        async with a.transaction():
            assert what(await pick(a, limit=1)) == {one: "c"}
            assert what(await pick(b)) == {two: "l", three: "l", other: "c", after: "h"}
        assert what(await pick(b)) == {two: "h", three: "h"}, "behind the one that executes"


async def test_what_is_held_behind_an_outcome_under_way_is_promoted_by_it(
    db: psycopg.Connection, durable_dsn: str
):
    """The pick has the executing row's lock while it holds rows behind it: the outcome comes after, and sees them."""
    one, two = insert(db, 2, partition_key="k")
    offered: list[int] = []
    async with (
        connect(durable_dsn) as a,
        connect(durable_dsn, lock_timeout="0") as b,
        trio.open_nursery() as nursery,
    ):
        [claim] = (await pick(a, limit=1)).claims
        assert claim.id == one

        async def finish() -> None:
            offered.extend(await end(a, claim))

        async with b.transaction():
            assert what(await pick(b)) == {two: "h"}
            nursery.start_soon(finish)
            await wait_backend_blocked(durable_dsn, a.pid, by=b.pid)
    assert offered == [two]
    assert rows(db, "status, hold") == [("done", 0), ("runnable", 0)]


async def test_nothing_is_held_behind_an_outcome_that_is_written_already(
    db: psycopg.Connection, durable_dsn: str
):
    _, two = insert(db, 2, partition_key="k")
    async with connect(durable_dsn) as a, connect(durable_dsn) as b:
        [claim] = (await pick(a, limit=1)).claims
        async with a.transaction():
            assert await end(a, claim) == []
            assert what(await pick(b)) == {two: "l"}, (
                "the outcome's promotion has not seen it: it may not be held"
            )
        assert what(await pick(b)) == {two: "c"}


async def test_an_old_snapshot_does_not_start_a_second_step_of_a_key(
    db: psycopg.Connection, durable_dsn: str
):
    """A claims a row that came after B's snapshot, by which B would run a second step of the key."""
    [late] = insert(db, partition_key="k")
    async with (
        connect(durable_dsn) as a,
        connect(durable_dsn, lock_timeout="0") as b,
        trio.open_nursery() as nursery,
    ):
        gate, found = Gate(db), dict[int, str]()

        async def judge_late() -> None:
            found.update(what(await pick(Gated(b, "judge"))))  # type: ignore[arg-type]

        nursery.start_soon(judge_late)
        await gate.wait_for(b)
        [early] = insert(db, partition_key="k", eligible_at="=now() - interval '1 min'")
        assert what(await pick(a)) == {early: "c"}, "the other row is locked by B's window"
        gate.open()
    assert found == {late: "h"}
    assert rows(db, "status, hold") == [("runnable", 1), ("executing", 0)]


# -- PICKER 3.4: the promotion that misses its row


async def stuck_key(db: psycopg.Connection, a: PgConn, b: PgConn) -> int:
    """Make a held row that nothing will promote; return its id.

    B's old snapshot offers the row; A holds it; B locks the newest version and rejects it, but keeps the lock until it
    ends; the promotion after the outcome skips what is locked.
    """
    _, two = insert(db, 2, partition_key="k")
    [claim] = (await pick(a, limit=1)).claims
    gate, scanned, over = Gate(db), trio.Event(), trio.Event()

    async def scan_late() -> None:
        async with b.transaction():
            assert what(await pick(Gated(b, "scan"))) == {}  # type: ignore[arg-type]
            scanned.set()
            await over.wait()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(scan_late)
        await gate.wait_for(b)
        assert what(await pick(a)) == {two: "h"}
        gate.open()
        await scanned.wait()
        assert await end(a, claim) == [], "its only sibling is locked"
        over.set()
    assert rows(db, "status, hold", f"id = {two}") == [("runnable", 1)]
    return two


async def test_a_promotion_that_was_missed_is_made_up_by_the_sweep(db: psycopg.Connection, durable_dsn: str):
    async with connect(durable_dsn) as a, connect(durable_dsn, lock_timeout="0") as b:
        two = await stuck_key(db, a, b)
        assert what(await pick(a)) == {}
        stuck, after = await sweep_keys(a, SCHEMA, after="", limit=1000)
        assert (stuck, after) == (["k"], None)
        assert [row.id for row in await promote_siblings(a, SCHEMA, stuck)] == [two]
        assert what(await pick(a)) == {two: "c"}
        assert await sweep_keys(a, SCHEMA, after="", limit=1000) == ([], None)


async def test_a_promotion_that_was_missed_is_made_up_by_the_next_pick_that_meets_the_key(
    db: psycopg.Connection, durable_dsn: str
):
    async with connect(durable_dsn) as a, connect(durable_dsn, lock_timeout="0") as b:
        two = await stuck_key(db, a, b)
        [three] = insert(db, partition_key="k")
        assert what(await pick(a)) == {three: "h"}, "not before its elder"
        [claim] = (await pick(a)).claims
        assert claim.id == two
        assert await end(a, claim) == [three]


# -- HAZARDS H46


@pytest.mark.parametrize("key", [None, "k"])
@pytest.mark.parametrize("where", ["scan", "extra"])
async def test_a_row_touched_between_snapshot_and_lock_is_claimed_all_the_same(
    db: psycopg.Connection, durable_dsn: str, key: str | None, where: str
):
    """By id: joined by its place in the table it would be locked, not claimed, and the pick would come back empty."""
    [number] = insert(db, partition_key=key)
    begin = HEAD if where == "scan" else PickFrom([0], ["infinity"], [0], extras=[number])
    async with connect(durable_dsn, lock_timeout="0") as conn, trio.open_nursery() as nursery:
        gate, found = Gate(db), dict[int, str]()

        async def pick_late() -> None:
            found.update(what(await pick(Gated(conn, where), begin=begin)))  # type: ignore[arg-type]

        nursery.start_soon(pick_late)
        await gate.wait_for(conn)
        db.execute("update durable.gen_durable set inbox = true, rev = rev + 1")
        gate.open()
    assert found == {number: "c"}
    assert rows(db, "status, inbox") == [("executing", True)]


# -- the order within a key


async def test_two_pickers_take_a_key_in_order(db: psycopg.Connection, durable_dsn: str):
    """By priority, then date, then id, whoever picks and whichever rows its window shows."""
    order = [
        insert(db, partition_key="k", priority=priority, eligible_at=f"=now() - interval '{age} s'")[0]
        for priority, age in [(1, 5), (0, 3), (1, 9), (0, 8), (1, 5), (0, 3)]
    ]
    expected = [order[index] for index in (3, 1, 5, 2, 0, 4)]
    everything = PickFrom([0, 1], ["-infinity"] * 2, [0, 0])
    ran: list[int] = []
    async with connect(durable_dsn) as a, connect(durable_dsn) as b:
        while len(ran) < len(expected):
            picked = [await pick(conn, limit=2, begin=everything) for conn in (b, a, b)]
            claims = [claim for each in picked for claim in each.claims]
            assert len(claims) <= 1
            for claim in claims:
                ran.append(claim.id)
                await end(a, claim)
    assert ran == expected


async def test_the_order_holds_across_queues(db: psycopg.Connection, durable_dsn: str):
    [second] = insert(db, partition_key="k", queue="a")
    [first] = insert(db, partition_key="k", queue="b", eligible_at="=now() - interval '1 min'")
    async with connect(durable_dsn) as conn:
        assert what(await pick(conn, queue="a")) == {second: "h"}
        [claim] = (await pick(conn, queue="b")).claims
        assert claim.id == first
        assert what(await pick(conn, queue="a")) == {}
        flushed = await commit_outcomes(conn, SCHEMA, [outcome(claim)], accept_late=True)
        assert [(row.id, row.queue) for row in flushed.offered] == [(second, "a")]
        assert what(await pick(conn, queue="a")) == {second: "c"}


async def test_rows_whose_elders_wait_in_a_full_queue_block_nobody(db: psycopg.Connection, durable_dsn: str):
    """Each is put aside once. Left where they are, they would fill every window that begins at the head."""
    insert(db, 200, queue="full", partition_key="='k ' || n", eligible_at="=now() - interval '1 h'")
    younger = insert(db, 200, partition_key="='k ' || n", eligible_at="=now() - interval '1 min'")
    [behind] = insert(db)
    async with connect(durable_dsn) as conn:
        for _ in range(10):
            assert set(what(await pick(conn, limit=20)).values()) == {"h"}
        assert what(await pick(conn, limit=20)) == {behind: "c"}
        elders = (await pick(conn, queue="full", limit=5)).claims
        flushed = await commit_outcomes(conn, SCHEMA, [outcome(claim) for claim in elders], accept_late=True)
        assert sorted(row.id for row in flushed.offered) == younger[:5]
        assert what(await pick(conn)) == dict.fromkeys(younger[:5], "c")


async def test_nothing_is_held_behind_an_elder_that_is_being_claimed(
    db: psycopg.Connection, durable_dsn: str
):
    """Its outcome may come, and promote, before our hold is there."""
    [elder] = insert(db, partition_key="k", queue="a", eligible_at="=now() - interval '1 h'")
    [younger] = insert(db, partition_key="k", queue="b")
    async with connect(durable_dsn) as conn:
        with psycopg.connect(durable_dsn) as somebody:
            somebody.execute("select 1 from durable.gen_durable where id = %s for no key update", [elder])
            assert what(await pick(conn, queue="b")) == {younger: "l"}
        assert what(await pick(conn, queue="b")) == {younger: "h"}


async def test_a_delayed_row_gives_up_its_place(db: psycopg.Connection, durable_dsn: str):
    [future] = insert(db, partition_key="k", eligible_at="=now() + interval '1 h'", priority=0)
    first, second = insert(db, 2, partition_key="k", priority=1)
    begin = PickFrom([0, 1], ["-infinity"] * 2, [0, 0])
    async with connect(durable_dsn) as conn:
        [claim] = (await pick(conn, begin=begin)).claims
        assert claim.id == first
        assert await end(conn, claim, status="runnable", delay=60.0, attempt=1) == [second]
        assert what(await pick(conn, begin=begin)) == {second: "c"}
        db.execute("update durable.gen_durable set eligible_at = now() where id in (%s, %s)", [future, first])
        assert what(await pick(conn, begin=begin)) == {future: "h", first: "h"}


async def test_a_parked_row_gives_up_its_place(db: psycopg.Connection, durable_dsn: str):
    first, second = insert(db, 2, partition_key="k")
    async with connect(durable_dsn) as conn:
        [claim] = (await pick(conn)).claims
        assert await end(conn, claim, status="awaiting_signal", awaits=("go",)) == [second]
        assert what(await pick(conn)) == {second: "c"}
        assert rows(db, "status", f"id = {first}") == [("awaiting_signal",)]


async def test_a_row_of_an_unknown_machine_gives_up_its_place(db: psycopg.Connection, durable_dsn: str):
    [unknown] = insert(db, partition_key="k", fsm_version=2)
    [known] = insert(db, partition_key="k")
    async with connect(durable_dsn) as conn:
        assert what(await pick(conn)) == {unknown: "s", known: "c"}


async def test_a_row_at_an_unknown_step_gives_up_its_place(db: psycopg.Connection, durable_dsn: str):
    [unknown] = insert(db, partition_key="k")
    db.execute("update durable.gen_durable set step = 'new'")
    [known] = insert(db, partition_key="k")
    async with connect(durable_dsn) as conn:
        assert what(await pick(conn)) == {unknown: "s", known: "c"}


async def test_a_shelved_elder_at_an_unknown_step_holds_nobody_up(db: psycopg.Connection, durable_dsn: str):
    """Its machine is known, its step is not: whoever has the step keeps the order, others go on."""
    [elder] = insert(db, partition_key="k", hold=2)
    db.execute("update durable.gen_durable set step = 'new', shelved_step = 'new'")
    younger, youngest = insert(db, 2, partition_key="k")
    both = ["m/1", "m/1/new"]
    shelf = PickFrom([0], ["-infinity"], [0], shelved=[address("m/1", "new")])
    async with connect(durable_dsn) as conn:
        picked = await pick(conn)
        assert what(picked) == {younger: "c", youngest: "h"}
        assert await end(conn, picked.claims[0]) == [youngest]
        assert what(await pick(conn, known=both)) == {youngest: "h"}, "behind the elder, which it can run"
        [claim] = (await pick(conn, known=both, begin=shelf)).claims
        assert claim.id == elder
        assert await end(conn, claim) == [youngest]


async def test_a_row_that_is_released_to_the_shelf_lets_the_next_one_go(
    db: psycopg.Connection, durable_dsn: str
):
    """Its step went with a reload of the code: it gives up its place at once, not at the next sweep."""
    first, second = insert(db, 2, partition_key="k")
    async with connect(durable_dsn) as conn:
        picked = await pick(conn)
        assert what(picked) == {first: "c", second: "h"}
        released = await release_claims(conn, SCHEMA, picked.claims, attempts=0, hold=SHELVED)
        assert (released.runnable, [each.id for each in released.offered]) == ({first}, [second])
        assert rows(db, "hold, attempt") == [(2, 0), (0, 0)]
        assert what(await pick(conn, known=["m/1/t"])) == {second: "s"}, "its code has lost that step, too"


async def test_a_node_that_knows_the_shelved_machine_keeps_the_order(
    db: psycopg.Connection, durable_dsn: str
):
    [first] = insert(db, partition_key="k", fsm_version=2, hold=2)
    db.execute("update durable.gen_durable set shelved_step = step")
    [second] = insert(db, partition_key="k")
    shelf = PickFrom([0], ["-infinity"], [0], shelved=[address("m/2")])
    async with connect(durable_dsn) as conn:
        picked = await pick(conn, known=["m/1", "m/2"])
        assert what(picked) == {second: "h"}, "it has not looked at the shelf yet"
        [claim] = (await pick(conn, known=["m/1", "m/2"], begin=shelf)).claims
        assert claim.id == first
        assert await end(conn, claim) == [second]


async def test_a_promoted_row_that_is_shelved_lets_the_next_one_go(db: psycopg.Connection, durable_dsn: str):
    """It was held by a node that knew its machine; the node that meets it now does not, and others wait behind it."""
    insert(db, partition_key="k")
    [unknown] = insert(db, partition_key="k", fsm_version=2)
    [known] = insert(db, partition_key="k")
    async with connect(durable_dsn) as conn:
        [claim] = (await pick(conn, known=["m/1", "m/2"])).claims
        assert rows(db, "hold") == [(0,), (1,), (1,)]
        assert await end(conn, claim) == [unknown]
        assert what(await pick(conn)) == {unknown: "s"}
        assert what(await pick(conn)) == {known: "c"}, "without waiting for the sweep"


async def test_a_reaped_row_frees_its_key(db: psycopg.Connection, durable_dsn: str):
    first, second = insert(db, 2, partition_key="k")
    async with connect(durable_dsn) as conn:
        await pick(conn)
        db.execute(EXPIRE)
        reaped, offered = await reap_claims(conn, SCHEMA, limit=10)
        assert ([each.id for each in reaped], [each.id for each in offered]) == ([first], [second])
        assert what(await pick(conn)) == {second: "c", first: "h"}, (
            "a crashed step goes behind those that were due before"
        )


async def test_a_key_may_look_like_an_id(db: psycopg.Connection, durable_dsn: str):
    """HAZARDS H20: rows without a key are no siblings of one whose key spells their id."""
    plain = insert(db, 2)
    [keyed] = insert(db, partition_key=str(plain[0]))
    async with connect(durable_dsn) as conn:
        assert what(await pick(conn)) == dict.fromkeys([*plain, keyed], "c")
