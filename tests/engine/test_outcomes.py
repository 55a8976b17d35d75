"""What each outcome does to the row, with run-ahead and without."""

from __future__ import annotations

import attrs
import durable_actors as da
import pytest
from durable_actors.telemetry import StepCommitted, StepStarted
from tests.engine.kit import QUIET, Gate, running
from tests.kit import until

pytestmark = pytest.mark.usefixtures("registry")


@attrs.frozen
class Count:
    n: int = 0
    names: tuple[str, ...] = ()


async def test_next_enters_a_step(durable_dsn, ahead):
    seen = []

    class M(da.Machine[Count], run_ahead=ahead):
        @da.step
        async def start(self, ctx: da.Context[Count]) -> da.Outcome:
            seen.append((ctx.step, ctx.attempt, ctx.visit, ctx.state))
            if not ctx.attempt:
                return da.Retry()
            return da.Next(self.middle, Count(ctx.state.n + 1, ("a",)))

        @da.step
        async def middle(self, ctx: da.Context[Count]) -> da.Outcome:
            seen.append((ctx.step, ctx.attempt, ctx.visit, ctx.state))
            return da.Next("end")

        @da.step
        async def end(self, ctx: da.Context[Count]) -> da.Outcome:
            seen.append((ctx.step, ctx.attempt, ctx.visit, ctx.state))
            return da.Done({"n": ctx.state.n})

    async with running(durable_dsn) as run:
        row = await run.run(M, state=Count(4))
    assert seen == [
        ("start", 0, 1, Count(4)),
        ("start", 1, 1, Count(4)),  # a retry: same visit, one attempt more
        ("middle", 0, 2, Count(5, ("a",))),  # decoded to the declared types, also when it ran ahead
        ("end", 0, 3, Count(5, ("a",))),  # KEEP
    ]
    assert (row.status, row.step, row.result, row.visit) == ("done", "end", {"n": 5}, 3)
    assert row.state == {"n": 5, "names": ["a"]}
    assert (row.locked_by, row.lease_expires_at, row.last_error) == (None, None, None)
    assert row.finished_at is not None


async def test_run_ahead_saves_picks_and_writes_each_step(durable_dsn, db, ahead):
    class M(da.Machine, run_ahead=ahead):
        @da.step
        async def start(self, ctx):
            # What the step before committed is in the database before this one runs.
            [(step, visit)] = db.execute("select step, visit from durable.gen_durable where id = %s", ctx.id)
            assert (step, visit) == (ctx.step, ctx.visit)
            seen.add(ctx.claim_id)
            if ctx.visit == 5:
                return da.Done(ctx.state)
            return da.Next(self.start, {"n": ctx.visit})

    seen: set[object] = set()
    async with running(durable_dsn) as run:
        row = await run.run(M)
    assert (row.status, row.result, row.visit) == ("done", {"n": 4}, 5)
    assert len(seen) == (1 if ahead else 5)


async def test_the_next_step_sees_what_is_stored(durable_dsn, ahead):
    """The state travels through jsonb also when nothing was picked again: order, duplicates, numbers."""
    seen = []

    class M(da.Machine, run_ahead=ahead):
        @da.step
        async def start(self, ctx):
            state = {"b": 1.0, "a": (1, 2), "long key": "x"}
            return da.Next(self.end, state)

        @da.step
        async def end(self, ctx):
            seen.append((list(ctx.state), ctx.state))
            return da.Done(None)

    async with running(durable_dsn) as run:
        await run.run(M)
    assert seen == [(["a", "b", "long key"], {"a": [1, 2], "b": 1.0, "long key": "x"})]


async def test_retry_with_a_delay_waits_and_counts(durable_dsn, db, ahead):
    class M(da.Machine[Count], run_ahead=ahead):
        @da.step
        async def start(self, ctx: da.Context[Count]) -> da.Outcome:
            if ctx.attempt:
                return da.Done(ctx.state.n)
            return da.Retry(Count(7), delay=0.15)

    async with running(durable_dsn, **QUIET) as run:
        number = await run.insert(M)
        first = await run.events.wait(StepCommitted, id=number)
        assert first.status == "runnable"
        [(attempt, visit, delay)] = db.execute(
            "select attempt, visit, extract(epoch from eligible_at - updated_at)::float8"
            " from durable.gen_durable where id = %s",
            number,
        )
        assert (attempt, visit, round(delay, 3)) == (1, 1, 0.15)
        row = await run.ended(number)  # nobody polls: the feeder knew when it is due
    assert (row.result, row.state, row.attempt) == (7, {"n": 7, "names": []}, 1)
    assert row.last_error is None


async def test_replay_is_retry():
    assert da.Replay is da.Retry


async def test_done_leaves_the_state_alone(durable_dsn, ahead):
    class M(da.Machine[Count], run_ahead=ahead):
        @da.step
        async def start(self, ctx: da.Context[Count]) -> da.Outcome:
            return da.Done([1, {"two": None}])

    async with running(durable_dsn) as run:
        row = await run.run(M, state=Count(3))
        assert await run.engine.client.result(row.id) == [1, {"two": None}]
    assert (row.status, row.state, row.attempt, row.visit) == ("done", {"n": 3, "names": []}, 0, 1)


async def test_stop_fails_with_its_reason(durable_dsn):
    class M(da.Machine[Count]):
        @da.step
        async def start(self, ctx: da.Context[Count]) -> da.Outcome:
            return da.Stop("the card was declined")

    async with running(durable_dsn) as run:
        row = await run.run(M, state=Count(3))
        with pytest.raises(da.InstanceFailed, match="the card was declined") as caught:
            await run.engine.client.result(row.id)
        assert (caught.value.id, caught.value.reason) == (row.id, "the card was declined")
    assert (row.status, row.last_error, row.result) == ("failed", "the card was declined", None)
    assert row.state == {"n": 3, "names": []}


async def test_an_ended_instance_never_runs_again(durable_dsn, db):
    class M(da.Machine):
        @da.step
        async def start(self, ctx):
            return da.Done()

    async with running(durable_dsn) as run:
        row = await run.run(M)
        other = await run.run(M)
        assert len(run.events.started(row.id)) == len(run.events.started(other.id)) == 1
    assert row.result is None


async def test_every_commit_counts_as_a_revision(durable_dsn, db, ahead):
    class M(da.Machine, run_ahead=ahead):
        @da.step
        async def start(self, ctx):
            return da.Next(self.end)

        @da.step
        async def end(self, ctx):
            return da.Done()

    async with running(durable_dsn) as run:
        row = await run.run(M)
    moves = (
        ["started", "claimed", "next", "done"] if ahead else ["started", "claimed", "next", "claimed", "done"]
    )
    assert db.row(row.id, "rev, attempt, crashes") == (len(moves), 0, 0)


async def test_idempotency_key_is_one_per_visit(durable_dsn, ahead):
    keys: list[tuple[int, int, str]] = []

    class M(da.Machine, run_ahead=ahead):
        @da.step
        async def start(self, ctx):
            keys.append((ctx.visit, ctx.attempt, ctx.idempotency_key))
            if not ctx.attempt:
                return da.Retry()
            return da.Next(self.start) if ctx.visit < 2 else da.Done()

    async with running(durable_dsn) as run:
        await run.run(M)
    (one, again, two, last) = (key for _, _, key in keys)
    assert one == again
    assert two == last
    assert one != two


async def test_a_chain_gives_its_slot_to_more_urgent_work(durable_dsn):
    """Run-ahead yields when a claimed row of better priority waits for the only slot."""
    gate, order = Gate(), []

    class Chain(da.Machine, name="chain"):
        @da.step
        async def start(self, ctx):
            order.append(f"chain {ctx.visit}")
            if ctx.visit == 1:
                await gate.wait()
            return da.Next(self.start) if ctx.visit < 3 else da.Done()

    class Urgent(da.Machine, name="urgent"):
        @da.step
        async def start(self, ctx):
            order.append("urgent")
            return da.Done()

    async with running(durable_dsn, queues={"default": da.Queue(1, prefetch=1)}) as run:
        chain = await run.insert(Chain, priority=5)
        await gate.wait_entered()
        urgent = await run.insert(Urgent, priority=1)
        await until_buffered(run)
        gate.open()
        await run.ended(chain)
        await run.ended(urgent)
    assert order == ["chain 1", "urgent", "chain 2", "chain 3"]


async def until_buffered(run) -> None:
    await until(lambda: run.engine._parts.dispatchers["default"].buffered)


async def test_a_long_chain_lets_others_in(durable_dsn, monkeypatch):
    """The budget of steps: the chain goes back to its queue, and what came meanwhile has its turn."""
    monkeypatch.setattr("durable_actors._engine.running.dispatcher.RUN_AHEAD_STEPS", 3)
    claims = []

    class Chain(da.Machine):
        @da.step
        async def start(self, ctx):
            claims.append(ctx.claim_id)
            return da.Next(self.start) if ctx.visit < 7 else da.Done()

    async with running(durable_dsn) as run:
        row = await run.run(Chain)
        assert len(run.events.all(StepStarted, id=row.id)) == 7
    assert [claims.count(each) for each in dict.fromkeys(claims)] == [3, 3, 1]
