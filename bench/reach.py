"""The goals, as ratios within one run. Pure: figures in, verdicts out."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs

from bench.contest import Figure

BEST = "durable_actors, best"
DEFAULTS = "durable_actors, defaults"
BRIEF = "durable_actors, best, keep=0"
AHEAD = "durable_actors, run-ahead"
GRAPHILE = "Graphile Worker, best"
PG_BOSS = "pg-boss, best"
STEPS = 5
CPU = ("worker_us", "server_us")


@attrs.frozen
class Judged:
    """A goal and what was measured; None: this run did not measure it."""

    measure: str
    goal: float
    least: bool
    """Whether more is better."""
    value: float | None

    @property
    def met(self) -> bool | None:
        if self.value is None:
            return None
        return self.value >= self.goal if self.least else self.value <= self.goal


class Figures:
    """Look-up by benchmark, contender and name. What was not measured raises KeyError, or ValueError from `max`."""

    def __init__(self, figures: Sequence[Figure]) -> None:
        self._found = {(each.bench, each.contender): each for each in figures}
        self.all = figures

    def get(self, bench: str, contender: str, name: str = "per_second") -> float:
        return self._found[bench, contender].median(name)

    def ratio(self, bench: str, ours: str, other: str, name: str = "per_second") -> float:
        return self._found[bench, ours].values[name].ratio(self._found[bench, other].values[name])

    def over_peer(self, ours: str, *peers: str) -> float:
        """How often faster than the fastest of these."""
        return min(self.ratio("peers", ours, peer) for peer in peers)


def judge(figures: Sequence[Figure]) -> list[Judged]:
    """Every goal that has a number."""
    found = Figures(figures)
    return [Judged(measure, goal, least, _value(compute, found)) for measure, goal, least, compute in GOALS]


def _value(compute: Callable[[Figures], float], found: Figures) -> float | None:
    try:
        return compute(found)
    except (KeyError, ValueError, ZeroDivisionError):
        return None


def _record_bytes(f: Figures) -> float:
    one, none = (f.get("journal", f"jobs, {level}", "wal_bytes") for level in ("outcomes", "off"))
    five, bare = (f.get("journal", f"five steps, {level}", "wal_bytes") for level in ("outcomes", "off"))
    return max(one - none, (five - bare) / STEPS)


def _defaults_over_peers(f: Figures) -> float:
    peers = [each for each in f.all if each.bench == "peers" and each.contender != DEFAULTS]
    return f.over_peer(DEFAULTS, *[p.contender for p in peers if "defaults" in p.contender and p.rounds])


def _growth(f: Figures) -> float:
    """By the server's CPU: on a busy machine the milliseconds are those of its neighbours."""
    base = f.get("growth", "1,000 runnable", "cpu_ms")
    return max(each.median("cpu_ms") for each in f.all if each.bench == "growth") / base


def _grown(f: Figures) -> float:
    """Of pick, commit, signal, delete and the janitor's batch the one that grows most."""
    small, *larger = [each for each in f.all if each.bench == "grown"]
    return max(each.median(name) / small.median(name) for each in larger for name in small.values)


def _two_processes(f: Figures) -> float:
    """Workers and server together."""
    one, two = ("1 worker process", "2 worker processes")
    return sum(f.get("processes", two, name) for name in CPU) / sum(
        f.get("processes", one, name) for name in CPU
    )


def _dearest(f: Figures) -> float:
    return max(each.median("slowest_statement_ms") for each in f.all if each.bench == "children")


OTHER = "another process, defaults"
POLLED = "another process, poll 0.02"
FAST_POLL = "poll_interval = max_poll_interval = 0.02"
MANY, BARE = "insert_many, 1,000 rows a call", "bare INSERT … SELECT unnest"
START, WAKE, COMMIT = "insert → step", "signal → step", "one commit"
VERIFY = "verify, ten records each"
SLOW_PEERS = ("Procrastinate, best", "DBOS, best")

GOALS: list[tuple[str, float, bool, Callable[[Figures], float]]] = [
    ("jobs/s : the ceiling's", 0.6, True, lambda f: f.ratio("jobs", BEST, "ceiling")),
    ("jobs/s with keep=0 : Graphile Worker's, which deletes, too", 1.1, True, lambda f: f.over_peer(BRIEF, GRAPHILE)),
    ("jobs/s, rows kept : Graphile Worker's", 0.8, True, lambda f: f.over_peer(BEST, GRAPHILE)),
    ("jobs/s, rows kept : pg-boss's", 1.0, True, lambda f: f.over_peer(BEST, PG_BOSS)),
    ("jobs/s : PgQueuer's, fastest", 1.3, True, lambda f: f.over_peer(BEST, "PgQueuer, batch 500, uvloop")),
    ("jobs/s : Oban for Python's", 10, True, lambda f: f.over_peer(BEST, "Oban, best")),
    ("jobs/s : DBOS's and Procrastinate's", 50, True, lambda f: f.over_peer(BEST, *SLOW_PEERS)),
    ("worker CPU per job, µs", 13, False, lambda f: f.get("jobs", BEST, "worker_us")),
    ("Postgres CPU per job, µs", 21, False, lambda f: f.get("jobs", BEST, "server_us")),
    ("server CPU per job : the ceiling's", 1.3, False, lambda f: f.ratio("jobs", BEST, "ceiling", "server_us")),
    ("statements per job at concurrency 100", 0.05, False,
     lambda f: f.get("jobs", "durable_actors, concurrency 100 alone", "statements")),
    ("five-step machines/s : a bare loop's", 0.8, True, lambda f: f.ratio("machines", AHEAD, "bare loop")),
    ("… : a bare loop's that runs no step", 0.65, True,
     lambda f: f.ratio("machines", AHEAD, "bare loop that only writes")),
    ("five-step machines/s : absurd's best", 30, True,
     lambda f: f.get("machines", AHEAD) / f.get("peers", "absurd, five steps")),
    ("worker CPU per step of five, µs", 40, False, lambda f: f.get("machines", AHEAD, "worker_us") / STEPS),
    ("insert_many : bare INSERT … SELECT unnest", 0.7, True, lambda f: f.ratio("inserts", MANY, BARE)),
    ("start at rest, p50 : the median commit", 2, False, lambda f: f.ratio("latency", START, COMMIT, "p50_ms")),
    ("start at rest, p99 : the p99 commit", 3, False, lambda f: f.ratio("latency", START, COMMIT, "p99_ms")),
    ("from another process, p99 ms, polling every 20", 20, False, lambda f: f.get("latency", POLLED, "p99_ms")),
    ("idle worker at that poll, % of a core", 1, False, lambda f: f.get("idle", FAST_POLL, "worker_percent")),
    ("await → signal → running, p50 : the median commit", 3, False,
     lambda f: f.ratio("signals", WAKE, COMMIT, "p50_ms")),
    ("dearest pick : pick at 1,000 runnable", 2, False, _growth),
    ("dearest statement of a large table : of 1,000 rows", 2, False, _grown),
    ("two worker processes, CPU per job : one's", 1.15, False, _two_processes),
    ("from another process, defaults, p50 ms", 150, False, lambda f: f.get("latency", OTHER, "p50_ms")),
    ("from another process, defaults, the slowest, ms", 300, False, lambda f: f.get("latency", OTHER, "max_ms")),
    ("idle with the defaults, worker and server, % of a core", 0.8, False,
     lambda f: f.get("idle", "defaults", "worker_percent") + f.get("idle", "defaults", "server_percent")),
    ("10,000 tasks, each after 4, tasks/s : free tasks'", 0.6, True,
     lambda f: f.ratio("graphs", "20 layers, each task after 4, best", "free, best")),
    ("10,000 tasks in 4 chains, tasks/s : free tasks', defaults", 0.6, True,
     lambda f: f.ratio("graphs", "4 chains, defaults", "free, defaults")),
    ("slowest statement of 100,000 children, ms", 1000, False, _dearest),
    ("defaults : best", 0.25, True, lambda f: f.ratio("jobs", DEFAULTS, BEST)),
    ("defaults : the fastest peer's defaults", 3.5, True, _defaults_over_peers),
    ("one key, jobs/s : commits/s of one connection", 0.3, True,
     lambda f: f.ratio("keys", "1 key", "commits, one after the other")),
    ("one key : a bare loop that hands it on", 0.6, True,
     lambda f: f.ratio("keys", "1 key", "bare loop that hands one key on")),
    ("100 keys : no keys", 0.5, True, lambda f: f.ratio("keys", "100 keys", "no keys")),
    ("10,000 keys : no keys", 0.7, True, lambda f: f.ratio("keys", "10,000 keys", "no keys")),
    ("bytes per step in flight", 10_240, False,
     lambda f: f.get("memory", "resident bytes per step", "in_flight_bytes")),
    ("jobs with failed attempts journaled : unjournaled, worker CPU", 1.05, False,
     lambda f: f.ratio("journal", "jobs, failed attempts", "jobs, off", "worker_us")),
    ("… Postgres CPU", 1.05, False, lambda f: f.ratio("journal", "jobs, failed attempts", "jobs, off", "server_us")),
    ("jobs/s with outcomes journaled : unjournaled", 0.75, True,
     lambda f: f.ratio("journal", "jobs, outcomes", "jobs, off")),
    ("five-step machines/s with outcomes journaled : unjournaled", 0.7, True,
     lambda f: f.ratio("journal", "five steps, outcomes", "five steps, off")),
    ("bytes of WAL per record of an outcome", 450, False, _record_bytes),
    ("instances that verify checks per second", 5_000, True, lambda f: f.get("audit", VERIFY)),
    ("… more memory for ten times as many, MB", 10, False, lambda f: f.get("audit", VERIFY, "growth_mb")),
    ("first page of 100,000 records, ms", 50, False, lambda f: f.get("audit", VERIFY, "first_page_ms")),
]  # fmt: skip
