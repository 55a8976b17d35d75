"""Which runs exist: by machine, by unique key, and all of them. Rebuilt from `started` records alone, and redacted."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime

import msgspec

from durable_actors.journal.facts import CATALOG, Fact, Thread, is_well_formed
from durable_actors.journal.projection import Anomaly


class RunEntry(msgspec.Struct, frozen=True):
    """A run as a list shows it. It has no input, result, error, claim or key: lists are for more eyes than those."""

    run: int
    machine: str
    queue: str
    at: datetime


class RunIndex(msgspec.Struct):
    """The runs of one machine, of one unique key, or of the catalog."""

    entries: dict[int, RunEntry] = {}
    anomalies: list[Anomaly] = []

    def runs(self, *, machine: str | None = None, queue: str | None = None) -> list[RunEntry]:
        """The runs by id, filtered."""
        return [
            entry
            for _, entry in sorted(self.entries.items())
            if machine in {None, entry.machine} and queue in {None, entry.queue}
        ]


def fold_indexes(facts: Iterable[Fact]) -> dict[Thread, RunIndex]:
    """Return every index and the catalog. Facts of other threads are ignored.

    The same fact again changes nothing; one that contradicts an earlier one is an anomaly, and the first stays.
    """
    found: dict[Thread, RunIndex] = {}
    for fact in facts:
        if fact.kind not in {"run_indexed", "run_cataloged"}:
            continue
        well_formed = is_well_formed(fact)
        index = found.setdefault(fact.thread if well_formed else CATALOG, RunIndex())
        if not well_formed:
            index.anomalies.append(Anomaly("malformed_entry", fact.kind, fact.rev))
            continue
        entry = RunEntry(fact.run, fact.data["machine"], fact.data["queue"], fact.at)
        known = index.entries.setdefault(fact.run, entry)
        if (known.machine, known.queue) != (entry.machine, entry.queue):
            reason = "conflicting_run_index" if fact.kind == "run_indexed" else "conflicting_run_catalog"
            index.anomalies.append(Anomaly(reason, fact.kind, fact.rev))
    return found
