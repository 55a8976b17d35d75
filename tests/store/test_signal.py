"""Signals: delivered once, to the living, by id and by key; and their SQL functions (H26, H55, H56)."""

from __future__ import annotations

import psycopg
import pytest
import trio
from durable_actors._store.commit import commit_outcomes
from durable_actors._store.signal import (
    MAX_NAME_BYTES,
    MAX_PAYLOAD_BYTES,
    PAGE_SIZE,
    Sent,
    plan_signal,
    read_awaited,
    read_inboxes,
    read_matching,
    read_signals,
    send_signals,
    signal_from_step,
    start_with_signal,
)
from durable_actors.errors import ConfigError, StateError
from tests.store.kit import EXPIRE, SCHEMA, claims, connect, insert, outcome, plan, rows
from tests.store.stepping import commit, deliver, play, sends
from tests.support.sql import count_statements

LIVE = ("runnable", "executing", "awaiting_signal", "awaiting_children")


def inbox(db: psycopg.Connection) -> list[tuple]:
    query = (
        "select target_id, name, payload, dedup_key, consumed_at is not null from durable.signals order by id"
    )
    return db.execute(query).fetchall()


def keyed(db: psycopg.Connection, key: str, scope: tuple[str, ...] = LIVE) -> int:
    return insert(db, unique_key=key.encode(), unique_scope="='{" + ",".join(scope) + "}'")[0]


async def test_by_id_and_by_key_in_input_order(db: psycopg.Connection, durable_dsn: str):
    a, b = keyed(db, "a"), keyed(db, "b")
    async with connect(durable_dsn) as conn:
        sent = await send_signals(
            conn,
            SCHEMA,
            [deliver("b", "1"), deliver(a, "2"), deliver(999, "3"), deliver("zz", "4"), deliver(b, "5")],
        )
    assert sent == [
        Sent(b, "sent", "default", woken=False),
        Sent(a, "sent", "default", woken=False),
        Sent(None, "no_target", None, woken=False),
        Sent(None, "no_target", None, woken=False),
        Sent(b, "sent", "default", woken=False),
    ]
    assert [(target, name) for target, name, *_ in inbox(db)] == [(b, "1"), (a, "2"), (b, "5")]
    assert rows(db, "id, inbox, status") == [(a, True, "runnable"), (b, True, "runnable")]


async def test_one_statement_however_many(db: psycopg.Connection, durable_dsn: str):
    targets = insert(db, 50)
    async with connect(durable_dsn) as conn:
        await send_signals(conn, SCHEMA, [deliver(targets[0])])
        with count_statements(durable_dsn) as counted:
            await send_signals(conn, SCHEMA, [deliver(number) for number in targets * 3])
        assert counted.total == 1
        assert await send_signals(conn, SCHEMA, []) == []
    assert len(inbox(db)) == 151


@pytest.mark.parametrize("status", ["done", "failed", "cancelled"])
async def test_an_ended_instance_is_no_target(db: psycopg.Connection, durable_dsn: str, status: str):
    [number] = insert(db, status=status, finished_at="=now()", unique_key=b"k")
    async with connect(durable_dsn) as conn:
        sent = await send_signals(conn, SCHEMA, [deliver(number), deliver("k")])
    assert [each.outcome for each in sent] == ["no_target", "no_target"]
    assert inbox(db) == []
    assert rows(db, "rev, inbox") == [(1, False)], "nothing was written"


async def test_the_key_addresses_who_occupies_it_now(db: psycopg.Connection, durable_dsn: str):
    async with connect(durable_dsn) as conn:
        keyed(db, "k")
        [claim] = await claims(conn)
        await commit(conn, outcome(claim, "done"))
        new = keyed(db, "k")
        [sent] = await send_signals(conn, SCHEMA, [deliver("k")])
        assert sent.target == new


async def test_a_key_whose_instance_ends_meanwhile_is_no_target(db: psycopg.Connection, durable_dsn: str):
    """H56, by key: resolved to a living instance, which has ended when the lock is ours."""
    keyed(db, "k")
    async with connect(durable_dsn) as one, connect(durable_dsn) as two:
        [claim] = await claims(one)

        async def end(conn) -> None:
            await commit(conn, outcome(claim, "done"))

        done = await play(db, "dsds", {"d": (one, end), "s": (two, sends(deliver("k")))})
    assert [each.outcome for each in done["s"]] == ["no_target"]
    assert inbox(db) == []


async def test_wakes_only_who_awaits_the_name(db: psycopg.Connection, durable_dsn: str):
    parked = {"status": "awaiting_signal", "await_step": "then", "await_deadline": "=now() + interval '1 h'"}
    [a] = insert(db, awaits="='{x,y}'::text[]", **parked)
    [b] = insert(db, awaits="='{z}'::text[]", **parked)
    [c] = insert(db, **{**parked, "status": "awaiting_children"}, children_pending=1)
    async with connect(durable_dsn) as conn:
        sent = await send_signals(conn, SCHEMA, [deliver(n, "y") for n in (a, b, c)])
    assert [each.woken for each in sent] == [True, False, False]
    columns = "status, step, await_step, await_deadline is null, awaits, rev"
    assert rows(db, columns) == [
        ("runnable", "then", None, True, ["x", "y"], 2),
        ("awaiting_signal", "s", "then", False, ["z"], 1),
        ("awaiting_children", "s", "then", False, None, 1),
    ]


async def test_dedup_within_a_batch_across_calls_and_after_consumption(
    db: psycopg.Connection, durable_dsn: str
):
    a, b = insert(db, 2)
    async with connect(durable_dsn) as conn:
        sent = await send_signals(
            conn,
            SCHEMA,
            [deliver(a, key="1", payload=b"1"), deliver(a, key="1", payload=b"2"), deliver(b, key="1")],
        )
        assert [each.outcome for each in sent] == ["sent", "duplicate", "sent"]
        [again] = await send_signals(conn, SCHEMA, [deliver(a, "other name", key="1")])
        assert again.outcome == "duplicate"
        [first, _] = await claims(conn)
        signals = (await read_inboxes(conn, SCHEMA, [a]))[a]
        await commit(conn, outcome(first, "runnable", step="t", advance=1, consumed=[s.id for s in signals]))
        assert inbox(db)[0] == (a, "go", 1, "1", True), "a tombstone"
        [after] = await send_signals(conn, SCHEMA, [deliver(a, key="1")])
        assert (after.outcome, after.woken) == ("duplicate", False)
        assert await read_inboxes(conn, SCHEMA, [a]) == {a: []}


async def test_a_duplicate_does_not_wake(db: psycopg.Connection, durable_dsn: str):
    [number] = insert(db)
    async with connect(durable_dsn) as conn:
        await send_signals(conn, SCHEMA, [deliver(number, key="1")])
        [claim] = await claims(conn)
        [signal] = (await read_inboxes(conn, SCHEMA, [number]))[number]
        await commit(conn, outcome(claim, "awaiting_signal", awaits=("go",), consumed=(signal.id,)))
        [sent] = await send_signals(conn, SCHEMA, [deliver(number, key="1")])
        assert (sent.outcome, sent.woken) == ("duplicate", False)
        assert rows(db, "status") == [("awaiting_signal",)]


async def test_concurrent_equal_dedup_keys_give_one_signal(db: psycopg.Connection, durable_dsn: str):
    [number] = insert(db)
    outcomes: list[str] = []
    async with (
        connect(durable_dsn, lock_timeout="0") as one,
        connect(durable_dsn, lock_timeout="0") as two,
        connect(durable_dsn, lock_timeout="0") as three,
    ):

        async def send(conn) -> None:
            for key in range(10):
                [sent] = await send_signals(conn, SCHEMA, [deliver(number, key=str(key))])
                outcomes.append(sent.outcome)

        async with trio.open_nursery() as nursery:
            for conn in (one, two, three):
                nursery.start_soon(send, conn)
    assert sorted(outcomes) == ["duplicate"] * 20 + ["sent"] * 10
    assert len(inbox(db)) == 10


def test_sql_functions_for_any_language(db: psycopg.Connection):
    number = keyed(db, "order:42")

    def ask(call: str) -> object:
        return db.execute(f"select durable.{call}").fetchone()[0]  # type: ignore[index]

    assert ask(f"signal({number}, 'paid', '{{\"amount\": 100}}', 'evt-7')") == "sent"
    assert ask(f"signal({number}, 'paid', '{{}}', 'evt-7')") == "duplicate"
    assert ask("signal('order:42', 'paid')") == "sent"
    assert ask("signal('order:42', 'paid', null)") == "sent"
    assert ask(f"signal(target => {number}, name => 'named', dedup_key => 'd')") == "sent"
    assert ask("signal('order:43', 'paid')") == "no_target"
    assert ask("signal(0, 'paid')") == "no_target"
    assert inbox(db) == [
        (number, "paid", {"amount": 100}, "evt-7", False),
        (number, "paid", {}, None, False),
        (number, "paid", None, None, False),
        (number, "named", {}, "d", False),
    ]


def test_the_sql_function_joins_the_callers_transaction(db: psycopg.Connection, durable_dsn: str):
    [number] = insert(db, status="awaiting_signal", awaits="='{go}'::text[]")
    with psycopg.connect(durable_dsn) as caller:
        caller.execute("select durable.signal(%s, 'go')", [number])
        assert rows(db, "status") == [("awaiting_signal",)], "not before the commit"
        caller.rollback()
        assert inbox(db) == []
        caller.execute("select durable.signal(%s, 'go')", [number])
        caller.commit()
    assert rows(db, "status") == [("runnable",)]


async def test_a_stale_step_sends_nothing(db: psycopg.Connection, durable_dsn: str):
    sender, target = insert(db, 2)
    async with connect(durable_dsn) as conn:
        claim, _ = await claims(conn)
        assert [s.outcome for s in await signal_from_step(conn, SCHEMA, claim, [deliver(target)]) or []] == [
            "sent"
        ]
        db.execute(EXPIRE)
        db.execute(
            "update durable.gen_durable set status = 'runnable', claim_id = null, locked_by = null,"
            " lease_expires_at = null where id = %s",
            [sender],
        )
        assert await signal_from_step(conn, SCHEMA, claim, [deliver(target)]) is None
        await claims(conn)
        assert await signal_from_step(conn, SCHEMA, claim, [deliver(target)]) is None, "claimed by another"
    assert len(inbox(db)) == 1


async def test_start_with_signal_starts_or_delivers(db: psycopg.Connection, durable_dsn: str):
    row = plan(unique_key=b"k", unique_scope=LIVE)
    async with connect(durable_dsn, "client") as conn:
        sent, new = await start_with_signal(conn, SCHEMA, row, deliver("k"))
        again, newer = await start_with_signal(conn, SCHEMA, row, deliver("k"))
    assert (new, newer) == (True, False)
    assert sent.target == again.target is not None
    assert len(inbox(db)) == 2


async def test_start_with_signal_starts_anew_when_the_occupant_ends(db: psycopg.Connection, durable_dsn: str):
    """The key was occupied when the insert looked, and free when the signal looked."""
    old = keyed(db, "k")
    async with connect(durable_dsn) as one, connect(durable_dsn) as two:
        [claim] = await claims(one)

        async def end(conn) -> None:
            await commit(conn, outcome(claim, "done"))

        async def start(conn):
            return await start_with_signal(
                conn, SCHEMA, plan(unique_key=b"k", unique_scope=LIVE), deliver("k")
            )

        # s: insert finds it occupied · d: end, commit · s: signal finds nobody, commit (of nothing) · s: again
        done = await play(db, "sddsssss", {"d": (one, end), "s": (two, start)})
    sent, new = done["s"]
    assert new
    assert sent.outcome == "sent"
    assert sent.target not in {None, old}


async def test_start_with_signal_gives_up_on_a_key_held_beyond_the_end(
    db: psycopg.Connection, durable_dsn: str
):
    scope = (*LIVE, "done", "failed", "cancelled")
    keyed(db, "k", scope)
    async with connect(durable_dsn) as conn:
        [claim] = await claims(conn)
        await commit(conn, outcome(claim, "done"))
        sent, new = await start_with_signal(
            conn, SCHEMA, plan(unique_key=b"k", unique_scope=scope), deliver("k")
        )
    assert (sent.outcome, new) == ("no_target", False)


async def test_large_inboxes_are_paged(db: psycopg.Connection, durable_dsn: str):
    big, small = insert(db, 2)
    db.execute(
        "insert into durable.signals (target_id, name, payload)"
        " select %s, case when n %% 4 = 0 then 'rare' else 'noise' end, to_jsonb(n)"
        " from generate_series(1, 5000) n",
        [big],
    )
    async with connect(durable_dsn) as conn:
        await send_signals(conn, SCHEMA, [deliver(small, payload=b'"s"')])
        found = await read_inboxes(conn, SCHEMA, [big, small])
        assert [signal.payload for signal in found[big]] == list(range(1, PAGE_SIZE + 1))
        assert [signal.payload for signal in found[small]] == ["s"]
        rare = await read_awaited(conn, SCHEMA, big, ["rare"])
        assert [signal.payload for signal in rare] == list(range(4, 4 * PAGE_SIZE + 1, 4))
        assert len(await read_matching(conn, SCHEMA, big, ["rare"])) == 1250
        page = await read_signals(conn, SCHEMA, big, after=found[big][-1].id, limit=10)
        assert [signal.payload for signal in page] == list(range(PAGE_SIZE + 1, PAGE_SIZE + 11))


async def test_the_recheck_of_a_large_pack_is_cheap(db: psycopg.Connection, durable_dsn: str):
    """10,000 kept signals: an anti-join without hash joins compares 100 million pairs."""
    [number] = insert(db)
    db.execute(
        "insert into durable.signals (target_id, name) select %s, 'go' from generate_series(1, 10000)",
        [number],
    )
    async with connect(durable_dsn) as conn:
        [claim] = await claims(conn)
        kept = await read_matching(conn, SCHEMA, number, ["go"])
        with trio.fail_after(5):
            await commit(conn, outcome(claim, "awaiting_signal", awaits=("go",), kept=kept))
        assert rows(db, "status") == [("awaiting_signal",)]


async def test_the_lock_is_never_waited_for_in_another_order(db: psycopg.Connection, durable_dsn: str):
    """Batches of signals and group commits over the same rows, in opposite orders, do not deadlock."""
    numbers = insert(db, 20)
    async with connect(durable_dsn, lock_timeout="0") as one, connect(durable_dsn, lock_timeout="0") as two:
        for _ in range(10):
            found = await claims(one)
            retry = [outcome(each, "runnable") for each in reversed(found)]
            async with trio.open_nursery() as nursery:
                nursery.start_soon(lambda retry=retry: commit_outcomes(one, SCHEMA, retry, accept_late=True))
                nursery.start_soon(send_signals, two, SCHEMA, [deliver(n) for n in reversed(numbers)])


@pytest.mark.parametrize(
    ("target", "name", "dedup"),
    [
        (0, "n", None),
        (-1, "n", None),
        (2**63, "n", None),
        (True, "n", None),
        (1.5, "n", None),
        (None, "n", None),
        ("\ud800", "n", None),
        (1, "", None),
        (1, None, None),
        (1, 5, None),
        (1, "a\0b", None),
        (1, "\ud800", None),
        (1, "n" * (MAX_NAME_BYTES + 1), None),
        (1, "é" * MAX_NAME_BYTES, None),
        (1, "n", ""),
        (1, "n", 5),
        (1, "n", "\udfff"),
        (1, "n", "d" * (MAX_NAME_BYTES + 1)),
    ],
)
def test_bad_addresses_are_told(target: object, name: object, dedup: object):
    with pytest.raises(ConfigError):
        plan_signal(target, name, None, dedup)


@pytest.mark.parametrize(
    "payload", [object(), {"x": float("nan")}, "a\0b", "\ud800", "x" * (MAX_PAYLOAD_BYTES + 1)]
)
def test_bad_payloads_are_told(payload: object):
    with pytest.raises(StateError, match="payload of signal 'paid'"):
        plan_signal(1, "paid", payload, None)


async def test_payloads_come_back(db: psycopg.Connection, durable_dsn: str):
    payloads = [None, 0, "", [], {}, [None], {"a": {"b": [1, "ü", True]}}, 10**400, 1e-320]
    [number] = insert(db)
    async with connect(durable_dsn) as conn:
        await send_signals(conn, SCHEMA, [plan_signal(number, "n", each, None) for each in payloads])
        found = (await read_inboxes(conn, SCHEMA, [number]))[number]
    assert [signal.payload for signal in found] == payloads


async def test_a_payload_that_python_cannot_hold_spoils_nothing(db: psycopg.Connection, durable_dsn: str):
    """From SQL anybody may send it; the inbox, and those read together with it, must stay readable."""
    a, b = insert(db, 2)
    for target, payload in ((a, "9" * 5000), (a, "[" * 2000 + "]" * 2000), (b, "1")):
        db.execute("select durable.signal(%s, 'n', %s::jsonb)", [target, payload])
    async with connect(durable_dsn) as conn:
        found = await read_inboxes(conn, SCHEMA, [a, b])
    assert [len(str(signal.payload)) for signal in found[a]] == [5000, 4000]
    assert [signal.payload for signal in found[b]] == [1]
