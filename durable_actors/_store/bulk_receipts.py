"""The receipt of a bulk command: written when it begins, and again when it has ended, whoever ends it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from durable_actors._postgres.driver import encode
from durable_actors._postgres.driver.statement import Params, Statement
from durable_actors._store.commands import Command
from durable_actors._store.foreign import Dialogue
from durable_actors._store.sql import statement
from durable_actors.machine import encode_json

MACHINE: Final = "durable:bulk"
"""The machine that runs a bulk in the background (`_bulk_machine.py`)."""


def start_call(
    schema: str, name: str, command: Command, *, data: Mapping[str, Any], result: Mapping[str, Any]
) -> tuple[Statement, Params]:
    """The statement that writes the receipt of a bulk."""
    said = [*map(encode.text, (command.by, command.reason, command.idempotency_key))]
    documents = [encode_json(data, what="data"), encode_json(result, what="result")]
    return statement("start_bulk", schema), [encode.text(name), *said, *documents]


def finish_call(schema: str, number: int, *, result: Mapping[str, Any]) -> tuple[Statement, Params]:
    """The statement that writes into that receipt what came of it."""
    params = [encode.number(number), encode_json(result, what="result"), encode.text(key_of(number))]
    return statement("finish_bulk", schema), params


def key_of(number: int) -> str:
    """The idempotency key of the commands of a bulk: each instance is meant once."""
    return f"bulk:{number}"


class _Job(msgspec.Struct):
    id: int
    count: int


class _Work(msgspec.Struct):
    job: _Job
    progress: dict[str, Any]


def stopping(schema: str, state: object) -> Dialogue[None]:
    """A bulk in the background was cancelled: write its end into its receipt. `state`: that of its instance.

    What the batch under way has done is counted by the statement. Nothing is written for a state of another form.
    """
    try:
        work = msgspec.convert(state, _Work)
    except msgspec.ValidationError:  # a hand has written it
        return
    result = {"count": work.job.count, **work.progress, "aborted": True}
    yield finish_call(schema, work.job.id, result=result)
