"""Calls: messages that carry the slot for their reply.

The slot belongs to the *call*, not to the actor: when a caller gives up, its slot goes with it, and a later
reply is dropped and counted. Nothing that a caller does affects the actor.

::

    queued ──take──> taken ──reply──> answered
      │                └────caller gave up────> abandoned     a later reply is dropped and counted (`late`)
      ├────caller gave up──────────────────> withdrawn     the mailbox skips it
      └────actor ended─────────────────────> withdrawn     `call` raises ActorDown: nothing was done
"""

from __future__ import annotations

from typing import Any, Generic, Literal, Protocol, Self, TypeVar

import outcome
import trio

R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)
M_co = TypeVar("M_co", covariant=True)
M_contra = TypeVar("M_contra", contravariant=True)

SlotState = Literal["queued", "taken", "answered", "abandoned", "withdrawn"]


class PendingCalls:
    """The calls of one address that wait for a reply, and counts of lost calls and replies."""

    __slots__ = ("late", "pending", "withdrawn")

    def __init__(self) -> None:
        self.pending: dict[ReplySlot, None] = {}  # ordered: when the actor ends, the oldest is answered first
        self.late: int = 0
        self.withdrawn: int = 0


class NotTaken:
    """Given to a waiting caller instead of a reply when the actor ended before it took the call."""


NOT_TAKEN = NotTaken()


class ReplySlot:
    """Where a reply goes: the parked task of the caller."""

    __slots__ = ("calls", "message", "state", "task")

    def __init__(self, calls: PendingCalls, task: trio.lowlevel.Task, message: type[object]) -> None:
        self.calls: PendingCalls = calls
        self.message: type[object] = message  # for error texts
        self.task: trio.lowlevel.Task = task
        self.state: SlotState = "queued"

    async def wait(self) -> Any:
        """Park until the call is answered. If this raises Cancelled, a later reply is dropped."""
        self.calls.pending[self] = None
        return await trio.lowlevel.wait_task_rescheduled(self._abort)

    def _abort(self, _raise_cancel: object) -> trio.lowlevel.Abort:
        del self.calls.pending[self]
        self.state = "withdrawn" if self.state == "queued" else "abandoned"
        return trio.lowlevel.Abort.SUCCEEDED

    def take(self) -> bool:
        """Mark the call as taken by the actor. Returns False if the caller is gone and the call must be skipped."""
        if self.state == "queued":
            self.state = "taken"
            return True
        self.calls.withdrawn += 1
        return False

    def answer(self, result: outcome.Outcome[Any]) -> bool:
        """Wake the caller. Returns False if it no longer waits."""
        if self.state not in ("queued", "taken"):
            self.calls.late += 1
            return False
        self.state = "answered"
        del self.calls.pending[self]
        trio.lowlevel.reschedule(self.task, result)
        return True

    def end(self, error: BaseException) -> None:
        """Answer the caller when the actor ended: `error` for a taken call, NOT_TAKEN for a queued one."""
        if self.state == "taken":
            self.answer(outcome.Error(error))
        else:
            self.answer(outcome.Value(NOT_TAKEN))
            self.state = "withdrawn"


class Accepts(Generic[M_contra]):
    """The message type that an address accepts. Exists for the type checker: see `Askable`."""

    __slots__ = ()


class Call(Generic[R]):
    """Base class of messages that expect a reply of type `R`.

    ::

        @attrs.frozen
        class Get(otp.Call[str]):
            key: str

        value = await store.call(Get("x"), timeout=2)  # mypy and pyright infer str

    The actor answers with `reply` or `reply_error`, at once or later, from any task. Create a new object for each call.
    """

    __slots__ = ("_slot",)
    _slot: ReplySlot

    def reply(self, value: R) -> bool:
        """Send the reply. Returns False if nobody waits for it.

        That is the case if the caller gave up or was already answered, or if the message was sent without `call`.
        """
        slot = getattr(self, "_slot", None)
        return slot is not None and slot.answer(outcome.Value(value))

    def reply_error(self, error: Exception) -> bool:
        """Make the caller's `call` raise `error`. The actor keeps running. Returns False if nobody waits."""
        slot = getattr(self, "_slot", None)
        return slot is not None and slot.answer(outcome.Error(error))

    @property
    def wanted(self) -> bool:
        """Whether a caller still waits for the reply."""
        slot = getattr(self, "_slot", None)
        return slot is not None and slot.state in ("queued", "taken")

    def _attach(self, slot: ReplySlot) -> None:
        old = getattr(self, "_slot", None)
        if old is not None and old.state not in ("answered", "withdrawn"):
            # With two callers on one object, the reply to the first would answer the second.
            raise RuntimeError(f"{type(self).__name__} is in use by another call; make a new object per call")
        object.__setattr__(self, "_slot", slot)  # message classes are frozen

    def _take(self) -> bool:
        slot = getattr(self, "_slot", None)
        return slot is None or slot.take()

    def _answer_type(self, to: Accepts[Self], /) -> R:  # noqa: ARG002 - for the type checker
        raise AssertionError("only type checkers look at this")


class Askable(Protocol[M_co, R_co]):
    """A `Call[R]` that an address of `M` accepts.

    Python has no intersection types. This protocol expresses "a Call[R] *and* one of M": the method takes
    `Accepts[its own class]`, and `Accepts[M]` matches that only if the class is in M.
    """

    def _answer_type(self, to: Accepts[M_co], /) -> R_co: ...
