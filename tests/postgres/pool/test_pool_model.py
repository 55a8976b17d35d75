"""The pool on a made-up server and a made-up clock: thousands of moves, its invariants after each."""

import random

import pytest
import trio
import trio.testing
from durable_actors._postgres.driver.connection import PgConn
from durable_actors._postgres.pool.pool import ConnectionPool, Lane, open_pool
from durable_actors.errors import ConfigError, PoolTimeout, StoreUnavailable


class MadeUpServer:
    """Lets connections in after a while, or not; remembers which are open."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.open: set[MadeUpConnection] = set()
        self.up = True

    async def connect(self, dsn: str, *, settings: object) -> "MadeUpConnection":
        await trio.sleep(self.chance.random() * 0.02)
        if self.chance.random() < 0.01:
            raise ConfigError("made up")
        if not self.up or self.chance.random() < 0.1:
            raise StoreUnavailable("made up")
        return MadeUpConnection(self)


class MadeUpConnection:
    """As much of PgConn as the pool looks at."""

    def __init__(self, server: MadeUpServer) -> None:
        self.server = server
        self.broken = False
        self.pristine = True
        self.opened_at = trio.current_time()
        self.user: object = None
        server.open.add(self)

    def alive(self) -> bool:
        return self in self.server.open and self.server.chance.random() > 0.02

    def close(self) -> None:
        self.server.open.discard(self)
        self.pristine = False


def check(pool: ConnectionPool) -> None:
    for lane in pool.statistics().lanes:
        assert lane.idle + lane.in_use + lane.opening <= lane.size
        if lane.waiting:
            assert lane.in_use + lane.opening, "somebody waits and nobody will come"
            assert not lane.idle, "somebody waits beside an idle connection"


async def user(pool: ConnectionPool, server: MadeUpServer, moves: int) -> None:
    chance = server.chance
    for _ in range(moves):
        me = object()
        with trio.move_on_after(chance.choice([0.001, 0.02, 0.2, 5])):
            try:
                async with pool.acquire(chance.choice("ab")) as conn:
                    assert conn.user is None, "two users of one connection"
                    conn.user = me
                    try:
                        await trio.sleep(chance.random() * 0.03)
                        assert conn.user is me
                    finally:
                        conn.user = None
                        conn.broken = chance.random() < 0.03
                        conn.pristine = not conn.broken and chance.random() > 0.05
            except (StoreUnavailable, ConfigError):
                pass
        check(pool)
        if chance.random() < 0.01:
            server.up = not server.up


@pytest.mark.parametrize("seed", range(5))
async def test_invariants(monkeypatch, autojump_clock, seed):
    server = MadeUpServer(seed)
    monkeypatch.setattr(PgConn, "open", server.connect)
    lanes = [Lane("a", 3, max_waiting=5), Lane("b", 1)]
    options = {"acquire_timeout": 2, "max_lifetime": 0.5, "jitter": server.chance.random}
    async with open_pool("made up", lanes=lanes, **options) as pool:
        async with trio.open_nursery() as nursery:
            for _ in range(12):
                nursery.start_soon(user, pool, server, 150)
        for lane in pool.statistics().lanes:
            assert (lane.in_use, lane.opening, lane.waiting) == (0, 0, 0)
        assert len(server.open) == sum(lane.idle for lane in pool.statistics().lanes)
        server.up = True
        with trio.fail_after(60):
            while True:
                try:
                    async with pool.acquire("a"), pool.acquire("b"):
                        break
                except (PoolTimeout, StoreUnavailable, ConfigError):
                    check(pool)
    assert not server.open
