"""Whatever is typed after a verb: it works, or one line says why not; never a traceback, never a warning of no use."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import durable_actors as da
import pytest
from click.testing import CliRunner, Result
from durable_actors._postgres import target
from durable_actors.cli import cli
from hypothesis import given, strategies as st
from tests.fuzz.kit import any_text, define, fuzz

pytestmark = pytest.mark.usefixtures("registry")

TEXTS = [
    "", " ", "0", "-1", "1", "1.5", "99999999999999999999", "9" * 5000, "a", "\udcff", "\ud800", "x" * 10_000,
    "-", "--", "'; drop table canary; --", "{", "null", "[1e999]", "[" * 20_000, '"\\u0000"', '{"a": 1}', "NaN", "inf",
    "é", "2030-01-01T00:00+01:00", "0001-01-01T00:00", "0001-01-01T00:00+14:00", "9999-12-31T23:59:59-14:00",
    "2030-02-30", "os:system", "a/b.py", ".x", "..", "a b", "\u202e\n\t\x1b[31m", "default=", "=5", "default=5+",
    "default=99999999999", "a=1+1", "5m", "-5m", "1ms", "999999999999d", "a\0b", "postgresql://[", "host=/nonexistent",
    "pg_x", 'durable"; drop', "runnable", "raise", "host=127.0.0.1 port=1 password=secret",
    "postgresql://u:secret@127.0.0.1:1/x",
]  # fmt: skip

DATABASE = ["--schema", "--dsn"]
INSERT = [
    "--state",
    "--step",
    "--queue",
    "--priority",
    "--unique-key",
    "--partition-key",
    "--in",
    "--at",
    "--on-duplicate",
]
SERVE = [
    "--queue", "--node", "--lease", "--poll", "--max-poll", "--long-poll", "--reap", "--dead-after", "--drain",
    "--start-timeout", "--max-crashes", "--pool-size", "--threads", "--session-dsn",
]  # fmt: skip
FILTERS = ["--status", "--machine", "--queue", "--step", "--error", "--tag", "--parent", "--older-than"]
# (what stands before the option, its names). A schema that is not there ends `serve` before it runs.
VERBS: dict[str, tuple[list[str], list[str]]] = {
    "insert": (["good"], ["--module", *INSERT, *DATABASE]),
    "signal": (["1", "n"], ["--dedup-key", *DATABASE]),
    "list": (
        [],
        [
            "--status",
            "--waiting",
            "--machine",
            "--queue",
            "--key",
            "--limit",
            "--before",
            "--depth",
            *DATABASE,
        ],
    ),
    "show": (["1"], DATABASE),
    "tree": (["1"], ["--depth", "--children", "--limit", *DATABASE]),
    "graph": (["1"], ["--barrier", "--limit", "--format", "--module", *DATABASE]),
    "retry": (["1"], [*FILTERS, "--by", "--reason", "--idempotency-key", *DATABASE]),
    "cancel": (["1"], ["--children", "--by", "--reason", "--idempotency-key", *DATABASE]),
    "run-now": ([], [*FILTERS, "--by", "--reason", "--idempotency-key", *DATABASE]),
    "rerun": (["1"], ["--step", "--state", "--at-rev", "--by", "--reason", "--idempotency-key", *DATABASE]),
    "pause": (["1"], ["--by", "--reason", "--idempotency-key", *DATABASE]),
    "resume": (["1"], ["--by", "--reason", "--idempotency-key", *DATABASE]),
    "queue": (["pause", "q"], ["--machine", "--until", "--by", "--reason", "--idempotency-key", *DATABASE]),
    "schedules": (
        ["backfill", "s"],
        ["--from", "--to", "--by", "--reason", "--idempotency-key", *DATABASE],
    ),
    **dict.fromkeys(
        ("proceed", "approve", "reject"),
        (["1"], ["--by", "--reason", "--idempotency-key", "--comment", "--data", *DATABASE]),
    ),
    "audit": ([], ["--command", "--limit", "--before", *DATABASE]),
    "queues": ([], DATABASE),
    "nodes": ([], DATABASE),
    "top": ([], ["--interval", *DATABASE]),
    "migrate": (["--check"], ["--to", *DATABASE]),
    "uninstall": (["--yes"], DATABASE),
    "serve": (["json", "--no-migrate", "--schema", "nothing_here"], SERVE),
}
ARGUMENTS = [
    ["show"],
    ["show", "--key"],
    ["tree"],
    ["graph"],
    ["graph", "--key"],
    ["retry"],
    ["cancel"],
    ["rerun"],
    ["run-now"],
    ["proceed"],
    ["approve"],
    ["reject"],
    ["cancel", "--force"],
    ["cancel", "--key"],
    ["retry", "--key"],
    ["pause"],
    ["resume"],
    ["queue"],
    ["queue", "pause"],
    ["queue", "resume"],
    ["schedules"],
    *(["schedules", each] for each in ("pause", "resume", "run", "delete")),
    ["audit"],
    ["audit", "--key"],
    ["insert"],
    ["signal", "1"],
    ["signal", "1", "n"],
    ["pg"],
    [],
]


class Shell:
    def __init__(self, dsn: str) -> None:
        self.environ = {"DURABLE_DSN": dsn, "COLUMNS": "200"}

    def run(self, *arguments: str) -> Result:
        found = CliRunner().invoke(cli, arguments, env=self.environ, input="")
        told = (arguments, found.output[-500:], found.exception)
        assert found.exit_code in {0, 1, 2}, told
        assert found.exception is None or isinstance(found.exception, SystemExit), told
        assert "Traceback" not in found.output, told
        if found.exit_code == 1 and "--check" not in arguments:
            assert all(line.startswith("durable-actors: ") for line in found.stderr.splitlines()), told
        return found


@pytest.fixture
def shell(durable_dsn: str) -> Shell:
    return Shell(durable_dsn)


options = st.sampled_from([(verb, option) for verb, (_, names) in VERBS.items() for option in names])
texts = st.one_of(st.sampled_from(TEXTS), any_text)


@fuzz(60)
@given(which=options, text=texts)
def test_options(shell, which, text):
    define()
    verb, option = which
    found = shell.run(verb, *VERBS[verb][0], option, text)
    assert option not in {"--dsn", "--session-dsn"} or "secret" not in found.output


@fuzz(20)
@given(before=st.sampled_from(ARGUMENTS), text=texts)
def test_arguments(shell, before, text):
    define()
    shell.run(*before, text)


@fuzz(15)
@given(
    words=st.lists(st.one_of(st.sampled_from([*VERBS, *DATABASE, "--json", "-h", "-v"]), texts), max_size=5)
)
def test_any_words(shell, words):
    define()
    if not {"serve", "uninstall", "top", "demo", "pg", "migrate"} & set(words):
        shell.run(*words)


def test_what_is_wrong_is_named(shell):
    define()
    for arguments, words in (
        (("insert", "good", "--at", "0001-01-01T00:00+14:00"), "--at"),
        (("insert", "good", "--state", "{"), "--state"),
        (("insert", "good", "--priority", "40000"), "priority"),
        (("insert", "good", "--queue", "q" * 300), "queue must have at most 255"),
        (("show", "9" * 5000), "is not an instance id"),
        (("list", "--queue", "\udcff"), "surrogate"),
        (("list", "--schema", 'x"; drop'), "schema="),
        (("list", "--dsn", "\udcff"), "dsn is not a Postgres connection string"),
        (("serve", "json", "--lease", "0"), "lease_ttl=0"),
        (("serve", "json", "--queue", "a=0"), "queues['a'] concurrency=0"),
    ):
        found = shell.run(*arguments)
        assert found.exit_code in {1, 2}
        assert words in found.stderr, (arguments, found.stderr)


# -- the embedded server


@pytest.fixture
def embedded(durable_dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if nothing was configured, and the embedded server was this test's."""

    @asynccontextmanager
    async def open_embedded() -> AsyncIterator[Any]:
        yield SimpleNamespace(data_dir="where/it/is", dsn=lambda: durable_dsn)

    monkeypatch.setattr(target, "open_embedded", open_embedded)


@pytest.mark.usefixtures("embedded")
def test_verbs_that_change_something_tell_of_the_embedded_server_those_that_look_do_not(caplog):
    define()
    environ = {"DURABLE_DSN": "embedded"}
    for verb, told in (
        (["list"], 0),
        (["queues"], 0),
        (["nodes"], 0),
        (["insert", "good"], 1),
        (["migrate"], 1),
    ):
        caplog.clear()
        assert CliRunner().invoke(cli, verb, env=environ).exit_code == 0
        warnings = [each for each in caplog.records if each.levelno >= logging.WARNING]
        assert ["where/it/is" in each.getMessage() for each in warnings] == [True] * told, verb


@pytest.mark.usefixtures("embedded")
async def test_a_client_and_an_engine_tell_of_the_embedded_server_once(caplog):
    for opened in (da.open_client(dsn="embedded"), da.open_engine(dsn="embedded", queues={})):
        caplog.clear()
        async with opened:
            pass
        assert sum("where/it/is" in each.getMessage() for each in caplog.records) == 1
