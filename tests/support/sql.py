"""What the server did: how many statements ran, and by which plan.

Both ask the server itself, so they see every connection of every process, pipelines and prepared statements alike.
A counter inside one connection class would miss exactly the round trips that somebody forgot.
"""

from __future__ import annotations

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
from pg_stat_statements s join pg_database d on d.oid = s.dbid
where d.datname = %s
group by s.queryid, s.toplevel
"""


@attrs.frozen
class Statement:
    """One normalised statement (constants replaced by ``$n``) and what it did while it was counted."""

    query: str
    calls: int
    rows: int
    """Rows returned or changed, over all calls."""


@attrs.define(eq=False)
class StatementCount:
    """Filled when the counting ends."""

    statements: tuple[Statement, ...] = ()

    @property
    def total(self) -> int:
        """All executions, BEGIN and COMMIT among them."""
        return sum(statement.calls for statement in self.statements)

    def calls(self, fragment: str) -> int:
        """Executions of the statements whose text contains this, whatever the case."""
        found = (s.calls for s in self.statements if fragment.casefold() in s.query.casefold())
        return sum(found)

    def __str__(self) -> str:
        return "\n".join(f"{s.calls:>5} × {' '.join(s.query.split())[:160]}" for s in self.statements)


@contextmanager
def count_statements(dsn: str) -> Generator[StatementCount]:
    """Count what is executed in this database while the body runs, by whomever.

    Needs pg_stat_statements, which the embedded server and the container load; on a server of yours set
    ``shared_preload_libraries``. A statement counts when it ends, so end what you want to count.
    """
    name = conninfo_to_dict(dsn).get("dbname")
    with psycopg.connect(make_conninfo(dsn, dbname="postgres"), autocommit=True) as connection:
        _need_statistics(connection)
        before = _counts(connection, name)
        count = StatementCount()
        yield count
        count.statements = tuple(_difference(before, _counts(connection, name)))


def _need_statistics(connection: psycopg.Connection) -> None:
    loaded = connection.execute("show shared_preload_libraries").fetchone()
    if loaded is None or "pg_stat_statements" not in str(loaded[0]):
        raise ConfigError(
            "counting statements needs pg_stat_statements: put it into shared_preload_libraries of the server "
            "that DURABLE_TEST_DSN names, or unset DURABLE_TEST_DSN to use the embedded one",
            option="DURABLE_TEST_DSN",
        )
    # Two workers may do it at once, and "if not exists" does not lock: the lock makes the second one wait.
    connection.execute("begin; select pg_advisory_xact_lock(hashtextextended('durable statistics', 0))")
    connection.execute("create extension if not exists pg_stat_statements")
    connection.execute("commit")


_Counts = Mapping[tuple[int, bool], Statement]


def _counts(connection: psycopg.Connection, name: object) -> _Counts:
    rows = connection.execute(_COUNTS, [name]).fetchall()
    return {(queryid, toplevel): Statement(query, calls, n) for queryid, toplevel, query, calls, n in rows}


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
    """Rows it gave, over all loops."""
    removed: int
    """Rows it read and filtered away: the cost that a plan's shape does not show."""


@attrs.frozen
class Plan:
    """An executed plan, flattened."""

    nodes: tuple[PlanNode, ...]
    buffers: int
    """Pages touched by the whole statement, in memory or read: flat as the table grows, or the plan is wrong."""
    text: str
    """The whole plan, for the message of a failed test."""

    @property
    def kinds(self) -> tuple[str, ...]:
        """Node kinds, in the plan's order."""
        return tuple(node.kind for node in self.nodes)

    @property
    def indexes(self) -> frozenset[str]:
        """Names of all indexes that it reads."""
        return frozenset(node.index for node in self.nodes if node.index is not None)

    def assert_no_seq_scan(self, *relations: str) -> None:
        """Fail when it reads one of these tables from end to end; without names: any table."""
        for node in self.nodes:
            if node.kind.endswith("Seq Scan") and (not relations or node.relation in relations):
                raise AssertionError(f"sequential scan of {node.relation}:\n{self.text}")

    def assert_uses(self, *indexes: str) -> None:
        """Fail when it does not read all these indexes."""
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
    """Run the statement (parameters ``$1``, ``$2``, …), return how, and roll it back.

    `generic` shows the plan that a prepared statement gets in the long run, made without looking at the arguments;
    False shows the one made for these arguments. `settings` hold for this statement only.
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
                # Not prepared by psycopg: it would deallocate everything at the rollback.
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
