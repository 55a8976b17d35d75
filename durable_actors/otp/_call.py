"""Calls: messages that carry the slot their reply goes to.

The slot belongs to the *call*, not to the server: a caller that gives up takes its slot with it,
and what the server then says is dropped and counted. Nothing a caller does can hurt the server.

::

    queued ──take──> taken ──reply──> answered
      │                └────caller gave up────> abandoned     a later reply is dropped: `late`
      ├────caller gave up──────────────────> withdrawn     the mailbox skips it
      └────actor ended─────────────────────> withdrawn     the caller is told: nothing was done
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


class ReplyCounts:
    """What became of calls; one per address."""

    __slots__ = ("late", "pending", "withdrawn")

    def __init__(self) -> None:
        self.pending: dict[Slot, None] = {}  # in order, so that a death answers oldest first
        self.late: int = 0
        self.withdrawn: int = 0


class NotTaken:
    """What a waiting caller gets instead of a reply when the actor ended before it took the call."""


NOT_TAKEN = NotTaken()


class Slot:
    """Where one reply goes: the parked task of the caller."""

    __slots__ = ("book", "message", "state", "task")

    def __init__(self, book: ReplyCounts, task: trio.lowlevel.Task, message: type[object]) -> None:
        self.book: ReplyCounts = book
        self.message: type[object] = message  # for error texts
        self.task: trio.lowlevel.Task = task
        self.state: SlotState = "queued"

    async def wait(self) -> Any:
        """Park until answered. If this raises Cancelled, a later reply goes nowhere."""
        self.book.pending[self] = None
        return await trio.lowlevel.wait_task_rescheduled(self._abort)

    def _abort(self, _raise_cancel: object) -> trio.lowlevel.Abort:
        del self.book.pending[self]
        self.state = "withdrawn" if self.state == "queued" else "abandoned"
        return trio.lowlevel.Abort.SUCCEEDED

    def take(self) -> bool:
        """The actor receives the call. False: the caller is gone, skip it."""
        if self.state == "queued":
            self.state = "taken"
            return True
        self.book.withdrawn += 1
        return False

    def answer(self, result: outcome.Outcome[Any]) -> bool:
        """Wake the caller. False: nobody waits any more."""
        if self.state not in ("queued", "taken"):
            self.book.late += 1
            return False
        self.state = "answered"
        del self.book.pending[self]
        trio.lowlevel.reschedule(self.task, result)
        return True

    def end(self, error: BaseException) -> None:
        """The actor ended: a taken call fails with `error`, a queued one was never begun."""
        if self.state == "taken":
            self.answer(outcome.Error(error))
        else:
            self.answer(outcome.Value(NOT_TAKEN))
            self.state = "withdrawn"


class Accepts(Generic[M_contra]):
    """What an address takes. Exists for the type checker: see `Askable`."""

    __slots__ = ()


class Call(Generic[R]):
    """Base class of messages that want a reply of type `R`.

    ::

        @attrs.frozen
        class Get(otp.Call[str]):
            key: str

        value = await store.call(Get("x"), timeout=2)  # a str, for mypy and pyright, too

    The actor replies with `reply`, now or later, from any task. Make a new object for each call.
    """

    __slots__ = ("_slot",)
    _slot: Slot

    def reply(self, value: R) -> bool:
        """Answer the caller. False: nobody waits (it gave up, was answered before, or it was a cast)."""
        slot = getattr(self, "_slot", None)
        return slot is not None and slot.answer(outcome.Value(value))

    def reply_error(self, error: Exception) -> bool:
        """Make the caller's `call` raise `error`; the actor lives on. False: nobody waits."""
        slot = getattr(self, "_slot", None)
        return slot is not None and slot.answer(outcome.Error(error))

    @property
    def wanted(self) -> bool:
        """Whether a caller still waits for the reply."""
        slot = getattr(self, "_slot", None)
        return slot is not None and slot.state in ("queued", "taken")

    def _attach(self, slot: Slot) -> None:
        old = getattr(self, "_slot", None)
        if old is not None and old.state not in ("answered", "withdrawn"):
            # Two callers on one object: the reply to the first would answer the second.
            raise RuntimeError(f"{type(self).__name__} is in use by another call; make a new object per call")
        object.__setattr__(self, "_slot", slot)  # message classes are frozen

    def _take(self) -> bool:
        slot = getattr(self, "_slot", None)
        return slot is None or slot.take()

    def _answer_type(self, to: Accepts[Self], /) -> R:  # noqa: ARG002 - for the type checker
        raise AssertionError("only type checkers look at this")


class Askable(Protocol[M_co, R_co]):
    """A `Call[R]` that an address of `M` accepts.

    Python has no intersection types; this says "is a Call[R] *and* one of M" all the same: the
    method takes `Accepts[its own class]`, and `Accepts[M]` fits there only if that class is in M.
    """

    def _answer_type(self, to: Accepts[M_co], /) -> R_co: ...
