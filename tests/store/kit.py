"""What the store's tests share: connections with the engine's settings, rows made by hand, picks from the head."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final

import psycopg
import trio
from durable_actors._engine.lanes import lanes
from durable_actors._postgres.driver import encode
from durable_actors._postgres.driver.connection import PgConn
from durable_actors._postgres.driver.statement import Params, Result, Statement
from durable_actors._store.claim import Owner, PickFrom, pick_instances
from durable_actors._store.rows import Claim, PickResult, Status, Transition
from durable_actors.machine import InsertPlan, step_address

SCHEMA: Final = "durable"
OWNER: Final = Owner(SCHEMA, "node", b"hash", 60.0)
ROLES: Final = lanes(6, session_dsn=None, keepalive=60)
PLANS: Final = ROLES["claim"].settings
STEPS: Final = ("s", "t", "u", "b", "go", "then")
"""The steps that machines of these tests have, unless a test says otherwise."""
HEAD: Final = PickFrom([0], ["-infinity"], [0])
EXPIRE: Final = (
    "update durable.gen_durable set lease_expires_at = now() - interval '1 s' where status = 'executing'"
)


@asynccontextmanager
async def connect(dsn: str, role: str = "claim", **settings: str) -> AsyncIterator[PgConn]:
    """A connection with the settings of the engine's lane for that role; `settings` replace some of them.

    Where connections of a test wait for one another, `lock_timeout="0"`: the lane's is not enough on a busy machine.
    """
    conn = await PgConn.open(dsn, settings={**ROLES[role].settings, **settings})
    try:
        yield conn
    finally:
        conn.close()


def insert(db: psycopg.Connection, count: int = 1, **columns: object) -> list[int]:
    """Rows of machine m/1; ids in order. A value that begins with `=` is SQL, in which n counts from 1."""
    places = [str(value)[1:] if str(value)[:1] == "=" else "%s" for value in columns.values()]
    values = [value for value in columns.values() if str(value)[:1] != "="]
    names = "".join(f", {name}" for name in columns)
    query = (
        f"insert into durable.gen_durable (fsm, step{names}) select 'm', 's'{''.join(', ' + p for p in places)}"
        f" from generate_series(1, {count}) n order by n returning id"
    )
    return [number for (number,) in db.execute(query, values).fetchall()]


def empty(db: psycopg.Connection, *others: str) -> None:
    """Delete all instances, their signals, and the rows of these tables, without a trigger.

    TRUNCATE gives the tables new files, and every session plans its statements anew: half of a race's time.
    """
    deletes = [f"delete from durable.{table}" for table in ("gen_durable", "signals", *others)]
    db.execute(
        "; ".join(["begin", "set local session_replication_role = replica", *deletes, "commit"])  # type: ignore[arg-type]
    )


def rows(db: psycopg.Connection, columns: str, where: str = "true") -> list[tuple[Any, ...]]:
    return db.execute(f"select {columns} from durable.gen_durable where {where} order by id").fetchall()


async def pick(
    conn: PgConn,
    *,
    owner: Owner = OWNER,
    queue: str = "default",
    limit: int = 1000,
    known: Sequence[str] = ("m/1",),
    begin: PickFrom = HEAD,
) -> PickResult:
    return await pick_instances(
        conn, owner, queue=queue, limit=limit, known=known_steps(*known), begin=begin, now=trio.current_time()
    )


def address(machine: str, step: str = "s") -> str:
    """A step of "name/version" as the pick knows it."""
    name, version = machine.split("/")
    return step_address(name, int(version), step)


def known_steps(*machines: str) -> bytes:
    """What a node knows: of "name/version" all `STEPS`, of "name/version/step" that one."""
    wholes = [address(each, step) for each in machines if each.count("/") == 1 for step in STEPS]
    singles = [address(*each.rsplit("/", 1)) for each in machines if each.count("/") == 2]
    return encode.text_array(wholes + singles)


async def claims(conn: PgConn, **options: Any) -> list[Claim]:
    """What a pick from the head claims."""
    return (await pick(conn, **options)).claims


def outcome(claim: Claim, status: Status = "done", **columns: Any) -> Transition:
    """A transition of this claim; by default it ends."""
    return Transition(claim, status, **{"step": claim.step, "attempt": claim.attempt, **columns})


def plan(**columns: Any) -> InsertPlan:
    """A row to insert, with defaults."""
    values: dict[str, Any] = {
        "machine": "m",
        "version": 1,
        "step": "s",
        "queue": "default",
        "state": b"{}",
        "priority": 0,
        "partition_key": None,
        "unique_key": None,
        "unique_scope": (),
        "eligible_at": None,
        "delay": 0.0,
        "on_duplicate": "skip",
        "labels": None,
    }
    return InsertPlan(**(values | columns))


class Recorder:
    """Stands in for a connection and keeps what a store function would have sent."""

    def __init__(self) -> None:
        self.calls: list[tuple[Statement, Params]] = []

    async def run(self, statement: Statement, params: Params = ()) -> Result:
        self.calls.append((statement, params))
        return Result([], "")

    async def batch(self, calls: Sequence[tuple[Statement, Params]]) -> list[Result]:
        self.calls.extend(calls)
        return [Result([], "") for _ in calls]
