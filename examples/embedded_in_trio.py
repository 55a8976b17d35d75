"""An engine inside a Trio application: one nursery holds the app's own tasks and the engine.

Run it: `python examples/embedded_in_trio.py`. Without DURABLE_DSN it brings its own Postgres.
"""

from __future__ import annotations

from typing import Any

import durable_actors as da
import trio


@da.job(name="examples:thumbnail", queue="images", max_attempts=5)
async def make_thumbnail(args: dict[str, Any]) -> dict[str, Any]:
    await trio.sleep(0.05)  # the work; an exception here means: again, after a growing delay
    return {"thumbnail": f"{args['picture']}.small"}


async def ticker(beats: list[int]) -> None:
    """A task of the application: the engine shares the event loop with it and never blocks it."""
    while True:
        beats.append(len(beats))
        await trio.sleep(0.01)


async def upload(picture: str) -> None:
    """A request of the application: durable work is started, and here also waited for."""
    number = await da.insert(make_thumbnail, args={"picture": picture})
    assert number is not None
    print(f"{picture}: instance {number} →", await da.result(number, timeout=30))


async def main() -> None:
    beats: list[int] = []
    async with trio.open_nursery() as nursery:
        engine = await da.start_engine(nursery, queues={"images": 3})
        nursery.start_soon(ticker, beats)
        async with trio.open_nursery() as uploads:
            for picture in ("cat", "dog", "emu", "fox"):
                uploads.start_soon(upload, picture)
        await engine.stop()  # drains: what runs may finish, the rest goes back
        nursery.cancel_scope.cancel()
    print("the app went on meanwhile:", "yes" if len(beats) > 3 else "no")


if __name__ == "__main__":
    trio.run(main)
