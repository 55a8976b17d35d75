"""Commands on instances that exist, as plain functions: `durable_actors.cancel`. They find their client themselves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from durable_actors._history import TrioConn
from durable_actors.client import find_client


async def cancel(
    target: int | str | bytes,
    *,
    children: Literal["leave", "cancel"] = "leave",
    force: bool = False,
    by: str | None = None,
    reason: str | None = None,
    idempotency_key: str | None = None,
    meta: Mapping[str, Any] | None = None,
    engine: object = None,
    conn: TrioConn | None = None,
) -> Literal["cancelled", "requested"]:
    """Cancel an instance (by id or unique key) that has not ended. Returns "cancelled", or "requested" if a step runs.

    Not executing: it has ended when this returns. Executing: its node is asked to, and cancels the step within two
    seconds, wherever it runs; a `def` step runs to its end, because a thread cannot be cancelled. If the step still
    commits `Done` first, the instance is done; with any other outcome, a crash or the death of its node it is
    cancelled, and children that it would schedule are not inserted. `force=True` does not ask: the instance is
    cancelled at once, and the step that still runs can commit nothing.

    An instance of a machine with `@step(on_cancel=True)` enters that step instead of ending ("requested"), with `force`
    at once. When it ends, the instance is cancelled. To cancel it while it compensates is a `Conflict`;
    `force=True` ends it then.

    A cancelled instance has ended: `result` raises `InstanceCancelled`, its parent's barrier counts it as failed, its
    partition key is free. It keeps its inbox, and `retry` runs it again. Its children go on; with `children="cancel"`
    they are cancelled, too, and theirs: soon after, in batches, by this call or by any engine. Raises `NoTarget` if it
    does not exist, and `Conflict` if it has ended. To ask again is no error: "requested".

    It is a command, like `retry`: it leaves a `Receipt` with `by`, `reason` and `meta`, and with an `idempotency_key`
    it is safe to call again. With `conn` (a Trio connection) it is part of your transaction; cancel several instances
    of one transaction in the order of their ids.
    """
    return await find_client(engine).cancel(
        target,
        children=children,
        force=force,
        by=by,
        reason=reason,
        idempotency_key=idempotency_key,
        meta=meta,
        conn=conn,
    )
