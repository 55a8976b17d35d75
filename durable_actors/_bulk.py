"""`Bulk`: a command on many instances. In the caller, or in the background, by the machine of `_bulk_machine`."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, Final, Literal, Protocol, cast

import msgspec
import psycopg

from durable_actors._hints import HintCalls
from durable_actors._option_checks import flag, shown
from durable_actors._postgres.driver import encode
from durable_actors._postgres.driver.connection import PgConn
from durable_actors._store.bulk import (
    BULK,
    FIRST,
    SCOPE,
    TARGET,
    BulkCommand,
    Frozen,
    Matched,
    check_where,
    count_matching,
    freeze,
    given_filter,
    match_call,
    read_window,
)
from durable_actors._store.bulk_receipts import MACHINE, finish_call, key_of, start_call, stopping
from durable_actors._store.commands import Command, Receipt, Said, plan_command, read_receipt
from durable_actors._store.dialogues import run_dialogue
from durable_actors._store.insert import insert_params
from durable_actors._store.observe import Filter
from durable_actors._store.read import Instance
from durable_actors._store.sql import statement
from durable_actors._trio_run import at_home
from durable_actors.errors import (
    CommitUnknown,
    ConfigError,
    Conflict,
    Duplicate,
    InstanceFailed,
    NoTarget,
)
from durable_actors.machine import InsertOptions, builtin_machines, decode_json, encode_json, plan_insert

QUEUE: Final = "durable.ops"
"""Its queue. Every engine that serves a queue serves this one, too."""
BATCH: Final = 100
"""Instances per batch: between two, progress is told, and an abort is noticed."""
MAX_FAILURES: Final = 100
"""Failures that a bulk remembers."""

REFUSED: Final = (psycopg.DataError, psycopg.IntegrityError, psycopg.errors.ProgramLimitExceeded)
"""Errors that are about one instance: a row that SQL by hand has written. Others end the bulk, or its batch."""

BulkState = Literal["dry run", "running", "finished", "aborted", "failed"]


class BulkJob(msgspec.Struct, frozen=True, kw_only=True):
    """What a bulk has to do."""

    id: int
    command: str
    frozen: Frozen
    count: int
    options: dict[str, Any] = {}
    by: str | None = None
    reason: str | None = None
    meta: dict[str, Any] = {}


class BulkProgress(msgspec.Struct, kw_only=True):
    """How far it has come."""

    after: int = FIRST
    """All instances up to this id are done with."""
    done: int = 0
    skipped: int = 0
    failed: int = 0
    failures: list[tuple[int, str]] = []
    answers: dict[str, int] = {}


class BulkWork(msgspec.Struct, frozen=True, kw_only=True):
    """The state of the machine that runs one in the background."""

    job: BulkJob
    progress: BulkProgress


class BulkClient(Protocol):
    """What a bulk in the background needs of its client."""

    async def inspect(self, target: int, /) -> Instance: ...
    async def result(self, target: int, /) -> object: ...
    async def cancel(self, target: int, /, *, reason: str | None = None) -> object: ...
    async def bulk_ended(self, number: int, count: int, progress: BulkProgress, *, aborted: bool) -> None: ...


class Bulk:
    """A command on many instances: `await client.cancel(where=Filter(...))` returns one, finished.

    With `background=True` it is running, on some node; `wait` waits for its end, and `refresh` reads how far it is.
    """

    def __init__(self, client: BulkClient, command: str, count: int) -> None:
        self._client = client
        self._progress = BulkProgress()
        self.command: Final = command
        """The name of the command: "cancel", "retry", "run_now", …"""
        self.count: Final = count
        """How many instances matched the filter at the beginning."""
        self.id: int | None = None
        """The id of its receipt; the receipts of its instances have it in their data. None for a dry run."""
        self.instance_id: int | None = None
        """The instance that runs it in the background; None if it runs in the caller."""
        self.state: BulkState = "dry run"
        """"dry run", "running", "finished", "aborted", or "failed" (in the background, after many errors)."""
        self.earlier: Receipt | None = None
        """The receipt of an earlier call with the same idempotency key: who gave it, and when."""
        self.repeated = False
        """Nothing was done now: what it tells is what the `earlier` call did, or does in the background. If `earlier`
        is not None and this is False, the earlier call was interrupted, and this one has done the rest."""

    def __repr__(self) -> str:
        return (
            f"<Bulk {self.command}: {self.state}, {self.done} of {self.count} done, "
            f"{self.skipped} skipped, {self.failed} failed>"
        )

    @property
    def done(self) -> int:
        """Instances on which the command was carried out."""
        return self._progress.done

    @property
    def skipped(self) -> int:
        """Instances that have changed since the beginning, so that the command does not apply to them any more."""
        return self._progress.skipped

    @property
    def failed(self) -> int:
        """Instances on which it could not be carried out; `failures` says why."""
        return self._progress.failed

    @property
    def failures(self) -> list[tuple[int, str]]:
        """The first hundred of them: id and reason."""
        return self._progress.failures

    @property
    def answers(self) -> Mapping[str, int]:
        """What the command answered, and how often: "cancelled" and "requested" of `cancel`."""
        return self._progress.answers

    async def refresh(self) -> Bulk:
        """Read how far a bulk in the background has come. Returns itself."""
        if self.instance_id is not None and self.state == "running":
            stopped = self._read(await self._client.inspect(self.instance_id))
            if stopped and self.id is not None:
                # The batch that was interrupted is not in the instance's state, and has not told the receipt.
                await self._client.bulk_ended(self.id, self.count, self._progress, aborted=True)
        return self

    async def wait(self) -> Bulk:
        """Wait until it has ended. Returns itself. One in the background is waited for wherever it runs."""
        if self.instance_id is not None and self.state == "running":
            with suppress(InstanceFailed):  # cancelled, or it gave up: `state` says it
                await self._client.result(self.instance_id)
            await self.refresh()
        return self

    async def abort(self) -> None:
        """Stop before the next instance. What was carried out stays so. No effect after its end."""
        if self.state != "running":
            return
        if self.instance_id is None:
            self.state = "aborted"
            return
        with suppress(Conflict):  # it has ended
            await self._client.cancel(self.instance_id, reason="aborted")

    def _read(self, instance: Instance) -> bool:
        """Take over what its instance says. Returns whether it was stopped before its end."""
        ended: Mapping[str, BulkState] = {"done": "finished", "cancelled": "aborted", "failed": "failed"}
        self.state = ended.get(instance.status, "running")
        found: object = (
            instance.result if instance.status == "done" else cast("Any", instance.state)["progress"]
        )
        self._progress = msgspec.convert(found, BulkProgress)
        return self.state in {"aborted", "failed"}

    def _ended_as(self, result: object) -> bool:
        """Take over what its receipt says, if it has ended."""
        told = cast("dict[str, Any]", result) if isinstance(result, dict) else {}
        if "finished" not in told:
            return False
        self.state, self._progress = "finished", msgspec.convert(told, BulkProgress)
        return True


Watch = Callable[[Bulk], object]
"""`progress=`: called after each batch, with the bulk; it may be `async`, and may call `await bulk.abort()`."""


class BulkSaid(Said, total=False):
    """What a command on many instances takes beside that."""

    dry_run: bool
    """Only count: nothing is written."""
    background: bool
    """Some node does it, and goes on if one dies."""
    progress: Watch | None
    """Called after each batch."""


def single(said: BulkSaid) -> Said:
    """What a command on one instance takes of it."""
    return cast("Said", {name: value for name, value in said.items() if name in Said.__annotations__})


def one_target(
    name: str, target: int | str | bytes | None, where: Filter | None, conn: object, said: BulkSaid
) -> int | str | bytes | None:
    """The one target of a command; None if `where` names many. Raises `ConfigError` for both or neither."""
    unknown = said.keys() - BulkSaid.__annotations__.keys()
    if unknown:
        raise TypeError(f"{name}() got an unexpected keyword argument {min(unknown)!r}")
    if (target is None) == (where is None):
        what = "either a target (an id or unique key) or where=Filter(...)"
        hint = " (insert returns None when the unique key is occupied)" if target is None else ""
        raise ConfigError(f"{name} needs {what}{hint}", option="target", value=target)
    of_bulks = sorted(said.keys() - Said.__annotations__.keys())
    if target is not None and of_bulks:
        raise ConfigError(f"{name}: {of_bulks[0]}= goes with where=, not with a target", option=of_bulks[0])
    if where is not None and conn is not None:
        text = f"{name}: where= takes no conn=, because each instance is a transaction of its own"
        raise ConfigError(text, option="conn")
    return target


class BulkCalls(HintCalls):
    """Gives commands to many instances."""

    async def _bulk(
        self, name: str, where: Filter | None, said: BulkSaid, *, options: Mapping[str, Any] | None = None
    ) -> Bulk:
        """Carry out a bulk, or start one in the background. Raises `ConfigError`."""
        kind = BULK[name]
        command = plan_command(**single(said))
        dry_run = flag("dry_run", said.get("dry_run", False))
        background = flag("background", said.get("background", False))
        progress = said.get("progress")
        if progress is not None and (background or not callable(progress)):
            text = "progress= takes a function, and only of a bulk that runs in the caller"
            raise ConfigError(text, option="progress", value=progress)
        checked = check_where(kind, where)
        return await self._run_bulk(
            kind,
            checked,
            command,
            dict(options or {}),
            dry_run=dry_run,
            background=background,
            progress=progress,
        )

    @at_home
    async def _run_bulk(
        self,
        kind: BulkCommand,
        where: Filter,
        command: Command,
        options: dict[str, Any],
        *,
        dry_run: bool,
        background: bool,
        progress: Watch | None,
    ) -> Bulk:
        client = cast("BulkClient", self)
        if dry_run:
            return Bulk(client, kind.name, (await self._freeze(kind, where))[1])
        job, earlier = await self._begin(kind, where, command, options, background=background)
        bulk = Bulk(client, kind.name, job.count)
        bulk.id, bulk.state = job.id, "running"
        if earlier is not None:
            ended = bulk._ended_as(earlier.result)  # noqa: SLF001 - same module
            background = bool(earlier.data.get("background"))
            bulk.earlier, bulk.repeated = earlier, ended or background
            if ended:
                return bulk
        if not background:
            return await self._in_caller(bulk, job, progress)
        bulk.instance_id = await self._resolve(_unique_key(job.id))
        self._after_commit(None, partial(self._hint, QUEUE, bulk.instance_id))
        return await bulk.refresh()

    async def _freeze(self, kind: BulkCommand, where: Filter) -> tuple[Frozen, int]:
        frozen = await self._run(lambda conn: freeze(conn, self._schema, kind, where))
        return frozen, await self._run(lambda conn: count_matching(conn, self._schema, frozen))

    async def _begin(
        self, kind: BulkCommand, where: Filter, command: Command, options: dict[str, Any], *, background: bool
    ) -> tuple[BulkJob, Receipt | None]:
        """Write the receipt of a new bulk, or find the one that an earlier call with the same key has begun."""
        earlier = await self.earlier_bulk(kind.name, command)
        if earlier is None:
            frozen, count = await self._freeze(kind, where)
            job = BulkJob(
                id=0, command=kind.name, frozen=frozen, count=count, options=options, by=command.by,
                reason=command.reason, meta=cast("dict[str, Any]", decode_json(command.data, what="meta")),
            )  # fmt: skip
            start = partial(
                _start, schema=self._schema, job=job, command=command, where=where, background=background
            )
            try:
                return await self._run(start), None
            except psycopg.errors.UniqueViolation:  # another call with the same key came first
                earlier = await self.earlier_bulk(kind.name, command)
                if earlier is None:
                    raise
        return _job_of(earlier, where), earlier

    async def earlier_bulk(self, name: str, command: Command) -> Receipt | None:
        """The receipt of the same bulk, if the caller has given a key that was used."""
        if command.idempotency_key is None:
            return None
        params = [*map(encode.text, (name, SCOPE, TARGET, command.idempotency_key))]
        call = statement("find_receipt", self._schema, read_only=True)
        rows = (await self._run(lambda conn: conn.run(call, params))).rows
        return read_receipt(rows[0]) if rows else None

    async def _in_caller(self, bulk: Bulk, job: BulkJob, progress: Watch | None) -> Bulk:
        ended = False
        made = bulk._progress  # noqa: SLF001 - same module
        while not ended and bulk.state == "running":
            ended = await self.bulk_batch(job, made, lambda: bulk.state == "running")
            if progress is not None:
                found = progress(bulk)
                if inspect.isawaitable(found):
                    await cast("Awaitable[object]", found)
        await self.bulk_ended(job.id, job.count, made, aborted=bulk.state == "aborted")
        if bulk.state == "running":
            bulk.state = "finished"
        return bulk

    async def bulk_batch(
        self, job: BulkJob, progress: BulkProgress, go_on: Callable[[], bool] = lambda: True
    ) -> bool:
        """Carry out one batch. Returns whether it was the last one."""
        kind = BULK[job.command]
        call, params = match_call(self._schema, job.frozen, after=progress.after, limit=BATCH)
        rows = (await self._run(lambda conn: conn.run(call, params))).rows
        window = read_window(rows, after=progress.after, limit=BATCH)
        meta = {**job.meta, "bulk": job.id}
        command = Command(
            by=job.by, reason=job.reason, idempotency_key=key_of(job.id), data=encode_json(meta, what="meta")
        )
        changed: list[Matched] = []
        try:
            for target in window.found:
                if not go_on():
                    return False
                if await self._one(kind, target, command, job.options, progress):
                    changed.append(target)
                progress.after = target.id
        finally:
            self._hint_bulk(kind, changed)
        progress.after = window.after
        return window.ended

    async def _one(
        self,
        kind: BulkCommand,
        target: Matched,
        command: Command,
        options: Mapping[str, Any],
        progress: BulkProgress,
    ) -> bool:
        """Carry it out on one instance, and count it. Returns whether that changed it."""
        while True:
            try:
                done = await self._run(
                    lambda own: run_dialogue(own, kind.carry_out(self._schema, target.id, command, options))
                )
            except CommitUnknown:
                continue  # with its key it is carried out once
            except (Conflict, NoTarget):
                progress.skipped += 1
                return False
            except Duplicate:
                return _count_failure(progress, target, "another instance occupies its unique key")
            except REFUSED as error:
                return _count_failure(progress, target, str(error).splitlines()[0])
            break
        progress.done += 1
        if isinstance(done.result, str):
            progress.answers = {**progress.answers, done.result: progress.answers.get(done.result, 0) + 1}
        if not kind.makes_runnable:
            self._after_commit(None, partial(self._after_cancel, done))
        return True

    def _hint_bulk(self, kind: BulkCommand, changed: list[Matched]) -> None:
        """Hint at what may run now: at each queue and priority once."""
        if not kind.makes_runnable or not changed:
            return
        for queue, priority in {(each.queue, each.priority) for each in changed}:
            self.notify(queue, priority=priority)
        if self.wakeups is not None:
            self.wakeups.add(tuple(each.id for each in changed))

    async def bulk_ended(self, number: int, count: int, progress: BulkProgress, *, aborted: bool) -> None:
        """Write into its receipt what came of it, and count in `progress` what was carried out."""
        result = {"count": count, **msgspec.to_builtins(progress)}
        result |= {"aborted": True} if aborted else {"finished": True}
        rows = (
            await self._run(lambda conn: conn.run(*finish_call(self._schema, number, result=result)))
        ).rows
        if rows:
            told = msgspec.json.decode(rows[0][0] or b"{}", type=dict[str, Any])
            progress.done = int(told.get("done", progress.done))
        if not aborted:
            progress.skipped = max(progress.skipped, count - progress.done - progress.failed)

    async def bulk_interrupted(self, number: int) -> None:
        """The instance that runs one in the background was interrupted: if that was to cancel it, write its end."""
        found = await cast("BulkClient", self).inspect(number)
        if found.request is not None and found.request.cancels:
            await self._run(lambda conn: run_dialogue(conn, stopping(self._schema, found.state)))


def _count_failure(progress: BulkProgress, target: Matched, reason: str) -> bool:
    progress.failed += 1
    if len(progress.failures) < MAX_FAILURES:
        progress.failures = [*progress.failures, (target.id, reason)]
    return False


def _unique_key(number: int) -> str:
    return f"{MACHINE}:{number}"


def _job_of(receipt: Receipt, where: Filter) -> BulkJob:
    """The job of an earlier call with the same idempotency key. Raises `Conflict` if its filter was another."""
    data: Mapping[str, Any] = receipt.data
    if data.get("where") != given_filter(where):
        raise Conflict(
            f"the idempotency key {receipt.idempotency_key!r} belongs to a bulk with another filter: "
            f"{shown(data.get('where'))}"
        )
    told = {"id": receipt.id, "command": receipt.command, "by": receipt.by, "reason": receipt.reason}
    count = cast("dict[str, Any]", receipt.result)["count"]
    job = {name: data[name] for name in ("frozen", "options", "meta")}
    return msgspec.convert({**told, **job, "count": count}, BulkJob)


async def _start(
    conn: PgConn, schema: str, job: BulkJob, command: Command, where: Filter, *, background: bool
) -> BulkJob:
    """Write the receipt, and in the background the instance that does the work, in one transaction."""
    data = {
        "where": given_filter(where),
        "background": background,
        "frozen": msgspec.to_builtins(job.frozen),
        "options": job.options,
        "meta": job.meta,
    }
    start = start_call(schema, job.command, command, data=data, result={"count": job.count})
    async with conn.transaction():
        rows = (await conn.run(*start)).rows
        job = msgspec.structs.replace(job, id=int(rows[0][0] or 0))
        if background:
            options: InsertOptions = {
                "state": BulkWork(job=job, progress=BulkProgress()),
                "unique_key": _unique_key(job.id),
            }
            plan = plan_insert(builtin_machines()[MACHINE, 1], options)
            await conn.run(statement("insert_instances", schema), insert_params([plan]))
    return job
