"""What people decide for instances that wait for them: `durable_actors.proceed`, `approve`, `reject`."""

from __future__ import annotations

from typing import Unpack

from durable_actors._history import TrioConn
from durable_actors._store.boundaries import DecisionSaid
from durable_actors.client import find_client


async def proceed(
    target: int | str | bytes,
    *,
    engine: object = None,
    conn: TrioConn | None = None,
    **said: Unpack[DecisionSaid],
) -> int:
    """Let an instance (by id or unique key) proceed that waits at a `Pause`; return its id.

    It enters the step that the pause named, where `ctx.decision` has `by`, `comment` (up to 2,000 characters) and
    `data` (a JSON value, up to 64 KiB). Raises `NoTarget` if it does not exist, and `Conflict` if it does not wait at a
    pause; the text says what it does, and who has decided already.

    It is a command, like `retry`: it leaves a `Receipt` with `by`, `reason`, `meta` and the comment, and with an
    `idempotency_key` it is safe to call again. With `conn` (a Trio connection) it is part of your transaction.
    """
    return await find_client(engine).proceed(target, conn=conn, **said)


async def approve(
    target: int | str | bytes,
    *,
    engine: object = None,
    conn: TrioConn | None = None,
    **said: Unpack[DecisionSaid],
) -> int:
    """Approve what an instance (by id or unique key) asks with `Approval`; return its id.

    It enters the step `then` of the approval, where `ctx.decision` has `by`, `comment` and `data`. The first decision
    counts: after another one, or after the deadline, this raises `Conflict`, and the text says what was decided and by
    whom. The same `idempotency_key` again is harmless. Otherwise as `proceed`.
    """
    return await find_client(engine).approve(target, conn=conn, **said)


async def reject(
    target: int | str | bytes,
    *,
    engine: object = None,
    conn: TrioConn | None = None,
    **said: Unpack[DecisionSaid],
) -> int:
    """Reject what an instance (by id or unique key) asks with `Approval`; return its id.

    It enters the step `on_reject` of the approval, where `ctx.decision` has `by`, `comment` and `data`. Without that
    step it fails at once ("rejected by ada: too expensive"), and its parent's barrier counts it. Otherwise as
    `approve`.
    """
    return await find_client(engine).reject(target, conn=conn, **said)
