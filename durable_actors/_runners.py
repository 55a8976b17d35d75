"""`RunnerCalls`: claims that a program takes and ends itself, without an engine. `Client` inherits it."""

from __future__ import annotations

import logging
import random
import socket
from collections.abc import Coroutine, Iterable
from contextlib import suppress
from datetime import datetime
from functools import partial
from typing import Any, Final, Literal

import trio

from durable_actors._history import HistoryCalls
from durable_actors._option_checks import Duration, count, duration, queue_name, shown
from durable_actors._store import runner
from durable_actors._store.insert import traced
from durable_actors._store.read import Instance, read_by_ids
from durable_actors._store.runner import (
    Claimed,
    UnreadableClaimError,
    error_json,
    limits_of,
    outcome_json,
)
from durable_actors._trio_run import at_home
from durable_actors.errors import CommitUnknown, ConfigError, InvalidOutcome, LeaseLost, StateError
from durable_actors.machine import (
    Await,
    Done,
    InsertPlan,
    JournalLevel,
    MachineRef,
    MachineSpec,
    Next,
    Outcome,
    Retry,
    ScheduleChildren,
    Stop,
    current_registry,
    exhausted,
    job_failure,
    most_attempts,
    normalize_outcome,
    plan_insert,
    step_failure,
)

logger: Final = logging.getLogger("durable_actors.runner")

LEASE: Final = 300.0
"""Seconds of a lease, unless the caller says otherwise: a runner renews it itself, and rarely."""
MAX_ATTEMPTS: Final = 20
"""Executions of a step that keeps failing, unless its machine or the caller says otherwise."""
UNREACHABLE: Final = 2**31 - 1
"""A limit that no count of attempts reaches."""
PATIENCE: Final = 30.0
"""Seconds that a claim may take. It is not cancelled meanwhile: nobody would know what it has claimed."""


class RunnerCalls(HistoryCalls):
    """Takes claims, renews them and commits their outcomes."""

    late_commit: Literal["accept", "reject"] = "accept"
    """Whether an outcome is accepted after the end of its lease, while its claim is current; see `Config`."""
    _level: JournalLevel = "auto"

    @at_home
    async def claim_next(
        self,
        queue: str = "default",
        *,
        machines: Iterable[MachineRef] | None = None,
        steps: Iterable[str] | None = None,
        lease_ttl: Duration = LEASE,
        owner: str | None = None,
    ) -> Claimed | None:
        """Claim one due instance; see `durable_actors.claim_next`."""
        queue_name("queue", queue)
        lease = duration("lease_ttl", lease_ttl)
        name = queue_name("owner", socket.gethostname() if owner is None else owner)
        places = _places(machines, steps)
        if not places:
            raise ConfigError("claim_next needs steps: no machine is registered here, and none is named")
        call = partial(
            runner.claim_next, schema=self._schema, queue=queue, steps=places, owner=name, lease=lease
        )
        with trio.CancelScope(shield=True, deadline=trio.current_time() + PATIENCE):
            while True:
                try:
                    claimed = await self._run(call)
                except UnreadableClaimError as unreadable:
                    await self._give_up(unreadable)  # and look for another one
                    continue
                if claimed is None or not claimed.attempt or not await self._is_used_up(claimed):
                    return claimed
        raise CommitUnknown(
            f"Postgres did not answer claim_next within {PATIENCE:g} s; what it has claimed ends with its lease"
        )

    async def _give_up(self, unreadable: UnreadableClaimError) -> None:
        """End a claim that nobody has been told of: its step has failed, as one that raises."""
        claimed = unreadable.claimed
        what = f"what its step {claimed.step!r} is to be handed cannot be decoded: {unreadable.__cause__}"
        error = StateError(f"instance {claimed.id}: {what}")
        logger.warning("claim_next: %s; its claim was given back as failed", error)
        with suppress(LeaseLost):
            await self.fail(claimed, error)

    async def _is_used_up(self, claimed: Claimed) -> bool:
        """Whether no run is left of a job that is known here: it kills its workers. Then its claim has ended it."""
        spec = _spec_of(claimed)
        if spec is None or spec.kind != "job":
            return False
        found = await self._run(lambda conn: read_by_ids(conn, self._schema, [claimed.id]))
        limit = found[claimed.id].max_attempts if claimed.id in found else None
        over = exhausted(spec, claimed.attempt, limit)
        if over is None:
            return False
        with suppress(LeaseLost):
            await self.complete(claimed, over)
        return True

    async def heartbeat(self, claimed: Claimed, *, lease_ttl: Duration = LEASE) -> datetime:
        """Extend the lease of a claim; see `durable_actors.heartbeat`."""
        lease = duration("lease_ttl", lease_ttl)
        return await self._run(lambda conn: runner.heartbeat(conn, self._schema, claimed, lease=lease))

    async def complete(self, claimed: Claimed, outcome: object) -> Instance:
        """Commit the outcome of a claim; see `durable_actors.complete`."""
        spec = _spec_of(claimed)
        found = _checked(outcome, claimed, spec)
        plans = self._children(found) if isinstance(found, ScheduleChildren) else ()
        document = outcome_json(found, spec, plans)
        late = self.late_commit == "accept"
        return await self._end(
            partial(
                runner.complete,
                schema=self._schema,
                claimed=claimed,
                outcome=document,
                limits=limits_of(found, spec),
                accept_late=late,
            )
        )

    async def fail(
        self,
        claimed: Claimed,
        error: BaseException | str,
        *,
        retry_in: Duration | None = None,
        max_attempts: int | None = None,
    ) -> Instance:
        """Say that the step of a claim has failed; see `durable_actors.fail`."""
        delay = None if retry_in is None else duration("retry_in", retry_in, positive=False)
        spec = _spec_of(claimed)
        most = MAX_ATTEMPTS if max_attempts is None else count("max_attempts", max_attempts, least=1)
        if spec is not None and max_attempts is None:
            limit, wait = _retry_of(error, spec, claimed)
            most, delay = most if limit is None else limit, wait if delay is None else delay
        return await self._end(
            partial(
                runner.fail,
                schema=self._schema,
                claimed=claimed,
                error=error_json(error),
                retry_in=delay,
                max_attempts=most,
                accept_late=self.late_commit == "accept",
            )
        )

    async def _end(self, call: partial[Coroutine[Any, Any, Instance]]) -> Instance:
        """Commit, and tell the engine of this process what there is to do."""
        instance = await self._run(call)
        self._after_end(instance)
        return instance

    def _after_end(self, instance: Instance) -> None:
        """The client gives hints to its engine."""

    def _children(self, outcome: ScheduleChildren) -> list[InsertPlan]:
        if outcome.is_graph:  # the function `complete` knows neither: they would all start at once
            raise InvalidOutcome(
                "a child of a runner has no key and comes after no other one: let an engine or execute_next run "
                "this step, which starts children with key= or after="
            )
        registry = current_registry()
        plans = [
            plan_insert(registry.find(child.machine), child.options, on_duplicate="skip", journal=self._level)
            for child in outcome.children
        ]
        traced(plans)
        return plans


def _places(machines: Iterable[MachineRef] | None, steps: Iterable[str] | None) -> list[str]:
    """The steps to claim, as the SQL function takes them: named, of these machines, or all that are registered."""
    registry = current_registry()
    if machines is None and steps is None:
        specs = list(registry.specs.values())
    else:
        specs = [registry.find(machine) for machine in machines or ()]
    named = list(steps or ())
    if isinstance(steps, str) or not all(isinstance(each, str) for each in named):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(
            f'steps={shown(steps)} must be a list of texts, "machine/step" or "machine@version/step"',
            option="steps",
        )
    return [*named, *(f"{spec.name}@{spec.version}/{step}" for spec in specs for step in spec.steps)]


def _retry_of(
    error: BaseException | str, spec: MachineSpec, claimed: Claimed
) -> tuple[int | None, float | None]:
    """How often it may run, and when next, as its definition says; 0: no run is left. Its row may have another limit.

    So whether this was the last run is left to the statement: here the limit is out of reach.
    """
    limit = most_attempts(spec, claimed.step, None)
    if limit is None:
        return None, None
    attempt, step = claimed.attempt, spec.steps[claimed.step]
    decided = (
        job_failure(error, spec, attempt=attempt, random=random.random, max_attempts=UNREACHABLE)
        if spec.kind == "job"
        else step_failure(error, step, attempt=attempt, random=random.random, max_attempts=UNREACHABLE)
    )
    return (limit, decided.delay) if isinstance(decided, Retry) else (0, None)


def _spec_of(claimed: Claimed) -> MachineSpec | None:
    return current_registry().get(claimed.machine, claimed.version)


def _checked(outcome: object, claimed: Claimed, spec: MachineSpec | None) -> Outcome:
    """The outcome, checked as that of a step if this process knows the machine; a job may return any value."""
    if spec is not None:
        return normalize_outcome(
            outcome, spec, step=claimed.step, attempt=claimed.attempt, random=random.random
        )
    if not isinstance(outcome, Next | Retry | Await | ScheduleChildren | Done | Stop):
        raise InvalidOutcome(f"complete needs an outcome (Next, Retry, Await, …), not {shown(outcome)}")
    return outcome
