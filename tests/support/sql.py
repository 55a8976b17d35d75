"""What the server did: how many statements ran, and with which plan.

Both ask the server, so they see every connection of every process, pipelines and prepared statements included. A
counter inside one connection class would miss the very round trips that were overlooked.
"""

from __future__ import annotations

import re
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, LiteralString

import attrs
import psycopg
from durable_actors.errors import ConfigError
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo

_COUNTS = """
select s.queryid, s.toplevel, min(s.query), sum(s.calls)::int8, sum(s.rows)::int8
from pg_stat_statements(%s) s join pg_database d on d.oid = s.dbid
where d.datname = %s
group by s.queryid, s.toplevel
"""


@attrs.frozen
class Statement:
    """One normalised statement (constants replaced by ``$n``), with its calls and rows while it was counted."""

    query: str
    calls: int
    rows: int
    """Rows returned or changed, over all calls."""


@attrs.define(eq=False)
class StatementCount:
    """The statements that were counted; filled when the counting ends."""

    statements: tuple[Statement, ...] = ()

    @property
    def total(self) -> int:
        """All executions, BEGIN and COMMIT included."""
        return sum(statement.calls for statement in self.statements)

    def calls(self, fragment: str) -> int:
        """Executions of the statements whose text contains `fragment`, ignoring case."""
        found = (s.calls for s in self.statements if fragment.casefold() in s.query.casefold())
        return sum(found)

    def __str__(self) -> str:
        return "\n".join(f"{s.calls:>5} × {' '.join(s.query.split())[:160]}" for s in self.statements)


@contextmanager
def count_statements(dsn: str) -> Generator[StatementCount]:
    """Count the statements that any session executes in this database while the body runs.

    Needs pg_stat_statements, which the embedded server and the container load; on your own server set
    ``shared_preload_libraries``. A statement counts when it ends.
    """
    name = conninfo_to_dict(dsn).get("dbname")
    with psycopg.connect(make_conninfo(dsn, dbname="postgres"), autocommit=True) as connection:
        need_statistics(connection)
        wait_counted(connection, name)
        before = _counts(connection, name, texts=False)
        count = StatementCount()
        yield count
        wait_counted(connection, name)
        count.statements = tuple(_difference(before, _counts(connection, name)))


def need_statistics(connection: psycopg.Connection) -> None:
    """Create pg_stat_statements, or say what the server lacks."""
    loaded = connection.execute("show shared_preload_libraries").fetchone()
    if loaded is None or "pg_stat_statements" not in str(loaded[0]):
        raise ConfigError(
            "counting statements needs pg_stat_statements: put it into shared_preload_libraries of the server "
            "that DURABLE_TEST_DSN names, or unset DURABLE_TEST_DSN to use the embedded one",
            option="DURABLE_TEST_DSN",
        )
    # "if not exists" does not lock, so without this lock two workers that do it at once would collide.
    connection.execute("begin; select pg_advisory_xact_lock(hashtextextended('durable statistics', 0))")
    connection.execute("create extension if not exists pg_stat_statements")
    connection.execute("commit")


def wait_counted(connection: psycopg.Connection, name: object) -> None:
    """Wait until what was answered is counted: the server counts a statement after its answer, on a busy machine later.

    A session that counts is not idle yet. Long polls are never idle for long; what else is not waits for a lock.
    """
    for _ in range(40):
        row = connection.execute(_BUSY, [name]).fetchone()
        if row == (0,):
            return
        time.sleep(0.005)


_BUSY: LiteralString = """
select count(*) from pg_stat_activity
 where datname = %s and pid <> pg_backend_pid() and state = 'active'
   and wait_event_type is distinct from 'Lock' and query !~ 'wait_for_work'
"""

_HEADER = re.compile(r"\A(?:--[^\n]*\n)+")
"""The header of a statement's file: Postgres keeps it in the text until 15, and then no longer."""
_Counts = Mapping[tuple[int, bool], Statement]


def _counts(connection: psycopg.Connection, name: object, *, texts: bool = True) -> _Counts:
    rows = connection.execute(_COUNTS, [texts, name]).fetchall()
    return {
        (queryid, toplevel): Statement(query and _HEADER.sub("", query), calls, n)
        for queryid, toplevel, query, calls, n in rows
    }


def _difference(before: _Counts, after: _Counts) -> Iterator[Statement]:
    nothing = Statement("", 0, 0)
    for key, now in after.items():
        then = before.get(key, nothing)
        if now.calls > then.calls:
            yield Statement(now.query, now.calls - then.calls, now.rows - then.rows)


@attrs.frozen
class PlanNode:
    """One node of a plan."""

    kind: str
    """``Index Scan``, ``Seq Scan``, ``ModifyTable``, …"""
    relation: str | None
    index: str | None
    rows: float
    """Rows that it returned, over all loops."""
    removed: int
    """Rows that it read and discarded: a cost that the shape of the plan does not show."""


@attrs.frozen
class Plan:
    """An executed plan, flattened."""

    nodes: tuple[PlanNode, ...]
    buffers: int
    """Pages that the statement touched, cached or read. With a good plan they do not grow with the table."""
    text: str
    """The whole plan, for the message of a failed test."""

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of the nodes, in the order of the plan."""
        return tuple(node.kind for node in self.nodes)

    @property
    def indexes(self) -> frozenset[str]:
        """Names of the indexes that it reads."""
        return frozenset(node.index for node in self.nodes if node.index is not None)

    def assert_no_seq_scan(self, *relations: str) -> None:
        """Fail if it scans one of these tables sequentially; without names: any table."""
        for node in self.nodes:
            if node.kind.endswith("Seq Scan") and (not relations or node.relation in relations):
                raise AssertionError(f"sequential scan of {node.relation}:\n{self.text}")

    def assert_uses(self, *indexes: str) -> None:
        """Fail unless it reads all these indexes."""
        if missing := set(indexes) - self.indexes:
            raise AssertionError(f"index not used: {', '.join(sorted(missing))}:\n{self.text}")


def explain(
    connection: psycopg.Connection,
    statement: LiteralString,
    arguments: Sequence[object] = (),
    *,
    generic: bool = True,
    settings: Mapping[str, str] | None = None,
) -> Plan:
    """Run the statement (parameters ``$1``, ``$2``, …), roll it back, and return its plan.

    `generic=True` shows the generic plan, which a prepared statement gets after some executions; False shows the plan
    for these arguments. `settings` apply to this statement only.
    """
    mode = "force_generic_plan" if generic else "force_custom_plan"
    prepare = sql.SQL("prepare durable_explain as {}").format(sql.SQL(statement))
    execute = sql.Composed([sql.SQL("execute durable_explain")])
    if arguments:
        execute += sql.SQL(" ({})").format(sql.SQL(", ").join(map(sql.Literal, arguments)))
    connection.execute(prepare, prepare=False)
    try:
        with connection.transaction(force_rollback=True), connection.cursor() as cursor:
            for name, value in {"plan_cache_mode": mode, **(settings or {})}.items():
                # Not prepared, or psycopg would deallocate everything at the rollback.
                cursor.execute("select set_config(%s, %s, true)", [name, value], prepare=False)
            cursor.execute(
                sql.SQL("explain (analyze, buffers, format json) {}").format(execute), prepare=False
            )
            row = cursor.fetchone()
            cursor.execute(sql.SQL("explain {}").format(execute), prepare=False)
            text = "\n".join(line for (line,) in cursor.fetchall())
    finally:  # a prepared statement outlives the rollback
        connection.execute("deallocate durable_explain")
    assert row is not None
    root: dict[str, Any] = row[0][0]["Plan"]
    return Plan(
        nodes=tuple(_flatten(root)),
        buffers=root.get("Shared Hit Blocks", 0) + root.get("Shared Read Blocks", 0),
        text=text,
    )


def _flatten(node: Mapping[str, Any]) -> Iterator[PlanNode]:
    yield PlanNode(
        kind=node["Node Type"],
        relation=node.get("Relation Name"),
        index=node.get("Index Name"),
        rows=node.get("Actual Rows", 0) * node.get("Actual Loops", 1),
        removed=int(node.get("Rows Removed by Filter", 0) * node.get("Actual Loops", 1)),
    )
    for child in node.get("Plans", ()):
        yield from _flatten(child)
