"""Address: what one sends to. It survives the actors behind it.

::

    status      sends                              calls (on_down="fail")
    new         queued                             ActorDown
    starting    queued                             ActorDown
    running     queued, handled in order           queued, answered
    stopping    ActorDown; queued if kept          ActorDown
    restarting  ActorDown; queued if kept          ActorDown
    down        ActorDown                          ActorDown

"Kept" is `keep=True`: messages that wait when the actor ends, and those sent until it is back, are
for the next incarnation. The message it was working on is not among them: at most once.
"""

from __future__ import annotations

import math
from typing import Any, Generic, Literal, TypeVar, cast

import trio

from durable_actors.otp._call import Accepts, Askable, Call, NotTaken, Slot
from durable_actors.otp._errors import ActorDied, ActorDown, CallTimeout, MailboxFull, SpecError
from durable_actors.otp._exit import Error, ExitReason
from durable_actors.otp._mailbox import Mailbox, MailboxStatistics

M = TypeVar("M")
R = TypeVar("R")

Status = Literal["new", "starting", "running", "stopping", "restarting", "down"]
"""Where the actor behind an address stands."""


class Address(Accepts[M], Generic[M]):
    """Where to send messages of type `M`; made before the actor, and valid across its restarts.

    `keep` says whether queued messages wait for the next incarnation when the actor ends.
    """

    __slots__ = ("_changed", "_mailbox", "_open", "_reason", "_status", "_task", "keep", "name")

    def __init__(self, name: str, *, capacity: float = 1000, keep: bool = False) -> None:
        self.name: str = name
        """The actor's name in errors, logs and the tree."""
        self.keep: bool = keep
        """Whether messages survive a restart of the actor."""
        self._mailbox: Mailbox[M] = Mailbox(name, capacity)
        self._status: Status = "new"
        self._open = True
        self._reason: ExitReason | None = None
        self._task: trio.lowlevel.Task | None = None
        self._changed = trio.lowlevel.ParkingLot()  # callers that wait for the actor to be up

    def __repr__(self) -> str:
        return f"<Address {self.name!r} {self._status} {len(self._mailbox)}/{self._mailbox.capacity}>"

    @property
    def status(self) -> Status:
        """new, starting, running, stopping, restarting or down."""
        return self._status

    def statistics(self) -> MailboxStatistics:
        """The mailbox: depth, capacity, processed, age of the oldest message, drops."""
        return self._mailbox.statistics()

    # -- sending

    def cast(self, msg: M) -> bool:
        """Send if the actor takes it now; never waits, never raises. False: dropped, and counted.

        For hints that the next one repeats. What must arrive goes through `send`.
        """
        box = self._mailbox
        stamps = box._stamps  # noqa: SLF001 - `Mailbox.put` written out: the call is a tenth of the cost
        if self._open and len(stamps) < box.capacity:
            box._send_nowait(msg)  # noqa: SLF001
            stamps.append(box._now())  # noqa: SLF001
            return True
        box.dropped += 1
        return False

    def send_nowait(self, msg: M) -> None:
        """Send now. `MailboxFull`: no room; `ActorDown`: nobody will read it."""
        if not self._open:
            raise ActorDown(self.name, self._status, self._reason)
        if not self._mailbox.put(msg):
            raise MailboxFull(f"mailbox of {self.name!r} is full ({self._mailbox.capacity})")

    async def send(self, msg: M, *, timeout: float = math.inf) -> None:
        """Send; waits while the mailbox is full. If this raises Cancelled, nothing was sent.

        `CallTimeout` when there was no room in time, `ActorDown` when nobody will read it.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        if timeout == math.inf:
            await self._put(msg)
        else:
            with trio.move_on_after(timeout) as scope:
                await self._put(msg)
            if scope.cancelled_caught:
                raise CallTimeout(self.name, type(msg).__name__, timeout)
        await trio.lowlevel.cancel_shielded_checkpoint()

    async def call(
        self,
        msg: Askable[M, R],
        *,
        timeout: float = 5.0,
        on_down: Literal["fail", "wait"] = "fail",
    ) -> R:
        """Send a `Call[R]` and wait for its reply.

        `on_down` says what to do while the actor does not run: fail at once with `ActorDown`, or wait
        for its next incarnation (a call not begun when the actor ends is sent again; one that was
        begun never is: `ActorDied`). An actor that is down for good fails both. `timeout` covers
        everything, waiting for room included; `math.inf` waits for as long as the actor lives.

        If this raises Cancelled or `CallTimeout`, a call still queued is withdrawn, and one that the
        actor had taken goes on without a listener.
        """
        call = cast("Call[R]", msg)
        if timeout == math.inf:
            return await self._call(call, on_down)
        with trio.move_on_after(timeout):
            return await self._call(call, on_down)
        raise CallTimeout(self.name, type(msg).__name__, timeout)

    async def wait_running(self) -> None:
        """Wait until the actor runs; `ActorDown` once it is down for good."""
        await trio.lowlevel.checkpoint()
        while self._status != "running":
            if self._status == "down":
                raise ActorDown(self.name, self._status, self._reason)
            await self._changed.park()

    async def _put(self, msg: Any) -> None:
        """Append `msg` as soon as there is room. No checkpoint after it was appended."""
        while True:
            if not self._open:
                raise ActorDown(self.name, self._status, self._reason)
            if self._mailbox.put(msg):
                return
            await self._mailbox.wait_room()

    async def _call(self, call: Call[R], on_down: Literal["fail", "wait"]) -> R:
        task = trio.lowlevel.current_task()
        if task is self._task:
            raise RuntimeError(f"actor {self.name!r} calls itself: nobody would be left to answer")
        while True:
            if on_down == "wait":
                await self.wait_running()
            elif self._status != "running":
                await trio.lowlevel.checkpoint()
                raise ActorDown(self.name, self._status, self._reason)
            slot = Slot(self._mailbox.book, task, type(call))
            call._attach(slot)  # noqa: SLF001 - Call's other half
            try:
                await self._put(call)
            except BaseException as exc:
                slot.state = "withdrawn"  # never queued: the object may be used again
                if isinstance(exc, ActorDown) and on_down == "wait" and self._status != "down":
                    continue
                raise
            answer = await slot.wait()
            if not isinstance(answer, NotTaken):
                return cast("R", answer)
            if on_down == "fail" or self._status == "down":
                raise ActorDown(self.name, self._status, self._reason)

    # -- the life cycle's side (ActorRun and ActorChild)

    def _begin(self, task: trio.lowlevel.Task) -> None:
        if self._task is not None:
            raise SpecError(f"address {self.name!r} already has a running actor")
        self._task = task
        self._mailbox.open()
        self._set("starting", is_open=True)

    def _running(self) -> None:
        self._set("running", is_open=True)

    def _stop(self, *, restart: bool) -> None:
        """Ask the actor to end: after what is queued, or, if that is kept for a restart, at once."""
        kept = restart and self.keep
        self._mailbox.stop(leave=kept)
        self._set("stopping", is_open=kept)

    def _ending(self) -> None:
        """The loop is over, `terminate` follows: nothing more is read by this incarnation."""
        if self._status != "stopping":
            self._set("stopping", is_open=self.keep)

    def _fail_calls(self, reason: ExitReason) -> None:
        """Answer every pending call: the incarnation they were sent to is no more."""
        cause = reason.error if isinstance(reason, Error) else None
        for slot in list(self._mailbox.book.pending):
            error = ActorDied(self.name, slot.message.__name__, reason)
            error.__cause__ = cause
            slot.end(error)

    def _ended(self, reason: ExitReason) -> None:
        """The incarnation is gone; whether there will be another is not known yet."""
        self._task = None
        self._reason = reason
        self._set("restarting", is_open=self.keep)
        self._fail_calls(reason)
        if not self.keep:
            self._mailbox.clear()

    def _close(self) -> None:
        """There will be no other incarnation, unless a whole new tree is started."""
        if self._task is None:
            self._set("down", is_open=False)
            self._mailbox.clear()

    def _set(self, status: Status, *, is_open: bool) -> None:
        self._status = status
        self._open = is_open
        self._changed.unpark_all()
        self._mailbox.wake_senders()
