"""What holds for every command, on every kind of connection: who is missing, what forbids it, the same key again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any, Final, Protocol

import durable_actors as da
import psycopg
import pytest
import trio
from psycopg.types.json import Jsonb
from tests.engine.kit import Db

LIVE: Final = frozenset({"runnable", "executing", "awaiting_signal", "awaiting_children"})
ALLOWED: Final[dict[str, frozenset[str]]] = {
    "cancel": LIVE,
    "pause": LIVE,
    "retry": frozenset({"failed", "cancelled"}),
    "run_now": frozenset({"runnable"}),
    "resume": frozenset(),  # nobody is paused
    "proceed": frozenset(),  # and nobody waits for a person
    "approve": frozenset(),
    "reject": frozenset(),
}
"""By command: where it is carried out. `rerun` is, whatever became of the old one."""
ENDED: Final = frozenset({"done", "failed", "cancelled"})
CLAIM: Final = "5b8f2c1e-6f0e-4b5e-9a51-0c8e8b1b8f11"
COLUMNS: Final[dict[str, dict[str, Any]]] = {
    "executing": {"claim_id": CLAIM, "lease_expires_at": "tomorrow", "locked_by": "n:1"},
    "awaiting_signal": {"awaits": ["go"]},
    "awaiting_children": {"children_pending": 1},
}


class Caller(Protocol):
    def __call__(self, command: str, target: Any, /, **said: Any) -> Any: ...


def on_sync(dsn: str, command: str, target: Any, /, **said: Any) -> Any:
    with psycopg.connect(dsn) as conn:
        return getattr(da.sync, command)(conn, target, **said)


def on_aio(dsn: str, command: str, target: Any, /, **said: Any) -> Any:
    async def call() -> Any:
        async with await psycopg.AsyncConnection.connect(dsn) as conn:
            return await getattr(da.aio, command)(conn, target, **said)

    return asyncio.run(call())


def on_trio(dsn: str, command: str, target: Any, /, *, helper: bool, **said: Any) -> Any:
    async def call() -> Any:
        async with da.open_client(dsn) as client:
            if helper:
                return await getattr(da, command)(target, engine=client, **said)
            return await getattr(client, command)(target, **said)

    return trio.run(call)


KINDS: Final[dict[str, Callable[..., Any]]] = {
    "sync": on_sync,
    "aio": on_aio,
    "client": partial(on_trio, helper=False),
    "helper": partial(on_trio, helper=True),
}


@pytest.fixture(params=KINDS)
def call(durable_dsn: str, request: pytest.FixtureRequest) -> Caller:
    return partial(KINDS[request.param], durable_dsn)


def add(db: Db, status: str, **columns: object) -> int:
    ended = {"finished_at": "now"} if status in ENDED else {}
    return db.insert(status=status, **ended, **COLUMNS.get(status, {}), **columns)


def asks(db: Db, kind: str) -> int:
    return add(db, "awaiting_signal", manual=Jsonb({"kind": kind, "then": "s", "on_reject": "s"}))


def receipts(db: Db) -> int:
    return db.value("select count(*) from durable.receipts")


def test_who_is_missing(call: Caller, db: Db):
    for command in (*ALLOWED, "rerun"):
        for target in (10**6, "nobody", b"nobody"):
            with pytest.raises(da.NoTarget):
                call(command, target, by="ada", idempotency_key="k")
        for target in (None, True, 1.5):
            with pytest.raises(da.ConfigError):
                call(command, target)
    assert receipts(db) == 0


def test_what_forbids_it_is_said_and_nothing_is_written(call: Caller, db: Db):
    numbers = {each: add(db, each) for each in (*LIVE, *ENDED)}
    rows = db.execute("select to_jsonb(g) from durable.gen_durable g order by id")
    for command, allowed in ALLOWED.items():
        for status in numbers.keys() - allowed:
            with pytest.raises(da.Conflict, match=f"instance {numbers[status]} is {status}"):
                call(command, numbers[status], idempotency_key="k")
    assert db.execute("select to_jsonb(g) from durable.gen_durable g order by id") == rows
    assert receipts(db) == 0


def test_the_same_key_again_is_harmless(call: Caller, db: Db):
    paused = add(db, "runnable")
    call("pause", paused)
    targets = {
        "cancel": add(db, "runnable"),
        "pause": add(db, "runnable"),
        "run_now": add(db, "runnable", eligible_at="tomorrow"),
        "retry": add(db, "failed"),
        "rerun": add(db, "runnable"),
        "resume": paused,
        "proceed": asks(db, "pause"),
        "approve": asks(db, "approval"),
        "reject": asks(db, "approval"),
    }
    assert targets.keys() == {*ALLOWED, "rerun"}
    said = {"by": "ada", "reason": "why", "idempotency_key": "k", "meta": {"api_key": "p", "ticket": 7}}
    answers = {command: call(command, target, **said) for command, target in targets.items()}
    rows = db.execute("select to_jsonb(g) from durable.gen_durable g order by id")
    assert answers == {command: call(command, target, **said) for command, target in targets.items()}
    assert db.execute("select to_jsonb(g) from durable.gen_durable g order by id") == rows
    assert receipts(db) == len(targets) + 1
    assert (
        db.value(
            'select count(*) from durable.receipts where data = \'{"api_key": "[redacted]", "ticket": 7}\''
        )
        == 9
    )
    # Another decision, and the same one of somebody else, is too late.
    for command, other in (("approve", "reject"), ("reject", "approve"), ("proceed", "proceed")):
        for key in ("k", "other") if other != command else ("other",):
            with pytest.raises(da.Conflict, match="by ada"):
                call(other, targets[command], idempotency_key=key)
