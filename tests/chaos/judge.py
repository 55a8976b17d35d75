"""What is left after a run, and whether it may be so."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Final, LiteralString

import psycopg
import trio
from tests.chaos.sender import read_acks
from tests.chaos.workload import SENDERS, Plan, Row, check_sums
from tests.chaos.world import LEASE, REAP
from tests.invariants.check import check, read_history
from tests.invariants.history import Violation

MARGIN: Final = 1.5
"""Seconds by which a machine may be late that shows no lag; then a worker's fork, a pick and a commit fit in."""
LATER: Final = 4.0
"""A row is taken back by a worker and a server, several times each: each as late as the runner was at its worst."""
LEAVE: Final = 10.0
"""Seconds for backends to notice that their clients are gone."""

ROWS: Final[LiteralString] = """
select id, fsm, convert_from(unique_key, 'utf8'), status::text, result, parent_id, last_error
  from durable.gen_durable order by id
"""
UNREAD: Final[LiteralString] = (
    "select count(*) from durable.signals s join durable.gen_durable g on g.id = s.target_id"
    " where s.consumed_at is null and g.status <> 'failed'"  # a failed one keeps its inbox
)
LEFT: Final[LiteralString] = """
select format('%s of %s: %s, %s, last %s', backend_type, application_name, state, wait_event, left(query, 60))
  from pg_stat_activity
 where datname = current_database() and pid <> pg_backend_pid() and backend_type = 'client backend'
union all
select format('lock %s %s of %s, classid %s objid %s', locktype, mode, pid, classid, objid)
  from pg_locks
 where pid <> pg_backend_pid() and database = (select oid from pg_database where datname = current_database())
union all
select format('prepared transaction %s', gid) from pg_prepared_xacts where database = current_database()
"""
TABLES: Final = ("durable.gen_durable", "durable.signals", "durable.nodes", "durable_audit.change")


async def find_leftovers(dsn: str) -> list[str]:
    """Connections and locks of processes that are gone. They have a moment to go, too."""

    def look() -> list[str]:
        with psycopg.connect(dsn, autocommit=True, application_name="chaos") as conn:
            return [text for (text,) in conn.execute(LEFT)]

    with trio.move_on_after(LEAVE):
        while await trio.to_thread.run_sync(look):
            await trio.sleep(0.05)
        return []
    return [f"left behind: {text}" for text in await trio.to_thread.run_sync(look)]


def judge_sums(dsn: str, plan: Plan, folder: Path) -> list[str]:
    """The conservation sums."""
    with psycopg.connect(dsn, autocommit=True) as conn:
        names = ("id", "machine", "key", "status", "result", "parent_id", "last_error")
        rows = [Row(**dict(zip(names, row, strict=True))) for row in conn.execute(ROWS)]
        [unread] = conn.execute(UNREAD).fetchone() or (0,)
    acks = [ack for number in range(SENDERS) for ack in read_acks(folder / f"sender{number}.acks")]
    return check_sums(plan, rows, acks, unread)


def judge_history(
    dsn: str, folder: Path, ended: float, lag: float
) -> tuple[list[Violation], Mapping[str, int]]:
    """The invariants, and how much was looked at; `ended` is when the workers were told to go."""
    margin = MARGIN + LATER * lag
    history = read_history(dsn, [folder], lease=LEASE, reap_interval=REAP, margin=margin, ended=ended)
    return check(history), history.tally


def dump(dsn: str, folder: Path) -> None:
    """Keep the tables of a run that failed, one JSON object a line."""
    with psycopg.connect(dsn, autocommit=True) as conn:
        for table in TABLES:
            with (folder / f"{table}.json").open("w") as out:
                for (row,) in conn.execute(f"select to_jsonb(t) from {table} t"):
                    out.write(json.dumps(row) + "\n")
