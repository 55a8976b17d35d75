"""Test durable machines on a real Postgres: run what is due, move the clock, kill workers.

Install `durable-actors[testing]`; the pytest plugin loads by itself. Its fixture `durable` is a `Bench` on a fresh
database; `async def` tests that use it run on Trio, with or without pytest-trio.
`journal_conformance` tests journal storages.
"""

from durable_actors.testing.bench import Bench, BenchMaker
from durable_actors.testing.benches import Benches, open_benches
from durable_actors.testing.crash_plan import CrashAfter, CrashPoint, WorkerDied
from durable_actors.testing.crashes import check_crashes, crash_anywhere
from durable_actors.testing.matching import ANY
from durable_actors.testing.report import Drained, Ran, Waiting

__all__ = [
    "ANY",
    "Bench",
    "BenchMaker",
    "Benches",
    "CrashAfter",
    "CrashPoint",
    "Drained",
    "Ran",
    "Waiting",
    "WorkerDied",
    "check_crashes",
    "crash_anywhere",
    "open_benches",
]
