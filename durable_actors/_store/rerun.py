"""`rerun`: a new instance from an old one. Sans-I/O; the new row, its record and the receipt are one statement."""

from __future__ import annotations

from typing import Any, Final, NoReturn

import attrs
import msgspec
import psycopg

from durable_actors._option_checks import count, shown
from durable_actors._postgres.driver import encode
from durable_actors._postgres.driver.statement import Params, Statement
from durable_actors._store.commands import Command
from durable_actors._store.dialogues import RETRY, earlier_receipt, inspecting, resolving
from durable_actors._store.foreign import Dialogue
from durable_actors._store.history import HistoryReader, full_row
from durable_actors._store.move_rules import MAX_KEY
from durable_actors._store.read import Instance
from durable_actors._store.rerun_tasks import Start, planning_tasks
from durable_actors._store.sql import statement
from durable_actors.errors import ConfigError, Conflict
from durable_actors.journal.fold import copy_of, replay_into
from durable_actors.machine import KEEP, StepRef, TaskRef, check_step, current_registry, encode_json

NAME: Final = "rerun"
MAX_REV: Final = 2**63 - 1
MAX_STEP: Final = 255


@attrs.frozen
class Rerun:
    """A new instance, started now or by an earlier call with the same idempotency key."""

    id: int
    old: Instance | None
    """The instance that it was started from; None if an earlier call did it."""


def rerunning(schema: str, target: int | str | bytes, command: Command, start: Start) -> Dialogue[Rerun]:
    """Start a new instance from an old one.

    For a workflow the step is a task: the new instance begins with the results of those that need not run again. Raises
    `NoTarget`, `ConfigError` and `StateError` for a step or state that its machine does not have, as far as it
    is known here, and `Conflict` if the first step or state, or the revision, is not recorded. Nothing is written then.
    """
    check_start(start)
    number = yield from resolving(schema, target)
    earlier = yield from earlier_receipt(schema, NAME, number, command)
    if earlier is not None:
        return Rerun(_id(earlier.result), None)
    old = yield from inspecting(schema, number)
    start = yield from planning_tasks(schema, old, start)
    step, state = planned(old, start)
    key: tuple[str | None] | None = None
    if start.at_rev is not None:
        row = yield from _row_at(schema, number, start.at_rev)
        step = step or str(row["step"])
        state = encode_json(row["state"], what="state") if state is None else state
        key = (row["partition_key"],)
    _check_indexed(old, step, key)
    try:
        limits = limits_there(old, step)
        done = yield rerun_call(schema, number, command, step=step, state=state, key=key, limits=limits)
    except psycopg.errors.UniqueViolation as refused:
        if refused.diag.constraint_name != "receipts_once":
            raise
        earlier = yield from earlier_receipt(schema, NAME, number, command)
        if earlier is None:
            raise  # a snapshot that is older than the receipt does not show it
        return Rerun(_id(earlier.result), None)
    if not done:
        old = yield from inspecting(schema, number)  # raises if it was deleted meanwhile
        _unknown(old, state)
    return Rerun(int(done[0][0] or 0), old)


def rerun_call(
    schema: str,
    number: int,
    command: Command,
    *,
    step: str | None,
    state: bytes | None,
    key: tuple[str | None] | None,
    limits: tuple[str | None] | None = None,
) -> tuple[Statement, Params]:
    """The statement, and its parameters.

    `key`: the partition key, if it is not to be the first one. `limits`: those of `step`, if they are known.
    """
    given = [encode.text(step), state]
    for each in (key, limits):
        given += [encode.text(each[0] if each else None), b"t" if each else b"f"]
    return statement("rerun_instance", schema), [encode.number(number), *command.params(), *given]


def check_start(start: Start) -> None:
    """Raise `ConfigError` for what no machine can have. Pure."""
    if start.at_rev is not None:
        count("at_rev", start.at_rev, least=1, most=MAX_REV)
    step: object = start.step
    if step is not None and not isinstance(step, StepRef | TaskRef):
        valid = (
            isinstance(step, str) and 0 < len(step) <= MAX_STEP and "\0" not in step and "\x1f" not in step
        )
        if not valid:
            raise ConfigError(
                f"step={shown(step)} must be a step, or a name of 1 to {MAX_STEP} characters",
                option="step",
                value=step,
            )


def planned(old: Instance, start: Start) -> tuple[str | None, bytes | None]:
    """The step and state that are given, checked by the machine if this process knows it. Pure.

    An instance whose machine is not known here takes any step, and a state of JSON values.
    """
    spec = current_registry().get(old.machine, old.version)
    step: str | None = None
    if start.step is not None:
        name = start.step.name if isinstance(start.step, StepRef | TaskRef) else start.step
        step = name if spec is None else check_step(spec, start.step)
    state: bytes | None = None
    if start.state is not KEEP:
        if spec is None:
            state = encode_json(start.state, what="state")
        else:
            state = spec.codec.encode(start.state, step=step or spec.initial)
    return step, state


def limits_there(old: Instance, step: str | None) -> tuple[str | None] | None:
    """The limits that the code says of a step; None if this process does not have it. Pure."""
    spec = current_registry().get(old.machine, old.version)
    found = None if spec is None or step is None else spec.steps.get(step)
    return None if found is None else (found.limits,)


def _row_at(schema: str, number: int, rev: int) -> Dialogue[dict[str, Any]]:
    """The row of an instance at a revision. Raises `Conflict`, `InvalidJournalEntry`."""
    reader = HistoryReader(number)
    projection = copy_of(None)
    try:
        while not reader.ended:
            rows = yield reader.call(schema)
            for record in reader.page(rows):
                replay_into(projection, [record])
                if record.rev == rev:
                    return full_row(number, rev, projection)
    except Conflict as error:
        raise Conflict(f"{error}. Give step and state instead of the revision") from None
    raise Conflict(
        f"instance {number} has no record of revision {rev}: its level is {reader.row_level!r}, and its last record is "
        f"revision {reader.after}. Give step and state instead of the revision"
    )


def _check_indexed(old: Instance, step: str | None, key: tuple[str | None] | None) -> None:
    """Raise `Conflict` for a row that no index could hold: only SQL by hand writes one to start from."""
    width = max(len((each or "").encode()) for each in (old.partition_key, key[0] if key else None))
    if width > MAX_KEY:
        raise Conflict(
            f"instance {old.id} cannot be run again: its partition key has {width} bytes, at most {MAX_KEY} are allowed"
        )
    names = f"{old.queue}{old.machine}{step or old.step}"
    if len(names.encode()) > 2600:
        raise Conflict(
            f"instance {old.id} cannot be run again: the names of its queue, machine and step are too long"
        )


def _unknown(old: Instance, state: bytes | None) -> NoReturn:
    """Say what is missing, and what to do."""
    missing, level = ("state", "full") if state is None else ("step", "outcomes")
    hint = ", or retry it where it ended" if old.status in RETRY.allowed else ""
    if old.key is not None and old.parent_id is not None and old.machine.endswith(f".{old.key}"):  # a task
        hint += f", or run its workflow again from it: instance {old.parent_id}, step {old.key}"
    raise Conflict(
        f"the first {missing} of instance {old.id} is not recorded (journal level {level!r} records it): "
        f"give a {missing} (--{missing} on the command line){hint}"
    )


def _id(result: object) -> int:
    return msgspec.convert(result, int)
