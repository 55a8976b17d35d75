"""SQL damages a real database: the triggers record it, and the right checker reports it. And the audit itself."""

from __future__ import annotations

import time

import durable_actors as da
import psycopg
import pytest
from tests.invariants.audit import install_audit, mark_clock, read_audit
from tests.invariants.changes import InstanceChange, SignalChange
from tests.invariants.check import check, read_history

CLAIM = (
    "status = 'executing', claim_id = gen_random_uuid(), locked_by = 'n', lease_expires_at = now() + '60 s'"
    ", rev = rev + 1"
)
RELEASE = "status = 'runnable', claim_id = null, locked_by = null, lease_expires_at = null, rev = rev + 1"
COMMIT = "locked_by = null, lease_expires_at = null, rev = rev + 1"
DONE = f"status = 'done', finished_at = now(), {COMMIT}"
PARK = f"status = 'awaiting_signal', awaits = '{{go}}', {COMMIT}"
BARRIER = (
    f"status = 'awaiting_children', visit = visit + 1, children_total = 1, children_pending = 1, {COMMIT}"
)
SHARE = (
    f"update durable.gen_durable g set {CLAIM.replace('gen_random_uuid()', 'o.claim_id').replace('= rev', '= g.rev')}"
    " from durable.gen_durable o where g.id = 2 and o.id = 1"
)
SEND = "insert into durable.signals (target_id, name) values (1, 'go')"


@pytest.fixture
def db(durable_dsn):
    """A database with two instances, in which every change is recorded."""
    install_audit(durable_dsn)
    with psycopg.connect(durable_dsn, autocommit=True, application_name="hand") as connection:
        for _ in range(2):
            connection.execute("insert into durable.gen_durable (fsm, step) values ('m', 's')")
        yield connection


def write(db, columns: str, number: int = 1) -> None:
    db.execute(f"update durable.gen_durable set {columns} where id = {number}")


def broken(dsn: str, **options) -> set[str]:
    known = {"lease": 60.0, "reap_interval": 30.0, "margin": 30.0}
    return {each.invariant for each in check(read_history(dsn, **(known | options)))}


def test_what_the_engine_may_do_is_fine(db, durable_dsn):
    for columns in (CLAIM, RELEASE, CLAIM, f"status = 'runnable', visit = visit + 1, {COMMIT}", CLAIM, DONE):
        write(db, columns)
    assert broken(durable_dsn) == set()


@pytest.mark.parametrize(
    ("numbers", "before", "damage"),
    [
        ({"I1"}, [], "delete from durable.gen_durable where id = 1"),
        ({"I2"}, [CLAIM], f"update durable.gen_durable set {CLAIM} where id = 1"),
        ({"I2"}, [CLAIM, PARK], f"update durable.gen_durable set {CLAIM} where id = 1"),
        ({"I3", "I4"}, [], "update durable.gen_durable set visit = 5 where id = 1"),
        (
            {"I3"},
            [CLAIM],
            SHARE,
        ),
        (
            {"I3"},
            [CLAIM],
            f"update durable.gen_durable set {DONE.replace(', rev = rev + 1', '')} where id = 1",
        ),
        ({"I3"}, [], f"update durable.gen_durable set {CLAIM.replace('+ 1', '+ 2')} where id = 1"),
        (
            {"I3"},
            [CLAIM],
            "update durable.gen_durable set lease_expires_at = now() + '90 s', rev = rev + 1 where id = 1",
        ),
        ({"I4"}, [CLAIM, RELEASE], "update durable.gen_durable set state = '{\"x\": 1}' where id = 1"),
        ({"I4"}, [CLAIM], "update durable.gen_durable set state = '{\"x\": 1}' where id = 1"),
        ({"I4"}, [], "update durable.gen_durable set status = 'done', finished_at = now() where id = 1"),
        ({"I6"}, ["inbox = true", SEND], "delete from durable.signals"),
        ({"I6"}, ["inbox = true", SEND, CLAIM, DONE], "select 1"),
        ({"I7"}, [CLAIM, PARK], SEND),
        ({"I8"}, [CLAIM, DONE], "update durable.gen_durable set updated_at = now() where id = 1"),
        ({"I8"}, [CLAIM, DONE], "update durable.gen_durable set result = '7' where id = 1"),
        (
            {"I11"},
            [CLAIM],
            "insert into durable.gen_durable (fsm, step, parent_id, barrier) values ('m', 's', 1, 9)",
        ),
        (
            {"I11"},
            [CLAIM, BARRIER],
            "insert into durable.gen_durable (fsm, step, parent_id, barrier) values ('m', 's', 1, 2)",
        ),
    ],
)
def test_damage(db, durable_dsn, numbers, before, damage):
    for columns in before:
        if columns == SEND:
            db.execute(SEND)
        else:
            write(db, columns)
    assert (
        broken(durable_dsn) - {"I6"} == set()
    )  # an inbox that outlives its instance is there before the damage
    db.execute(damage)
    assert broken(durable_dsn) == numbers


def test_what_constraints_forbid_is_seen_without_them(db, durable_dsn):
    """I9 and I10 are kept by unique indexes: without them, two rows have a key."""
    db.execute("drop index durable.gen_durable_key_executing, durable.gen_durable_unique")
    for number in (1, 2):
        write(db, "partition_key = 'k'", number)
        write(
            db,
            "unique_key = 'u', unique_scope = '{runnable,executing,awaiting_signal,awaiting_children}'",
            number,
        )
    db.execute("truncate durable_audit.change")
    for number in (1, 2):
        write(db, CLAIM, number)
    assert broken(durable_dsn) == {"I9", "I10"}
    db.execute("truncate durable_audit.change")
    for number in (1, 2):
        write(db, f"{COMMIT}, status = 'runnable'", number)
    assert broken(durable_dsn) == {"I10"}


def test_a_lease_that_nobody_ends(db, durable_dsn):
    write(db, CLAIM.replace("now() + '60 s'", "now() - interval '50 s'"))
    assert broken(durable_dsn) == set()
    assert broken(durable_dsn, margin=1.0, patience=600.0) == {"I12"}


def test_another_workers_write(db, durable_dsn):
    write(db, CLAIM)
    with psycopg.connect(durable_dsn, autocommit=True, application_name="other") as other:
        write(other, DONE)
    assert broken(durable_dsn) == {"I4"}


def test_a_write_that_the_triggers_did_not_see(db, durable_dsn):
    db.execute("alter table durable.gen_durable disable trigger durable_audit")
    write(db, CLAIM)
    assert broken(durable_dsn) == {"I4"}


# -- the audit


def test_changes_tell_who_when_and_what(db, durable_dsn):
    write(db, "priority = 3, awaits = '{a,b}', partition_key = 'k'")
    db.execute(SEND)
    changes = read_audit(durable_dsn)
    first, _, update, sent = changes
    assert isinstance(first, InstanceChange)
    assert isinstance(update, InstanceChange)
    assert isinstance(sent, SignalChange)
    assert (first.old, first.new.status, first.writer) == (None, "runnable", "hand")
    assert (update.old.priority, update.new.priority, update.new.awaits) == (0, 3, ["a", "b"])
    assert (sent.instance, sent.signal.name, sent.takes) == (1, "go", False)
    assert [change.seq for change in changes] == sorted(change.seq for change in changes)
    assert all(change.began <= change.at <= change.seen for change in changes)
    assert update.snapshot.sees(first.txid)


def test_each_change_testifies_to_the_commits_of_others(db, durable_dsn):
    with psycopg.connect(durable_dsn) as other:
        other.execute("insert into durable.gen_durable (fsm, step) values ('m', 's')")
        write(db, CLAIM)  # meanwhile
        other.commit()
    write(db, RELEASE)
    history = read_history(durable_dsn, lease=60, reap_interval=30)
    insert = next(change for change, _ in history.moves if change.instance == 3)
    claim, release = (change for change, move in history.moves if move in {"claimed", "released"})
    assert claim.at <= history.open_until[insert.txid] <= history.ended_by[insert.txid] <= release.seen


def test_no_change_testifies_to_its_own_commit(db, durable_dsn):
    """Its transaction is below the snapshot's end as soon as a later one has ended, and is not listed as running."""
    with psycopg.connect(durable_dsn, autocommit=True) as other, db.transaction():
        write(db, "priority = 3")
        other.execute("select pg_current_xact_id()")
        write(db, "priority = 4")
        write(db, "priority = 5")
    history = read_history(durable_dsn, lease=60, reap_interval=30)
    last = history.changes[-1]
    assert last.snapshot is not None
    assert last.snapshot.sees(last.txid)
    assert last.txid not in history.ended_by


def test_an_old_snapshot_testifies_to_nothing(db, durable_dsn):
    with psycopg.connect(durable_dsn) as other:
        other.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        other.execute("select 1")
        other.execute(SEND)
    assert read_audit(durable_dsn)[-1].snapshot is None


def test_the_clocks_are_compared(db, durable_dsn):
    mark_clock(durable_dsn)
    history = read_history(durable_dsn, lease=60, reap_interval=30)
    assert len(history.clock.points) == 3
    assert 0 < history.doubt < 5
    assert abs(history.clock.at(time.monotonic_ns()) - history.ended) < 5


async def test_another_schema(empty_dsn):
    await da.migrate(empty_dsn, schema="shop")
    install_audit(empty_dsn, schema="shop")
    with psycopg.connect(empty_dsn, autocommit=True) as connection:
        connection.execute("insert into shop.gen_durable (fsm, step) values ('m', 's')")
    assert len(read_audit(empty_dsn, schema="shop")) == 1
    assert read_history(empty_dsn, lease=1, reap_interval=1, schema="shop").rows[1].step == "s"
