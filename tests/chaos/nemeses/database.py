"""What is done to Postgres: sessions ended, the server stopped, statements refused, connections used up, locks held."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any, Final, LiteralString

import psycopg
import trio
from durable_actors._postgres.embedded import server as embedded
from psycopg import sql
from tests.chaos.nemeses import nemesis
from tests.chaos.world import LEASE, World

Conn = psycopg.Connection[tuple[Any, ...]]

LANES: Final[dict[str, LiteralString]] = {
    "claim": "query ~ '^-- (pick_instances|read_queue|read_owners|reap_claims|expire_awaits|read_inboxes|sweep_keys)'",
    "commit": "query ~ '^-- (commit_|release_claims|recheck_awaits|consume_signals|join_parents|promote_sib|hand_sib)'",
    "heartbeat": "query ~ '^-- (touch_node|renew_leases)'",
    "session": "pid in (select pid from pg_locks where locktype = 'advisory' and granted)",
    "client": "application_name like 'sender%%' or query ~ '^-- (insert|send|read_inst|find|probe|signal|start)'",
    "everybody": "true",
}
"""Which sessions are whose: a session tells its last statement, whose first line is its name."""

TERMINATE: Final[LiteralString] = """
select count(pg_terminate_backend(pid)) from pg_stat_activity
 where datname = current_database() and pid <> pg_backend_pid() and application_name <> 'chaos' and ({})
"""
FAULT: Final[LiteralString] = """
create table public.chaos_fault (chance float8 not null, code text not null);
create function public.chaos_fault() returns trigger language plpgsql as $$
declare fault record;
begin
    select * into fault from public.chaos_fault limit 1;
    if found and random() < fault.chance then
        raise exception 'chaos' using errcode = fault.code;
    end if;
    return null;
end $$;
create trigger chaos_fault before insert or update or delete on durable.gen_durable
    for each statement execute function public.chaos_fault();
create trigger chaos_fault before insert or update or delete on durable.signals
    for each statement execute function public.chaos_fault();
"""
CODES: Final = {
    "disk full": "53100",
    "out of memory": "53200",
    "serialization failure": "40001",
    "deadlock": "40P01",
    "query cancelled": "57014",
    "internal error": "XX000",
    "insufficient privilege": "42501",
    "read only": "25006",
}
CONNECTIONS: Final = 45


@asynccontextmanager
async def connected(world: World) -> AsyncGenerator[Callable[..., Any]]:
    """A connection of the nemesis's own, kept: `await execute(statement, *arguments)`."""

    def connect() -> Conn:
        return psycopg.connect(world.dsn, autocommit=True, application_name="chaos")

    conn = await trio.to_thread.run_sync(connect)

    async def execute(statement: LiteralString | sql.Composed, *arguments: object) -> list[tuple[Any, ...]]:
        def work() -> list[tuple[Any, ...]]:
            while True:
                try:
                    cursor = conn.execute(statement, arguments or None)
                except psycopg.errors.DeadlockDetected:
                    continue  # to drop a trigger locks tables in another order than the workers do
                return cursor.fetchall() if cursor.description is not None else []

        return await trio.to_thread.run_sync(work)

    try:
        await execute("set statement_timeout = 0")
        yield execute
    finally:
        conn.close()


async def terminate_lane(world: World, execute: Callable[..., Any], lane: str) -> None:
    """End the sessions of this kind, of one worker or of all."""
    world.log.sessions_lost(lane)
    where: LiteralString = LANES[lane]
    victim = world.pick()
    if victim is not None and lane not in {"client", "everybody"} and world.rng.random() < 0.7:
        [[count]] = await execute(TERMINATE.format(f"application_name = %s and ({where})"), victim.name)
    else:
        [[count]] = await execute(TERMINATE.format(where.replace("%%", "%")))
    world.count(f"terminated {lane}", number=count)


@nemesis("terminate", outages=True)
async def terminate(world: World) -> None:
    """pg_terminate_backend of each lane: claims, commits, heartbeats, session locks, clients, everybody."""
    async with connected(world) as execute:
        lanes = list(LANES)
        while await world.pause(0.05, 0.4):
            if not lanes:
                lanes = list(LANES)
            await terminate_lane(world, execute, lanes.pop(world.rng.randrange(len(lanes))))


@nemesis("restart", settings={"synchronous_commit": "on"}, outages=True, seconds=6.0)
async def restart(world: World) -> None:
    """Postgres stops at once, by SIGQUIT or kill -9, and is started again; recovery follows."""
    server = world.place.server
    assert server is not None
    while await world.pause(0.5, 1.5):
        postmaster = embedded.status(server.data_dir).postmaster
        if postmaster is None:
            continue
        how = world.rng.choice((signal.SIGQUIT, signal.SIGKILL, signal.SIGINT))
        world.outage()
        world.log.sessions_lost("restart")
        os.kill(postmaster, how)
        world.count(f"Postgres {how.name}")
        with trio.fail_after(30):
            while embedded.status(server.data_dir).postmaster in {None, postmaster}:
                await trio.sleep(0.02)
        world.recovered()


@nemesis("refusals", outages=True)
async def refusals(world: World) -> None:
    """Postgres refuses writes for a while: disk full, out of memory, deadlocks, …; all of them, or half."""
    async with connected(world) as execute:
        await execute(FAULT)
        while await world.pause(0.2, 0.7):
            name = world.rng.choice(list(CODES))
            world.outage()
            world.log.sessions_lost(name)  # 25006: everybody reconnects
            await execute(
                "insert into public.chaos_fault values (%s, %s)", world.rng.choice((0.5, 1)), CODES[name]
            )
            world.count(name)
            await trio.sleep(world.rng.uniform(0.1, 1.0))
            await execute("delete from public.chaos_fault")
            world.recovered()
        await execute("drop function public.chaos_fault() cascade; drop table public.chaos_fault")


@nemesis("timeouts", outages=True)
async def timeouts(world: World) -> None:
    """statement_timeout is 50 ms, and now and then the tables are locked for longer than that."""
    name = sql.Identifier(psycopg.conninfo.conninfo_to_dict(world.dsn)["dbname"] or "")
    async with connected(world) as execute:
        await execute(sql.SQL("alter database {} set statement_timeout = '50ms'").format(name))
        await terminate_lane(world, execute, "everybody")
        while await world.pause(0.1, 0.5):
            await execute("begin")
            await execute("lock table durable.gen_durable in share row exclusive mode")
            world.count("tables locked")
            await trio.sleep(world.rng.uniform(0.05, 0.4))
            await execute("rollback")
        await execute(sql.SQL("alter database {} reset statement_timeout").format(name))
        await terminate_lane(world, execute, "everybody")


@nemesis("connections", settings={"max_connections": str(CONNECTIONS)}, outages=True)
async def connections(world: World) -> None:
    """All connections of the server are used up by somebody else, after the sessions of some were ended."""
    async with connected(world) as execute:
        while await world.pause(0.2, 0.8):
            taken: list[Conn] = []
            world.outage()
            await terminate_lane(world, execute, world.rng.choice(list(LANES)))
            try:
                await trio.to_thread.run_sync(fill, world.dsn, taken)
                world.count("connections used up", number=len(taken))
                await trio.sleep(world.rng.uniform(0.2, 1.0))
            finally:
                for conn in taken:
                    conn.close()
                world.recovered()


def fill(dsn: str, taken: list[Conn]) -> None:
    """Connect until nobody is let in."""
    while len(taken) < CONNECTIONS:
        try:
            taken.append(psycopg.connect(dsn, autocommit=True, application_name="chaos"))
        except psycopg.OperationalError:
            return


@nemesis("old-snapshot")
async def old_snapshot(world: World) -> None:
    """A transaction as long as the run holds a snapshot and a transaction id: nothing can be vacuumed away."""
    async with connected(world) as execute, connected(world) as vacuum:
        await execute("begin isolation level repeatable read")
        await execute("select count(*), txid_current() from durable.gen_durable")
        world.count("old snapshot")
        while await world.pause(0.3, 0.6):
            await vacuum("vacuum (analyze) durable.gen_durable")
            await vacuum("vacuum (analyze) durable.signals")
            world.count("vacuum in vain")
        await execute("rollback")


# I12: who takes a row back that somebody else has locked? It must wait for them.
@nemesis("row-locks", forgives=frozenset({"I12"}))
async def row_locks(world: World) -> None:
    """Transactions of strangers hold rows, some of them for longer than a lease."""
    async with connected(world) as execute:
        query: LiteralString = (
            "select id from durable.gen_durable where random() < %s for no key update skip locked"
        )
        while await world.pause(0.05, 0.3):
            await execute("begin")
            rows = await execute(query, world.rng.choice((0.05, 0.3, 1.0)))
            world.count("rows locked", number=len(rows))
            await trio.sleep(world.rng.choice((0.05, 0.2, 0.5, 1.8)))
            await execute("rollback")


BACKENDS: Final[LiteralString] = """
select pid from pg_stat_activity
 where datname = current_database() and pid <> pg_backend_pid() and application_name <> 'chaos'
"""
HELPERS: Final[LiteralString] = """
select pid, backend_type from pg_stat_activity where backend_type in ('checkpointer', 'walwriter', 'background writer')
"""


@nemesis("kill-backend", settings={"synchronous_commit": "on"}, outages=True, seconds=6.0)
async def kill_backend(world: World) -> None:
    """kill -9 of one backend: Postgres ends all the others, and recovers."""
    while await world.pause(0.5, 1.5):
        pids = [pid for (pid,) in await world.query(BACKENDS)]
        if not pids:
            continue
        world.outage()
        world.log.sessions_lost("kill -9 of a backend")
        os.kill(world.rng.choice(pids), signal.SIGKILL)
        world.count("backend SIGKILL")
        await _until_it_answers(world)
        world.recovered()


async def _until_it_answers(world: World) -> None:
    with trio.fail_after(30):
        while True:
            await trio.sleep(0.05)  # the postmaster must notice it first
            try:
                await world.query("select 1")
            except psycopg.OperationalError:
                continue
            return


@nemesis("stop-helpers", settings={"synchronous_commit": "on"}, outages=True, seconds=6.0)
async def stop_helpers(world: World) -> None:
    """SIGSTOP of checkpointer, WAL writer and background writer, which may hold what a commit needs."""
    helpers = dict(await world.query(HELPERS))
    async with connected(world) as execute:
        while await world.pause(0.2, 0.8):
            pid = world.rng.choice(sorted(helpers))
            world.outage()
            os.kill(pid, signal.SIGSTOP)
            world.count("SIGSTOP", helpers[pid])
            try:
                with trio.move_on_after(world.rng.choice((0.2, 1.0, LEASE * 1.4))):
                    await trio.sleep_forever()
            finally:
                os.kill(pid, signal.SIGCONT)
            await execute("select pg_switch_wal()")
            world.recovered()
