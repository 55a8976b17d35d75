"""What a user does after a hand has changed rows and records: `rebuild`, `accept`, `recover`, and their traces."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import durable_actors as da
import msgspec
import psycopg
import pytest
from durable_actors import _history
from durable_actors._store import dialogues, history as history_module
from durable_actors.client import find_client
from durable_actors.machine import isolated_registry
from durable_actors.testing import Bench
from psycopg.types.json import Jsonb
from tests.engine.kit import QUIET, Gate, gated, running

LIVE = ("runnable", "executing", "awaiting_signal", "awaiting_children")


@pytest.fixture
def ran() -> list[str]:
    return []


@pytest.fixture(autouse=True)
def _machines(ran: list[str]) -> Iterator[None]:
    with isolated_registry():

        class Pay(da.Machine[Any], name="pay", journal="full"):
            @da.step(initial=True)
            async def charge(self, ctx: da.Context[Any]) -> da.Outcome:
                ran.append(ctx.idempotency_key)
                return da.Done("paid")

        class Wait(da.Machine[Any], name="wait", journal="full"):
            @da.step(initial=True)
            async def ask(self, ctx: da.Context[Any]) -> da.Outcome:
                return da.Await("go", then=self.answer)

            @da.step
            async def answer(self, ctx: da.Context[Any]) -> da.Outcome:
                return da.Done([signal.payload for signal in ctx.awaited])

        global PAY, WAIT
        PAY, WAIT = Pay, Wait
        yield


PAY: Any
WAIT: Any


def by_hand(bench: Bench, statement: str, *params: object) -> None:
    """As a superuser who knows what the trigger protects."""
    with psycopg.connect(bench.dsn) as conn:
        conn.execute("set local session_replication_role = replica")
        conn.execute(statement, params)


async def reasons(target: int | str) -> list[str]:
    return [each.reason for each in (await da.verify(target)).problems]


async def kinds(bench: Bench, number: int) -> list[str]:
    return [record.kind for record in await bench.history(number)]


# -- rebuild


async def test_a_row_that_is_further_than_its_records_is_not_taken_back(durable: Bench, ran: list[str]):
    """The record of its end is lost: to believe the rest would charge again."""
    number = await durable.insert(PAY)
    await durable.drain()
    by_hand(durable, "delete from durable.journal where rev = 3")
    assert await reasons(number) == ["gap"]
    with pytest.raises(
        da.InvalidJournalEntry, match="revision 3: missing: the row is at revision 3, and differs"
    ) as no:
        await da.rebuild(number)
    assert "at_last_record" in str(no.value)
    await durable.drain()
    assert (len(ran), await da.receipts(number)) == (1, [])
    await durable.assert_done(number, result="paid")
    assert await da.rebuild(number, at_last_record=True, reason="it was not paid") == number
    await durable.drain()
    assert len(ran) == 2, "asked for, the row goes back, and its step runs again"
    assert await reasons(number) == []


async def test_a_rev_that_a_hand_has_changed_is_set_right(durable: Bench):
    number = await durable.insert(WAIT)
    await durable.drain()
    by_hand(durable, "update durable.gen_durable set rev = 99")
    assert await reasons(number) == ["rev_mismatch"]
    await da.rebuild(number)
    assert await reasons(number) == []
    assert (await kinds(durable, number))[-1] == "snapshot"


@pytest.mark.parametrize("lost", ["rev = 1", "true"])
async def test_a_first_record_that_is_missing_is_named(durable: Bench, lost: str):
    """The row says "full": nobody is told that nothing was recorded."""
    number = await durable.insert(PAY)
    await durable.drain()
    by_hand(durable, f"delete from durable.journal where {lost}")
    for read in (durable.history, da.rebuild):
        with pytest.raises(da.InvalidJournalEntry, match="revision 1: missing") as raised:
            await read(number)
        assert raised.value.rev == 1
    by_hand(durable, "delete from durable.gen_durable")
    if lost != "true":
        with pytest.raises(da.InvalidJournalEntry, match="revision 1: missing"):
            await da.rebuild(number)


async def test_a_rebuild_is_in_the_history_if_it_repaired_something(durable: Bench):
    number = await durable.insert(WAIT, unique_key="k", meta={"a": 1}, tags=["t"])
    await durable.drain()
    before = await kinds(durable, number)
    await da.rebuild(number)
    assert await kinds(durable, number) == before, "the row was right"
    by_hand(durable, "update durable.gen_durable set state = '5', priority = 7")
    await da.rebuild(number, by="ann", reason="edited by hand")
    record = (await durable.history(number))[-1]
    assert (record.kind, record.by) == ("snapshot", "ann")
    assert record.data["command"] == {"type": "rebuild", "reason": "edited by hand", "metadata": {}}
    by_hand(durable, "delete from durable.gen_durable")
    await da.rebuild(number, by="bob")
    assert [(each.kind, each.by) for each in await durable.history(number)][-2:] == [
        ("snapshot", "ann"),
        ("snapshot", "bob"),
    ]
    assert await reasons(number) == []
    await durable.signal("k", "go", 1)
    await durable.drain()
    await durable.assert_done(number, result=[1])
    assert await reasons(number) == []


# -- accept


async def test_an_instance_that_went_on_after_an_edit_is_accepted(durable: Bench):
    """Case: a parked row is made runnable by hand, and a worker runs it. The row is right, its records are not."""
    number = await durable.insert(WAIT)
    await durable.drain()
    by_hand(durable, "update durable.gen_durable set status = 'runnable'")
    await durable.drain()
    assert "anomaly" in await reasons(number)
    with pytest.raises(da.Conflict, match="anomalies"):
        await da.rebuild(number)
    row = await durable.inspect(number)
    assert await da.accept(number, by="ann", reason="the step was idempotent") == number
    assert await reasons(number) == []
    assert await da.anomalies(number) == []
    record = (await durable.history(number))[-1]
    assert (record.kind, record.by, record.data["command"]["type"]) == ("snapshot", "ann", "accept")
    [receipt] = await da.receipts(number)
    assert (receipt.command, receipt.by, receipt.reason) == ("accept", "ann", "the step was idempotent")
    accepted = await durable.inspect(number)
    assert (accepted.status, accepted.state, accepted.step) == (row.status, row.state, row.step)
    await durable.signal(number, "go", 2)
    await durable.drain()
    assert await reasons(number) == []
    by_hand(durable, "update durable.gen_durable set result = '3'")
    assert await reasons(number) == ["divergence"], "from here on, the journal is believed again"
    await da.rebuild(number)
    await durable.assert_done(number, result=[2])


@pytest.mark.parametrize(
    "damage",
    [
        "delete from durable.journal",
        "delete from durable.journal where rev = 1",
        "delete from durable.journal where rev = 2",
        "delete from durable.journal where rev = 3",
        "update durable.journal set kind = 'flew' where rev = 2",
        "update durable.journal set claim_id = gen_random_uuid() where rev = 3",
        "update durable.gen_durable set queue = 'other', fsm = 'pay', unique_key = 'k2'",
        "update durable.gen_durable set rev = 1",
    ],
)
@pytest.mark.parametrize("level", ["outcomes", "claims", "full"])
async def test_whatever_is_wrong_can_be_accepted(durable: Bench, damage: str, level: Any):
    number = await durable.insert(WAIT, unique_key="k", journal=level)
    await durable.drain()
    by_hand(durable, damage)
    await da.accept(number)
    assert await reasons(number) == []
    assert (await durable.history(number))[-1].data["command"]["type"] == "accept"
    if level == "full":
        by_hand(durable, "update durable.gen_durable set state = '77'")
        await da.rebuild(number)
        assert (await durable.inspect(number)).state != 77
        assert await reasons(number) == []


@pytest.mark.parametrize("page", [1, 2, 1000])
async def test_what_is_damaged_before_an_acceptance_is_told_in_its_place(
    durable: Bench, page: int, monkeypatch: pytest.MonkeyPatch
):
    """History, states and export begin where they can be read, and name what cannot."""
    monkeypatch.setattr(_history, "PAGE", page)
    monkeypatch.setattr(history_module, "PAGE", page)
    number = await durable.insert(WAIT, journal="full")
    await durable.drain()
    by_hand(durable, "update durable.journal set kind = 'flew' where rev = 2")
    with pytest.raises(da.InvalidJournalEntry, match="revision 2: unknown kind 'flew'"):
        await durable.history(number)
    await da.accept(number)
    await durable.signal(number, "go", 2)
    await durable.drain()
    found = [each async for each in da.iter_history(number)]
    kinds = ["started", "damaged", "parked", "snapshot", "woken", "claimed", "done"]
    assert [each.kind for each in found] == kinds
    damaged = found[1]
    assert damaged.error is not None
    assert (damaged.rev, damaged.error.text) == (2, "unknown kind 'flew'")
    assert found[0].at <= damaged.at <= found[2].at
    assert [each.kind for each in await durable.history(number, limit=2)] == kinds[:2]
    assert await da.state_at(number, 1) == await da.state_at(number, 4)
    with pytest.raises(da.Conflict, match="a record before revision 4 is damaged or missing; there the row"):
        await da.state_at(number, 3)
    assert "status" in await da.diff(number, 4, 5)
    lines = [line async for line in da.export_history(number)]
    assert [msgspec.json.decode(line)["rev"] for line in lines] == [1, 4, 5, 6, 7]
    by_hand(durable, "delete from durable.gen_durable")
    by_hand(durable, f"select durable.forget(array[{number}::bigint])")
    assert await da.import_history(lines) == number
    by_hand(durable, "update durable.journal set kind = 'flew' where rev = 6")
    with pytest.raises(da.InvalidJournalEntry, match="revision 6: unknown kind 'flew'"):
        await durable.history(number)


async def test_a_running_instance_is_accepted_and_goes_on(durable_dsn: str, registry: object):
    gate = Gate()
    machine = gated(gate, runs=[], journal="full")
    async with running(durable_dsn, **QUIET) as run:
        number = await run.insert(machine)
        await gate.wait_entered()
        await da.accept(number)
        assert (await da.verify()).problems == []
        gate.open()
        assert (await run.ended(number)).result == "finished"
        assert (await da.verify()).problems == []
        assert [each.kind for each in await da.history(number)] == ["started", "claimed", "snapshot", "done"]


async def test_what_cannot_be_accepted(durable: Bench):
    off = await durable.insert(WAIT, journal="off")
    endless = await durable.insert(WAIT)
    by_hand(durable, "update durable.gen_durable set eligible_at = 'infinity' where id = %s", endless)
    with pytest.raises(da.NoTarget, match="there is no instance 99"):
        await da.accept(99)
    with pytest.raises(da.Conflict, match=r"has no journal \(level 'off'\)"):
        await da.accept(off)
    with pytest.raises(da.Conflict, match="infinite"):
        await da.accept(endless)
    assert await da.receipts() == []


async def test_an_acceptance_with_a_key_is_carried_out_once(durable: Bench):
    number = await durable.insert(WAIT)
    for _ in range(2):
        await da.accept(number, idempotency_key="k")
    assert (await kinds(durable, number)).count("snapshot") == 1
    async with await da.TrioConnection.connect(durable.dsn) as conn:
        await conn.execute("set bytea_output = escape")
        await da.accept(number, conn=conn, meta={"password": "x"})
        assert len(await da.receipts(number)) == 1, "not before the caller commits"
    assert await reasons(number) == []
    assert (await da.receipts(number))[0].data == {"password": "[redacted]"}


# -- recover


async def test_recover_leaves_receipts(durable: Bench):
    number = await durable.insert(WAIT)
    await durable.drain()
    by_hand(
        durable,
        "insert into durable.signals (target_id, name, payload) values (%s, 'go', %s)",
        number,
        Jsonb(1),
    )
    assert (await da.recover(by="ann", reason="restored backup")).woken == (number,)
    assert (await da.recover(by="ann")).changed is False
    [receipt] = await da.receipts(number)
    assert (receipt.command, receipt.by, receipt.reason, receipt.result) == (
        "recover",
        "ann",
        "restored backup",
        "woken",
    )


# -- what one is told


async def test_a_signal_that_did_not_wake_is_told(durable: Bench):
    number = await durable.insert(WAIT)
    await durable.drain()
    assert (await da.explain(number)).blockers[0].text == "no signal named 'go' has arrived"
    by_hand(durable, "insert into durable.signals (target_id, name) values (%s, 'go')", number)
    told = await da.explain(number)
    assert told.summary.endswith("one is in its inbox and did not wake it: `durable-actors recover` does")
    assert told.blockers[0].text == (
        "a signal named 'go' is in its inbox and did not wake it: `durable-actors recover`"
    )
    assert told.next_actions[0].command == "durable-actors recover"
    assert told.evidence["journal"] == "full"
    await da.recover()
    await durable.drain()
    await durable.assert_done(number)


async def test_a_signal_that_was_kept_is_told(durable: Bench):
    class Keeps(da.Machine[Any], name="keeps"):
        @da.step
        async def start(self, ctx: da.Context[Any]) -> da.Outcome:
            return da.Await("go")  # a signal that is awaited again is kept

    number = await durable.insert(Keeps)
    await durable.signal(number, "go")
    await durable.drain()
    told = await da.explain(number)
    assert told.blockers[0].text == (
        "it has kept the signals named 'go' that it was handed, and no other one has arrived"
    )
    assert "recover" not in told.summary


async def test_barriers_that_cannot_be_right_are_told(durable: Bench):
    class Parent(da.Machine[Any], name="parent", journal="full"):
        @da.step(initial=True)
        async def spawn(self, ctx: da.Context[Any]) -> da.Outcome:
            return da.ScheduleChildren(self.join, [da.Child(WAIT), da.Child(WAIT)])

        @da.step
        async def join(self, ctx: da.Context[Any]) -> da.Outcome:
            return da.Done(len(ctx.children))

    number = await durable.insert(Parent)
    await durable.drain()
    healthy = (await da.explain(number)).summary
    assert healthy == "it waits for 2 more of 2 children, then runs step 'join'"
    for pending in (5, 0):
        by_hand(
            durable, "update durable.gen_durable set children_pending = %s where id = %s", pending, number
        )
        told = await da.explain(number)
        assert told.summary.endswith("; that cannot be right: `durable-actors recover` recounts them")
        assert told.next_actions[0].command == "durable-actors recover"
    await da.recover()
    assert (await da.explain(number)).summary == healthy
    with psycopg.connect(durable.dsn, autocommit=True) as conn:
        [child, other] = [
            number
            for (number,) in conn.execute("select id from durable.gen_durable where fsm = 'wait' order by id")
        ]
        conn.execute("delete from durable.gen_durable where id = %s", [child])
    told = await da.explain(number)
    assert told.summary == f"{healthy}; 1 child has no row: `durable-actors verify`"
    assert "durable-actors verify" in [each.command for each in told.next_actions]
    [problem] = (await da.verify()).problems
    assert (problem.instance_id, problem.reason) == (child, "missing_row")
    await da.rebuild(child)
    for each in (child, other):
        await durable.signal(each, "go")
    await durable.drain()
    await durable.assert_done(number, result=2)


async def test_a_row_that_is_gone_and_its_journal_that_is_not(durable: Bench):
    number = await durable.insert(WAIT, unique_key="order:1")
    await durable.drain()
    by_hand(durable, "delete from durable.gen_durable")
    for look in (da.inspect, da.explain):
        with pytest.raises(
            da.NoTarget, match=rf"its row is gone, its journal is not; `durable-actors rebuild {number}`"
        ):
            await look(number)
        with pytest.raises(da.NoTarget, match=r"there is no instance 99$"):
            await look(99)
        with pytest.raises(da.NoTarget, match="`durable-actors verify` tells its id"):
            await look("order:1")
    [problem] = (await da.verify()).problems
    assert problem.detail.endswith("; it was of machine 'wait', with unique key 'order:1'")


async def test_a_row_that_is_gone_is_rebuilt_by_its_unique_key(
    durable: Bench, monkeypatch: pytest.MonkeyPatch
):
    """The records name the key. Of several that had it, the newest; live rows and other keys are not meant."""
    monkeypatch.setattr(dialogues, "LOST_BATCH", 2)
    numbers = []
    for key in ("old", "a", "old", "b", "c"):
        numbers.append(await durable.insert(WAIT, unique_key=key, unique_scope=[*LIVE]))
        by_hand(durable, f"delete from durable.gen_durable where id = {numbers[-1]} and '{key}' = 'old'")
    for name in ("history", "state_at"):
        with pytest.raises(da.NoTarget, match="`rebuild` finds it by the key"):
            await (da.history("old") if name == "history" else da.state_at("old", 1))
    client = find_client(None)
    number, page = await client.damaged_history(b"old")
    assert (number, [each.kind for each in page.records]) == (numbers[2], ["started"])
    assert await da.rebuild("old") == numbers[2]
    assert (await durable.inspect("old")).id == numbers[2]
    with pytest.raises(
        da.NoTarget, match="no instance has or had the unique key 'z', and no record names it"
    ):
        await da.rebuild("z")


async def test_what_verify_has_nothing_to_say_about(durable: Bench):
    off = await durable.insert(WAIT, journal="off", unique_key="q:1")
    full = await durable.insert(PAY)
    for check in (da.verify, da.anomalies):
        for target in (off, "q:1", b"q:1"):
            with pytest.raises(da.Conflict, match=rf"instance {off} has no journal \(level 'off'\)"):
                await check(target)
        with pytest.raises(da.NoTarget, match=f"instance {full} is of machine 'pay', not of 'wait'"):
            await check(full, machine="wait")
        with pytest.raises(da.NoTarget, match="there is no instance 99, and no record of one"):
            await check(99)


async def test_a_row_that_is_never_due(durable: Bench):
    number = await durable.insert(WAIT)
    by_hand(durable, "update durable.gen_durable set eligible_at = 'infinity'")
    assert "inf" not in (await da.explain(number)).summary.replace("infinity", "")
    assert (await da.explain(number)).summary.startswith("it is scheduled: due never")
