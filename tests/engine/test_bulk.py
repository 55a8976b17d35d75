"""Commands on many instances: in the caller, in the background, interrupted, aborted, while rows change."""

from __future__ import annotations

from typing import Any

import durable_actors as da
import psycopg
import pytest
import trio
from durable_actors import _bulk
from durable_actors._bulk_machine import BulkMachine
from durable_actors._engine.setup import plan_queues
from durable_actors.testing import Bench
from tests.support.commands import retry_instance

FAILED = (
    "status, finished_at, last_error) select 'nobody', 's', '{}', 'failed', now(), 'boom ' || n %% 5 from"
)
ROWS = f"insert into durable.gen_durable (fsm, step, state, {FAILED} generate_series(1, %s) n returning id"

LIVE = "{runnable,executing,awaiting_signal,awaiting_children}"


def fill(bench: Bench, count: int) -> list[int]:
    """So many failed instances, a fifth of them with each of five errors."""
    with psycopg.connect(bench.dsn, autocommit=True) as db:
        return [number for (number,) in db.execute(ROWS, [count])]


def look(bench: Bench, query: str, params: Any = None) -> list[Any]:
    with psycopg.connect(bench.dsn, autocommit=True) as db:
        return db.execute(query, params).fetchall()  # type: ignore[arg-type]


def statuses(bench: Bench) -> dict[str, int]:
    return dict(
        look(bench, "select status::text, count(*) from durable.gen_durable where fsm = 'nobody' group by 1")
    )


async def test_everything_that_failed_with_one_error(durable: Bench):
    fill(durable, 2500)
    seen: list[tuple[int, str]] = []
    where = da.Filter(error="boom 1")
    counted = await durable.retry(where=where, dry_run=True)
    assert (counted.count, counted.done, counted.state, counted.id) == (500, 0, "dry run", None)
    assert statuses(durable) == {"failed": 2500}
    assert look(durable, "select * from durable.receipts") == []
    bulk = await durable.retry(
        where=where, by="ada", reason="the shop is back", progress=lambda b: seen.append((b.done, b.state))
    )
    assert (bulk.count, bulk.done, bulk.skipped, bulk.failed, bulk.state) == (500, 500, 0, 0, "finished")
    assert [done for done, _ in seen][:3] == [100, 200, 300]
    assert statuses(durable) == {"failed": 2000, "runnable": 500}
    [(number, command, target, by, data, result)] = look(
        durable, "select id, command, target, by, data, result from durable.receipts where scope = 'bulk'"
    )
    assert (number, command, target, by) == (bulk.id, "retry", "instances", "ada")
    assert data["where"] == {"error": "boom 1"}
    assert (result["count"], result["done"], result["finished"]) == (500, 500, True)
    kinds = look(
        durable,
        "select command, by, reason, data, idempotency_key, count(*) from durable.receipts where scope = 'instance'"
        " group by 1, 2, 3, 4, 5",
    )
    assert kinds == [("retry", "ada", "the shop is back", {"bulk": number}, f"bulk:{number}", 500)]
    order = look(durable, "select target::bigint from durable.receipts where scope = 'instance' order by id")
    assert order == sorted(order), "oldest first"
    assert await (await bulk.refresh()).wait() is bulk


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({}, "needs either a target"),
        ({"target": 1, "where": da.Filter(status="failed")}, "needs either a target"),
        ({"where": da.Filter()}, "names nothing"),
        ({"where": da.Filter(status="done")}, "does not apply to done instances"),
        ({"where": {"status": "failed"}}, "must be a Filter"),
        ({"where": da.Filter(step=3)}, "step=3 must be a string"),  # type: ignore[arg-type]
        ({"where": da.Filter(everything=1)}, "everything"),  # type: ignore[arg-type]
        ({"where": da.Filter(tag=())}, "names nothing"),
        ({"where": da.Filter(waiting="approval")}, "does not apply to instances that wait for approval"),
        ({"where": da.Filter(unique_key=5)}, "unique_key=5 must be a string"),  # type: ignore[arg-type]
        ({"where": da.Filter(status="failed"), "conn": object()}, "takes no conn"),
        ({"where": da.Filter(status="failed"), "dry_run": 1}, "dry_run"),
        ({"where": da.Filter(status="failed"), "background": True, "progress": print}, "progress"),
        ({"target": 1, "dry_run": True}, "dry_run= goes with where="),
    ],
)
async def test_what_is_refused(durable: Bench, arguments: dict[str, Any], text: str):
    with pytest.raises(da.ConfigError, match=text):
        await durable.retry(**arguments)
    assert look(durable, "select * from durable.receipts") == []


async def test_what_no_column_can_hold(durable: Bench):
    with pytest.raises(da.StateError, match="lone surrogate"):
        await durable.retry(where=da.Filter(tag=("a", "\ud800")))


@pytest.mark.parametrize("further", [{}, {"parent": True}, {"unique_key": "k"}], ids=str)
async def test_those_that_wait_for_a_person(durable: Bench, further: dict[str, Any]):
    """By all three ways in which a bulk finds its rows."""
    rows = (
        "insert into durable.gen_durable (fsm, step, state, status, awaits, manual, children_pending, parent_id, "
        "unique_key) select 'nobody', 's', '{}', v.status::durable.durable_status, '{}', "
        "case when kind is not null then jsonb_build_object('kind', kind) end, 1, %s, 'k' from (values "
        "('runnable', null), ('awaiting_signal', null), ('awaiting_signal', 'approval'), "
        "('awaiting_signal', 'pause'), ('awaiting_children', null)) v(status, kind) returning id"
    )
    [parent] = fill(durable, 1)
    numbers = [number for (number,) in look(durable, rows, [parent])]
    if "parent" in further:
        further = {"parent": parent}
    for waiting, expected in (("approval", 2), ("pause", 3), ("signal", 1), ("children", 4)):
        where = da.Filter(waiting=waiting, **further)  # type: ignore[arg-type]
        assert (await durable.cancel(where=where, dry_run=True)).count == 1
        bulk = await durable.cancel(where=where, idempotency_key=waiting)
        assert (bulk.count, bulk.done) == (1, 1)
        assert (await durable.inspect(numbers[expected])).status == "cancelled"
    assert statuses(durable) == {"cancelled": 4, "failed": 1, "runnable": 1}
    given = look(durable, "select data -> 'where' ->> 'waiting' from durable.receipts where scope = 'bulk'")
    assert {waiting for (waiting,) in given} == {"approval", "pause", "signal", "children"}


async def test_an_unknown_argument(durable: Bench):
    with pytest.raises(TypeError, match="unexpected keyword argument 'force'"):
        await durable.retry(where=da.Filter(status="failed"), force=True)  # type: ignore[call-overload]


async def test_what_changed_meanwhile_is_skipped_and_what_came_later_is_not_meant(
    durable: Bench, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(_bulk, "BATCH", 3)
    numbers = fill(durable, 6)
    plain = _bulk.BulkCalls._one

    async def one(self: Any, kind: Any, target: Any, *rest: Any) -> bool:
        """Between the statement that finds it and the command on it, another call takes it; and new ones come."""
        if target.id == numbers[1]:
            await durable._run(lambda conn: retry_instance(conn, "durable", target.id))
            fill(durable, 1)
        return await plain(self, kind, target, *rest)

    monkeypatch.setattr(_bulk.BulkCalls, "_one", one)
    occupy = "update durable.gen_durable set unique_key = 'u', unique_scope = %s where id = %s returning 1"
    look(durable, occupy, [LIVE, numbers[4]])
    holder = "(fsm, step, state, unique_key, unique_scope) values ('o', 's', '{}', 'u', %s) returning 1"
    look(durable, f"insert into durable.gen_durable {holder}", [LIVE])
    bulk = await durable.retry(where=da.Filter(status="failed"))
    assert (bulk.count, bulk.done, bulk.skipped, bulk.failed) == (6, 4, 1, 1)
    assert bulk.failures == [(numbers[4], "another instance occupies its unique key")]
    assert statuses(durable) == {"runnable": 5, "failed": 2}


async def test_an_abort_in_the_middle(durable: Bench, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_bulk, "BATCH", 3)
    fill(durable, 10)

    async def watch(bulk: da.Bulk) -> None:
        if bulk.done == 6:
            await bulk.abort()

    bulk = await durable.retry(where=da.Filter(status="failed"), progress=watch)
    assert (bulk.state, bulk.count, bulk.done) == ("aborted", 10, 6)
    assert statuses(durable) == {"runnable": 6, "failed": 4}
    [(result,)] = look(durable, "select result from durable.receipts where scope = 'bulk'")
    assert (result["aborted"], result["done"]) == (True, 6)


async def test_a_call_that_was_interrupted_goes_on_with_its_key(
    durable: Bench, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(_bulk, "BATCH", 3)
    numbers = fill(durable, 8)
    where = da.Filter(status="failed")
    with trio.CancelScope() as scope:
        await durable.retry(where=where, idempotency_key="k", progress=lambda _: scope.cancel())
    assert statuses(durable) == {"runnable": 3, "failed": 5}
    fill(durable, 1)
    look(durable, "update durable.gen_durable set status = 'failed', finished_at = now() where id = %s returning 1",
         [numbers[0]])  # fmt: skip
    with pytest.raises(da.Conflict, match="another filter"):
        await durable.retry(where=da.Filter(queue="default"), idempotency_key="k")
    bulk = await durable.retry(where=where, idempotency_key="k")
    assert (bulk.count, bulk.done, bulk.state) == (8, 8, "finished")
    assert (bulk.earlier is not None, bulk.repeated) == (True, False), "it did the rest"
    assert statuses(durable) == {"runnable": 7, "failed": 2}, (
        "neither the one that failed again nor the new one"
    )
    again = await durable.retry(where=where, idempotency_key="k")
    assert (again.id, again.done, again.state, again.repeated) == (bulk.id, 8, "finished", True)
    assert look(durable, "select count(*) from durable.receipts") == [(9,)]


async def test_cancel_and_run_now_by_filter(durable: Bench):
    look(
        durable,
        "insert into durable.gen_durable (fsm, step, state, queue, eligible_at, tags) select 'nobody', 's', '{}', 'q',"
        " now() + n * interval '1 h', array['t' || n % 2] from generate_series(-1, 8) n returning 1",
    )
    hastened = await durable.run_now(where=da.Filter(tag="t1"))
    assert (hastened.count, hastened.done, hastened.answers) == (4, 4, {"hastened": 4})
    assert look(durable, "select count(*) from durable.gen_durable where eligible_at <= now()") == [(6,)]
    cancelled = await durable.cancel(where=da.Filter(queue="q", machine="nobody", older_than=0), by="ada")
    assert (cancelled.count, cancelled.done, cancelled.answers) == (10, 10, {"cancelled": 10})
    assert statuses(durable) == {"cancelled": 10}
    assert (await durable.cancel(where=da.Filter(everything=True))).count == 0


async def test_pause_and_resume_by_filter(durable: Bench):
    """Also those that wait; one that is paused already, or is not, is not meant."""
    look(
        durable,
        "insert into durable.gen_durable (fsm, step, state, queue, status, finished_at, awaits, tags)"
        " select 'nobody', 's', '{}', 'q',"
        " (array['runnable', 'awaiting_signal', 'done'])[n % 3 + 1]::durable.durable_status,"
        " case when n % 3 = 2 then now() end, '{x}', array['t' || n % 2]"
        " from generate_series(1, 12) n returning 1",
    )
    first = await durable.pause(where=da.Filter(tag="t0"), by="ada")
    assert (first.count, first.done, first.answers) == (4, 4, {"paused": 4})
    rest = await durable.pause(where=da.Filter(queue="q"), background=True)
    assert rest.count == 4
    await durable.drain(only="durable.ops")
    assert (await rest.refresh()).done == 4
    assert (await durable.resume(where=da.Filter(waiting="signal"))).done == 4
    resumed = await durable.resume(where=da.Filter(everything=True))
    assert (resumed.count, resumed.done) == (4, 4)
    left = "select count(*) from durable.gen_durable where request is not null or hold <> 0"
    assert look(durable, left) == [(0,)]


async def test_between_two_instances_nothing_is_locked(durable: Bench, monkeypatch: pytest.MonkeyPatch):
    """A lock of the parent, kept over two of its children, would meet a commit that has the second and wants it."""
    [parent] = fill(durable, 1)
    look(durable, "update durable.gen_durable set status = 'awaiting_children', finished_at = null, visit = 3,"
         " children_pending = 3, children_total = 3, await_step = 't' where id = %s returning 1", [parent])  # fmt: skip
    children = (
        "(fsm, step, state, parent_id, barrier) select 'c', 's', '{}', %s, 3 from generate_series(1, 3)"
    )
    look(durable, f"insert into durable.gen_durable {children} returning 1", [parent])
    plain = _bulk.BulkCalls._one

    async def one(self: Any, *rest: Any) -> bool:
        look(durable, "select 1 from durable.gen_durable where id = %s for update nowait", [parent])
        return await plain(self, *rest)

    monkeypatch.setattr(_bulk.BulkCalls, "_one", one)
    bulk = await durable.cancel(where=da.Filter(parent=parent))
    assert (bulk.done, bulk.answers) == (3, {"cancelled": 3})
    opened = look(durable, "select status::text, step from durable.gen_durable where id = %s", [parent])
    assert opened == [("runnable", "t")]


# -- in the background


async def test_a_worker_does_it(durable: Bench):
    fill(durable, 250)
    bulk = await durable.retry(where=da.Filter(status="failed"), by="ada", background=True)
    assert (bulk.state, bulk.count, bulk.done) == ("running", 250, 0)
    assert statuses(durable) == {"failed": 250}
    await durable.drain(only=bulk.instance_id)
    assert await bulk.wait() is bulk
    assert (bulk.state, bulk.done, bulk.skipped) == ("finished", 250, 0)
    assert statuses(durable) == {"runnable": 250}
    instance = await durable.inspect(f"durable:bulk:{bulk.id}")
    assert (instance.machine, instance.queue, instance.visit) == ("durable:bulk", "durable.ops", 3)


async def test_it_survives_its_worker(durable: Bench, monkeypatch: pytest.MonkeyPatch):
    """The worker dies after a batch, before its commit: the batch runs again, and does nothing twice."""
    monkeypatch.setattr(_bulk, "BATCH", 4)
    numbers = fill(durable, 10)
    bulk = await durable.retry(where=da.Filter(status="failed"), background=True)
    durable.crash_after(BulkMachine.batch)
    await durable.drain(only=bulk.instance_id, max_steps=1)
    assert statuses(durable) == {"runnable": 4, "failed": 6}
    look(durable, "update durable.gen_durable set status = 'failed', finished_at = now(), last_error = 'again'"
         " where id = %s returning 1", [numbers[1]])  # fmt: skip
    await durable.advance(3600)
    await durable.drain(only=bulk.instance_id)
    await bulk.wait()
    assert (bulk.state, bulk.done) == ("finished", 10)
    assert statuses(durable) == {"runnable": 9, "failed": 1}, "the one that failed again was meant once"
    receipts = look(
        durable, "select target, count(*) from durable.receipts where scope = 'instance' group by 1"
    )
    assert sorted(receipts) == sorted((str(number), 1) for number in numbers)


async def test_an_abort_in_the_background(durable: Bench, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_bulk, "BATCH", 4)
    fill(durable, 10)
    bulk = await durable.retry(where=da.Filter(status="failed"), background=True, idempotency_key="k")
    for _ in range(2):
        assert await durable.execute_next("durable.ops") is not None
    await bulk.abort()
    await bulk.wait()
    assert (bulk.state, bulk.done) == ("aborted", 8)
    await bulk.abort()
    await durable.drain(only=bulk.instance_id)
    assert statuses(durable) == {"runnable": 8, "failed": 2}
    same = await durable.retry(where=da.Filter(status="failed"), idempotency_key="k")
    assert (same.id, same.state) == (bulk.id, "aborted")


async def test_an_abort_in_the_middle_of_a_batch(durable: Bench, monkeypatch: pytest.MonkeyPatch):
    """The state of its instance has not counted that batch; `done` and the receipt do. A retry finishes it."""
    monkeypatch.setattr(_bulk, "BATCH", 4)
    fill(durable, 10)
    bulk = await durable.retry(where=da.Filter(status="failed"), background=True)
    assert await durable.execute_next("durable.ops") is not None
    durable.crash_after(BulkMachine.batch)
    await durable.drain(only=bulk.instance_id, max_steps=1)
    await bulk.abort()
    await durable.drain(only=bulk.instance_id)
    await bulk.wait()
    assert (bulk.state, bulk.done, statuses(durable)) == ("aborted", 8, {"runnable": 8, "failed": 2})
    result = "select result from durable.receipts where scope = 'bulk'"
    [(told,)] = look(durable, result)
    assert (told["count"], told["done"], told["aborted"]) == (10, 8, True)
    late = _bulk.BulkProgress()
    assert bulk.instance_id is not None
    assert bulk.id is not None
    await durable.retry(bulk.instance_id)
    await durable.drain(only=bulk.instance_id)
    await durable.bulk_ended(bulk.id, 10, late, aborted=True)
    [(told,)] = look(durable, result)
    assert (told["done"], told["finished"], "aborted" in told) == (10, True, False), (
        "who looked late changes nothing"
    )


@pytest.mark.parametrize("queues", [None, {"q": 1}])
async def test_every_engine_that_serves_a_queue_serves_this_one(
    durable: Bench, queues: dict[str, int] | None
):
    fill(durable, 150)
    async with da.open_engine(dsn=durable.dsn, queues=queues, name="e") as engine:
        bulk = await engine.client.retry(where=da.Filter(queue="default"), background=True)
        with trio.fail_after(20):
            await bulk.wait()
    assert (bulk.state, bulk.done) == ("finished", 150)
    assert statuses(durable) == {"runnable": 150}


def test_an_engine_without_queues_is_a_client_only():
    assert plan_queues(da.Config(dsn="x", queues={}), {}) == {}
    assert plan_queues(da.Config(dsn="x", queues={"durable.ops": 3}), {})["durable.ops"].concurrency == 3
    found = plan_queues(da.Config(dsn="x", queues={"q": 3}), {})
    assert {name: limits.concurrency for name, limits in found.items()} == {"q": 3, "durable.ops": 1}


def end_of(bench: Bench) -> tuple[Any, ...]:
    """What the receipt of the only bulk says about its end."""
    [(told,)] = look(bench, "select result from durable.receipts where scope = 'bulk'")
    return told["count"], told.get("done"), told.get("aborted"), told.get("finished")


@pytest.mark.parametrize("how", ["client", "sync"])
async def test_one_that_somebody_cancels_between_two_batches_has_an_end_in_its_receipt(
    durable: Bench, monkeypatch: pytest.MonkeyPatch, how: str
):
    """Whoever cancels its instance, and whether somebody looks at the bulk afterwards or not."""
    monkeypatch.setattr(_bulk, "BATCH", 4)
    fill(durable, 10)
    bulk = await durable.retry(where=da.Filter(status="failed"), background=True)
    assert bulk.instance_id is not None
    assert await durable.execute_next("durable.ops") is not None
    if how == "client":
        assert await durable.cancel(bulk.instance_id) == "cancelled"
    else:
        with psycopg.connect(durable.dsn) as conn:
            assert da.sync.cancel(conn, bulk.instance_id) == "cancelled"
            conn.rollback()
            assert end_of(durable) == (10, None, None, None), "it is part of the caller's transaction"
            assert da.sync.cancel(conn, bulk.instance_id) == "cancelled"
    assert end_of(durable) == (10, 4, True, None)
    look(durable, "update durable.gen_durable set state = '[]' where id = %s returning 1", [bulk.instance_id])
    await durable.retry(bulk.instance_id)
    assert await durable.cancel(bulk.instance_id) == "cancelled", "whatever a hand has made of its state"


@pytest.mark.parametrize("drained", [False, True])
async def test_one_that_is_interrupted_in_a_batch_has_an_end_only_if_somebody_cancels_it(
    durable: Bench, monkeypatch: pytest.MonkeyPatch, *, drained: bool
):
    fill(durable, 10)
    begun, go_on = trio.Event(), trio.Event()
    async with da.open_engine(dsn=durable.dsn, name="e", drain_timeout=0.1) as engine:
        one = engine.client._one

        async def slow(*args: Any) -> bool:
            if begun.is_set():
                await go_on.wait()
            begun.set()
            return await one(*args)

        monkeypatch.setattr(engine.client, "_one", slow)
        bulk = await engine.client.retry(where=da.Filter(status="failed"), background=True)
        assert bulk.instance_id is not None
        with trio.fail_after(20):
            await begun.wait()
            if not drained:
                assert await durable.cancel(bulk.instance_id) == "requested"
                with pytest.raises(da.InstanceCancelled):
                    await engine.client.result(bulk.instance_id)
                assert end_of(durable) == (10, 1, True, None)
    if drained:
        assert end_of(durable) == (10, None, None, None)
