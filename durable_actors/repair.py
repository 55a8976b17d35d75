"""The helpers that repair: `rebuild`, `accept`, `recover`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from durable_actors._history import TrioConn
from durable_actors._store.recover import RecoveryReport
from durable_actors.client import find_client


async def rebuild(
    target: int | str | bytes,
    *,
    by: str | None = None,
    reason: str | None = None,
    idempotency_key: str | None = None,
    meta: Mapping[str, Any] | None = None,
    engine: object = None,
    conn: TrioConn | None = None,
    at_last_record: bool = False,
) -> int:
    """Write the row of an instance as its journal says, and return its id. For rows that are damaged, or gone.

    A row that is gone is found by its unique key, too: its records name it. That looks at every recorded instance. Of
    several it is the newest.

    The journal must be at level "full", else `Conflict` is raised; so it is if records do not fit together. A record
    that is damaged or missing raises `InvalidJournalEntry`. Where it was wrong, the repair is recorded: as a `snapshot`
    record, or, if the instance was executing, as the end of its claim. A claim is not restored: the step runs again,
    and the worker that ran it cannot commit. With a row that is gone its signals are gone, and their dedup keys.
    Nothing is written if the row moves meanwhile; it is read again.

    A row that is further than its last record, and differs in more than `rev`, may have moved on while its records
    were lost. It is refused, unless `at_last_record=True`: then the row goes back to its last record, and steps that
    ran since run again. `accept` is for the other case.

    This is a command, as `retry`: `by`, `reason`, `idempotency_key`, `meta` and `conn` mean the same.
    """
    return await find_client(engine).rebuild(
        target,
        by=by,
        reason=reason,
        idempotency_key=idempotency_key,
        meta=meta,
        conn=conn,
        at_last_record=at_last_record,
    )


async def accept(
    target: int | str | bytes,
    *,
    by: str | None = None,
    reason: str | None = None,
    idempotency_key: str | None = None,
    meta: Mapping[str, Any] | None = None,
    engine: object = None,
    conn: TrioConn | None = None,
) -> int:
    """Begin the history of an instance anew with its row, and return its id: the row is right, its records are not.

    For an instance that has gone on after its row was changed by hand, or whose records are damaged or missing. Writes
    a `snapshot` record; what is wrong with the records before it is not reported any more, and `rebuild` starts from
    it. They stay: `durable.forget_journal` deletes records. Changes nothing else, and no worker notices it. Raises
    `Conflict` if the outcomes of the instance are not recorded (level "off", and "auto" of jobs).

    This is a command, as `retry`: `by`, `reason`, `idempotency_key`, `meta` and `conn` mean the same.
    """
    return await find_client(engine).accept(
        target, by=by, reason=reason, idempotency_key=idempotency_key, meta=meta, conn=conn
    )


async def recover(
    *, by: str | None = None, reason: str | None = None, dry_run: bool = False, engine: object = None
) -> RecoveryReport:
    """Correct rows that the engine never leaves like this: after changes by hand, or a restored backup.

    In this order: wakes instances that wait for a signal which is in their inbox; corrects the counts of barriers, and
    opens those that are complete; offers rows that are held behind a sibling which is not there; takes back claims
    whose lease has expired. On a healthy database it changes nothing but expired leases, which a running engine takes
    back itself. It may run at any time, beside engines.

    A signal that is older than the wait wakes nobody: its step has seen it and kept it. How many children a barrier
    needs is known if its spawn is recorded; otherwise only a barrier that waits for more children than are alive is
    corrected. A barrier whose child has no row stays closed: `verify` names the child, and `rebuild` writes it again.

    Each instance that is woken or recounted gets a receipt with `by` and `reason`. The other two are what every engine
    does all the time, and leave none. With `dry_run=True` nothing is written, and the report says what would be
    corrected now.
    """
    return await find_client(engine).recover(by=by, reason=reason, dry_run=dry_run)
