"""The journal against the rows: every instance's records fold into its row, `verify` and `rebuild` say the same.

`journal_problems` is pure, for rows and records from anywhere; `read_journal` reads those of a database. With
DURABLE_TEST_JOURNAL=4 in the environment, the engine's tests record everything and end with `JournalWatch`.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from typing import Any, Final
from unittest.mock import patch

import psycopg
from durable_actors._journal_level import JournalLevel
from durable_actors._store.rebuild import row_to_write
from durable_actors._store.sql import in_schema
from durable_actors.errors import InvalidJournalEntry
from durable_actors.journal import (
    KINDS,
    NOT_IN_THE_JOURNAL,
    Projection,
    Record,
    check_head,
    check_instance,
    check_sequence,
    decode_record,
    differences,
    expand_all,
    fold,
    is_gapless,
    level_of,
    row_of,
)
from durable_actors.machine import MachineSpec

FAILURES: Final = frozenset({"retry", "failed", "crashed", "reaped", "unfit", "rejected", "timed_out"})
"""What level 1 may record: failed attempts, and what fails the instance."""

DEFAULTS: Final = {"weight": 1}
"""Columns that nothing writes yet, and that are not null."""

Row = Mapping[str, Any]


def journal_problems(rows: Iterable[Row], records: Iterable[Row]) -> list[str]:
    """What is wrong with the journal of these instances, by their levels; nothing, if it fits the rows.

    Records are in the order of their revisions. Those of rows that are gone are not looked at.
    """
    found: dict[int, list[Row]] = {}
    for record in records:
        found.setdefault(record["instance_id"], []).append(record)
    return [problem for row in rows for problem in instance_problems(row, found.get(row["id"], []))]


def instance_problems(row: Row, stored: list[Row]) -> list[str]:
    """What is wrong with the journal of one instance."""
    number, stored_level = row["id"], row["journal"]
    kinds = {record["kind"] for record in stored}
    level = level_of(stored_level)
    try:
        read = [
            decode_record({**record, "data": record.get("data") or {}}, instance_id=number, rev=record["rev"])
            for record in stored
        ]
        if stored_level < 2:  # nothing to fold
            allowed = FAILURES if stored_level else frozenset[str]()
            found = [f"instance {number}: level {stored_level} has {kinds}"] if kinds - allowed else []
            return found + _verified(row, read)
        history = list(check_sequence(read, number, level=level))
        last = history[-1].rev if history else 0
        check_head(number, last=last, row_rev=row["rev"], level=level)
    except InvalidJournalEntry as exc:
        return [f"instance {number}: {exc}; its records: {_told(stored)}"]
    projection = fold(expand_all(history))
    problems = [
        f"instance {number}: {anomaly}; its records: {_told(stored)}"
        for anomaly in projection.anomalies
        if not anomaly.is_notice  # a rolling deploy may change definitions
    ]
    if not is_gapless(level):
        sparse = {kind for kind in kinds if KINDS[kind].level != "outcomes"}
        if sparse - {"reaped"}:
            problems.append(f"instance {number}: level {stored_level} has {sparse}")
    if projection.run is None:
        problems.append(f"instance {number}: no records of a run")
    elif not problems and last == row["rev"]:
        wrong = differences(row_of(projection), row)
        if wrong:
            problems.append(
                f"instance {number}: told and stored differ: {wrong}; its records: {_told(stored)}"
            )
    return problems or _verified(row, read) + _rebuilt(row, projection)


def _verified(row: Row, records: list[Record]) -> list[str]:
    """What the product itself finds."""
    found = [each for each in check_instance(row["id"], row, records) if not each.is_notice]
    return [f"instance {row['id']}: {problem}" for problem in found]


def _rebuilt(row: Row, projection: Projection) -> list[str]:
    """At level "full", a rebuild must write the row as it is, but for its claim."""
    if row["journal"] < 4:
        return []
    written = row_to_write(row["id"], projection)
    kept = row.keys() - NOT_IN_THE_JOURNAL.keys() - {"request"}
    if row["status"] == "executing":
        kept -= {"status", "claim_id", "claim_token_hash", "locked_by", "hold", "rev"}
    lacking = {name for name in kept - written.keys() if row[name] != DEFAULTS.get(name)}
    wrong = differences({name: value for name, value in written.items() if name in kept}, row)
    return [f"instance {row['id']}: a rebuild differs: {wrong}, lacks {lacking}"] if wrong or lacking else []


def _told(stored: list[Row]) -> str:
    return "".join(
        f"\n  {record['rev']} {record['kind']} {record.get('step')} → {record.get('to_step')}"
        f" v{record.get('visit')} a{record.get('attempt')} {record.get('claim_id')} {record.get('error')}"
        f" {record.get('data')} at {record['at']}"
        for record in stored
    )


def read_journal(connection: psycopg.Connection[Any], schema: str = "durable") -> tuple[list[Row], list[Row]]:
    """The rows and the records of a database, as `journal_problems` takes them. Call it in one snapshot."""
    queries = (
        "select to_jsonb(g) from durable.gen_durable g order by id",
        (
            "select jsonb_strip_nulls(to_jsonb(j) - 'data') || jsonb_build_object('data', coalesce(j.data, '{}'))"
            " from durable.journal j order by instance_id, rev"
        ),
    )
    rows, records = (
        [each for (each,) in connection.execute(in_schema(query, schema).encode())] for query in queries
    )
    return rows, records


class JournalWatch:
    """Records everything of what is inserted in this process, and compares it with the rows at the end.

    Triggers note the instances whose row or records SQL by hand has written: statements of the store begin with the
    header of their file. No record tells such a change, so these instances are not compared.
    """

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn
        with psycopg.connect(dsn, autocommit=True) as connection:
            connection.execute("""
                create table public.by_hand (id bigint);
                grant all on public.by_hand to public;
                create function public.note_hand() returns trigger language plpgsql security definer as $$
                begin
                    if current_query() !~ '^-- \\w+: ' then
                        insert into public.by_hand
                        select (each ->> case tg_table_name when 'journal' then 'instance_id' else 'id' end)::bigint
                          from to_jsonb(coalesce(new, old)) each;
                    end if;
                    return null;
                end $$;
                create trigger note_hand after insert or update on durable.gen_durable
                    for each row execute function public.note_hand();
                create trigger note_hand after insert or update or delete on durable.journal
                    for each row execute function public.note_hand();
            """)

    def problems(self) -> list[str]:
        """What is wrong with the journal of rows that only the store has written."""
        with psycopg.connect(self._dsn, client_encoding="utf8", options="-c bytea_output=hex") as connection:
            connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
            rows, records = read_journal(connection)
            by_hand = {number for (number,) in connection.execute("select id from public.by_hand")}
        return journal_problems((row for row in rows if row["id"] not in by_hand), records)


@contextmanager
def recording(level: int) -> Generator[None, None, None]:
    """Every machine and job of this process is recorded at this level, unless it, its insert or engine names one."""
    real = MachineSpec.journal_level

    def always(spec: MachineSpec, default: JournalLevel) -> int:
        return level if spec.journal is None and default == "auto" else real(spec, default)

    with patch.object(MachineSpec, "journal_level", always):
        yield
