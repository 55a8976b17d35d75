"""Releases, their schema versions, and what nodes of an older one ignore."""

from __future__ import annotations

import re
from pathlib import Path

import attrs
import durable_actors as da
import psycopg
import pytest
from durable_actors._postgres.driver.connection import PgConn
from durable_actors._store import releases
from durable_actors._store.node import feature_warning, read_live_nodes, register_node
from durable_actors._store.releases import COMMANDS, FEATURES, RELEASES, LiveNode
from durable_actors._store.sql import migrations

ROOT = Path(__file__).parents[2]
OLD = LiveNode("old:1", "0.1.0.dev0")
NEW = LiveNode("new:1", da.__version__)


def test_the_newest_release_is_this_package():
    """A new migration belongs to the release that is being made: raise its number in RELEASES."""
    assert list(RELEASES)[-1] == ".".join(da.__version__.split(".")[:2])
    assert list(RELEASES.values())[-1] == migrations()[-1].version
    assert sorted(RELEASES.values()) == list(RELEASES.values())


def test_every_migration_works_with_the_release_before():
    """Unless its file says otherwise. Rows before 0015 record nothing, so it speaks for those before it."""
    found = {migration.version: migration.works_with for migration in migrations()}
    assert [found[version] for version in (1, 9, 10, 14, 15, 16)] == [0, 0, 9, 9, 9, 9]
    assert all(0 <= oldest < version for version, oldest in found.items())
    before = list(RELEASES.values())[-2]
    assert max(found.values()) <= before, (
        "name the release that cannot be upgraded from in the page on deploys"
    )


def test_a_file_may_say_with_whom_it_works(monkeypatch: pytest.MonkeyPatch):
    from durable_actors._store import sql  # noqa: PLC0415 - its private reader

    class Files:
        def joinpath(self, _: str) -> Files:
            return self

        def iterdir(self) -> list[File]:
            return [
                File("0016_said.sql", "-- why\n-- works with: 12\nselect 1;"),
                File("0012_x.sql", "select 1;"),
            ]

    @attrs.frozen
    class File:
        name: str
        text: str

        def read_text(self, _: str) -> str:
            return self.text

    monkeypatch.setattr(sql, "files", lambda _: Files())
    assert {m.version: m.works_with for m in sql._read_migrations()} == {16: 12, 12: 9}


def test_the_page_of_the_schema_has_the_table():
    text = (ROOT / "docs" / "reference" / "schema.md").read_text("utf-8")
    rows = re.findall(r"^\| (\d+\.\d+) \| (\d+) \| (\S+) \|$", text.split("## Versions")[1], re.MULTILINE)
    before = [None, *RELEASES]
    assert rows == [
        (name, str(schema), before[number] or "–") for number, (name, schema) in enumerate(RELEASES.items())
    ]


def test_the_page_of_deploys_explains_every_feature():
    text = (ROOT / "docs" / "how-to" / "deploy.md").read_text("utf-8")
    assert not [feature.name for feature in FEATURES if f"| {feature.name} |" not in text]


@pytest.mark.parametrize(
    ("version", "older"),
    [
        ("0.1.0.dev0", True),
        ("0.1.9", True),
        ("0.2.0.dev0", False),
        ("0.2.0rc1", False),
        ("0.10.0", False),
        ("1.0", False),
        (None, True),
        ("", True),
        ("by hand", True),
        ("9" * 4000 + ".0", True),
    ],
)
def test_which_versions_ignore_a_feature(version: str | None, older: bool):
    assert LiveNode("n", version).ignores(COMMANDS) is older


def test_what_older_nodes_ignore_is_one_line_per_version():
    everything = ", ".join(feature.name for feature in FEATURES)
    assert releases.older_nodes([NEW]) == []
    assert releases.older_nodes([NEW, OLD]) == [f"node old:1 runs 0.1.0.dev0, which ignores: {everything}"]
    many = [attrs.evolve(OLD, incarnation=f"old:{n}") for n in range(7)]
    unknown = LiveNode("odd:1", None)
    assert releases.older_nodes([*many, unknown]) == [
        f"node odd:1 runs an unknown version, which ignores: {everything}",
        f"nodes old:0, old:1, old:2, old:3, old:4 and 2 more run 0.1.0.dev0, which ignores: {everything}",
    ]


def test_a_warning_names_who_ignores_the_feature():
    assert releases.ignoring(COMMANDS, [NEW]) is None
    assert releases.ignoring(COMMANDS, [OLD, NEW]) == (
        "node old:1 (0.1.0.dev0) ignores commands to running steps: upgrade to 0.2"
    )
    assert releases.ignoring(COMMANDS, [OLD, LiveNode("odd:1", None)]) == (
        "nodes old:1, odd:1 (0.1.0.dev0, an unknown version) ignore commands to running steps: upgrade to 0.2"
    )


async def test_nodes_that_live_are_read_with_their_versions(durable_dsn: str):
    conn = await PgConn.open(durable_dsn)
    abouts: dict[str, object] = {
        "a": {"version": "0.1.0.dev0"},
        "b": {"version": da.__version__},
        "c": [],
        "d": {},
    }
    for name, about in abouts.items():
        await register_node(conn, "durable", incarnation=name, node=name, about=about)
    assert await read_live_nodes(conn, "durable") == []
    with psycopg.connect(durable_dsn, autocommit=True) as session:
        for name in "abc":
            session.execute("select pg_advisory_lock(hashtextextended('durable' || chr(2) || %s, 0))", [name])
        found = await read_live_nodes(conn, "durable")
        assert found == [LiveNode("a", "0.1.0.dev0"), LiveNode("b", da.__version__), LiveNode("c", None)]
        assert "nodes a, c" in (await feature_warning(conn, "durable", COMMANDS) or "")
    conn.close()
