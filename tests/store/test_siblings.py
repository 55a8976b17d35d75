"""A commit that leaves a partition key claims the key's next row for its node: what a pick would claim, in order."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest
import trio
from durable_actors._store.claim import Owner, release_claims
from durable_actors._store.commit import commit_outcomes
from durable_actors._store.holds import HELD, OFFERED
from durable_actors._store.lease import reap_claims, release_orphans
from durable_actors._store.rows import Claim
from durable_actors._store.siblings import freeing
from tests.store.kit import EXPIRE, OWNER, ROLES, SCHEMA, claims, connect, insert, outcome, pick, rows
from tests.store.siblings_kit import TOKEN, heir, leave
from tests.store.test_key_races import Gate, Gated, what
from tests.store.test_plans import executing, measure
from tests.support.interleave import wait_backend_blocked

STATE = "id, status, hold"


async def first_of(
    db: psycopg.Connection, conn: Any, count: int = 3, **columns: object
) -> tuple[Claim, list[int]]:
    """The claim of a key's first row, and the ids of those held behind it."""
    insert(db, partition_key="k", **columns)
    behind = insert(db, count - 1, partition_key="k", hold=HELD, **columns)
    [claim] = await claims(conn)
    return claim, behind


async def test_the_next_row_is_claimed_with_the_outcome(db: psycopg.Connection, durable_dsn: str):
    async with connect(durable_dsn) as conn:
        claim, (two, three) = await first_of(db, conn)
        done = await leave(conn, outcome(claim))
        [next_one] = done.handed
        assert (next_one.id, next_one.queue, next_one.partition_key, done.offered) == (
            two,
            "default",
            "k",
            [],
        )
        assert rows(db, "id, status, hold, locked_by, rev")[1:] == [
            (two, "executing", 0, OWNER.name, 2),
            (three, "runnable", HELD, None, 1),
        ]
        assert await claims(conn) == []
        [last] = (await leave(conn, outcome(next_one))).handed
        assert (await leave(conn, outcome(last))).handed == []
        assert rows(db, "status") == [("done",)] * 3


ENDS: dict[str, dict[str, Any]] = {
    "Done": {},
    "Stop": {"status": "failed", "last_error": "no"},
    "Await": {"status": "awaiting_signal", "awaits": ("go",)},
    "Next, later": {"status": "runnable", "advance": 1, "delay": 60.0},
    "Next, which would run ahead": {"status": "runnable", "advance": 1, "keep_claim": True},
    "Retry": {"status": "runnable"},
    "Done, and its row is deleted": {"deletes": True},
}


@pytest.mark.parametrize("end", ENDS)
async def test_whatever_leaves_the_key_hands_it_on(db: psycopg.Connection, durable_dsn: str, end: str):
    async with connect(durable_dsn) as conn:
        claim, (two, _) = await first_of(db, conn)
        # A sibling that became due while it ran goes first, also before the step that its own row enters.
        db.execute(
            "update durable.gen_durable set eligible_at = eligible_at - interval '1 s' where id = %s", [two]
        )
        done = await leave(conn, outcome(claim, **ENDS[end]), token=TOKEN)
        assert [each.id for each in done.handed] == [two]


async def test_a_row_that_enters_another_key_leaves_its_old_one_to_the_pick(
    db: psycopg.Connection, durable_dsn: str
):
    async with connect(durable_dsn) as conn:
        claim, (two, _) = await first_of(db, conn)
        done = await leave(conn, outcome(claim, "runnable", advance=1, rekey=True, partition_key="other"))
        assert (done.handed, [each.id for each in done.offered]) == ([], [two])


async def test_one_that_stays_has_not_left_its_key(db: psycopg.Connection, durable_dsn: str):
    async with connect(durable_dsn) as conn:
        insert(db, partition_key="k")
        insert(db, partition_key="k", hold=HELD, eligible_at="=now() + interval '1 h'")
        [claim] = await claims(conn)
        done = await leave(conn, outcome(claim, "runnable", advance=1, keep_claim=True))
        assert done.committed[claim.id].status == "executing"
        assert done.handed == []


async def test_its_own_row_is_left_to_the_pick(db: psycopg.Connection, durable_dsn: str):
    async with connect(durable_dsn) as conn:
        insert(db, partition_key="k")
        [claim] = await claims(conn)
        assert (await leave(conn, outcome(claim, "runnable"))).handed == []
        assert rows(db, "status, hold") == [("runnable", OFFERED)]


KEPT_BACK: dict[str, str] = {
    "the node does not know its step": "step = 'other'",
    "it is in another queue": "queue = 'q'",
    "it is less urgent than the outcome's row": "priority = 1",
    "it uses a limit": "rate_limit = '[]'",
    "somebody asks something of it": 'request = \'{"kind": "wait"}\'',
    "it is on the shelf": "hold = 2, shelved_step = 's'",
    "it is throttled": "hold = 3",
}


@pytest.mark.parametrize("why", KEPT_BACK)
async def test_nobody_passes_a_first_row_that_is_left_to_the_pick(
    db: psycopg.Connection, durable_dsn: str, why: str
):
    async with connect(durable_dsn) as conn:
        claim, (two, three) = await first_of(db, conn)
        db.execute(f"update durable.gen_durable set {KEPT_BACK[why]} where id = %s", [two])
        if "priority" in KEPT_BACK[why]:
            db.execute("update durable.gen_durable set priority = 1 where id = %s", [three])
        done = await leave(conn, outcome(claim))
        assert done.handed == []
        assert {three} >= {each.id for each in done.offered} - {two}
        assert not rows(db, "id", "status = 'executing'")


PASSED = {
    "it is paused": 'hold = 4, request = \'{"kind": "pause"}\'',
    "it waits for others": "hold = 5",
    "it is not due": "eligible_at = now() + interval '1 h'",
}


@pytest.mark.parametrize("why", PASSED)
async def test_a_row_that_has_given_up_its_place_is_passed(
    db: psycopg.Connection, durable_dsn: str, why: str
):
    async with connect(durable_dsn) as conn:
        claim, (two, three) = await first_of(db, conn)
        db.execute(f"update durable.gen_durable set {PASSED[why]} where id = %s", [two])
        assert [each.id for each in (await leave(conn, outcome(claim))).handed] == [three]


@pytest.mark.parametrize("machine", ["", "m"])
async def test_nothing_of_a_paused_queue_or_machine_is_claimed(
    db: psycopg.Connection, durable_dsn: str, machine: str
):
    async with connect(durable_dsn) as conn:
        claim, _ = await first_of(db, conn)
        db.execute("insert into durable.pauses (queue, fsm) values ('default', %s)", [machine])
        done = await leave(conn, outcome(claim))
        assert (done.handed, done.offered) == ([], [])
        db.execute("delete from durable.pauses")


async def test_no_more_than_there_is_room_for_and_the_most_urgent(db: psycopg.Connection, durable_dsn: str):
    async with connect(durable_dsn) as conn:
        for key in "abc":
            insert(db, partition_key=key)
        found = await claims(conn)
        seconds = [
            insert(db, partition_key=key, hold=HELD, eligible_at=f"=now() - interval '{age} s'")[0]
            for key, age in (("a", 1), ("b", 3), ("c", 2))
        ]
        done = await leave(conn, *[outcome(each) for each in found], room=2)
        assert [each.id for each in done.handed] == [seconds[1], seconds[2]]
        assert [each.id for each in done.offered] == [seconds[0]]


async def test_a_stale_outcome_hands_nothing_on(db: psycopg.Connection, durable_dsn: str):
    """Its key may be executing elsewhere, or somebody may be deciding about it."""
    async with connect(durable_dsn) as conn:
        claim, _ = await first_of(db, conn)
        db.execute(EXPIRE)
        await reap_claims(conn, SCHEMA, limit=10)
        done = await leave(conn, outcome(claim))
        assert (done.committed, done.handed) == ({}, [])
        assert not rows(db, "id", "status = 'executing'")
        other = Owner(SCHEMA, "other", b"other", 60.0)
        [again] = (await pick(conn, owner=other)).claims
        done = await leave(conn, outcome(claim), token=TOKEN)
        assert done.handed == []
        assert rows(db, "id, locked_by", "status = 'executing'") == [(again.id, "other")]


@pytest.mark.parametrize("deletes", [False, True])
async def test_a_repeated_commit_hands_nothing_on_and_the_claim_of_the_first_is_released(
    db: psycopg.Connection, durable_dsn: str, *, deletes: bool
):
    """After a commit of unknown fate: the node knows nothing of the claim that it made."""
    async with connect(durable_dsn) as conn:
        claim, (two, three) = await first_of(db, conn)
        for token in (TOKEN, TOKEN[:-1] + "1"):
            done = await leave(conn, outcome(claim, deletes=deletes), token=token)
            assert [each.id for each in done.handed] == ([two] if token == TOKEN else [])
        count, offered = await release_orphans(conn, SCHEMA, owner=OWNER.name, queue="default", known=[])
        assert count == 1
        assert two in {each.id for each in offered}
        [again] = await claims(conn)
        assert (again.id, again.attempt) == (two, 0), "the order has not changed"
        assert rows(db, "hold", f"id = {three}") == [(HELD,)]


@pytest.mark.parametrize("deletes", [False, True])
async def test_a_repeated_outcome_hands_on_no_key_that_another_node_is_about_to_take(
    db: psycopg.Connection, durable_dsn: str, *, deletes: bool
):
    """The key is free: the first commit has left it. The other node knows the third row alone, and has claimed it."""
    async with connect(durable_dsn) as conn, connect(durable_dsn) as other:
        insert(db, partition_key="k")
        [claim] = await claims(conn)
        insert(db, partition_key="k")
        [third] = insert(db, partition_key="k", queue="q")
        db.execute("update durable.gen_durable set fsm = 'n' where id = %s", [third])
        mine = outcome(claim, deletes=deletes)
        await commit_outcomes(conn, SCHEMA, [mine], accept_late=True, token=TOKEN)
        async with other.transaction():
            assert what(await pick(other, queue="q", known=("n/1",))) == {third: "c"}
            done = await leave(
                conn, mine, token=TOKEN[:-1] + "1"
            )  # else it waits for the index, and is refused
            assert (done.committed, done.handed) == ({}, [])


# -- beside picks


async def test_a_pick_beside_a_hand_over_that_is_not_committed_leaves_the_key_alone(
    db: psycopg.Connection, durable_dsn: str
):
    async with connect(durable_dsn) as a, connect(durable_dsn) as b:
        claim, (two, three) = await first_of(db, a)
        db.execute("update durable.gen_durable set hold = 0")
        async with a.transaction():
            assert [each.id for each in (await leave(a, outcome(claim))).handed] == [two]
            assert what(await pick(b)) == {three: "l"}, "the second one is locked"
        assert what(await pick(b)) == {three: "h"}, "behind the one that was handed over"


async def test_what_a_pick_has_locked_is_left_to_it(db: psycopg.Connection, durable_dsn: str):
    """Nor does the row behind it go first."""
    async with connect(durable_dsn) as a, connect(durable_dsn) as b:
        claim, (two, three) = await first_of(db, a)
        async with b.transaction():
            await b.script(f"select 1 from durable.gen_durable where id = {two} for no key update")
            done = await leave(a, outcome(claim))
            assert done.handed == []
            assert [each.id for each in done.offered] == [three]
        picked = what(await pick(a))
        assert picked == {three: "h"}, "and the second one is offered again"
        assert what(await pick(a)) == {two: "c"}


@pytest.mark.parametrize("where", ["scan", "judge"])
async def test_an_old_snapshot_of_a_pick_does_not_see_the_key_free(
    db: psycopg.Connection, durable_dsn: str, where: str
):
    """Its snapshot is older than the hand-over, and it judges after that was committed: one row of the key executes."""
    gate = Gate(db)
    async with connect(durable_dsn) as a, connect(durable_dsn, lock_timeout="0") as b:
        claim, (two, _) = await first_of(db, a)
        db.execute("update durable.gen_durable set hold = 0")
        async with trio.open_nursery() as nursery:
            seen: list[Any] = []

            async def pick_late() -> None:
                seen.append(await pick(Gated(b, where)))  # type: ignore[arg-type]

            nursery.start_soon(pick_late)
            await gate.wait_for(b)
            handed = (await leave(a, outcome(claim))).handed
            gate.open()
        claimed = [each.id for each in [*seen[0].claims, *handed]]
        assert claimed == [two], "once; a pick that has locked it keeps it"
        assert rows(db, "id", "status = 'executing'") == [(two,)]
        assert bool(handed) == (where == "scan")


async def test_a_pick_that_holds_rows_behind_the_outcome_is_waited_for(
    db: psycopg.Connection, durable_dsn: str
):
    """It has the executing row's lock: the outcome comes after it, and the hand-over sees what it held."""
    async with (
        connect(durable_dsn) as a,
        connect(durable_dsn, lock_timeout="0") as b,
        trio.open_nursery() as nursery,
    ):
        one, two = insert(db, 2, partition_key="k")
        [claim] = (await pick(a, limit=1)).claims
        assert claim.id == one
        handed: list[int] = []

        async def finish() -> None:
            handed.extend(each.id for each in (await leave(a, outcome(claim))).handed)

        async with b.transaction():
            assert what(await pick(b)) == {two: "h"}
            nursery.start_soon(finish)
            await wait_backend_blocked(durable_dsn, a.pid, by=b.pid)
    assert handed == [two]


async def test_a_claim_that_was_handed_over_and_is_released_offers_its_row_again(
    db: psycopg.Connection, durable_dsn: str
):
    async with connect(durable_dsn) as conn:
        claim, (two, _) = await first_of(db, conn)
        [next_one] = (await leave(conn, outcome(claim))).handed
        released = await release_claims(conn, SCHEMA, [next_one], attempts=0)
        assert released.ids == {two}
        [again] = await claims(conn)
        assert (again.id, again.attempt) == (two, 0)


async def test_the_claim_is_recorded_where_claims_are(db: psycopg.Connection, durable_dsn: str):
    async with connect(durable_dsn) as conn:
        claim, (two, _) = await first_of(db, conn, journal=3)
        await leave(conn, outcome(claim))
        records = db.execute(
            "select rev, kind, claim_id is not null from durable.journal where instance_id = %s order by rev",
            [two],
        ).fetchall()
        assert records == [(2, "claimed", True)]


@pytest.mark.parametrize("size", [1, 100])
def test_a_hand_over_is_driven_by_its_outcomes(big: psycopg.Connection[Any], size: int):
    claims = executing(big, "many", size)
    for number, each in enumerate(claims):
        each.partition_key = f"many {number}"
    keys = sorted(str(each.partition_key) for each in claims)
    taking = heir(*(each.claim_id for each in claims))
    call = freeing(SCHEMA, [outcome(each) for each in claims], keys, taking, TOKEN)
    found = measure(big, call, ROLES["commit"].settings)
    found.assert_no_seq_scan("gen_durable")
    assert "gen_durable_executing" not in found.indexes, found.text
    assert not any(kind.startswith("Bitmap") for kind in found.kinds), found.text
    assert found.buffers < 60 + 12 * size, found.text
