"""A shop with its dashboard, for the tests of the browser: `python -m tests.browser.shop DSN` prints its address."""

from __future__ import annotations

import logging
import socket
import sys

import durable_actors as da
import trio
from durable_actors.cli import demo_shop


async def main(dsn: str) -> None:
    logging.disable(logging.ERROR)  # orders fail on purpose
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    queues = {
        "orders": 20,
        "reports": 4,
        "durable.ops": 2,
        "payments": 6,
        "images": da.Queue(1, fair=True),
    }
    async with (
        da.open_engine(
            dsn=dsn,
            queues=queues,
            node="shop",
            limits=demo_shop.LIMITS,
            dashboard=da.Dashboard(port=port, interval=1),
        ),
        trio.open_nursery() as nursery,
    ):
        await demo_shop.fill()
        # Work under limits that does not run out while the tests look at it.
        await da.insert_many(demo_shop.print_label, [{"args": {"order": n}} for n in range(2000)])
        more = [{"args": {"order": n}, "rate_limit": ("bank", "north")} for n in range(2000)]
        await da.insert_many(demo_shop.refund, more)
        nursery.start_soon(trio.sleep_forever)
        while not (await da.list_instances(da.Filter(status="failed", machine="shop.Checkout"), limit=15))[
            14:
        ]:
            await trio.sleep(0.1)
        print(f"ready http://127.0.0.1:{port}", flush=True)


if __name__ == "__main__":
    trio.run(main, sys.argv[1])
