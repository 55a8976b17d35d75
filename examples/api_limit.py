"""Stay under an API's limit: ten calls, two at once and then five a second, whatever the number of workers.

Run it: `python examples/api_limit.py`. Without DURABLE_DSN it brings its own Postgres.
"""

from __future__ import annotations

import durable_actors as da
import trio

LIMITS = {"api": da.Limit(5, per=1, burst=2)}


@da.job(rate_limit="api")
async def call(args: int) -> tuple[float, int]:
    """Call the API; returns when, and what for."""
    return trio.current_time(), args


async def main() -> None:
    """Insert ten calls, and look when they were made."""
    async with da.open_engine(da.Config(limits=LIMITS)):
        ids = await da.insert_many(call, [{"args": n} for n in range(10)])
        times = sorted([(await da.result(number, timeout=60))[0] for number in ids if number is not None])
    print(f"{len(times)} calls were made")
    print(f"more than two in a fifth of a second: {'yes' if _bursts(times) else 'no'}")


def _bursts(times: list[float]) -> bool:
    # After the burst of two, a token comes every 0.2 s; a call may begin a little after its token.
    return times[-1] - times[0] < 1.0


if __name__ == "__main__":
    trio.run(main)
