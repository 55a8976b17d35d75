"""`MemoryJournal`: the journal storage of tests, and of histories that were exported to a file."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from durable_actors.errors import RevConflict
from durable_actors.journal.facts import Thread
from durable_actors.journal.records import Record, decode_record, encode_record
from durable_actors.journal.storage import Checkpoint


class _Dump(msgspec.Struct):
    threads: dict[str, dict[int, msgspec.Raw]]
    heads: dict[str, int]
    checkpoints: dict[str, Checkpoint]


class MemoryJournal:
    """A `JournalStorage` in memory. Records are kept as JSON, so what is read shares nothing with what was appended."""

    def __init__(self) -> None:
        self._threads: dict[str, dict[int, bytes]] = {}
        self._heads: dict[str, int] = {}
        self._checkpoints: dict[str, Checkpoint] = {}

    async def append(self, thread: Thread, records: Sequence[Record], *, expected_rev: int) -> int:
        """See `JournalStorage.append`. It never awaits, so no other append can come between check and write."""
        head = await self.head(thread)
        if head != expected_rev:
            raise RevConflict(thread.name, expected_rev, head)
        numbered = {
            rev: encode_record(msgspec.structs.replace(record, rev=rev))
            for rev, record in enumerate(records, head + 1)
        }
        self._threads.setdefault(thread.name, {}).update(numbered)
        self._heads[thread.name] = head + len(numbered)
        return head + len(numbered)

    async def read(self, thread: Thread, *, after: int = 0, limit: int = 1000) -> list[Record]:
        """See `JournalStorage.read`."""
        stored = self._threads.get(thread.name, {})
        revs = [rev for rev in sorted(stored) if rev > after][:limit]
        return [decode_record(stored[rev], instance_id=thread.instance_id, rev=rev) for rev in revs]

    async def head(self, thread: Thread) -> int:
        """See `JournalStorage.head`."""
        return self._heads.get(thread.name, 0)

    async def put_checkpoint(self, thread: Thread, checkpoint: Checkpoint) -> None:
        """See `JournalStorage.put_checkpoint`."""
        self._checkpoints[thread.name] = checkpoint

    async def get_checkpoint(self, thread: Thread) -> Checkpoint | None:
        """See `JournalStorage.get_checkpoint`."""
        return self._checkpoints.get(thread.name)

    async def drop_checkpoint(self, thread: Thread) -> None:
        """See `JournalStorage.drop_checkpoint`."""
        self._checkpoints.pop(thread.name, None)

    def threads(self) -> list[Thread]:
        """The threads that have records, in order."""
        return sorted(Thread.parse(name) for name in self._threads)

    def overwrite(self, thread: Thread, rev: int, stored: bytes | None) -> None:
        """Damage a record, for tests: replace what is stored, or remove it."""
        if stored is None:
            del self._threads[thread.name][rev]
        else:
            self._threads[thread.name][rev] = stored

    def dump(self) -> bytes:
        """Return everything as JSON. Checkpoint bodies are in Base64."""
        threads = {
            name: {rev: msgspec.Raw(raw) for rev, raw in stored.items()}
            for name, stored in self._threads.items()
        }
        return msgspec.json.encode(_Dump(threads, self._heads, self._checkpoints))

    @classmethod
    def load(cls, dumped: bytes) -> MemoryJournal:
        """Return a journal with what `dump` returned."""
        dump = msgspec.json.decode(dumped, type=_Dump)
        journal = cls()
        journal._threads = {
            name: {rev: bytes(raw) for rev, raw in stored.items()} for name, stored in dump.threads.items()
        }
        journal._heads = dump.heads
        journal._checkpoints = dump.checkpoints
        return journal
