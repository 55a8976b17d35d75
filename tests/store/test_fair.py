"""Picks of a fair queue: which keys are seen, which rows are taken, in what order, and what it costs."""

from __future__ import annotations

from collections.abc import Sequence

import psycopg
import pytest
import trio
from durable_actors._postgres.driver.connection import PgConn
from durable_actors._store import fair
from durable_actors._store.claim import release_claims
from durable_actors._store.fair import Entry, FairPick, Look, LookFrom, pick_fair, read_fair_keys
from durable_actors._store.holds import SHELVED
from durable_actors._store.observe import observe_instance
from durable_actors._store.rows import Claim
from durable_actors._store.sql import statement
from tests.kit import PATIENCE
from tests.store.kit import OWNER, PLANS, SCHEMA, Recorder, address, connect, insert, known_steps, rows
from tests.support.sql import explain

START = ("-infinity", -(2**63))


async def look(
    conn: PgConn,
    priorities: Sequence[int] = (0,),
    keys: Sequence[str] = (),
    *,
    due_keys: int = 100,
    queue: str = "default",
) -> Look:
    begin = LookFrom(
        priorities, keys or [""] * len(priorities), due_keys=due_keys, plain=dict.fromkeys(priorities, START)
    )
    return await read_fair_keys(conn, SCHEMA, queue, begin)


async def take(
    conn: PgConn,
    *entries: Entry,
    limit: int = 100,
    known: Sequence[str] = ("m/1",),
    plain: Sequence[int] = (),
    skip: Sequence[int] = (),
    shelved: Sequence[str] = (),
    from_shelf: int = 0,
) -> tuple[list[Claim], dict[str, str], dict[int, str]]:
    """The claims, their fair keys by claim id, and what became of other rows."""
    picked, keys = await pick_fair(
        conn,
        OWNER,
        queue="default",
        limit=limit,
        known=known_steps(*known),
        take=FairPick(entries, plain=plain, skip=skip, shelved=shelved, from_shelf=from_shelf),
        now=trio.current_time(),
    )
    return picked.claims, keys, {row.id: row.what for row in picked.seen}


async def ids(conn: PgConn, *entries: Entry, **options: object) -> list[int]:
    return [claim.id for claim in (await take(conn, *entries, **options))[0]]  # type: ignore[arg-type]


async def test_a_look_finds_keys_with_due_rows_and_rows_without_a_key(
    durable_dsn: str, db: psycopg.Connection
):
    insert(db, 3, fair_key="a")
    insert(db, 1, fair_key="b", eligible_at="2100-01-01")
    insert(db, 2, fair_key="c", priority=5)
    insert(db, 1, fair_key="d", hold=1)
    insert(db, 1, fair_key="e", queue="other")
    plain = insert(db, 2)
    async with connect(durable_dsn) as conn:
        found = await look(conn, [0, 5])
        assert found.due == [(0, "a"), (5, "c")]
        assert found.ends == {0: "", 5: ""}
        assert (found.plain, found.positions) == ({0: plain, 5: []}, {})
        assert (await look(conn, [0], ["a"])).due == []
        stopped = await look(conn, [0, 5], due_keys=1)
        assert (stopped.due, stopped.ends) == (
            [(0, "a")],
            {0: "a"},
        )  # the less urgent ones were not looked at


async def test_rows_without_a_key_are_met_part_by_part(
    durable_dsn: str, db: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(fair, "PLAIN_ROWS", 4)
    insert(db, 6, fair_key="a")
    [late] = insert(db, 1)
    async with connect(durable_dsn) as conn:
        first = await look(conn)
        assert (first.plain, set(first.positions)) == ({0: []}, {0})
        begin = LookFrom([0], [""], due_keys=1, plain=first.positions)
        second = await read_fair_keys(conn, SCHEMA, "default", begin)
        assert (second.plain, second.positions) == ({0: [late]}, {})


async def test_each_key_gets_its_rows_in_order_and_what_is_left_goes_to_those_who_have_more(
    durable_dsn: str, db: psycopg.Connection
):
    a, [b], c = (
        insert(db, 9, fair_key="a"),
        insert(db, 1, fair_key="b"),
        insert(db, 2, fair_key="c", priority=5),
    )
    plain = insert(db, 2)
    async with connect(durable_dsn) as conn:
        claims, keys, _ = await take(
            conn, Entry(0, "b", 2), Entry(0, "a", 2), Entry(0, "", 1), Entry(5, "c", 9), limit=6, plain=plain
        )
        # Two of a, one of b, one without a key; then again a, and nothing of the less urgent priority.
        assert sorted(claim.id for claim in claims) == [*a[:4], b, plain[0]]
        assert {keys[claim.claim_id] for claim in claims if claim.id in a} == {"a"}
        assert {keys[claim.claim_id] for claim in claims if claim.id in plain} == {""}
        assert await ids(conn, Entry(0, "a", 1), Entry(5, "c", 2), limit=7, skip=a[4:6]) == [*a[6:], *c]


async def test_two_picks_at_a_time_share_a_key_in_order(durable_dsn: str, db: psycopg.Connection):
    a = insert(db, 4, fair_key="a")
    async with connect(durable_dsn) as one, connect(durable_dsn) as two:
        with trio.fail_after(PATIENCE):
            async with one.transaction():
                assert await ids(one, Entry(0, "a", 2), limit=2) == a[:2]
                assert await ids(two, Entry(0, "a", 2), limit=2) == a[2:]


async def test_partition_keys_are_respected_within_fair_keys(durable_dsn: str, db: psycopg.Connection):
    first, second = insert(db, 2, fair_key="a", partition_key="k")
    [other] = insert(db, 1, fair_key="b", partition_key="k")
    async with connect(durable_dsn) as conn:
        claims, _, seen = await take(conn, Entry(0, "b", 5), Entry(0, "a", 5))
        assert ([claim.id for claim in claims], seen) == ([first], {second: "h", other: "h"})
        assert (await look(conn)).due == []  # held rows are not on offer
        await release_claims(conn, SCHEMA, claims, attempts=0)
        assert (await look(conn)).due == [(0, "a")]  # the claimed one, and the next one of its partition key


async def test_unknown_steps_leave_a_fair_queue_and_come_back_from_the_shelf(
    durable_dsn: str, db: psycopg.Connection
):
    strange = insert(db, 3, fair_key="a")
    db.execute("update durable.gen_durable set fsm = 'n'")
    [mine] = insert(db, 1, fair_key="b")
    async with connect(durable_dsn) as conn:
        claims, _, seen = await take(conn, Entry(0, "a", 3), Entry(0, "b", 1))
        assert ([claim.id for claim in claims], seen) == ([mine], dict.fromkeys(strange, "s"))
        assert rows(db, "hold", "fsm = 'n'") == [(SHELVED,)] * 3
        both = {"known": ("m/1", "n/1"), "shelved": [address("n/1")]}
        [next_one] = insert(db, 1, fair_key="b")
        claims, keys, _ = await take(conn, Entry(0, "b", 1), limit=2, from_shelf=1, **both)  # type: ignore[arg-type]
        assert sorted(claim.id for claim in claims) == [strange[0], next_one]
        assert sorted(keys.values()) == ["a", "b"]


async def test_nothing_is_taken_from_a_paused_queue_and_a_paused_machine_is_set_aside(
    durable_dsn: str, db: psycopg.Connection
):
    [a] = insert(db, 1, fair_key="a")
    [n] = insert(db, 1, fair_key="b")
    db.execute("update durable.gen_durable set fsm = 'n' where id = %s", [n])
    async with connect(durable_dsn) as conn:
        db.execute("insert into durable.pauses (queue, fsm) values ('default', '')")
        assert await take(conn, Entry(0, "a", 1)) == ([], {}, {})
        db.execute("update durable.pauses set fsm = 'n'")
        claims, _, seen = await take(conn, Entry(0, "a", 1), Entry(0, "b", 1), known=("m/1", "n/1"))
        assert ([claim.id for claim in claims], seen) == ([a], {n: "s"})


async def test_a_row_that_waits_for_others_in_a_graph_is_seen_when_it_is_offered(
    durable_dsn: str, db: psycopg.Connection
):
    [number] = insert(db, 1, fair_key="a", hold=5)
    async with connect(durable_dsn) as conn:
        assert (await look(conn)).due == []
        db.execute("update durable.gen_durable set hold = 0")
        assert (await look(conn)).due == [(0, "a")]
        assert await ids(conn, Entry(0, "a", 1)) == [number]


def test_a_key_that_no_index_entry_holds_is_refused(db: psycopg.Connection):
    for key in ("", "k" * 2600):
        with pytest.raises(psycopg.errors.CheckViolation):
            insert(db, 1, fair_key=key, hold=1)
    insert(db, 1, fair_key="k" * 2500)


FLOOD = """
insert into durable.gen_durable (fsm, step, fair_key, eligible_at)
select 'm', 's', {key}, now() + {later} * interval '1 day' from generate_series(1, {count}) n
"""


def fill(db: psycopg.Connection, *, key: str, count: int, later: int = 0) -> None:
    db.execute(FLOOD.format(key=key, count=count, later=later))  # type: ignore[arg-type]


async def calls(limit: int, keys: Sequence[str]) -> tuple[list[bytes | None], list[bytes | None]]:
    """The parameters of a look and of a pick."""
    recorder = Recorder()
    await look(recorder, due_keys=max(4 * limit, 64))  # type: ignore[arg-type]
    await take(recorder, *(Entry(0, key, limit) for key in keys), limit=limit)  # type: ignore[arg-type]
    return list(recorder.calls[0][1]), list(recorder.calls[1][1])


async def pages(db: psycopg.Connection, limit: int, keys: Sequence[str] = ()) -> tuple[int, int]:
    """The pages that a look and a pick read, on a second run."""
    found = []
    for name, params in zip(("read_fair_keys", "pick_fair"), await calls(limit, keys), strict=True):
        given = [None if each is None else each.decode() for each in params]
        for _ in range(2):
            plan = explain(db, statement(name, SCHEMA).sql, given, settings=PLANS, generic=True)  # type: ignore[arg-type]
        found.append(plan.buffers)
    return found[0], found[1]


async def test_the_backlog_of_a_key_costs_nothing(db: psycopg.Connection):
    """Also if the statistics know of no other key: the order of the queue would be read to its end."""
    fill(db, key="'a'", count=100)
    fill(db, key="'b'", count=1)
    db.execute("vacuum analyze durable.gen_durable")
    small = await pages(db, 10, ["b", "a"])
    db.execute("delete from durable.gen_durable")
    fill(db, key="'a'", count=30_000)
    db.execute("vacuum analyze durable.gen_durable")
    fill(db, key="'b'", count=1)
    large = await pages(db, 10, ["b", "a"])
    assert large[0] <= small[0] + 300  # reads more of the backlog, in search of rows without a key
    assert large[1] <= small[1] * 1.5 + 40


async def test_keys_whose_rows_are_all_in_the_future_cost_a_bounded_number_of_pages(db: psycopg.Connection):
    fill(db, key="'k' || n", count=10_000, later=1)
    fill(db, key="'z'", count=1)
    db.execute("vacuum analyze durable.gen_durable")
    looked, picked = await pages(db, 10, ["z"])
    assert looked <= 6 * fair.MAX_VISITS
    assert picked <= 300


async def test_explain_counts_the_rows_of_its_key_that_go_first(durable_dsn: str, db: psycopg.Connection):
    first, _, last = insert(db, 3, fair_key="a")
    insert(db, 5, fair_key="b")
    [plain] = insert(db)
    async with connect(durable_dsn) as conn:
        found = [(await observe_instance(conn, SCHEMA, number)) for number in (first, last, plain)]
    assert [each and each.fair for each in found] == [("a", 0), ("a", 2), None]
