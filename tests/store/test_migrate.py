from __future__ import annotations

import hashlib
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import attrs
import durable_actors as da
import psycopg
import pytest
import trio
from durable_actors import errors
from durable_actors._postgres import target
from durable_actors._postgres.driver.connection import PgConn
from durable_actors._postgres.driver.statement import Statement
from durable_actors._store import migrate as migrating
from durable_actors._store.sql import Migration, in_schema, migrations

# A released migration never changes; a new one gets a new number. Add its line here, edit none.
CHECKSUMS = {
    1: "637f2ca7eed50a298e99c9dd5695474025843bc4f79bfe372ef02f271768f990",
    2: "b0f796dcc71af44d086ee8a47e6f084487cdf51fdd8a59f72a361865805b1119",
    3: "14fd5e99f99114cad136399515157245a12ccd9566faeda098d97fbe3da51fc5",
    4: "d7f5dce90912d41a1ad4b454d220fb822499ca4cc73adde0098ac98492d108f2",
    5: "914b0edf66bff87524162c3053619f99ba9db6d3414dd2fca3776eb6331e0f78",
    6: "6794ed8ed6f09c8647dc7e3db60193211c605da032b3dcf7d8dda96df05e9133",
    7: "5fb63172c66f89e64e6e1a1b2b01b489a2a9ebe32e2b96a2b95105b55c5a9fe1",
    8: "853aaa0282ba06aeafe4135a0cfa2f0399e29a701f189bd6974637c857f4e2ab",
    9: "036cba372514c9590462b5a0d4c822a2a9b661466a9532a18a1801f329f45c21",
    10: "c28e17b21da664fcfb9e669b540c541ea3123259085bb48f0b78b6bb6f99e077",
    11: "474d1c527e57a5b95f865ec167b707110dbc397b2559e16ae84bfa62b2b2f884",
    12: "935a1a9f8b0b5f9bf2ffaa9a552e3986e3bd8471c91c89f426d0b2ea471c7f87",
    13: "541b0a680716555f97ef593dbe67bad98f10c2ed47d6e8a0b3d3a7e86018058b",
    14: "0280b2252bd4b93c64e35ff1a31ae53d4f9d817a18f662369490fb2993d9dec7",
    15: "512a84ff8dc515c94760309617e6f9e590bc66cb3a021ea6ad6072d33d92c077",
    16: "11430f419defd9e7a48cd96f3642172de5e9dcedc7e85ffd0f7b169c9a0e21c1",
    17: "59e3be8886bd2477a8885e838e6792a407c1ee4cdd263a009eacf39d4bbd7517",
    18: "2b5be35366141c42117e87efaa982eaf95ea7c9aea346432be84fd3b175e328a",
    19: "5f56f67c6a38fcf951cd6877a102f674e4789246004e7fc967a875eebde9a6e4",
    20: "a971d429d5d817e5b317111e3dafe72cf30c9f91f4b7bcaf3eda1f59be7e9ba7",
    21: "619ddc24569fc1b2e2c297476fc4a263fb437e84c430becc01db1c137a0916f9",
    22: "f3b4f7e4d37f2514db489c9c65da77d73dacb6c5c2a35cb85fc225630ab53c87",
    23: "98927db3606d0bd380268dcbc5329ce6d73cd97ff7fd03310f229d365bfaa8e0",
    24: "50588efea64f90e1d564e1a9086ef4e0bcf09aa9a88fca731a5b4d85070bd0ff",
    25: "ba2feb7fbe0b2720d4ac1e8d10c49b54297ca51e4a88cecddf7606f5e5c36d59",
    26: "e7f9dddbeca16ef7c36f5f48c69e7dbc84835249ef43ba5f2bcc9e5bc2850028",
    27: "9bc8ed09340bb844d9246671d5b729259e5da59122ce6f3089fffa08a042a40e",
    28: "fc51327b907c2a362cec9658d03dadce73d4fdb8a464e3fef45791abdf7878dc",
    29: "a7e818986197c6860e865732882c51f2125dd8f473f9f2de5f320fa6d558a3a0",
    30: "3873bb5b2f250ba7065ea1f72fab3dd3c1da3b1ba5e1b866eb7c82e563cc4cc4",
    31: "c6a14d9c8194ead3af9b0d35815bd146de866b81caa39ab5c583309926fb20c3",
    32: "37b7e8733d999e4926e171d00bf245d7c8941f45678fe57f032fc54d910d50c2",
    33: "8a2cbf34aaf7710b2e9dfdd7b97e1c9cd9fee91a60d9d98e0ab54fa76f1241ae",
}


def fake(version: int, sql: str = "select 1;", *, transactional: bool = True) -> Migration:
    return Migration(version=version, name=f"fake_{version}", sql=sql, transactional=transactional)


def tables(dsn: str) -> set[str]:
    with psycopg.connect(dsn) as conn:
        return {
            f"{schema}.{table}"
            for schema, table in conn.execute(
                "select schemaname, tablename from pg_tables"
                " where schemaname not in ('pg_catalog', 'information_schema')"
            )
        }


def test_released_migrations_are_frozen():
    assert {m.version: hashlib.sha256(m.sql.encode()).hexdigest() for m in migrations()} == CHECKSUMS


def test_migrations_are_numbered_without_gaps():
    assert [m.version for m in migrations()] == list(range(1, len(migrations()) + 1))


@attrs.frozen
class Planned:
    """What `plan` decides about a database: a version and pending migrations, or why it refuses."""

    applied: dict[int, int]
    shipped: int
    target: int | None = None
    pending: tuple[int, ...] = ()
    newer: bool = False
    refused: str | None = None


PLANS = {
    "empty": Planned({}, 3, pending=(1, 2, 3)),
    "empty, up to": Planned({}, 3, target=2, pending=(1, 2)),
    "older": Planned({1: 0}, 3, pending=(2, 3)),
    "older, with a hole": Planned({1: 0, 3: 0}, 3, pending=(2,)),
    "the same": Planned({1: 0, 2: 1, 3: 1}, 3),
    "newer, works with the newest of ours": Planned({1: 0, 2: 1, 3: 2}, 2, newer=True),
    "newer, works with older ones than ours": Planned({2: 1, 3: 1, 4: 1}, 2, newer=True),
    "newer, with a hole: nothing is applied": Planned({1: 0, 4: 2}, 2, newer=True),
    "newer, with a condition that we fulfil from before": Planned({1: 0, 2: 2, 3: 1}, 2, newer=True),
    "too new": Planned(
        {1: 0, 2: 1, 3: 3}, 2, refused=r"at version 3 and needs a package of version 3 or newer"
    ),
    "one of several too new": Planned(
        {1: 0, 3: 3, 4: 1}, 2, refused=r"at version 4 and needs a package of version 3"
    ),
    "newer, and does not say": Planned(
        {1: 0, 4: 0}, 1, refused=r'"s" is at version 4, this durable_actors \('
    ),
    "newer, and one does not say": Planned({1: 0, 3: 0, 4: 1}, 2, refused=r"knows 2: .* Upgrade the package"),
    "a way back": Planned(
        {1: 0, 2: 0}, 2, target=1, refused=r"version=1 cannot be reached: the database is at 2"
    ),
    "a way back from a newer one": Planned({1: 0, 2: 1, 3: 1}, 2, target=2, refused="the database is at 3"),
    "too far": Planned({}, 1, target=9, refused="version=9"),
}


@pytest.mark.parametrize("case", PLANS.values(), ids=PLANS)
def test_plan(case: Planned):
    shipped = [fake(version) for version in range(1, case.shipped + 1)]
    if case.refused is not None:
        with pytest.raises((errors.SchemaError, errors.ConfigError), match=case.refused):
            migrating.plan(case.applied, shipped, schema="s", target=case.target)
        return
    found = migrating.plan(case.applied, shipped, schema="s", target=case.target)
    assert tuple(m.version for m in found.pending) == case.pending
    assert (found.current, found.latest) == (max(case.applied, default=0), case.shipped)
    assert found.works_with == max(case.applied.values(), default=0)
    assert found.is_newer is case.newer


async def test_migrate_makes_the_schema_and_says_so_once(empty_dsn: str):
    seen: list[str] = []
    first = await migrating.migrate(empty_dsn, on_progress=lambda m: seen.append(m.name))
    assert (first.current, first.pending) == (first.latest, ())
    again = await migrating.migrate(empty_dsn, on_progress=lambda m: seen.append(m.name))
    assert again == first
    assert seen == [m.name for m in migrations()]
    assert {"durable.gen_durable", "durable.signals", "durable.migrations"} <= tables(empty_dsn)


async def test_the_embedded_server_is_migrated_by_its_name(empty_dsn: str, monkeypatch: pytest.MonkeyPatch):
    """`dsn="embedded"` means here what it means to an engine."""

    class Server:
        data_dir = "somewhere"

        def dsn(self) -> str:
            return empty_dsn

    @asynccontextmanager
    async def started() -> AsyncIterator[Server]:
        yield Server()

    monkeypatch.setattr(target, "open_embedded", started)
    done = await migrating.migrate("embedded")
    assert done.current == done.latest
    assert "durable.gen_durable" in tables(empty_dsn)


async def test_many_migrators_at_once_apply_each_migration_once(empty_dsn: str):
    seen: list[int] = []
    async with trio.open_nursery() as nursery:
        for _ in range(8):
            nursery.start_soon(
                lambda: migrating.migrate(empty_dsn, on_progress=lambda m: seen.append(m.version))
            )
    assert seen == [m.version for m in migrations()]


@pytest.mark.parametrize("schema", ["orders", "user", "select", "_x9", "a" * 63])
async def test_any_valid_schema_name_works_quoted(empty_dsn: str, schema: str):
    await migrating.migrate(empty_dsn, schema=schema)
    assert f"{schema}.gen_durable" in tables(empty_dsn)
    assert not any(name.startswith("durable.") for name in tables(empty_dsn))


@pytest.mark.parametrize(
    "schema", ["", "Durable", "1a", "a-b", 'a"; drop schema public; --', "pg_x", "a" * 64, "é", "a b", "a\n"]
)
async def test_a_bad_schema_name_is_refused_before_anything_is_sent(schema: str):
    with pytest.raises(errors.ConfigError, match="schema=") as caught:
        await migrating.migrate("host=nowhere.invalid", schema=schema)
    assert caught.value.option == "schema"


async def test_two_schemas_live_side_by_side(empty_dsn: str):
    await migrating.migrate(empty_dsn, schema="one")
    await migrating.migrate(empty_dsn, schema="two")
    assert await migrating.uninstall(empty_dsn, schema="one")
    assert {name.split(".")[0] for name in tables(empty_dsn)} == {"two"}


async def test_a_failing_migration_leaves_nothing_and_names_itself(empty_dsn: str):
    broken = [
        fake(1, "create table durable.a (x int);"),
        fake(2, "create table durable.b (x int); select 1/0;"),
    ]
    conn = await PgConn.open(empty_dsn)
    with pytest.raises(psycopg.errors.DivisionByZero) as caught:
        await migrating.migrate_on(conn, schema="durable", shipped=broken)
    conn.close()
    assert any("0002_fake_2" in note for note in caught.value.__notes__)
    assert tables(empty_dsn) == {"durable.a", "durable.migrations"}


async def test_a_migration_outside_a_transaction_is_recorded_too(empty_dsn: str):
    shipped = [
        fake(1, "create table durable.a (x int);"),
        fake(2, "create index concurrently a_x on durable.a (x);", transactional=False),
    ]
    async with trio.open_nursery() as nursery:  # a waiting migrator must not block the concurrent build
        for _ in range(3):
            nursery.start_soon(_migrate_and_close, empty_dsn, shipped)
    with psycopg.connect(empty_dsn) as conn:
        assert conn.execute(
            "select array_agg(version order by version) from durable.migrations"
        ).fetchone() == ([1, 2],)
        assert conn.execute(
            "select indisvalid from pg_index where indexrelid = 'durable.a_x'::regclass"
        ).fetchone() == (True,)


async def _migrate_and_close(dsn: str, shipped: list[Migration]) -> None:
    conn = await PgConn.open(dsn)
    try:
        await migrating.migrate_on(conn, schema="durable", shipped=shipped)
    finally:
        conn.close()


async def test_cancelled_in_a_migration_rolls_it_back(empty_dsn: str):
    shipped = [fake(1, "create table durable.a (x int); select pg_sleep(60);")]
    conn = await PgConn.open(empty_dsn)
    with trio.CancelScope() as scope:
        await migrating.migrate_on(
            conn, schema="durable", shipped=shipped, on_progress=lambda _: _cancel_soon(scope)
        )
    assert scope.cancelled_caught
    assert conn.pristine
    conn.close()
    assert tables(empty_dsn) == {"durable.migrations"}


def _cancel_soon(scope: trio.CancelScope) -> None:
    scope.deadline = trio.current_time() + 0.05


async def test_a_schema_from_the_future_is_refused(durable_dsn: str):
    with psycopg.connect(durable_dsn, autocommit=True) as admin:
        admin.execute("insert into durable.migrations (version, name) values (999, 'from_the_future')")
    conn = await PgConn.open(durable_dsn)
    for call in (migrating.require_schema, migrating.schema_version, migrating.migrate_on):
        with pytest.raises(errors.SchemaError, match=r"version 999.*Upgrade the package"):
            await call(conn, schema="durable")
    conn.close()


async def test_a_newer_schema_that_works_with_this_package_is_used(
    durable_dsn: str, caplog: pytest.LogCaptureFixture
):
    latest = migrations()[-1].version
    with psycopg.connect(durable_dsn, autocommit=True) as admin:
        admin.execute(
            "insert into durable.migrations (version, name, works_with) values (%s, 'next', %s)",
            [latest + 1, latest],
        )
    conn = await PgConn.open(durable_dsn)
    assert (await migrating.migrate_on(conn, schema="durable")).pending == ()
    assert not caplog.records, "only one of the steps of a start tells it"
    await migrating.require_schema(conn, schema="durable")
    conn.close()
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert f"at version {latest + 1}, this durable_actors ({da.__version__}) knows {latest}" in record.message


async def test_a_missing_schema_is_refused_with_the_remedy(empty_dsn: str):
    conn = await PgConn.open(empty_dsn)
    with pytest.raises(errors.SchemaError, match=r"does not exist.*durable-actors migrate"):
        await migrating.require_schema(conn, schema="durable")
    conn.close()


async def test_a_role_without_rights_is_told_what_to_do(empty_dsn: str):
    role = "durable_test_guest"
    with psycopg.connect(empty_dsn, autocommit=True) as admin:
        admin.execute(
            f"do $$ begin create role {role} login;"
            " exception when duplicate_object or unique_violation then null; end $$"
        )
    conn = await PgConn.open(empty_dsn)
    await conn.script(f"set session authorization {role}")
    with pytest.raises(errors.SchemaError, match=r"may not create schema.*migrate --sql"):
        await migrating.migrate_on(conn, schema="durable")
    conn.close()


async def test_the_printed_sql_does_the_same(empty_dsn: str):
    conn = await PgConn.open(empty_dsn)
    parts = migrating.migration_parts("printed")
    assert migrating.migration_sql("printed") == "\n\n".join(parts) + "\n"
    for part in parts:  # as psql sends them
        await conn.script(part)
    await migrating.require_schema(conn, schema="printed")
    await migrating.migrate_on(conn, schema="durable")
    conn.close()
    with psycopg.connect(empty_dsn) as db:
        recorded = "select version, name, works_with from {}.migrations order by version"
        by_hand, ours = (db.execute(recorded.format(name)).fetchall() for name in ("printed", "durable"))  # type: ignore[arg-type]
    assert by_hand == ours
    assert (15, "works_with", 9) in ours


async def test_uninstall_keeps_what_is_not_ours(durable_dsn: str):
    with psycopg.connect(durable_dsn, autocommit=True) as admin:
        admin.execute("create table durable.mine (x int)")
    assert not await migrating.uninstall(durable_dsn)
    assert tables(durable_dsn) == {"durable.mine"}
    assert not await migrating.uninstall(durable_dsn), "a schema without our record is left alone"


async def test_uninstall_removes_everything(durable_dsn: str):
    assert await migrating.uninstall(durable_dsn)
    assert tables(durable_dsn) == set()
    with psycopg.connect(durable_dsn) as conn:
        assert conn.execute("select 1 from pg_namespace where nspname = 'durable'").fetchone() is None


async def test_uninstall_waits_for_a_migrator(empty_dsn: str):
    """Beside it, it would drop the record that the migrator is about to write to, and leave the rest."""
    waits = "select 1 from pg_locks where locktype = 'advisory' and not granted"
    tries = "select 1 from pg_stat_activity where query like '%pg_try_advisory_lock%' and pid <> all (array[{}, {}])"
    held = fake(1, "create table durable.made (x int); select pg_advisory_xact_lock(4712);")
    removed: list[bool] = []

    async def make(conn: PgConn) -> None:
        try:
            await migrating.migrate_on(conn, schema="durable", shipped=[held])
        finally:
            conn.close()

    async def remove() -> None:
        removed.append(await migrating.uninstall(empty_dsn))

    with psycopg.connect(empty_dsn, autocommit=True) as other:

        async def see(query: str) -> None:
            with trio.fail_after(20):  # one that does not wait never tries: it stands in the migrator's locks
                while not other.execute(query).fetchall():  # type: ignore[arg-type]
                    await trio.sleep(0.01)

        other.execute("select pg_advisory_lock(4712)")
        conn = await PgConn.open(empty_dsn)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(make, conn)
            await see(waits)
            nursery.start_soon(remove)
            await see(tries.format(conn.pid, other.info.backend_pid))
            assert not removed
            other.execute("select pg_advisory_unlock(4712)")
    assert removed == [False], "of what the migrator made, this table is not ours"
    assert tables(empty_dsn) == {"durable.made"}


async def test_an_old_server_is_refused(pg_dsn: str, monkeypatch: pytest.MonkeyPatch):
    old = Statement("server_version", "select '130022', '13.22', false", read_only=True)
    monkeypatch.setattr(migrating, "_SERVER", old)
    with pytest.raises(errors.SchemaError, match=r"needs Postgres 14 or newer, this server is 13\.22"):
        await migrating.migrate(pg_dsn)


def test_only_qualifiers_are_rewritten():
    assert (
        in_schema("select durable.a from durable.b -- durable_x", "s")
        == 'select "s".a from "s".b -- durable_x'
    )
