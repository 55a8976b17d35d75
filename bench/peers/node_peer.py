"""Peers that run on Node: `python -m bench.peers.node_peer '{...}'` runs one once, and prints its figures as JSON.

The peer fills its tables and runs its jobs in a process of its own. The clock runs from its first job until this
process, which is another session, sees that all are finished.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import IO, Any

import psycopg
from psycopg.conninfo import conninfo_to_dict

from bench.meter import Meter, process_cpu

HERE = Path(__file__).parent / "node"
OPEN = {
    "graphile": "select exists (select from graphile_worker._private_jobs)",
    "pgboss": "select exists (select from pgboss.job where name = 'noop' and state < 'completed')",
}
"""Whether a job is not finished."""


def wait_for(word: str, lines: IO[str]) -> None:
    for line in lines:
        if line.strip() == word:
            return
    raise RuntimeError(f"the peer ended before it said {word!r}")


def run(order: dict[str, Any]) -> dict[str, float]:
    parts: Any = conninfo_to_dict(order["dsn"])
    where = {"host": parts["host"], "user": parts["user"], "database": parts["dbname"]}
    told = json.dumps({key: order[key] for key in ("modules", "count", "settings")} | {"where": where})
    meter = Meter(order["dsn"], order["postmaster"])
    command = [f"{order['modules']}/.bin/node", str(HERE / f"{order['peer']}.mjs"), told]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with (
        psycopg.connect(order["dsn"], autocommit=True) as conn,
        subprocess.Popen(command, text=True, **pipes) as node,  # type: ignore[call-overload]
    ):
        try:
            wait_for("filled", node.stdout)
            node.stdin.write("go\n")
            node.stdin.flush()
            wait_for("began", node.stdout)
            meter.start()
            before = process_cpu(node.pid)
            wait_for("ran", node.stdout)
            while conn.execute(OPEN[order["peer"]]).fetchone() == (True,):
                time.sleep(0.002)
            after = process_cpu(node.pid)
            figures = meter.stop(order["count"])
        finally:
            node.kill()
    return figures | {"worker_us": (after - before) * 1e6 / order["count"]}


if __name__ == "__main__":
    print(json.dumps(run(json.loads(sys.argv[1]))))
