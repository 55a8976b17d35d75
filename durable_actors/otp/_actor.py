"""Actor: state that is owned by one task and changed by messages.

::

    factory() ─> init() ─> ready ─> run() [receive · handle]* ─> terminate(reason) ─> exit
                   │ fails: exit, no terminate            shielded, for the child's shutdown time
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import attrs
import trio

from durable_actors.otp._address import Address
from durable_actors.otp._child_spec import ChildSpec, Description, Incarnation, Place
from durable_actors.otp._errors import ActorDown, MailboxClosed, TerminateTimeout
from durable_actors.otp._exit import NORMAL, Error, ExitReason, Shutdown, contains_cancelled, sole_error
from durable_actors.otp._mailbox import NOTHING, Mailbox
from durable_actors.otp._snapshot import NodeKind
from durable_actors.otp._timer import periodic

# ruff: noqa: SLF001 - an actor, its address and its incarnation are one thing in three files

M = TypeVar("M")

_MESSAGES_PER_TURN = 100
"""Messages that an actor may handle without a checkpoint. A checkpoint costs as much as ten messages; without any, an
actor that sends to itself would block the whole process."""

_BRUTAL_TERMINATE_TIMEOUT = 5.0
"""Seconds for `terminate` after a crash of a child whose shutdown is "brutal"."""


class Actor(Generic[M]):
    """Base class of actors that receive messages of type `M`.

    Override `handle`, or override `run` to write the loop yourself (to receive batches, for example). Override
    `init` and `terminate` as needed. An exception that any of them raises ends this incarnation, and the
    supervisor decides what follows.
    """

    address: Address[M]
    """The address of this actor."""
    mailbox: Mailbox[M]
    """The mailbox of this actor."""
    nursery: trio.Nursery
    """A nursery for tasks of this incarnation. They are cancelled when it ends; if one fails, the actor fails."""

    async def init(self) -> None:
        """Prepare the actor. The next sibling starts after this returns. If it raises, `terminate` does not run."""

    async def handle(self, msg: M) -> None:
        """Handle one message. A request to stop does not interrupt it before the shutdown time is over."""
        raise TypeError(f"{type(self).__name__} overrides neither handle() nor run(): {msg!r}")

    async def run(self) -> None:
        """Handle messages until the actor is asked to stop. Override it to read `mailbox` in another way.

        The actor ends normally when this returns or raises `MailboxClosed`.
        """
        mailbox, handle = self.mailbox, self.handle
        while True:
            await handle(await mailbox.receive())
            for _ in range(_MESSAGES_PER_TURN):
                msg = mailbox.poll()
                if msg is NOTHING:
                    break
                await handle(msg)

    async def terminate(self, reason: ExitReason) -> None:
        """Clean up. Shielded from cancellation for the child's shutdown time. Does not run if `init` failed."""

    def stop(self) -> None:
        """End this actor normally: after the queued messages, or after the current one if the address keeps them."""
        self.address._stop(restart=True)

    def send_after(self, delay: float, msg: M) -> trio.CancelScope:
        """Send `msg` to this actor after `delay` seconds, unless the actor ends or the returned scope is cancelled."""
        scope = trio.CancelScope()
        self.nursery.start_soon(self._send_after, scope, delay, msg)
        return scope

    def send_every(self, period: float, msg: M) -> trio.CancelScope:
        """Send `msg` to this actor every `period` seconds, first after `period` seconds, until the scope is cancelled.

        The ticks do not drift. While the mailbox is full, one message waits and missed ticks are skipped.
        """
        scope = trio.CancelScope()
        ticks = periodic(period)
        self.nursery.start_soon(self._send_every, scope, ticks, msg)
        return scope

    async def _send_after(self, scope: trio.CancelScope, delay: float, msg: M) -> None:
        with scope:
            await trio.sleep(delay)
            await self._send_self(msg)

    async def _send_every(self, scope: trio.CancelScope, ticks: periodic, msg: M) -> None:
        with scope:
            async for tick in ticks:
                if tick:
                    await self._send_self(msg)

    async def _send_self(self, msg: M) -> None:
        try:
            await self.address.send(msg)
        except ActorDown:
            await trio.sleep_forever()  # the actor is stopping; its nursery cancels this task


def _name_of(spec: ActorChild[Any]) -> str:
    return spec.address.name


@attrs.frozen(kw_only=True)
class ActorChild(ChildSpec, Generic[M]):
    """An actor as a child: ``ActorChild(address, Store)`` or ``ActorChild(address, lambda: Store(db))``.

    On a request to stop it handles the queued messages (unless they are kept for the next incarnation) and ends
    between two messages. After its shutdown time it is cancelled.
    """

    address: Address[M] = attrs.field(kw_only=False)
    """The address of the actor. The child has the name of the address."""
    factory: Callable[[], Actor[M]] = attrs.field(kw_only=False)
    """Creates a new actor for each incarnation."""
    name: str = attrs.field(init=False, default=attrs.Factory(_name_of, takes_self=True))
    """The name of the address."""

    @property
    def kind(self) -> NodeKind:
        """Always "actor"."""
        return "actor"

    def incarnate(self, place: Place) -> Incarnation:  # noqa: ARG002 - the protocol's
        """Return an incarnation with a new actor behind the same address."""
        return _ActorRun(self)

    def describe(self) -> Description:
        """Return the statistics of the mailbox, which exists with and without an incarnation."""
        return Description(mailbox=self.address.statistics())

    def close(self) -> None:
        """Mark the address as down, which wakes everything that waits for the actor."""
        self.address._close()


class _ActorRun:
    """One incarnation of an actor."""

    __slots__ = ("_address", "_begun", "_spec", "_stop_why")

    def __init__(self, spec: ActorChild[Any]) -> None:
        self._spec = spec
        self._address: Address[Any] = spec.address
        self._begun = False  # init returned, so terminate must run
        self._stop_why: str | None = None

    def request_stop(self, why: str, *, restart: bool) -> bool:
        self._stop_why = why
        if not self._begun:
            return False  # still in init: there is nothing to drain, and init may never return
        self._address._stop(restart=restart)
        return True

    def describe(self, *, tasks: int) -> Description:  # noqa: ARG002 - the protocol's
        return self._spec.describe()

    async def run(self, ready: Callable[[], None]) -> None:
        self._address._begin(trio.lowlevel.current_task())
        reason: ExitReason = NORMAL
        try:
            actor = self._spec.factory()
            try:
                await self._live(actor, ready)
                if self._stop_why is not None:
                    reason = Shutdown(self._stop_why)
            except BaseException as exc:
                if contains_cancelled(exc):
                    reason = Shutdown(self._stop_why or "cancelled", killed=True)
                else:
                    reason = Error(exc)
                    # Fail the pending calls now, not after the clean-up.
                    self._address._fail_calls(reason)
                await self._terminate(actor, reason)
                raise
            await self._terminate(actor, reason)
        except Exception as exc:
            reason = Error(exc)  # also when factory or terminate failed
            raise
        finally:
            self._address._ended(reason)

    async def _live(self, actor: Actor[Any], ready: Callable[[], None]) -> None:
        failure: BaseException | None = None
        try:
            async with trio.open_nursery() as nursery:
                actor.address = self._address
                actor.mailbox = self._address._mailbox
                actor.nursery = nursery
                await actor.init()
                self._begun = True
                self._address._running()
                ready()
                try:
                    await actor.run()
                except MailboxClosed:
                    if not actor.mailbox.stopping:
                        raise  # it is the mailbox of another actor
                finally:
                    # Before the nursery's exit runs other tasks: a message accepted after this would be lost.
                    self._address._ending()
                nursery.cancel_scope.cancel()
        except BaseExceptionGroup as group:
            failure = sole_error(group)
        if failure is not None:
            raise failure  # outside the handler, so that the group does not become its context

    async def _terminate(self, actor: Actor[Any], reason: ExitReason) -> None:
        time = self._spec.shutdown
        if not self._begun or (time == "brutal" and isinstance(reason, Shutdown)):
            return
        grace = _BRUTAL_TERMINATE_TIMEOUT if time == "brutal" else time
        deadline = math.inf if grace == math.inf else trio.current_time() + grace
        try:
            with trio.CancelScope(shield=True, deadline=deadline) as scope:
                await actor.terminate(reason)
        except Exception as exc:
            if isinstance(reason, Error) and isinstance(reason.error, Exception):
                text = f"actor {self._address.name!r} failed, and its terminate failed, too"
                raise ExceptionGroup(text, [reason.error, exc]) from None  # keep both errors
            raise
        if scope.cancelled_caught and not isinstance(reason, Error):
            raise TerminateTimeout(f"actor {self._address.name!r}: terminate took more than {grace:g} s")
