"""`JournalStorage`: what a journal needs of its storage, and nothing else.

Any store may stand behind it that can append to a thread atomically, refuse an append that expects another revision,
read entries back in order, and keep checkpoints. `durable_actors.testing.journal_conformance` tests an adapter. The
interface has no way to change or remove a record.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol, runtime_checkable

import msgspec

from durable_actors.journal.facts import Thread
from durable_actors.journal.projection import Projection
from durable_actors.journal.records import Record

CHECKPOINT_FORMAT: Final = 1
"""The format of the checkpoints that this release writes and reads."""


class Checkpoint(msgspec.Struct, frozen=True):
    """A stored projection. It only shortens a replay: without it, the records give the same."""

    rev: int
    """The revision of the last record that it covers."""
    format: int
    body: bytes
    """JSON."""


@runtime_checkable
class JournalStorage(Protocol):
    """An adapter to a store of threads. Each method is atomic."""

    async def append(self, thread: Thread, records: Sequence[Record], *, expected_rev: int) -> int:
        """Append records after revision `expected_rev`, number them densely, and return the new head.

        Raises `RevConflict` if the head is another one; then nothing is written. `expected_rev=0`: the thread is new.
        The numbers of the given records are ignored.
        """
        ...

    async def read(self, thread: Thread, *, after: int = 0, limit: int = 1000) -> list[Record]:
        """Return up to `limit` records with greater revisions than `after`, in order.

        Raises `InvalidJournalEntry` if one of them cannot be read; use `decode_record`, which does so.
        """
        ...

    async def head(self, thread: Thread) -> int:
        """Return the revision of the last record that was appended, or 0."""
        ...

    async def put_checkpoint(self, thread: Thread, checkpoint: Checkpoint) -> None:
        """Store the checkpoint of a thread, in place of an earlier one."""
        ...

    async def get_checkpoint(self, thread: Thread) -> Checkpoint | None:
        """Return the checkpoint as it is stored, whatever it contains, or None."""
        ...

    async def drop_checkpoint(self, thread: Thread) -> None:
        """Forget the checkpoint, if there is one."""
        ...


_projections: Final = msgspec.json.Decoder(Projection)


def make_checkpoint(projection: Projection) -> Checkpoint:
    """Return the checkpoint of a projection."""
    return Checkpoint(projection.rev, CHECKPOINT_FORMAT, msgspec.json.encode(projection))


def usable(checkpoint: Checkpoint | None, *, head: int) -> Projection | None:
    """Return the projection of a checkpoint, or None if the records must be replayed from the first one.

    It must have a known format, cover a revision that the thread has, and contain what it says that it covers.
    """
    if checkpoint is None or checkpoint.format != CHECKPOINT_FORMAT or not 1 <= checkpoint.rev <= head:
        return None
    try:
        projection = _projections.decode(checkpoint.body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    return projection if projection.rev == checkpoint.rev else None
