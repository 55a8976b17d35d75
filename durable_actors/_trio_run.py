"""Which Trio run a client belongs to, and how calls from elsewhere are handled.

The connections and events of a client work in one Trio run only; using them from a second run would corrupt both. So
each call first checks where it is made:

=====================================  =============================================================================
called from                            effect
=====================================  =============================================================================
the client's own run                   the call runs
a second run, inside a step's code     the call runs in the client's run (a `def` step has called `trio.run`)
a second run, anywhere else            `DurableError`, with a message that says what to do
asyncio, or no event loop at all       `DurableError`, with a message that names `durable_actors.aio` or `trio.run`
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
"""The Trio run of the engine that runs this code; threads of steps inherit it."""


class HomeRun:
    """The Trio run that an object belongs to: where it was created, or else where it is first used."""

    __slots__ = ("_anywhere", "_token")

    def __init__(self, *, anywhere: bool = False) -> None:
        self._token: TrioToken | None = _current()
        self._anywhere = anywhere  # accept calls from every run, not only from a step's code

    def is_here(self) -> bool:
        """Return whether the caller is in the object's run."""
        current = _current()
        if self._token is None:
            self._token = current
        return current is not None and current is self._token

    def adopt(self) -> None:
        """Accept calls from this task, the tasks it starts and their threads, also from a second run there."""
        _engine_run.set(self._token)

    def soon(self, call: Callable[[], object]) -> None:
        """Call a function in this run: at once if the caller is in it, otherwise soon; never if the run has ended."""
        if self._token is None or self.is_here():
            call()
        else:
            _call_soon(self._token, call)

    def check(self) -> None:
        """Raise `DurableError` if the caller is in another run, in asyncio, or in no event loop."""
        if not self.is_here():
            require_trio()
            raise _elsewhere()

    async def carry(self, call: Callable[[], Awaitable[R]]) -> R:
        """Run `call` in the object's run, for a caller in a second run inside a step's code.

        If this raises Cancelled, the call was cancelled in its run and has ended.
        """
        require_trio()
        assert self._token is not None
        if not self._anywhere and _engine_run.get() is not self._token:
            raise _elsewhere()
        carried: R = await _Carried(call).run(self._token)
        return carried

    def call_from_thread(self, call: Callable[[], Awaitable[R]]) -> R:
        """Run `call` in the object's run, for synchronous code in a thread; block until it has ended.

        In the thread of a `def` step, it is cancelled with the step and raises `trio.Cancelled`.
        """
        if _current() is not None:
            raise DurableError(
                "durable_actors.sync blocks, but this code runs in a Trio task: await ctx.insert(...), ctx.signal(...) "
                "or ctx.start_child(...)"
            )
        try:
            return trio.from_thread.run(call, trio_token=None if _in_thread_of_trio() else self._token)
        except trio.RunFinishedError:
            raise _over() from None


class _Carried:
    """A call that runs in another Trio run and returns its result here."""

    def __init__(self, call: Callable[[], Awaitable[Any]]) -> None:
        self._call = call
        self._scope = trio.CancelScope()
        self._back = trio.Event()
        self._value: Any = None
        self._error: BaseException | None = None
        self._ended = False

    async def run(self, there: TrioToken) -> Any:
        """Run the call; return its value or raise its exception."""
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
        except RuntimeError:  # the run is ending and accepts no more tasks
            _call_soon(back, self._back.set)

    async def _run_there(self, back: TrioToken) -> None:
        """Run the call in a system task, in which an uncaught error would end the whole run."""
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
    """Decorate a method of an object with a `home`: it runs there, or raises before it does anything."""

    @wraps(method)
    async def call(self: Self_, /, *args: P.args, **kwargs: P.kwargs) -> R:
        if self.home.is_here():
            return await method(self, *args, **kwargs)
        return await self.home.carry(partial(method, self, *args, **kwargs))

    return call


def require_trio(doing: str = "this call of durable_actors") -> None:
    """Raise `DurableError` if the caller is not in a Trio run."""
    if _current() is not None:
        return
    if _asyncio_runs():
        raise DurableError(
            f"{doing} needs Trio, and this is an asyncio event loop: use durable_actors.aio with your own "
            "psycopg.AsyncConnection (insert, signal, inspect, result, retry)"
        )
    raise DurableError(
        f"{doing} must be awaited inside trio.run; synchronous code uses durable_actors.sync with a psycopg.Connection"
    )


def _elsewhere() -> DurableError:
    return DurableError(
        "this engine or client belongs to another Trio run of the process and works only there. In a thread of that "
        "run, use trio.from_thread.run(...); otherwise open a client in this run (durable_actors.open_client with "
        "another name=), or use durable_actors.sync with your own connection"
    )


def _over() -> DurableError:
    return DurableError("the engine's Trio run ended during this call: it may or may not have been done")


def _call_soon(token: TrioToken, call: Callable[[], object]) -> None:
    with suppress(trio.RunFinishedError):
        token.run_sync_soon(call)


def _in_thread_of_trio() -> bool:
    """Return whether `trio.to_thread` started this thread. Raises `trio.Cancelled` if its task is cancelled."""
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
