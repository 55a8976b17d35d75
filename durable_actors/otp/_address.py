"""Address: where messages to an actor are sent. It survives restarts of the actor.

::

    status      sends                              calls (on_down="fail")
    new         queued                             ActorDown
    starting    queued                             ActorDown
    running     queued, handled in order           queued, answered
    stopping    ActorDown; queued if kept          ActorDown
    restarting  ActorDown; queued if kept          ActorDown
    down        ActorDown                          ActorDown

"Kept" means `keep=True`: messages that are queued when the actor ends, and messages sent before its restart, go
to the next incarnation. The message that the actor was handling is not delivered again: delivery is at most once.
"""

from __future__ import annotations

import math
from typing import Any, Generic, Literal, TypeVar, cast

import trio

from durable_actors.otp._call import Accepts, Askable, Call, NotTaken, ReplySlot
from durable_actors.otp._errors import ActorDied, ActorDown, CallTimeout, MailboxFull, SpecError
from durable_actors.otp._exit import Error, ExitReason
from durable_actors.otp._mailbox import Mailbox, MailboxStatistics

M = TypeVar("M")
R = TypeVar("R")

Status = Literal["new", "starting", "running", "stopping", "restarting", "down"]
"""The status of the actor behind an address."""


class Address(Accepts[M], Generic[M]):
    """Where to send messages of type `M`. Create it before the actor; it stays valid across restarts.

    `capacity` limits the queued messages. With `keep`, queued messages survive a restart of the actor.
    """

    __slots__ = ("_changed", "_mailbox", "_open", "_reason", "_status", "_task", "keep", "name")

    def __init__(self, name: str, *, capacity: float = 1000, keep: bool = False) -> None:
        self.name: str = name
        """The name of the actor in errors, logs and the tree."""
        self.keep: bool = keep
        """Whether queued messages survive a restart of the actor."""
        self._mailbox: Mailbox[M] = Mailbox(name, capacity)
        self._status: Status = "new"
        self._open = True
        self._reason: ExitReason | None = None
        self._task: trio.lowlevel.Task | None = None
        self._changed = trio.lowlevel.ParkingLot()  # callers that wait for the actor to run

    def __repr__(self) -> str:
        return f"<Address {self.name!r} {self._status} {len(self._mailbox)}/{self._mailbox.capacity}>"

    @property
    def status(self) -> Status:
        """The status of the actor: new, starting, running, stopping, restarting or down."""
        return self._status

    def statistics(self) -> MailboxStatistics:
        """Return the statistics of the mailbox."""
        return self._mailbox.statistics()

    # -- sending

    def cast(self, msg: M) -> bool:
        """Send a message if the mailbox accepts it now. Never waits and never raises.

        Returns False if the message was dropped (and counted). Use it for messages that may be lost; use `send` for
        all others.
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
        """Send without waiting. Raises `MailboxFull` if there is no room, `ActorDown` if no actor will read it."""
        if not self._open:
            raise ActorDown(self.name, self._status, self._reason)
        if not self._mailbox.put(msg):
            raise MailboxFull(f"mailbox of {self.name!r} is full ({self._mailbox.capacity})")

    async def send(self, msg: M, *, timeout: float = math.inf) -> None:
        """Send a message; wait while the mailbox is full.

        Raises `CallTimeout` if there was no room within `timeout` seconds, and `ActorDown` if no actor will read the
        message. If this raises any of these or Cancelled, nothing was sent.
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

        While the actor is not running, `on_down="fail"` raises `ActorDown` at once, and `on_down="wait"` waits for
        the next incarnation: a call that the actor had not taken when it ended is sent again. A call that it had
        taken is never sent again and raises `ActorDied`. If the actor will not be restarted, both raise `ActorDown`.
        Raises `CallTimeout` after `timeout` seconds, which include waiting for room; `math.inf` means no limit.

        If this raises Cancelled or `CallTimeout`, a call that is still queued is withdrawn; a call that the actor has
        taken continues, and its reply is dropped.
        """
        call = cast("Call[R]", msg)
        if timeout == math.inf:
            return await self._call(call, on_down)
        with trio.move_on_after(timeout):
            return await self._call(call, on_down)
        raise CallTimeout(self.name, type(msg).__name__, timeout)

    async def wait_running(self) -> None:
        """Wait until the actor is running. Raises `ActorDown` if it will not be restarted."""
        await trio.lowlevel.checkpoint()
        while self._status != "running":
            if self._status == "down":
                raise ActorDown(self.name, self._status, self._reason)
            await self._changed.park()

    async def _put(self, msg: Any) -> None:
        """Append `msg` as soon as there is room. There is no checkpoint after it is appended."""
        while True:
            if not self._open:
                raise ActorDown(self.name, self._status, self._reason)
            if self._mailbox.put(msg):
                return
            await self._mailbox.wait_room()

    async def _call(self, call: Call[R], on_down: Literal["fail", "wait"]) -> R:
        task = trio.lowlevel.current_task()
        if task is self._task:
            raise RuntimeError(f"actor {self.name!r} calls itself, so it could never reply; use send or cast")
        while True:
            if on_down == "wait":
                await self.wait_running()
            elif self._status != "running":
                await trio.lowlevel.checkpoint()
                raise ActorDown(self.name, self._status, self._reason)
            slot = ReplySlot(self._mailbox.calls, task, type(call))
            call._attach(slot)  # noqa: SLF001 - Call's other half
            try:
                await self._put(call)
            except BaseException as exc:
                slot.state = "withdrawn"  # never queued, so the object may be used again
                if isinstance(exc, ActorDown) and on_down == "wait" and self._status != "down":
                    continue
                raise
            answer = await slot.wait()
            if not isinstance(answer, NotTaken):
                return cast("R", answer)
            if on_down == "fail" or self._status == "down":
                raise ActorDown(self.name, self._status, self._reason)

    # -- called by _ActorRun and ActorChild

    def _begin(self, task: trio.lowlevel.Task) -> None:
        if self._task is not None:
            raise SpecError(f"address {self.name!r} already has a running actor")
        self._task = task
        self._mailbox.open()
        self._set("starting", is_open=True)

    def _running(self) -> None:
        self._set("running", is_open=True)

    def _stop(self, *, restart: bool) -> None:
        """Ask the actor to end: after the queued messages, or at once if they are kept for a restart."""
        kept = restart and self.keep
        self._mailbox.stop(leave=kept)
        self._set("stopping", is_open=kept)

    def _ending(self) -> None:
        """Close the mailbox: the loop has ended, `terminate` follows, and this incarnation reads no more messages."""
        if self._status != "stopping":
            self._set("stopping", is_open=self.keep)

    def _fail_calls(self, reason: ExitReason) -> None:
        """Fail every pending call, because the incarnation has ended."""
        cause = reason.error if isinstance(reason, Error) else None
        for slot in list(self._mailbox.calls.pending):
            error = ActorDied(self.name, slot.message.__name__, reason)
            error.__cause__ = cause
            slot.end(error)

    def _ended(self, reason: ExitReason) -> None:
        """Record the end of the incarnation. Whether a restart follows is not known yet."""
        self._task = None
        self._reason = reason
        self._set("restarting", is_open=self.keep)
        self._fail_calls(reason)
        if not self.keep:
            self._mailbox.clear()

    def _close(self) -> None:
        """Mark the address as down: no restart follows, unless a new tree is started."""
        if self._task is None:
            self._set("down", is_open=False)
            self._mailbox.clear()

    def _set(self, status: Status, *, is_open: bool) -> None:
        self._status = status
        self._open = is_open
        self._changed.unpark_all()
        self._mailbox.wake_senders()
