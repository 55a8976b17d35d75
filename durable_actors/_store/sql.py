"""SQL files, one statement each: reads them and inserts the configured schema.

The files are written for schema `durable` and qualify every name with it. Another schema replaces that qualifier,
quoted; nothing else in a statement is assembled from strings.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from importlib.resources import files
from typing import Final

import attrs

from durable_actors._option_checks import check_schema_name
from durable_actors._postgres.driver.statement import Statement
from durable_actors._store.releases import works_with

_QUALIFIER: Final = re.compile(r"\bdurable\.(?=[a-z_])")
_PACKAGE: Final = "durable_actors._store"


def in_schema(sql: str, schema: str) -> str:
    """Rewrite `durable.name` to the configured schema. Quoted, so that it may be a reserved word."""
    return _QUALIFIER.sub(f'"{check_schema_name(schema)}".', sql)


@cache
def statement(name: str, schema: str, *, read_only: bool = False, typed: bool = False) -> Statement:
    """The statement in `sql/<name>.sql`, for one schema. Cached, so that a connection prepares it once."""
    text = files(_PACKAGE).joinpath("sql", f"{name}.sql").read_text("utf-8")
    return Statement(name, in_schema(text, schema), read_only=read_only, typed=typed)


@attrs.frozen
class Migration:
    """One numbered step of the schema."""

    version: int
    """1, 2, 3 …, without gaps."""
    name: str
    """From the file name."""
    sql: str
    """The text of the file, for schema `durable`."""
    transactional: bool
    """False if Postgres refuses it in a transaction; the file then contains `-- transaction: none`."""
    works_with: int = 0
    """The oldest schema version whose code works with the database after it.

    The file says so in a line `-- works with: N`; without one, the rule of `releases.works_with` decides.
    """


_FILE: Final = re.compile(r"(\d{4})_([a-z0-9_]+)\.sql")
_NOT_TRANSACTIONAL: Final = "-- transaction: none"
_WORKS_WITH: Final = re.compile(r"^-- works with: (\d+)$", re.MULTILINE)


@cache
def migrations() -> tuple[Migration, ...]:
    """All migrations of this package, in order."""
    return tuple(sorted(_read_migrations(), key=lambda migration: migration.version))


def _read_migrations() -> Iterator[Migration]:
    for entry in files(_PACKAGE).joinpath("migrations").iterdir():
        match = _FILE.fullmatch(entry.name)
        if match:
            version, sql = int(match[1]), entry.read_text("utf-8")
            said = _WORKS_WITH.search(sql)
            yield Migration(
                version=version,
                name=match[2],
                sql=sql,
                transactional=_NOT_TRANSACTIONAL not in sql.splitlines(),
                works_with=int(said[1]) if said else works_with(version),
            )
