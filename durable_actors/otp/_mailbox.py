"""Mailbox: a bounded memory channel that outlives the actor which reads it.

What it adds to the channel, per message: one time stamp (for the age of the oldest message) and
one type test (a call whose caller has gone is skipped, so an overloaded actor does not work for
nobody). Blocked senders wait in a parking lot of our own and not inside the channel, because the
stamps must stay in step with the channel's buffer, whoever is cancelled when.
"""

from __future__ import annotations

import enum
import math
from collections import deque
from typing import Final, Generic, TypeVar, cast

import attrs
import trio

from durable_actors.otp._call import Call, ReplyCounts
from durable_actors.otp._errors import MailboxClosed, SpecError

M = TypeVar("M")


class Nothing(enum.Enum):
    """No message: what `poll` finds in an empty mailbox, and what wakes a reader that must end."""

    NOTHING = "nothing"


NOTHING: Final = Nothing.NOTHING


@attrs.frozen(kw_only=True)
class MailboxStatistics:
    """A mailbox at one moment; counts are since the address was made."""

    depth: int
    """Messages that wait."""
    capacity: float
    """How many may wait."""
    processed: int
    """Messages that actors took out."""
    oldest_age: float
    """Seconds since the oldest waiting message came; 0 when none waits."""
    waiting_senders: int
    """Tasks that wait in `send` or `call` for room."""
    dropped: int
    """Messages lost: casts without room, and what a dead actor left behind."""
    withdrawn: int
    """Calls skipped because their caller had gone before the actor looked."""
    late_replies: int
    """Replies that came after their caller had gone."""
    unanswered: int
    """Calls that wait for their reply, queued ones included."""


class Mailbox(Generic[M]):
    """What an actor reads: its messages, in order. Addresses write to it, the actor only receives.

    When the actor is asked to stop, what is queued can still be received (unless it is kept for
    the next incarnation); then every receiving method raises `MailboxClosed`, and ``async for`` ends.
    """

    __slots__ = (
        "_in",
        "_leave",
        "_now",
        "_out",
        "_owner",
        "_receive_nowait",
        "_room",
        "_send_nowait",
        "_stamps",
        "_stopping",
        "_waiting",
        "book",
        "capacity",
        "dropped",
        "processed",
    )

    def __init__(self, owner: str, capacity: float) -> None:
        if not (capacity == math.inf or (capacity >= 1 and capacity == int(capacity))):
            raise SpecError(f"address {owner!r}: capacity must be an int >= 1 or inf, not {capacity!r}")
        self._owner = owner
        self.capacity: float = capacity
        """How many messages may wait."""
        self._out, self._in = trio.open_memory_channel[M | Nothing](capacity)
        # Bound once: attribute chains are a fifth of a cast's cost.
        self._send_nowait, self._receive_nowait = self._out.send_nowait, self._in.receive_nowait
        self._stamps: deque[float] = deque()  # one per message in the channel, oldest first
        self._room = trio.lowlevel.ParkingLot()  # senders that wait for room
        self._waiting = 0  # how many of them nobody has let in yet
        self._now = trio.current_time
        self._stopping = False  # nothing new; end when empty
        self._leave = False  # end now, what is queued is for the next incarnation
        self.book: ReplyCounts = ReplyCounts()
        self.dropped: int = 0
        self.processed: int = 0
        """Messages taken out so far."""

    @property
    def stopping(self) -> bool:
        """Whether the actor was asked to stop."""
        return self._stopping

    def __len__(self) -> int:
        """Messages that wait."""
        return len(self._stamps)

    # -- the actor's side

    def receive_nowait(self) -> M:
        """The next message; `trio.WouldBlock` if there is none, `MailboxClosed` when asked to stop."""
        msg = self.poll()
        if msg is NOTHING:
            raise MailboxClosed(self._owner) if self._stopping else trio.WouldBlock
        return msg

    async def receive(self) -> M:
        """Wait for the next message. If this raises Cancelled, no message was taken."""
        while not (self._leave or (self._stopping and not self._stamps)):
            msg = await self._in.receive()
            if self._took(msg):
                return cast("M", msg)
        raise MailboxClosed(self._owner)

    async def receive_many(self, limit: int) -> list[M]:
        """Wait for a message, then take what is queued, up to `limit` in all: at least one.

        If this raises Cancelled, no message was taken.
        """
        batch = [await self.receive()]
        while len(batch) < limit:
            msg = self.poll()
            if msg is NOTHING:
                break
            batch.append(msg)
        return batch

    def __aiter__(self) -> Mailbox[M]:
        return self

    async def __anext__(self) -> M:
        try:
            return await self.receive()
        except MailboxClosed:
            raise StopAsyncIteration from None

    def poll(self) -> M | Nothing:
        """The next message or `NOTHING`, without an exception: for loops that drain.

        `_took` written out: the call would be a tenth of what a message costs.
        """
        stamps = self._stamps
        while stamps and not self._leave:
            msg = self._receive_nowait()
            stamps.popleft()
            if self._waiting:
                self._admit()
            if isinstance(msg, Call) and not msg._take():  # noqa: SLF001 - Call's other half
                continue
            self.processed += 1
            return msg  # pyright: ignore[reportUnknownVariableType]  # Call[Unknown], by the test above
        return NOTHING

    def _took(self, msg: M | Nothing) -> bool:
        """Account for what came out of the channel. False: not for the actor, look again."""
        if msg is NOTHING:
            return False
        self._stamps.popleft()
        if self._waiting:
            self._admit()
        if isinstance(msg, Call) and not msg._take():  # noqa: SLF001 - Call's other half
            return False
        self.processed += 1
        return True

    # -- the address's side

    def put(self, msg: M) -> bool:
        """Append a message; False: there is no room."""
        stamps = self._stamps
        if len(stamps) >= self.capacity:
            return False
        # The channel cannot be full here: it holds at most one item per stamp, and a wake-up is
        # only ever handed to a reader that waits, never buffered.
        self._send_nowait(msg)
        stamps.append(self._now())
        return True

    async def wait_room(self) -> None:
        """Wait until a message was taken out, or the actor's state changed: look again."""
        self._waiting += 1
        try:
            await self._room.park()
        except BaseException:
            self._waiting -= 1  # cancelled: nobody has let it in
            raise

    def _admit(self) -> None:
        # Counted down here and not where the sender wakes: until it runs, each message of a drain
        # would unpark nobody again (measured: 0.5 us each).
        self._waiting -= 1
        self._room.unpark()

    def wake_senders(self) -> None:
        """Let every waiting sender look at the actor's state again."""
        self._waiting = 0
        self._room.unpark_all()

    # -- the life cycle's side

    def open(self) -> None:
        """A new incarnation begins to read."""
        # Bound once per incarnation: trio.current_time looks the clock up each time, 0.3 against
        # 0.14 us, which is a third of a bare channel's send and receive.
        self._now = trio.lowlevel.current_clock().current_time
        self._stopping = self._leave = False

    def stop(self, *, leave: bool) -> None:
        """Ask the reader to end: when all is read, or (`leave`) at once."""
        self._stopping = True
        self._leave = self._leave or leave
        for _ in range(self._in.statistics().tasks_waiting_receive):
            self._send_nowait(NOTHING)

    def clear(self) -> None:
        """Drop what is queued. Calls among it are answered by the address."""
        self.dropped += len(self._stamps)
        while self._stamps:
            self._receive_nowait()
            self._stamps.popleft()
        self.wake_senders()

    def statistics(self) -> MailboxStatistics:
        """Depth, capacity, age of the oldest message and counts."""
        return MailboxStatistics(
            depth=len(self._stamps),
            capacity=self.capacity,
            processed=self.processed,
            oldest_age=self._now() - self._stamps[0] if self._stamps else 0.0,
            waiting_senders=len(self._room),
            dropped=self.dropped,
            withdrawn=self.book.withdrawn,
            late_replies=self.book.late,
            unanswered=len(self.book.pending),
        )
