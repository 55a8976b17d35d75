"""Commands of operators, in the comparison of the model with Postgres."""

from __future__ import annotations

from random import Random
from typing import Any

from durable_actors._store.commands import Command
from durable_actors._store.rerun import rerun_call
from tests.simulation.server import Server
from tests.support.commands import hasten_instance, retry_instance

SCHEMA = "durable"


async def rerun_instance(conn: Any, schema: str, number: int, **given: Any) -> list[Any]:
    return [*(await conn.run(*rerun_call(schema, number, Command(), **given))).rows]


class Commands:
    """What `Pair` does as an operator."""

    random: Random
    server: Server
    finals: dict[int, Any]

    async def same(self, function: Any, *args: Any, **options: Any) -> Any:
        raise NotImplementedError

    async def retry(self) -> None:
        """An instance that failed runs again."""
        row = self.random.choice(list(self.server.tables.rows.values()))
        occupied = any(each.guard == row.unique_key for each in self.server.tables.rows.values())
        if row.unique_key is None or not occupied:
            self.finals.pop(row.id, None)
            await self.same(retry_instance, SCHEMA, row.id)

    async def rerun(self) -> None:
        """A new instance is started from an old one, with its first state or a given one."""
        row = self.random.choice(list(self.server.tables.rows.values()))
        given = self.random.choice(
            (
                {},
                {},
                {"step": "t"},
                {"step": "t", "state": b'{"again": 1}', "key": ("red",)},
                {"step": "t", "state": b"{}", "limits": ("free",)},
            )
        )
        await self.same(rerun_instance, SCHEMA, row.id, **{"step": None, "state": None, "key": None, **given})

    async def hasten(self) -> None:
        """An instance that is delayed runs now."""
        row = self.random.choice(list(self.server.tables.rows.values()))
        await self.same(hasten_instance, SCHEMA, row.id)
