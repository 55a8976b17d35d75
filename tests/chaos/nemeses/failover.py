"""The primary is gone, its standby takes over, and the old primary comes back as the new one's standby."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import trio
from psycopg.conninfo import conninfo_to_dict
from tests.chaos.cluster import Cluster, multi_host, open_pair
from tests.chaos.nemeses import nemesis
from tests.chaos.world import Place, World

_pairs: dict[str, tuple[Cluster, Cluster]] = {}
"""The servers of a run, by its DSN: a `Place` knows none."""


@asynccontextmanager
async def open_two(folder: Path) -> AsyncGenerator[Place]:
    """A primary and its synchronous standby; the DSN names both."""
    with open_pair() as pair:  # in this thread: the servers end with it
        dsn = multi_host(pair)
        _pairs[dsn] = pair
        try:
            yield Place(dsn)
        finally:
            del _pairs[dsn]


@nemesis("failover", place=open_two, outages=True, seconds=8.0)
async def failover(world: World) -> None:
    """kill -9 of the primary and its backends, promotion of the standby; then the same the other way round."""
    primary, standby = _pairs[world.dsn]
    assert str(conninfo_to_dict(world.dsn)["host"]).count(",") == 1
    while await world.pause(1.0, 2.5):
        world.outage()
        world.log.sessions_lost("failover")
        await trio.to_thread.run_sync(primary.kill)
        world.count("primary killed")
        await trio.sleep(world.rng.choice((0.0, 0.2, 1.0)))
        await trio.to_thread.run_sync(standby.promote)
        world.count("standby promoted")
        world.recovered()
        if world.over:
            return
        # Copied anew, as one does when the old primary may have what the new one has not.
        await trio.to_thread.run_sync(primary.follow, standby)
        primary.start()
        await trio.to_thread.run_sync(standby.require_standby)
        world.tell("the old primary is the standby of the new one")
        primary, standby = standby, primary
