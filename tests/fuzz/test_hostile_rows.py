"""Rows written by hand, among good ones: each ends, or waits for a reason that is told; nobody else suffers."""

from __future__ import annotations

import contextlib
import json
from typing import Any, get_args

import durable_actors as da
import psycopg
import pytest
import trio
from click.testing import CliRunner
from durable_actors._store.holds import THROTTLED
from durable_actors.cli import cli
from durable_actors.machine import ENDED, Status, isolated_registry
from hypothesis import given, strategies as st
from tests.fuzz import hostile
from tests.fuzz.hostile import ALL, INT4, INT8, Hostile, executing, noise, row
from tests.fuzz.kit import QUEUE, add, any_text, define, engine, fuzz, scars
from tests.kit import Session

pytestmark = pytest.mark.usefixtures("registry")

SETTLED = """
    select not exists (
        select 1 from durable.gen_durable g
         where g.status = 'executing'
            or g.status in ('awaiting_signal', 'awaiting_children') and g.await_deadline <= now()
            or g.status = 'runnable' and g.hold < 2 and g.eligible_at <= now())"""
"""Nothing runs, is due, or is owned by a ghost. What is shelved, throttled, paused or waits for others may stay."""


def shell(dsn: str, *arguments: str) -> str:
    result = CliRunner().invoke(cli, arguments, env={"DURABLE_DSN": dsn, "COLUMNS": "240"})
    assert result.exit_code == 0, (arguments, result.output, result.exception)
    return result.stdout


def told(case: Hostile, seen: da.Instance, shown: dict[str, Any]) -> str | None:
    """What is wrong with a row's end, if anything."""
    fate = seen.status if seen.status in ENDED else "shelved" if seen.hold == 2 else "waits"
    reason = shown["why"] if fate in {"shelved", "waits"} else seen.last_error or ""
    if fate == case.fate and case.reason in reason and (fate != "done" or seen.result == "ran"):
        return None
    return f"{case.name}: {fate}, {reason[:300]!r}"


async def test_every_hostile_row_ends_with_a_reason_and_harms_nobody(durable_dsn, conn):
    good = define()
    rows: dict[int, Hostile] = {}
    neighbours: list[int] = []
    for index, case in enumerate(ALL):
        rows[add(conn, queue=QUEUE, **case.columns)] = case
        neighbours.append(add(conn, queue=QUEUE, fsm="good", step="perform"))
        if index % 10 == 0:  # siblings of one key, around the hostile ones
            neighbours.append(add(conn, queue=QUEUE, fsm="good", step="perform", partition_key="shared"))
    async with engine(durable_dsn) as running:
        for number in neighbours:
            assert await da.result(number, timeout=30) == "ran"
        await Session(conn).eventually(SETTLED)
        seen = {number: await da.inspect(number) for number in rows}
        listed = await trio.to_thread.run_sync(shell, durable_dsn, "list", "--limit", "10000", "--json")
        shown = {
            number: json.loads(
                await trio.to_thread.run_sync(shell, durable_dsn, "show", "--json", "--", str(number))
            )
            if number > 0 and case.fate in {"shelved", "waits"}
            else {"why": ""}
            for number, case in rows.items()
        }
        for verb in ("list", "queues", "nodes"):
            await trio.to_thread.run_sync(shell, durable_dsn, verb)
        # Alive, with every actor that a row could have stopped.
        after = await da.insert(good, args={})
        assert await da.result(after, timeout=30) == "ran"
        assert scars(running) == []
    assert {each["id"] for each in json.loads(listed)["instances"]} >= set(rows)
    assert [
        found for number, case in rows.items() if (found := told(case, seen[number], shown[number]))
    ] == []


@pytest.mark.slow
async def test_every_hostile_row_can_be_drawn(durable_dsn, conn):
    define()
    numbers = [add(conn, queue=QUEUE, **case.columns) for case in ALL]
    async with da.open_client(durable_dsn) as client:
        for number in numbers:
            if number > 0:
                diagram = await client.graph(number)
                for form in da.diagrams.FORMATS:
                    da.diagrams.render(diagram, form).encode()


async def test_commands_on_hostile_rows_are_carried_out_or_refused(durable_dsn, conn):
    """With a reason, and on each of them: one does not keep the others from it."""
    define()
    numbers = [add(conn, queue=QUEUE, **case.columns) for case in ALL]
    async with da.open_client(durable_dsn) as client:
        for number in numbers:
            for call in (client.rerun, client.run_now):
                with contextlib.suppress(da.Conflict):
                    await call(number)
        for call in (client.run_now, client.retry, client.cancel):
            bulk = await call(where=da.Filter(everything=True))
            assert (bulk.state, bulk.done + bulk.skipped + bulk.failed >= bulk.count) == ("finished", True)
            assert len(bulk.failures) == bulk.failed
    [(live,)] = conn.execute(
        "select count(*) from durable.gen_durable"
        " where finished_at is null and status::text <> 'executing' and cancellation is null"
    )
    assert live == 0, "all of them are cancelled, but those that say that they compensate"


async def test_a_hostile_parent_fails_alone(durable_dsn, conn):
    """Woken, its key would not fit the index of runnable rows: its child's outcome would be refused for ever."""
    define()
    parent = add(
        conn, fsm="order", step="start", queue=QUEUE, status="awaiting_children", partition_key=noise(5000),
        children_pending=1, children_total=1, visit=7,
    )  # fmt: skip
    child = add(conn, fsm="good", step="perform", queue=QUEUE, parent_id=parent, barrier=7)
    async with engine(durable_dsn):
        assert await da.result(child, timeout=30) == "ran"
        with pytest.raises(da.InstanceFailed, match="partition key has 5000 bytes"):
            await da.result(parent, timeout=30)


async def test_odd_signals_are_shown_and_consumed(durable_dsn, conn):
    define()
    target = add(conn, fsm="order", step="inbox", state='{"order": 1}', queue=QUEUE, inbox=True)
    odd: list[dict[str, Any]] = [
        {"payload": "1e100000"},
        {"payload": hostile.DEEP},
        {"payload": "null", "inserted_at": "infinity"},
        {"payload": "1", "inserted_at": "-infinity", "id": -7},
        {"payload": "2", "name": "", "dedup_key": ""},
        {"payload": "3", "name": "'; drop table canary; --"},
        {"payload": "4", "inserted_at": "0044-03-15 12:00:00+00 BC", "consumed_at": "infinity"},
    ]
    for each in odd:
        add(conn, "signals", **{"target_id": target, "name": "n", **each})
    neighbour = add(conn, fsm="order", step="inbox", state='{"order": 1}', queue=QUEUE, inbox=True)
    add(conn, "signals", target_id=neighbour, name="n", payload="5")
    async with engine(durable_dsn):
        assert await da.result(neighbour, timeout=30) == [["n", "5"]]
        found = await da.result(target, timeout=30)
    numbers = [["n", "1"], ["n", "1" + "0" * 19], ["n", "[" * 20], ["n", "None"], ["", "2"]]
    assert found == [*numbers, ["'; drop table canary; --", "3"]]


ABOUT = ["[]", "null", '{"queues": 5}', '{"machines": {"a": 1}}', '{"pid": "x", "version": []}', hostile.DEEP]


@pytest.mark.parametrize("verb", ["nodes", "queues", "top"])
def test_odd_nodes_are_listed(durable_dsn, conn, verb):
    for index, about in enumerate(ABOUT):
        conn.execute(
            "insert into durable.nodes (incarnation, node, about, started_at, seen_at)"
            " values (%s, %s, %s, 'infinity', '-infinity')",
            [f"n:{index}", "\x1b[31m'; --", about],
        )
    arguments = ["--all"] if verb == "nodes" else []
    assert shell(durable_dsn, verb, *arguments)
    assert json.loads(shell(durable_dsn, verb, *arguments, "--json")) is not None


async def test_odd_pauses_are_listed_and_stop_nothing_else(durable_dsn, conn):
    good = define()
    ends = ["infinity", "-infinity", "0044-03-15 12:00:00+00 BC", None]
    for index, until in enumerate(ends):
        names = (f"\x1b[31m'; -- {index}", noise(300) if index % 2 else "")
        query = "insert into durable.pauses (queue, fsm, until, at, by) values (%s, %s, %s, 'infinity', %s)"
        conn.execute(query, [*names, until, "\x1b[31m"])
    for verb in ("queues", "top"):
        assert "\x1b[31m" not in await trio.to_thread.run_sync(shell, durable_dsn, verb)
        assert json.loads(await trio.to_thread.run_sync(shell, durable_dsn, verb, "--json")) is not None
    async with engine(durable_dsn):
        after = await da.insert(good, args={})
        assert await da.result(after, timeout=30) == "ran"
        assert len(await da.pauses()) == 2


# -- rows that nobody thought of

instants = st.sampled_from(
    ["infinity", "-infinity", "now", "0044-03-15 12:00:00+00 BC", "tomorrow", "yesterday"]
)
int4, int8 = st.integers(-(2**31), INT4), st.integers(-INT8, INT8)
text = any_text.filter(lambda each: "\0" not in each and each.isascii())
steps = st.sampled_from(["start", "again", "on", "park", "split", "inbox", "perform", "nowhere", "__init__"])
COLUMNS: dict[str, st.SearchStrategy[Any]] = {
    "fsm": st.one_of(st.sampled_from(["order", "free", "good", "typed job"]), text),
    "fsm_version": st.one_of(st.just(1), int4),
    "step": st.one_of(steps, text),
    "state": st.sampled_from(['{"order": 1}', "{}", "null", "[]", "1e400", '{"order": 1e99999}', '"x"']),
    "status": st.sampled_from(get_args(Status)),
    "attempt": st.sampled_from([0, 1, INT4 - 1, INT4]),
    "crashes": st.sampled_from([0, 1, INT4 - 1, INT4]),
    "visit": st.sampled_from([1, 2, INT8 - 1, INT8]),
    "rev": st.sampled_from([0, -INT8, INT8 - 1, INT8]),
    "hold": st.integers(0, 5),
    "request": st.sampled_from(
        [None, "null", "{}", '{"kind": "pause"}', '{"cancel": 1e99999}', "[[]]", '"x"']
    ),
    "manual": st.sampled_from(
        [None, "1", "[]", '{"kind": "pause"}', '{"kind": []}', '{"decision": {"kind": "approved"}}']
    ),
    "cancellation": st.sampled_from(
        [None, None, "null", "{}", '{"by": 1}', '{"upstream": 1}', "[[]]", '"x"']
    ),
    "cancel_rest": st.sampled_from([None, False, True]),
    "links": st.sampled_from([None, None, 0, 1, 2, 3, 12, -32768, 32767]),
    "child_key": st.sampled_from([None, "", "k"]),
    "fair_key": st.sampled_from([None, "k", "\n", "k" * 2000]),
    "priority": st.sampled_from([0, 1, -32768, 32767]),
    "rerun_of": st.sampled_from([None, 0, -INT8, INT8]),
    "partition_key": st.sampled_from([None, "", "shared", "other"]),
    "eligible_at": instants,
    "await_deadline": st.one_of(st.none(), instants),
    "awaits": st.sampled_from([None, "{}", "{go}", "{NULL}", "{{a,b},{c,d}}"]),
    "await_step": st.one_of(st.none(), steps, text),
    "inbox": st.booleans(),
    "children_pending": st.sampled_from([0, 1, INT4]),
    "children_total": int4,
    "parent_id": st.one_of(st.none(), int8),
    "barrier": st.one_of(st.none(), int8),
    "claim_id": st.sampled_from([None, hostile.UUID]),
    "locked_by": st.sampled_from([None, "ghost:1", "'; --"]),
    "lease_expires_at": st.one_of(st.none(), instants),
    "finished_at": st.one_of(st.none(), instants),
    "unique_key": st.one_of(st.none(), st.binary(max_size=10)),
    "last_error": st.one_of(st.none(), text),
    "result": st.sampled_from([None, "1e99999", "{}"]),
}
some_columns = st.lists(st.sampled_from(sorted(COLUMNS)), max_size=6, unique=True).flatmap(
    lambda names: st.fixed_dictionaries({name: COLUMNS[name] for name in names})
)


def whole(columns: dict[str, Any]) -> dict[str, Any]:
    """Give a status what its constraints ask for, so that most rows are taken."""
    status = columns.get("status")
    needs = {"executing": executing(), "awaiting_signal": {"awaits": "{go}"}}.get(status, {})
    if status in ENDED:
        needs = {"finished_at": "now"}
    if columns.get("hold") == THROTTLED:  # it keeps its place: the good rows of its key would wait for it
        columns = columns | {"partition_key": None}
    return {"fsm": "order", "step": "start", **needs, **{k: v for k, v in columns.items() if v is not None}}


async def survive(dsn: str, conn: psycopg.Connection[Any], batch: list[dict[str, Any]]) -> None:
    conn.execute("truncate durable.gen_durable, durable.signals restart identity")
    good = define()
    neighbours: list[int] = []
    for columns in batch:
        try:
            add(conn, queue=QUEUE, **whole(columns))
        except psycopg.errors.IntegrityError:
            continue  # a constraint of the table has refused it
        neighbours.append(add(conn, queue=QUEUE, fsm="good", step="perform", partition_key="shared"))
        neighbours.append(add(conn, queue=QUEUE, fsm="good", step="perform"))
    async with engine(dsn, queues={QUEUE: 10}) as running:
        # A lease until tomorrow, of a ghost, is honoured until the ghost is proved dead.
        conn.execute(
            "update durable.gen_durable set lease_expires_at = now() where locked_by in ('ghost:1', '''; --')"
        )
        for number in neighbours:
            assert await da.result(number, timeout=30) == "ran"
        await Session(conn).eventually(SETTLED)
        after = await da.insert(good, args={}, queue=QUEUE)
        assert await da.result(after, timeout=30) == "ran"
        assert scars(running) == []
    listed = json.loads(await trio.to_thread.run_sync(shell, dsn, "list", "--limit", "10000", "--json"))
    assert len(listed["instances"]) > len(neighbours)


@fuzz(3)
@given(batch=st.lists(some_columns, min_size=10, max_size=30))
def test_rows_that_nobody_thought_of(durable_dsn, conn, batch):
    with isolated_registry():
        trio.run(survive, durable_dsn, conn, batch)


def test_the_table_has_no_two_names():
    assert len({case.name for case in ALL}) == len(ALL)
    assert row("x", "done", "").columns["fsm"] == "order"
