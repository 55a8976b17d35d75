"""`keep=0` in a running engine: the commit deletes the row, and who waits learns of it, also if the answer is lost."""

from __future__ import annotations

from typing import Any

import durable_actors as da
import pytest
import trio
from durable_actors._engine.claims import ActiveClaim, ClaimState
from durable_actors._engine.maintenance.heartbeat import Heartbeat
from durable_actors.telemetry import ClaimLost, OutcomeStale, StepCommitted
from tests.engine.kit import QUIET, Gate, claim, running
from tests.kit import until
from tests.support.faults import open_proxy
from tests.support.sql import count_statements

pytestmark = pytest.mark.usefixtures("registry")


def brief(gate: Gate, runs: list[int], **options: Any) -> Any:
    @da.job(name="brief", keep=0, **options)
    async def job(args: Any, ctx: Any) -> Any:
        runs.append(ctx.attempt)
        await gate.wait()
        return args

    return job


def quick() -> Any:
    @da.job(name="quick", keep=0)
    async def job(args: Any) -> Any:
        return args

    return job


async def warm_up(run: Any, job: Any) -> None:
    """The statement is prepared: the proxy looks for its name."""
    assert await run.engine.client.result(await run.insert(job, args=1)) == 1


async def test_it_is_gone_and_its_result_is_told(durable_dsn, db):
    gate, runs = Gate(), []
    job = brief(gate, runs)
    async with running(durable_dsn) as run:
        number = await run.insert(job, args={"n": 1})
        results: list[Any] = []
        async with trio.open_nursery() as nursery:

            @nursery.start_soon
            async def wait() -> None:
                results.append(await run.engine.client.result(number))

            await gate.wait_entered()
            gate.open()
        await run.events.wait(StepCommitted, id=number)
        with pytest.raises(da.NoTarget):
            await run.engine.client.result(number)
        with pytest.raises(da.NoTarget):
            await run.engine.client.explain(number)
        with pytest.raises(da.NoTarget):
            await run.engine.client.history(number)
    assert results == [{"n": 1}]
    assert db.value("select count(*) from durable.gen_durable") == 0


async def test_many_are_one_statement(durable_dsn):
    gate, runs = Gate(), []
    job = brief(gate, runs)
    async with running(durable_dsn, queues={"default": 40}, **QUIET) as run:
        await run.engine.client.insert_many(job, [{"args": i} for i in range(40)])
        await gate.wait_entered(40)
        run.engine._node.draining.value = True  # no pick disturbs the count
        with count_statements(durable_dsn) as count:
            gate.open()
            await until(lambda: not run.engine._node.claims.all())
    writes = [
        each for each in count.statements if "gen_durable g" in each.query and "delete from" in each.query
    ]
    assert sum(each.calls for each in writes) == 1, count
    assert not [each for each in count.statements if each.query.startswith('update "durable".gen_durable')]


@pytest.mark.parametrize("kept", [False, True])
async def test_a_lost_answer_is_read_back(durable_dsn, db, kept):
    """The commit happened, its answer got lost, and the row is gone: `flushes` tells. No run, no result is lost."""
    gate, runs, results = Gate(), [], []
    job, warm = brief(gate, runs), quick()
    async with open_proxy(durable_dsn) as proxy, running(proxy.dsn) as run:
        await warm_up(run, warm)
        scope = ["runnable", "executing", "awaiting_signal", "awaiting_children", "done"]
        options = {"unique_key": "k", "unique_scope": scope} if kept else {}
        number = await run.insert(job, args="mine", **options)
        async with trio.open_nursery() as nursery:

            @nursery.start_soon
            async def wait() -> None:
                results.append(await run.engine.client.result(number))

            await gate.wait_entered()
            proxy.lose_reply(after=b"commit_deletes")
            gate.open()
            await proxy.wait_lost()
            await run.events.wait(StepCommitted, id=number)
        assert not run.events.all(OutcomeStale, id=number)
        assert not run.events.all(ClaimLost, id=number)
    assert (runs, results) == ([0], ["mine"])
    assert db.value("select count(*) from durable.gen_durable") == int(kept)


async def test_a_commit_that_never_arrived_is_sent_again(durable_dsn, db):
    gate, runs = Gate(), []
    job, warm = brief(gate, runs), quick()
    async with open_proxy(durable_dsn) as proxy, running(proxy.dsn) as run:
        await warm_up(run, warm)
        number = await run.insert(job, args="mine")
        await gate.wait_entered()
        proxy.lose_request(b"commit_deletes")
        gate.open()
        await run.events.wait(StepCommitted, id=number)
    assert runs == [0]
    assert db.value("select count(*) from durable.gen_durable") == 0


async def test_groups_leave_one_row_behind_and_not_one_each(durable_dsn, db):
    gate, runs = Gate(), []
    gate.open()
    job = brief(gate, runs)
    async with running(durable_dsn) as run:
        for n in range(5):
            assert await run.engine.client.result(await run.insert(job, args=n)) == n
            await until(lambda: not run.engine._node.claims.all())
    assert db.value("select count(*) from durable.flushes") == 1


def test_a_row_that_its_own_commit_has_deleted_is_no_lost_claim():
    """The heartbeat finds it gone before the flusher has the answer."""

    lost: list[int] = []

    class Claims:
        def lose(self, active: ActiveClaim, why: str) -> None:
            lost.append(active.claim.id)

    heartbeat: Any = Heartbeat.__new__(Heartbeat)
    heartbeat._node = type("Node", (), {"claims": Claims()})()
    held = {state: ActiveClaim(claim(None, number)) for number, state in enumerate(ClaimState, 1)}
    for state, active in held.items():
        active.state = state
    heartbeat._judge(list(held.values()), {})
    assert set(lost) == {active.claim.id for state, active in held.items() if state != ClaimState.COMMITTING}
    committing = held[ClaimState.COMMITTING]
    heartbeat._judge([committing], {committing.claim.id: None})
    assert committing.claim.id in lost, "its row is there, and has no claim: it was taken back"
