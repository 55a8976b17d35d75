"""absurd: worker processes with threads; five checkpointed steps where asked for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from absurd_sdk import Absurd
from psycopg.conninfo import conninfo_to_dict

from bench.peers.finish import Finish, url


def run(dsn: str, finish: Finish, *, steps: int = 0, concurrency: int | None = None) -> None:
    parts = conninfo_to_dict(dsn)
    environment = {**os.environ, "PGHOST": str(parts["host"]), "PGUSER": str(parts["user"])}
    ctl = Path(sys.executable).with_name("absurdctl")
    subprocess.run([ctl, "init", "-d", url(dsn)], env=environment, check=True, stdout=subprocess.DEVNULL)
    app = Absurd(url(dsn))
    app.create_queue("default")

    @app.register_task(name="noop")
    def noop(params: dict[str, int], ctx: object) -> int:
        n = params["n"]
        for step in range(steps):
            n = ctx.step(f"s{step}", lambda n=n: n + 1)  # type: ignore[attr-defined]
        finish.ran()
        return n

    for n in range(finish.count):
        app.spawn("noop", {"n": n})
    finish.on_over = app.stop_worker
    if concurrency is None:
        app.start_worker()
    else:
        app.start_worker(concurrency=concurrency, batch_size=concurrency * 2, poll_interval=0.01)
    os._exit(0)
