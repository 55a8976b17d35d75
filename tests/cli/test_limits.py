"""`durable-actors limits`: what it lists, and the commands on one."""

from __future__ import annotations

import psycopg
import pytest
import trio
from durable_actors._limits import Limit
from durable_actors._postgres.driver.connection import PgConn
from durable_actors._store.limits import declare_limits
from tests.cli.conftest import Shell
from tests.store.kit import connect, insert, pick


@pytest.fixture
def busy(shell: Shell, durable_dsn: str) -> Shell:
    """A rate with three that wait, a slot that is taken, and a limit that nobody has declared."""

    async def use() -> None:
        conn = await PgConn.open(durable_dsn)
        await declare_limits(conn, "durable", {"api": Limit(1, per=60), "gpu": Limit(slots=1)}, node="here")
        conn.close()
        with psycopg.connect(durable_dsn, autocommit=True) as db:
            insert(db, 4, rate_limit="api:acme")
            insert(db, 2, rate_limit="!gpu")
            insert(db, 1, rate_limit="nobody")
        async with connect(durable_dsn) as claiming:
            await pick(claiming)

    trio.run(use)
    return shell


def test_nothing(shell: Shell) -> None:
    assert "no limits" in shell.ok("limits")
    assert shell.json("limits") == []
    assert "was not set by an operator" in shell.refused("limits", "clear", "x")


def test_who_waits_and_who_has_the_slots(busy: Shell) -> None:
    api, gpu, nobody = busy.json("limits")
    [acme], [slot], [strange] = api["keys"], gpu["keys"], nobody["keys"]
    assert (acme["key"], acme["waiting"], acme["next_at"] is not None) == ("api:acme", 3, True)
    assert (slot["waiting"], len(slot["holders"])) == (1, 1)
    assert (nobody["known"], strange["waiting"]) == (False, 1)
    text = busy.ok("limits")
    [queue] = busy.json("queues", "--quick")
    assert (queue["due"], queue["throttled"], queue["executing"]) == (0, 5, 2)
    assert "throttled" in busy.ok("queues")
    assert "5 instances waiting, and no live worker serves it" in busy.run("doctor").output
    assert "nobody has declared it" in text
    assert "one token in 60 s, burst 1" in text
    assert f"slots are taken, by instances {slot['holders'][0]}" in busy.ok("why", "6")


def test_an_operators_word_counts_until_it_is_cleared(busy: Shell, durable_dsn: str) -> None:
    busy.ok(
        "limits", "set", "api", "--rate", "10", "--per", "1s", "--by", "ann", "--reason", "they allow more"
    )
    text = busy.ok("limits")
    assert "one token in 0.1 s, burst 10; set by ann: they allow more; the code says per=60, rate=1" in text

    async def declare_again() -> None:
        conn = await PgConn.open(durable_dsn)
        await declare_limits(conn, "durable", {"api": Limit(2, per=60)}, node="later")
        conn.close()

    trio.run(declare_again)
    assert "one token in 0.1 s" in busy.ok("limits"), "a deploy does not undo it"
    busy.ok("limits", "clear", "api")
    assert "one token in 30 s, burst 2" in busy.ok("limits")
    assert "they allow more" in busy.ok("audit")
    assert "rate" in busy.refused("limits", "set", "api", "--rate", "0")


def test_what_is_not_set_stays_as_it_is(busy: Shell) -> None:
    """A new rate must not take the slots away: what uses them would run without a limit."""
    busy.ok("limits", "set", "gpu", "--rate", "10", "--per", "1m")
    [_, gpu, _] = busy.json("limits")
    assert (gpu["interval"], gpu["burst"], gpu["slots"]) == (6, 10, 1)
    busy.ok("limits", "set", "gpu", "--slots", "3", "--on-full", "drop", "--held", "instance")
    [_, gpu, _] = busy.json("limits")
    assert (gpu["interval"], gpu["slots"], gpu["on_full"], gpu["held"]) == (6, 3, "drop", "instance")
    assert "3 slots, kept by the instance; what finds it full is dropped" in busy.ok("limits")
    busy.ok("limits", "clear", "gpu")
    [_, gpu, _] = busy.json("limits")
    assert (gpu["interval"], gpu["slots"], gpu["on_full"], gpu["held"]) == (None, 1, "wait", "step")


def test_a_key_is_released(busy: Shell, durable_dsn: str) -> None:
    assert busy.json("limits", "release", "api:acme", "--by", "ann") == {
        "name": "api:acme",
        "result": "released",
    }
    api = busy.json("limits")[0]
    assert api["keys"][0]["spent"] == 0
    assert "no token of limit 'api:globex' is spent" in busy.refused("limits", "release", "api:globex")
    assert "instance 5 keeps no slot" in busy.refused("limits", "release", "gpu", "--id", "5")
    with psycopg.connect(durable_dsn) as db:
        assert db.execute("select command, target, by from durable.receipts").fetchall() == [
            ("release", "api:acme", "ann")
        ]
