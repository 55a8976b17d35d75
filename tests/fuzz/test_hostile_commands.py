"""Commands with odd arguments, on odd rows: each does what it says or says why not; nobody else suffers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import durable_actors as da
import psycopg
import pytest
import trio
from durable_actors._client import Client
from durable_actors.machine import isolated_registry
from hypothesis import given, strategies as st
from tests.fuzz.hostile import ALL
from tests.fuzz.kit import ODD, QUEUE, add, define, engine, fuzz, scars
from tests.fuzz.test_hostile_rows import SETTLED, some_columns, whole
from tests.fuzz.test_injection import EVIL
from tests.kit import Session

pytestmark = pytest.mark.usefixtures("registry")

Call = Callable[[Client, int, Any], Awaitable[Any]]

COMMANDS: dict[str, Call] = {
    "retry": lambda client, number, key: client.retry(number, idempotency_key=key),
    "cancel": lambda client, number, key: client.cancel(number, idempotency_key=key),
    "force": lambda client, number, key: client.cancel(number, idempotency_key=key, force=True),
}
ARGUMENTS: dict[str, Callable[[Client, Any], Awaitable[Any]]] = {
    "cancel": lambda client, value: client.cancel(value),
    "force": lambda client, value: client.cancel(1, force=value),
    "retry": lambda client, value: client.retry(value),
    "receipts": lambda client, value: client.receipts(value),
    "command": lambda client, value: client.receipts(command=value),
    "after": lambda client, value: client.receipts(after=value),
    "limit": lambda client, value: client.receipts(limit=value),
    "schedule": lambda client, value: client.schedules.pause(value),
    "put": lambda client, value: client.schedules.put(value, "good", every=60),
    "machine": lambda client, value: client.schedules.put("s", value, every=60),
    "run": lambda client, value: client.schedules.run_now("s", overlap=value),
    "start": lambda client, value: client.schedules.backfill("s", value, value),
    "records": lambda client, value: client.schedules.list(records=value),
}


async def command_all(client: Client, ids: list[int], order: list[str]) -> None:
    """Every command on every row. The same key again has the same answer; a refusal says what is wrong."""
    for number in ids:
        for name in order:
            try:
                answer = await COMMANDS[name](client, number, name)
            except (da.Conflict, da.NoTarget, da.Duplicate):
                continue
            except psycopg.errors.ProgramLimitExceeded:
                continue  # a key that only a hand writes, and that no index of runnable rows can hold
            assert answer in {"cancelled", "requested", number}
            assert await COMMANDS[name](client, number, name) == answer
            assert [each.result for each in await client.receipts(number, limit=1)] == [answer]


async def survive(dsn: str, conn: psycopg.Connection[Any], ids: list[int], order: list[str]) -> None:
    """The commands find the rows as they are; then an engine runs what is left of them."""
    good = define()
    async with da.open_client(dsn, name="operator") as client:
        await command_all(client, ids, order)
    conn.execute(
        "update durable.gen_durable set lease_expires_at = now() where locked_by in ('ghost:1', '''; --')"
    )
    async with engine(dsn, queues={QUEUE: 10}) as running:
        await Session(conn).eventually(SETTLED)
        assert await da.result(await da.insert(good, args={}, queue=QUEUE), timeout=30) == "ran"
        assert scars(running) == []


@pytest.mark.parametrize("order", [["cancel", "retry", "force"], ["retry", "force", "cancel"]])
async def test_commands_on_hostile_rows(durable_dsn, conn, order):
    ids = [add(conn, queue=QUEUE, **case.columns) for case in ALL]
    await survive(durable_dsn, conn, ids, order)


@fuzz(3)
@given(batch=st.lists(some_columns, min_size=10, max_size=30), order=st.permutations(list(COMMANDS)))
def test_commands_on_rows_that_nobody_thought_of(durable_dsn, conn, batch, order):
    conn.execute("truncate durable.gen_durable, durable.signals, durable.receipts restart identity")
    ids: list[int] = []
    for columns in batch:
        try:
            ids.append(add(conn, queue=QUEUE, **whole(columns)))
        except psycopg.errors.IntegrityError:
            continue  # a constraint of the table has refused it
    with isolated_registry():
        trio.run(survive, durable_dsn, conn, ids, order)


@pytest.mark.parametrize("name", ARGUMENTS)
async def test_odd_arguments_are_refused_politely(durable_dsn, name):
    told: list[str] = []
    async with da.open_client(durable_dsn) as client:
        for value in ODD:
            try:
                await ARGUMENTS[name](client, value)
            except da.DurableError as exc:
                told.append(str(exc))
    assert max(map(len, told)) < 500, name


async def test_evil_words_are_data(durable_dsn, conn):
    define()
    conn.execute("create table canary (sings boolean)")
    async with da.open_client(durable_dsn) as client:
        for evil in EVIL:
            number = add(conn, queue=QUEUE, fsm="good", step="perform")
            about = {"by": evil, "reason": evil, "idempotency_key": evil, "meta": {evil: evil}}
            assert await client.cancel(number, **about) == "cancelled"
            assert await client.cancel(number, **about) == "cancelled"
            assert await client.retry(number, **about) == number
            found = await client.receipts(number)
            assert [each.command for each in found] == ["retry", "cancel"]
            assert {(each.by, each.reason, each.idempotency_key, each.data[evil]) for each in found} == {
                (evil,) * 4
            }
            with pytest.raises(da.NoTarget):
                await client.cancel(f"{evil} nobody")
    assert conn.execute("select count(*) from canary").fetchone() == (0,)
