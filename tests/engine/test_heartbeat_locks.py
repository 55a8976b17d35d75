"""Heartbeats beside locks that others hold, and signs of life between them: who lives keeps its claims."""

from __future__ import annotations

import durable_actors as da
import pytest
from durable_actors._engine.claims import ActiveClaim
from durable_actors._engine.maintenance.heartbeat import Heartbeat, pulse_interval
from durable_actors.otp import ActorChild, Address, Supervisor, open_tree
from tests.engine.kit import Db, Gate, make_node, pick, reap, running
from tests.kit import until
from tests.support.interleave import open_sessions

pytestmark = pytest.mark.usefixtures("registry")

BEATS = {"lease_ttl": 60, "heartbeat_interval": 0.03}
LEASES = "select id, lease_expires_at from durable.gen_durable where status = 'executing'"
RENEWED = "select lease_expires_at > %s from durable.gen_durable where id = %s"


async def renewals(db: Db, count: int, *numbers: int) -> None:
    """Until these have been renewed so many times."""
    for _ in range(count):
        leases = dict(db.execute(LEASES))
        for number in numbers:
            await db.eventually(RENEWED, leases[number], number, timeout=30)


@pytest.mark.parametrize("lock", ["row", "share", "access exclusive"])
async def test_leases_are_renewed_while_nodes_is_locked(durable_dsn, db, lock):
    """The row is for people: held for a lease, it would have every step of the node cancelled."""
    gate = Gate()

    @da.job
    async def slow(args):
        await gate.wait()
        return "finished"

    async with running(durable_dsn, **BEATS) as run:
        number = await run.insert(slow, args={})
        await gate.wait_entered()
        with open_sessions(durable_dsn, 1) as (other,):
            other.run("begin")
            if lock == "row":
                other.run("select 1 from durable.nodes for update")
            else:
                other.run(f"lock table durable.nodes in {lock} mode")
            await renewals(db, 3, number)
            other.run("rollback")
        [(seen,)] = db.execute("select seen_at from durable.nodes")
        await db.eventually("select seen_at > %s from durable.nodes", seen, timeout=30)
        gate.open()
        assert (await run.ended(number)).attempt == 0


async def test_an_engine_starts_and_stops_while_nodes_is_locked(durable_dsn, db):
    @da.job
    async def quick(args):
        return "finished"

    with open_sessions(durable_dsn, 1) as (other,):
        other.run("begin")
        other.run("lock table durable.nodes in access exclusive mode")
        async with running(durable_dsn, **BEATS) as run:
            assert (await run.run(quick, args={})).result == "finished"
            other.run("rollback")
            await db.eventually("select count(*) = 1 from durable.nodes", timeout=30)
            [(about,)] = db.execute("select about from durable.nodes")
            assert about["queues"] == {"default": 10, "durable.ops": 1}
            other.run("begin")
            other.run("lock table durable.nodes in access exclusive mode")
        other.run("rollback")


async def test_an_engine_starts_beside_the_locked_row_of_one_long_gone(durable_dsn, db):
    db.execute(
        "insert into durable.nodes (incarnation, node, seen_at) values ('old', 'x', now() - interval '9 days')"
    )
    with open_sessions(durable_dsn, 1) as (other,):
        other.run("begin")
        other.run("select 1 from durable.nodes for update")
        async with running(durable_dsn):
            assert len(db.execute("select 1 from durable.nodes")) == 2
        other.run("rollback")


@pytest.mark.parametrize("nowait", ["nowait", ""], ids=["nowait", "waits"])
async def test_a_renewal_that_is_refused_costs_only_its_claim(durable_dsn, db, nowait, caplog):
    """A trigger of the user's that waits for a lock would keep all leases of the node from being renewed."""
    db.execute(
        f"""create table public.till (id int primary key);
        insert into public.till values (1);
        create function public.book() returns trigger language plpgsql as $$
        begin
            if new.partition_key = 'bad' and old.status = 'executing' then
                perform 1 from public.till for update {nowait};
            end if;
            return new;
        end $$;
        create trigger book before update on durable.gen_durable for each row execute function public.book()"""
    )
    numbers = [db.insert(partition_key="bad" if i == 5 else None) for i in range(20)]
    async with make_node(durable_dsn, **BEATS) as node:
        for claim in await pick(node):
            node.claims.add(ActiveClaim(claim))
        address: Address[object] = Address("heartbeat", capacity=1)
        with open_sessions(durable_dsn, 1) as (other,):
            other.run("begin")
            other.run("select 1 from public.till for update")
            before = dict(db.execute(LEASES))
            root = Supervisor("test", [ActorChild(address, lambda: Heartbeat(node))], intensity=0)
            async with open_tree(root):
                await renewals(db, 2, *(number for number in numbers if number != numbers[5]))
                assert dict(db.execute(LEASES))[numbers[5]] == before[numbers[5]]
                other.run("rollback")
                await renewals(db, 1, *numbers)
    assert sum("refuses to renew its lease" in each.getMessage() for each in caplog.records) == 1


@pytest.mark.parametrize(
    ("beat", "dead_after", "pulse"),
    [(20.0, 10.0, 10 / 3), (2.0, 10.0, 2.0), (20.0, 0.01, 0.1), (0.05, 0.01, 0.05)],
)
def test_something_is_renewed_twice_before_a_node_can_be_proved_dead(beat, dead_after, pulse):
    assert pulse_interval(beat, dead_after) == pytest.approx(pulse)


@pytest.mark.slow
async def test_a_node_that_lives_is_not_proved_dead_between_two_heartbeats(db: Db):
    """Its session is cut, and only that: the lock is free. Its next heartbeat is an hour away."""
    numbers = [db.insert() for _ in range(30)]
    options = {"lease_ttl": 10_800, "heartbeat_interval": 3600, "dead_after": 1.0}
    async with make_node(db.dsn, name="cut", **options) as cut, make_node(db.dsn, **options) as node:
        for claim in await pick(cut):
            cut.claims.add(ActiveClaim(claim))
        address: Address[object] = Address("heartbeat", capacity=1)
        async with (
            open_tree(Supervisor("test", [ActorChild(address, lambda: Heartbeat(cut))], intensity=0)),
            reap(node) as reaper,
        ):
            await until(reaper.suspects)
            for _ in range(4):
                since = reaper.suspects()["cut"].since
                await until(
                    lambda since=since: (
                        reaper.suspects().get("cut", since) and reaper.suspects()["cut"].since > since
                    )
                )
        rows = [db.row(number, "status, attempt, locked_by") for number in numbers]
        assert rows == [("executing", 0, "cut")] * 30


async def test_a_pulse_whose_rows_are_locked_becomes_a_beat(db: Db):
    numbers = [db.insert() for _ in range(30)]
    async with make_node(db.dsn, heartbeat_interval=20, dead_after=0.3) as node:
        for claim in await pick(node):
            node.claims.add(ActiveClaim(claim))
        with open_sessions(db.dsn, 1) as (other,):
            other.run("begin")
            other.run("select 1 from durable.gen_durable where id <= %s for update", [numbers[14]])
            before = dict(db.execute(LEASES))
            await Heartbeat(node)._pulse()
            after = dict(db.execute(LEASES))
            assert [number for number in numbers if after[number] > before[number]] == numbers[15:]
            other.run("rollback")
