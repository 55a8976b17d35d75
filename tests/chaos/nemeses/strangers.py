"""What other users of the database do: lock tables and rows, change the schema, cancel statements, set parameters."""

from __future__ import annotations

import itertools
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any, Final, LiteralString

import durable_actors as da
import psycopg
import trio
from psycopg import sql
from tests.chaos.machines import job
from tests.chaos.nemeses import nemesis
from tests.chaos.nemeses.database import connected, terminate_lane
from tests.chaos.workload import default_level
from tests.chaos.world import LEASE, World

ALONE: Final = 8.0
"""Seconds for a job that has nothing to do with a lock to end while that lock is held."""
PROBE: Final = 0.1
"""Seconds between looks at whether it has."""
STATUS: Final[LiteralString] = "select status::text from durable.gen_durable where id = %s"

SIGNAL_LOCKS: Final[tuple[LiteralString, ...]] = (
    "lock table durable.signals in share mode",  # as CREATE INDEX takes
    "lock table durable.signals in share row exclusive mode",
    "select id from durable.signals for update",
    "select id from durable.signals where consumed_at is null for update",
)
NODE_LOCKS: Final[tuple[LiteralString, ...]] = (
    "select incarnation from durable.nodes for update",
    "lock table durable.nodes in share mode",
)
PARENT_LOCKS: Final[tuple[LiteralString, ...]] = (
    "select id from durable.gen_durable where status = 'awaiting_children' for update",
    "select id from durable.gen_durable where children_total > 0 and status <> 'executing' for no key update",
)


@asynccontextmanager
async def probing(world: World) -> AsyncGenerator[Callable[[str], Any]]:
    """`await probe("why")`: a new job must end now, whatever is locked; its time tells that others go on."""
    numbers = itertools.count()
    async with da.open_client(world.dsn, name=f"probe {world.seed}") as client:

        async def probe(during: str) -> None:
            key = f"probe:{next(numbers)}"
            number = await client.insert(
                job, args={"n": 0}, unique_key=key, journal=default_level(world.seed)
            )
            with trio.move_on_after(ALONE):
                while (await world.query(STATUS, [number]))[0][0] != "done":
                    await trio.sleep(PROBE)
                return
            world.fail(f"a job that has nothing to do with it did not end within {ALONE:g} s of: {during}")

        yield probe


async def hold(world: World, locks: tuple[LiteralString, ...]) -> None:
    """Take one lock after the other, mostly for longer than a lease; a job must be done meanwhile."""
    async with connected(world) as execute, probing(world) as probe:
        while await world.pause(0.1, 0.4):
            lock = world.rng.choice(locks)
            await execute("begin")
            await execute("set local lock_timeout = '500ms'")
            try:
                await execute(lock)
            except (psycopg.errors.LockNotAvailable, psycopg.errors.DeadlockDetected):
                await execute("rollback")
                continue
            world.count("locked", lock)
            held = trio.current_time() + LEASE * world.rng.choice((0.2, 1.3, 1.6))
            await probe(lock)
            await trio.sleep_until(held)
            await execute("rollback")


@nemesis("signal-locks")
async def signal_locks(world: World) -> None:
    """Somebody locks signals, row by row or as CREATE INDEX does: only who needs them waits."""
    await hold(world, SIGNAL_LOCKS)


@nemesis("node-locks")
async def node_locks(world: World) -> None:
    """Somebody locks what nodes tell people: nobody waits for that."""
    await hold(world, NODE_LOCKS)


@nemesis("parent-locks")
async def parent_locks(world: World) -> None:
    """Somebody locks parents that wait for their children: only their children's ends wait."""
    await hold(world, PARENT_LOCKS)


CHANGES: Final[tuple[LiteralString, ...]] = (
    "vacuum full durable.gen_durable",
    "vacuum full durable.signals",
    "vacuum full durable.nodes",
    "reindex table concurrently durable.gen_durable",
    "reindex table concurrently durable.signals",
    "reindex index durable.gen_durable_pick",
    "alter table durable.gen_durable add column chaos_column int not null default 3",
    "alter table durable.gen_durable drop column if exists chaos_column",
    "alter table durable.signals add column if not exists chaos_column int",
    "alter table durable.gen_durable set (fillfactor = 90)",
    "create index if not exists chaos_index on durable.gen_durable (updated_at)",
    "create index concurrently if not exists chaos_concurrent on durable.signals (inserted_at)",
    "drop index if exists durable.chaos_index",
    "drop index concurrently if exists durable.chaos_concurrent",
    "cluster durable.gen_durable using gen_durable_pkey",
    "analyze durable.gen_durable",
)
LATE: Final = (
    psycopg.errors.LockNotAvailable,
    psycopg.errors.DeadlockDetected,
    psycopg.errors.DuplicateColumn,
    psycopg.errors.ObjectInUse,
)
"""What a careful administrator meets, and tries again later."""


@nemesis("ddl", outages=True)
async def ddl(world: World) -> None:
    """The tables are rewritten, altered and indexed under load."""
    async with connected(world) as execute:
        await execute("set lock_timeout = '300ms'")
        while await world.pause(0.05, 0.3):
            change = world.rng.choice(CHANGES)
            world.outage()
            try:
                await execute(change)
                world.count("ddl", change)
            except LATE:
                world.tell(f"too busy for: {change}")
            finally:
                world.recovered()
        await execute("reset lock_timeout")
        for change in CHANGES:
            if change.startswith("drop") or "drop column" in change:
                await execute(change)
        await execute("alter table durable.signals drop column if exists chaos_column")


CANCEL: Final[LiteralString] = """
select count(pg_cancel_backend(pid)) from pg_stat_activity
 where datname = current_database() and pid <> pg_backend_pid() and application_name <> 'chaos' and state <> 'idle'
   and random() < %s
"""


@nemesis("cancel-storm", outages=True)
async def cancel_storm(world: World) -> None:
    """pg_cancel_backend of whatever runs, over and over."""
    async with connected(world) as execute:
        while await world.pause(0.1, 0.5):
            chance = world.rng.choice((0.2, 0.5, 1.0))
            end = trio.current_time() + world.rng.uniform(0.1, 0.8)
            world.outage()
            while trio.current_time() < end:
                [[count]] = await execute(CANCEL, chance)
                if count:
                    world.count("cancelled", number=count)
                await trio.sleep(0.002)
            world.recovered()


SETTINGS: Final[dict[str, tuple[str, ...]]] = {
    "array_nulls": ("off",),
    "standard_conforming_strings": ("off",),
    "backslash_quote": ("on", "off"),
    "bytea_output": ("escape",),
    "datestyle": ("German, DMY", "SQL, MDY", "Postgres, DMY"),
    "intervalstyle": ("sql_standard", "iso_8601"),
    "timezone": ("Asia/Kathmandu", "Pacific/Kiritimati", "America/St_Johns"),
    "extra_float_digits": ("-15", "3"),
    "default_transaction_isolation": ("serializable", "repeatable read"),
    "default_transaction_read_only": ("on",),
    "default_transaction_deferrable": ("on",),
    "transform_null_equals": ("on",),
    "quote_all_identifiers": ("on",),
    "search_path": ("public", "pg_temp", "nowhere"),
    "client_min_messages": ("debug1", "error"),
    "client_encoding": ("LATIN1", "SQL_ASCII"),
    "lock_timeout": ("20ms",),
    "plan_cache_mode": ("force_custom_plan",),
    "jit_above_cost": ("0",),
    "enable_indexscan": ("off",),
    "enable_nestloop": ("off",),
    "work_mem": ("64kB",),
    "synchronous_commit": ("off", "local"),
    "check_function_bodies": ("off",),
    "row_security": ("off",),
    "xmloption": ("document",),
}
"""What a role or a database may say about sessions that never asked for it."""


@nemesis("gucs", outages=True)
async def gucs(world: World) -> None:
    """The database's own parameters are odd, others every time; everybody reconnects."""
    name = sql.Identifier(psycopg.conninfo.conninfo_to_dict(world.dsn)["dbname"] or "")
    async with connected(world) as execute:
        while await world.pause(0.3, 1.0):
            chosen = world.rng.sample(sorted(SETTINGS), world.rng.choice((1, 3, 8, len(SETTINGS))))
            for each in chosen:
                value = world.rng.choice(SETTINGS[each])
                await execute(
                    sql.SQL("alter database {} set {} = {}").format(
                        name, sql.Identifier(each), sql.Literal(value)
                    )
                )
                world.count(each, value)
            await terminate_lane(world, execute, "everybody")
            await world.pause(0.5, 1.0)
            await execute(sql.SQL("alter database {} reset all").format(name))
        await execute(sql.SQL("alter database {} reset all").format(name))
        await terminate_lane(world, execute, "everybody")


DEFERRED: Final[LiteralString] = """
create table public.chaos_commit (chance float8 not null, code text not null);
create function public.chaos_commit() returns trigger language plpgsql as $$
declare fault record;
begin
    select * into fault from public.chaos_commit limit 1;
    if found and random() < fault.chance then
        raise exception 'chaos at commit' using errcode = fault.code;
    end if;
    return null;
end $$;
create constraint trigger chaos_commit after insert or update on durable.gen_durable
    deferrable initially deferred for each row execute function public.chaos_commit();
create constraint trigger chaos_commit after insert or update on durable.signals
    deferrable initially deferred for each row execute function public.chaos_commit();
"""
AT_COMMIT: Final = {
    "serialization failure": "40001",
    "deadlock": "40P01",
    "disk full": "53100",
    "internal": "XX000",
}


@nemesis("deferred", outages=True)
async def deferred(world: World) -> None:
    """Deferred triggers of the user's fail at COMMIT, when every statement has been answered."""
    async with connected(world) as execute:
        await execute(DEFERRED)
        while await world.pause(0.2, 0.7):
            name = world.rng.choice(list(AT_COMMIT))
            world.outage()
            chance = world.rng.choice((0.02, 0.2, 1.0))
            await execute("insert into public.chaos_commit values (%s, %s)", chance, AT_COMMIT[name])
            world.count(f"{name} at commit")
            await trio.sleep(world.rng.uniform(0.1, 1.0))
            await execute("delete from public.chaos_commit")
            world.recovered()
        await execute("drop function public.chaos_commit() cascade; drop table public.chaos_commit")
