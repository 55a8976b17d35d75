"""New instances: many in one statement. Pure functions make the parameters, for every kind of client."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import cast

from durable_actors import _tracing
from durable_actors._option_checks import shown
from durable_actors._postgres.driver import encode
from durable_actors._postgres.driver.connection import PgConn
from durable_actors._postgres.driver.statement import Params, Row, Statement
from durable_actors._store.arrays import none_for_all, one_for_all
from durable_actors._store.holds import HELD, OFFERED
from durable_actors._store.links import Links
from durable_actors._store.sql import statement
from durable_actors._tracing import TRACE
from durable_actors.errors import ConfigError, Duplicate
from durable_actors.machine import (
    OUTCOMES,
    InsertOptions,
    InsertPlan,
    InsertRows,
    JournalLevel,
    Labels,
    MachineRef,
    OnDuplicate,
    current_registry,
    encode_json,
    plan_insert,
)

MAX_ROWS = 50_000
"""Rows per statement. The client refuses more: it would keep all of them in memory three times."""

MAX_OCCUPANT_READS = 50
"""Statements that try to read the occupant of a key before `Duplicate` is raised without it. Under the worst contention
that we measured, a quarter of the reads did not see it; a row policy or a trigger may hide it permanently."""

MAX_BYTES = 256_000_000
"""Bytes of states per statement. The server closes the connection at a message of 1 GB, and quoting may double it."""


def plan_rows(
    machine: MachineRef,
    rows: InsertRows,
    *,
    on_duplicate: OnDuplicate = "skip",
    journal: JournalLevel = "auto",
) -> list[InsertPlan]:
    """Check what to insert, before any SQL. Raises `ConfigError`, `StateError`, `UnknownMachine`.

    `on_duplicate` is the default for rows that do not set it.
    """
    spec = current_registry().find(machine)
    given: object = rows
    if not isinstance(given, Iterable) or isinstance(given, str | bytes | Mapping):
        raise ConfigError(
            f"rows must be an iterable of dicts of insert options, not {shown(rows)}",
            option="rows",
            value=rows,
        )
    plans = [
        plan_insert(spec, cast("InsertOptions", options), on_duplicate=on_duplicate, journal=journal)
        for options in rows
    ]
    if len(plans) > MAX_ROWS:
        raise ConfigError(
            f"insert_many takes at most {MAX_ROWS} rows at a time, not {len(plans)}", option="rows"
        )
    size = sum(map(plan_size, plans))
    if size > MAX_BYTES:
        raise ConfigError(
            f"insert_many takes at most {MAX_BYTES} bytes of states and meta at a time, these have {size}: "
            "insert fewer rows at a time",
            option="rows",
        )
    traced(plans)
    return plans


def traced(plans: Sequence[InsertPlan]) -> None:
    """Add the current trace context to what is inserted, if this process is traced."""
    tracer = _tracing.tracer()
    if tracer is None or not plans:
        return
    context = tracer.context(plans[0].machine, plans[0].queue, len(plans))
    if context is not None:
        text = context.encode()
        for plan in plans:
            plan.labels = with_trace(plan.labels, text)


def with_trace(labels: Labels | None, trace: str) -> Labels:
    """Add a trace context to the labels of a new instance, unless its caller has given one."""
    document = encode_json({TRACE: trace}, what="trace")
    if labels is None:
        return Labels((), document)
    if labels.meta is None:
        return Labels(labels.tags, document)
    if encode_json(TRACE, what="trace") in labels.meta:
        return labels
    return Labels(labels.tags, labels.meta[:-1] + b"," + document[1:])  # neither is empty


def plan_size(plan: InsertPlan) -> int:
    """Approximate size of a plan in a statement, in bytes."""
    return len(plan.state) if plan.labels is None else len(plan.state) + plan.labels.size


def in_chunks(plans: Sequence[InsertPlan], *, rows: int) -> Iterator[Sequence[InsertPlan]]:
    """Split into parts of at most `rows` plans and `MAX_BYTES`. Pure."""
    first = size = 0
    for index, plan in enumerate(plans):
        if index > first and (index - first == rows or size + plan_size(plan) > MAX_BYTES):
            yield plans[first:index]
            first, size = index, 0
        size += plan_size(plan)
    if first < len(plans):
        yield plans[first:]


def insert_call(
    plans: Sequence[InsertPlan],
    schema: str,
    *,
    parent_id: int | None = None,
    barrier: int | None = None,
    links: Links | None = None,
) -> tuple[Statement, Params]:
    """The statement that inserts these plans, and its parameters. Pure."""
    if any(
        plan.unique_key is not None
        or plan.labels is not None
        or plan.journal >= OUTCOMES
        or plan.max_attempts is not None
        or plan.fair_key is not None
        or plan.limits is not None
        for plan in plans
    ):
        return statement("insert_instances", schema), insert_params(
            plans, parent_id=parent_id, barrier=barrier, links=links
        )
    params = [
        encode.text_array(one_for_all([plan.machine for plan in plans])),
        encode.int_array(one_for_all([plan.version for plan in plans])),
        encode.text_array(one_for_all([plan.step for plan in plans])),
        encode.json_array([plan.state for plan in plans]),
        encode.text_array(one_for_all([plan.queue for plan in plans])),
        encode.int_array(one_for_all([plan.priority for plan in plans])),
        encode.text_array(none_for_all([plan.partition_key for plan in plans])),
        encode.text_array(none_for_all(_instants(plans))),
        encode.float_array(none_for_all([plan.delay or None for plan in plans])),
        encode.number(parent_id),
        encode.number(barrier),
        encode.int_array(one_for_all([plan.journal for plan in plans])),
    ]
    if links is None:
        holds = held_behind(plans)
        if any(holds):
            return statement("insert_held", schema), [*params, encode.int_array(holds)]
        return statement("insert_plain", schema), params
    keys = encode.text_array(none_for_all([*links.keys]))
    return statement("insert_linked", schema), [*params, keys, encode.int_array(none_for_all([*links.links]))]


def held_behind(plans: Sequence[InsertPlan]) -> list[int]:
    """The `hold` of each new row: held behind an earlier one of its partition key among these. Pure.

    Only behind one that is due now, like itself, and differs from it in nothing that the pick looks at: so a node that
    passes the first one by would pass the others by, too. An empty list: no row has a key.
    """
    if not any(plan.partition_key is not None for plan in plans):
        return []
    first: set[tuple[object, ...]] = set()
    holds: list[int] = []
    for plan in plans:
        if plan.partition_key is None or plan.delay or plan.eligible_at is not None:
            holds.append(OFFERED)
            continue
        place = (plan.partition_key, plan.queue, plan.machine, plan.version, plan.step, plan.priority)
        holds.append(HELD if place in first else OFFERED)
        first.add(place)
    return holds


def _instants(plans: Sequence[InsertPlan]) -> list[str | None]:
    return [None if plan.eligible_at is None else plan.eligible_at.isoformat() for plan in plans]


def insert_params(
    plans: Sequence[InsertPlan],
    *,
    parent_id: int | None = None,
    barrier: int | None = None,
    links: Links | None = None,
) -> list[bytes]:
    """The parameters of insert_instances.sql. Pure."""
    return [
        encode.text_array([plan.machine for plan in plans]),
        encode.int_array([plan.version for plan in plans]),
        encode.text_array([plan.step for plan in plans]),
        encode.json_array([plan.state for plan in plans]),
        encode.text_array([plan.queue for plan in plans]),
        encode.int_array([plan.priority for plan in plans]),
        encode.text_array([plan.partition_key for plan in plans]),
        encode.bytea_array([plan.unique_key for plan in plans]),
        encode.text_array(["{" + ",".join(plan.unique_scope) + "}" for plan in plans]),
        encode.text_array(_instants(plans)),
        encode.float_array([plan.delay for plan in plans]),
        encode.int_array([parent_id] * len(plans)),
        encode.int_array([barrier] * len(plans)),
        encode.text_array([tags_literal(plan) for plan in plans]),
        encode.json_array([None if plan.labels is None else plan.labels.meta for plan in plans]),
        encode.int_array([plan.journal for plan in plans]),
        encode.text_array(none_for_all([plan.fingerprint for plan in plans])),
        encode.text_array(() if links is None else none_for_all([*links.keys])),
        encode.int_array(() if links is None else none_for_all([*links.links])),
        encode.int_array(none_for_all([plan.max_attempts for plan in plans])),
        encode.text_array(none_for_all([plan.fair_key for plan in plans])),
        encode.text_array(none_for_all([plan.limits for plan in plans])),
    ]


def tags_literal(plan: InsertPlan) -> str | None:
    """The plan's tags as an array literal; None if it has none."""
    if plan.labels is None or not plan.labels.tags:
        return None
    return encode.text_array(plan.labels.tags).decode()


class Insertion:
    """An insert in progress: what to send, and the ids so far. Sans-I/O, for every kind of connection.

    If the statement did not see the occupant of a key, that row was committed after the statement's snapshot. Another
    statement has a newer snapshot: it sees the occupant, or the occupant is gone and it inserts. So send `pending`
    until it is empty, each time as a separate call: a retry of a refused call must not repeat rows of earlier calls.
    """

    def __init__(self, plans: Sequence[InsertPlan]) -> None:
        self.pending: Sequence[InsertPlan] = plans
        """The plans that the next statement has to insert."""
        self._plans = plans
        self.places: Sequence[int] = range(len(plans))
        """Their positions among all plans."""
        self._ids: list[int | None] = [None] * len(plans)
        self._new: dict[bytes, int] = {}
        self._occupants: dict[int, int | None] = {}
        self._answers = 0

    def answered(self, rows: Sequence[Row]) -> None:
        """Process the statement's answer."""
        numbers = [None if row[0] is None else int(row[0]) for row in rows]
        if self._answers == 0 and None not in numbers:  # the usual case
            self._ids, self.pending = numbers, ()
            return
        self._answers += 1
        for place, plan, number in zip(self.places, self.pending, numbers, strict=True):
            self._ids[place] = number
            if number is not None and plan.unique_key is not None:
                self._new.setdefault(plan.unique_key, number)
        again: list[int] = []
        for place, plan, row in zip(self.places, self.pending, rows, strict=True):
            if row[0] is not None or plan.on_duplicate == "skip":
                continue
            assert plan.unique_key is not None
            # The statement's snapshot does not contain its own rows: the occupant may be an earlier row of this batch.
            occupant = self._new.get(plan.unique_key, None if row[1] is None else int(row[1]))
            if occupant is None and self._answers < MAX_OCCUPANT_READS:
                again.append(place)
            else:
                self._occupants[place] = occupant
        self.places, self.pending = again, [self._plans[place] for place in again]

    def new(self) -> list[tuple[InsertPlan, int]]:
        """The rows that were inserted."""
        numbered = enumerate(zip(self._plans, self._ids, strict=True))
        return [
            (plan, number)
            for place, (plan, number) in numbered
            if number is not None and place not in self._occupants
        ]

    def ids(self) -> list[int | None]:
        """In input order: new ids; the existing id for "return", None for "skip". Raises `Duplicate` for "raise"."""
        for place, occupant in sorted(self._occupants.items()):
            plan = self._plans[place]
            if plan.on_duplicate == "raise" or occupant is None:
                raise Duplicate(key_as_given(plan.unique_key or b""), occupant)
            self._ids[place] = occupant
        return self._ids


async def insert_instances(conn: PgConn, schema: str, plans: Sequence[InsertPlan]) -> list[int | None]:
    """Insert instances; returns ids in input order, None if the key is occupied and the plan says "skip".

    With `on_duplicate="return"` the id is the existing one; with "raise", `Duplicate` is raised for the first such
    plan. The other plans are inserted nevertheless.
    """
    insertion = Insertion(plans)
    while insertion.pending:
        insertion.answered((await conn.run(*insert_call(insertion.pending, schema))).rows)
    return insertion.ids()


def key_as_given(key: bytes) -> str | bytes:
    """A unique key as the user gave it: text if it is UTF-8, else bytes."""
    try:
        return key.decode()
    except UnicodeDecodeError:
        return key
