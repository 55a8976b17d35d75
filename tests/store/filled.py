"""A big table, made once per run: 340,000 rows, a third of them finished, a queue for every kind of crowd.

With DURABLE_TEST_LONG set, 680,000: what is measured is the same to a few pages, and it takes 20 s of CPU.
"""

from __future__ import annotations

import os
from typing import Final

import psycopg
import trio
from durable_actors._store.migrate import migrate

LONG: Final = bool(os.environ.get("DURABLE_TEST_LONG"))
FINISHED: Final = 300_000 if LONG else 100_000
BACKLOG: Final = 60_000 if LONG else 30_000
HOT: Final = 50_000
CROWD: Final = 100_000 if LONG else 45_000
WORK: Final = 1000

# Rows are not updated into their state: that would cluster them at the table's end and understate the cost.
_INSERTS: Final = (
    # queue, count, further columns
    ("small", 1000, "", ""),
    ("finished", FINISHED, ", status, finished_at, result", ", 'done', now(), '{}'"),
    ("large", BACKLOG, "", ""),
    # Few and many executing rows, keyed; then work with free keys.
    ("few", 5, ", status, locked_by, claim_id, lease_expires_at, partition_key", "{executing}, 'few ' || n"),
    ("few", WORK, ", partition_key", ", 'few free ' || n"),
    (
        "many",
        2000,
        ", status, locked_by, claim_id, lease_expires_at, partition_key",
        "{executing}, 'many ' || n",
    ),
    ("many", WORK, ", partition_key", ", 'many free ' || n"),
    # A key that one row is busy with, and its siblings, all at the head; then work, half of it keyed.
    ("hot", 1, ", status, locked_by, claim_id, lease_expires_at, partition_key", "{executing}, 'hot'"),
    ("hot", HOT, ", partition_key", ", 'hot'"),
    (
        "hot",
        WORK,
        ", partition_key, eligible_at",
        ", case when mod(n, 2) = 0 then 'other ' || n end, now() - interval '1 s'",
    ),
    # Rows of the most urgent priority that are due in days; work of another priority.
    ("future", CROWD, ", eligible_at", ", now() + interval '1 day' + n * interval '1 s'"),
    ("future", WORK, ", priority", ", 5"),
    # Rows of a machine that nobody here knows, at the head.
    ("unknown", CROWD, ", fsm_version", ", 2"),
    ("unknown", WORK, ", eligible_at", ", now() - interval '1 s'"),
    # Claimed and completed by the test, while somebody keeps them from being cleaned up.
    ("dead", HOT, "", ""),
    ("dead", WORK, ", eligible_at", ", now() - interval '1 s'"),
    (
        "parked",
        5000,
        ", status, awaits, await_deadline",
        ", 'awaiting_signal', '{go}', now() + (n - 100) * interval '1 s'",
    ),
    (
        "unique",
        5000,
        ", unique_key, unique_scope",
        ", convert_to('key ' || n, 'UTF8'), '{runnable,executing,awaiting_signal,awaiting_children}'",
    ),
)
_EXECUTING: Final = (
    ", 'executing', 'node ' || mod(n, 7), gen_random_uuid(),"
    " now() + case when mod(n, 10) = 0 then -1 else 1 end * interval '1 hour'"
)


def fill(dsn: str) -> None:
    """Make the schema and fill it. Nothing cleans up behind the tests' backs."""
    trio.run(migrate, dsn)
    with psycopg.connect(dsn, autocommit=True) as db:
        db.execute("alter table durable.gen_durable set (autovacuum_enabled = off)")
        db.execute("set synchronous_commit = off")
        # Indexes are made afterwards: half the time.
        indexes = db.execute(
            "select indexname, indexdef from pg_indexes where schemaname = 'durable' and tablename = 'gen_durable'"
            " and indexname <> 'gen_durable_pkey'"
        ).fetchall()
        for name, _ in indexes:
            db.execute(f"drop index durable.{name}")
        for queue, count, columns, values in _INSERTS:
            late = ", eligible_at" if "eligible_at" not in columns else ""
            at = ", now() - interval '1 hour' + n * interval '1 ms'" if late else ""
            db.execute(
                f"insert into durable.gen_durable (queue, fsm, step{late}{columns})"
                f" select '{queue}', 'm', 's'{at}{values.replace('{executing}', _EXECUTING)}"
                f" from generate_series(1, {count}) n"
            )
        for _, definition in indexes:
            db.execute(definition)
        db.execute(
            "insert into durable.signals (target_id, name, dedup_key) select id, 'other', 'd ' || n"
            " from durable.gen_durable, generate_series(1, 10) n where queue = 'parked' and mod(id, 5) = 0"
        )
        db.execute("vacuum (analyze, freeze) durable.gen_durable, durable.signals")
