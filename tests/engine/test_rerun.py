"""`rerun`: a new instance from an old one. `run_now`: without delay, schedule or back-off."""

from __future__ import annotations

from typing import Any

import attrs
import durable_actors as da
import psycopg
import pytest
from durable_actors.testing import Bench
from tests.invariants.journal import journal_problems, read_journal
from tests.kit import PATIENCE
from tests.support.commands import hasten_instance
from tests.support.interleave import open_sessions


@attrs.frozen
class Cart:
    n: int = 0


class Shop(da.Machine[Cart], name="shop", queue="q"):
    @da.step(initial=True)
    async def begin(self, ctx: da.Context[Cart]) -> da.Outcome:
        return da.Next(self.ship, Cart(ctx.state.n + 1), partition_key="other")

    @da.step
    async def ship(self, ctx: da.Context[Cart]) -> da.Outcome:
        return da.Done(ctx.state.n)


@da.job(name="flaky", max_attempts=3)
async def flaky(args: dict[str, Any]) -> None:
    raise ValueError("no")


def row(bench: Bench, number: int, columns: str) -> tuple[Any, ...]:
    with psycopg.connect(bench.dsn) as db:
        assert journal_problems(*read_journal(db)) == []
        found = db.execute(f"select {columns} from durable.gen_durable where id = %s", [number]).fetchone()  # type: ignore[arg-type]
    assert found is not None
    return found


async def test_with_its_first_state_where_that_is_recorded(durable: Bench):
    options: dict[str, Any] = {"priority": 5, "partition_key": "p", "tags": ["t"], "meta": {"who": "me"}}
    old = await durable.insert(Shop, state=Cart(7), unique_key="u", journal="full", **options)
    await durable.drain()
    new = await durable.rerun("u", by="ada", reason="again", idempotency_key="k")
    assert new != old
    columns = "fsm, fsm_version, step, state, queue, priority, partition_key, tags, meta"
    columns += ", unique_key, parent_id, rerun_of"
    expected = ("shop", 1, "begin", {"n": 7}, "q", 5, "p", ["t"], {"who": "me"}, None, None, old)
    assert row(durable, new, columns) == expected
    assert await durable.rerun(old, idempotency_key="k") == new, "the same key again"
    assert (await durable.inspect(new)).rerun_of == old
    [started] = await durable.history(new)
    assert (started.by, started.data["row"]["rerun_of"]) == ("ada", old)
    assert started.data["command"] == {"type": "rerun", "key": "k", "reason": "again", "metadata": {}}
    [receipt] = await durable.receipts(old)
    assert (receipt.command, receipt.result, receipt.by) == ("rerun", new, "ada")
    assert (await durable.tree(new)).root.rerun_of == old
    assert (await durable.explain(new)).evidence["rerun_of"] == old
    await durable.drain()
    await durable.assert_done(new, result=8)
    assert (await durable.verify()).problems == []
    with psycopg.connect(durable.dsn, autocommit=True) as db:
        db.execute("delete from durable.gen_durable where id = %s", [new])
    await durable.rebuild(new)
    assert (await durable.inspect(new)).rerun_of == old


async def test_at_a_revision_or_as_given(durable: Bench):
    old = await durable.insert(Shop, state=Cart(7), journal="full")
    await durable.drain()
    entered = next(each.rev for each in await durable.history(old) if each.kind == "next")
    again = await durable.rerun(old, at_rev=entered)
    assert row(durable, again, "step, state, partition_key") == ("ship", {"n": 8}, "other")
    other = await durable.rerun(old, at_rev=entered, step=Shop.begin, state=Cart(1))
    assert row(durable, other, "step, state") == ("begin", {"n": 1})
    for arguments, error in (
        ({"at_rev": 99}, da.Conflict),
        ({"at_rev": 0}, da.ConfigError),
        ({"step": "nowhere"}, da.ConfigError),
        ({"step": 3}, da.ConfigError),
        ({"state": object()}, da.StateError),
    ):
        with pytest.raises(error):
            await durable.rerun(old, **arguments)
    with pytest.raises(da.NoTarget):
        await durable.rerun(999)


async def test_where_nothing_is_recorded(durable: Bench):
    gone_on = await durable.insert(Shop, state=Cart(7), journal="off")
    first = await durable.rerun(gone_on)  # no outcome can have changed it yet
    assert row(durable, first, "step, state") == ("begin", {"n": 7})
    await durable.drain()
    with pytest.raises(da.Conflict, match=r"the first state of instance .* is not recorded") as refused:
        await durable.rerun(gone_on)
    assert str(refused.value).endswith(": give a state (--state on the command line)"), "no retry: it is done"
    with pytest.raises(da.Conflict, match=r"the first step of instance .* is not recorded"):
        await durable.rerun(gone_on, state=Cart(1))
    with pytest.raises(da.Conflict, match=r"has no record of revision 1.*Give step and state"):
        await durable.rerun(gone_on, at_rev=1)
    given = await durable.rerun(gone_on, step="ship", state=Cart(1))
    assert row(durable, given, "step, state") == ("ship", {"n": 1})


@pytest.mark.parametrize(
    ("columns", "known"),
    [
        ({"round": 1}, False),  # `Retry(state=...)`
        ({"round": 1, "status": "done", "finished_at": "now", "claim_id": "=gen_random_uuid()"}, True),
        (
            {"round": 1, "status": "failed", "finished_at": "now"},
            False,
        ),  # by a crash, after a `Retry(state=...)`
        ({"round": 0, "status": "cancelled", "finished_at": "now"}, True),
        ({"visit": 2}, False),
    ],
)
async def test_when_the_state_is_still_the_first(durable: Bench, columns: dict[str, Any], known: bool):
    """Of a machine that this process does not know: any step, and a state of JSON values."""
    names = ", ".join(columns)
    values = ", ".join(
        "gen_random_uuid()" if str(each).startswith("=") else f"'{each}'" for each in columns.values()
    )
    with psycopg.connect(durable.dsn, autocommit=True) as db:
        query = f"(fsm, step, state, {names}) values ('x', 's', '1e400', {values}) returning id"
        [(number,)] = db.execute(f"insert into durable.gen_durable {query}")  # type: ignore[arg-type]
    if known:
        assert row(durable, await durable.rerun(number), "length(state::text) = 401, step") == (True, "s")
    else:
        with pytest.raises(da.Conflict):
            await durable.rerun(number)
    assert row(durable, await durable.rerun(number, step="t", state=[1]), "step, state") == ("t", [1])


async def test_a_step_that_the_old_one_has_left_asks_for_its_limits(durable: Bench):
    """Those that its code says, whatever the old one used last; where it ended, those that it used there."""

    class Call(da.Machine[dict[str, Any]], name="call"):
        @da.step(initial=True)
        async def begin(self, ctx: da.Context[dict[str, Any]]) -> da.Outcome:
            return da.Next(self.call, rate_limit=("api", "acme"))

        @da.step(rate_limit="api", slot="line")
        async def call(self, ctx: da.Context[dict[str, Any]]) -> da.Outcome:
            return da.Done() if ctx.state.get("ends") else da.Next(self.end)

        @da.step
        async def end(self, ctx: da.Context[dict[str, Any]]) -> da.Outcome:
            return da.Done()

    async with da.open_engine(
        da.Config(dsn=durable.dsn, name="e", limits={"api": da.Limit(100), "line": da.Limit(slots=1)})
    ):
        old, there = [await durable.insert(Call, state=state) for state in ({}, {"ends": True})]
        for number in (old, there):
            await durable.result(number, timeout=PATIENCE)
    for step, number, expected in (
        ("call", old, "api\x1f!line"),
        ("end", old, None),
        ("begin", old, None),
        ("call", there, "api:acme"),
    ):
        new = await durable.rerun(number, step=step, state={})
        assert row(durable, new, "step, rate_limit") == (step, expected)


async def test_on_the_callers_connections(durable: Bench):
    old = await durable.insert(Shop, state=Cart(7), schedule_in=3600, journal="full")
    with psycopg.connect(durable.dsn) as conn:
        new = da.sync.rerun(conn, old, by="ada", at_rev=1)
        assert da.sync.run_now(conn, old, idempotency_key="k") == "hastened"
        with pytest.raises(da.Conflict):
            da.sync.rerun(conn, old, at_rev=9)
        conn.rollback()
        with pytest.raises(da.NoTarget):
            await durable.inspect(new)
        assert da.sync.run_now(conn, old, idempotency_key="k") == "hastened"


# -- run_now


async def test_a_schedule_and_a_back_off(durable: Bench):
    later = await durable.insert(flaky, args={}, schedule_in=3600, journal="claims", partition_key="p")
    assert await durable.run_now(later, by="ada", reason="now") == "hastened"
    assert await durable.run_now(later) == "due"
    assert (await durable.explain(later)).reason != "delayed"
    await durable.drain(only=later)
    assert (await durable.inspect(later)).attempt == 1
    assert await durable.run_now(later) == "hastened"
    await durable.drain(only=later)
    assert (await durable.inspect(later)).attempt == 2, "the attempts count on"
    kinds = [
        (each.kind, each.by, each.attempt) for each in await durable.history(later) if each.kind == "hastened"
    ]
    assert kinds == [("hastened", "ada", 0), ("hastened", None, 1)]
    assert row(durable, later, "status::text") == ("runnable",)
    assert [each.result for each in await durable.receipts(later)] == ["hastened", "due", "hastened"]


@pytest.mark.parametrize(
    ("columns", "answer"),
    [
        ("status, awaits) values ('awaiting_signal', '{a}'", da.Conflict),
        ("status, finished_at) values ('done', now()", da.Conflict),
        (
            "status, locked_by, claim_id, lease_expires_at) values ('executing', 'n', gen_random_uuid(), now()",
            da.Conflict,
        ),
        ("hold, partition_key, eligible_at) values (1, 'k', now() + interval '1 h'", "held"),
        ("eligible_at) values (now()", "due"),
    ],
)
async def test_what_is_not_delayed(durable: Bench, columns: str, answer: Any):
    with psycopg.connect(durable.dsn, autocommit=True) as db:
        query = f"(fsm, step, state, {columns.replace('values (', 'values (%s, %s, %s, ')}) returning id"
        [(number,)] = db.execute(f"insert into durable.gen_durable {query}", ["m", "s", "{}"])  # type: ignore[arg-type]
    before = row(durable, number, "gen_durable::text")
    if isinstance(answer, str):
        assert await durable.run_now(number) == answer
    else:
        with pytest.raises(answer, match="only a runnable one can be run now"):
            await durable.run_now(number)
        assert await durable.receipts(number) == []
    assert row(durable, number, "gen_durable::text") == before


async def test_run_now_against_a_pick(durable: Bench):
    """The pick has claimed the row when `run_now` gets its lock: it finds an instance that runs."""
    number = await durable.insert(flaky, args={}, schedule_in=3600)
    claim = (
        "update durable.gen_durable set status = 'executing', claim_id = gen_random_uuid(), locked_by = 'n',"
        " lease_expires_at = now() + interval '1 min' where id = %s"
    )
    with open_sessions(durable.dsn, 1) as (picker,):
        picker.run("begin")
        picker.run(claim, [number])
        async with durable._pool.acquire(durable._lane) as conn:
            with pytest.raises(psycopg.errors.LockNotAvailable):
                await hasten_instance(conn, "durable", number)
        picker.run("commit")
    with pytest.raises(da.Conflict, match="is executing"):
        await durable.run_now(number)


async def test_rerun_of_a_row_that_is_locked_or_deleted_meanwhile(durable: Bench):
    number = await durable.insert(Shop, state=Cart(1), journal="full")
    with open_sessions(durable.dsn, 1) as (other,):
        other.run("begin")
        other.run("delete from durable.gen_durable where id = %s", [number])
        new = await durable.rerun(number)  # it waits for nobody
        assert (await durable.inspect(new)).rerun_of == number
        other.run("commit")
    with pytest.raises(da.NoTarget):
        await durable.rerun(number)


async def test_of_one_that_is_paused_the_delay_is_skipped_and_the_pause_stays(durable: Bench):
    later = await durable.insert(flaky, args={}, schedule_in=3600, journal="claims")
    await durable.pause(later)
    assert await durable.run_now(later) == "paused"
    assert await durable.run_now(later) == "held", "it is due, and paused: nothing changes"
    assert (await durable.explain(later)).reason == "paused"
    await durable.drain(only=later)
    assert (await durable.inspect(later)).attempt == 0
    await durable.resume(later)
    await durable.drain(only=later)
    assert (await durable.inspect(later)).attempt == 1, "it ran at once"
    assert (await durable.verify(later)).ok


async def test_many_that_are_paused(durable: Bench):
    ids = [await durable.insert(flaky, args={}, schedule_in=3600, tags=["t"]) for _ in range(3)]
    await durable.pause(ids[0])
    hastened = await durable.run_now(where=da.Filter(tag="t"))
    assert (hastened.count, hastened.answers) == (2, {"hastened": 2})
    hastened = await durable.run_now(where=da.Filter(tag="t", paused=True))
    assert (hastened.count, hastened.answers) == (1, {"paused": 1})
