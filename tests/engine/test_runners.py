"""Runners in Python: `claim_next`, `heartbeat`, `complete`, `fail`, beside engines and instead of them."""

from __future__ import annotations

import logging
from datetime import timedelta
from typing import Any

import attrs
import durable_actors as da
import psycopg
import pytest
import trio
from tests.engine.kit import QUIET, Db, Gate, client_of, expire, gated, running, simple
from tests.kit import until

pytestmark = pytest.mark.usefixtures("registry")


@attrs.frozen
class Order:
    number: int
    paid: int = 0


@pytest.fixture
def shop(registry) -> Any:
    """A machine that ends every step with another outcome, and a job for its children."""

    @da.job(name="pack", queue="shop", max_attempts=2, backoff=lambda _: 0)
    async def pack(args: dict[str, Any], ctx: da.Context[dict[str, Any]]) -> str:
        if args["n"] == 1 and ctx.attempt == 0:
            raise ValueError("the box is torn")
        return f"box {args['n']}"

    class Shop(da.Machine[Order], name="shop", queue="shop", run_ahead=False):
        @da.step(initial=True)
        async def begin(self, ctx: da.Context[Order]) -> da.Outcome:
            return da.Retry() if ctx.attempt == 0 else da.Next(self.pay)

        @da.step
        async def pay(self, ctx: da.Context[Order]) -> da.Outcome:
            return da.Await(["paid"], then=self.paid)

        @da.step
        async def paid(self, ctx: da.Context[Order]) -> da.Outcome:
            total = ctx.state.paid + sum(signal.payload for signal in ctx.awaited)
            if total < 3:
                return da.Await("paid")
            boxes = [da.Child(pack, args={"n": n}, journal="full") for n in range(2)]
            return da.ScheduleChildren(self.ship, boxes, Order(ctx.state.number, total))

        @da.step
        async def ship(self, ctx: da.Context[Order]) -> da.Outcome:
            return da.Done({"boxes": [child.result for child in ctx.children], "paid": ctx.state.paid})

    return Shop


async def run_one(client: da.Client, shop: Any) -> bool:
    """One step of the shop, by a runner that has its code from elsewhere; False if nothing was due."""
    claimed = await client.claim_next("shop", owner="elsewhere")
    if claimed is None:
        return False
    outcome: Any
    match claimed.step:
        case "begin":
            outcome = da.Retry() if claimed.attempt == 0 else da.Next("pay")
        case "pay":
            outcome = da.Await("paid", then="paid")
        case "paid":
            total = sum(signal.payload for signal in claimed.awaited)
            boxes = [da.Child("pack", args={"n": n}, journal="full") for n in range(2)]
            state = Order(claimed.state["number"], total)
            outcome = da.Await("paid") if total < 3 else da.ScheduleChildren("ship", boxes, state)
        case "ship":
            assert claimed.children is not None
            outcome = da.Done(
                {"boxes": [each.result for each in claimed.children], "paid": claimed.state["paid"]}
            )
        case _ if claimed.state["n"] == 1 and claimed.attempt == 0:
            await client.fail(claimed, ValueError("the box is torn"))
            return True
        case _:
            outcome = f"box {claimed.state['n']}"
    await client.complete(claimed, outcome)
    return True


async def pay(client: da.Client, number: int) -> None:
    for amount in (1, 2):
        await client.signal(number, "paid", amount)


COLUMNS = (
    "fsm, status, step, state, result, attempt, visit, round, crashes, children_total, children_pending, last_error, "
    "awaits, inbox"
)


def story(db: Db, root: int) -> list[tuple[Any, ...]]:
    """What is left of an order: its rows, and what the journal says about it, without ids and times."""
    rows = db.execute(
        f"select {COLUMNS} from durable.gen_durable where id = %s or parent_id = %s order by id", root, root
    )
    records = db.execute(
        "select kind, j.step, to_step, j.visit, j.attempt, error - 'traceback'"
        " from durable.journal j join durable.gen_durable g on g.id = j.instance_id"
        " where (g.id = %s or g.parent_id = %s) and kind not in ('claimed', 'woken', 'held')"
        " order by g.id, j.rev", root, root,
    )  # fmt: skip
    return [*rows, *records]


async def test_a_runner_does_what_an_engine_does(db: Db, shop: Any) -> None:
    """Every outcome, a failure, signals and children; rows, counters and records are the same."""
    async with client_of(db) as client:
        number = await client.insert(shop, state=Order(1), journal="full")
        await pay(client, number)
        while await run_one(client, shop):
            pass
        assert await client.result(number) == {"boxes": ["box 0", "box 1"], "paid": 3}
        report = await client.verify()
        assert (report.checked, report.problems) == (3, [])
        by_runner = story(db, number)
    async with running(db.dsn, queues={"shop": 2}) as run:
        other = await run.insert(shop, state=Order(1), journal="full")
        await pay(run.engine.client, other)
        assert (await run.ended(other)).status == "done"
    assert story(db, other) == by_runner


async def test_an_engine_and_a_runner_share_the_steps_of_a_machine(db: Db, shop: Any) -> None:
    async with running(db.dsn, queues={"shop": 2}) as run, trio.open_nursery() as nursery:
        client = run.engine.client
        ran = 0

        async def runner() -> None:
            nonlocal ran
            while True:
                ran += await run_one(client, shop)
                await trio.sleep(0)

        nursery.start_soon(runner)
        numbers = [await client.insert(shop, state=Order(n), journal="full") for n in range(20)]
        for number in numbers:
            await pay(client, number)
        for number in numbers:
            assert await client.result(number) == {"boxes": ["box 0", "box 1"], "paid": 3}
        nursery.cancel_scope.cancel()
        report = await client.verify()
        assert (report.checked, report.problems) == (60, [])
    by_runner = db.value(
        "select count(*) from durable.journal where kind = 'claimed' and node = 'runner:elsewhere'"
    )
    assert 0 < by_runner == ran
    assert by_runner < db.value("select count(*) from durable.journal where kind = 'claimed'")


async def test_of_fifty_claims_at_once_one_gets_the_row(db: Db) -> None:
    async with client_of(db) as client:
        number = await client.insert(simple())
        got: list[da.Claimed | None] = []

        async def claim() -> None:
            got.append(await client.claim_next())

        async with trio.open_nursery() as nursery:
            for _ in range(50):
                nursery.start_soon(claim)
        assert [each.id for each in got if each is not None] == [number]


# -- fences


async def test_a_claim_that_was_taken_back_is_lost(db: Db) -> None:
    async with client_of(db) as client:
        number = await client.insert(simple(), state={"n": 1})
        old = await client.claim_next(lease_ttl=60)
        assert old is not None
        expire(db, number)
        new = await client.claim_next()
        assert new is not None
        assert (new.id, new.attempt, new.idempotency_key) == (number, 1, old.idempotency_key)
        for call in (client.heartbeat(old), client.complete(old, da.Done(1)), client.fail(old, "no")):
            with pytest.raises(da.LeaseLost, match="not current"):
                await call
        before = new.lease_until
        assert await client.heartbeat(new, lease_ttl=timedelta(hours=1)) == new.lease_until > before
        assert (await client.complete(new, da.Done(2))).result == 2


async def test_duplicates_are_harmless_and_conflicts_are_told(db: Db) -> None:
    async with client_of(db) as client:
        await client.insert(simple(), journal="outcomes")
        claimed = await client.claim_next()
        assert claimed is not None
        first = await client.complete(claimed, da.Done({"n": 1}))
        assert (first.status, first.result, first.locked_by) == ("done", {"n": 1}, None)
        assert await client.complete(claimed, da.Done({"n": 1})) == first
        for call in (client.complete(claimed, da.Done(2)), client.fail(claimed, "no")):
            with pytest.raises(da.Conflict, match="this claim was completed"):
                await call
        assert db.value("select count(*) from durable.journal where kind = 'done'") == 1
        await client.insert(simple(), journal="off")
        claimed = await client.claim_next()
        assert claimed is not None
        assert (await client.complete(claimed, da.Done(1))).result == 1
        assert (await client.complete(claimed, da.Done(2))).result == 1, "nothing tells which one it was"


async def test_late_outcomes_are_refused_where_the_engine_refuses_them(db: Db) -> None:
    async with running(db.dsn, queues={}, late_commit="reject") as run:
        client = run.engine.client
        number = await client.insert(simple())
        claimed = await client.claim_next()
        assert claimed is not None
        expire(db, number)
        with pytest.raises(da.LeaseLost, match="expired"):
            await client.complete(claimed, da.Done(1))


async def test_the_token_stays_with_the_runner(db: Db, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with client_of(db) as client:
        await client.insert(simple(), journal="full")
        claimed = await client.claim_next()
        assert claimed is not None
        await client.heartbeat(claimed)
        await client.complete(claimed, da.Done(1))
        with pytest.raises(da.Conflict) as caught:
            await client.complete(claimed, da.Done(2))
        told = f"{claimed!r} {claimed} {caught.value!r} {caplog.text} {await client.history(claimed.id)}"
        assert claimed.token not in told
        assert claimed.claim_id in told


async def test_invalid_outcomes_and_options(db: Db, shop: Any) -> None:
    async with client_of(db) as client:
        await client.insert(shop, state=Order(1))
        claimed = await client.claim_next("shop")
        assert claimed is not None
        for wrong in (None, da.Next("nowhere"), da.Next("pay", {"number": "x"})):
            with pytest.raises((da.InvalidOutcome, da.StateError)):
                await client.complete(claimed, wrong)
        with pytest.raises(da.InvalidOutcome, match="on_duplicate"):
            child = da.Child("pack", args={"n": 1}, unique_key="k", on_duplicate="raise")
            await client.complete(claimed, da.ScheduleChildren("ship", [child]))
        with pytest.raises(da.InvalidOutcome, match="comes after no other one"):
            first = da.Child("pack", args={"n": 1})
            graph = [first, da.Child("pack", args={"n": 2}, after=first)]
            await client.complete(claimed, da.ScheduleChildren("ship", graph))
        for options in (
            {"steps": "shop/pay"},
            {"steps": ["pay"]},
            {"steps": [], "machines": []},
            {"lease_ttl": 0},
        ):
            with pytest.raises(da.ConfigError):
                await client.claim_next("shop", **options)  # type: ignore[arg-type]
        gone = attrs.evolve(claimed, id=4711)
        with pytest.raises(da.NoTarget):
            await client.complete(gone, da.Next("pay"))
        assert (await client.complete(claimed, da.Stop(ValueError("enough")))).error_type == "ValueError"


async def test_a_machine_that_this_process_does_not_know(db: Db) -> None:
    """Its steps are named, its state is plain JSON, and a failure is retried twenty times."""
    number = db.insert(fsm="media:Thumbnail", step="resize", state='{"n": 1}')
    async with client_of(db) as client:
        claimed = await client.claim_next(steps=["media:Thumbnail/resize"])
        assert claimed is not None
        with pytest.raises(da.InvalidOutcome, match="needs an outcome"):
            await client.complete(claimed, {"n": 2})
        assert (await client.complete(claimed, da.Next("store", {"n": 2}))).state == {"n": 2}
        claimed = await client.claim_next(steps=["media:Thumbnail/store"])
        assert claimed is not None
        failed = await client.fail(claimed, "the disk is full", retry_in=0)
        assert (failed.id, failed.status, failed.attempt, failed.last_error) == (
            number,
            "runnable",
            1,
            "the disk is full",
        )
        claimed = await client.claim_next(steps=["media:Thumbnail/store"])
        assert claimed is not None
        assert (await client.fail(claimed, "again", max_attempts=2)).status == "failed"


async def test_a_job_fails_as_its_definition_says(db: Db, registry: Any) -> None:
    @da.job(name="mail", max_attempts=3, backoff=lambda _: 50)
    async def mail(args: dict[str, Any]) -> None: ...

    async with client_of(db) as client:
        number = await client.insert(mail, args={})
        for error, status in ((ValueError("no"), "runnable"), (da.Cancel("enough"), "failed")):
            claimed = await client.claim_next(machines=[mail])
            assert claimed is not None
            after = await client.fail(claimed, error)
            assert after.status == status
            if status == "runnable":
                assert timedelta(seconds=49) < after.eligible_at - after.updated_at <= timedelta(seconds=50)
            db.execute("update durable.gen_durable set eligible_at = now() where id = %s", number)


# -- beside an engine


async def test_the_engine_goes_on_with_what_a_runner_completes(db: Db) -> None:
    """Without polls: the commit gives it a hint, as its own do."""

    class Two(da.Machine[dict[str, Any]], name="two"):
        @da.step(initial=True)
        async def first(self, ctx: da.Context[dict[str, Any]]) -> da.Outcome:
            raise AssertionError("a runner has it")

        @da.step
        async def second(self, ctx: da.Context[dict[str, Any]]) -> da.Outcome:
            return da.Done("by the engine")

    number = db.insert(fsm="two", step="first")
    async with client_of(db) as client:
        claimed = await client.claim_next(steps=["two/first"])
    assert claimed is not None
    async with running(db.dsn, **QUIET) as run:
        with trio.fail_after(10):
            await run.engine.client.complete(claimed, da.Next("second"))
            assert await run.engine.client.result(number) == "by the engine"


async def test_a_key_is_shared_by_engines_and_runners(db: Db) -> None:
    gate = Gate()
    machine = gated(gate, "keyed")
    async with running(db.dsn) as run, client_of(db, name="runner") as client:
        first = await run.insert(machine, partition_key="k")
        await gate.wait_entered()
        second = await run.insert(machine, partition_key="k")
        assert await client.claim_next() is None
        gate.open()
        assert (await run.ended(first)).status == (await run.ended(second)).status == "done"
        await run.engine.stop()
        third, fourth = [await client.insert(machine, partition_key="k") for _ in range(2)]
        claimed = await client.claim_next()
        assert claimed is not None
        assert claimed.id == third
    async with running(db.dsn) as run:
        fifth = await run.insert(machine)
        assert (await run.ended(fifth)).status == "done"
        assert db.value("select status from durable.gen_durable where id = %s", fourth) == "runnable"
        await run.engine.client.complete(claimed, da.Done())
        assert (await run.ended(fourth)).status == "done"


async def test_an_engine_reaps_a_runner_when_its_lease_is_over_and_not_before(db: Db) -> None:
    """A runner has no session and may renew rarely: that no lock of its is held proves nothing."""
    machine = simple()
    async with client_of(db) as client:
        number = await client.insert(machine, state={"n": 7})
        claimed = await client.claim_next(lease_ttl=3600)
        assert claimed is not None
    async with running(db.dsn, reap_interval=0.05, dead_after=0.1) as run:
        other = db.insert(status="executing", locked_by="gone:1", claim_id="4a1b0f6e-0000-4000-8000-000000000000",
                          lease_expires_at="2100-01-01")  # fmt: skip
        with trio.fail_after(10):
            await until(lambda: db.value("select crashes from durable.gen_durable where id = %s", other) == 1)
        assert db.value("select status from durable.gen_durable where id = %s", number) == "executing"
        why = await run.engine.client.explain(number)
        assert "a runner" in why.summary
        expire(db, number)
        assert (await run.ended(number)).attempt == 1


async def test_a_commit_of_unknown_fate_is_repeated(db: Db) -> None:
    """The server has committed, and the answer is lost: the same call again finds what it has done."""
    async with client_of(db) as client:
        await client.insert(simple(), journal="outcomes")
        claimed = await client.claim_next()
        assert claimed is not None
        with psycopg.connect(db.dsn, autocommit=True) as lost:  # as by a call whose answer never came
            lost.execute(
                "select * from durable.complete(%s, %s, %s, %s)",
                [claimed.id, claimed.claim_id, claimed.token, '{"done": 1}'],
            )
        assert (await client.complete(claimed, da.Done(1))).status == "done"
        assert db.value("select count(*) from durable.journal where kind = 'done'") == 1


async def test_a_notifier_is_told_what_a_runner_makes_runnable(durable_dsn: str):
    """`complete` and `fail` are told like the outcomes of an engine; what waits or has ended is not."""
    told: list[str] = []

    class Two(da.Machine[Any], name="two", queue="far"):
        @da.step
        async def start(self, ctx: da.Context[Any]) -> da.Outcome: ...

        @da.step
        async def end(self, ctx: da.Context[Any]) -> da.Outcome: ...

    async def notify(wakeup: da.Wakeup) -> None:
        told.append(wakeup.runnable_key)

    async with da.open_client(durable_dsn, notifier=notify) as client:
        number = await client.insert(Two)
        for count, outcome in enumerate((da.Next("end"), None, da.Done()), 1):
            await until(
                lambda count=count: len(told) == count
            )  # before the claim: then nothing waits to be told
            claim = await client.claim_next("far", machines=[Two])
            assert claim is not None
            if outcome is None:
                await client.fail(claim, "once", retry_in=0)
            else:
                await client.complete(claim, outcome)
        await until(lambda: client.notifications().waiting == 0)
    assert told == [f"{number}/1/start#0.0", f"{number}/2/end#0.0", f"{number}/2/end#1.1"]


DEEP = "[" * 5000 + "]" * 5000
WIDE = "1" * 100_000


async def test_a_signal_that_python_cannot_decode(db: Db, caplog: pytest.LogCaptureFixture) -> None:
    """It is handed over as its text, as to a step of an engine; if it cannot even be read over, its step has failed.

    In no case is a claim left behind that nobody knows of.
    """
    wide, deep, last = (db.insert(fsm="m", step="s", awaits=["go"], inbox=True, journal=4) for _ in range(3))
    for number, payload in ((wide, WIDE), (deep, DEEP)):
        db.execute(
            "insert into durable.signals (target_id, name, payload) values (%s, 'go', %s)", number, payload
        )
    async with da.open_client(db.dsn) as client:
        claimed = await client.claim_next(steps=["m/s"])
        assert claimed is not None
        assert (claimed.id, claimed.awaited[0].payload, claimed.signals[0].payload) == (wide, WIDE, WIDE)
        await client.complete(claimed, da.Done())
        claimed = await client.claim_next(steps=["m/s"])
        assert claimed is not None
        assert claimed.id == last
        status, attempt, owner, error = db.row(deep, "status, attempt, locked_by, last_error")
        assert (status, attempt, owner) == ("runnable", 1, None)
        assert f"instance {deep}: what its step 's' is to be handed cannot be decoded" in error
        assert [each.kind for each in await client.history(deep, after=1)] == ["claimed", "retry"]
    assert f"claim_next: instance {deep}" in caplog.text


async def test_children_that_python_cannot_decode(db: Db) -> None:
    parent = db.insert(fsm="m", step="s", children_total=2, visit=2)
    for result in (WIDE, '{"n": 1}'):
        db.insert(parent_id=parent, barrier=2, status="done", result=result, finished_at="now")
    async with da.open_client(db.dsn) as client:
        claimed = await client.claim_next(steps=["m/s"])
        assert claimed is not None
        assert claimed.children is not None
        assert [each.result for each in claimed.children] == [WIDE, {"n": 1}]
    db.execute(
        "update durable.gen_durable set result = null where status = 'done'"
    )  # the fixtures read all rows
