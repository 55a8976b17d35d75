"""The command line as a user has it: arguments in, text and exit code out; a database of the test's own."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import attrs
import durable_actors as da
import psycopg
import pytest
from click.testing import CliRunner, Result
from durable_actors.cli import cli
from durable_actors.machine import ENDED, isolated_registry

LIVE = "{runnable,executing,awaiting_signal,awaiting_children}"


class Shell:
    """Runs verbs in this process; looks into the database."""

    def __init__(self, dsn: str, conn: psycopg.Connection) -> None:
        self.dsn = dsn
        self.conn = conn

    def run(self, *arguments: object, stdin: str | None = None, env: dict[str, str] | None = None) -> Result:
        environ = {"DURABLE_DSN": self.dsn, "COLUMNS": "240", **(env or {})}
        return CliRunner().invoke(cli, [str(each) for each in arguments], input=stdin, env=environ)

    def ok(self, *arguments: object, stdin: str | None = None) -> str:
        result = self.run(*arguments, stdin=stdin)
        assert result.exit_code == 0, (result.output, result.exception)
        return result.stdout

    def json(self, *arguments: object, stdin: str | None = None) -> Any:
        return json.loads(self.ok(*arguments, "--json", stdin=stdin))

    def refused(self, *arguments: object, stdin: str | None = None, code: int = 1) -> str:
        """What a verb says that fails: on stderr, without a traceback."""
        result = self.run(*arguments, stdin=stdin)
        assert result.exit_code == code, (result.output, result.exception)
        assert isinstance(result.exception, SystemExit)
        assert "Traceback" not in result.output
        if code == 1:
            for line in result.stderr.splitlines():
                assert line.startswith("durable-actors: ")
        return result.stderr

    def add(self, **columns: object) -> int:
        """A row made by hand."""
        columns = {"fsm": "shop:Checkout", "step": "charge", **columns}
        if columns.get("status") in ENDED:
            columns.setdefault("finished_at", "now")
        if columns.get("status") == "executing":
            columns.setdefault("claim_id", "5b8f2c1e-6f0e-4b5e-9a51-0c8e8b1b8f11")
            columns.setdefault("lease_expires_at", "tomorrow")
            columns.setdefault("locked_by", "n:1")
        if "unique_key" in columns:
            columns.setdefault("unique_scope", LIVE)
        query = "insert into durable.gen_durable ({}) values ({}) returning id"
        row = self.conn.execute(
            query.format(", ".join(columns), ", ".join(["%s"] * len(columns))), list(columns.values())
        ).fetchone()
        assert row is not None
        return row[0]

    def row(self, number: int, columns: str) -> tuple[Any, ...]:
        found = self.conn.execute(
            f"select {columns} from durable.gen_durable where id = %s", [number]
        ).fetchone()
        assert found is not None
        return found

    def node(
        self, name: str, *, queues: dict[str, int], machines: list[str], alive: bool = True, **about: object
    ) -> None:
        """A node as the others see it: a row, and the lock that its session holds."""
        told = json.dumps({"queues": queues, "machines": machines, "pid": 7, "version": "x", **about})
        self.conn.execute(
            "insert into durable.nodes (incarnation, node, about) values (%s, %s, %s)",
            [name, name.partition(":")[0], told],
        )
        if alive:
            self.conn.execute(
                "select pg_advisory_lock(hashtextextended('durable' || chr(2) || %s, 0))", [name]
            )


@pytest.fixture
def shell(durable_dsn: str) -> Iterator[Shell]:
    with psycopg.connect(durable_dsn, autocommit=True) as conn:
        yield Shell(durable_dsn, conn)


@attrs.frozen
class Order:
    order: int
    paid: bool = False


@pytest.fixture
def shop(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A module `shop` with a machine and a job in it."""
    module = ModuleType("shop")
    with isolated_registry():

        class Checkout(da.Machine[Order], name="shop:Checkout", queue="checkout"):
            @da.step(initial=True)
            async def charge(self, ctx: da.Context[Order]) -> da.Outcome:
                return da.Next(self.ship)

            @da.step
            async def ship(self, ctx: da.Context[Order]) -> da.Outcome:
                return da.Done()

        @da.job(name="shop:send", queue="mail")
        async def send(args: dict) -> None: ...

        module.Checkout, module.send = Checkout, send  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "shop", module)
        yield module
