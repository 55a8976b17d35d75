"""9. Partition keys: none, 10,000, 100, one; and one hot key with a backlog in front of free work.

Rows are as `insert_many` leaves them: of each key all but the first are held. Beside one key: commits one after the
other, and a bare loop that hands the key on in each commit.
"""

from __future__ import annotations

from bench.contest import Contestant, Figure, Progress, compete, in_child
from bench.server import Server
from bench.workload import BEST


def run(server: Server, progress: Progress, *, quick: bool) -> list[Figure]:
    count, backlog, rounds = (3_000, 2_000, 2) if quick else (10_000, 50_000, 2)

    def keyed(keys: int, rows: int) -> Contestant:
        columns = {"partition_key": f"'key ' || n %% {keys}", "hold": f"(n > {keys})::int"}
        name = f"{keys:,} key{'s' if keys > 1 else ''}"
        return Contestant(name, in_child(what="engine", count=rows, queue=BEST, columns=columns))

    before = {"machine": "bench:hot", "count": backlog, "columns": {"partition_key": "'hot'"}}
    contestants = [
        Contestant("no keys", in_child(what="engine", count=count, queue=BEST)),
        keyed(10_000, 2 * max(count, 10_000)),
        keyed(100, count),
        keyed(1, count // 5),
        Contestant("commits, one after the other", in_child(what="commits", count=count // 5), "commit"),
        Contestant(
            "bare loop that hands one key on",
            in_child(
                what="hand on",
                count=count // 5,
                key="key",
                columns={"partition_key": "'key'", "hold": "(n > 1)::int"},
            ),
        ),
        Contestant(
            f"free work behind {backlog:,} rows of one hot key",
            in_child(what="engine", count=count, queue=BEST, before=before),
        ),
    ]
    return compete("keys", server, contestants, rounds=rounds, progress=progress)
