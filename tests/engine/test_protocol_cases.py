"""Cases of the dispatch protocol on an engine that records everything: what is left must also verify."""

from __future__ import annotations

from collections import Counter
from typing import Any

import durable_actors as da
import pytest
from durable_actors.telemetry import ClaimLost, OutcomeStale, StepCommitted
from tests.engine.kit import Db, Gate, gated, running
from tests.kit import until
from tests.support.faults import open_proxy

pytestmark = pytest.mark.usefixtures("registry")

ALL = "select (select jsonb_agg(g) from durable.gen_durable g), (select jsonb_agg(s) from durable.signals s)"
UNREAD = "select count(*) from durable.signals where consumed_at is null"
SLOW: dict[str, Any] = {"journal": "full", "reap_interval": 600}
"""Nobody reaps but the test."""


EXPIRE = """
with expired as (
    update durable.gen_durable set lease_expires_at = now() - interval '1 s' where id = %s
    returning id, rev, lease_expires_at
)
update durable.journal j set data = jsonb_set(data, '{lease_until}', to_jsonb(e.lease_expires_at))
  from expired e where j.instance_id = e.id and j.rev = e.rev
"""


def expire(db: Db, number: int) -> None:
    """The lease of its claim is over, and the record of the claim says the same."""
    db.execute("set durable_actors.journal_door = 'open'")
    db.execute(EXPIRE, number)


async def kinds_of(client: da.Client, number: int) -> list[str]:
    return [record.kind for record in await client.history(number)]


async def test_a_zombie_finds_that_its_row_is_anothers(durable_dsn: str, db: Db):
    """Case 30: its lease ends, another node runs the step again, then it commits: no row, no signal, no record."""
    zombie, owner = Gate(), Gate()

    class M(da.Machine[Any], name="m"):
        @da.step
        async def start(self, ctx: da.Context[Any]) -> da.Outcome:
            return da.Await("go", then=self.work)

        @da.step
        async def work(self, ctx: da.Context[Any]) -> da.Outcome:
            await (owner if ctx.attempt else zombie).wait()
            return da.Done([ctx.attempt, *(signal.payload for signal in ctx.awaited)])

    async with running(durable_dsn, name="a", queues={"default": 1}, **SLOW) as a:
        number = await a.insert(M)
        await until(lambda: db.row(number, "status") == ("awaiting_signal",))
        await a.engine.client.signal(number, "go", "now")
        await zombie.wait_entered()
        expire(db, number)
        async with running(durable_dsn, name="b", **SLOW | {"node": "b"}) as b:
            assert (await b.engine.client.recover()).reaped in {
                (number,),
                (),
            }  # else b's reaper did, at its start
            await owner.wait_entered()
            before = db.execute(ALL)
            zombie.open()
            stale = await a.events.wait(OutcomeStale, id=number)
            assert (stale.attempt, stale.step) == (0, "work")
            assert db.execute(ALL) == before
            assert db.value(UNREAD) == 1
            owner.open()
            row = await b.ended(number)
            assert (row.result, row.attempt, db.value(UNREAD)) == ([1, "now"], 1, 0)
            client = b.engine.client
            assert await kinds_of(client, number) == [
                "started", "claimed", "parked", "woken", "claimed", "reaped", "claimed", "done",
            ]  # fmt: skip
            assert (await client.verify()).problems == []


@pytest.mark.parametrize("commit", [b"commit_outcomes", b"commit_parks"])
async def test_an_outcome_whose_answer_is_lost_is_recorded_once(durable_dsn: str, db: Db, commit: bytes):
    """Case 32: the connection ends after the commit, before its answer; the outcome is sent again, and found there."""
    gate, effects = Gate(), list[str]()

    class M(da.Machine[Any], name="m"):
        @da.step
        async def start(self, ctx: da.Context[Any]) -> da.Outcome:
            effects.append(ctx.step)
            await gate.wait()
            return da.Next(self.end) if commit == b"commit_outcomes" else da.Await("go", then=self.end)

        @da.step
        async def end(self, ctx: da.Context[Any]) -> da.Outcome:
            effects.append(ctx.step)
            return da.Done()

    def warm(outcome: da.Outcome) -> Any:
        class Warm(da.Machine[Any], name="warm"):
            @da.step
            async def start(self, ctx: da.Context[Any]) -> da.Outcome:
                return outcome

        return Warm

    async with open_proxy(durable_dsn) as proxy, running(proxy.dsn, journal="full") as run:
        await run.run(warm(da.Done() if commit == b"commit_outcomes" else da.Stop("x")))  # it is prepared
        number = await run.insert(M)
        await gate.wait_entered()
        proxy.lose_reply(after=commit)
        gate.open()
        await proxy.wait_lost()
        if commit == b"commit_parks":
            await run.events.wait(StepCommitted, id=number)
            await run.engine.client.signal(number, "go")
        row = await run.ended(number)
        assert (row.status, row.attempt, row.crashes, effects) == ("done", 0, 0, ["start", "end"])
        assert run.events.all(OutcomeStale, id=number) == []
        found = Counter(await kinds_of(run.engine.client, number))
        assert (found["next"] + found["parked"], found["done"]) == (1, 1)
        assert (await run.engine.client.verify()).problems == []


async def test_the_heartbeat_of_a_lost_claim_does_not_extend_the_next_one(durable_dsn: str, db: Db):
    """Case 33: the same worker has its row again, under another claim; the heartbeat renews both by their own names."""
    lost, found = Gate(), Gate()

    class M(da.Machine[Any], name="m"):
        @da.step
        async def start(self, ctx: da.Context[Any]) -> da.Outcome:
            await (found if ctx.attempt else lost).wait()
            return da.Done(ctx.attempt)

    beats = {"lease_ttl": 60, "heartbeat_interval": 0.1}
    async with running(durable_dsn, **SLOW | beats) as run:
        number = await run.insert(M)
        await lost.wait_entered()
        claim = "select claim_id from durable.gen_durable where id = %s"
        old = db.value(claim, number)
        expire(db, number)
        while not (await run.engine.client.recover()).reaped:  # a heartbeat came in between
            expire(db, number)
        await found.wait_entered()
        assert db.value(claim, number) != old
        gone = await run.events.wait(ClaimLost, id=number)
        assert (gone.attempt, "another" in gone.reason or "taken back" in gone.reason) == (0, True)
        found.open()
        row = await run.ended(number)
        assert (row.result, row.attempt, row.crashes) == (1, 1, 1)
        assert len(run.events.all(StepCommitted, id=number)) == 1
        assert await kinds_of(run.engine.client, number) == [
            "started",
            "claimed",
            "reaped",
            "claimed",
            "done",
        ]
        assert (await run.engine.client.verify()).problems == []


FAMILIES = 100


async def test_the_last_two_of_three_children_open_their_barrier_once(durable_dsn: str, db: Db):
    """Case 40: with one result and with two the parent waits; the last two end at the same time, on two nodes."""
    first, last = Gate(), Gate()
    kids = [gated(first, "first"), gated(last, "last")]
    first.open()

    class Parent(da.Machine[Any], name="parent"):
        @da.step
        async def start(self, ctx: da.Context[Any]) -> da.Outcome:
            return da.ScheduleChildren(self.joined, [kids[0], kids[1], kids[1]])

        @da.step
        async def joined(self, ctx: da.Context[Any]) -> da.Outcome:
            return da.Done([child.result for child in ctx.children])

    waiting = (
        "select count(*) from durable.gen_durable where status = 'awaiting_children' and children_pending = 2"
    )
    options = {"queues": {"default": FAMILIES}, "journal": "full"}
    async with (
        running(durable_dsn, name="a", **options) as a,
        running(durable_dsn, name="b", **options | {"node": "b"}),
    ):
        client = a.engine.client
        rows: list[da.InsertOptions] = [{} for _ in range(FAMILIES)]
        ids = [number for number in await client.insert_many(Parent, rows) if number is not None]
        await until(lambda: db.value(waiting) == FAMILIES)
        await last.wait_entered(2 * FAMILIES)
        last.open()
        for number in ids:
            assert (await a.ended(number)).result == ["finished"] * 3
        for number in ids:
            found = [each for each in await client.history(number) if each.kind in {"child_ended", "joined"}]
            assert sum(each.data["count"] for each in found) == 3
            assert [each.kind == "joined" for each in found] == [False] * (len(found) - 1) + [True]
        assert (await client.verify()).problems == []
