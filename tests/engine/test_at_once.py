"""A row that this process inserts or wakes, in a queue at rest, is claimed in the same transaction."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import durable_actors as da
import psycopg
import pytest
import trio
import trio.testing
from durable_actors._engine.claiming.at_once import ClaimsAtOnce
from durable_actors._engine.claiming.idle_queues import IdleQueues
from durable_actors._engine.claiming.planner import RefreshStats, ReleaseOrphans
from durable_actors._store.insert import insert_call, plan_rows
from durable_actors.telemetry import Picked
from tests.engine import planner_rig
from tests.engine.conftest import JOURNAL
from tests.engine.dispatcher_kit import DispatcherRig
from tests.engine.kit import QUIET, Db, Picks, at_rest, claim, dispatcher_of, parked, running
from tests.engine.planner_rig import found
from tests.kit import PATIENCE, until
from tests.store.kit import connect
from tests.support.faults import open_proxy

pytestmark = pytest.mark.usefixtures("registry")


class Rig:
    """Calls for one queue, whose last pick has found all that was on offer."""

    def __init__(self) -> None:
        self.planner, self.dispatcher = planner_rig.Rig(), DispatcherRig(planner_rig.LIMITS)
        self.node: Any = SimpleNamespace(
            draining=self.dispatcher.draining,
            told=1,
            catalog=SimpleNamespace(generation=1, array=b"{}"),
            owner=None,
            telemetry=SimpleNamespace(active=False),
        )
        planners, dispatchers = {"q": self.planner.planner}, {"q": self.dispatcher.dispatcher}
        self.calls = ClaimsAtOnce(self.node, planners, dispatchers, IdleQueues())
        self.planner.round()

    def begin(self) -> Any:
        return self.calls.begin(["q"])

    def claims(self) -> bool:
        ask = self.begin()
        if ask is not None:
            self.calls.failed(ask, unknown_fate=False)
        return ask is not None


async def test_a_queue_at_rest_claims_the_row_and_its_step_begins():
    rig = Rig()
    ask = rig.begin()
    rig.calls.done(ask, [claim(None, 1, queue="q")])
    assert len(rig.dispatcher.claims) == 1
    assert rig.dispatcher.pool.tasks, "it begins at once"


async def test_the_feeder_looks_then_whether_others_have_made_rows_too():
    rig = Rig()
    rig.calls.done(rig.begin(), [claim(None, 1, queue="q")])
    assert rig.planner.woken
    assert not rig.claims(), "before it has looked, the queue is not known to be at rest"
    assert isinstance(rig.planner.round("message")[0], RefreshStats)
    assert rig.claims()


async def test_one_call_at_a_time_so_that_a_burst_is_picked_in_batches():
    rig = Rig()
    first = rig.begin()
    assert rig.begin() is None
    rig.calls.done(first, [])
    assert rig.claims()


NOTHING: dict[str, Callable[[Rig], object]] = {
    "the node drains": lambda rig: setattr(rig.node.draining, "value", True),
    "a step is not known to the database": lambda rig: setattr(rig.node, "told", 0),
    "its feeder has ended": lambda rig: rig.dispatcher.dispatcher.close(),
    "all slots are taken": lambda rig: rig.dispatcher.add(10),
    "it would take the last slot": lambda rig: rig.dispatcher.add(9),
    "a row is on offer": lambda rig: rig.planner.planner.notify(7),
    "rows may be on offer": lambda rig: rig.planner.planner.notify(priority=0),
    "there may be orphans": lambda rig: rig.planner.planner.failed(unknown_fate=True),
    "the queue is paused": lambda rig: rig.planner.planner.learn_pauses({"": math.inf}, 100.0),
    "a machine is paused": lambda rig: rig.planner.planner.learn_pauses({"m": math.inf}, 100.0),
    "a pick is under way": lambda rig: (
        rig.planner.planner.pick_from() and setattr(rig.planner.planner, "queue_empty", False)
    ),
    "the last pick was full": lambda rig: full_pick(rig),
    "keys take turns": lambda rig: setattr(rig.planner.planner, "shares", object()),
}


def full_pick(rig: Rig) -> None:
    rig.planner.picks = [found(*range(1, 11))]
    rig.planner.planner.notify(1)
    rig.planner.round("message")


@pytest.mark.parametrize("why", NOTHING)
async def test_nothing_is_claimed_if(why: str):
    rig = Rig()
    NOTHING[why](rig)
    assert not rig.claims()


async def test_a_queue_that_this_node_does_not_serve_claims_nothing():
    assert Rig().calls.begin(["other"]) is None


async def test_a_claim_of_unknown_fate_is_released_before_the_next_pick():
    rig = Rig()
    rig.calls.failed(rig.begin(), unknown_fate=True)
    assert rig.planner.woken
    assert not rig.claims()
    assert isinstance(rig.planner.round("message")[0], ReleaseOrphans)
    assert rig.claims(), "and then it claims again"


async def test_a_refused_call_has_claimed_nothing():
    rig = Rig()
    rig.calls.failed(rig.begin(), unknown_fate=False)
    assert rig.claims()


async def test_orphans_are_not_looked_for_while_a_call_is_under_way(autojump_clock: object):
    """What it has claimed is known when it has answered: before that it looks like an orphan."""
    rig = Rig()
    ask, known = rig.begin(), list[int]()

    async def look() -> None:
        await rig.calls.settled("q")
        known.append(len(rig.dispatcher.claims))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(look)
        await trio.testing.wait_all_tasks_blocked()
        assert known == []
        rig.calls.done(ask, [claim(None, 1, queue="q")])
    assert known == [1]


async def test_what_is_claimed_for_a_queue_whose_feeder_has_ended_is_released():
    rig = Rig()
    ask = rig.begin()
    rig.dispatcher.dispatcher.close()
    rig.calls.done(ask, [claim(None, 1, queue="q")])
    assert (len(rig.dispatcher.claims), len(rig.dispatcher.commits.released)) == (0, 1)


async def test_what_is_claimed_while_no_step_task_can_start_is_the_feeders():
    """The step pool restarts. The call succeeds, the queue claims again, and the feeder starts the row."""
    rig = Rig()
    rig.dispatcher.pool.open = False
    woken = rig.dispatcher.woken
    rig.calls.done(rig.begin(), [claim(None, 1, queue="q")])
    assert rig.dispatcher.woken == woken + 1
    rig.dispatcher.pool.open = True
    rig.dispatcher.dispatcher.start(0.0)
    assert rig.dispatcher.pool.tasks
    rig.planner.round("message")
    assert rig.claims()


# -- the engine


def noting(ran: list[Any]) -> Any:
    @da.job(name="noted")
    async def noted(args: dict[str, Any]) -> None:
        ran.append(args["n"])

    return noted


async def test_an_insert_into_a_queue_at_rest_needs_no_pick(
    durable_dsn: str, monkeypatch: pytest.MonkeyPatch
):
    picks, ran, events = Picks(monkeypatch), list[Any](), list[Picked]()
    job = noting(ran)
    async with running(durable_dsn, **QUIET) as run:
        run.engine.telemetry.subscribe(lambda event: isinstance(event, Picked) and events.append(event))
        for n in range(3):
            await at_rest(run)
            events.clear()
            number = await run.insert(job, args={"n": n})
            await run.ended(number)
            if JOURNAL < 2:
                assert all(number not in ids for ids in picks.claimed)
                assert [(event.wanted, event.claimed) for event in events if event.claimed] == [(1, 1)]
    assert ran == [0, 1, 2]


async def test_a_signal_to_a_queue_at_rest_needs_no_pick(durable_dsn: str, monkeypatch: pytest.MonkeyPatch):
    picks = Picks(monkeypatch)

    class Waiter(da.Machine[dict[str, Any]], name="waiter"):
        @da.step
        async def start(self, ctx: da.Context[dict[str, Any]]) -> da.Outcome:
            return da.Await("go", then=self.end)

        @da.step
        async def end(self, ctx: da.Context[dict[str, Any]]) -> da.Outcome:
            return da.Done([signal.payload for signal in ctx.awaited])

    async with running(durable_dsn, **QUIET) as run:
        number = await run.insert(Waiter, state={})
        await parked(run, number)
        await at_rest(run)
        before = len(picks.claimed)
        await run.engine.client.signal(number, "go", 7)
        assert await run.engine.client.result(number, timeout=PATIENCE) == [7]
        if JOURNAL < 3:
            assert all(number not in ids for ids in picks.claimed[before:])


async def test_a_claim_that_is_refused_does_not_refuse_the_insert(durable_dsn: str, db: Db):
    """A user's trigger allows the row, and not that anybody claims it; a pick meets the same later, alone."""
    ran = list[Any]()
    job = noting(ran)
    db.execute(
        "create function busy() returns trigger language plpgsql as $$ begin raise 'not now'; end $$;"
        "create trigger busy before update on durable.gen_durable for each row"
        " when (new.status = 'executing') execute function busy()"
    )
    async with running(durable_dsn, **QUIET) as run:
        await at_rest(run)
        number = await run.insert(job, args={"n": 1}, journal="off")
        assert db.row(number, "status::text") == ("runnable",)
        db.execute("drop trigger busy on durable.gen_durable")
        await run.ended(number)
    assert ran == [1]


async def test_what_a_lost_answer_has_claimed_runs_soon_and_once(durable_dsn: str):
    ran = list[Any]()
    job = noting(ran)
    async with open_proxy(durable_dsn) as proxy, running(proxy.dsn, **QUIET) as run:
        await at_rest(run)
        proxy.lose_reply(after=b"claim_at_once")
        with pytest.raises(da.DurableError):
            await run.insert(job, args={"n": 1}, journal="off")
        await proxy.wait_lost()
        with trio.fail_after(PATIENCE):  # the lease is a minute
            await until(lambda: ran == [1])


async def test_an_insert_that_is_cancelled_leaves_no_claim_without_an_owner(durable_dsn: str):
    ran = list[Any]()
    job = noting(ran)
    async with running(durable_dsn, **QUIET) as run:
        for n in range(20):
            await at_rest(run)
            with trio.CancelScope() as scope:
                trio.lowlevel.current_trio_token().run_sync_soon(scope.cancel)
                await run.insert(job, args={"n": n}, journal="off")
        await run.ended(await run.insert(job, args={"n": 20}, journal="off"))
        with psycopg.connect(durable_dsn, autocommit=True) as db:
            await until(
                lambda: not db.execute("select 1 from durable.gen_durable where status <> 'done'").fetchall()
            )
    assert len(ran) == len(set(ran))


async def test_what_is_claimed_while_the_node_stops_is_no_attempt(durable_dsn: str, db: Db):
    """The feeder waits for the call: what it has claimed is released by the flusher, which stops later."""
    job = noting([])
    async with running(durable_dsn, **QUIET) as run, connect(durable_dsn) as conn:
        await at_rest(run)
        calls, dispatcher = cast("ClaimsAtOnce", run.engine._node.at_once), dispatcher_of(run)
        ask = calls.begin(["default"])
        assert ask is not None
        [plan] = plan_rows(job, [{"args": {"n": 1}}], journal="off")
        _, claimed = await conn.batch([insert_call([plan], "durable"), ask.call()])
        run.engine.request_stop()
        await until(lambda: dispatcher.closed)
        calls.done(ask, ask.read(claimed.rows))
    assert db.execute("select status, attempt, interruptions from durable.gen_durable") == [
        ("runnable", 0, 0)
    ]
