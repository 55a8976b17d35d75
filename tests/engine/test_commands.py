"""`retry` and `list_instances` from Python; `inspect`, `result` and `retry` on callers' connections."""

from __future__ import annotations

import asyncio
import threading
from datetime import UTC, datetime, timedelta

import durable_actors as da
import psycopg
import pytest
from tests.engine.kit import running


@pytest.fixture
def flaky(registry):
    """A job that fails unless it is told not to; its second run succeeds."""
    seen: set[int] = set()

    @da.job(max_attempts=1)
    async def flaky(args: dict, ctx: da.Context):
        if ctx.id not in seen and args.get("fails", True):
            seen.add(ctx.id)
            raise ValueError(f"no {args.get('n', 'luck')}")
        return args

    return flaky


# -- on Trio


async def test_retry(durable_dsn, flaky):
    async with running(durable_dsn, poll_interval=60, max_poll_interval=60) as run:
        number = await run.insert(flaky, args={"a": 1}, unique_key="k")
        assert (await run.ended(number)).status == "failed"
        assert await da.retry("k") == number
        assert (await run.ended(number)).result == {"a": 1}
        with pytest.raises(da.Conflict, match=f"instance {number} is done"):
            await da.retry(number)
        with pytest.raises(da.NoTarget):
            await da.retry(number + 999)
        with pytest.raises(da.NoTarget):
            await da.retry("nobody's")
        with pytest.raises(da.ConfigError):
            await da.retry(None)  # type: ignore[arg-type]


async def test_retry_of_an_occupied_key(durable_dsn, flaky):
    async with running(durable_dsn) as run:
        failed = await run.insert(flaky, args={}, unique_key="k")
        assert (await run.ended(failed)).status == "failed"
        holder = await run.insert(flaky, args={}, unique_key="k", schedule_in=3600)
        with pytest.raises(da.Duplicate) as raised:
            await da.retry(failed)
        assert (raised.value.key, raised.value.existing_id) == ("k", holder)
        assert (await da.inspect(failed)).status == "failed"


async def test_list_instances(durable_dsn, flaky):
    async with running(durable_dsn) as run:
        failed = await run.insert(flaky, args={"n": 1}, unique_key="k")
        done = await run.insert(flaky, args={"fails": False})
        await run.ended(failed)
        await run.ended(done)
        later = await run.insert(flaky, args={}, queue="other", schedule_in=3600)
        names = {failed: "failed", done: "done", later: "later"}

        async def found(**fields):
            return [names[each.id] for each in await da.list_instances(da.Filter(**fields))]

        assert await found() == ["later", "done", "failed"]
        assert await found(status="failed") == ["failed"]
        assert await found(machine=flaky, queue="other") == ["later"]
        assert await found(machine="no") == []
        assert await found(step="perform", status="runnable") == ["later"]
        assert await found(error="no 1") == ["failed"]
        assert await found(error="NO 1") == []
        assert await found(unique_key="k") == ["failed"]
        assert await found(unique_key="k", error="other") == []
        assert await found(tag="none") == []
        assert await found(parent=failed) == []
        assert await found(older_than=3600) == []
        assert await found(older_than=timedelta(0)) == ["later", "done", "failed"]
        page = await da.list_instances(limit=2)
        rest = await da.list_instances(limit=2, after=page[-1].id)
        assert [names[each.id] for each in page + rest] == ["later", "done", "failed"]


async def test_lists_are_redacted(durable_dsn, flaky):
    async with running(durable_dsn) as run:
        failed, done = await run.insert(flaky, args={"n": 1}), await run.insert(flaky, args={"fails": False})
        await run.ended(failed)
        await run.ended(done)
        for each in await da.list_instances():
            assert (each.state, each.result, each.last_error, each.error_type, each.traceback) == (None,) * 5
        full = {each.id: each for each in await da.list_instances(full=True)}
        assert full[done].result == {"fails": False}
        assert "no 1" in (full[failed].last_error or "")
        assert full[failed].state == {"n": 1}


@pytest.mark.parametrize(
    ("fields", "option"),
    [
        ({"status": "lost"}, "status"),
        ({"error": 3}, "error"),
        ({"older_than": -1}, "older_than"),
        ({"parent": 0}, "parent"),
        ({"parent": 1, "unique_key": "k"}, "parent"),
        ({"queue": "a\0"}, None),
    ],
    ids=str,
)
async def test_bad_filters(durable_dsn, fields, option):
    async with da.open_client(durable_dsn) as client:
        with pytest.raises(da.DurableError) as raised:
            await client.list_instances(da.Filter(**fields))
        assert getattr(raised.value, "option", None) == option


async def test_bad_pages(durable_dsn):
    async with da.open_client(durable_dsn) as client:
        for options in (
            {"limit": 0},
            {"limit": 10_001},
            {"after": 0},
            {"full": 1},
            {"where": {"status": "failed"}},
        ):
            with pytest.raises(da.ConfigError) as raised:
                await client.list_instances(**options)  # type: ignore[arg-type]
            assert raised.value.option == next(iter(options))


# -- on callers' connections


class Plain:
    """`durable_actors.sync`, and `aio` in the same words."""

    def __init__(self, dsn: str, kind: str, *, autocommit: bool) -> None:
        self.dsn, self.kind, self.autocommit = dsn, kind, autocommit

    def call(self, *steps):
        """One connection, one call after the other; an exception is returned."""
        return self._sync(steps) if self.kind == "sync" else asyncio.run(self._aio(steps))

    def _sync(self, steps):
        found = []
        with psycopg.connect(self.dsn, autocommit=self.autocommit) as conn:
            for name, target, options in steps:
                try:
                    found.append(getattr(da.sync, name)(conn, target, **options))
                except (da.DurableError, TimeoutError) as exc:
                    found.append(exc)
            assert conn.execute("select 1").fetchone() == (1,)  # not aborted
        return found

    async def _aio(self, steps):
        found = []
        conn = await psycopg.AsyncConnection.connect(self.dsn, autocommit=self.autocommit)
        async with conn:
            for name, target, options in steps:
                try:
                    found.append(await getattr(da.aio, name)(conn, target, **options))
                except (da.DurableError, TimeoutError) as exc:
                    found.append(exc)
            await conn.execute("select 1")
        return found


@pytest.fixture(params=["sync", "aio", "sync autocommit", "aio autocommit"])
def plain(request, durable_dsn):
    kind, _, rest = request.param.partition(" ")
    return Plain(durable_dsn, kind, autocommit=bool(rest))


def add(dsn: str, **columns: object) -> int:
    """A row, as it is."""
    values = {"fsm": "m", "step": "s", **columns}
    names, places = ", ".join(values), ", ".join(["%s"] * len(values))
    with psycopg.connect(dsn, autocommit=True) as conn:
        row = conn.execute(
            f"insert into durable.gen_durable ({names}) values ({places}) returning id", [*values.values()]
        ).fetchone()
    assert row is not None
    return row[0]


FAILED = {"status": "failed", "finished_at": "now", "last_error": "why"}


async def test_inspect_reads_the_same_everywhere(durable_dsn, plain, registry):
    number = add(
        durable_dsn,
        **FAILED,
        unique_key=b"\0\xff",
        state='{"ü": [1, null]}',
        eligible_at="infinity",
        partition_key="ключ",
    )
    by_id, by_key, missing = plain.call(
        ("inspect", number, {}), ("inspect", b"\0\xff", {}), ("inspect", 10**6, {})
    )
    async with da.open_client(durable_dsn) as client:
        assert by_id == by_key == await client.inspect(number)
    assert isinstance(missing, da.NoTarget)
    assert by_id.state == {"ü": [1, None]}


def test_retry_on_a_callers_connection(durable_dsn, plain):
    number = add(durable_dsn, **FAILED, unique_key=b"k")
    taken = add(
        durable_dsn,
        **FAILED,
        unique_key=b"t",
        unique_scope="{runnable,executing,awaiting_signal,awaiting_children}",
    )
    holder = add(
        durable_dsn, unique_key=b"t", unique_scope="{runnable,executing,awaiting_signal,awaiting_children}"
    )
    duplicate, first, again, missing, looked = plain.call(
        ("retry", taken, {}), ("retry", "k", {}), ("retry", number, {}), ("retry", "x", {}),
        ("inspect", number, {}),
    )  # fmt: skip
    assert isinstance(duplicate, da.Duplicate)
    assert duplicate.existing_id == holder
    assert first == number
    assert isinstance(again, da.Conflict)
    assert "runnable" in str(again)
    assert isinstance(missing, da.NoTarget)
    assert looked.status == "runnable"
    assert (
        plain.call(("inspect", number, {}))[0].status == "runnable"
    )  # committed with the caller's transaction


def test_retry_is_rolled_back_with_the_callers_transaction(durable_dsn):
    number = add(durable_dsn, **FAILED)
    with psycopg.connect(durable_dsn) as conn:
        assert da.sync.retry(conn, number) == number
        conn.rollback()
        assert da.sync.inspect(conn, number).status == "failed"


def test_result_on_a_callers_connection(durable_dsn, plain):
    failed = add(durable_dsn, **FAILED)
    done = add(durable_dsn, status="done", finished_at="now", result='{"n": 1}', unique_key=b"k")
    live = add(durable_dsn)
    found = plain.call(
        ("result", done, {}), ("result", "k", {"timeout": 1}), ("result", failed, {"timeout": 0}),
        ("result", live, {"timeout": 0.01}), ("result", 10**6, {}), ("result", done, {"type": list}),
    )  # fmt: skip
    assert found[:2] == [{"n": 1}] * 2
    kinds = [da.InstanceFailed, TimeoutError, da.NoTarget, da.StateError]
    assert [type(each) for each in found[2:]] == kinds


def test_result_waits_and_holds_no_transaction(durable_dsn, plain):
    """Whoever ends it commits while we look: no snapshot and no transaction of ours is in its way."""
    number = add(durable_dsn)
    looked = threading.Event()

    def end() -> None:
        looked.wait(30)
        with psycopg.connect(durable_dsn, autocommit=True) as conn:
            conn.execute(
                "update durable.gen_durable set status = 'done', result = '7', finished_at = now() where id = %s",
                [number],
            )

    thread = threading.Thread(target=end)
    thread.start()
    looked.set()
    assert plain.call(("result", number, {"timeout": 30})) == [7]
    thread.join()


def test_result_in_a_transaction_that_sees_nothing_new(durable_dsn):
    number = add(durable_dsn)
    with psycopg.connect(durable_dsn) as conn:
        conn.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        conn.execute("select 1")
        with pytest.raises(da.DurableError, match="repeatable read"):
            da.sync.result(conn, number, timeout=1)
    with psycopg.connect(durable_dsn) as conn:
        da.sync.inspect(conn, number)  # in a transaction that sees what others commit it may wait
        with pytest.raises(TimeoutError):
            da.sync.result(conn, number, timeout=0.01)
        assert conn.info.transaction_status == psycopg.pq.TransactionStatus.INTRANS


def test_children_are_cancelled_by_the_call_that_has_committed(durable_dsn, plain):
    """Without an engine. In a transaction of the caller they are left to whoever comes after its commit."""
    number = add(durable_dsn)
    children = [add(durable_dsn, parent_id=number, queue="other") for _ in range(3)]
    grandchild = add(durable_dsn, parent_id=children[0])
    assert plain.call(("cancel", number, {"children": "cancel"})) == ["cancelled"]
    with psycopg.connect(durable_dsn, autocommit=True) as conn:
        left = conn.execute("select count(*) from durable.gen_durable where finished_at is null").fetchone()
        assert left == (0 if plain.autocommit else 4,)
        if not plain.autocommit:
            for _ in range(3):
                conn.execute("select * from durable.claim_next('none', '{m/s}', 'a runner')")
        assert da.sync.inspect(conn, grandchild).status == "cancelled"


def test_a_queue_on_a_callers_connection(durable_dsn, plain):
    paused, partly, passed, resumed, twice = plain.call(
        ("pause_queue", "mail", {"by": "ada", "until": 3600}),
        ("pause_queue", "mail", {"machine": "m", "idempotency_key": "k"}),
        ("pause_queue", "mail", {"until": datetime(2000, 1, 1, tzinfo=UTC)}),
        ("resume_queue", "mail", {"reason": "done"}),
        ("resume_queue", "mail", {}),
    )
    assert (paused.what, paused.by, paused.until is None) == ("queue 'mail'", "ada", False)
    assert (partly.machine, partly.until) == ("m", None)
    assert isinstance(passed, da.Conflict)
    assert resumed == paused
    assert isinstance(twice, da.Conflict)
    with psycopg.connect(durable_dsn, autocommit=True) as conn:
        assert conn.execute("select fsm from durable.pauses").fetchall() == [("m",)]
        kinds = [row for (row,) in conn.execute("select command from durable.receipts order by id")]
    assert kinds == ["pause", "pause", "resume"]
