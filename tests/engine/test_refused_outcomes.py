"""An outcome that Postgres refuses: `handle` chooses another one, once; then a plain failure is stored."""

from __future__ import annotations

import sys

import durable_actors as da
import pytest
import trio
from durable_actors._engine.claims import ClaimState
from durable_actors._engine.maintenance import heartbeat
from durable_actors._engine.running import step_task
from durable_actors._engine.running.dispatcher import Dispatcher
from durable_actors._engine.running.step_task import RECOVER_AGAIN
from durable_actors.otp import PoolClosed, PoolFull
from durable_actors.telemetry import ClaimLost, OutcomeLate, StepCommitted, StepCrashed, StepStarted
from tests.engine.kit import (
    QUICK,
    QUIET,
    Gate,
    active_claims,
    locked,
    nobody_reaps,
    refuse_bad,
    running,
    state_of,
)
from tests.kit import until

pytestmark = pytest.mark.usefixtures("registry")

REASON = "not on a Monday"
NO_UPDATE = """
create function no_update() returns trigger language plpgsql as $$
begin
    if {} then raise exception 'never'; end if;
    return new;
end $$;
create trigger no_update before update on durable.gen_durable for each row execute function no_update();
"""


@pytest.fixture(autouse=True)
def rule(db):
    """A trigger refuses the result "bad"."""
    refuse_bad(db, "P0001")


def refused(handle, *, name: str = "m"):
    """A machine whose first run ends with "bad"; `handle(error, ctx)` chooses the next outcome."""

    class M(da.Machine, name=name):
        @da.step
        async def start(self, ctx):
            return da.Done("bad" if ctx.attempt == 0 else "good")

        @da.step
        async def then(self, ctx):
            return da.Done("then")

        async def handle(self, error, ctx):
            return await handle(error, ctx)

    return M


def handling(gate: Gate, say: str = "handled"):
    """`handle` waits at the gate, and ends the instance with this result."""

    async def handle(error, ctx):
        await gate.wait()
        return da.Done(say)

    return refused(handle)


def counts(run, *states: ClaimState) -> list[int]:
    dispatcher = run.engine._parts.dispatchers["default"]
    return [dispatcher.count(state) for state in states]


def started(run) -> int:
    """How many tasks the step pool has started."""
    return run.engine._parts.pool.statistics().started


async def until_queued(run) -> None:
    """Until the outcome of the only claim is queued, and its task is gone."""
    await until(lambda: counts(run, ClaimState.COMMITTING) == [1] and not len(run.engine._parts.pool))


# -- the outcome that `handle` chose


async def test_no_task_waits_for_the_verdict_of_what_handle_chose(durable_dsn, db):
    gate = Gate()
    async with running(durable_dsn) as run:
        number = await run.insert(handling(gate))
        await gate.wait_entered()
        assert counts(run, ClaimState.RECOVERING, ClaimState.COMMITTING) == [1, 0]
        [active] = active_claims(run)
        assert active.task is not None
        with locked(durable_dsn, number):
            gate.open()
            await until_queued(run)
            assert active.task is None
            assert run.engine._parts.dispatchers["default"].running == 0
            assert not run.events.all(StepCommitted)
        row = await run.ended(number)
        await until(lambda: not active_claims(run))
        assert active.state is ClaimState.GONE
    assert (row.status, row.result, row.attempt) == ("done", "handled", 0)
    assert len(run.events.all(StepStarted, id=number)) == 1


async def test_it_is_committed_although_its_lease_has_expired(durable_dsn, monkeypatch):
    """As the outcome of a step: nobody else has claimed the row, and the fence decides."""

    async def away(*args, **options):
        raise da.StoreUnavailable("away")

    nobody_reaps(monkeypatch)
    gate = Gate()
    async with running(durable_dsn, lease_ttl=0.9, reap_interval=3600, **QUICK | {"node": "n"}) as run:
        number = await run.insert(handling(gate))
        await gate.wait_entered()
        with locked(durable_dsn, number):
            gate.open()
            await until_queued(run)
            monkeypatch.setattr(heartbeat, "renew_leases", away)
            [active] = active_claims(run)
            await until(lambda: trio.current_time() > active.claim.trusted_until + 0.1)
        row = await run.ended(number)
    assert (row.status, row.result, row.attempt) == ("done", "handled", 0)
    assert len(run.events.all(StepStarted, id=number)) == 1
    assert not run.events.all(ClaimLost)
    assert run.events.all(OutcomeLate, id=number)


async def test_it_is_withdrawn_when_its_claim_is_known_to_be_lost(durable_dsn, db):
    gate = Gate()
    async with running(durable_dsn, **QUIET) as run:
        number = await run.insert(handling(gate))
        await gate.wait_entered()
        with locked(durable_dsn, number):
            gate.open()
            await until_queued(run)
            [active] = active_claims(run)
            run.engine._node.claims.lose(active, "another worker has claimed it")
            lost = await run.events.wait(ClaimLost, id=number)
            await until(lambda: not active_claims(run))
    assert lost.reason == "another worker has claimed it"
    assert db.row(number, "status, result") == ("executing", None), "neither committed nor released"


async def test_an_instance_that_kept_its_slot_for_the_next_step_is_handled_in_it(durable_dsn, db):
    """The refused outcome was a `Next`: there is one slot, and nothing else may have it meanwhile."""
    db.execute(NO_UPDATE.format("new.step = 'end'"))
    gate = Gate()

    class M(da.Machine, name="m"):
        @da.step
        async def start(self, ctx):
            return da.Next(self.end)

        @da.step
        async def end(self, ctx):
            return da.Done("end")

        async def handle(self, error, ctx):
            await gate.wait()
            return da.Done(ctx.step)

    async with running(durable_dsn, queues={"default": 1}) as run:
        number = await run.insert(M)
        await gate.wait_entered()
        assert counts(run, ClaimState.RECOVERING, ClaimState.CONTINUING) == [1, 0]
        assert run.engine._parts.dispatchers["default"].running == 1
        gate.open()
        row = await run.ended(number)
    assert (row.status, row.result, row.attempt) == ("done", "start", 0)


# -- the second refusal


@pytest.mark.parametrize("first", ["refused", "raised"])
async def test_a_second_refusal_stores_a_plain_failure_without_a_task(durable_dsn, caplog, first):
    handled = []

    class M(da.Machine, name="m"):
        @da.step
        async def start(self, ctx):
            if first == "raised":
                raise ValueError("the step's own")
            return da.Done("bad")

        async def handle(self, error, ctx):
            handled.append(type(error).__name__)
            return da.Done("bad")

    async with running(durable_dsn) as run:
        row = await run.run(M)
        await until(lambda: not active_claims(run))
        assert started(run) == (2 if first == "refused" else 1), "the step, and `handle` after a refusal"
    assert (row.status, row.result, row.attempt) == ("failed", None, 0)
    assert REASON in row.last_error
    assert handled == ["RaiseException" if first == "refused" else "ValueError"]
    assert [event.status for event in run.events.all(StepCommitted, id=row.id)] == ["failed"]
    assert caplog.text.count("Postgres refused its outcome") == (2 if first == "refused" else 1)


async def test_the_first_refusal_is_the_reason_of_the_failure(durable_dsn, db):
    db.execute(NO_UPDATE.format("new.result = '\"worse\"'"))

    async def handle(error, ctx):
        return da.Done("worse")

    async with running(durable_dsn) as run:
        row = await run.run(refused(handle))
    assert (row.status, row.result) == ("failed", None)
    assert REASON in row.last_error


async def test_a_row_that_cannot_be_written_at_all_is_left_to_its_lease(durable_dsn, db, caplog):
    db.execute(NO_UPDATE.format("new.status in ('done', 'failed')"))

    async def handle(error, ctx):
        return da.Done("handled")

    async with running(durable_dsn, reap_interval=3600, **QUIET) as run:
        number = await run.insert(refused(handle))
        await until(lambda: f"instance {number} cannot be written" in caplog.text)
        await until(lambda: not active_claims(run))
        assert not run.engine._parts.commits.entries
        assert counts(run, *ClaimState)[1:] == [0] * 7
    assert db.row(number, "status, attempt") == ("executing", 0)
    assert not run.events.all(StepCommitted)


# -- `handle` cannot run


@pytest.mark.parametrize("error", [PoolClosed("down"), PoolFull("full")])
async def test_without_a_task_for_handle_the_row_is_released(durable_dsn, db, monkeypatch, error):
    """The step pool restarts: the next run counts as one more attempt."""
    handled = []

    async def handle(error, ctx):
        handled.append(ctx.attempt)
        return da.Stop(error)

    async with running(durable_dsn) as run:
        pool = run.engine._parts.pool
        start = pool.start_nowait

        def fails(fn, *args, **options):
            if args[1] is not None:
                raise error
            return start(fn, *args, **options)

        monkeypatch.setattr(pool, "start_nowait", fails)
        row = await run.run(refused(handle))
        await until(lambda: not active_claims(run))
    assert (row.status, row.result, row.attempt) == ("done", "good", 1)
    assert handled == []
    assert not run.events.all(ClaimLost), "the claim was ours"


async def test_a_drain_lets_handle_end(durable_dsn, db):
    gate = Gate()
    async with running(durable_dsn, drain_timeout=20) as run:
        number = await run.insert(handling(gate))
        await gate.wait_entered()
        run.engine.request_stop()
        await until(lambda: not run.engine._parts.pool.statistics().accepting)
        gate.open()
    assert db.row(number, "status, result, attempt, interruptions") == ("done", "handled", 0, 0)


async def test_a_drain_stores_the_plain_failure(durable_dsn, db):
    """Refused for the second time when the pool takes no tasks any more: none is needed."""
    gate = Gate()
    async with running(durable_dsn, drain_timeout=20) as run:
        number = await run.insert(handling(gate, say="bad"))
        await gate.wait_entered()
        with locked(durable_dsn, number):
            gate.open()
            await until_queued(run)
            run.engine.request_stop()
            await until(lambda: state_of(run, "flusher") == "stopping")
    assert db.row(number, "status, attempt, interruptions") == ("failed", 0, 0)


async def test_a_drain_that_has_no_time_for_handle_releases_the_row(durable_dsn, db):
    gate = Gate()
    async with running(durable_dsn, drain_timeout=0) as run:
        number = await run.insert(handling(gate))
        await gate.wait_entered()
    assert db.row(number, "status, attempt, crashes, interruptions") == ("runnable", 0, 0, 1)


async def test_handle_that_crashes_after_a_refusal_is_a_crash_of_its_step(durable_dsn, db):
    async def handle(error, ctx):
        sys.exit(3)

    async with running(durable_dsn) as run:
        number = await run.insert(refused(handle))
        await run.events.wait(StepCrashed, id=number)
        await db.eventually("select crashes = 1 from durable.gen_durable where id = %s", number)


# -- the claim is lost, or its key


@pytest.fixture
def waiting(monkeypatch):
    """Too many steps run: a refused outcome waits for a slot for its `handle`."""
    monkeypatch.setattr(Dispatcher, "may_recover", property(lambda self: False))


async def until_waiting(run) -> None:
    """Until the refused outcome has a task, which waits for its slot."""
    await until(lambda: started(run) == 2)
    await trio.sleep(3 * RECOVER_AGAIN)


@pytest.mark.usefixtures("waiting")
@pytest.mark.parametrize("how", ["lost", "interrupted"])
async def test_a_claim_that_goes_between_refusal_and_handle_is_not_handled(durable_dsn, db, monkeypatch, how):
    handled = []

    async def handle(error, ctx):
        handled.append(ctx.attempt)
        return da.Stop(error)

    async with running(durable_dsn, **QUIET) as run:
        number = await run.insert(refused(handle))
        await until_waiting(run)
        [active] = active_claims(run)
        assert active.state is ClaimState.COMMITTING
        claims = run.engine._node.claims
        why = "the test says so"
        if how == "lost":
            claims.lose(active, why)
        else:
            assert claims.interrupt(active, why)
        lost = await run.events.wait(ClaimLost, id=number)
        if how == "interrupted":
            assert (await run.ended(number)).result == "good"
        await until(lambda: not active_claims(run))
        assert counts(run, *ClaimState)[1:] == [0] * 7
    assert lost.reason == why
    assert handled == []
    if how == "lost":
        assert db.row(number, "status, attempt") == ("executing", 0), "it is the owner's"
    else:
        assert db.row(number, "status, attempt") == ("done", 1), "released, and run again"


async def test_a_claim_that_is_lost_while_handle_runs_commits_nothing(durable_dsn, db):
    gate = Gate()
    async with running(durable_dsn, **QUIET) as run:
        number = await run.insert(handling(gate))
        await gate.wait_entered()
        [active] = active_claims(run)
        run.engine._node.claims.lose(active, "another worker has claimed it")
        await run.events.wait(ClaimLost, id=number)
        await until(lambda: not active_claims(run))
        assert counts(run, ClaimState.RECOVERING, ClaimState.COMMITTING) == [0, 0]
        assert not run.engine._parts.commits.releases
    assert db.row(number, "status, result, attempt") == ("executing", None, 0)


async def test_a_claim_that_is_lost_before_its_task_has_begun_commits_nothing(durable_dsn, db, monkeypatch):
    recover = Dispatcher.recover

    def lost_at_once(self, pending, now):
        found = recover(self, pending, now)
        assert found
        run.engine._node.claims.lose(pending.active, "another worker has claimed it")
        return found

    async def handle(error, ctx):
        return da.Done("handled")

    monkeypatch.setattr(Dispatcher, "recover", lost_at_once)
    async with running(durable_dsn, **QUIET) as run:
        number = await run.insert(refused(handle))
        await run.events.wait(ClaimLost, id=number)
        await until(lambda: not active_claims(run))
    assert len(run.events.all(ClaimLost)) == 1
    assert db.row(number, "status, result, attempt") == ("executing", None, 0)


# -- outcomes with children, which the step's task commits itself


def parent(first: str, second: str):
    """A machine whose step returns the first outcome, and whose `handle` returns the second; and what they returned."""
    returned: list[str] = []

    @da.job(name="leaf")
    async def leaf(args):
        return args["n"]

    def outcome(self, what: str):
        returned.append(what)
        if what in {"bad", "handled"}:
            return da.Done(what)
        unique = {"unique_key": "u", "on_duplicate": "raise"} if what == "duplicates" else {}
        return da.ScheduleChildren(self.end, [da.Child(leaf, args={"n": n}, **unique) for n in range(2)])

    class Parent(da.Machine, name="parent"):
        @da.step
        async def start(self, ctx):
            return outcome(self, first)

        @da.step
        async def end(self, ctx):
            return da.Done([child.result for child in ctx.children])

        async def handle(self, error, ctx):
            return outcome(self, second)

    return Parent, returned


@pytest.mark.parametrize(
    ("first", "second", "result"),
    [
        ("duplicates", "children", [0, 1]),
        ("duplicates", "handled", "handled"),
        ("duplicates", "duplicates", None),
        ("duplicates", "bad", None),
        ("bad", "children", [0, 1]),
        ("bad", "duplicates", None),
    ],
)
async def test_children_and_refusals(durable_dsn, db, caplog, first, second, result):
    """Refused once: `handle` chooses. Refused twice: a plain failure, and no child of either outcome is there."""
    machine, returned = parent(first, second)
    async with running(durable_dsn) as run:
        number = await run.insert(machine)
        row = await run.ended(number)
        await until(lambda: not active_claims(run))
        assert counts(run, *ClaimState)[1:] == [0] * 7
    assert returned == [first, second], "each ran once"
    assert len(run.events.all(StepStarted, id=number, step="start")) == 1
    assert row.result == result
    assert row.attempt == 0
    children = db.value("select count(*) from durable.gen_durable where parent_id = %s", number)
    if result is None:
        assert row.status == "failed"
        assert ("Duplicate" if first == "duplicates" else REASON) in row.last_error
        assert caplog.text.count("Postgres refused its outcome") == 2
        assert children == 0
    else:
        assert row.status == "done"
        assert caplog.text.count("Postgres refused its outcome") == 1
        assert children == (2 if second == "children" else 0)


async def test_children_that_are_refused_are_handled_in_the_same_task(durable_dsn):
    """It waited for the verdict anyway. What `handle` chooses instead is queued like any other outcome."""
    machine, _ = parent("duplicates", "handled")
    async with running(durable_dsn) as run:
        assert (await run.run(machine)).result == "handled"
        assert started(run) == 1


async def test_another_claim_runs_while_children_are_committed(durable_dsn, db, monkeypatch):
    """Their parent gives up its slot for that, and for `handle` takes one more."""
    real, under_way, go = step_task.spawn_children, trio.Event(), trio.Event()

    async def slow(*args):
        under_way.set()
        await go.wait()
        return await real(*args)

    monkeypatch.setattr(step_task, "spawn_children", slow)
    machine, _ = parent("duplicates", "handled")

    @da.job(name="other")
    async def other(args):
        return "other"

    async with running(durable_dsn, queues={"default": 1}) as run:
        number = await run.insert(machine)
        await under_way.wait()
        assert (counts(run, ClaimState.COMMITTING), len(run.engine._parts.pool)) == ([1], 1)
        assert (await run.run(other, args={})).result == "other"
        go.set()
        assert (await run.ended(number)).result == "handled"
