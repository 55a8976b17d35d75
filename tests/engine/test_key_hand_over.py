"""A partition key stays on its node from row to row: the commit of one claims the next; also if its answer is lost."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import attrs
import durable_actors as da
import pytest
import trio
from durable_actors._engine.claiming.hand_over import MAX_TURNS
from durable_actors._engine.claiming.planner import ReleaseOrphans
from durable_actors._engine.claims import ActiveClaim
from durable_actors.engine import open_engine
from durable_actors.telemetry import Event, Picked
from tests.engine.conftest import JOURNAL
from tests.engine.dispatcher_kit import DispatcherRig
from tests.engine.kit import Db, claim
from tests.engine.planner_rig import LIMITS
from tests.engine.test_hand_over import Rig
from tests.kit import PATIENCE
from tests.support.faults import open_proxy

ROWS = 30


def jobs() -> tuple[Any, list[int], trio.Event]:
    """A job, what has run, and when all have."""
    ran: list[int] = []
    over = trio.Event()

    @da.job(name="keyed", queue="keyed")
    async def keyed(args: dict[str, Any]) -> None:
        ran.append(args["n"])
        if len(ran) == ROWS:
            over.set()

    return keyed, ran, over


async def insert(engine: Any, job: Any) -> None:
    rows = [{"args": {"n": number}, "partition_key": "k"} for number in range(ROWS)]
    await engine.client.insert_many(job, rows)


async def test_the_rows_of_a_key_follow_one_another_without_picks(db: Db, registry: object):
    job, ran, over = jobs()
    events: list[Event] = []
    async with open_engine(dsn=db.dsn, queues={"keyed": 5}) as engine:
        engine.telemetry.subscribe(events.append)
        await insert(engine, job)
        with trio.fail_after(PATIENCE):
            await over.wait()
    assert ran == [*range(ROWS)]
    # Inserted, claimed, done; an offer would be one more. Rows whose start is recorded are held by a pick.
    moves = 4 if JOURNAL > 1 else 3
    query = f"select count(*) from durable.gen_durable where partition_key = 'k' and rev = {moves}"
    [(handed,)] = db.execute(query)
    assert handed >= ROWS // 2
    assert sum(event.claimed for event in events if isinstance(event, Picked)) == ROWS, (
        "each claim is told once"
    )


async def test_what_a_lost_answer_handed_over_runs_soon_and_in_order(db: Db, registry: object):
    job, ran, over = jobs()
    async with open_proxy(db.dsn) as proxy:
        options: dict[str, Any] = {"dsn": proxy.dsn, "queues": {"keyed": 5}, "poll_interval": 60}
        async with open_engine(**options) as engine:
            proxy.lose_reply(after=b"hand_siblings")
            await insert(engine, job)
            await proxy.wait_lost()
            with trio.fail_after(PATIENCE):  # the lease is a minute
                await over.wait()
    assert ran == [*range(ROWS)]


# -- what the node decides


class KeyRig(Rig):
    """A claim with a key, whose outcome is on its way."""

    def __init__(self) -> None:
        super().__init__()
        self.active = self.own(claim("k", 1, queue="q"))

    def own(self, found: Any) -> ActiveClaim:
        active = ActiveClaim(found)
        self.node.claims.add(active)
        self.dispatcher.keys.take(found)
        return active

    def takes(self) -> bool:
        heir = self.hand_over.begin_keys([self.active.claim])
        return heir is not None and heir.claims == {self.active.claim.claim_id}


async def test_the_key_and_its_turns_pass_to_the_next_row():
    rig = KeyRig()
    assert rig.takes()
    following = claim("k", 2, queue="q")
    rig.hand_over.done([following])
    found = rig.node.claims.find(following.claim_id)
    assert rig.dispatcher.keys.owners == {"k": following.claim_id}
    assert (found.turns, rig.active.handed_on) == (1, True)
    assert 0 < found.turns_until < math.inf
    assert [task.slice.active for task in rig.dispatcher.pool.tasks] == [found], "it begins at once"


async def test_a_key_that_was_handed_on_often_has_its_next_row_picked():
    rig = KeyRig()
    rig.active.turns = MAX_TURNS - 1
    assert rig.takes()
    rig.hand_over.done([])
    rig.active.turns = MAX_TURNS
    assert not rig.takes()


def urgent(rig: KeyRig) -> None:
    rig.dispatcher.dispatcher.add([claim(None, 5, queue="q", priority=-1)], 0.0)


NOT: dict[str, Callable[[KeyRig], object]] = {
    "the node drains": lambda rig: setattr(rig.node.draining, "value", True),
    "a step is not known to the database": lambda rig: setattr(rig.node, "told", 0),
    "its feeder has ended": lambda rig: rig.dispatcher.dispatcher.close(),
    "all slots are taken": lambda rig: rig.dispatcher.add(10),
    "its feeder is about to release orphans": lambda rig: rig.planner.planner.lost_claims(),
    "the queue is paused": lambda rig: rig.planner.planner.learn_pauses({"": math.inf}, 100.0),
    "the session is in doubt": lambda rig: setattr(rig.dispatcher.keys, "up", False),
    "the key went with its session": lambda rig: rig.dispatcher.keys.owners.clear(),
    "the claim is lost": lambda rig: rig.node.claims.lose(rig.active, "test"),
    "others have waited long enough": lambda rig: setattr(rig.active, "turns_until", 0.0),
    "a more urgent row waits": urgent,
}


@pytest.mark.parametrize("why", NOT)
async def test_it_takes_nothing_if(why: str):
    rig = KeyRig()
    NOT[why](rig)
    assert not rig.takes()


async def test_a_session_that_is_lost_during_the_commit_keeps_no_key():
    rig = KeyRig()
    assert rig.takes()
    rig.dispatcher.keys.up = False
    rig.hand_over.done([claim("k", 2, queue="q")])
    assert not rig.active.handed_on
    assert not rig.dispatcher.pool.tasks, "its feeder takes the key first"
    assert len(rig.dispatcher.dispatcher.without_key()) == 1


async def test_places_are_kept_for_keys_that_were_handed_on():
    rig = KeyRig()
    rig.active.turns = 1
    free = rig.dispatcher.demand()
    assert rig.takes()
    assert rig.dispatcher.demand() == free - 1
    rig.hand_over.failed(unknown_fate=False)
    assert rig.dispatcher.demand() == free


async def test_claims_of_an_unknown_fate_are_looked_for():
    rig = KeyRig()
    assert rig.takes()
    rig.hand_over.failed(unknown_fate=True)
    assert isinstance(rig.planner.round("message")[0], ReleaseOrphans)


async def test_the_next_row_of_a_queue_whose_feeder_has_ended_is_released():
    rig = KeyRig()
    assert rig.takes()
    rig.dispatcher.dispatcher.close()
    rig.hand_over.done([claim("k", 2, queue="q")])
    assert len(rig.dispatcher.commits.released) == 1
    assert rig.dispatcher.keys.owners == {}


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("followed", [True, False])
async def test_the_feeder_is_woken_for_a_slot_unless_it_knows_of_others_and_a_sibling_takes_it(
    slots: int, *, followed: bool
):
    rig = DispatcherRig(attrs.evolve(LIMITS, concurrency=slots))
    [active] = rig.add()
    active.turns = 1
    [task] = rig.start()
    rig.suspend(task)
    assert (rig.demand() > 0) == (slots > 1)
    before = rig.woken
    rig.hand_over(task)
    assert (rig.woken > before) == (slots == 1), "it may wait for slots, and the commit may take long"
    rig.demand()
    before = rig.woken
    active.handed_on = followed
    rig.dispatcher.finish(active, rig.now)
    assert (rig.woken > before) == (not followed)
