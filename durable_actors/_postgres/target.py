"""From a configured DSN to one that libpq understands; starts the embedded Postgres if that is configured."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Final

import attrs

from durable_actors._dsn import EMBEDDED
from durable_actors._postgres.embedded.server import EmbeddedServer, open_embedded

logger: Final = logging.getLogger("durable_actors")


@attrs.frozen
class Target:
    """The Postgres to connect to."""

    dsn: str
    """For libpq."""
    server: EmbeddedServer | None
    """The embedded server, if it is one. A long-running process runs `embedded.server.keep_up` on it."""


@asynccontextmanager
async def open_target(dsn: str, *, level: int = logging.WARNING) -> AsyncGenerator[Target, None]:
    """Yield the database to use. An embedded server stays up at least as long as the body runs.

    The use of an embedded server is logged with its path, at `level`: commands that only read pass a lower one.
    """
    if dsn != EMBEDDED:
        yield Target(dsn, None)
        return
    async with open_embedded() as server:
        logger.log(
            level,
            "using the embedded Postgres in %s (set DURABLE_DSN to use your own server)",
            server.data_dir,
        )
        yield Target(server.dsn(), server)
