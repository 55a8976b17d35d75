"""`Journal`: the one door to a journal storage. It checks the adapter, the records, and what checkpoints say."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Final, get_args

import msgspec

from durable_actors.errors import ConfigError, InvalidJournalEntry
from durable_actors.journal.facts import Thread
from durable_actors.journal.fold import OnAnomaly, copy_of, replay_into
from durable_actors.journal.kinds import Level
from durable_actors.journal.projection import Projection
from durable_actors.journal.records import Record, check_record, check_sequence
from durable_actors.journal.storage import JournalStorage, make_checkpoint, usable

_METHODS: Final = ("append", "read", "head", "put_checkpoint", "get_checkpoint", "drop_checkpoint")


class Journal:
    """Reads, folds and appends records through a storage, which is given once and checked before it is used.

    The storage is part of a program's trusted configuration: never choose it by what a request says.
    """

    def __init__(
        self, storage: JournalStorage, *, page: int = 1000, on_anomaly: OnAnomaly = "report"
    ) -> None:
        for name in _METHODS:
            if not inspect.iscoroutinefunction(getattr(storage, name, None)):
                raise ConfigError(
                    f"storage={storage!r} is no journal storage: it has no async method {name}()",
                    option="storage",
                    value=storage,
                )
        if page < 1:
            raise ConfigError(
                f"page={page!r}: at least 1 record is read at a time", option="page", value=page
            )
        if on_anomaly not in get_args(OnAnomaly):
            raise ConfigError(
                f"on_anomaly={on_anomaly!r} is neither 'report' nor 'raise'",
                option="on_anomaly",
                value=on_anomaly,
            )
        self.storage = storage
        self._page = page
        self._on_anomaly: OnAnomaly = on_anomaly

    async def append(self, thread: Thread, records: Sequence[Record], *, expected_rev: int) -> int:
        """Check the records and append them. Return the new head.

        Raises `RevConflict` if the head is not `expected_rev`, and `InvalidJournalEntry` for a record that could not be
        read again; nothing is written then.
        """
        for rev, record in enumerate(records, expected_rev + 1):
            if record.instance_id != thread.instance_id:
                raise InvalidJournalEntry(
                    thread.instance_id, rev, f"belongs to instance {record.instance_id}"
                )
            check_record(msgspec.structs.replace(record, rev=rev))
        return await self.storage.append(thread, records, expected_rev=expected_rev)

    async def read(
        self, thread: Thread, *, after: int = 0, limit: int = 1000, level: Level | None = None
    ) -> list[Record]:
        """Return up to `limit` records of an instance with greater revisions than `after`, in order.

        Raises `InvalidJournalEntry` where a record is damaged or missing. `level` is that of the row after record
        `after`; if it is not given, gaps are found only after the first `started` or `snapshot` record.
        """
        head = await self.storage.head(thread)
        page = await self.storage.read(thread, after=after, limit=limit)
        if not page and after < head:
            raise InvalidJournalEntry(
                thread.instance_id, after + 1, f"missing: the thread is at revision {head}"
            )
        return list(check_sequence(page, thread.instance_id, after=after, level=level))

    async def load(self, thread: Thread, *, level: Level | None = None) -> Projection:
        """Return the projection of an instance: from its checkpoint if that is usable, and the records after it.

        Missing, stale, unknown and unreadable checkpoints change nothing but the number of records that are read.
        `level`: as the row has it, if it is known; see `read`.
        """
        head = await self.storage.head(thread)
        projection = copy_of(usable(await self.storage.get_checkpoint(thread), head=head))
        last = projection.rev
        while last < head:
            run = projection.run
            page = await self.read(
                thread, after=last, limit=self._page, level=level if run is None else run.level
            )
            replay_into(projection, page, on_anomaly=self._on_anomaly)
            last = page[-1].rev
        return projection

    async def save_checkpoint(self, thread: Thread) -> Projection:
        """Load the projection, store it as the checkpoint, and return it."""
        projection = await self.load(thread)
        if projection.rev:
            await self.storage.put_checkpoint(thread, make_checkpoint(projection))
        return projection
