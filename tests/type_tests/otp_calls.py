"""Checked by mypy and pyright, never run: `# E:` marks a line that must be an error in both."""

from __future__ import annotations

from typing import assert_never, reveal_type

import attrs
import trio
from durable_actors import otp


@attrs.frozen
class Get(otp.Call[str]):
    key: str


@attrs.frozen
class Size(otp.Call[int]):
    pass


@attrs.frozen
class Put:
    key: str


@attrs.frozen
class Stranger(otp.Call[int]):
    pass


Msg = Get | Size | Put


class Store(otp.Actor[Msg]):
    async def handle(self, msg: Msg) -> None:
        match msg:
            case Get():
                msg.reply("x")
                msg.reply(1)  # E: wrong reply type
            case Size():
                msg.reply(1)
            case Put():
                self.send_after(1, Size())
                self.send_every(1, Stranger())  # E: not one of its messages
            case _:
                assert_never(msg)


class Other(otp.Actor[Put]):
    async def run(self) -> None:
        async for msg in self.mailbox:
            reveal_type(msg)  # R: Put
        reveal_type(await self.mailbox.receive_many(3))  # R: list\[Put\]


async def use(store: otp.Address[Msg]) -> None:
    reveal_type(await store.call(Get("x")))  # R: str
    reveal_type(await store.call(Size(), timeout=1, on_down="wait"))  # R: int
    await store.call(Stranger())  # E: the actor does not know it
    await store.call(Put("x"))  # E: nobody replies to a Put
    await store.call(Get("x"), on_down="retry")  # E: no such choice
    await store.send(Put("x"))
    await store.send(Stranger())  # E: not one of its messages
    store.send_nowait("x")  # E: not one of its messages
    reveal_type(store.cast(Put("x")))  # R: bool


def wire(store: otp.Address[Msg], puts: otp.Address[Put]) -> otp.Supervisor:
    return otp.Supervisor(
        "root",
        [
            otp.ActorChild(store, Store),
            otp.ActorChild(puts, Other, restart="transient", shutdown="brutal"),
            otp.TaskChild("task", trio.sleep_forever),
        ],
        strategy="rest_for_one",
    )


def wrong(store: otp.Address[Msg]) -> None:
    otp.ActorChild(store, Other)  # E: handles less than the address takes
    otp.TaskChild("t", trio.sleep_forever, restart="always")  # E: no such restart type
    otp.Supervisor("s", [], strategy="all")  # E: no such strategy


async def job(n: int) -> None:
    await trio.sleep(n)


def pools(pool: otp.Pool) -> None:
    reveal_type(pool.start_nowait(job, 1))  # R: PoolTask
    pool.start_nowait(job, "1")  # E: wrong argument
    pool.start_nowait(job)  # E: missing argument


def reasons(reason: otp.ExitReason) -> str:
    match reason:
        case otp.Normal():
            return "normal"
        case otp.Shutdown(why=why):
            return why
        case otp.Error(error=error):
            reveal_type(error)  # R: BaseException
            return repr(error)
        case _:
            assert_never(reason)
