"""Random faults and cancellations: what callers were told must agree with what the table holds."""

import random

import psycopg
import pytest
import trio
from durable_actors._postgres.driver import waiting
from durable_actors._postgres.driver.statement import Statement
from durable_actors._postgres.pool.pool import Lane, open_pool
from durable_actors.errors import CommitUnknown, StoreUnavailable
from tests.support.faults import FaultProxy, open_proxy

INSERT = Statement("ledger_insert", "insert into pool_ledger values ($1::int)")
LARGE = Statement(
    "ledger_insert_large",
    "insert into pool_ledger select $1::int where length($2::text) > 0 returning repeat('x', 20000)",
)


class Ledger:
    """Writers with unique ids, and what each was told."""

    def __init__(self, seed: int, operations: int) -> None:
        self.chance = random.Random(seed)
        self.left = operations
        self.told: dict[str, set[int]] = {
            "done": set(),
            "not done": set(),
            "unknown": set(),
            "cancelled": set(),
        }

    async def writer(self, pool) -> None:
        while self.left > 0:
            self.left -= 1
            ids = [self.left * 10 + n for n in range(self.chance.randint(1, 3))]
            patience = self.chance.choice([0.003, 0.3, 3, 3]) * self.chance.random()
            told = "cancelled"
            with trio.move_on_after(patience):
                try:
                    async with pool.acquire("a") as conn:
                        await self.write(conn, ids)
                    told = "done"
                except CommitUnknown:
                    told = "unknown"
                except StoreUnavailable:
                    told = "not done"
            self.told[told].update(ids)

    async def write(self, conn, ids: list[int]) -> None:
        params = [[str(n).encode()] for n in ids]
        match self.chance.randrange(4):
            case 0:
                await conn.batch([(INSERT, p) for p in params])
            case 1:
                async with conn.transaction():
                    for p in params:
                        await conn.run(INSERT, p)
            case 2:
                del ids[1:]
                await conn.run(LARGE, [*params[0], b"y" * self.chance.choice([10, 400_000])])
            case _:
                del ids[1:]
                await conn.run(INSERT, params[0])

    async def chaos(self, proxy: FaultProxy, server) -> None:
        ending = self.chance.choice
        while self.left > 0:
            await trio.sleep(self.chance.random() * 0.05)
            match self.chance.randrange(7):
                case 0:
                    proxy.reset()
                case 1:
                    proxy.half_open()
                case 2:
                    proxy.lose_reply(
                        ending([b"ledger", b"COMMIT"]), then=ending(["close", "reset", "silence"])
                    )
                case 3:
                    proxy.lose_request(
                        ending([b"ledger", b"COMMIT"]), then=ending(["close", "reset", "silence"])
                    )
                case 4:
                    proxy.throttle(3_000_000)
                case 5:
                    proxy.heal()
                case _:
                    for pid in server.pids()[:2]:
                        server.conn.execute("select pg_terminate_backend(%s)", [pid])
        proxy.heal()


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
async def test_nobody_is_told_a_lie(server, monkeypatch, seed):
    monkeypatch.setattr(waiting, "CANCEL_TIMEOUT", 0.1)
    server.conn.execute("drop table if exists pool_ledger")
    server.conn.execute("create table pool_ledger (id int primary key)")
    ledger = Ledger(seed, operations=300)
    async with open_proxy(server.dsn) as proxy:
        async with open_pool(proxy.dsn, lanes=[Lane("a", 4)]) as pool, trio.open_nursery() as nursery:
            nursery.start_soon(ledger.chaos, proxy, server)
            for _ in range(8):
                nursery.start_soon(ledger.writer, pool)
        [lane] = pool.statistics().lanes
        assert (lane.in_use, lane.opening, lane.waiting, lane.idle) == (0, 0, 0, 0)
    await server.has(0)  # what was still under way has been decided now
    with psycopg.connect(server.dsn) as conn:
        there = {row[0] for row in conn.execute("select id from pool_ledger")}
    assert not ledger.told["done"] - there, "reported as done and lost"
    assert not ledger.told["not done"] & there, "reported as not done, and done"
    assert len(ledger.told["done"]) > 30
