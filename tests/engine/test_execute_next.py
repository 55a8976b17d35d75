"""`execute_next`: one claim inside one call, by the engine's own rules."""

from __future__ import annotations

from typing import Any

import durable_actors as da
import pytest
import trio
from durable_actors._engine import executor
from durable_actors._engine.claiming import pick_one
from durable_actors._engine.maintenance import control
from durable_actors.telemetry import (
    ClaimsReaped,
    Event,
    GroupCommitted,
    RequestReceived,
    StepCommitted,
    StepStarted,
    StepStopped,
)
from tests.engine.kit import (
    REAP,
    Db,
    Gate,
    client_of,
    collector,
    expire,
    gated,
    refuse_bad,
    running,
    simple,
)
from tests.engine.test_control import ask
from tests.kit import until

pytestmark = pytest.mark.usefixtures("registry")


def executing(db: Db) -> int:
    return db.value("select count(*) from durable.gen_durable where status = 'executing'")


class Three(da.Machine[dict[str, Any]], name="three"):
    @da.step(initial=True)
    async def first(self, ctx: da.Context[dict[str, Any]]) -> da.Outcome:
        return da.Next(self.second, {"seen": ["first"]})

    @da.step
    def second(self, ctx: da.Context[dict[str, Any]]) -> da.Outcome:  # in a thread
        return da.Next(self.third, {"seen": [*ctx.state["seen"], "second"]})

    @da.step
    async def third(self, ctx: da.Context[dict[str, Any]]) -> da.Outcome:
        return da.Done(ctx.state["seen"])


@pytest.fixture
def three(registry) -> type[Three]:
    registry.register(Three.__durable__)
    return Three


async def test_each_call_runs_one_step(db: Db, three: type[Three]) -> None:
    async with client_of(db) as client:
        assert await client.execute_next() is None
        number = await client.insert(three)
        seen = []
        while (found := await client.execute_next()) is not None:
            assert found.id == number
            assert found == await client.inspect(number)
            seen.append((found.step, found.status, found.visit, found.attempt))
        assert seen == [("second", "runnable", 2, 0), ("third", "runnable", 3, 0), ("third", "done", 3, 0)]
        assert await client.result(number) == ["first", "second"]


async def test_the_helper_uses_the_only_client(db: Db) -> None:
    machine = simple()
    async with client_of(db):
        number = await da.insert(machine, state={"n": 4})
        found = await da.execute_next()
        assert found is not None
        assert (found.id, found.result) == (number, 4)


async def test_the_most_urgent_due_row_of_the_queue_goes_first(db: Db) -> None:
    machine = simple()
    async with client_of(db) as client:
        late = await client.insert(machine, state={"n": 1}, priority=5)
        await client.insert(machine, state={"n": 2}, schedule_in=3600, priority=-9)
        await client.insert(machine, state={"n": 3}, queue="other", priority=-9)
        early = await client.insert(machine, state={"n": 4}, priority=-1)
        ran = [await client.execute_next() for _ in range(3)]
        assert [each and each.id for each in ran] == [early, late, None]
        other = await client.execute_next("other")
        assert other is not None
        assert other.result == 3


async def test_awaits_and_their_deadlines(db: Db) -> None:
    waits = collector()

    class Timed(da.Machine, name="timed"):
        @da.step(initial=True)
        async def start(self, ctx: da.Context) -> da.Outcome:
            return da.Await("never", then=self.over, timeout=0.05)

        @da.step
        async def over(self, ctx: da.Context) -> da.Outcome:
            return da.Done([len(ctx.awaited), ctx.attempt])

    async with client_of(db) as client:
        number = await client.insert(waits)
        assert (await client.execute_next()).status == "awaiting_signal"
        await client.signal(number, "a", 1)
        await client.signal(number, "stop")
        assert (await client.execute_next()).result == [1]
        timed = await client.insert(Timed)
        assert (await client.execute_next()).status == "awaiting_signal"
        await db.eventually("select await_deadline <= now() from durable.gen_durable where id = %s", timed)
        assert (await client.execute_next()).result == [0, 0]


async def test_children_and_their_barrier(db: Db) -> None:
    child = simple("child", queue="children")

    class Parent(da.Machine, name="parent"):
        @da.step(initial=True)
        async def start(self, ctx: da.Context) -> da.Outcome:
            return da.ScheduleChildren(self.sum, [da.Child(child, state={"n": n}) for n in (1, 2, 3)])

        @da.step
        async def sum(self, ctx: da.Context) -> da.Outcome:
            return da.Done(sum(each.result for each in ctx.children))

    async with client_of(db) as client:
        number = await client.insert(Parent)
        assert (await client.execute_next()).status == "awaiting_children"
        assert await client.execute_next() is None
        for _ in range(3):
            assert (await client.execute_next("children")).status == "done"
        assert (await client.execute_next()).result == 6
        assert await client.result(number) == 6


async def test_an_error_goes_through_handle_and_the_call_returns(db: Db) -> None:
    class Fails(da.Machine, name="fails"):
        @da.step
        async def start(self, ctx: da.Context) -> da.Outcome:
            raise ValueError(f"attempt {ctx.attempt}")

        async def handle(self, error: Exception, ctx: da.Context) -> da.Outcome:
            return da.Retry() if ctx.attempt < 1 else da.Stop(error)

    async with client_of(db) as client:
        await client.insert(Fails)
        first, second = await client.execute_next(), await client.execute_next()
        assert (first.status, first.attempt, first.last_error) == ("runnable", 1, "ValueError: attempt 0")
        assert (second.status, second.last_error) == ("failed", "ValueError: attempt 1")


async def test_an_outcome_that_postgres_refuses_goes_through_handle(db: Db) -> None:
    refuse_bad(db, "P0001")

    class Bad(da.Machine, name="bad"):
        @da.step
        async def start(self, ctx: da.Context) -> da.Outcome:
            return da.Done("bad")

        async def handle(self, error: Exception, ctx: da.Context) -> da.Outcome:
            return da.Done(f"instead: {type(error).__name__}")

    async with client_of(db) as client:
        await client.insert(Bad)
        assert (await client.execute_next()).result == "instead: RaiseException"


async def test_a_crash_of_the_step_is_counted_and_backed_off(db: Db) -> None:
    class Exits(da.Machine, name="exits"):
        @da.step
        async def start(self, ctx: da.Context) -> da.Outcome:
            raise SystemExit(3)

    async with client_of(db) as client:
        await client.insert(Exits)
        first, second = await client.execute_next(), await client.execute_next()
        assert (first.status, first.attempt, first.crashes) == ("runnable", 1, 1)
        assert (second.attempt, second.crashes) == (2, 2)
        assert await client.execute_next() is None  # the second crash is backed off
        assert executing(db) == 0


async def test_a_keyboard_interrupt_releases_the_row_and_leaves_the_call(db: Db) -> None:
    class Interrupted(da.Machine, name="interrupted"):
        @da.step
        async def start(self, ctx: da.Context) -> da.Outcome:
            raise KeyboardInterrupt

    async with client_of(db) as client:
        number = await client.insert(Interrupted)
        with pytest.raises(KeyboardInterrupt):
            await client.execute_next()
        assert db.row(number, "status, attempt") == ("runnable", 1)


async def test_unknown_machines_are_shelved_and_passed_by(db: Db) -> None:
    machine = simple()
    unknown = [db.insert(fsm="nobody", step="s") for _ in range(3)]
    db.insert(fsm="simple", step="gone")
    async with client_of(db) as client:
        known = await client.insert(machine, state={"n": 1})
        assert (await client.execute_next()).id == known
        assert await client.execute_next() is None
        assert [db.row(number, "status, hold")[1] for number in unknown] == [2, 2, 2]

        class Nobody(da.Machine, name="nobody", initial="s"):
            @da.step
            async def s(self, ctx: da.Context) -> da.Outcome:
                return da.Done("somebody")

        ran = [await client.execute_next() for _ in unknown]
        assert sorted(each.id for each in ran) == unknown


async def test_an_expired_claim_is_taken_back(db: Db) -> None:
    """PROTOCOL case 28."""
    keys: list[tuple[int, str]] = []

    class Keyed(da.Machine, name="keyed"):
        @da.step
        async def start(self, ctx: da.Context) -> da.Outcome:
            keys.append((ctx.attempt, ctx.idempotency_key))
            if ctx.attempt == 0:
                expire(db, ctx.id)
                claims.append(db.row(ctx.id, "claim_id"))
                inner.append(await client.execute_next())
            return da.Done(ctx.attempt)

    claims: list[Any] = []
    inner: list[da.Instance | None] = []
    async with client_of(db) as client:
        number = await client.insert(Keyed)
        with pytest.raises(da.LeaseLost):
            await client.execute_next()
        assert [each and (each.status, each.result) for each in inner] == [("done", 1)]
        assert [attempt for attempt, _ in keys] == [0, 1]
        assert len({key for _, key in keys}) == 1
        assert claims != [db.row(number, "claim_id")]


async def test_of_fifty_concurrent_calls_one_executes(db: Db) -> None:
    """PROTOCOL case 29."""
    gate, runs, found = Gate(), list[Any](), list[da.Instance | None]()
    machine = gated(gate, runs=runs)

    async def call(client: da.Client) -> None:
        found.append(await client.execute_next())

    async with client_of(db) as client:
        number = await client.insert(machine)
        async with trio.open_nursery() as nursery:
            for _ in range(50):
                nursery.start_soon(call, client)
            await gate.wait_entered()
            await until(lambda: len(found) == 49)
            assert found == [None] * 49
            gate.open()
        assert [each.id for each in found if each is not None] == [number]
        assert runs == [(number, 0)]


@pytest.mark.slow
async def test_a_long_step_outlives_its_lease_many_times(db: Db) -> None:
    """PROTOCOL case 34."""
    gate, runs = Gate(), list[Any]()
    machine = gated(gate, runs=runs)

    async def call(client: da.Client) -> None:
        assert (await client.execute_next(lease_ttl=1)).result == "finished"

    async with client_of(db) as client:
        number = await client.insert(machine)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(call, client)
            await gate.wait_entered()
            await db.eventually(
                "select lease_expires_at > updated_at + interval '3.5 s' from durable.gen_durable where id = %s",
                number,
            )
            assert await client.execute_next() is None
            gate.open()
        assert runs == [(number, 0)]


async def test_losing_the_claim_cancels_the_step_and_commits_nothing(db: Db) -> None:
    """PROTOCOL case 34."""
    gate = Gate()
    machine = gated(gate)

    async def call(client: da.Client) -> None:
        with pytest.raises(da.LeaseLost, match="its claim was taken back"):
            await client.execute_next(lease_ttl=0.3)

    async with client_of(db) as client:
        number = await client.insert(machine)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(call, client)
            await gate.wait_entered()
            db.execute(REAP, number)
        assert db.row(number, "status, attempt, result") == ("runnable", 1, None)


async def test_a_stale_outcome_is_told(db: Db) -> None:
    gate = Gate()
    machine = gated(gate)

    async def call(client: da.Client) -> None:
        with pytest.raises(da.LeaseLost, match="another claim owns it"):
            await client.execute_next()

    async with client_of(db) as client:
        number = await client.insert(machine)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(call, client)
            await gate.wait_entered()
            db.execute(REAP, number)
            gate.open()
        assert db.row(number, "status, result") == ("runnable", None)


async def test_after_the_commit_the_call_never_fails(db: Db, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fails(*args: object) -> None:
        raise da.StoreUnavailable("gone")

    class Two(da.Machine, name="two"):
        @da.step(initial=True)
        async def one(self, ctx: da.Context) -> da.Outcome:
            return da.Next(self.two, {"n": 1}, partition_key="k")

        @da.step
        async def two(self, ctx: da.Context) -> da.Outcome:
            return da.Done({"r": 2})

    monkeypatch.setattr(executor, "read_by_ids", fails)
    async with client_of(db) as client:
        number = await client.insert(Two)
        for _ in range(2):
            told, true = await client.execute_next(), await client.inspect(number)
            for field in ("id", "status", "step", "visit", "attempt", "state", "result", "partition_key"):
                assert getattr(told, field) == getattr(true, field), field
            assert (told.finished_at is None) == (true.finished_at is None)


async def test_a_pick_of_unknown_fate_is_undone(db: Db, monkeypatch: pytest.MonkeyPatch) -> None:
    real = pick_one.pick_instances

    async def cut_off(*args: Any, **options: Any) -> None:
        await real(*args, **options)
        raise da.CommitUnknown("cut off")

    machine = simple()
    async with client_of(db) as client:
        number = await client.insert(machine, state={"n": 1})
        with monkeypatch.context() as patch:
            patch.setattr(pick_one, "pick_instances", cut_off)
            with pytest.raises(da.CommitUnknown):
                await client.execute_next()
        assert db.row(number, "status, attempt, locked_by") == ("runnable", 0, None)
        assert (await client.execute_next()).status == "done"


# -- partition keys


async def test_a_keyed_step_holds_its_key(db: Db) -> None:
    gate = Gate()
    machine = gated(gate)
    free = "select pg_try_advisory_lock_shared(hashtextextended('durable' || chr(1) || 'k', 0))"
    async with client_of(db) as client:
        first = await client.insert(machine, partition_key="k")
        second = await client.insert(machine, partition_key="k")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(client.execute_next)
            await gate.wait_entered()
            assert await client.execute_next() is None  # the other row of the key waits
            assert db.locks() == 2  # the key's, and the node's
            gate.open()
        await until(lambda: db.locks() == 0)
        assert db.value(free)
        db.execute("select pg_advisory_unlock_all()")
        assert (await client.execute_next()).id == second
        assert db.row(first, "status") == ("done",)


async def test_a_key_that_another_session_has_is_not_run(db: Db) -> None:
    machine = simple()
    lock = "hashtextextended('durable' || chr(1) || 'k', 0)"
    async with client_of(db) as client:
        number = await client.insert(machine, state={"n": 1}, partition_key="k", priority=-1)
        other = await client.insert(machine, state={"n": 2})
        db.execute(f"select pg_advisory_lock({lock})")
        assert (await client.execute_next()).id == other
        assert db.row(number, "status, hold, attempt") == ("runnable", 1, 0)
        assert await client.execute_next() is None  # tried again, once
        assert db.row(number, "status, hold, attempt") == ("runnable", 1, 0)
        db.execute(f"select pg_advisory_unlock({lock})")
        assert (await client.execute_next()).id == number


async def test_a_lost_key_cancels_the_step(db: Db) -> None:
    gate = Gate()
    machine = gated(gate)

    async def call(client: da.Client) -> None:
        with pytest.raises(da.LeaseLost, match="session with its partition key is gone"):
            await client.execute_next()

    async with client_of(db) as client:
        number = await client.insert(machine, partition_key="k")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(call, client)
            await gate.wait_entered()
            db.execute(
                "select pg_terminate_backend(l.pid) from pg_locks l join pg_database d on d.oid = l.database"
                " where l.locktype = 'advisory' and d.datname = current_database()"  # others test on this server, too
            )
        assert db.row(number, "status, attempt") == ("runnable", 1)


# -- beside others


async def test_events_come_after_the_commit(db: Db) -> None:
    """PROTOCOL case 53."""
    events: list[Event] = []
    machine = simple()
    async with client_of(db) as client:

        def note(event: Event) -> None:
            events.append(event)
            if isinstance(event, StepCommitted):
                assert db.row(event.id, "status") == ("done",)

        client.executor.telemetry.subscribe(note)
        await client.insert(machine, state={"n": 1})
        await client.execute_next()
        kinds = [type(each) for each in events]
        assert kinds[-4:] == [StepStarted, StepStopped, GroupCommitted, StepCommitted]
        assert not any(isinstance(each, ClaimsReaped) for each in events)


async def test_a_command_reaches_the_step_of_a_call(db: Db, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "LOOK_EVERY", 0.03)
    monkeypatch.setattr(control, "LONG_STEP", 0.01)
    gate, events = Gate(), list[Event]()
    machine = gated(gate)
    async with client_of(db) as client:
        client.executor.telemetry.subscribe(events.append)
        number = await client.insert(machine)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(client.execute_next)
            await gate.wait_entered()
            ask(db, number)
            await until(lambda: any(isinstance(each, RequestReceived) for each in events))
            gate.open()


async def test_a_step_finds_the_client_that_runs_it(db: Db) -> None:
    child = simple("child", queue="children")

    class Parent(da.Machine, name="parent"):
        @da.step
        async def start(self, ctx: da.Context) -> da.Outcome:
            return da.Done([await da.insert(child, state={"n": 1}), await ctx.insert(child, state={"n": 2})])

    async with client_of(db, name="one") as client, client_of(db, name="two"):
        await client.insert(Parent)
        found = await client.execute_next()
        assert [
            row[0] for row in db.execute("select id from durable.gen_durable where fsm = 'child'")
        ] == found.result


@pytest.mark.parametrize("key", [None, "k"])
async def test_beside_an_engine(db: Db, key: str | None) -> None:
    """An engine takes no claim of a call that renews it, although the call has no session lock."""
    gate = Gate()
    machine = gated(gate, queue="slow")
    async with running(db.dsn, queues={"default": 1}, dead_after=0.3, reap_interval=0.1) as run:
        number = await run.insert(machine, partition_key=key)
        async with trio.open_nursery() as nursery:
            found: list[Any] = []

            async def call() -> None:
                found.append(await da.execute_next("slow"))

            nursery.start_soon(call)
            await gate.wait_entered()
            await trio.sleep(0.8)  # several times dead_after
            gate.open()
        assert [each.result for each in found] == ["finished"]
        assert (await run.engine.client.inspect(number)).attempt == 0


async def test_a_throttled_row_runs_when_its_token_has_come(db: Db) -> None:
    """No feeder looks for it: the call does."""

    @da.job(name="limited", rate_limit="api")
    async def limited() -> None: ...

    async with running(db.dsn, limits={"api": da.Limit(1, per=0.5)}):
        pass  # declares it
    async with client_of(db) as client:
        numbers = await client.insert_many(limited, [{}, {}])
        found = [await client.execute_next()]
        with trio.fail_after(20):
            while len(found) < 2:
                if (other := await client.execute_next()) is not None:
                    found.append(other)
                await trio.sleep(0.02)
    assert [each.id for each in found if each is not None] == numbers
