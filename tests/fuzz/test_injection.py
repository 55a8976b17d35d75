"""Names, keys and texts with SQL in them are data: stored as they are, found as they are, never run."""

from __future__ import annotations

import json
from typing import Any

import durable_actors as da
import psycopg
import pytest
import trio
from click.testing import CliRunner
from durable_actors import aio, sync
from durable_actors._store.migrate import migrate, migration_sql, uninstall
from durable_actors._store.sql import in_schema
from durable_actors.cli import cli
from hypothesis import given
from psycopg.conninfo import make_conninfo
from tests.fuzz.kit import any_text, engine, fuzz

pytestmark = pytest.mark.usefixtures("registry")

EVIL = [
    "'; drop table canary; --",
    '"; drop table canary; --',
    "$$; drop table canary; $$",
    "\\'; drop table canary; --",
    "\\\\x27; drop table canary; --",
    "'); drop table canary; commit; --",
    "' || (drop table canary) || '",
    '{a,"b",NULL}',
    'a","b',
    "NULL",
    "%s %(x)s %% $1 :x ?",
    "U&'\\0027; drop table canary'",
    "’; ʼ＇ drop table canary; --",
    "/* */ drop table canary",
    "durable.gen_durable",
    "x\x01y\x02z",
    "\u202e\u2028é中🦜",
]
PRINTABLE = [each for each in EVIL if each.isprintable()]

SCHEMAS = [
    'durable"; drop table canary; --', "durable'; drop table canary; --", "a.b", "Durable", "dürable", "a b", "a;b", "",
    "1a", "pg_catalog", "x" * 64, 'a"b', "a\0b", "durable\n", "durable--", "$user", "\ud800",
]  # fmt: skip


@pytest.fixture
def canary(conn):
    conn.execute("create table canary (sings boolean)")
    conn.execute("insert into canary values (true)")
    yield
    assert conn.execute("select sings from canary").fetchall() == [(True,)]
    assert conn.execute("select count(*) >= 0 from durable.gen_durable").fetchone() == (True,)


def define(evil: str, queue: str) -> Any:
    class M(da.Machine, name=evil, queue=queue):
        @da.step
        async def start(self, ctx: Any) -> da.Outcome:
            return da.Await([evil], {"seen": evil}, then=self.end)

        @da.step
        async def end(self, ctx: Any) -> da.Outcome:
            if ctx.awaited[0].payload == "stop":
                return da.Stop(evil)
            return da.Done([evil, *(signal.payload for signal in ctx.awaited)])

    return M


async def run_evil(index: int, machine: Any, evil: str) -> None:
    """Everything that a caller may name, by its evil name."""
    key = f"{evil} {index}"
    number = await da.insert(
        machine, state={evil: evil}, unique_key=key, partition_key=key, on_duplicate="raise"
    )
    assert number is not None
    with pytest.raises(da.Duplicate):
        await da.insert(machine, unique_key=key, on_duplicate="raise")
    await da.signal(key, evil, evil, dedup_key=evil)
    assert (await da.signal_many([{"target": key, "name": evil, "payload": evil, "dedup_key": evil}]))[0] in {
        "duplicate",
        "no_target",
    }
    assert await da.result(number, timeout=30) == [evil, evil]
    found = await da.inspect(key)
    assert (found.id, found.machine, found.queue, found.state) == (
        number,
        evil,
        evil,
        {"seen": evil},
    )
    assert (found.partition_key, found.unique_key) == (key, key)
    loser = await da.signal_with_start(machine, key=key, name=evil, payload="stop", dedup_key=evil)
    with pytest.raises(da.InstanceFailed) as failed:
        await da.result(loser, timeout=30)
    assert failed.value.reason == evil


async def test_evil_names_are_data(durable_dsn, canary):
    machines = [(define(evil, evil), evil) for evil in EVIL]
    dsn = make_conninfo(durable_dsn, application_name=EVIL[0])
    queues = dict.fromkeys([*EVIL, "q" * 255, "a/b", "a%2Fb"], 2)
    async with engine(dsn, name=PRINTABLE[0], node=PRINTABLE[1], queues=queues) as running:
        assert running.incarnation.startswith(PRINTABLE[1])
        async with trio.open_nursery() as nursery:
            for index, (machine, evil) in enumerate(machines):
                nursery.start_soon(run_evil, index, machine, evil)


def test_evil_names_on_the_callers_connections(conn, canary):
    for evil in EVIL:
        machine = define(evil, evil)
        number = sync.insert(conn, machine, unique_key=evil, partition_key=evil, state={"a": evil})
        sync.signal(conn, evil, evil, evil, dedup_key=evil)
        row = conn.execute(
            "select g.fsm, g.queue, g.partition_key, convert_from(g.unique_key, 'UTF8'), g.state, s.name, s.payload,"
            " s.dedup_key from durable.gen_durable g join durable.signals s on s.target_id = g.id where g.id = %s",
            [number],
        ).fetchone()
        assert row == (evil, evil, evil, evil, {"a": evil}, evil, evil, evil)


def test_evil_names_in_a_shell(durable_dsn, conn, canary):
    def run(*arguments: str) -> Any:
        found = CliRunner().invoke(
            cli, [arguments[0], "--json", *arguments[1:]], env={"DURABLE_DSN": durable_dsn}
        )
        assert found.exit_code == 0, (arguments, found.output, found.exception)
        return json.loads(found.stdout)

    for evil in EVIL[::4]:
        sync.insert(conn, define(evil, evil), unique_key=evil, partition_key=evil)
        for option in ("--machine", "--queue", "--key"):
            assert [each["machine"] for each in run("list", option, evil)["instances"]] == [evil]
        assert run("show", "--key", "--", evil)["queue"] == evil
        assert (
            run("signal", "--key", "--dedup-key", evil, "--", evil, evil, json.dumps(evil))["outcome"]
            == "sent"
        )
    assert {each["queue"] for each in run("queues")} == set(EVIL[::4])


async def test_a_schema_is_a_plain_name_or_refused(durable_dsn, conn, canary):
    machine = define("m", "q")
    for schema in SCHEMAS:
        await refuse_schema(durable_dsn, conn, machine, schema)


async def refuse_schema(durable_dsn: str, conn: Any, machine: Any, schema: str) -> None:
    for call in (
        lambda: da.Config(dsn=durable_dsn, schema=schema),
        lambda: sync.insert(conn, machine, schema=schema),
        lambda: sync.signal(conn, 1, "n", schema=schema),
        lambda: migration_sql(schema),
        lambda: in_schema("select 1 from durable.gen_durable", schema),
    ):
        with pytest.raises(da.ConfigError, match="schema="):
            call()
    for coroutine in (
        migrate(durable_dsn, schema=schema),
        uninstall(durable_dsn, schema=schema),
        aio.insert(conn, machine, schema=schema),  # type: ignore[arg-type]
        aio.signal(conn, 1, "n", schema=schema),  # type: ignore[arg-type]
    ):
        with pytest.raises(da.ConfigError, match="schema="):
            await coroutine


@pytest.mark.parametrize("schema", ["select", "x" * 63])
async def test_a_reserved_word_is_a_schema_like_any_other(durable_dsn, conn, canary, schema):
    machine = define("m", "q")
    async with engine(durable_dsn, schema=schema):
        number = await da.insert(machine)
        await da.signal(number, "m", "x")
        assert await da.result(number, timeout=30) == ["m", "x"]
    assert conn.execute("select count(*) from durable.gen_durable").fetchone() == (0,)
    assert await uninstall(durable_dsn, schema=schema)


@fuzz(80)
@given(schema=any_text)
def test_no_text_gets_into_a_statement_as_a_schema(schema):
    """What is not refused is a plain name; quoted, it cannot end its own quotes."""
    try:
        text = in_schema("select 1 from durable.gen_durable", schema)
    except da.ConfigError:
        return
    assert text == f'select 1 from "{schema}".gen_durable'
    assert set(schema) <= set("abcdefghijklmnopqrstuvwxyz0123456789_")


def test_a_session_keeps_its_name(durable_dsn, canary):
    """Not ours to quote: libpq sends it as a value."""
    with psycopg.connect(make_conninfo(durable_dsn, application_name=EVIL[0])) as own:
        assert own.execute("show application_name").fetchone() == (EVIL[0],)
