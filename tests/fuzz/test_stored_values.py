"""States, results and payloads: what is taken is stored and comes back; what is not is refused before any SQL."""

from __future__ import annotations

import contextlib
from typing import Any

import durable_actors as da
import pytest
from durable_actors import sync
from durable_actors._store import insert as inserting
from durable_actors._store.insert import in_chunks, plan_rows
from durable_actors.machine import _codec, decode_or_text
from hypothesis import given, strategies as st
from tests.fuzz.kit import ODD, Drawn, Order, add, cyclic, deep, define, engine, fuzz, values

pytestmark = pytest.mark.usefixtures("registry")


@fuzz(40)
@given(drawn=st.lists(values, min_size=1, max_size=4))
def test_what_is_taken_is_stored(conn, drawn):
    job = define()
    taken: list[bytes] = []
    for each in drawn:
        with contextlib.suppress(da.StateError):
            taken += [plan.state for plan in plan_rows(job, [{"args": {"v": each.it}}])]
    with conn.transaction(force_rollback=True):
        ids = sync.insert_many(conn, job, [{"args": decode_or_text(each)} for each in taken])
        stored = [
            conn.execute(
                "select state = %s::jsonb, state::text from durable.gen_durable where id = %s", pair
            ).fetchone()
            for pair in zip([each.decode() for each in taken], ids, strict=True)
        ]
    assert [row[0] for row in stored] == [True] * len(taken), stored


def outcome_of(kind: str, value: Any, step: Any) -> da.Outcome:
    match kind:
        case "next":
            return da.Next(step, value)
        case "retry":
            return da.Retry(value)
        case "await":
            return da.Await("go", value, timeout=0.001)
        case "done":
            return da.Done(value)
        case _:
            return da.Stop(value)


async def test_steps_that_return_odd_values_end_with_a_reason(durable_dsn, conn):
    """Every outcome with every odd value, run by an engine: nothing is stuck, and the neighbours are done."""

    class M(da.Machine, name="odd", queue="q"):
        @da.step
        async def start(self, ctx: da.Context[Any]) -> da.Outcome:
            if ctx.attempt or ctx.awaited or ctx.visit > 1:
                return da.Done("again")
            return outcome_of(ctx.state["kind"], ODD[ctx.state["index"]], self.end)

        @da.step
        async def end(self, ctx: da.Context[Any]) -> da.Outcome:
            return da.Done("end")

    class Typed(da.Machine[Order], name="typed", queue="q"):
        @da.step
        async def start(self, ctx: da.Context[Order]) -> da.Outcome:
            return da.Next(self.end, ODD[ctx.state.order])

        @da.step
        async def end(self, ctx: da.Context[Order]) -> da.Outcome:
            return da.Done("end")

    good = define()
    kinds = ("next", "retry", "await", "done", "stop")
    odd = [{"state": {"kind": kind, "index": index}} for kind in kinds for index in range(len(ODD))]
    async with engine(durable_dsn, queues={"q": 50}):
        numbers = await da.insert_many(M, odd)
        numbers += await da.insert_many(Typed, [{"state": Order(index)} for index in range(len(ODD))])
        neighbours = await da.insert_many(good, [{"args": {}}] * 20)
        for number in neighbours:
            assert await da.result(number, timeout=30) == "ran"
        for number in numbers:
            # StateError: a number that jsonb has taken and Python cannot hold
            with contextlib.suppress(da.InstanceFailed, da.StateError):
                await da.result(number, timeout=30)
    query = (
        "select count(*), count(*) filter (where finished_at is null or status = 'failed' and last_error is null)"
        " from durable.gen_durable"
    )
    assert conn.execute(query).fetchone() == (len(numbers) + 20, 0)


def test_sizes_that_no_message_holds_are_refused(monkeypatch):
    """Sent, a huge one would hold up every other commit; the server closes the connection on a message of 1 GB."""
    job = define()
    monkeypatch.setattr(_codec, "MAX_JSON", 1000)
    monkeypatch.setattr(inserting, "MAX_BYTES", 5000)
    with pytest.raises(da.StateError, match="it has 1008 bytes of JSON, the limit is 1000"):
        plan_rows(job, [{"args": {"v": "x" * 1000}}])
    with pytest.raises(
        da.ConfigError, match="at most 5000 bytes of states and meta at a time, these have 5400"
    ):
        plan_rows(job, [{"args": {"v": "x" * 892}}] * 6)
    plans = plan_rows(job, [{"args": {"v": "x" * 892}}] * 5)
    assert [len(chunk) for chunk in in_chunks(plans * 3, rows=4)] == [4, 4, 4, 3]
    assert [len(chunk) for chunk in in_chunks(plans * 3, rows=100)] == [5, 5, 5]
    assert list(in_chunks([], rows=4)) == []


@pytest.mark.parametrize("value", [cyclic(), deep(), {"a": cyclic()}], ids=["cyclic", "deep", "inside"])
def test_what_has_no_end_is_told_where(value):
    with pytest.raises(da.StateError, match=r"\$.*(contains itself|nested too deeply)"):
        plan_rows(define(), [{"args": {"v": value}}])


async def test_a_state_as_deep_as_python_reads_is_shown(durable_dsn, conn):
    """And a deeper one as its text."""
    depths = [10, 400, 900, 5000]
    numbers = [add(conn, fsm="m", step="s", state="[" * depth + "]" * depth) for depth in depths]
    async with da.open_client(durable_dsn):
        seen = [(await da.inspect(number)).state for number in numbers]
    assert [type(each) for each in seen] == [list, list, list, str]


def test_the_values_can_be_told():
    assert repr(Drawn(10**5000)) == "<int of 16610 bits>"
