"""A report by the clock: two engines, one instance per slot; a pause leaves records instead of a burst.

Run it: python examples/nightly.py
"""

from typing import Any

import durable_actors as da
import trio

slots: list[str] = []
third = trio.Event()


@da.job(name="report")
async def report(args: dict[str, Any], ctx: da.Context[Any]) -> str:
    assert ctx.scheduled_for is not None
    slots.append(ctx.scheduled_for.isoformat())
    if len(slots) == 3:
        third.set()
    return f"{args['title']} of {ctx.scheduled_for:%H:%M:%S}"


async def main() -> None:
    # In life, "0 3 * * *" in "Europe/Berlin"; here every second, so that you need not wait until three in the morning.
    schedule = da.Schedule("nightly", report, every=1, args={"title": "the report"}, overlap="allow")
    one = da.Config(name="default", schedules=[schedule])
    two = da.Config(name="two", schedules=[schedule])
    async with da.open_engine(one), da.open_engine(two):
        await third.wait()
        await da.schedules.pause("nightly", by="ada", reason="holidays")
        await trio.sleep(1.5)
        info = await da.schedules.resume("nightly", by="ada")
        before = len(slots)
        await trio.sleep(0.1)
        paused = [each.reason for each in info.records if each.outcome == "skipped"]
        print(f"slots during the pause: {', '.join(str(each) for each in paused)}")
        print(f"a burst after it: {'yes' if len(slots) > before + 1 else 'no'}")
        number = await da.schedules.run_now("nightly", by="ada")
        print(f"run now → {str(await da.result(number, timeout=10)).split(' of ')[0]}")
    print(f"each slot ran once: {'yes' if len(slots) == len(set(slots)) else 'no'}")


if __name__ == "__main__":
    trio.run(main)
