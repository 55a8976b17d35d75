"""`HistoryCalls`: what a client reads from journals, and what it repairs with them. `Client` inherits it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping
from contextlib import aclosing
from functools import partial
from typing import Any, Final, TypeVar

import msgspec
import psycopg
import trio

from durable_actors._option_checks import count, flag, shown
from durable_actors._postgres.driver import encode
from durable_actors._postgres.driver.connection import PgConn
from durable_actors._postgres.pool.lock_retry import retry_while_locked
from durable_actors._postgres.pool.pool import ConnectionPool
from durable_actors._store.claim import promote_siblings
from durable_actors._store.commands import plan_command
from durable_actors._store.connection_kinds import check_trio
from durable_actors._store.dialogues import check_id, resolving, resolving_lost, run_dialogue
from durable_actors._store.foreign import Dialogue, run_dialogue_async
from durable_actors._store.graph import telling_untold
from durable_actors._store.history import (
    PAGE,
    DamagedPage,
    Exported,
    HistoryReader,
    changes,
    find_acceptance,
    full_row,
    import_records,
    project,
    read_damaged,
    read_history,
    read_lines,
)
from durable_actors._store.journal import PostgresJournal
from durable_actors._store.lease import reap_claims, sweep_keys
from durable_actors._store.rebuild import accepting
from durable_actors._store.recover import (
    RecoveryReport,
    find_untold,
    read_expired,
    read_first_held,
    recount_barriers,
    wake_lost_waits,
)
from durable_actors._store.sql import statement
from durable_actors._store.verify import Batch, Which, check_long, check_rows, find_orphans, read_rows
from durable_actors._trio_run import HomeRun, at_home
from durable_actors.errors import ConfigError, Conflict, NoTarget
from durable_actors.journal import Record
from durable_actors.journal.verify import Problem, VerifyReport
from durable_actors.machine import MachineRef, current_registry

T = TypeVar("T")

MAX_REV: Final = 2**63 - 1
REAP_BATCH: Final = 500
SWEEP_KEYS: Final = 1000

TrioConn = psycopg.AsyncConnection[Any]
"""A `TrioConnection`, or a connection with the same interface."""


class HistoryCalls:
    """Reads and verifies journals, and repairs rows, on one schema of one database."""

    def __init__(self, pool: ConnectionPool, lane: str, schema: str) -> None:
        self.home: Final = HomeRun()
        """The Trio run that the client belongs to."""
        self._pool = pool
        self._lane = lane
        self._schema = schema
        self.journal: Final = PostgresJournal(pool, lane, schema)
        """The journal storage of this schema; see `durable_actors.journal.Journal`."""

    @at_home
    async def _run(self, call: Callable[[PgConn], Awaitable[T]]) -> T:
        """Run what may have to wait for a lock of another transaction: of a row, or of a table while DDL runs."""
        return await retry_while_locked(self._pool, self._lane, call)

    async def _resolve(self, target: int | str | bytes) -> int:
        if not isinstance(target, str | bytes):
            return check_id(target)
        return await self._run(lambda conn: run_dialogue(conn, resolving(self._schema, target)))

    # -- reading

    @at_home
    async def history(self, target: int | str | bytes, *, after: int = 0, limit: int = 1000) -> list[Record]:
        """Read records of an instance; see `durable_actors.history`."""
        count("after", after, least=0, most=MAX_REV)
        count("limit", limit, least=1, most=10_000)
        reader = HistoryReader(await self._resolve(target), after=after)
        return await self._page(reader, limit)

    async def _page(self, reader: HistoryReader, limit: int) -> list[Record]:
        return await self._run(lambda conn: read_history(conn, self._schema, reader, limit=limit))

    @at_home
    async def damaged_history(
        self, target: int | str | bytes, *, after: int = 0, limit: int = 1000
    ) -> tuple[int, DamagedPage]:
        """As `history`, for people: the id, and the records as far as they can be read.

        A row that is gone is found by its unique key, too.
        """
        async with self._pool.acquire(self._lane) as conn:
            number = await run_dialogue(conn, resolving_lost(self._schema, target))
            reader = HistoryReader(number, after=after)
            rows = (await conn.run(*reader.call(self._schema, limit=limit))).rows
            page = read_damaged(number, rows, after=after, limit=limit)
            for first in list(page.damaged)[:1]:
                accepted = await find_acceptance(conn, self._schema, number, after=first)
                page = read_damaged(number, rows, after=after, limit=limit, accepted=accepted or 0)
        return number, page

    async def iter_history(self, target: int | str | bytes) -> AsyncGenerator[Record, None]:
        """Iterate over the records of an instance; see `durable_actors.iter_history`."""
        reader = await self._reader(target)
        while not reader.ended:
            for record in await self._next_page(reader):
                yield record

    @at_home
    async def _reader(self, target: int | str | bytes) -> HistoryReader:
        return HistoryReader(await self._resolve(target))

    @at_home
    async def _next_page(self, reader: HistoryReader) -> list[Record]:
        return await self._page(reader, PAGE)

    @at_home
    async def state_at(self, target: int | str | bytes, rev: int) -> Any:
        """Return the state at a revision; see `durable_actors.state_at`."""
        count("rev", rev, least=1, most=MAX_REV)
        number = await self._resolve(target)
        found = await self._run(lambda conn: project(conn, self._schema, number, revs=[rev]))
        return full_row(number, rev, found[rev])["state"]

    @at_home
    async def diff(self, target: int | str | bytes, rev_a: int, rev_b: int) -> dict[str, tuple[Any, Any]]:
        """Return what changed between two revisions; see `durable_actors.diff`."""
        for option, rev in (("rev_a", rev_a), ("rev_b", rev_b)):
            count(option, rev, least=1, most=MAX_REV)
        number = await self._resolve(target)
        found = await self._run(lambda conn: project(conn, self._schema, number, revs=[rev_a, rev_b]))
        return changes(
            full_row(number, rev_a, found[rev_a]),
            full_row(number, rev_b, found[rev_b]),
        )

    async def export_history(self, target: int | str | bytes) -> AsyncGenerator[str, None]:
        """Iterate over the records as lines of JSON; see `durable_actors.export_history`."""
        exported = Exported()
        async with aclosing(self.iter_history(target)) as records:
            async for record in records:
                line = exported.line(record)
                if line is not None:
                    yield line

    async def import_history(self, lines: Iterable[str | bytes]) -> int:
        """Write an exported history; see `durable_actors.import_history`."""
        records = read_lines(lines)
        await self._run(lambda conn: import_records(conn, self._schema, records))
        return records[0].instance_id

    # -- verifying

    @at_home
    async def verify(
        self,
        target: int | str | bytes | None = None,
        *,
        machine: MachineRef | str | None = None,
        sample: float | None = None,
    ) -> VerifyReport:
        """Compare rows with their journals; see `durable_actors.verify`."""
        checked = 0
        problems: list[Problem] = []
        which = await self._which(target, machine, sample)
        async with aclosing(self._batches(which)) as batches:
            async for batch in batches:
                checked += batch.checked
                problems += batch.problems
        if which.ids is not None and sample is None and not checked:
            await self._nothing_to_check(which.ids[0], which.machine)
        return VerifyReport(checked, sorted(problems, key=lambda each: each.instance_id))

    async def _nothing_to_check(self, number: int, machine: str | None) -> None:
        """Raise what is the matter with an instance that `verify` has not found."""
        call = statement("read_row", self._schema, read_only=True)
        rows = (await self._run(lambda conn: conn.run(call, [encode.number(number)]))).rows
        if not rows and machine is not None:
            raise NoTarget(f"there is no instance {number} of machine {machine!r}")
        if not rows:
            raise NoTarget(f"there is no instance {number}, and no record of one")
        row = msgspec.json.decode(rows[0][0] or b"{}")
        if machine is not None and row["fsm"] != machine:
            raise NoTarget(f"instance {number} is of machine {row['fsm']!r}, not of {machine!r}")
        raise Conflict(f"instance {number} has no journal (level 'off'): there is nothing to compare")

    @at_home
    async def anomalies(
        self, target: int | str | bytes | None = None, *, machine: MachineRef | str | None = None
    ) -> list[Problem]:
        """Return the records that do not fit; see `durable_actors.anomalies`."""
        report = await self.verify(target, machine=machine)
        return [each for each in report.problems if each.reason == "anomaly"]

    async def _which(
        self, target: int | str | bytes | None, machine: MachineRef | str | None, sample: float | None
    ) -> Which:
        given: object = sample
        if given is not None and not (isinstance(given, int | float) and 0 < given <= 1):
            raise ConfigError(
                f"sample={shown(sample)} must be a share: greater than 0, at most 1",
                option="sample",
                value=sample,
            )
        if machine is not None and not isinstance(machine, str):
            machine = current_registry().find(machine).name
        ids = None if target is None else (await self._resolve(target),)
        return Which(ids, machine, None if sample is None else float(sample))

    async def _batches(self, which: Which) -> AsyncGenerator[Batch, None]:
        """Check batch by batch. While one is checked, the next is read."""
        rows: list[Any] = []
        await self._read_rows(which, -MAX_REV, rows)
        while rows:
            following: list[Any] = []
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._read_rows, which, int(rows[-1][0]), following)
                batch = await check_rows(rows, self._check_long)
            yield batch
            rows = following
        after = None if which.machine is not None or which.share is not None else -MAX_REV
        while after is not None:
            batch = await self._run(partial(find_orphans, schema=self._schema, which=which, after=after))
            yield batch
            after = batch.last

    async def _check_long(self, number: int) -> list[Problem]:
        return await self._run(lambda conn: check_long(conn, self._schema, number))

    async def _read_rows(self, which: Which, after: int, into: list[Any]) -> None:
        into += await self._run(lambda conn: read_rows(conn, self._schema, which, after=after))

    # -- repairing

    async def accept(
        self,
        target: int | str | bytes,
        *,
        by: str | None = None,
        reason: str | None = None,
        idempotency_key: str | None = None,
        meta: Mapping[str, Any] | None = None,
        conn: TrioConn | None = None,
    ) -> int:
        """Begin the history of an instance anew with its row; see `durable_actors.accept`."""
        command = plan_command(by=by, reason=reason, idempotency_key=idempotency_key, meta=meta)
        return await self._dialogue(partial(accepting, self._schema, target, command), conn)

    async def _dialogue(self, start: Callable[[], Dialogue[T]], conn: TrioConn | None) -> T:
        """Run a dialogue, in the caller's transaction if there is one. A lock that it does not get begins it again."""
        if conn is None:
            return await self._run(lambda own: run_dialogue(own, start()))
        check_trio(conn)
        return await run_dialogue_async(conn, start(), schema=self._schema)

    @at_home
    async def recover(
        self, *, by: str | None = None, reason: str | None = None, dry_run: bool = False
    ) -> RecoveryReport:
        """Correct what the engine never leaves wrong; see `durable_actors.recover`."""
        flag("dry_run", dry_run)
        how: dict[str, Any] = {"command": plan_command(by=by, reason=reason), "dry_run": dry_run}
        woken = await self._over_rows(partial(wake_lost_waits, **how))
        recounted = await self._over_rows(partial(recount_barriers, **how))
        offered = await self._promote(dry_run=dry_run)
        reaped = (
            await self._run(partial(read_expired, schema=self._schema)) if dry_run else await self._reap()
        )
        told = await self._over_rows(partial(find_untold, dry_run=dry_run))
        if told and not dry_run:
            await self._tell_dependents()
        return RecoveryReport(
            woken=tuple(woken),
            recounted=tuple(recounted),
            offered=tuple(offered),
            reaped=tuple(reaped),
            told=tuple(told),
        )

    async def _tell_dependents(self) -> None:
        """As the actor of every engine does."""
        more = True
        while more:
            more = (await self._dialogue(partial(telling_untold, self._schema), None)).more

    async def _over_rows(self, step: Callable[..., Awaitable[tuple[list[int], int | None]]]) -> list[int]:
        found: list[int] = []
        after: int | None = -MAX_REV
        while after is not None:
            ids, after = await self._run(partial(step, schema=self._schema, after=after))
            found += ids
        return found

    async def _promote(self, *, dry_run: bool) -> list[int]:
        found: list[int] = []
        after: str | None = ""
        while after is not None:
            stuck, after = await self._run(
                partial(sweep_keys, schema=self._schema, after=after, limit=SWEEP_KEYS)
            )
            if stuck and dry_run:
                found += await self._run(partial(read_first_held, schema=self._schema, keys=stuck))
            elif stuck:
                offered = await self._run(partial(promote_siblings, schema=self._schema, keys=stuck))
                found += [each.id for each in offered]
        return found

    async def _reap(self) -> list[int]:
        found: list[int] = []
        while True:
            reaped, _ = await self._run(partial(reap_claims, schema=self._schema, limit=REAP_BATCH))
            found += [each.id for each in reaped]
            if len(reaped) < REAP_BATCH:
                return found
