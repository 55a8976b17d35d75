"""What a soak reads: of the workers that survive from /proc (Linux), of the database from its own statistics.

Finished instances stay in the table: there is no retention. So the table, and the indexes that hold finished rows, must
grow with them; what must not grow is their size *per row*. The partial indexes of live rows, the inbox, dead rows and
the cost of a pick must stay as they are, however many rows have ended. `nodes` keeps a row for every start of a worker,
for a day after it stopped, for seven after it vanished.

The pick is measured in two ways: those of the workers, by pg_stat_statements; and one of our own that always claims 20
rows from the head of a busy queue, where dead entries lie, in a transaction that is rolled back (its 20 rows, too).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, LiteralString

import attrs
import psycopg
from bench.meter import on_cpu
from durable_actors._engine.lanes import _PLANS
from durable_actors._store.sql import statement
from psycopg import sql
from psycopg.conninfo import make_conninfo
from tests.chaos.sender import MACHINES

NAME: Final = "soak"
PICK: Final = 20
LOWEST: Final = -(2**63)
MB: Final = 2**20

SIZES: Final[LiteralString] = """
select coalesce(sum(pg_relation_size(i.indexrelid)) filter (where t.relname = 'gen_durable' and of_live), 0),
       coalesce(sum(pg_relation_size(i.indexrelid)) filter (where t.relname = 'gen_durable' and not of_live), 0)
         + pg_table_size('durable.gen_durable'),
       pg_total_relation_size('durable.signals'),
       (select count(*) from durable.nodes)
  from pg_index i join pg_class t on t.oid = i.indrelid
 cross join lateral (select coalesce(pg_get_expr(i.indpred, i.indrelid), '') like '%status%' as of_live) p
 where t.relnamespace = 'durable'::regnamespace
"""
ROWS: Final[LiteralString] = """
select count(*), count(*) filter (where finished_at is null), coalesce(sum(rev), 0)
  from durable.gen_durable
"""
DEAD: Final[LiteralString] = """
select relname, n_dead_tup from pg_stat_user_tables where schemaname = 'durable' and relname <> 'migrations'
 order by relname
"""
BACKENDS: Final[LiteralString] = """
select application_name, pid from pg_stat_activity
 where datname = current_database() and backend_type = 'client backend' and pid <> pg_backend_pid()
"""
PICKS: Final[LiteralString] = """
select coalesce(sum(calls), 0)::float8, coalesce(sum(shared_blks_hit + shared_blks_read), 0)::float8
  from pg_stat_statements s join pg_database d on d.oid = s.dbid
 where d.datname = current_database() and query ilike '%with extra as materialized%' and query not ilike '%soak_pick%'
"""
FILL: Final[LiteralString] = """
insert into durable.gen_durable (fsm, step, queue) select 'chaos.Chain', 'start', 'work' from generate_series(1, 20)
"""


@attrs.frozen
class Survivor:
    """A worker that nobody kills."""

    name: str
    pid: int


class Gauges:
    """Reads everything, on a connection of its own. Blocks: to be used in a thread."""

    def __init__(self, dsn: str, survivors: Sequence[Survivor]) -> None:
        settings = " ".join(f"-c {name}={value}" for name, value in _PLANS.items())
        self._survivors = survivors
        self._conn = psycopg.connect(
            make_conninfo(dsn, application_name=NAME, options=settings),
            autocommit=True,
            prepare_threshold=None,
        )
        self._conn.execute("create extension if not exists pg_stat_statements")
        pick = sql.SQL(statement("pick_instances", "durable").sql)  # type: ignore[arg-type]
        self._conn.execute(sql.SQL("prepare soak_pick as {}").format(pick))
        self._picks = (0.0, 0.0)

    def close(self) -> None:
        """Let the connection go."""
        self._conn.close()

    def read(self) -> dict[str, float]:
        """Everything, now."""
        values = {}
        for each in self._survivors:
            values[f"memory {each.name}"] = _status(each.pid, "VmRSS") / MB
            values[f"descriptors {each.name}"] = float(len(os.listdir(f"/proc/{each.pid}/fd")))  # noqa: PTH208
        values |= self._backends()
        values |= self._database()
        values |= self._own_pick()
        values |= self._workers_picks()
        return values

    def _backends(self) -> dict[str, float]:
        rows = self._conn.execute(BACKENDS).fetchall()
        names = {each.name for each in self._survivors}
        values = {"connections": float(len(rows))}
        for name in sorted(names):
            values[f"connections of {name}"] = float(sum(name == row[0] for row in rows))
        sizes = _sizes(pid for name, pid in rows if name in names)
        return values | ({"backend memory": max(sizes) / MB} if sizes else {})

    def _database(self) -> dict[str, float]:
        dead = self._conn.execute(DEAD).fetchall()
        live, table, inbox, nodes = self._conn.execute(SIZES).fetchone() or [0] * 4
        with self._conn.transaction():
            self._conn.execute("set local enable_seqscan = on")
            rows, unended, moves = self._conn.execute(ROWS).fetchone() or [0] * 3
        return {
            **{f"dead rows of {name}": float(count) for name, count in dead},
            "live indexes": float(live) / 1024,
            "inbox": float(inbox) / 1024,
            "bytes per row": float(table) / max(1, rows),
            "live instances": float(unended),
            "rows": float(rows),
            "rows of nodes": float(nodes),
            "moves": float(moves),
        }

    def _own_pick(self) -> dict[str, float]:
        """Claim 20 rows and let them go: how many pages, how much CPU of the server's."""
        known = _array(address for each in MACHINES.values() for address in each.__durable__.addresses)
        heads = (_array(["-1", "0", "1"]), _array(["-infinity"] * 3), _array([str(LOWEST)] * 3))
        values = ["work", PICK, NAME, 60.0, known, *heads, "{}", "durable", "{}", "soak"]
        execute = sql.SQL("execute soak_pick ({})").format(sql.SQL(", ").join(map(sql.Literal, values)))
        explain = sql.SQL("explain (analyze, buffers, format json) {}").format(execute)
        costs: list[float] = []
        for _ in range(3):
            with self._conn.transaction(force_rollback=True):
                self._conn.execute(FILL)
                began = on_cpu(self._conn.info.backend_pid)
                self._conn.execute(execute)
                costs.append((on_cpu(self._conn.info.backend_pid) - began) * 1e3)
        with self._conn.transaction(force_rollback=True):
            self._conn.execute(FILL)
            row = self._conn.execute(explain).fetchone()
        assert row is not None
        root: Mapping[str, Any] = row[0][0]["Plan"]
        pages = root.get("Shared Hit Blocks", 0) + root.get("Shared Read Blocks", 0)
        return {f"pages per pick of {PICK}": float(pages), f"CPU per pick of {PICK}": min(costs)}

    def _workers_picks(self) -> dict[str, float]:
        """Since the last look."""
        calls, pages = self._conn.execute(PICKS).fetchone() or (0.0, 0.0)
        before, self._picks = self._picks, (calls, pages)
        if not before[0] or calls <= before[0]:
            return {}
        return {"pages per worker's pick": (pages - before[1]) / (calls - before[0])}


def _array(values: Iterable[str]) -> str:
    """None of them needs quotes."""
    return "{" + ",".join(values) + "}"


def _status(pid: int, name: str) -> float:
    """A size of a process in bytes."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return float(line.split()[1]) * 1024
    return 0.0


def _sizes(pids: Iterable[int]) -> list[float]:
    """What is these processes' own: the server's shared memory would count in each."""
    sizes: list[float] = []
    for pid in pids:
        try:
            sizes.append(_status(pid, "RssAnon"))
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has ended since
    return sizes
