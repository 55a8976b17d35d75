"""The control look: a node learns soon what commands ask of it, however busy its slots; at rest it costs nothing."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any

import durable_actors as da
import psycopg
import pytest
import trio
from durable_actors._engine.claims import ActiveClaim, ActiveClaims
from durable_actors._engine.maintenance import control
from durable_actors._engine.maintenance.control import Control, next_look
from durable_actors._store.commands import Request
from durable_actors.errors import StoreUnavailable
from durable_actors.telemetry import RequestReceived, StepStarted, StoreDown, StoreUp
from tests.engine.kit import (
    Db,
    Gate,
    Run,
    active_claims,
    claim,
    gated,
    make_node,
    pick,
    restarts_of,
    running,
    simple,
    state_of,
)
from tests.kit import PATIENCE, until
from tests.support.sql import count_statements

pytestmark = pytest.mark.usefixtures("registry")

ASK = (
    "update durable.gen_durable set request = jsonb_build_object("
    "'kind', 'check', 'by', 'ada', 'reason', 'wrong order', 'at', durable.now()) where id = any (%s)"
)


def ask(db: Db, *numbers: int) -> None:
    """As a command does, in another process. Nothing follows from this kind; for "cancel" see test_cancel.py."""
    db.execute(ASK, list(numbers))


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks in quick succession."""
    monkeypatch.setattr(control, "LOOK_EVERY", 0.03)
    monkeypatch.setattr(control, "LONG_STEP", 0.01)


class Looks:
    """Counts the looks of all nodes; `before` is called before each."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        self.before: Callable[[], object] = lambda: None
        real = control.read_requests

        async def counted(*args: Any) -> Any:
            self.before()
            found = await real(*args)
            self.count += 1
            return found

        monkeypatch.setattr(control, "read_requests", counted)

    async def more(self, count: int) -> None:
        """Wait for so many looks from now on."""
        wanted = self.count + count
        await until(lambda: self.count >= wanted)


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> Looks:
    return Looks(monkeypatch)


async def entered(run: Run, gate: Gate, *, count: int = 1, **options: Any) -> list[int]:
    """Instances whose steps wait at the gate."""
    machine = gated(gate, **options)
    numbers = [await run.insert(machine) for _ in range(count)]
    await gate.wait_entered(count)
    return numbers


# -- when to look


@pytest.mark.parametrize(
    ("oldest", "looked_at", "due"),
    [
        (math.inf, -math.inf, math.inf),
        (math.inf, 100.0, math.inf),
        (100.0, -math.inf, 101.0),
        (100.0, 100.5, 101.5),
        (100.0, 99.0, 101.0),
    ],
)
def test_a_look_is_due_a_second_after_the_last_one_if_a_step_is_as_old(oldest, looked_at, due):
    assert next_look(oldest, looked_at) == due


@pytest.mark.slow
async def test_short_steps_and_a_node_at_rest_cost_no_look(durable_dsn, looks: Looks):
    """Two seconds of steps that follow one another, so that one always runs; with the real intervals."""

    @da.job(name="short")
    async def short(args: dict) -> None:
        await trio.sleep(0.1)

    async def one_after_the_other(run: Run) -> None:
        until_then = trio.current_time() + 2.2
        while trio.current_time() < until_then:
            await run.run(short, args={})

    async with running(durable_dsn) as run:
        with count_statements(durable_dsn) as count:
            async with trio.open_nursery() as nursery:
                for _ in range(3):
                    nursery.start_soon(one_after_the_other, run)
        assert looks.count == 0
        assert count.calls("request is not null") == 0
        await trio.testing.wait_all_tasks_blocked()
        with count_statements(durable_dsn) as count:
            await trio.sleep(2.2)
        assert looks.count == 0
        assert count.calls("request is not null") == 0


async def test_looks_end_with_the_last_long_step(durable_dsn, quick, looks: Looks):
    gate = Gate()
    async with running(durable_dsn) as run:
        [number] = await entered(run, gate)
        await looks.more(2)
        gate.open()
        await run.ended(number)
        seen = looks.count
        await trio.sleep(0.3)
        assert looks.count <= seen + 1  # one may have been under way


# -- what is learned, and when


async def test_within_two_seconds_while_all_slots_are_busy(durable_dsn, db: Db):
    """With the real intervals."""
    gate = Gate()
    async with running(durable_dsn, queues={"default": da.Queue(2, prefetch=2)}) as run:
        first, _ = await entered(run, gate, count=2)
        machine = gated(gate, "gated")
        for _ in range(3):
            await run.insert(machine)
        await until(lambda: len(active_claims(run)) == 4)
        with trio.fail_after(2):
            ask(db, first)
            event = await run.events.wait(RequestReceived)
        facts = (event.id, event.kind, event.by, event.reason, event.step, event.queue)
        assert facts == (first, "check", "ada", "wrong order", "start", "default")
        assert event.at is not None
        [asked] = [each for each in active_claims(run) if each.request is not None]
        assert (asked.claim.id, asked.request) == (first, Request("check", "ada", "wrong order", event.at))
        with trio.fail_after(2):  # once more, now that it looks
            ask(db, *(each.claim.id for each in active_claims(run) if each.claim.id != first))
            await run.events.wait(RequestReceived, count=4)
        gate.open()


async def test_a_step_in_a_thread(durable_dsn, db: Db, quick):
    gate = Gate()

    class Blocking(da.Machine[Any]):
        @da.step
        def start(self, ctx):
            gate.wait_in_thread()
            return da.Done()

    async with running(durable_dsn) as run:
        number = await run.insert(Blocking)
        await gate.wait_entered()
        ask(db, number)
        await run.events.wait(RequestReceived, id=number)
        gate.open()
        assert (await run.ended(number)).status == "done"


async def test_a_request_that_is_older_than_the_first_look(durable_dsn, db: Db, quick):
    """It is set when the claim is committed, before this node knows of the claim."""
    db.execute(
        "create function ask() returns trigger language plpgsql as $$ begin"
        ' new.request := \'{"kind": "check"}\'; return new; end $$'
    )
    db.execute(
        "create trigger ask before update on durable.gen_durable for each row"
        " when (new.status = 'executing' and old.status = 'runnable') execute function ask()"
    )
    gate = Gate()
    async with running(durable_dsn) as run:
        [number] = await entered(run, gate)
        event = await run.events.wait(RequestReceived, id=number)
        assert (event.kind, event.by, event.at) == ("check", None, None)
        gate.open()


async def test_a_request_is_handed_over_once_and_a_new_one_again(durable_dsn, db: Db, quick, looks: Looks):
    gate = Gate()
    async with running(durable_dsn) as run:
        [number] = await entered(run, gate)
        ask(db, number)
        await run.events.wait(RequestReceived)
        await looks.more(3)
        assert len(run.events.all(RequestReceived)) == 1
        ask(db, number)  # at another time
        await run.events.wait(RequestReceived, count=2)
        gate.open()


async def test_of_many_claims_each_gets_its_own(durable_dsn, db: Db, quick):
    gate = Gate()
    async with running(durable_dsn, queues={"default": 200}) as run:
        machine = gated(gate)
        numbers = [
            each for each in await run.engine.client.insert_many(machine, [{} for _ in range(200)]) if each
        ]
        await gate.wait_entered(200)
        asked = numbers[::2]
        ask(db, *asked)
        await run.events.wait(RequestReceived, count=100)
        assert sorted(each.id for each in run.events.all(RequestReceived)) == asked
        assert sorted(each.claim.id for each in active_claims(run) if each.request is not None) == asked
        gate.open()


async def test_what_is_no_request_is_ignored(durable_dsn, db: Db, quick, looks: Looks):
    gate = Gate()
    async with running(durable_dsn, queues={"default": 5}) as run:
        odd, other, asked = await entered(run, gate, count=3)
        db.execute("update durable.gen_durable set request = '[1]' where id = %s", odd)
        db.execute("update durable.gen_durable set request = '{\"kind\": null}' where id = %s", other)
        ask(db, asked)
        await run.events.wait(RequestReceived, id=asked)
        await looks.more(2)
        assert len(run.events.all(RequestReceived)) == 1
        gate.open()


async def test_a_claim_that_is_gone_is_not_concerned(durable_dsn, db: Db):
    """Another claim of the same row and node: only the claim id tells them apart."""
    number = db.insert()
    async with make_node(durable_dsn) as node:
        [mine] = await pick(node)
        node.claims.add(ActiveClaim(mine))
        received: list[ActiveClaim] = []
        node.claims.on_request = received.append
        db.execute("update durable.gen_durable set claim_id = gen_random_uuid() where id = %s", number)
        ask(db, number)
        look = Control(node)
        await look._look()
        assert received == []
        db.execute("update durable.gen_durable set claim_id = %s where id = %s", mine.claim_id, number)
        await look._look()
        await look._look()
        assert [each.claim.id for each in received] == [number]


def test_requests_are_idempotent():
    claims, received = ActiveClaims(), []
    active = ActiveClaim(claim(None))
    claims.on_request = received.append
    claims.request(active.claim.claim_id, Request("check"))
    assert active.request is None
    claims.add(active)
    for request in (Request("check"), Request("check"), Request("check", "ada")):
        claims.request(active.claim.claim_id, request)
    assert received == [active, active]
    claims.drop(active)
    claims.request(active.claim.claim_id, Request("other"))
    assert active.request == Request("check", "ada")


# -- where it looks


async def test_with_the_smallest_pool_it_waits_for_no_user(durable_dsn, db: Db, quick):
    """The one connection for everything else is taken."""
    gate = Gate()
    async with running(durable_dsn, pool_size=3) as run:
        [number] = await entered(run, gate)
        node = run.engine._node
        async with node.pool.acquire(node.lane("client")):
            ask(db, number)
            await run.events.wait(RequestReceived, id=number)
        gate.open()


# -- when something is in the way


async def test_an_outage_is_survived_with_growing_pauses(durable_dsn, db: Db, quick, looks: Looks):
    """Named errors only: the store is away, then it refuses."""
    gate = Gate()
    errors: list[Exception] = [StoreUnavailable("away"), psycopg.OperationalError("refused")] * 2
    times: list[float] = []

    def before() -> None:
        times.append(trio.current_time())
        if errors:
            raise errors.pop(0)

    looks.before = before
    async with running(durable_dsn) as run:
        [number] = await entered(run, gate)
        ask(db, number)
        await run.events.wait(RequestReceived, id=number)
        assert restarts_of(run, "control") == 0
        await run.events.wait(StoreUp)
        assert {each.actor for each in run.events.all(StoreDown)} == {"control"}
        assert times[4] - times[3] > times[1] - times[0]
        gate.open()


async def test_a_locked_table_delays_it_and_no_more(durable_dsn, db: Db, quick):
    gate = Gate()
    async with running(durable_dsn) as run:
        [number] = await entered(run, gate)
        ask(db, number)
        with psycopg.connect(durable_dsn) as other:
            other.execute("lock table durable.gen_durable in access exclusive mode")
            await run.events.wait(StoreDown, actor="control")
            run.events.events.clear()
        await run.events.wait(StoreUp, actor="control")
        gate.open()
        assert (await run.ended(number)).status == "done"


async def test_an_outage_ends_with_the_steps_for_which_it_failed(durable_dsn, quick, looks: Looks):
    """It will not look again, and must not be the one that says for ever that the store is away."""
    gate = Gate()
    away = True

    def before() -> None:
        if away:
            raise StoreUnavailable("away")

    looks.before = before
    async with running(durable_dsn) as run:
        [number] = await entered(run, gate)
        await run.events.wait(StoreDown, actor="control")
        gate.open()
        await run.ended(number)
        await run.run(simple(), state={"n": 1})
        await run.events.wait(StoreUp)
        assert not run.engine._node.health.away


async def test_a_crash_restarts_only_itself(durable_dsn, db: Db, quick, looks: Looks):
    gate = Gate()
    errors: list[Exception] = [RuntimeError("a bug of ours")]

    def before() -> None:
        if errors:
            raise errors.pop()

    looks.before = before
    async with running(durable_dsn) as run:
        [number] = await entered(run, gate)
        ask(db, number)
        await run.events.wait(RequestReceived, id=number)
        assert restarts_of(run, "control") == 1
        assert [restarts_of(run, each) for each in ("heartbeat", "flusher", "reaper", "feeder default")] == [
            0
        ] * 4
        assert len(run.events.all(StepStarted)) == 1
        gate.open()


async def test_in_a_drain_it_goes_on_looking(durable_dsn, db: Db, quick):
    """As long as steps run, commands may concern them."""
    gate = Gate()
    async with running(durable_dsn, drain_timeout=PATIENCE) as run:
        [number] = await entered(run, gate)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(run.engine.stop)
            await run.engine.state.wait_value("draining")
            await until(lambda: state_of(run, "maintenance") == "ended")
            ask(db, number)
            await run.events.wait(RequestReceived, id=number)
            gate.open()
    assert db.row(number, "status") == ("done",)


async def test_a_stop_does_not_wait_for_a_look(durable_dsn, quick, monkeypatch):
    """Its connection has fallen silent, say."""
    gate, asked = Gate(), trio.Event()

    async def silent(*args: Any) -> Any:
        asked.set()
        await trio.sleep_forever()

    monkeypatch.setattr(control, "read_requests", silent)
    async with running(durable_dsn) as run:
        [number] = await entered(run, gate)
        await asked.wait()
        gate.open()
        await run.ended(number)
        with trio.fail_after(4):
            await run.engine.stop()


async def test_a_client_only_node_has_none(durable_dsn):
    async with da.open_engine(dsn=durable_dsn, queues={}) as engine:
        assert "control" not in engine.snapshot().render()


async def test_a_step_that_blocks_the_loop_delays_it_only(durable_dsn, db: Db, quick):
    """Nothing here can run meanwhile; afterwards it looks at once."""
    gate = Gate()

    @da.job(name="blocks")
    async def blocks(args: dict) -> None:
        ask(db, args["number"])
        threading.Event().wait(0.2)

    async with running(durable_dsn) as run:
        [number] = await entered(run, gate)
        await run.insert(blocks, args={"number": number})
        await run.events.wait(RequestReceived, id=number)
        gate.open()
