"""Plans and pages on a table of 340,000 rows: what a statement costs depends on its batch, on nothing else.

Pages ("buffers") are measured, not milliseconds: they do not depend on the machine. With the settings of the engine's
connections and generic plans, as in production.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

import psycopg
import pytest
import trio
from durable_actors._postgres.driver.statement import Params, Statement
from durable_actors._store.claim import (
    PickFrom,
    promote_siblings,
    read_claims,
    read_queue,
    release_claims,
)
from durable_actors._store.commit import commit_outcomes
from durable_actors._store.insert import insert_call, insert_params
from durable_actors._store.lease import read_owners, renew_leases, sweep_keys
from durable_actors._store.rows import Claim
from durable_actors._store.runner import claim_next
from durable_actors._store.signal import Delivery, expire_awaits, send_signals
from durable_actors._store.sql import statement
from tests.store.filled import CROWD, HOT
from tests.store.kit import HEAD, PLANS, ROLES, SCHEMA, STEPS, Recorder, address, connect, outcome, pick, plan
from tests.support.sql import Plan, explain

pytestmark = pytest.mark.timeout(180)  # the first one fills the table: ten seconds, thirty on a busy machine

BATCH = 50


def sent(function: Callable[..., Awaitable[Any]], *args: Any, **options: Any) -> tuple[Statement, Params]:
    """The first statement that a store function would send, with its parameters."""
    recorder = Recorder()
    trio.run(partial(function, recorder, *args, **options))
    return recorder.calls[0]


def measure(
    db: psycopg.Connection, call: tuple[Statement, Params], settings: Any = PLANS, *, generic: bool = True
) -> Plan:
    """Explain it, rolled back, until two runs agree.

    The first run also sets hint bits (50 pages of 660), and any run may have to read the catalogs again (50, too),
    because of what other tests do on the same server; neither is a cost of the statement.
    """
    arguments = [None if value is None else value.decode() for value in call[1]]
    best: Plan | None = None
    for _ in range(8):
        found = explain(db, call[0].sql, arguments, settings=settings, generic=generic)  # type: ignore[arg-type]
        if best is not None and abs(found.buffers - best.buffers) <= best.buffers // 20:
            return found
        best = found if best is None or found.buffers < best.buffers else best
    assert best is not None
    return best


def measure_pick(
    db: psycopg.Connection,
    queue: str,
    *,
    begin: PickFrom = HEAD,
    known: Sequence[str] = ("m/1",),
    limit: int = BATCH,
) -> Plan:
    found = measure(db, sent(pick, queue=queue, limit=limit, known=known, begin=begin))
    found.assert_no_seq_scan("gen_durable")
    found.assert_uses("gen_durable_pick")
    return found


def claimed(plan: Plan) -> int:
    """How many rows a measured pick claims: it returns no others here."""
    return round(plan.nodes[0].rows)


def executing(db: psycopg.Connection, queue: str, count: int) -> list[Claim]:
    """Claims of rows that are executing, made of their rows."""
    found = db.execute(
        "select id, claim_id::text, visit, partition_key from durable.gen_durable"
        " where status = 'executing' and queue = %s and lease_expires_at > now() order by id limit %s",
        [queue, count],
    ).fetchall()
    assert len(found) == count
    return [
        Claim(number, token, queue, 0, "m", 1, "s", 0, 0, visit, b"{}", key, None, None, False, 0, 0, 0.0)
        for number, token, visit, key in found
    ]


def baseline(db: psycopg.Connection) -> int:
    """Pages of a pick of 50 rows without a key from a queue of a thousand."""
    found = measure_pick(db, "small")
    assert claimed(found) == BATCH
    return found.buffers


def keyed_baseline(db: psycopg.Connection) -> int:
    """The same of rows with keys: each is judged."""
    found = measure_pick(db, "few")
    assert claimed(found) == BATCH
    return found.buffers


# -- every statement


@pytest.mark.parametrize("size", [1, 100])
@pytest.mark.parametrize("rich", [False, True])
def test_a_flush_is_driven_by_its_outcomes(big: psycopg.Connection, size: int, *, rich: bool):
    """By primary key, one probe each: named as a status, "executing" would let the planner read all 2,000 of them."""
    claims = executing(big, "many", size)
    how: dict[str, Any] = (
        {"status": "awaiting_signal", "awaits": ("go",)}
        if rich
        else {"keep_claim": True, "status": "runnable"}
    )
    transitions = [outcome(claim, **how) for claim in claims]
    flush = measure(big, sent(commit_outcomes, SCHEMA, transitions, accept_late=True))
    flush.assert_no_seq_scan("gen_durable")
    flush.assert_uses("gen_durable_pkey")
    assert "gen_durable_executing" not in flush.indexes
    assert sum(node.removed for node in flush.nodes) == 0
    assert flush.buffers < 60 + 40 * size, flush.text


def test_maintenance_of_claims_is_driven_by_the_claims(big: psycopg.Connection):
    claims = executing(big, "many", 100)
    for call in (
        sent(renew_leases, SCHEMA, claims, lease_ttl=60),
        sent(release_claims, SCHEMA, claims, attempts=1),
        sent(read_claims, SCHEMA, [claim.id for claim in claims]),
    ):
        found = measure(big, call)
        found.assert_no_seq_scan("gen_durable")
        found.assert_uses("gen_durable_pkey")
        assert found.indexes == {"gen_durable_pkey"}
        assert found.buffers < 60 + 40 * len(claims), found.text


def test_the_reaper_reads_executing_rows_alone(big: psycopg.Connection):
    """2,000 of 340,000 (12,000 pages). 500 are taken back, each of which looks for its node and its parent, too;

    4,008 pages, twice that after others have updated and rolled back here: dead entries are walked.
    """
    for call, most in (
        ((statement("reap_claims", SCHEMA), [b"500", b"{}", None, b"{}", SCHEMA.encode()]), 10_000),
        (sent(read_owners, SCHEMA), 3000),
    ):
        found = measure(big, call)
        found.assert_no_seq_scan("gen_durable")
        found.assert_uses("gen_durable_executing")
        assert found.buffers < most, found.text


def test_a_sibling_is_promoted_by_one_probe_per_key(big: psycopg.Connection):
    found = measure(big, sent(promote_siblings, SCHEMA, ["few 1", "many 7", "hot", "none"]))
    found.assert_no_seq_scan("gen_durable")
    found.assert_uses("gen_durable_held")
    assert found.buffers < 60


def test_deadlines_are_read_soonest_first(big: psycopg.Connection):
    """100 of 5,000 parked ones are due."""
    found = measure(big, sent(expire_awaits, SCHEMA, "parked", limit=50))
    found.assert_no_seq_scan("gen_durable")
    found.assert_uses("gen_durable_deadline")
    assert found.nodes[0].rows == 50
    assert found.buffers < 60 + 40 * 50


@pytest.mark.parametrize("queue", ["small", "large", "future", "parked", "finished", "none"])
def test_the_shape_of_a_queue_is_a_few_probes(big: psycopg.Connection, queue: str):
    found = measure(big, sent(read_queue, SCHEMA, queue))
    found.assert_no_seq_scan("gen_durable")
    assert found.buffers < 60, found.text


@pytest.mark.parametrize("generic", [False, True])
def test_an_insert_probes_its_own_keys_alone(big: psycopg.Connection, *, generic: bool):
    """On the clients' lane, which has the planner's own settings; half of the keys are occupied."""
    live = ("runnable", "executing", "awaiting_signal", "awaiting_children")
    plans = [plan(unique_key=b"key %d" % number, unique_scope=live) for number in range(4951, 5051)]
    call = (statement("insert_instances", SCHEMA), insert_params(plans))
    found = measure(big, call, ROLES["client"].settings, generic=generic)
    found.assert_no_seq_scan("gen_durable")
    assert found.buffers < 60 + 60 * len(plans), found.text


def test_an_insert_without_unique_keys_reads_nothing(big: psycopg.Connection):
    found = measure(big, insert_call([plan()] * 100, SCHEMA), ROLES["client"].settings)
    assert set(found.kinds) == {"ModifyTable", "Function Scan"}, found.text
    assert found.buffers < 60 + 20 * 100, found.text


def test_signals_read_their_targets_alone(big: psycopg.Connection):
    """Its plan is inside of a function; a sequential scan would show in the pages."""
    found = big.execute("select id from durable.gen_durable where queue = 'parked' limit 20").fetchall()
    for target in (
        [Delivery(number, None, "go", b"{}", f"new {number}") for (number,) in found],
        [Delivery(None, b"key %d" % number, "go", b"{}", None) for number in range(1, 21)],
    ):
        sending = measure(big, sent(send_signals, SCHEMA, target))
        assert sending.buffers < 60 + 80 * len(target), sending.text


@pytest.mark.parametrize("name", ["read_finals", "read_instances", "find_by_key", "insert_instances"])
def test_clients_do_not_read_a_table_that_was_small_when_they_came(db: psycopg.Connection, name: str):
    """Their plans are made once: on an empty table, at the start of a new project, a sequential scan looks cheapest."""
    found_by: dict[str, Params] = {
        "read_instances": [b"{1}", b"t"],
        "find_by_key": [b"\\x6b"],
        "insert_instances": insert_params([plan(unique_key=b"k")]),
    }
    call = (statement(name, SCHEMA), found_by.get(name, [b"{1}"]))
    measure(db, call, ROLES["client"].settings).assert_no_seq_scan("gen_durable")


# -- the pick


def test_a_pick_does_not_grow_with_the_backlog(big: psycopg.Connection):
    large = measure_pick(big, "large")
    assert claimed(large) == BATCH
    assert large.buffers < 2 * baseline(big)


def test_a_pick_does_not_grow_with_the_executing_set(big: psycopg.Connection):
    """5 or 2,000 executing rows with keys: the probe for a busy key is one look into an index."""
    many = measure_pick(big, "many")
    assert claimed(many) == BATCH
    assert many.buffers < 2 * keyed_baseline(big)


def test_a_pick_grows_with_its_batch_alone(big: psycopg.Connection):
    one, many = measure_pick(big, "large", limit=10).buffers, measure_pick(big, "large", limit=500).buffers
    assert many < 60 * one


def test_a_pick_by_ids_reads_those_rows_alone(big: psycopg.Connection):
    ids = [
        number
        for (number,) in big.execute(
            "select id from durable.gen_durable where queue = 'small' and status = 'runnable' order by id limit 5"
        ).fetchall()
    ]
    begin = PickFrom((), (), (), by_id=ids)
    found = measure(big, sent(pick, queue="small", limit=BATCH, begin=begin))
    found.assert_no_seq_scan("gen_durable")
    found.assert_uses("gen_durable_pkey")
    assert claimed(found) == len(ids)
    assert found.buffers < 40 * len(ids)


def test_an_empty_pick_costs_a_handful_of_pages(big: psycopg.Connection):
    priorities = PickFrom(range(10), ["-infinity"] * 10, [0] * 10)
    empty = measure_pick(big, "no such queue", begin=priorities)
    assert empty.buffers < 60


def test_future_rows_of_a_more_urgent_priority_are_not_read(big: psycopg.Connection):
    found = measure_pick(big, "future", begin=PickFrom([0, 5], ["-infinity"] * 2, [0, 0]))
    assert claimed(found) == BATCH
    assert found.buffers < 2 * baseline(big)


async def work_through(dsn: str, queue: str, limit: int) -> int:
    """Pick as a feeder does, from where the last pick ended, until something is claimed; count the picks."""
    picks, begin = 0, HEAD
    async with connect(dsn) as conn:
        while True:
            picks += 1
            picked = await pick(conn, queue=queue, limit=limit, begin=begin)
            if picked.claims:
                return picks
            at, number = picked.positions[0]
            begin = PickFrom([0], [at], [number])


def test_siblings_of_a_busy_key_are_passed_once_and_for_all(big: psycopg.Connection, filled_dsn: str):
    """50,000 at the head of the queue, behind one that executes: each is put aside by one update, then never read."""
    normal = keyed_baseline(big)
    first = measure_pick(big, "hot")
    assert first.buffers < 2 * normal
    assert trio.run(work_through, filled_dsn, "hot", 1000) == HOT // 1000 + 1
    assert big.execute("select count(*) from durable.gen_durable where hold = 1").fetchone() == (HOT,)
    # The picks above have claimed some of the work behind.
    after = measure_pick(big, "small").buffers
    [hot] = executing(big, "hot", 1)
    assert measure(big, sent(promote_siblings, SCHEMA, ["hot"])).buffers < 60
    assert measure(big, sent(sweep_keys, SCHEMA, after="", limit=1000)).buffers < 60
    assert (
        measure(big, sent(commit_outcomes, SCHEMA, [outcome(hot, keep_claim=True)], accept_late=True)).buffers
        < 60
    )
    big.execute(
        "insert into durable.gen_durable (queue, fsm, step, partition_key) values ('hot 2', 'm', 's', 'hot')"
    )
    latecomer = measure_pick(big, "hot 2")
    assert latecomer.buffers < after, "a sibling that comes later is judged by one probe"


def test_rows_of_unknown_machines_are_passed_once_and_for_all(big: psycopg.Connection, filled_dsn: str):
    normal = baseline(big)
    assert measure_pick(big, "unknown").buffers < 2 * normal
    assert trio.run(work_through, filled_dsn, "unknown", 1000) == CROWD // 1000 + 1
    big.execute(
        "insert into durable.gen_durable (queue, fsm, step) select 'unknown', 'm', 's' from generate_series(1, 50)"
    )
    row = big.execute(
        "select max(eligible_at)::text, max(id) from durable.gen_durable where hold = 2"
    ).fetchone()
    assert row is not None
    steady = measure_pick(big, "unknown", begin=PickFrom([0], [row[0]], [row[1]]))
    assert claimed(steady) == BATCH
    assert steady.buffers < 2 * normal
    known = PickFrom([0], [row[0]], [row[1]], shelved=[address("m/2")])
    knowing = measure_pick(big, "unknown", known=["m/1", "m/2"], begin=known)
    assert claimed(knowing) == BATCH, "a node that knows them finds them on the shelf"
    knowing.assert_uses("gen_durable_shelf")
    assert knowing.buffers < 3 * normal


def test_a_long_list_of_known_steps_is_read_once_per_pick(big: psycopg.Connection):
    """Hashed, not compared with each row of the window: 500 machines of 10 steps would cost each row 60 µs."""
    many = [f"m{number}/1/s{step}" for number in range(500) for step in range(10)]
    found = measure_pick(big, "small", known=[*many, "m/1"])
    assert claimed(found) == BATCH
    assert found.buffers <= baseline(big) * 1.2
    read = [node.rows for node in found.nodes if node.kind == "ProjectSet"]
    assert max(read) == len(many) + len(STEPS), found.text


def test_dead_index_entries_are_not_read_from_the_cursor_on(big: psycopg.Connection, filled_dsn: str):
    """50,000 claimed and completed rows that nothing can clean up: another transaction might still see them."""
    normal = baseline(big)
    with psycopg.connect(filled_dsn) as old:
        old.execute("begin isolation level repeatable read")
        old.execute("select 1 from durable.gen_durable limit 1")
        big.execute(
            "with done as (select id from durable.gen_durable where queue = 'dead' order by eligible_at, id limit %s)"
            " update durable.gen_durable g set status = 'done', finished_at = now() from done where g.id = done.id",
            [HOT],
        )
        row = big.execute(
            "select eligible_at::text, id from durable.gen_durable where queue = 'dead' and status = 'done'"
            " order by eligible_at desc, id desc limit 1"
        ).fetchone()
        assert row is not None
        from_head = measure_pick(big, "dead")
        from_cursor = measure_pick(big, "dead", begin=PickFrom([0], [row[0]], [row[1]]))
        assert claimed(from_head) == claimed(from_cursor) == BATCH
        assert from_head.buffers > 1.5 * normal, "else this test tests nothing"
        assert from_cursor.buffers < 2 * normal


@pytest.mark.parametrize("queue", ["small", "large", "future", "dead", "few"])
def test_the_claim_of_a_runner_does_not_depend_on_the_backlog(big: psycopg.Connection, queue: str):
    """Beside the pick, it looks for expired claims as the reaper does: of 2,000 executing rows."""
    call = sent(claim_next, SCHEMA, queue=queue, steps=["m/s"], owner="test", lease=60.0)
    found = measure(big, call)
    assert found.nodes[0].rows == 1
    assert found.buffers < 5000, found.text


def test_a_runner_reads_past_the_rows_of_others_up_to_a_limit(big: psycopg.Connection):
    """45,000 of them: 10,000 are read, 1,000 are shelved."""
    found = measure(
        big, sent(claim_next, SCHEMA, queue="unknown", steps=["m/none"], owner="test", lease=60.0)
    )
    assert found.nodes[0].rows == 0
    assert found.buffers < 60_000, found.text
