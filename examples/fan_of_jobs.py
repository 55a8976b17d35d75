"""A fan of jobs: a thousand of them in one statement, as many at a time as you like, results at the end.

Run it: `python examples/fan_of_jobs.py`. Without DURABLE_DSN it brings its own Postgres.
"""

from __future__ import annotations

import durable_actors as da
import trio

JOBS = 1000


@da.job(name="examples:square", queue="squares")
async def square(args: int) -> int:
    return args * args


async def main() -> None:
    async with da.open_engine(queues={"squares": da.Queue(50, prefetch=50)}):
        began = trio.current_time()
        ids = await da.insert_many(square, [{"args": n} for n in range(JOBS)])
        print(f"{len(ids)} jobs inserted")
        total = 0
        for number in ids:
            assert number is not None  # None would mean: a unique key was occupied
            total += await da.result(number, timeout=60, type=int)
        print(f"their sum is {total}, expected {sum(n * n for n in range(JOBS))}")
        print(f"{JOBS / (trio.current_time() - began):.0f} jobs per second, each committed")


if __name__ == "__main__":
    trio.run(main)
