"""The helpers of runners: `claim_next`, `heartbeat`, `complete`, `fail`. They call the SQL functions for it.

A runner is a program that takes claims and ends them itself, without an engine. A Python program that only wants to run
steps calls `execute_next`, which does all of this.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime

from durable_actors._option_checks import Duration
from durable_actors._runners import LEASE
from durable_actors._store.read import Instance
from durable_actors._store.runner import Claimed
from durable_actors.client import find_client
from durable_actors.machine import MachineRef


async def claim_next(
    queue: str = "default",
    *,
    machines: Iterable[MachineRef] | None = None,
    steps: Iterable[str] | None = None,
    lease_ttl: Duration = LEASE,
    owner: str | None = None,
    engine: object = None,
) -> Claimed | None:
    """Claim the most urgent due instance of a queue, at one of these steps; None if nothing is due.

    `machines` names machines with all their steps, `steps` single steps ("machine/step", "machine@2/step" for version
    2); without both, the steps of all registered machines count. Instances at other steps are left alone. First it
    takes back a few expired claims, and wakes instances of the queue whose deadline has passed. `owner` names the
    runner, for people (default: the host).

    The claim is the caller's for `lease_ttl` seconds: renew it with `heartbeat`, and end it with `complete` or `fail`.
    Otherwise the step runs again when the lease has expired, attempt + 1. Not cancelled while Postgres is working.
    """
    return await find_client(engine).claim_next(
        queue, machines=machines, steps=steps, lease_ttl=lease_ttl, owner=owner
    )


async def heartbeat(claimed: Claimed, *, lease_ttl: Duration = LEASE, engine: object = None) -> datetime:
    """Extend the lease of a claim to `lease_ttl` seconds from now; return its end.

    `claimed.request` then has what a command asks of the step. If another transaction has locked the row, the lease
    stays as it was: renew long before it ends. Raises `LeaseLost` if the claim is lost: stop the step, and do not
    complete it.
    """
    return await find_client(engine).heartbeat(claimed, lease_ttl=lease_ttl)


async def complete(claimed: Claimed, outcome: object, *, engine: object = None) -> Instance:
    """Commit the outcome of a claimed step, as an engine does; return the instance.

    `outcome` is what the step would return: `Next(...)`, `Done(...)`, …; for a job, any value. Repeating the same call
    is harmless, also after `CommitUnknown`. Raises `LeaseLost` if the claim is lost, `Conflict` if the claim was
    completed with another outcome and the journal or the row tells so, `InvalidOutcome` and `StateError` as for a step.
    Nothing was written then.
    """
    return await find_client(engine).complete(claimed, outcome)


async def fail(
    claimed: Claimed,
    error: BaseException | str,
    *,
    retry_in: Duration | None = None,
    max_attempts: int | None = None,
    engine: object = None,
) -> Instance:
    """Say that a claimed step has failed, and why; return the instance.

    It runs again after `retry_in` seconds (default: the back-off of a job), until it has been executed `max_attempts`
    times (default: that of the job, else 20); then it ends as failed. To end it at once, complete it with `Stop`.
    `handle` is not called. Raises as `complete`.
    """
    return await find_client(engine).fail(claimed, error, retry_in=retry_in, max_attempts=max_attempts)
