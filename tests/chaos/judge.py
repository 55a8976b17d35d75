"""What is left after a run, and whether it may be so."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, LiteralString

import durable_actors as da
import psycopg
import trio
from durable_actors.journal import NOT_IN_THE_JOURNAL
from tests.chaos.sender import read_acks
from tests.chaos.sums import Commands, Row, check_sums
from tests.chaos.workload import SENDERS, Plan
from tests.chaos.world import LEASE, REAP
from tests.invariants.check import check, read_history
from tests.invariants.history import Violation
from tests.invariants.journal import journal_problems, read_journal

_numbers = itertools.count()
"""Names of clients: several runs may be judged at the same time."""
MARGIN: Final = 1.5
"""Seconds by which a machine may be late that shows no lag; then a worker's fork, a pick and a commit fit in."""
LATER: Final = 4.0
"""A row is taken back by a worker and a server, several times each: each as late as the runner was at its worst."""
LEAVE: Final = 10.0
"""Seconds for backends to notice that their clients are gone."""

ROWS: Final[LiteralString] = """
select id, fsm, convert_from(unique_key, 'utf8'), status::text, result, parent_id, last_error, barrier, false,
       coalesce(request ? 'parent', false) or (cancellation is not null and parent_id is not null), rerun_of
  from durable.gen_durable order by id
"""
GONE: Final[LiteralString] = """
select (before).id, (before).fsm, convert_from((before).unique_key, 'utf8'), (before).status::text, null,
       (before).parent_id, (before).last_error, (before).barrier, true,
       coalesce((before).request::jsonb ? 'parent', false)
       or ((before).cancellation is not null and (before).parent_id is not null), (before).rerun_of
  from durable_audit.change where after is null and new_signal is null and old_signal is null order by 1
"""
COMMANDS: Final[LiteralString] = (
    "select command, array_agg(distinct target::bigint) from durable.receipts where scope = 'instance' group by 1"
)
RERUNS: Final[LiteralString] = (
    "select target::bigint, count(*) from durable.receipts where command = 'rerun' and scope = 'instance' group by 1"
)
WRONG_BULKS: Final[LiteralString] = """
select format('%s of %s was carried out %s times for bulk %s', command, target, count(*), data -> 'bulk')
  from durable.receipts where scope = 'instance' and data ? 'bulk'
 group by command, target, data -> 'bulk' having count(*) > 1
union all
select format('receipt %s says %s, and %s commands were carried out', b.id, b.result, n.count)
  from durable.receipts b
 cross join lateral (select count(*) from durable.receipts r
                      where r.scope = 'instance' and r.command = b.command and r.data -> 'bulk' = to_jsonb(b.id)) n
 where b.scope = 'bulk' and b.result ? 'finished' and (b.result ->> 'done')::bigint <> n.count
union all
select format('receipt %s says nothing about an end: %s; its instance is %s', b.id, b.result, g.status)
  from durable.receipts b
  join durable.gen_durable g on g.unique_key = convert_to('durable:bulk:' || b.id, 'utf8')
 where b.scope = 'bulk' and not b.result ? 'finished' and g.status = 'done'
union all
select format('a cascade is left: %s', c) from durable.cascades c
"""
"""What may not be in the receipts of commands on many; and cascades, which must come to their end."""
UNREAD: Final[LiteralString] = (
    "select count(*) from durable.signals s join durable.gen_durable g on g.id = s.target_id"
    " where s.consumed_at is null and g.status not in ('failed', 'cancelled')"  # they keep their inbox
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
SHARE: Final = 10
"""One row of so many is rebuilt from its records."""
ROW: Final[LiteralString] = "select to_jsonb(g) - %s::text[] from durable.gen_durable g where id = %s"
LEVELS: Final[LiteralString] = "select id, journal = 4 from durable.gen_durable order by id"
DAMAGES: Final[tuple[LiteralString | None, ...]] = (
    None,
    (
        "update durable.gen_durable set status = 'runnable', hold = 1, step = 'x', state = '1', finished_at = null,"
        " attempt = 99, priority = 99, result = null, partition_key = 'x', visit = visit + 7 where id = %s"
    ),
    "delete from durable.gen_durable where id = %s",
)
"""What is done to a row before it is rebuilt."""
TABLES: Final = (
    "durable.gen_durable",
    "durable.signals",
    "durable.nodes",
    "durable.journal",
    "durable.receipts",
    "durable_audit.change",
)


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
        names = ("id", "machine", "key", "status", "result", "parent_id", "last_error", "barrier", "gone")
        names += ("cascaded", "rerun_of")
        audited = conn.execute("select to_regnamespace('durable_audit') is not null").fetchone() == (True,)
        found = [*conn.execute(ROWS), *(conn.execute(GONE) if audited else ())]
        rows = [Row(**dict(zip(names, row, strict=True))) for row in found]
        [unread] = conn.execute(UNREAD).fetchone() or (0,)
        given = {command: frozenset(targets) for command, targets in conn.execute(COMMANDS)}
        reruns = dict(conn.execute(RERUNS).fetchall())
        wrong = [f"bulk: {text}" for (text,) in conn.execute(WRONG_BULKS)]
    acks = [ack for number in range(SENDERS) for ack in read_acks(folder / f"sender{number}.acks")]
    commands = Commands(given.get("cancel", frozenset()), given.get("retry", frozenset()), given, reruns)
    return [*check_sums(plan, rows, acks, unread, commands), *wrong]


def judge_history(
    dsn: str, folder: Path, ended: float, lag: float, retention: float, *, snapshots: bool = False
) -> tuple[list[Violation], Mapping[str, int]]:
    """The invariants, and how much was looked at; `ended` is when the workers were told to go."""
    margin = MARGIN + LATER * lag
    history = read_history(
        dsn, [folder], lease=LEASE, reap_interval=REAP, margin=margin, ended=ended, retention=retention,
        snapshots=snapshots,
    )  # fmt: skip
    return check(history), history.tally


def judge_journal(dsn: str) -> list[str]:
    """Whether the records of every instance fold into its row."""
    with psycopg.connect(dsn) as conn:
        conn.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        return [f"journal: {problem}" for problem in journal_problems(*read_journal(conn))]


async def judge_verified(dsn: str, when: str) -> tuple[list[str], int]:
    """What the product itself finds wrong with its journal, and how many instances it has looked at."""
    async with da.open_client(dsn, name=f"judge {next(_numbers)}") as client:
        report = await client.verify()
    wrong = [problem for problem in report.problems if not problem.is_notice]
    return [f"verify, {when}: {problem}" for problem in wrong], report.checked


async def judge_rebuilt(dsn: str, seed: int) -> tuple[list[str], int]:
    """Rebuild a random tenth of the rows: as they are, damaged, deleted. They must be what they were.

    Below level "full" the records do not tell the whole row, and the rebuild is refused. It changes the rows under the
    audit of the run, so it comes last.
    """
    failures: list[str] = []
    with psycopg.connect(dsn, autocommit=True, application_name="judge") as conn:
        rows = conn.execute(LEVELS).fetchall()
        some = random.Random(f"rebuild {seed}").sample(rows, min(len(rows), len(rows) // SHARE + 1))
        async with da.open_client(dsn, name=f"judge {next(_numbers)}") as client:
            for index, (number, full) in enumerate(some):
                before = _row(conn, number)
                damage = DAMAGES[index % len(DAMAGES)] if full else None
                if damage is not None:
                    conn.execute(damage, [number])
                try:
                    await client.rebuild(number, by="judge")
                except da.Conflict as exc:
                    if full:
                        failures.append(f"rebuild of {number}: {exc}")
                else:
                    if not full:
                        failures.append(f"rebuild of {number}: its records do not tell the whole row")
                after = _row(conn, number)
                if full and damage is not None:  # the repair is recorded
                    before = ({**before[0], "rev": before[0]["rev"] + 1},)
                if after != before:
                    failures.append(f"rebuild of {number}, after {damage}: {before} became {after}")
    problems, _ = await judge_verified(dsn, "after the rebuilds")
    return failures + problems, sum(full for _, full in some)


def _row(conn: psycopg.Connection[Any], number: int) -> Any:
    """All columns that records tell. What was asked of the node that ran it is over: a rebuild ends claims."""
    return conn.execute(ROW, [[*NOT_IN_THE_JOURNAL, "request"], number]).fetchone()


def dump(dsn: str, folder: Path) -> None:
    """Keep the tables of a run that failed, one JSON object a line."""
    with psycopg.connect(dsn, autocommit=True) as conn:
        for table in TABLES:
            with (folder / f"{table}.json").open("w") as out:
                for (row,) in conn.execute(f"select to_jsonb(t) from {table} t"):
                    out.write(json.dumps(row) + "\n")
