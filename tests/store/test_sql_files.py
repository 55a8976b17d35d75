"""The .sql files keep what their headers promise: parameters, qualified names, callers, indexes, one statement each."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import attrs
import durable_actors
import psycopg
import pytest
from durable_actors._store.move_parts import AS_FUNCTIONS, RUNNERS
from durable_actors._store.moves import MOVES, moves_by
from durable_actors._store.sql import in_schema, migrations, statement

PACKAGE = Path(durable_actors.__file__).parent
FILES = sorted((PACKAGE / "_store" / "sql").glob("*.sql"))
NAMES = [path.stem for path in FILES]
SEVERAL_STATEMENTS = {"uninstall"}
FIELDS = {"params", "returns", "locks"}
WRITES = re.compile(r'\b(?:insert into|update|delete from) "?durable"?\.gen_durable\b')
WRITERS = sorted({name for move in MOVES for name in move.functions} | AS_FUNCTIONS)
"""SQL functions that write instances."""
OLD_WRITERS = {"judge_keys"}
"""Kept for nodes of older releases; no statement of this one calls them."""
MORE_FIELDS = FIELDS | {"moves", "index", "keeps", "cost", "plan", "fence", "backoff", "hostile"}


@attrs.frozen
class Header:
    """What a file says about itself."""

    title: str
    fields: dict[str, str]


def read_header(text: str) -> Header:
    """Read the comment lines before the first statement: `-- name: purpose`, then fields and their continuations."""
    lines = text[: re.search(r"^(?!--)", text, re.MULTILINE).start()].splitlines()  # type: ignore[union-attr]
    fields = {"title": lines[0]}
    current = "title"
    for line in lines[1:]:
        field = re.match(r"-- ([a-z]+) {2,}(.+)", line) or re.match(r"-- ([a-z]{6,8}) (.+)", line)
        if field is not None and field[1] in MORE_FIELDS:
            current = field[1]
            fields[current] = field[2]
        else:
            assert re.match(r"-- {3,}\S", line), f"neither a field nor a continuation: {line!r}"
            fields[current] += " " + line[2:].strip()
    return Header(fields.pop("title"), fields)


def body_of(text: str) -> str:
    """The statement without comments and string literals."""
    return re.sub(r"'[^']*'", "''", re.sub(r"--[^\n]*", "", text))


def numbers(text: str) -> set[int]:
    return {int(number) for number in re.findall(r"\$(\d+)", text)}


@cache
def python() -> str:
    return "\n".join(path.read_text("utf-8") for path in sorted(PACKAGE.glob("**/*.py")))


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_the_header_names_the_file_and_says_what_matters(path: Path):
    header = read_header(path.read_text("utf-8"))
    assert re.match(rf"-- {path.stem}: \S.*", header.title)
    assert set(header.fields) >= FIELDS, f"missing: {FIELDS - set(header.fields)}"
    assert all(header.fields.values())


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_the_parameters_are_those_of_the_header(path: Path):
    text = path.read_text("utf-8")
    used, told = numbers(body_of(text)), numbers(read_header(text).fields["params"])
    assert told == used
    assert used == set(range(1, len(used) + 1)), "numbered without gaps"
    untyped = re.findall(r"\$\d+(?!\d|::)", body_of(text))
    assert not untyped, "without a cast its type depends on where the planner meets it first"


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_every_table_and_function_of_ours_is_qualified(path: Path):
    body = body_of(path.read_text("utf-8"))
    ours = (
        r"(gen_durable|signals|nodes|migrations|receipts|checkpoints|durable_status|judge_(?:keys|siblings)|send_signals|"
        r"gen_durable_id_seq)"
    )
    bare = [
        match[0]
        for match in re.finditer(rf"(?<![\w.]){ours}\b", body)
        if body[: match.start()].rstrip().split(" ")[-1] not in {"as", "insert"}
    ]
    assert not bare, f"unqualified: {bare}"
    assert "durable." not in in_schema(body, "other").replace('"other".', "")


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_one_file_is_one_statement(path: Path):
    ends = body_of(path.read_text("utf-8")).count(";")
    assert ends == (0 if path.stem not in SEVERAL_STATEMENTS else ends)


@pytest.mark.parametrize("name", NAMES)
def test_every_file_has_a_caller_and_every_caller_a_file(name: str):
    assert (
        re.search(rf'(statement|_session|script|InstanceCommand)\(\s*"{name}"', python())
        or f'("{name}", ' in python()
    )


def test_no_caller_without_a_file():
    called = set(re.findall(r'\bstatement\(\s*"(\w+)"', python()))
    assert called
    assert called <= set(NAMES)


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_every_update_of_the_instances_names_an_index(path: Path):
    text = path.read_text("utf-8")
    if re.search(r"\b(update|from|join) durable\.(gen_durable|signals|receipts)\b", body_of(text)):
        assert "index" in read_header(text).fields


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_what_writes_instances_declares_its_moves(path: Path):
    """In its header as in `_store/moves.py`; test_moves.py checks that it makes these and no others."""
    text = path.read_text("utf-8")
    body = body_of(text)
    called = [
        name
        for name in (*WRITERS, *RUNNERS, "heartbeat", "tell_untold")
        if re.search(rf"\bdurable\.{name}\(", body)
    ]
    declared = read_header(text).fields.get("moves", "")
    if path.stem in SEVERAL_STATEMENTS:
        return
    assert bool(declared) == bool(WRITES.search(body) or called), "writes instances, or does not"
    assert declared == " · ".join(move.name for move in moves_by(path.stem))
    made = [move.name for move in MOVES if not set(called).isdisjoint(move.functions)]
    assert set(made) <= set(declared.split(" · ")), (
        "what a function does is done by the statement that calls it"
    )


def test_every_statement_of_a_move_is_a_file():
    assert {name for move in MOVES for name in move.statements} <= set(NAMES)


def test_the_functions_that_write_instances_are_those_of_the_moves(durable_dsn: str):
    query = "select proname, prosrc from pg_proc where pronamespace = 'durable'::regnamespace"
    with psycopg.connect(durable_dsn) as db:
        found = db.execute(query).fetchall()
    assert {name for name, source in found if WRITES.search(source)} - OLD_WRITERS == set(WRITERS)


def test_the_indexes_that_headers_and_comments_name_exist(durable_dsn: str):
    with psycopg.connect(durable_dsn) as db:
        found = db.execute("select indexname from pg_indexes where schemaname = 'durable'").fetchall()
    indexes = {name for (name,) in found}
    for path in FILES:
        field = read_header(path.read_text("utf-8")).fields.get("index", "")
        named = set(re.findall(r"\b(?:gen_durable|signals|receipts)_\w+\b", field))
        assert named <= indexes, f"{path.name}: {named - indexes}"
    every = "\n".join(path.read_text("utf-8") for path in FILES)
    unread = {name for name in indexes if not re.search(rf"\b{name}\b", every)} - {
        "migrations_pkey",
        "nodes_pkey",
    }
    assert not unread, "an index that no statement names costs every write for nothing"


def test_every_statement_is_accepted_by_the_server(durable_dsn: str):
    """Prepared, not executed: names, types and functions exist, also in a schema that needs quotes."""
    with psycopg.connect(durable_dsn, autocommit=True) as db:
        for name in NAMES:
            if name not in SEVERAL_STATEMENTS | {"ensure_migrations"}:
                sql = statement(name, "durable").sql
                db.execute(f"prepare {name} as {sql}", prepare=False)
                row = db.execute(
                    "select cardinality(parameter_types) from pg_prepared_statements where name = %s", [name]
                ).fetchone()
                assert row == (len(numbers(body_of(sql))),), name


def test_uninstall_drops_everything_that_the_migrations_make():
    made = set(
        re.findall(r"create (?:table|type|function) durable\.(\w+)", "\n".join(m.sql for m in migrations()))
    )
    dropped = set(re.findall(r'drop \w+ if exists "durable"\.(\w+)', statement("uninstall", "durable").sql))
    assert made <= dropped, made - dropped


def test_nothing_listens_or_notifies():
    """Case 38: a pooler in transaction mode has no session to listen in, and a queue of notifications may fill up."""
    words = re.compile(r"\b(?:un)?listen\s+[\w\"*]|\bnotify\s+[\w\"]|\bpg_notify\b", re.IGNORECASE)
    for path in sorted(PACKAGE.rglob("*.sql")):
        assert not words.search(body_of(path.read_text("utf-8"))), path.name
    for path in sorted(PACKAGE.rglob("*.py")):
        assert not re.search(r"pg_notify|\"(?:UN)?LISTEN |\"NOTIFY ", path.read_text("utf-8")), path.name
