"""A chat server in one process: actors, supervisors, a pool. No database, no network.

    python examples/otp_chat.py

What to look at: `call` gets a typed reply; the room crashes on a bad word and comes back behind the same
address, with the messages that were waiting; its audience, which stands behind it in `rest_for_one`,
restarts with it; the guests, in the outer supervisor, notice nothing; leaving the block drains the
tree in reverse order.
"""

from __future__ import annotations

import logging
from typing import assert_never

import attrs
import trio
from durable_actors import otp

# -- messages: frozen classes; a Call[R] is answered with an R


@attrs.frozen
class Say:
    who: str
    text: str


@attrs.frozen
class Join(otp.Call[int]):
    """Answered with the number of members."""

    who: str


@attrs.frozen
class Lines(otp.Call[list[str]]):
    """Answered with what was said."""


RoomMessage = Say | Join | Lines


@attrs.define
class Book:
    """What must survive the room lives outside it: here in memory, in earnest in a database."""

    members: set[str] = attrs.field(factory=set[str])
    lines: list[str] = attrs.field(factory=list[str])


class BadWordError(Exception):
    """The room's bug: it cannot stand some words."""


@attrs.define(eq=False)
class Room(otp.Actor[RoomMessage]):
    """Room: who is in, and what was said.

    Owns       nothing that may be lost; the book outlives it.
    Receives   Say, Join, Lines             from anybody.
    Sends      Say                          to the audience.
    If it dies the message it was working on is lost; those behind it are kept.
    """

    book: Book
    audience: otp.Address[Say]

    async def handle(self, msg: RoomMessage) -> None:
        match msg:
            case Say():
                if "segfault" in msg.text:
                    raise BadWordError(msg.text)
                self.book.lines.append(f"{msg.who}: {msg.text}")
                self.audience.cast(msg)  # a hint: whoever is slow misses it, and it is counted
            case Join():
                self.book.members.add(msg.who)
                msg.reply(len(self.book.members))
            case Lines():
                msg.reply(list(self.book.lines))
            case _:
                assert_never(msg)


@attrs.define(eq=False)
class Audience(otp.Actor[Say]):
    """Audience: reads in batches, and tells in the end how many lines it heard."""

    heard: int = 0

    async def run(self) -> None:
        while True:
            batch = await self.mailbox.receive_many(10)
            self.heard += len(batch)

    async def terminate(self, reason: otp.ExitReason) -> None:
        print(f"the audience heard {self.heard} lines ({reason})")


async def bot(room: otp.Address[RoomMessage], name: str) -> None:
    """A guest: joins (waits if the room is just restarting), says three things, leaves."""
    await room.call(Join(name), on_down="wait")
    for text in ("hello", "segfault!" if name == "eve" else "how are you", "bye"):
        await trio.sleep(0.01)
        await room.send(Say(name, text))


def report(task: otp.PoolTask, reason: otp.ExitReason) -> None:
    """Every guest's end, told once."""
    print(f"{task.key} left ({reason})")


async def main() -> None:
    book = Book()
    room = otp.Address[RoomMessage]("room", capacity=100, keep=True)
    audience = otp.Address[Say]("audience", capacity=100, keep=True)
    guests = otp.Pool("guests", slots=2, on_exit=report)

    # The tree, in start order. Stopped backwards: guests leave first, the room is the last.
    tree = otp.Supervisor(
        "chat",
        [
            otp.Supervisor(
                "hall",
                [
                    otp.ActorChild(room, lambda: Room(book, audience)),
                    otp.ActorChild(audience, Audience),  # counts one room's lines: restarts with it
                ],
                strategy="rest_for_one",
            ),
            otp.PoolChild(guests, shutdown=2),  # not in the hall: a crash of the room spares the guests
        ],
    )
    async with otp.open_tree(tree) as running:
        for name in ("ada", "eve", "kay"):
            await guests.wait_free()
            guests.start_nowait(bot, room, name, key=name)
        await guests.drain(timeout=2)
        for line in sorted(await room.call(Lines(), on_down="wait")):
            print(line)
        print(running.snapshot().render())


if __name__ == "__main__":
    logging.basicConfig(level=logging.CRITICAL)  # the crash would be logged with its traceback
    trio.run(main)
