"""explain is the picker's own truth: it says "ready" of exactly the rows that a pick takes.

Random tables and nodes. The oracle is the real pick, with the real statistics of its queue and a limit that leaves
nothing ahead of any row, by every live node from every queue that it serves. One session, so nothing is locked.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from random import Random
from typing import Any

import attrs
import psycopg
import pytest
import trio
from durable_actors._postgres.driver import encode
from durable_actors._postgres.driver.statement import Params, Result, Statement
from durable_actors._store.claim import Owner, PickFrom, pick_instances, read_queue
from durable_actors._store.explanation import Explanation
from durable_actors._store.foreign import execute
from durable_actors._store.holds import HELD, REASONS, SHELVED, THROTTLED
from durable_actors._store.observe import nodes_call, observe_call, read_node, read_observed
from durable_actors._store.why import explain_observed
from durable_actors.machine import step_address
from hypothesis import given, note, strategies as st
from tests.fuzz.kit import fuzz
from tests.store.kit import SCHEMA, Recorder

pytestmark = pytest.mark.timeout(300)

VERSIONS = [1, 2]
STEPS = ["s", "t"]
TIMES = ["-infinity", "-1 h", "-2 ms", "-1 us", "0", "1 us", "2 ms", "1 h", "infinity"]
PARKED = ["awaiting_signal", "awaiting_children"]
ENDED = ["done", "failed", "cancelled"]


@attrs.frozen
class Node:
    name: str
    queues: tuple[str, ...]
    steps: dict[str, tuple[str, ...]]
    """By "name/version"."""
    alive: bool
    stopped: bool

    @property
    def known(self) -> list[str]:
        """As `MachineCatalog.array`."""
        return sorted(_address(machine, step) for machine, steps in self.steps.items() for step in steps)

    @property
    def names(self) -> set[str]:
        """As `MachineCatalog.names`."""
        return {*self.known, *(_address(machine, "") for machine in self.steps)}


def _address(machine: str, step: str) -> str:
    name, version = machine.split("/")
    return step_address(name, int(version), step)


# Made from a seed instead of drawn: Hypothesis repeats its choices, and rows that are all alike are in nobody's way.
# It still finds the shortest table and the fewest nodes of a failing seed.


def make_row(random: Random) -> dict[str, Any]:
    """One row: most are runnable, due, offered or shelved, and of one key, so that they are in each other's way."""
    status = random.choice(["runnable"] * 18 + ["executing", random.choice([*PARKED, *ENDED])])
    step = random.choice(STEPS)
    hold = random.choice([0] * 8 + [SHELVED] * 4 + [HELD, 3, 4, 5]) if status == "runnable" else 0
    return {
        "fsm": "m",
        "fsm_version": random.choice(VERSIONS),
        "step": step,
        "status": status,
        "hold": hold,
        "shelved_step": random.choice([step, step, None, *STEPS]) if hold == SHELVED else None,
        "queue": random.choice(["q", "q", "q", "r"]),
        "priority": random.choice([0, 0, -3, 7]),
        "partition_key": random.choice(["k", "k", "k", "l", None, ""]),
        "eligible_at": random.choice(["-1 h"] * 6 + ["0"] * 3 + TIMES),
        "lease": random.choice(["-1 s", "1 min"]),
        "uses": make_uses(random) if random.random() < 0.4 else [],
    }


@attrs.frozen
class Use:
    """What a row uses, and how its key stands: a key of its own, so that no row is in the way of another one."""

    limit: str
    """api: a rate; gpu: slots; both; nobody: unknown."""
    slot: bool
    weight: int
    tat: str
    """When the tokens are there again."""
    blocked: str | None
    taken: bool
    """Of a slot: somebody has it."""
    kept: bool
    """Of a slot: the row keeps it, from an earlier step."""
    look: str | None
    """When what is throttled under it is looked at; None: never, as nobody knows of it."""


def make_uses(random: Random) -> list[Use]:
    return [
        Use(
            limit=random.choice(["api", "api", "gpu", "both", "nobody"])
            if n
            else random.choice(["api", "gpu"]),
            slot=random.random() < 0.4,
            weight=random.choice([1, 1, 3, 50]),
            tat=random.choice(["-1 h", "0", "10 s", "2 min", "1 h"]),
            blocked=random.choice([None, None, None, "-1 s", "30 s"]),
            taken=random.random() < 0.4,
            kept=random.random() < 0.3,
            look=random.choice(["-1 s", "0", "0", "5 s", None]),
        )
        for n in range(random.choice([1, 1, 2, 3]))
    ]


def make_node(random: Random, name: str) -> Node:
    """One node: most live, serve a queue that has rows, and have some of the steps."""
    return Node(
        name,
        random.choice([("q",), ("q",), ("q", "r"), ("r",), ("other",)]),
        {f"m/{version}": random.choice([("s",), ("t",), ("s", "t"), ()]) for version in VERSIONS},
        random.random() < 0.85,
        random.random() < 0.3,
    )


LIMITS = """
insert into durable.limits (name, interval, burst, slots)
values ('api', 12, 5, null), ('gpu', null, 1, 1), ('both', 12, 5, 1)
"""
KEY = """
with level as (
    insert into durable.limit_keys (key, tat, at, blocked)
    values (%(key)s, now() + %(tat)s::interval, now(), now() + %(blocked)s::interval)
), look as (
    insert into durable.limit_waits (key, queue, next_at)
    select %(key)s, %(queue)s, now() + %(look)s::interval where %(look)s is not null
)
insert into durable.gen_durable (fsm, step, status, queue, claim_id, locked_by, lease_expires_at, rate_limit)
select 'other', 's', 'executing', 'slots', gen_random_uuid(), 'n:0', now() + interval '1 h', '!' || %(key)s
 where %(taken)s
"""
KEEP = "insert into durable.kept_slots (instance_id, key) values (%s, %s) on conflict do nothing"
THAWED = "select id from durable.thaw(%s, %s, 1000) where id is not null"
INSERT = """
insert into durable.gen_durable (
    fsm, fsm_version, step, status, hold, shelved_step, queue, priority, partition_key,
    eligible_at, claim_id, locked_by, lease_expires_at, awaits, finished_at, rate_limit, limited_by)
select %(fsm)s, %(fsm_version)s, %(step)s, r.status, %(hold)s, %(shelved_step)s, %(queue)s, %(priority)s,
       %(partition_key)s,
       case when r.at like '%%infinity' then r.at::timestamptz else now() + r.late end,
       case when r.status = 'executing' then gen_random_uuid() end,
       case when r.status = 'executing' then 'n:0' end,
       case when r.status = 'executing' then now() + %(lease)s::interval end,
       case when r.status = 'awaiting_signal' then '{x}'::text[] end,
       case when r.status in ('done', 'failed', 'cancelled') then now() end, %(text)s, %(limited_by)s
  from (select %(status)s::durable.durable_status as status, %(eligible_at)s::text as at, %(late)s::interval as late) r
returning id
"""


def fill(conn: psycopg.Connection, table: list[dict[str, Any]], nodes: tuple[Node, ...]) -> list[int]:
    """Insert rows and nodes; of several executing rows of one key, the others are done: the index allows one."""
    busy: set[str] = set()
    ids: list[int] = []
    conn.execute(LIMITS)
    for n, row in enumerate(table):
        key = row["partition_key"]
        if row["status"] == "executing" and key is not None:
            row = row if key not in busy else {**row, "status": "done"}
            busy.add(key)
        late = None if "infinity" in row["eligible_at"] else row["eligible_at"]
        found = conn.execute(INSERT, {**row, **limit(conn, row, n), "late": late}).fetchone()
        assert found is not None
        ids.append(found[0])
        for number, use in enumerate(row["uses"]):
            if use.slot and use.kept:
                conn.execute(KEEP, [found[0], f"{use.limit}:{n}.{number}"])
    for node in nodes:
        about = {
            "queues": dict.fromkeys(node.queues, 5),
            "machines": list(node.steps),
            "steps": {machine: list(steps) for machine, steps in node.steps.items()},
        }
        conn.execute(
            "insert into durable.nodes (incarnation, node, about, stopped_at)"
            " values (%s, 'n', %s, case when %s then now() end)",
            [node.name, json.dumps(about), node.stopped],
        )
    return ids


def limit(conn: psycopg.Connection, row: dict[str, Any], n: int) -> dict[str, str | None]:
    """Let the row use its limits, each with a key of its own; return the two columns that tell of them."""
    parts: list[str] = []
    keys: list[str] = []
    for number, use in enumerate(row["uses"]):
        keys.append(f"{use.limit}:{n}.{number}")
        conn.execute(KEY, {**attrs.asdict(use), "key": keys[-1], "queue": row["queue"]})
        parts.append(f"!{keys[-1]}" if use.slot else f"{keys[-1]}\x1e{use.weight}")
    text = "\x1f".join(parts) or None
    return {"text": text, "limited_by": keys[-1] if keys and row["hold"] == THROTTLED else None}


def make_pauses(random: Random) -> list[tuple[str, str, str | None]]:
    """Queue, machine and until when: mostly nothing, or something whose time has passed."""
    some = [("q", ""), ("r", ""), ("q", "m"), ("r", "m"), ("q", "another")]
    ends = [None, "1 h", "-1 us", "0"]
    return [(*which, random.choice(ends)) for which in some if random.random() < 0.12]


def pause(conn: psycopg.Connection, pauses: list[tuple[str, str, str | None]]) -> None:
    for each in pauses:
        conn.execute(
            "insert into durable.pauses (queue, fsm, until) values (%s, %s, now() + %s::interval)", each
        )


@contextmanager
def rolled_back(conn: psycopg.Connection) -> Iterator[None]:
    conn.execute("savepoint here")
    try:
        yield
    finally:
        conn.execute("rollback to savepoint here; release savepoint here")


@contextmanager
def living(conn: psycopg.Connection, nodes: tuple[Node, ...]) -> Iterator[None]:
    """Hold the session locks that show which nodes are alive."""
    names = [node.name for node in nodes if node.alive]
    query = "select pg_advisory_{}(hashtextextended('durable' || chr(2) || %s, 0))"
    for name in names:
        conn.execute(query.format("lock"), [name])  # type: ignore[call-overload]
    try:
        yield
    finally:
        for name in names:
            conn.execute(query.format("unlock"), [name])  # type: ignore[call-overload]


class OnPsycopg:
    """The session of the test, for functions of the store."""

    def __init__(self, conn: psycopg.Connection) -> None:
        self._conn = conn

    async def run(self, call: Statement, params: Params = ()) -> Result:
        return Result(execute(self._conn, call, params, schema=SCHEMA), "")


def picked(conn: psycopg.Connection, node: Node, queue: str) -> set[int]:
    """What a pick of this node claims from the queue, as its feeder would send it; rolled back."""
    shape = trio.run(partial(read_queue, OnPsycopg(conn), SCHEMA, queue))  # type: ignore[arg-type]
    known = node.names
    recorder = Recorder()
    with rolled_back(conn):
        found = conn.execute(THAWED, [SCHEMA, queue]).fetchall()
    thawed = [number for (number,) in found]
    begin = PickFrom(
        shape.priorities,
        ["-infinity"] * len(shape.priorities),
        [-(2**63)] * len(shape.priorities),
        extras=thawed,
        shelved=[each for each in shape.shelved if each in known],
    )
    trio.run(
        partial(
            pick_instances,
            recorder,  # type: ignore[arg-type]
            Owner(SCHEMA, node.name, b"hash", 60.0),
            queue=queue,
            limit=1000,
            known=encode.text_array(node.known),
            begin=begin,
            now=0.0,
        )
    )
    call, params = recorder.calls[0]
    values = [None if value is None else value.decode() for value in params]
    with rolled_back(conn), psycopg.RawCursor(conn) as cursor:
        result = cursor.execute(call.sql, values).pgresult  # type: ignore[arg-type]
    assert result is not None
    rows = ((result.get_value(row, 0), result.get_value(row, 3)) for row in range(result.ntuples))
    return {int(number or b"") for number, what in rows if what == b"c"}


def explained(conn: psycopg.Connection, ids: list[int]) -> dict[int, Explanation]:
    rows = execute(conn, *observe_call(SCHEMA, ids, full=False), schema=SCHEMA)
    nodes = [*map(read_node, execute(conn, *nodes_call(SCHEMA), schema=SCHEMA))]
    found = {each.instance.id: each for each in map(read_observed, rows)}
    return {number: explain_observed(found[number], nodes, found) for number in ids}


@fuzz(120)
@given(seed=st.integers(0, 2**32), size=st.sampled_from([1, 3, 6, 9, 12]), crew=st.sampled_from([0, 1, 2, 3]))
@pytest.mark.slow
def test_ready_is_what_the_pick_takes(explain_db: psycopg.Connection, seed: int, size: int, crew: int):
    conn, rolls = explain_db, Random(seed)
    nodes = tuple(make_node(rolls, f"n:{number}") for number in range(3))[:crew]
    table = [make_row(rolls) for _ in range(size)]
    pauses = make_pauses(rolls)
    note(f"{nodes}\n{table}\n{pauses}")
    with living(conn, nodes), rolled_back(conn):
        ids = fill(conn, table, nodes)
        pause(conn, pauses)
        taken = {
            number
            for node in nodes
            if node.alive
            for queue in node.queues
            for number in picked(conn, node, queue)
        }
        found = explained(conn, ids)
        assert {number for number, each in found.items() if each.reason == "ready"} == taken
        keys = dict(zip(ids, (row["partition_key"] for row in table), strict=True))
        for number, each in found.items():
            check_blockers(each, keys, number)


def check_blockers(found: Explanation, keys: dict[int, str | None], number: int) -> None:
    """Whoever does not run is told why; who waits for a key is told for whom: another row of the key."""
    if found.reason == "throttled":
        assert [each for each in found.blockers if each.kind == "limit"]
        return
    siblings = [each.id for each in found.blockers if each.kind == "instance"]
    assert all(each != number and each is not None and keys[each] == keys[number] for each in siblings)
    if found.reason == "waiting_for_key":
        assert keys[number] is not None or found.evidence["hold"] == "held"
        assert siblings or found.evidence["hold"] == "held"
    elif found.reason in {"unserved", "unknown_step"}:
        assert found.blockers
    elif found.reason == "ready":
        assert not found.blockers
        assert found.evidence["hold"] in {None, REASONS[SHELVED].name, REASONS[THROTTLED].name}


@pytest.fixture
def explain_db(durable_dsn: str) -> Iterator[psycopg.Connection]:
    """One session and one transaction: `now()` stands still, so times around it are exact."""
    with psycopg.connect(durable_dsn) as conn:
        conn.execute("set local plan_cache_mode = force_generic_plan")
        yield conn
        conn.rollback()
