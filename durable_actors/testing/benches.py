"""`Benches`: makes benches, each on a fresh database."""

from __future__ import annotations

import itertools
from collections.abc import Generator
from contextlib import contextmanager
from importlib.resources import files
from typing import Final

import psycopg
import trio

from durable_actors._store.migrate import migrate
from durable_actors.client import opened
from durable_actors.errors import ConfigError
from durable_actors.testing.bench import Bench
from durable_actors.testing.database import DatabaseServer, open_server

_NAMES: Final = itertools.count(1)


class Benches:
    """Makes benches on one server. The fixture `durable_benches` is one, for a whole run."""

    def __init__(self, server: DatabaseServer, template: str) -> None:
        """`template`: the name of a database with the schema; each bench gets a copy, with a clock of its own."""
        self._server = server
        self._template = server.template(_add_bench, kind="bench", base=template)

    @contextmanager
    def fresh(self) -> Generator[Bench]:
        """A bench on a fresh database. The helpers of `durable_actors` use it if it is the only client."""
        with self._server.database(template=self._template) as dsn:
            number = next(_NAMES)
            bench = Bench(dsn, self, name="bench" if number == 1 else f"bench {number}")
            with opened(bench):
                try:
                    yield bench
                finally:
                    bench.close()


@contextmanager
def open_benches() -> Generator[Benches]:
    """Benches without pytest: start or find a server for tests, as `open_server` does."""
    with open_server() as server:
        yield Benches(server, server.template(_migrate))


def _migrate(dsn: str) -> None:
    trio.run(migrate, dsn)


def _add_bench(dsn: str) -> None:
    script = files("durable_actors.testing").joinpath("bench.sql").read_bytes()
    with psycopg.connect(dsn, autocommit=True) as connection:
        if connection.execute("select to_regclass('durable.gen_durable')").fetchone() == (None,):
            raise ConfigError(
                "the template database has no schema 'durable': durable_prepare must migrate it, with "
                "trio.run(da.migrate, dsn)",
                option="durable_prepare",
            )
        connection.execute(script)
