"""From a configured DSN to one that libpq understands; starts the embedded Postgres when asked to."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Final

import attrs

from durable_actors._postgres.embedded.server import EmbeddedServer, open_embedded
from durable_actors.config import EMBEDDED

logger: Final = logging.getLogger("durable_actors")


@attrs.frozen
class Target:
    """The Postgres to talk to."""

    dsn: str
    """For libpq."""
    server: EmbeddedServer | None
    """The embedded server behind it; who stays for long runs `embedded.keep_up` on it."""


@asynccontextmanager
async def open_target(dsn: str, *, level: int = logging.WARNING) -> AsyncGenerator[Target, None]:
    """Yield the database to use. An embedded server stays up at least as long as the body runs.

    That it is the embedded one is logged, with its path: who looks only, and often, may lower the `level`.
    """
    if dsn != EMBEDDED:
        yield Target(dsn, None)
        return
    async with open_embedded() as server:
        logger.log(
            level,
            "using the embedded Postgres in %s (set DURABLE_DSN for a server of yours)",
            server.data_dir,
        )
        yield Target(server.dsn(), server)
