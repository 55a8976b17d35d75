"""One contestant in a process of its own: `python -m bench.child '{...}'` prints its figures as JSON."""

from __future__ import annotations

import functools
import gc
import json
import sys
from typing import Any

import trio

from bench import workload
from bench.meter import Meter


def run(order: dict[str, Any]) -> dict[str, float]:
    """Fill the database, then do what the order says."""
    dsn, count = order["dsn"], order["count"]
    machine = order.get("machine", "bench:noop")
    before = order.get("before")
    if before is not None:
        workload.fill(dsn, before["machine"], before["count"], **before["columns"])
    workload.fill(dsn, machine, count, **order.get("columns", {}))
    meter = Meter(dsn, order["postmaster"])
    if order["what"] == "ceiling":
        from bench import ceiling  # noqa: PLC0415 - it uses the driver, which other commits have elsewhere (bench.ab)

        return ceiling.run(
            meter,
            dsn,
            count=count,
            steps=order.get("steps", 1),
            batch=order.get("batch", 500),
            real=order.get("real", False),
        )
    if order["what"] in {"commits", "hand on"}:
        from bench import key_loop  # noqa: PLC0415 - for the same reason

        if order["what"] == "commits":
            return key_loop.commits(meter, dsn, count=count)
        return key_loop.hand_on(meter, dsn, count=count, key=order["key"])
    if order.get("gc"):
        gc.freeze()
        gc.set_threshold(*order["gc"])
    queue, options = order.get("queue"), order.get("options", {})
    drain = functools.partial(workload.drain, meter, dsn, count=count, queue=queue, **options)
    return trio.run(functools.partial(drain, alone=before is None))


if __name__ == "__main__":
    print(json.dumps(run(json.loads(sys.argv[1]))))
