"""A commit claims the dependents that it offers, for its own node: only what a pick of that moment would claim."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest
from durable_actors._store.commit import commit_outcomes
from durable_actors._store.lease import release_orphans
from durable_actors._store.rows import Status
from tests.store.graph_kit import Family, ending, family, hand_over, room
from tests.store.kit import OWNER, SCHEMA, claims, connect, insert
from tests.store.stepping import commit
from tests.store.test_graph_races import Act, cancels, pauses, race, resumes

PAIR = {"a": "", "b": "a"}
FAN = {"a": "", **dict.fromkeys("bcdef", "a")}


async def test_what_a_commit_offers_is_claimed_with_it(db: psycopg.Connection, durable_dsn: str):
    async with connect(durable_dsn) as conn:
        all_of = await family(db, conn, PAIR)
        done = await hand_over(all_of, a="done")
        [claim] = done.handed
        assert (claim.id, claim.queue, claim.step, done.offered) == (all_of.ids["b"], "default", "s", [])
        assert all_of.column("b", "status, locked_by, hold") == ("executing", OWNER.name, 0)
        assert await claims(conn) == [], "nobody else sees it on offer"
        await commit(conn, ending(claim, "done"))
        assert all_of.statuses() == {"a": "done", "b": "done"}, "it is a claim like any other"


async def test_the_most_urgent_are_handed_over_and_the_rest_is_offered(
    db: psycopg.Connection, durable_dsn: str
):
    async with connect(durable_dsn) as conn:
        all_of = await family(db, conn, FAN)
        db.execute("update durable.gen_durable set priority = -1 where id = %s", [all_of.ids["e"]])
        done = await hand_over(all_of, room(2), a="done")
        assert [each.id for each in done.handed] == [all_of.ids["e"], all_of.ids["b"]]
        assert all_of.keys(each.id for each in done.offered) == "cdf" == all_of.offered()


KEPT_BACK: dict[str, str | None] = {
    "another node may not know its step": "update durable.gen_durable set step = 'other' where child_key = 'b'",
    "it has a partition key": "update durable.gen_durable set partition_key = 'k' where child_key = 'b'",
    "every move is recorded": "update durable.gen_durable set journal = 3 where child_key = 'b'",
    "it is in another queue": "update durable.gen_durable set queue = 'q' where child_key = 'b'",
    "the queue is paused": "insert into durable.pauses (queue, fsm) values ('default', '')",
    "a machine is paused": "insert into durable.pauses (queue, fsm) values ('default', 'other')",
    "a row of the queue is on offer": None,
}


@pytest.mark.parametrize("why", KEPT_BACK)
async def test_what_a_pick_would_not_claim_now_is_offered(db: psycopg.Connection, durable_dsn: str, why: str):
    async with connect(durable_dsn) as conn:
        all_of = await family(db, conn, PAIR)
        found = await all_of.claim()
        change = KEPT_BACK[why]
        if change is None:
            insert(db)
        else:
            db.execute(change)
        flushed = await commit_outcomes(
            conn, SCHEMA, [ending(found["a"], "done")], accept_late=True, room=lambda _queues: room()
        )
        assert flushed.handed == []
        assert [each.id for each in flushed.offered] == [all_of.ids["b"]]
        assert all_of.column("b", "status, hold, claim_id, locked_by") == ("runnable", 0, None, None)
        db.execute("delete from durable.pauses")


async def test_one_that_is_not_due_and_a_doomed_one_are_offered(db: psycopg.Connection, durable_dsn: str):
    async with connect(durable_dsn) as conn:
        later = await family(db, conn, PAIR, columns={"delay": 60.0})
        db.execute("update durable.gen_durable set eligible_at = now() where child_key = 'a'")
        assert (await hand_over(later, a="done")).handed == []
        db.execute("truncate durable.gen_durable cascade")
        doomed = await family(db, conn, PAIR)
        assert (await hand_over(doomed, a="failed")).handed == []
        assert doomed.offered() == "b"


async def test_a_repeated_commit_hands_nothing_over_and_the_claims_of_the_first_are_released(
    db: psycopg.Connection, durable_dsn: str
):
    """After a commit of unknown fate: the node knows nothing of its claims."""
    async with connect(durable_dsn) as conn:
        all_of = await family(db, conn, PAIR)
        found = await all_of.claim()
        for times in (1, 0):
            done = await commit_outcomes(
                conn, SCHEMA, [ending(found["a"], "done")], accept_late=True, room=lambda _queues: room()
            )
            assert (len(done.handed), len(done.committed)) == (times, times)
        count, offered = await release_orphans(conn, SCHEMA, owner=OWNER.name, queue="default", known=[])
        assert (count, [each.id for each in offered]) == (1, [all_of.ids["b"]])
        [again] = await claims(conn)
        assert (again.id, again.attempt) == (all_of.ids["b"], 0)


def hands_over(claim: Any, status: Status = "done") -> Act:
    """An end whose node takes what it offers. What it took is released: nobody runs it here."""

    async def act(conn: Any) -> Any:
        done = await commit_outcomes(
            conn, SCHEMA, [ending(claim, status)], accept_late=True, room=lambda _queues: room()
        )
        await release_orphans(conn, SCHEMA, owner=OWNER.name, queue="default", known=[])
        return done

    return act


@pytest.mark.slow
@pytest.mark.parametrize("other", ["end", "pause", "resume", "cancel"])
async def test_a_hand_over_in_every_order_with(db: psycopg.Connection, durable_dsn: str, other: str):
    """Two ends that each could be the last; a dependent that is paused, resumed, cancelled meanwhile."""

    async def prepare(all_of: Family) -> tuple[Act, Act]:
        found = await all_of.claim()
        number = all_of.ids["c"]
        if other == "end":
            return hands_over(found["a"]), hands_over(found["b"])
        await commit(all_of.conn, ending(found["a"], "done"))
        if other == "resume":
            await pauses(number)(all_of.conn)
        return hands_over(found["b"]), {"pause": pauses, "resume": resumes, "cancel": cancels}[other](number)

    seen = await race(db, durable_dsn, prepare, turns=(6, 3), journal=1)
    ends = {("done", "done", "done")}
    assert seen <= ends | ({("cancelled", "done", "done")} if other == "cancel" else set())
