"""A connection to the simulated server without a network, for tests that call the store's functions themselves."""

from __future__ import annotations

from typing import Any

import trio
from tests.simulation.driver import Transaction
from tests.simulation.server import Request, Server


class LocalConn:
    """`PgConn` as the store's functions use it; every answer is there at once."""

    def __init__(self, server: Server) -> None:
        self.server, self.session = server, server.open_session({})
        self.in_transaction = self.closed = False
        self.preamble: list[Any] = []

    @property
    def pristine(self) -> bool:
        return self.session.tx is None

    async def _ask(self, calls: list[Any], command: str | None) -> Any:
        await trio.lowlevel.checkpoint()
        replies: list[Any] = []
        self.server.receive(self.session, Request(calls, command, replies.append))
        [reply] = replies
        if isinstance(reply, Exception):
            raise reply
        return reply

    async def run(self, statement: Any, params: Any = ()) -> Any:
        return (await self._ask([(statement, params)], None))[0]

    async def batch(self, calls: Any) -> Any:
        return await self._ask(list(calls), None)

    async def command(self, sql: str, *, commits: bool = False) -> Any:
        return await self._ask([], sql)

    def transaction(self) -> Transaction:
        return Transaction(self, "BEGIN")  # type: ignore[arg-type]
