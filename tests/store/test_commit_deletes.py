"""Commits that delete (`keep=0`): fenced like all commits, whole or not at all; `flushes` tells when in doubt."""

from __future__ import annotations

import json
import uuid
from typing import Any

import psycopg
import pytest
import trio
from durable_actors._postgres.driver.connection import PgConn
from durable_actors._store.claim import Owner, read_claims
from durable_actors._store.commit import Flushed, commit_outcomes, forget_flushes, read_flushes, was_committed
from durable_actors._store.rows import Claim, Committed, Transition
from durable_actors._store.signal import send_signals
from durable_actors._store.sql import statement
from tests.store.kit import ROLES, SCHEMA, claims, connect, insert, outcome, rows
from tests.store.stepping import deliver
from tests.store.test_fences import (
    Loss,
    fall_behind,
    lose_by_reap,
    lose_by_release,
    lose_to_another_worker,
    lose_to_the_same_worker,
)
from tests.support.interleave import wait_backend_blocked
from tests.support.sql import explain

DONE = "{runnable,executing,awaiting_signal,awaiting_children,done}"
OTHER = Owner(SCHEMA, "other", b"", 60.0)


def end(claim: Claim, result: bytes | None = b"null") -> Transition:
    return outcome(claim, "done", result=result, deletes=True)


def token() -> str:
    return str(uuid.uuid4())


async def flush(conn: PgConn, *ends: Transition, **options: Any) -> Flushed:
    return await commit_outcomes(conn, SCHEMA, ends, accept_late=True, **options)


async def read_back(conn: PgConn, change: Transition, *tokens: str) -> Committed | None:
    """As the flusher does, after a commit of unknown fate was repeated and wrote nothing."""
    number = change.claim.id
    row = (await read_claims(conn, SCHEMA, [number])).get(number)
    return was_committed(change, row, (await read_flushes(conn, SCHEMA, tokens)).values())


def tables(db: psycopg.Connection) -> list[Any]:
    names = ("gen_durable", "signals", "journal", "flushes")
    return [
        db.execute(f"select to_jsonb(t), t.xmin::text from durable.{name} t order by 2, 1").fetchall()
        for name in names
    ]


# -- the fence


@pytest.mark.parametrize(
    "lose", [lose_by_reap, lose_by_release, lose_to_the_same_worker, lose_to_another_worker, fall_behind]
)
async def test_a_stale_commit_deletes_nothing(db: psycopg.Connection, durable_dsn: str, lose: Loss):
    insert(db, journal=4, inbox=True)
    async with connect(durable_dsn) as conn:
        [claim] = await claims(conn)
        await lose(db, conn, claim)
        before = tables(db)
        assert (await flush(conn, end(claim))).committed == {}
        assert tables(db) == before
        first = token()
        assert (await flush(conn, end(claim), token=first)).committed == {}
        assert await read_flushes(conn, SCHEMA, [first]) == {first: {claim.id}}
        if lose is not fall_behind:
            assert await read_back(conn, end(claim), first) is None


@pytest.mark.parametrize("accept", [True, False])
async def test_a_late_commit_is_a_matter_of_configuration(
    db: psycopg.Connection, durable_dsn: str, *, accept: bool
):
    insert(db)
    async with connect(durable_dsn) as conn:
        [claim] = await claims(conn)
        db.execute("update durable.gen_durable set lease_expires_at = now() - interval '1 s'")
        done = await commit_outcomes(conn, SCHEMA, [end(claim)], accept_late=accept)
    assert (claim.id in done.committed, len(rows(db, "id"))) == ((True, 0) if accept else (False, 1))


async def test_an_instance_that_was_asked_to_end_or_to_pause_is_done(
    db: psycopg.Connection, durable_dsn: str
):
    """As with `Done` of one that is kept: the request came too late."""
    requests = [json.dumps({"kind": kind, "by": None, "at": "now"}) for kind in ("cancel", "pause")]
    async with connect(durable_dsn) as conn:
        insert(db, 2)
        found = await claims(conn)
        for claim, request in zip(found, requests, strict=True):
            db.execute("update durable.gen_durable set request = %s where id = %s", [request, claim.id])
        done = await flush(conn, *map(end, found))
    assert {each.status for each in done.committed.values()} == {"done"}
    assert rows(db, "id") == []


async def test_two_claims_of_one_instance_in_one_group(db: psycopg.Connection, durable_dsn: str):
    insert(
        db, child_uid="=gen_random_uuid()"
    )  # it is kept: the second statement of the two must not write it twice
    insert(db)
    async with connect(durable_dsn) as conn:
        old = await claims(conn)
        await lose_by_release(db, conn, old[0])
        await lose_by_release(db, conn, old[1])
        new = await claims(conn)
        done = await flush(conn, *map(end, [*old, *new]))
        assert sorted(done.committed) == [claim.id for claim in new]
    assert rows(db, "status::text, rev") == [("done", 5)]


# -- what goes with it, and what stays


async def test_a_group_of_every_kind_is_one_transaction(db: psycopg.Connection, durable_dsn: str):
    """Rows that go, rows that somebody may look for, and outcomes of other machines; each as it would be alone."""
    [parent] = insert(
        db, status="awaiting_children", children_pending=1, children_total=1, visit=2, await_step="b"
    )
    columns: list[dict[str, Any]] = [
        {},
        {"unique_key": b"freed", "unique_scope": DONE.replace(",done", "")},
        {"unique_key": b"kept", "unique_scope": DONE},
        {"child_uid": "=gen_random_uuid()", "inbox": True, "awaits": ["go"], "journal": 2},
        {"parent_id": parent, "barrier": 2},
        {"partition_key": "key"},
    ]
    numbers = [insert(db, **each)[0] for each in columns]
    [sibling] = insert(db, partition_key="key", hold=1)
    insert(db)
    async with connect(durable_dsn) as conn:
        found = {claim.id: claim for claim in await claims(conn)}
        other = next(claim for number, claim in found.items() if number not in numbers)
        done = await flush(
            conn,
            *(end(found[number], b'{"n": 1}') for number in numbers),
            outcome(other, "runnable", attempt=1),
        )
        [again] = insert(db, unique_key=b"freed", unique_scope=DONE)
    assert set(done.committed) == {*numbers, other.id}
    assert {each.id for each in done.offered} == {sibling, parent}
    left = dict(rows(db, "id, status::text"))
    assert left == {
        parent: "runnable",
        numbers[2]: "done",
        numbers[3]: "done",
        numbers[4]: "done",
        sibling: "runnable",
        other.id: "runnable",
        again: "runnable",
    }
    query = "select result, awaits, finished_at is not null, locked_by from durable.gen_durable where id = %s"
    assert db.execute(query, [numbers[3]]).fetchone() == ({"n": 1}, None, True, None)
    assert db.execute("select instance_id, kind from durable.journal").fetchall() == [(numbers[3], "done")]


@pytest.mark.parametrize(("level", "rev"), [(1, 1), (1, 3), (2, 1), (4, 1)])
async def test_its_records_go_with_it(db: psycopg.Connection, durable_dsn: str, level: int, rev: int):
    """A job that had no failed attempt has no records, and they are not looked for: `rev` tells."""
    insert(db, journal=level, rev=rev)
    async with connect(durable_dsn) as conn:
        [claim] = await claims(conn)
        if rev > 1:
            columns = "instance_id, rev, visit, attempt, kind, step"
            db.execute(
                f"insert into durable.journal ({columns}) values (%s, 2, 1, 0, 'retry', 's')", [claim.id]
            )
            query = "insert into durable.checkpoints (thread, rev, format, projection) values (%s, 1, 1, '1')"
            db.execute(query, [f"run:{claim.id}"])
        assert (await flush(conn, end(claim))).committed
    for name in ("gen_durable", "journal", "checkpoints"):
        assert db.execute(f"select count(*) from durable.{name}").fetchone() == (0,), name


async def test_a_result_that_postgres_cannot_store_is_refused(db: psycopg.Connection, durable_dsn: str):
    """Though nobody would read it: `keep=` must not decide which results are allowed."""
    insert(db)
    async with connect(durable_dsn) as conn:
        [claim] = await claims(conn)
        with pytest.raises(psycopg.errors.UntranslatableCharacter):
            await flush(conn, end(claim, rb'"a\u0000b"'))
        assert rows(db, "status::text") == [("executing",)]
        assert (await flush(conn, end(claim, b'"ab"'))).committed


def test_the_rows_are_found_by_their_ids(db: psycopg.Connection):
    numbers = insert(db, 300, status="done", finished_at="=now()")
    db.execute("analyze durable.gen_durable")
    some = [str(uuid.uuid4()) for _ in numbers[:50]]
    found = explain(
        db,
        statement("commit_deletes", SCHEMA).sql,
        [numbers[:50], some, [1], [], True, some[0], some[:1]],
        settings=ROLES["commit"].settings,
    )
    found.assert_no_seq_scan("gen_durable")
    found.assert_uses("gen_durable_pkey")
    assert "gen_durable_executing" not in found.indexes


# -- unknown fate


async def test_a_repeated_commit_is_told_as_committed(db: psycopg.Connection, durable_dsn: str):
    """The answer to the first was lost: the same is sent again, in a group of its own, then `flushes` is read."""
    insert(db, 2)
    async with connect(durable_dsn) as conn:
        found = await claims(conn)
        first, second = token(), token()
        assert len((await flush(conn, *map(end, found), token=first)).committed) == 2
        assert (await flush(conn, end(found[0]), token=second)).committed == {}
        assert await read_back(conn, end(found[0]), first, second) == Committed(1, "done")
        assert await read_back(conn, end(found[0]), second) is None
        # Another group, whose answer has come, takes the first one away; nobody asks for it any more.
        insert(db)
        await flush(conn, *map(end, await claims(conn)), token=token(), known=[first])
        assert set(await read_flushes(conn, SCHEMA, [first, second])) == {second}


async def test_a_row_that_the_next_owner_has_deleted_is_not_told_as_ours(
    db: psycopg.Connection, durable_dsn: str
):
    """Gone is not committed: the claim was lost before the commit, and whoever got it then was done, too."""
    insert(db)
    async with connect(durable_dsn) as conn:
        [old] = await claims(conn)
        await lose_by_release(db, conn, old)
        first, second = token(), token()
        assert (await flush(conn, end(old), token=first)).committed == {}
        [new] = await claims(conn, owner=OTHER)
        assert (await flush(conn, end(new), token=second)).committed
        assert await read_back(conn, end(old), first) is None
        assert await read_back(conn, end(new), second) is not None


async def test_a_commit_that_was_rolled_back_leaves_nothing(db: psycopg.Connection, durable_dsn: str):
    """Its backend dies before the commit: the row is ours as before, and no row of `flushes` tells otherwise."""
    insert(db)
    async with connect(durable_dsn) as conn:
        [claim] = await claims(conn)
        before = tables(db)
        name = token()
        with pytest.raises(KeyError):
            async with conn.transaction():
                assert (await flush(conn, end(claim), token=name)).committed
                raise KeyError
        assert tables(db) == before
        assert await read_back(conn, end(claim), name) is None
        assert (await flush(conn, end(claim), token=token())).committed


async def test_the_first_attempt_is_still_under_way_when_it_is_repeated(
    db: psycopg.Connection, durable_dsn: str
):
    """The node has lost its connection, its backend has not: the second attempt waits for the row lock of the first."""
    insert(db)
    first, second = token(), token()
    answers: list[Flushed] = []
    async with connect(durable_dsn) as one, connect(durable_dsn, lock_timeout="0") as two:
        [claim] = await claims(one)

        async def repeat() -> None:
            answers.append(await flush(two, end(claim), token=second))

        async with trio.open_nursery() as nursery, one.transaction():
            await flush(one, end(claim), token=first)
            nursery.start_soon(repeat)
            await wait_backend_blocked(durable_dsn, two.pid, by=one.pid)
        assert answers[0].committed == {}
        assert await read_back(two, end(claim), first, second) == Committed(1, "done")
        assert await read_flushes(two, SCHEMA, [first, second]) == {first: frozenset(), second: {claim.id}}


async def test_what_nobody_asks_for_is_forgotten(db: psycopg.Connection, durable_dsn: str):
    insert(db)
    old, new = token(), token()
    async with connect(durable_dsn) as conn:
        [claim] = await claims(conn)
        await flush(conn, end(claim), token=old)
        db.execute("update durable.flushes set at = at - interval '2 days'")
        await flush(conn, end(claim), token=new)
        await forget_flushes(conn, SCHEMA, after=86_400.0)
        assert set(await read_flushes(conn, SCHEMA, [old, new])) == {new}


# -- signals


async def test_a_signal_that_comes_first_goes_with_the_row(db: psycopg.Connection, durable_dsn: str):
    """No foreign key: the commit waits for the lock of the sender, sees that there is an inbox, and empties it."""
    [number] = insert(db)
    answers: list[Flushed] = []
    async with (
        connect(durable_dsn, lock_timeout="0") as commits,
        connect(durable_dsn, "client") as sender,
        trio.open_nursery() as nursery,
    ):
        [claim] = await claims(commits)

        async def finish() -> None:
            answers.append(await flush(commits, end(claim)))

        async with sender.transaction():
            [sent] = await send_signals(sender, SCHEMA, [deliver(number, key="d")])
            assert sent.outcome == "sent"
            nursery.start_soon(finish)
            await wait_backend_blocked(durable_dsn, commits.pid, by=sender.pid)
    assert set(answers[0].committed) == {number}
    assert rows(db, "id") == []
    assert db.execute("select count(*) from durable.signals").fetchone() == (0,)


async def test_a_signal_that_comes_later_is_told_the_truth(db: psycopg.Connection, durable_dsn: str):
    """It waits for the commit, and finds no target: nothing is stored that nobody will read or delete."""
    [number] = insert(db)
    told: list[str] = []
    async with (
        connect(durable_dsn) as commits,
        connect(durable_dsn, "client", lock_timeout="0") as sender,
        trio.open_nursery() as nursery,
    ):
        [claim] = await claims(commits)

        async def send() -> None:
            told.extend(each.outcome for each in await send_signals(sender, SCHEMA, [deliver(number)]))

        async with commits.transaction():
            assert (await flush(commits, end(claim))).committed
            nursery.start_soon(send)
            await wait_backend_blocked(durable_dsn, sender.pid, by=commits.pid)
    assert told == ["no_target"]
    assert db.execute("select count(*) from durable.signals").fetchone() == (0,)
