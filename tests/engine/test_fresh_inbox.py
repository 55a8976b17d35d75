"""`ctx.signals` holds what was acknowledged before the step began, also when its claim waited for a slot."""

from __future__ import annotations

from typing import Any

import durable_actors as da
import pytest
import trio
from durable_actors._engine.claims import ActiveClaim
from durable_actors._engine.running import dispatcher, step_inputs
from durable_actors._store.signal import read_inboxes
from tests.engine.kit import QUIET, Db, Gate, dispatcher_of, running
from tests.kit import PATIENCE, until

pytestmark = pytest.mark.usefixtures("registry")

State = dict[str, Any]


@pytest.fixture
def reads(monkeypatch) -> list[list[int]]:
    """The ids of each read of inboxes."""
    found: list[list[int]] = []

    async def read(conn: Any, schema: str, ids: list[int], **options: Any) -> Any:
        found.append(list(ids))
        return await read_inboxes(conn, schema, ids, **options)

    monkeypatch.setattr(step_inputs, "read_inboxes", read)
    return found


def machines(gate: Gate) -> tuple[Any, Any]:
    class Busy(da.Machine[State], name="busy"):
        @da.step
        async def start(self, ctx):
            await gate.wait()
            return da.Done()

    class Told(da.Machine[State], name="told"):
        @da.step
        async def start(self, ctx):
            return da.Done([signal.payload for signal in ctx.signals])

    return Busy, Told


@pytest.mark.parametrize("first", ["together", "later"])
async def test_a_signal_that_comes_while_its_claim_waits_for_a_slot(
    durable_dsn, db: Db, monkeypatch, first: str
):
    """Claimed with the row that takes the only slot, or when that one waits already. No time passes for it."""
    monkeypatch.setattr(dispatcher, "INBOX_FRESH", 1e9)
    gate = Gate()
    busy, told = machines(gate)
    async with running(durable_dsn, queues={"default": da.Queue(1, prefetch=1)}) as run:
        if first == "together":
            rows = [("busy", "start", 0), ("told", "start", 1)]
            db.conn.cursor().executemany(
                "insert into durable.gen_durable (fsm, step, priority) values (%s, %s, %s)", rows
            )
            [(number,)] = db.execute("select id from durable.gen_durable where fsm = 'told'")
        else:
            await run.insert(busy)
            await gate.wait_entered()
            number = await run.insert(told)
        await until(lambda: db.row(number, "status") == ("executing",))
        await da.signal(number, "n", 7)
        gate.open()
        assert await da.result(number, timeout=PATIENCE) == [7]


async def test_a_signal_that_comes_while_the_loop_is_blocked(durable_dsn, db: Db, monkeypatch):
    """No step waits for anything, and yet the next one begins late: then the time tells."""
    monkeypatch.setattr(dispatcher, "INBOX_FRESH", -1.0)
    ids: list[int] = []

    class Blocks(da.Machine[State], name="blocks"):
        @da.step
        async def start(self, ctx):
            if ctx.id == ids[0]:
                db.execute("select durable.signal(%s::bigint, 'n', '7')", ids[1])
            return da.Done([signal.payload for signal in ctx.signals])

    async with running(durable_dsn, queues={"default": 2}):
        ids += await da.insert_many(Blocks, [{}, {}])
        assert await da.result(ids[1], timeout=PATIENCE) == [7]


async def test_a_signal_that_comes_between_two_steps_on_one_claim(durable_dsn, db: Db, monkeypatch):
    """The commit's answer told of no signal; the next step begins late."""
    monkeypatch.setattr(dispatcher, "INBOX_FRESH", -1.0)
    sent: list[int] = []
    real = dispatcher.Dispatcher.continue_on_claim

    def go_on(self: dispatcher.Dispatcher, active: ActiveClaim, now: float) -> None:
        if not sent:
            sent.append(active.claim.id)
            db.execute("select durable.signal(%s::bigint, 'n', '7')", active.claim.id)
        real(self, active, now)

    monkeypatch.setattr(dispatcher.Dispatcher, "continue_on_claim", go_on)

    class Goes(da.Machine[State], run_ahead=True):
        @da.step
        async def start(self, ctx):
            return da.Next(self.second)

        @da.step
        async def second(self, ctx):
            return da.Done([signal.payload for signal in ctx.signals])

    async with running(durable_dsn) as run:
        assert (await run.run(Goes)).result == [7]
    assert sent


async def test_rows_that_begin_at_once_cost_no_read(durable_dsn, monkeypatch, reads):
    """Also of steps that wait, as long as there are slots for all."""
    monkeypatch.setattr(dispatcher, "INBOX_FRESH", 1e9)

    class Steps(da.Machine[State], run_ahead=True):
        @da.step
        async def start(self, ctx):
            await trio.lowlevel.checkpoint()
            return da.Next(self.second)

        @da.step
        async def second(self, ctx):
            return da.Done()

    async with running(durable_dsn, queues={"default": 50}):
        numbers = await da.insert_many(Steps, [{}] * 40)
        for number in numbers:
            await da.result(number, timeout=PATIENCE)
    assert reads == []


async def test_who_waited_is_read_together_and_goes_on_as_before(durable_dsn, monkeypatch, reads):
    """One statement for many; an empty inbox leaves the instance plain: it still runs ahead."""
    monkeypatch.setattr(dispatcher, "INBOX_FRESH", 1e9)
    gate, claims = Gate(), []

    class Busy(da.Machine[State], name="busy"):
        @da.step
        async def start(self, ctx):
            await gate.wait()
            return da.Done()

    class Goes(da.Machine[State], name="goes", run_ahead=True):
        @da.step
        async def start(self, ctx):
            claims.append(ctx.claim_id)
            return da.Next(self.second)

        @da.step
        async def second(self, ctx):
            claims.append(ctx.claim_id)
            return da.Done()

    async with running(durable_dsn, **QUIET | {"queues": {"default": da.Queue(4, prefetch=4)}}) as run:
        for _ in range(4):
            await run.insert(Busy)
        await gate.wait_entered(4)
        numbers = await da.insert_many(Goes, [{}] * 4)
        await until(lambda: dispatcher_of(run).buffered == 4)  # picked, and the pick was answered
        gate.open()
        for number in numbers:
            await da.result(number, timeout=PATIENCE)
    assert sorted(number for batch in reads for number in batch) == sorted(numbers)
    assert len(reads) < 4
    assert len(set(claims)) == 4, "each ran its second step on its claim"


async def test_slots_that_instances_keep_between_two_steps_cost_no_read(durable_dsn, monkeypatch, reads):
    """They are free within milliseconds: what waits for them has nothing to read."""
    monkeypatch.setattr(dispatcher, "INBOX_FRESH", 1e9)

    class Steps(da.Machine[State], run_ahead=True):
        @da.step
        async def start(self, ctx):
            return da.Next(self.second)

        @da.step
        async def second(self, ctx):
            return da.Done()

    async with running(durable_dsn, queues={"default": da.Queue(4, prefetch=20)}):
        for number in await da.insert_many(Steps, [{}] * 60):
            await da.result(number, timeout=PATIENCE)
    assert reads == []
