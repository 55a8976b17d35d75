"""Which Trio run a client belongs to, and what becomes of a call from elsewhere.

Connections, events and pokes of a client work in one Trio run only: used from a second one, they corrupt both. So each
call looks first where it is:

=====================================  =============================================================================
called from                            then
=====================================  =============================================================================
the client's own run                   it goes on
a second run, inside a step's code     it is carried to the client's run: a `def` step has called `trio.run`
a second run, anywhere else            `DurableError`, which says what to do
asyncio, or no event loop at all       `DurableError`, which names `durable_actors.aio` or `trio.run`
=====================================  =============================================================================
"""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from contextvars import Context, ContextVar, copy_context
from functools import partial, wraps
from typing import Any, Concatenate, Final, ParamSpec, Protocol, TypeVar

import trio
from trio.lowlevel import TrioToken, current_trio_token, spawn_system_task

from durable_actors.errors import DurableError

P = ParamSpec("P")
R = TypeVar("R")

_engine_run: Final[ContextVar[TrioToken | None]] = ContextVar("durable_actors_run", default=None)
"""The run of the engine whose code this is; inherited by the threads of its steps."""


class HomeRun:
    """The Trio run that an object belongs to: the one in which it was made, else in which it is first used."""

    __slots__ = ("_anywhere", "_token")

    def __init__(self, *, anywhere: bool = False) -> None:
        self._token: TrioToken | None = _current()
        self._anywhere = anywhere  # carried from every run, not only from a step's own code

    def is_here(self) -> bool:
        """Tell whether this is the object's run."""
        current = _current()
        if self._token is None:
            self._token = current
        return current is not None and current is self._token

    def adopt(self) -> None:
        """Calls from this task, the tasks it starts and their threads are this run's, wherever they are made."""
        _engine_run.set(self._token)

    def soon(self, call: Callable[[], object]) -> None:
        """Call a plain function in this run: now if this is it, else soon; never if the run has ended."""
        if self._token is None or self.is_here():
            call()
        else:
            _call_soon(self._token, call)

    def check(self) -> None:
        """Raise `DurableError` when this is another run, asyncio, or no event loop."""
        if not self.is_here():
            require_trio()
            raise _elsewhere()

    async def carry(self, call: Callable[[], Awaitable[R]]) -> R:
        """Run `call` in the object's run, from a second one inside a step's code.

        Cancelled: the call is cancelled there, and has ended.
        """
        require_trio()
        assert self._token is not None
        if not self._anywhere and _engine_run.get() is not self._token:
            raise _elsewhere()
        carried: R = await _Carried(call).run(self._token)
        return carried

    def call_from_thread(self, call: Callable[[], Awaitable[R]]) -> R:
        """Run `call` in the object's run, for plain code in a thread; blocks until it has ended.

        In the thread of a `def` step: cancelled with the step, raising `trio.Cancelled`.
        """
        if _current() is not None:
            raise DurableError(
                "durable_actors.sync blocks, and this code runs in a Trio task: await ctx.insert(...), ctx.signal(...) "
                "or ctx.start_child(...)"
            )
        try:
            return trio.from_thread.run(call, trio_token=None if _in_thread_of_trio() else self._token)
        except trio.RunFinishedError:
            raise _over() from None


class _Carried:
    """One call on its way to another run and back."""

    def __init__(self, call: Callable[[], Awaitable[Any]]) -> None:
        self._call = call
        self._scope = trio.CancelScope()
        self._back = trio.Event()
        self._value: Any = None
        self._error: BaseException | None = None
        self._ended = False

    async def run(self, there: TrioToken) -> Any:
        """Raise what the call raises."""
        begin = partial(self._begin, copy_context(), current_trio_token())
        try:
            there.run_sync_soon(begin)
        except trio.RunFinishedError:
            raise _over() from None
        try:
            await self._back.wait()
        except trio.Cancelled:
            _call_soon(there, self._scope.cancel)
            with trio.CancelScope(shield=True):
                await self._back.wait()
            raise
        if self._error is not None:
            raise self._error
        if not self._ended:
            raise _over()
        return self._value

    def _begin(self, context: Context, back: TrioToken) -> None:
        try:
            spawn_system_task(self._run_there, back, context=context)
        except RuntimeError:  # its run is ending and takes no more tasks
            _call_soon(back, self._back.set)

    async def _run_there(self, back: TrioToken) -> None:
        """A system task: an error that left it would end the whole run."""
        try:
            with self._scope:
                self._value = await self._call()
                self._ended = True
        except Exception as exc:  # noqa: BLE001 - raised again where the call was made
            self._error = exc
        finally:
            _call_soon(back, self._back.set)


class _AtHome(Protocol):
    @property
    def home(self) -> HomeRun: ...


Self_ = TypeVar("Self_", bound=_AtHome)


def at_home(
    method: Callable[Concatenate[Self_, P], Awaitable[R]],
) -> Callable[Concatenate[Self_, P], Coroutine[Any, Any, R]]:
    """Let a method of an object with a `home` run there, or refuse before anything is touched."""

    @wraps(method)
    async def call(self: Self_, /, *args: P.args, **kwargs: P.kwargs) -> R:
        if self.home.is_here():
            return await method(self, *args, **kwargs)
        return await self.home.carry(partial(method, self, *args, **kwargs))

    return call


def require_trio(doing: str = "this call of durable_actors") -> None:
    """Raise `DurableError` when no Trio run is here."""
    if _current() is not None:
        return
    if _asyncio_runs():
        raise DurableError(
            f"{doing} runs on Trio, and this is an asyncio event loop: use durable_actors.aio with a "
            "psycopg.AsyncConnection of yours (insert, signal, inspect, result, retry)"
        )
    raise DurableError(
        f"{doing} must be awaited inside of trio.run; plain code uses durable_actors.sync with a psycopg.Connection"
    )


def _elsewhere() -> DurableError:
    return DurableError(
        "this engine or client belongs to another Trio run of the process, and works in that one only. In a thread "
        "of that run use trio.from_thread.run(...); elsewhere open a client in this run (durable_actors.open_client "
        "with a name= of its own), or use durable_actors.sync with a connection of yours"
    )


def _over() -> DurableError:
    return DurableError("the engine's Trio run ended during this call: it may have been done or not")


def _call_soon(token: TrioToken, call: Callable[[], object]) -> None:
    with suppress(trio.RunFinishedError):
        token.run_sync_soon(call)


def _in_thread_of_trio() -> bool:
    """Whether `trio.to_thread` made this thread. Raises `trio.Cancelled` where its task is cancelled."""
    try:
        trio.from_thread.check_cancelled()
    except RuntimeError:
        return False
    return True


def _asyncio_runs() -> bool:
    asyncio = sys.modules.get("asyncio")
    return asyncio is not None and asyncio._get_running_loop() is not None  # noqa: SLF001 - public for event loops


def _current() -> TrioToken | None:
    try:
        return current_trio_token()
    except RuntimeError:
        return None
