"""Dependents that an outcome of this node offers are claimed with its commit; also if its answer is lost."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import durable_actors as da
import pytest
import trio
import trio.testing
from durable_actors._engine.claiming.hand_over import HandOver
from durable_actors._engine.claiming.idle_queues import IdleQueues
from durable_actors._engine.claiming.planner import ReleaseOrphans
from durable_actors.engine import open_engine
from tests.engine import planner_rig
from tests.engine.conftest import JOURNAL
from tests.engine.dispatcher_kit import DispatcherRig
from tests.engine.kit import Db, claim
from tests.engine.planner_rig import found
from tests.kit import PATIENCE
from tests.support.faults import open_proxy

LINKS = 30


def chain() -> tuple[Any, list[str]]:
    """A parent of a chain of jobs, and what has run."""
    ran: list[str] = []

    @da.job(name="hand.task", queue="hand")
    async def task(args: dict[str, Any]) -> None:
        ran.append(args["key"])

    class Parent(da.Machine[dict[str, Any]], name="hand.parent", queue="other"):
        @da.step(initial=True)
        async def start(self, ctx: da.Context[dict[str, Any]]) -> da.Outcome:
            children: list[da.Child] = []
            for index in range(LINKS):
                children.append(
                    da.Child(task, key=f"k{index}", args={"key": f"k{index}"}, after=children[-1:])
                )
            return da.ScheduleChildren(self.end, children)

        @da.step
        async def end(self, ctx: da.Context[dict[str, Any]]) -> da.Outcome:
            return da.Done(dict(ctx.children_counts))

    return Parent, ran


async def test_a_chain_is_handed_on_without_picks(db: Db, registry: object):
    parent, ran = chain()
    async with open_engine(dsn=db.dsn, queues={"hand": 5, "other": 1}) as engine:
        number = await engine.client.insert(parent, state={})
        assert await engine.client.result(number, timeout=PATIENCE) == {"done": LINKS}
    assert ran == [f"k{index}" for index in range(LINKS)]
    if JOURNAL > 2:
        return  # every claim is recorded: nothing is handed over
    # Started, claimed, done; an offer would be one more.
    [(handed,)] = db.execute("select count(*) from durable.gen_durable where child_key <> 'k0' and rev = 3")
    assert handed >= LINKS // 2


async def test_what_a_lost_answer_handed_over_runs_soon_and_once(db: Db, registry: object):
    parent, ran = chain()
    async with open_proxy(db.dsn) as proxy:
        options: dict[str, Any] = {"dsn": proxy.dsn, "queues": {"hand": 5, "other": 1}, "poll_interval": 60}
        async with open_engine(**options) as engine:
            proxy.lose_reply(after=b"tell_dependents")
            number = await engine.client.insert(parent, state={})
            await proxy.wait_lost()
            with trio.fail_after(PATIENCE):  # the lease is a minute
                assert await engine.client.result(number, timeout=PATIENCE) == {"done": LINKS}
    assert ran == [f"k{index}" for index in range(LINKS)]


class Rig:
    """A hand-over for one queue, whose last pick has found all that was on offer."""

    def __init__(self) -> None:
        self.planner, self.dispatcher = planner_rig.Rig(), DispatcherRig(planner_rig.LIMITS)
        self.node: Any = SimpleNamespace(
            draining=self.dispatcher.draining,
            told=1,
            catalog=SimpleNamespace(generation=1, array=b"{}"),
            owner=None,
            telemetry=SimpleNamespace(active=False),
            claims=self.dispatcher.claims,
        )
        planners, dispatchers = {"q": self.planner.planner}, {"q": self.dispatcher.dispatcher}
        self.hand_over = HandOver(self.node, planners, dispatchers, IdleQueues(), self.dispatcher.keys)
        self.planner.round()

    def room(self) -> int:
        room = self.hand_over.begin(["q"])
        return 0 if room is None else room.queues["q"]


async def test_a_queue_with_free_slots_that_is_drained_takes_rows():
    rig = Rig()
    assert rig.room() == 10
    rig.hand_over.done([claim(None, number, queue="q") for number in (1, 2)])
    assert len(rig.dispatcher.claims) == 2
    assert rig.dispatcher.pool.tasks, "the first one begins at once"


NOTHING: dict[str, Callable[[Rig], object]] = {
    "the node drains": lambda rig: setattr(rig.node.draining, "value", True),
    "a step is not known to the database": lambda rig: setattr(rig.node, "told", 0),
    "its feeder has ended": lambda rig: rig.dispatcher.dispatcher.close(),
    "all slots are taken": lambda rig: rig.dispatcher.add(10),
    "a row is on offer": lambda rig: rig.planner.planner.notify(7),
    "rows may be on offer": lambda rig: rig.planner.planner.notify(priority=0),
    "there may be orphans": lambda rig: rig.planner.planner.failed(unknown_fate=True),
    "the queue is paused": lambda rig: rig.planner.planner.learn_pauses({"": math.inf}, 100.0),
    "a machine is paused": lambda rig: rig.planner.planner.learn_pauses({"m": math.inf}, 100.0),
    "a pick is under way": lambda rig: (
        rig.planner.planner.pick_from() and setattr(rig.planner.planner, "queue_empty", False)
    ),
    "the last pick was full": lambda rig: full_pick(rig),
}


def full_pick(rig: Rig) -> None:
    rig.planner.picks = [found(*range(1, 11))]
    rig.planner.planner.notify(1)
    rig.planner.round("message")


@pytest.mark.parametrize("why", NOTHING)
async def test_it_takes_nothing_if(why: str):
    rig = Rig()
    NOTHING[why](rig)
    assert rig.room() == 0


async def test_claims_of_an_unknown_fate_are_released_before_the_next_pick():
    rig = Rig()
    assert rig.room()
    rig.hand_over.failed(unknown_fate=True)
    assert rig.planner.woken
    assert rig.room() == 0
    assert isinstance(rig.planner.round("message")[0], ReleaseOrphans)
    assert rig.room(), "and then it takes rows again"


async def test_a_refused_commit_has_claimed_nothing():
    rig = Rig()
    assert rig.room()
    rig.hand_over.failed(unknown_fate=False)
    assert rig.room()


async def test_orphans_are_not_looked_for_while_a_commit_is_under_way(autojump_clock: object):
    """What it has claimed is known when it has answered: before that it looks like an orphan."""
    rig = Rig()
    assert rig.room()
    known: list[int] = []

    async def look() -> None:
        await rig.hand_over.settled()
        known.append(len(rig.dispatcher.claims))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(look)
        await trio.testing.wait_all_tasks_blocked()
        assert known == []
        rig.hand_over.done([claim(None, 1, queue="q")])
    assert known == [1]


async def test_what_is_handed_to_a_queue_whose_feeder_has_ended_is_released():
    rig = Rig()
    assert rig.room()
    rig.dispatcher.dispatcher.close()
    rig.hand_over.done([claim(None, 1, queue="q")])
    assert (len(rig.dispatcher.claims), len(rig.dispatcher.commits.released)) == (0, 1)


async def test_what_is_handed_over_while_no_step_task_can_start_is_the_feeders(autojump_clock: object):
    """The step pool restarts. The flusher goes on with what follows the commit, and nobody waits for the hand-over."""
    rig = Rig()
    assert rig.room()
    rig.dispatcher.pool.open = False
    woken = rig.dispatcher.woken
    async with trio.open_nursery() as nursery:
        nursery.start_soon(rig.hand_over.settled)
        await trio.testing.wait_all_tasks_blocked()
        with trio.fail_after(1.0):
            rig.hand_over.done([claim(None, 1, queue="q")])
    assert rig.dispatcher.woken == woken + 1
    rig.dispatcher.pool.open = True
    rig.dispatcher.dispatcher.start(0.0)
    assert rig.dispatcher.pool.tasks
