"""For operators: lists of instances, queues, nodes, details of one instance, retry. The engine does not use them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final, cast, get_args

import attrs
import msgspec

from durable_actors._option_checks import Duration, choice, count, duration, flag, shown
from durable_actors._postgres.driver import encode
from durable_actors._postgres.driver.connection import PgConn
from durable_actors._postgres.driver.decode import decode_instant, decode_text_array
from durable_actors._postgres.driver.statement import Params, Row, Statement
from durable_actors._store.boundaries import Waiting
from durable_actors._store.commands import Request
from durable_actors._store.lease import RUNNER
from durable_actors._store.limit_texts import LimitSeen
from durable_actors._store.pauses import QueuePause, read_pause_list
from durable_actors._store.read import Instance, read_by_ids, read_instance
from durable_actors._store.signal import key_bytes
from durable_actors._store.sql import statement
from durable_actors.errors import ConfigError
from durable_actors.machine import MachineRef, Status, current_registry

ROWS_PER_SCAN: Final = 10_000
"""Rows that one statement of a listing reads: about 10 ms of index and heap reads."""
NEWEST: Final = 2**63 - 1
"""The highest id: every instance is at or below it."""


@attrs.frozen(kw_only=True)
class Filter:
    """Which instances to list, or to give a command to. None does not filter; several filters must all match."""

    status: Status | None = None
    """The current status."""
    machine: MachineRef | str | None = None
    """The machine or job, or its name; in all versions."""
    queue: str | None = None
    """The queue."""
    step: str | None = None
    """The current step, or the one in which it ended."""
    error: str | None = None
    """A substring of `last_error`; case-sensitive."""
    tag: str | tuple[str, ...] | None = None
    """A tag, or several that it must all have. Uses an index."""
    unique_key: str | bytes | None = None
    """A unique key that it has or had. Uses an index."""
    parent: int | None = None
    """The id of its parent. Uses an index."""
    older_than: Duration | None = None
    """The time since it was last changed: seconds or a timedelta."""
    everything: bool = False
    """Of a bulk command: really all that it applies to. Without it, a filter that names nothing is refused."""
    waiting: Waiting | None = None
    """What it waits for: "approval" or "pause" (a person; uses an index), "signal", "children"."""
    paused: bool | None = None
    """Whether it is paused, by a command on it alone: pauses of its queue do not count."""

    def params(self) -> list[bytes | None]:
        """The last parameters of the listing statements. Raises `ConfigError`."""
        machine = self.machine
        if machine is not None and not isinstance(machine, str):
            machine = current_registry().find(machine).name
        if self.status is not None:
            choice("status", self.status, *get_args(Status))
        if self.waiting is not None:
            choice("waiting", self.waiting, *get_args(Waiting))
        for option in ("queue", "step", "error"):
            value = getattr(self, option)
            if value is not None and not isinstance(value, str):
                raise ConfigError(f"{option}={shown(value)} must be a string", option=option, value=value)
        key: object = self.unique_key
        if key is not None and not isinstance(key, str | bytes):
            raise ConfigError(
                f"unique_key={shown(key)} must be a string or bytes", option="unique_key", value=key
            )
        flag("everything", self.everything)
        if self.paused is not None:
            flag("paused", self.paused)
        age = None if self.older_than is None else duration("older_than", self.older_than, positive=False)
        texts = (self.status, machine, self.queue, self.step, self.error)
        paused = None if self.paused is None else b"t" if self.paused else b"f"
        return [*map(encode.text, texts), self.tags(), encode.number(age), encode.text(self.waiting), paused]

    def tags(self) -> bytes | None:
        """The tags as an array parameter. Raises `ConfigError`."""
        tags: object = (self.tag,) if isinstance(self.tag, str) else self.tag
        if tags is None or tags == ():
            return None
        if not isinstance(tags, tuple | list) or not all(
            isinstance(each, str) for each in cast("list[object]", tags)
        ):
            raise ConfigError(f"tag={shown(tags)} must be a string or several", option="tag", value=tags)
        return encode.text_array(cast("list[str]", tags))


@attrs.frozen(kw_only=True)
class Listing:
    """A page of instances, newest first."""

    instances: tuple[Instance, ...]
    before: int | None
    """Where the next page begins; None if there is nothing older."""
    looked: int
    """How many rows were read."""


async def list_instances(
    conn: PgConn,
    schema: str,
    where: Filter,
    *,
    limit: int,
    before: int = NEWEST,
    depth: int | None = 100_000,
    full: bool = True,
) -> Listing:
    """List up to `limit` instances with ids below `before`, newest first, reading at most `depth` rows.

    Filters other than key, parent, tag, waiting for a person, failed and executing are applied row by row: no index
    contains done instances, because it would make every commit more expensive. So a rare status may need several
    calls, each of bounded cost.
    """
    if where.unique_key is not None and where.parent is not None:
        raise ConfigError("filter by unique_key or by parent, not by both", option="parent")
    plain = where.params()
    by = _indexed(where, schema)
    if by is not None:
        call, value = by
        rows = (await conn.run(call, [value, encode.number(before), encode.number(limit), *plain])).rows
        ids = [int(row[0] or 0) for row in rows]
        below = ids[-1] if len(ids) == limit else None
        instances = await _newest_first(conn, schema, ids, full=full)
        return Listing(instances=instances, before=below, looked=len(ids))
    walk = _walk(where, schema)
    found: list[int] = []
    looked = 0
    below = before
    while True:
        window = ROWS_PER_SCAN if depth is None else min(ROWS_PER_SCAN, depth - looked)
        wanted = limit - len(found)
        params = [encode.number(below), encode.number(window), encode.number(wanted), *plain]
        rows = (await conn.run(walk, params)).rows
        page = [int(row[0]) for row in rows if row[0] is not None]
        seen, lowest = int(rows[0][1] or 0), rows[0][2]
        found += page
        looked += seen
        below = page[-1] if len(page) == wanted else int(lowest or 0)
        exhausted = seen < window and len(page) < wanted
        if exhausted or len(page) == wanted or (depth is not None and looked >= depth):
            instances = await _newest_first(conn, schema, found, full=full)
            return Listing(instances=instances, before=None if exhausted else below, looked=looked)


def _walk(where: Filter, schema: str) -> Statement:
    """The statement that reads rows in windows: of failed or executing ones only, if the filter says so."""
    if where.status == "failed":
        return statement("list_failed", schema, read_only=True)
    if where.status == "executing":
        return statement("list_executing", schema, read_only=True)
    return statement("list_instances", schema, read_only=True)


def _indexed(where: Filter, schema: str) -> tuple[Statement, bytes | None] | None:
    """The statement that uses an index for this filter, and its first parameter; None if no index helps."""
    if where.unique_key is not None:
        key = where.unique_key
        call = statement("list_by_key", schema, read_only=True)
        return call, encode.bytea(key_bytes(key) if isinstance(key, str) else key)
    if where.parent is not None:
        call = statement("list_by_parent", schema, read_only=True)
        return call, encode.number(count("parent", where.parent, least=1, most=NEWEST))
    tags = where.tags()
    if tags is None and where.waiting in {"approval", "pause"}:
        return statement("list_waiting", schema, read_only=True), encode.text(where.waiting)
    return None if tags is None else (statement("list_by_tags", schema, read_only=True), tags)


async def _newest_first(
    conn: PgConn, schema: str, ids: list[int], *, full: bool = True
) -> tuple[Instance, ...]:
    rows = await read_by_ids(conn, schema, ids, full=full) if ids else {}
    # Lists do not show tracebacks, which may have 16 kB.
    return tuple(attrs.evolve(rows[number], traceback=None) for number in ids if number in rows)


@attrs.frozen
class Sibling:
    """A due instance of the same partition key that goes first: the first one at its step."""

    id: int
    machine: str
    """`name/version`."""
    step: str
    hold: int


@attrs.frozen(kw_only=True)
class InstanceDetails:
    """What an instance waits for: deadlines, signals, children, siblings of its key."""

    eligible_in: float
    """Seconds until it may run; negative if it is due."""
    lease_left: float | None
    deadline_in: float | None
    """Seconds until the deadline of its await or barrier."""
    awaits: tuple[str, ...]
    await_step: str | None
    children_pending: int
    children_total: int
    unread: Mapping[str, int]
    """Number of unread signals by name, among the first 10,000."""
    children: Mapping[str, int]
    """Number of its children by status, of all barriers."""
    key_holder: tuple[int, str] | None
    """The executing sibling of its partition key: id and owner."""
    elders: tuple[Sibling, ...] = ()
    """The due siblings that go first, on nodes that have their step; in order, the first one of each step."""
    request: Request | None = None
    """The standing order of a command: to cancel it, or to pause it."""
    requested_ago: float | None = None
    """Seconds since then."""
    rev: int = 1
    offered: bool = True
    """`durable.offered`: the pick may take it once it is due."""
    due: bool = True
    """`durable.due`."""
    shelved_step: str | None = None
    """The step under which the shelf has it; None for rows that an old release shelved."""
    deadline: datetime | None = None
    """The deadline of its await or barrier."""
    journal: int = 0
    """What the journal records of it: 0 nothing, … 4 everything."""
    lost: tuple[str, ...] = ()
    """Awaited signals that came after it parked and did not wake it: the engine loses none, SQL by hand may."""
    barrier: tuple[int, int] | None = None
    """How many children of its barrier have a row, and how many of those have not ended; None if that is not known."""
    missing: tuple[int, ...] = ()
    """The first children that it waits for."""
    receipts: tuple[Mapping[str, Any], ...] = ()
    """The last commands that were carried out on it, newest first."""
    fingerprint: str | None = None
    """The definition of its machine that it was started with; None if its outcomes are not recorded."""
    definition: str | None = None
    """Another definition that ran one of its last steps."""
    cascade: bool = False
    """Whether children of it are being cancelled."""
    pauses: tuple[QueuePause, ...] = ()
    """The pauses of its queue, and of its machine there."""
    waits: int = 0
    """For how many it waits that it comes after."""
    limit: LimitSeen | None = None
    """Of one that uses limits: the one that it waits for, or would wait for longest."""
    upstream: tuple[tuple[int, str | None, str], ...] = ()
    """The first of those: id, key and status. One that has ended did not succeed, and must be retried."""
    fair: tuple[str, int] | None = None
    """Its fair key, and how many due rows of that go first in its priority, of 1,000 at most."""


@attrs.frozen
class Observed:
    """An instance and what it waits for, of one snapshot."""

    instance: Instance
    details: InstanceDetails


LEVELS: Final = 3
"""How many levels of missing children `explain` reads, the first three of each parent."""


def observe_call(
    schema: str, ids: Sequence[int], *, full: bool, levels: int = LEVELS
) -> tuple[Statement, Params]:
    """The statement that reads these instances, and their missing children as many levels deep."""
    params = [encode.int_array(ids), b"t" if full else b"f", encode.number(levels)]
    return statement("observe_instances", schema, read_only=True), params


async def observe_instance(conn: PgConn, schema: str, number: int) -> InstanceDetails | None:
    """Read the details of an instance; None if it does not exist."""
    call, params = observe_call(schema, [number], full=False, levels=0)
    rows = (await conn.run(call, params)).rows
    return read_observed(rows[0]).details if rows else None


def read_observed(row: Row) -> Observed:
    """Read a row of observe_instances.sql. Pure."""
    instance = read_instance(row[:_COLUMNS])
    return Observed(instance, _details(instance, row[_COLUMNS:]))


_COLUMNS: Final = 36
"""The columns of `read_instances.sql`, with which a row of observe_instances.sql begins."""


_Needs = tuple[int, tuple[tuple[int, str | None, str], ...]]


class _Parked(msgspec.Struct):
    lost: tuple[str, ...]
    rows: int
    live: int


def _details(instance: Instance, row: Row) -> InstanceDetails:
    (
        eligible, lease, deadline, awaits, step, pending, total, unread, children, sibling, owner, elders, now, rev,
        offered, due, shelved_step, deadline_at, journal, parked, missing, receipts, fingerprint, definition,
        pauses, cascade, needs, fair, limit,
    ) = row  # fmt: skip
    waits, upstream = (0, ()) if needs is None else msgspec.json.decode(needs, type=_Needs)
    signs = None if parked is None else msgspec.json.decode(parked, type=_Parked)
    request = instance.request
    present, since = decode_instant(now), None if request is None else request.at
    ahead = [] if elders is None else msgspec.json.decode(elders, type=list[tuple[int, str, int, str, int]])
    return InstanceDetails(
        eligible_in=float(eligible or 0),
        lease_left=None if lease is None else float(lease),
        deadline_in=None if deadline is None else float(deadline),
        awaits=() if awaits is None else decode_text_array(awaits),
        await_step=None if step is None else step.decode(),
        children_pending=int(pending or 0),
        children_total=int(total or 0),
        unread={} if unread is None else msgspec.json.decode(unread, type=dict[str, int]),
        children={} if children is None else msgspec.json.decode(children, type=dict[str, int]),
        key_holder=None if sibling is None else (int(sibling), (owner or b"").decode()),
        elders=tuple(Sibling(each[0], f"{each[1]}/{each[2]}", each[3], each[4]) for each in ahead),
        request=request,
        requested_ago=None if since is None or present is None else (present - since).total_seconds(),
        rev=int(rev or 0),
        offered=offered == b"t",
        due=due == b"t",
        shelved_step=None if shelved_step is None else shelved_step.decode(),
        deadline=decode_instant(deadline_at),
        journal=int(journal or 0),
        lost=() if signs is None else signs.lost,
        barrier=None if signs is None else (signs.rows, signs.live),
        missing=() if missing is None else msgspec.json.decode(missing, type=tuple[int, ...]),
        receipts=() if receipts is None else msgspec.json.decode(receipts, type=tuple[dict[str, Any], ...]),
        fingerprint=None if fingerprint is None else fingerprint.decode(),
        definition=None if definition is None else definition.decode(),
        cascade=cascade == b"t",
        pauses=read_pause_list(instance.queue, pauses),
        waits=waits,
        upstream=upstream,
        fair=None if fair is None else msgspec.json.decode(fair, type=tuple[str, int]),
        limit=None if limit is None else msgspec.json.decode(limit, type=LimitSeen),
    )


@attrs.frozen(kw_only=True)
class QueueWork:
    """The work of one queue."""

    queue: str
    due: int = 0
    scheduled: int = 0
    """Not due yet."""
    held: int = 0
    """Waiting for a sibling of their partition key."""
    shelved: int = 0
    """Rows whose machine, version or step is unknown to a node that read them, or whose machine is paused."""
    executing: int = 0
    oldest_due: float | None = None
    """Seconds that the oldest due row has been waiting."""
    paused: int = 0
    """Instances that are paused and would be runnable. Those that wait for something else are not counted."""
    asks: int = 0
    """Instances that wait for a person: at a `Pause` or an `Approval`."""
    throttled: int = 0
    """Waiting for a token or a slot of a limit."""
    pauses: tuple[QueuePause, ...] = ()
    """The pause of the queue, and those of machines in it."""


async def read_queues(conn: PgConn, schema: str) -> list[QueueWork]:
    """Read the work of all queues; a queue without any is missing."""
    rows = (await conn.run(statement("read_queues", schema, read_only=True))).rows
    return [
        QueueWork(
            queue=(row[0] or b"").decode(),
            due=int(row[1] or 0),
            scheduled=int(row[2] or 0),
            held=int(row[3] or 0),
            shelved=int(row[4] or 0),
            executing=int(row[5] or 0),
            oldest_due=None if row[6] is None else float(row[6]),
            paused=int(row[7] or 0),
            asks=int(row[8] or 0),
            pauses=read_pause_list((row[0] or b"").decode(), row[9]),
            throttled=int(row[10] or 0),
        )
        for row in rows
    ]


async def count_statuses(conn: PgConn, schema: str) -> dict[str, dict[str, int]]:
    """Count instances per queue and status. Reads the whole table."""
    found: dict[str, dict[str, int]] = {}
    for queue, status, number in (await conn.run(statement("count_statuses", schema, read_only=True))).rows:
        found.setdefault((queue or b"").decode(), {})[(status or b"").decode()] = int(number or 0)
    return found


@attrs.frozen(kw_only=True)
class NodeView:
    """One incarnation of a node."""

    incarnation: str
    """`locked_by` of its claims."""
    node: str | None
    started_at: datetime | None
    seen_at: datetime | None
    stopped_at: datetime | None
    queues: Mapping[str, int]
    """The queues it serves, with their concurrency."""
    fair: tuple[str, ...] = ()
    """Those of them that it serves as fair queues."""
    machines: tuple[str, ...]
    """The machines it knows, as `name/version`."""
    steps: Mapping[str, tuple[str, ...]] | None = None
    """The steps of each machine; None for older releases, which do not publish them."""
    attempts: Mapping[str, Mapping[str, int]] = attrs.field(factory=dict[str, Mapping[str, int]])
    """How often jobs, and steps with a retry policy, may run: by machine and step."""
    pid: int | None
    version: str | None
    """Version of durable_actors."""
    alive: bool
    """Whether a session holds its lock."""
    claims: int

    def knows(self, machine: str, step: str) -> bool:
        """Whether it can run this step of a machine (`name/version`)."""
        return machine in self.machines and (self.steps is None or step in self.steps.get(machine, ()))

    @property
    def state(self) -> str:
        """`alive`, `stopped` (cleanly), `lost` (killed, or cut off from the server), `runner` (has no session)."""
        if self.incarnation.startswith(RUNNER) and not self.alive:
            return "runner"
        return "alive" if self.alive else "stopped" if self.stopped_at is not None else "lost"


def nodes_call(schema: str) -> tuple[Statement, Params]:
    """The statement that reads the nodes."""
    return statement("read_nodes", schema, read_only=True), [schema.encode()]


async def read_nodes(conn: PgConn, schema: str) -> list[NodeView]:
    """Read the nodes that work here or worked here in the last days, oldest first."""
    rows = (await conn.run(*nodes_call(schema))).rows
    return [*map(read_node, rows)]


class _About(msgspec.Struct):
    """The JSON that a node publishes about itself."""

    queues: dict[str, int] = {}
    fair: tuple[str, ...] = ()
    machines: tuple[str, ...] = ()
    steps: dict[str, tuple[str, ...]] | None = None
    attempts: dict[str, dict[str, int]] = {}
    pid: int | None = None
    version: str | None = None


def _about(raw: bytes) -> _About:
    """Empty if the JSON is malformed: operators must still see the other nodes."""
    try:
        return msgspec.json.decode(raw, type=_About)
    except (ValueError, RecursionError):
        return _About()


def read_node(row: Row) -> NodeView:
    """Read a row of read_nodes.sql. Pure."""
    incarnation, node, started, seen, stopped, raw, alive, claims = row
    about = _About() if raw is None else _about(raw)
    return NodeView(
        incarnation=(incarnation or b"").decode(),
        node=None if node is None else node.decode(),
        started_at=decode_instant(started),
        seen_at=decode_instant(seen),
        stopped_at=decode_instant(stopped),
        queues=about.queues,
        fair=about.fair,
        machines=about.machines,
        steps=about.steps,
        attempts=about.attempts,
        pid=about.pid,
        version=about.version,
        alive=alive == b"t",
        claims=int(claims or 0),
    )
