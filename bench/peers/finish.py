"""Counts the runs of a peer's job: the clock runs from the first to the last one.

That favours peers which acknowledge later: for ours the clock runs to the last commit.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from urllib.parse import quote

from psycopg.conninfo import conninfo_to_dict

from bench.meter import Meter


class Finish:
    def __init__(self, count: int, meter: Meter) -> None:
        self.count = count
        self._left = count
        self._meter = meter
        self._lock = threading.Lock()
        self.over = threading.Event()
        self.on_over: Callable[[], object] = lambda: None

    def begin(self) -> None:
        """For peers that claim everything before they run anything: the claims are in the figure, then."""
        self._meter.start()

    def ran(self) -> None:
        with self._lock:
            if not self._meter.running:
                self._meter.start()
            self._left -= 1
            if self._left == 0:
                print(json.dumps(self._meter.stop(self.count)), flush=True)
                self.over.set()
                self.on_over()


def url(dsn: str, *, scheme: str = "postgresql") -> str:
    """A libpq connection string as the URL that SQLAlchemy and others want."""
    parts = conninfo_to_dict(dsn)
    return f"{scheme}://{parts['user']}@/{parts['dbname']}?host={quote(str(parts['host']), safe='')}"
