"""Insert in the transaction of a synchronous framework: Django, Flask, a script.

The order and its durable work are committed together or not at all. In Django pass
`django.db.connection` inside `transaction.atomic()`: examples/web/django_orders.py.

Run it: `python examples/django_style.py`. Without DURABLE_DSN it brings its own Postgres.
"""

from __future__ import annotations

from typing import Any

import attrs
import durable_actors as da
import psycopg
import trio


@attrs.frozen
class Order:
    order: int


class Fulfil(da.Machine[Order], name="examples:fulfil", queue="fulfilment"):
    @da.step(initial=True)
    def pack(self, ctx: da.Context[Order]) -> da.Outcome:  # a plain def step runs in a thread
        print(f"packing order {ctx.state.order}")
        return da.Next(self.ship)

    @da.step
    def ship(self, ctx: da.Context[Order]) -> da.Outcome:
        return da.Done({"shipped": ctx.state.order})


class OutOfStockError(Exception):
    pass


def place_order(conn: psycopg.Connection[Any], number: int, *, stock: int) -> int:
    """A view: everything in one transaction."""
    with conn.transaction():
        conn.execute("insert into example_orders values (%s)", [number])
        instance = da.sync.insert(conn, Fulfil, state=Order(number))
        if number > stock:
            raise OutOfStockError(f"order {number}: out of stock")  # rolls both back
    return instance


def web_process(dsn: str) -> list[int]:
    """What the web server does; it needs no event loop and no engine."""
    placed: list[int] = []
    with psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute("create table if not exists example_orders (number int)")
        for number in (1, 2, 3):
            try:
                instance = place_order(conn, number, stock=2)
            except OutOfStockError as exc:
                print(exc)
            else:
                print(f"order {number} placed: instance {instance}")
                placed.append(instance)
        conn.execute("drop table example_orders")
    return placed


async def main() -> None:
    async with da.open_engine(poll_interval=0.1) as engine:  # the worker: usually a process of its own
        for instance in await trio.to_thread.run_sync(web_process, engine.dsn):
            print(f"instance {instance} →", await da.result(instance, timeout=30))


if __name__ == "__main__":
    trio.run(main)
